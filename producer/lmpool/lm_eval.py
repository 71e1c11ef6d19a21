"""Run lm-evaluation-harness (lm-eval) on a pool: its model `lmpool`, and its command as `python -m lmpool.lm_eval`.

Texts are tokenized and cut as in lm-eval's own model `hf`, so that both models return the same numbers.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import groupby
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lmpool.cli import say
from lmpool.errors import LMPoolError, PromptTooLong, SettingsError
from lmpool.producer.sync import SyncProducer
from lmpool.producer.tokenizer import end_tokens, load_tokenizer, read_tokenizer
from lmpool.protocol.query import MAX_SEED
from lmpool.settings import check_known, check_number

try:
    from jinja2.exceptions import TemplateError
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models import utils
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm  # type: ignore[import-untyped]
except ImportError as error:
    raise ImportError(f"lmpool.lm_eval needs lm-eval>=0.4.10: pip install 'lmpool[lm-eval]' ({error})") from error

_Pair = tuple[Any, list[int], list[int]]
"""lm-eval's key of a request (or None), the token ids of the context and of the continuation, at least one id each."""

_Generation = tuple[int, list[str], list[tuple[str, int]], dict[str, float]]
"""Max tokens, texts that end a continuation, the same texts with the number of last tokens to search, and sampling."""

_log = logging.getLogger("lm_eval.models.lmpool")  # A child of lm-eval's logger, which lm-eval configures.

_CONCURRENCY = 64  # Default number of concurrent requests: enough to fill the batch of a worker.
_PIECE = 32  # Tokens per request of a continuation. After each request, the new text is checked for stop texts.
_MAX_OPTIONS = 16  # Max continuations of one context that one thread requests; most questions have fewer.
# A token with a higher log-probability is the most likely token: the value is ln 1/2, rounded up.
_CERTAINLY_FIRST = -0.69
_DEFAULT_DEVICE = "cuda:0"  # The device that lm-eval's command passes by default.
_SAMPLING_OPTIONS = {"top_p", "top_k", "min_p", "typical_p"}  # Options that have no effect at temperature 0.


