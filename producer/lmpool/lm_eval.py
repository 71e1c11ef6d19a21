"""lm-evaluation-harness on a pool: the model `lmpool`, and lm-eval's command with it, `python -m lmpool.lm_eval`.

Texts become tokens, and are cut, as lm-eval's own model `hf` does it, so that both give the same numbers.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lmpool.cli import say
from lmpool.errors import LMPoolError, PromptTooLong, SettingsError
from lmpool.producer.sync import SyncProducer
from lmpool.producer.tokenizer import end_tokens, load_tokenizer, read_tokenizer
from lmpool.protocol.query import MAX_SEED, TopK
from lmpool.settings import shown

try:
    from jinja2.exceptions import TemplateError
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import (
        handle_stop_sequences,
        has_bos_prefix,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm  # type: ignore[import-untyped]
except ImportError as error:
    raise ImportError(
        f"lmpool.lm_eval needs lm-eval 0.4.10 or newer: pip install 'lmpool[lm-eval]' ({error})"
    ) from error

T = TypeVar("T")
R = TypeVar("R")

# Below lm-eval's own, whose log is set up.
_log = logging.getLogger("lm_eval.models.lmpool")

_IN_FLIGHT = 64
# Tokens of a continuation between two looks for what ends it: its text, that workers do not see.
_PIECE = 32
# Continuations of one context that are asked one after the other: the options of a question, with room to spare.
_OPTIONS = 16
# What a token must score to be the likeliest in any case: a little more than ln 1/2.
_SURELY_LIKELIEST = -0.69
# Arguments that nobody needs to give, or can.
_NOT_OURS = {"max_batch_size", "device", "unknown", "return"}
# What lm-eval's command gives where nobody has named a device.
_ANY_DEVICE = "cuda:0"
# What tells only of how tokens are drawn.
_OF_DRAWS = {"top_p", "top_k", "min_p", "typical_p"}


class _Pair(NamedTuple):
    """A continuation to be scored, and what it follows.

    Attributes:
        key: what lm-eval caches the answer by, or None.
        context: token ids, at least one.
        continuation: token ids, at least one.
    """

    key: tuple[str, str] | None
    context: list[int]
    continuation: list[int]


class _Growing(NamedTuple):
    """What a generation request asks for.

    Attributes:
        most: so many tokens at most.
        until: texts that end it.
        windows: each of these texts, and among how many of the last tokens it is looked for.
        temperature: as `Producer.generate`.
        top_p: as `Producer.generate`.
    """

    most: int
    until: list[str]
    windows: list[tuple[str, int]]
    temperature: float
    top_p: float


@register_model("lmpool")
class LmpoolLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types.
    """A model that a pool serves.

    Args:
        name: of the served model; None for the only one that is served.
        redis: URL of the server, as `Producer` takes it.
        prefix: prefix of the pool's Redis keys.
        adapter: one of the model's adapters; "" for none.
        timeout: seconds that each request may take.
        priority: "bulk" for requests that yield to those of all other clients, as `Producer` takes it.
        tokenizer: hub name or folder of the tokenizer; None for the served model's.
        max_length: most tokens that the model is given; None for the longest prompt that the pool takes.
        max_gen_toks: tokens of a continuation, unless the task says otherwise.
        batch_size: requests in flight at once. "auto", and lm-eval's default of 1, stand for 64.
        seed: of what is drawn, when a task samples; the i-th request is drawn with `seed` + i * 2**32.
        add_bos_token: whether texts begin with the tokenizer's special tokens; None for as the tokenizer has it.
        prefix_token_id: what the first token of a text is scored after; None for the tokenizer's BOS, or else EOS.
        think_end_token: a text up to whose last occurrence continuations are left out.
        chat_template_args: further arguments of the chat template.
        trust_remote_code: whether the tokenizer may run code that comes with it.
        max_batch_size: of no use here; lm-eval's command line gives it.
        device: as `max_batch_size`.
        unknown: refused.

    Raises:
        SettingsError: an argument is unknown or malformed, or there is no tokenizer.
        UnknownModel, AmbiguousModel, ServerError: as `Producer.open`.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        redis: str | None = None,
        prefix: str = "lmpool",
        adapter: str = "",
        timeout: float = 600.0,
        priority: Literal["interactive", "bulk"] = "interactive",
        tokenizer: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str = "auto",
        seed: int = 1234,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | None = None,
        chat_template_args: dict[str, Any] | None = None,
        trust_remote_code: bool = False,
        max_batch_size: int | None = None,
        device: str | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            known = [name for name in LmpoolLM.__init__.__annotations__ if name not in _NOT_OURS]
            raise SettingsError(f"{min(unknown)}: not an argument of the model lmpool; there are {', '.join(known)}")
        chosen = None if device == _ANY_DEVICE else device
        for given, value in (("max_batch_size", max_batch_size), ("device", chosen)):
            if value is not None:
                _log.warning("%s=%s: has no effect, the pool's workers decide", given, value)
        self._in_flight = _read_batch_size(batch_size)
        _check_whole("max_gen_toks", max_gen_toks, 1)
        _check_whole("seed", seed, 0, MAX_SEED)
        self.max_gen_toks = max_gen_toks
        self._seed = seed
        self._think_end_token = think_end_token
        self._chat_template_args = chat_template_args or {}
        self._adapter = adapter
        self._producer = SyncProducer(
            name, redis=redis, prefix=prefix, timeout=timeout, priority=priority, keep_answers=False
        )
        info = self._info = self._producer.model
        if max_length is not None:
            _check_whole("max_length", max_length, 1, info.max_prompt_tokens)
        self.max_length = max_length or info.max_prompt_tokens
        settings: dict[str, Any] = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
        settings["trust_remote_code"] = trust_remote_code
        self.tokenizer: Any = _tokenizer_of(info, tokenizer, settings)
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        ends = [self.eot_token_id, *end_tokens(tokenizer or info.source)]
        self._ends = {token for token in ends if token is not None and token < info.vocab_size}

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's EOS."""
        token: int = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        """What the first token of a text is scored after."""
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        token: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if token is None else token

    @property
    def tokenizer_name(self) -> str:
        """Under which name lm-eval keeps requests that were made with this tokenizer."""
        name: str = self.tokenizer.name_or_path
        return name.replace("/", "__")

    def get_model_info(self) -> dict[str, str]:
        """What lm-eval writes beside its results."""
        info = self._info
        return {
            "model_name": info.name,
            "model_dtype": info.dtype,
            "model_revision": info.revision,
            "model_fingerprint": info.fingerprint,
        }

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """See `lm_eval.api.model.LM.apply_chat_template`."""

        def applied(history: list[dict[str, str]]) -> str:
            text: str = self.tokenizer.apply_chat_template(
                history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **self._chat_template_args,
            )
            return text

        try:
            return applied(chat_history)
        except TemplateError:
            _log.warning("the chat template failed: applying it without messages of the system role")
            return applied([message for message in chat_history if message["role"] != "system"])

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """See `lm_eval.api.model.TemplateLM.tok_encode`."""
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        return self._encode(string, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool | None) -> list[int]:
        if add_special_tokens is None:
            add_special_tokens = self._add_bos_token
        settings = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids: list[int] = self.tokenizer.encode(text, **settings)
        return ids

    def _each(self, description: str, ask: Callable[[T], R], items: Sequence[T], disable_tqdm: bool) -> Iterator[R]:
        """The answers, in order, of as many requests in flight as there may be; the first failure ends all."""
        with ThreadPoolExecutor(self._in_flight, "lmpool-lm-eval") as threads:
            answers = threads.map(ask, items)
            try:
                yield from tqdm(answers, total=len(items), disable=disable_tqdm, desc=f"Running {description} requests")
            except KeyboardInterrupt:
                # Whoever presses Ctrl-C would wait for the requests in flight.
                self._producer.close()
                raise

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        questions = _by_context([self._fitting(_Pair(*request)) for request in requests])
        answers = []
        found = self._each("loglikelihood", self._answers, questions, disable_tqdm)
        for pairs, answered in zip(questions, found, strict=True):
            for pair, answer in zip(pairs, answered, strict=True):
                self.cache_hook.add_partial("loglikelihood", pair.key, answer)
                answers.append(answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """See `lm_eval.api.model.LM.loglikelihood_rolling`."""
        numbers, pairs = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                numbers.append(number)
                pairs.append(_Pair(None, *make_disjoint_window(window)))
        totals = [0.0] * len(requests)
        scores = self._each("loglikelihood_rolling", self._scores, pairs, disable_tqdm)
        for number, found in zip(numbers, scores, strict=True):
            totals[number] += float(found.sum(dtype=np.float64))
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """See `lm_eval.api.model.LM.generate_until`."""
        wanted = [(number, request.args[0], self._read(request.args[1])) for number, request in enumerate(requests)]
        texts = []
        answers = self._each("generate_until", lambda item: self._generate(*item), wanted, disable_tqdm)
        for request, text in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
            texts.append(text)
        return texts

    def _fitting(self, pair: _Pair) -> _Pair:
        """A pair whose context is cut from the left where the model does not take all of it."""
        key, context, continuation = pair
        if len(continuation) > self.max_length:
            raise PromptTooLong(
                f"a continuation of {len(continuation)} tokens: the model is given {self.max_length} at most"
            )
        excess = len(context) + len(continuation) - self.max_length - 1
        if excess <= 0:
            return pair
        _log.warning("%d tokens of a context are left out: the model is given %d at most", excess, self.max_length)
        return _Pair(key, context[excess:], continuation)

    def _answers(self, pairs: list[_Pair]) -> list[tuple[float, bool]]:
        """What each continuation of a context scores, and whether it is what the model would say."""
        context = pairs[0].context
        # Asked at most once for all of them, and only when scores do not tell.
        first = cache(lambda: self._likeliest(context, len(context) - 1))
        answers = []
        for pair in pairs:
            scores = self._scores(pair)
            answers.append((float(scores.sum(dtype=np.float64)), self._is_greedy(pair, scores, first)))
        return answers

    def _scores(self, pair: _Pair) -> NDArray[np.float32]:
        """What each token of a continuation scores, float32 (m,)."""
        _, context, continuation = pair
        if len(context) + len(continuation) <= self._info.max_prompt_tokens:
            return self._producer.score(context, continuation, adapter=self._adapter)
        # With its last token it is longer than prompts are, by that one: this is an entry of the row of all others.
        ids, last = context + continuation[:-1], continuation[-1:]
        entry = self._producer.positions(ids, len(ids) - 1, targets=last, adapter=self._adapter)
        assert isinstance(entry, np.ndarray)
        others = [self._producer.score(context, continuation[:-1], adapter=self._adapter)] if continuation[1:] else []
        return np.concatenate([*others, entry[0]])

    def _is_greedy(self, pair: _Pair, scores: NDArray[np.float32], first: Callable[[], list[int]]) -> bool:
        """Whether each token of a continuation is the likeliest.

        Scores do not tell, so it is asked, on the keys and values that the workers keep of the same tokens. Most
        continuations are told by their first token, which is asked with `first`.
        """
        _, context, continuation = pair
        if scores.min() > _SURELY_LIKELIEST:
            return True
        if first() != continuation[:1]:
            return False
        ids = context + continuation[:-1]
        return len(continuation) == 1 or self._likeliest(ids, len(context)) == continuation[1:]

    def _likeliest(self, ids: list[int], start: int) -> list[int]:
        """The likeliest token behind each position from `start` on."""
        best = self._producer.positions(ids, start, top=1, adapter=self._adapter)
        assert isinstance(best, TopK)
        tokens: list[int] = best.ids[:, 0].tolist()
        return tokens

    def _read(self, gen_kwargs: dict[str, Any]) -> _Growing:
        """What a request's arguments ask for."""
        arguments = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        eos = None if self.eot_token_id is None else self.tokenizer.decode(self.eot_token_id)
        until = handle_stop_sequences(arguments.pop("until", None), eos)
        most, temperature = arguments.pop("max_gen_toks"), arguments.pop("temperature", 0.0)
        del arguments["do_sample"]
        top_p = arguments.pop("top_p", 1.0) if temperature else 1.0
        if unknown := arguments.keys() - (set() if temperature else _OF_DRAWS):
            raise SettingsError(
                f"{min(unknown)}: not done by a pool; there are until, max_gen_toks, do_sample, temperature and top_p"
            )
        if most >= self.max_length:
            raise SettingsError(
                f"max_gen_toks: {most} must be less than the {self.max_length} tokens that the model is given"
            )
        # As `hf` does: a text may be made of other tokens than the tokenizer makes of it, of a few more.
        windows = [(text, len(self._encode(text, False)) + 2) for text in until if text]
        return _Growing(most, until, windows, temperature, top_p)

    def _generate(self, number: int, context: str, wanted: _Growing) -> str:
        """A continuation, in pieces."""
        is_marked = has_bos_prefix(context, self.tokenizer.bos_token)
        ids = self._encode(context, False if is_marked else None)[wanted.most - self.max_length :]
        ids = ids or [self.prefix_token_id]
        # Most of what ends a text is made of these tokens: workers need not go on after them.
        stop = [*([token] for token in self._ends), *(self._encode(text, False) for text, _ in wanted.windows)]
        made: list[int] = []
        end = None
        while end is None and len(made) < wanted.most:
            # As one request for all would draw them. Without draws seeds do not matter, and answers can be shared.
            seed = (self._seed + (number << 32) + len(made)) & MAX_SEED if wanted.temperature else 0
            (piece,) = self._producer.generate(
                ids + made,
                min(_PIECE, wanted.most - len(made)),
                temperature=wanted.temperature,
                top_p=wanted.top_p,
                seed=seed,
                stop=[tokens for tokens in stop if tokens],
                adapter=self._adapter,
            )
            begin = len(made)
            made += piece.ids.tolist()
            end = self._end(made, begin, wanted.windows)
        text = self.tokenizer.decode(made[:end], skip_special_tokens=True)
        finished: str = postprocess_generated_text(text, wanted.until, self._think_end_token)
        return finished

    def _end(self, made: list[int], begin: int, windows: list[tuple[str, int]]) -> int | None:
        """Behind how many tokens a continuation has come to its end; None if it has not. Before `begin` it has not."""
        for end in range(begin + 1, len(made) + 1):
            if made[end - 1] in self._ends:
                return end
            for text, count in windows:
                if text in self.tokenizer.decode(made[max(0, end - count) : end]):
                    return end
        return None


def _tokenizer_of(info: Any, source: str | None, settings: dict[str, Any]) -> Any:
    otherwise = "name one of this machine: tokenizer=<folder>"
    if source is None:
        return load_tokenizer(info, "tokenizer", otherwise, **settings)
    return read_tokenizer(source, option="tokenizer", otherwise=otherwise, **settings)


def _by_context(pairs: list[_Pair]) -> list[list[_Pair]]:
    """Pairs in order, those of one context that follow each other together, `_OPTIONS` at most."""
    questions = [list(group) for _, group in groupby(pairs, key=lambda pair: pair.context)]
    return [pairs[at : at + _OPTIONS] for pairs in questions for at in range(0, len(pairs), _OPTIONS)]


def _read_batch_size(batch_size: Any) -> int:
    """Requests in flight at once."""
    text = str(batch_size)
    if text == "1" or text.partition(":")[0] == "auto":
        return _IN_FLIGHT
    if not text.isdecimal() or int(text) < 1:
        raise SettingsError(f"batch_size: {shown(batch_size)} must be a whole number of at least 1, or 'auto'")
    return int(text)


def _check_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    if type(value) is not int or value < least or (most is not None and value > most):
        limit = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise SettingsError(f"{name}: {shown(value)} must be a whole number {limit}")


def main() -> None:
    """Run lm-eval's command; errors of the pool are one line and exit code 2."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except LMPoolError as error:
        say(f"lmpool: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