@register_model("lmpool")
class LmpoolLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types.
    """A model that a pool serves.

    Args:
        name: name of the served model; None for the only served model.
        redis: URL of the server, as `Producer` takes it.
        prefix: prefix of the pool's Redis keys.
        adapter: one of the model's adapters; "" for none.
        timeout: max seconds of each request.
        priority: "bulk" for requests that yield to requests of other clients, as `Producer` takes it.
        tokenizer: hub name or folder of the tokenizer; None for the tokenizer of the served model.
        max_length: max tokens of a prompt; None for the limit of the served model.
        max_gen_toks: max tokens of a continuation if the task sets no limit.
        batch_size: number of concurrent requests. "auto" and lm-eval's default of 1 mean 64.
        seed: seed for tasks that sample; the i-th request uses `seed` + i * 2**32.
        add_bos_token: whether texts begin with the tokenizer's special tokens; None for the tokenizer's default.
        prefix_token_id: token before the first token of a text; None for the tokenizer's BOS, or else EOS.
        think_end_token: text that ends a model's reasoning; the continuation is cut up to its last occurrence.
        chat_template_args: more arguments of the chat template.
        trust_remote_code: whether code in the tokenizer's repository may run.
        unknown: `max_batch_size` and `device` have no effect, but lm-eval's command passes them; others are refused.

    Raises:
        SettingsError: an argument is unknown or malformed, or there is no tokenizer.
        UnknownModel, AmbiguousModel, ServerError: as for `Producer.open`.
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
        **unknown: Any,
    ) -> None:
        super().__init__()
        for given in ("max_batch_size", "device"):
            if (value := unknown.pop(given, None)) not in (None, _DEFAULT_DEVICE):
                _log.warning("%s=%s: has no effect, the pool's workers decide", given, value)
        known = [name for name in LmpoolLM.__init__.__annotations__ if name not in ("unknown", "return")]
        check_known(unknown, known, "an argument of the model lmpool")
        text, self._concurrency = str(batch_size), _CONCURRENCY
        if text != "1" and text.partition(":")[0] != "auto":
            number = int(text) if text.isdecimal() else batch_size
            self._concurrency = check_number("batch_size", number, least=1, note=", or 'auto'")
        self.max_gen_toks: int = check_number("max_gen_toks", max_gen_toks, least=1)
        self._seed: int = check_number("seed", seed, least=0, most=MAX_SEED)
        self._adapter, self._think_end_token = adapter, think_end_token
        self._chat_template_args = chat_template_args or {}
        where: dict[str, Any] = {"redis": redis, "prefix": prefix, "timeout": timeout, "priority": priority}
        self._producer = SyncProducer(name, keep_answers=False, **where)
        info = self._info = self._producer.model
        self.max_length = info.max_prompt_tokens if max_length is None else max_length
        check_number("max_length", self.max_length, least=1, most=info.max_prompt_tokens)
        how: dict[str, Any] = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
        how |= {"option": "tokenizer", "otherwise": "name one of this machine: tokenizer=<folder>"}
        how |= {"trust_remote_code": trust_remote_code}
        self.tokenizer: Any = load_tokenizer(info, **how) if tokenizer is None else read_tokenizer(tokenizer, **how)
        self._add_bos_token, self._prefix_token_id = add_bos_token, prefix_token_id
        ends = [self.eot_token_id, *end_tokens(tokenizer or info.source)]
        self._ends = {token for token in ends if token is not None and token < info.vocab_size}

    @property
    def eot_token_id(self) -> Any:
        """The id of the tokenizer's EOS token; None if the tokenizer has none."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before the first token of a text."""
        candidates = (self._prefix_token_id, self.tokenizer.bos_token_id)
        return int(next((token for token in candidates if token is not None), self.eot_token_id))

    @property
    def tokenizer_name(self) -> str:
        """The name under which lm-eval caches the requests whose texts this tokenizer has encoded."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, str]:
        """Fields that lm-eval writes next to its results."""
        names = ("name", "dtype", "revision", "fingerprint")
        return {f"model_{name}": getattr(self._info, name) for name in names}

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """See `lm_eval.api.model.LM.apply_chat_template`."""
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        options |= {"continue_final_message": not add_generation_prompt, **self._chat_template_args}
        try:
            return str(self.tokenizer.apply_chat_template(chat_history, **options))
        except TemplateError:
            _log.warning("the chat template failed: applying it without messages of the system role")
            without = [message for message in chat_history if message["role"] != "system"]
            return str(self.tokenizer.apply_chat_template(without, **options))

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """See `lm_eval.api.model.TemplateLM.tok_encode`."""
        if add_special_tokens is None and utils.has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        return self._encode(string, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool | None) -> list[int]:
        added = self._add_bos_token if add_special_tokens is None else add_special_tokens
        return list(self.tokenizer.encode(text, **({} if added is None else {"add_special_tokens": added})))

    def _map(self, kind: str, request: Callable[[Any], Any], items: Sequence[Any], disable_tqdm: bool) -> Iterator[Any]:
        """Yield the results of concurrent requests, in order. The first failure ends all requests."""
        with ThreadPoolExecutor(self._concurrency, "lmpool-lm-eval") as threads:
            results = threads.map(request, items)
            try:
                yield from tqdm(results, total=len(items), disable=disable_tqdm, desc=f"Running {kind} requests")
            except KeyboardInterrupt:
                self._producer.close()  # Without this, the program would wait for the requests in flight.
                raise

    def _loglikelihood_tokens(
        self, requests: list[_Pair], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        contexts = [list(group) for _, group in groupby(map(self._fit, requests), key=lambda pair: pair[1])]
        groups = [pairs[at : at + _MAX_OPTIONS] for pairs in contexts for at in range(0, len(pairs), _MAX_OPTIONS)]
        results = []
        for pairs, found in zip(groups, self._map("loglikelihood", self._score, groups, disable_tqdm), strict=True):
            for pair, result in zip(pairs, found, strict=True):
                self.cache_hook.add_partial("loglikelihood", pair[0], result)
                results.append(result)
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """See `lm_eval.api.model.LM.loglikelihood_rolling`."""
        pairs: list[_Pair] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            rolled = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            pairs += [(number, *make_disjoint_window(window)) for window in rolled]
        totals = [0.0] * len(requests)
        found = self._map("loglikelihood_rolling", self._logprobs, pairs, disable_tqdm)
        for (number, _, _), logprobs in zip(pairs, found, strict=True):
            totals[number] += float(logprobs.sum(dtype=np.float64))
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """See `lm_eval.api.model.LM.generate_until`."""
        wanted = [(number, request.args[0], self._read(request.args[1])) for number, request in enumerate(requests)]
        texts = []
        found = self._map("generate_until", lambda item: self._generate(*item), wanted, disable_tqdm)
        for request, text in zip(requests, found, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
            texts.append(text)
        return texts

    def _fit(self, pair: _Pair) -> _Pair:
        """Cut a context from the left if the pair is too long."""
        key, context, continuation = pair
        if len(continuation) > self.max_length:
            raise PromptTooLong(f"a continuation has {len(continuation)} tokens; the limit is {self.max_length}")
        excess = len(context) + len(continuation) - self.max_length - 1
        if excess <= 0:
            return pair
        _log.warning("leaving out %d tokens of a context: the limit is %d", excess, self.max_length)
        return key, context[excess:], continuation

    def _score(self, pairs: list[_Pair]) -> list[tuple[float, bool]]:
        """The log-probability of each continuation of one context, and whether all its tokens are the most likely."""
        context = pairs[0][1]
        # Request the most likely first token once for all continuations, and only if log-probabilities do not decide.
        first = cache(lambda: self._most_likely(context, len(context) - 1))
        results = []
        for pair in pairs:
            logprobs, continuation = self._logprobs(pair), pair[2]
            is_greedy = bool(logprobs.min() > _CERTAINLY_FIRST)
            # Compare first tokens before requesting more: most less likely continuations differ in the first token.
            if not is_greedy and first() == continuation[:1]:
                rest = continuation[1:]
                is_greedy = not rest or self._most_likely(context + continuation[:-1], len(context)) == rest
            results.append((float(logprobs.sum(dtype=np.float64)), is_greedy))
        return results

    def _logprobs(self, pair: _Pair) -> NDArray[np.float32]:
        """The log-probability of each token of a continuation, float32 (m,)."""
        _, context, continuation = pair
        if len(context) + len(continuation) <= self._info.max_prompt_tokens:
            return self._producer.score(context, continuation, adapter=self._adapter)
        # The pair is one token too long for a prompt, so read the last log-probability from a row.
        ids, last = context + continuation[:-1], continuation[-1:]
        entry = self._producer.positions(ids, len(ids) - 1, targets=last, adapter=self._adapter).targets
        assert entry is not None
        others = [self._producer.score(context, continuation[:-1], adapter=self._adapter)] if continuation[1:] else []
        return np.concatenate([*others, entry[0]])

    def _most_likely(self, ids: list[int], start: int) -> list[int]:
        """The most likely next token at each position from `start` on."""
        best = self._producer.positions(ids, start, top=1, adapter=self._adapter).top
        assert best is not None
        return list(best.ids[:, 0].tolist())

    def _read(self, gen_kwargs: dict[str, Any]) -> _Generation:
        arguments = dict(utils.normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        eos = None if self.eot_token_id is None else self.tokenizer.decode(self.eot_token_id)
        until = utils.handle_stop_sequences(arguments.pop("until", None), eos)
        max_tokens, temperature = arguments.pop("max_gen_toks"), arguments.pop("temperature", 0.0)
        del arguments["do_sample"]
        sampling = {"temperature": temperature, "top_p": arguments.pop("top_p", 1.0) if temperature else 1.0}
        if unknown := arguments.keys() - (set() if temperature else _SAMPLING_OPTIONS):
            known = "until, max_gen_toks, do_sample, temperature and top_p"
            raise SettingsError(f"{min(unknown)}: a pool does not support it; there are {known}")
        if max_tokens >= self.max_length:
            raise SettingsError(f"max_gen_toks: {max_tokens} must be less than max_length, {self.max_length} tokens")
        # Search two more tokens, as lm-eval's `hf` does: a model may write a text in more tokens than the tokenizer.
        windows = [(text, len(self._encode(text, False)) + 2) for text in until if text]
        return max_tokens, until, windows, sampling

    def _generate(self, number: int, context: str, wanted: _Generation) -> str:
        """Return a continuation, requested in pieces of `_PIECE` tokens."""
        max_tokens, until, windows, sampling = wanted
        has_bos = utils.has_bos_prefix(context, self.tokenizer.bos_token)
        ids = self._encode(context, False if has_bos else None)[max_tokens - self.max_length :]
        ids = ids or [self.prefix_token_id]
        # Workers stop at the tokens of a text that ends the continuation, but other tokens may form the same text.
        stop = [*([token] for token in self._ends), *(self._encode(text, False) for text, _ in windows)]
        stop = list(filter(None, stop))
        made: list[int] = []
        end = None
        while end is None and len(made) < max_tokens:
            # Draw the tokens that one request for all tokens would draw. With temperature 0, equal seeds share results.
            seed = (self._seed + (number << 32) + len(made)) & MAX_SEED if sampling["temperature"] else 0
            begin, size = len(made), min(_PIECE, max_tokens - len(made))
            options: dict[str, Any] = {**sampling, "seed": seed, "stop": stop, "adapter": self._adapter}
            (piece,) = self._producer.generate(ids + made, size, **options)
            made += piece.ids.tolist()
            for at in range(begin + 1, len(made) + 1):
                texts = (text in self.tokenizer.decode(made[max(0, at - last) : at]) for text, last in windows)
                if made[at - 1] in self._ends or any(texts):
                    end = at
                    break
        text = self.tokenizer.decode(made[:end], skip_special_tokens=True)
        return str(utils.postprocess_generated_text(text, until, self._think_end_token))


def main() -> None:
    """Run lm-eval's command. After an error of the pool, print the error in one line and exit with code 2."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except LMPoolError as error:
        say(f"lmpool: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
