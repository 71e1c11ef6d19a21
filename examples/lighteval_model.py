"""A model for lighteval that a gateway serves: tasks with choices, and tasks with generated texts.

    pip install lighteval==0.13.0 openai 'xxhash<4'
    export OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none
    lighteval custom smollm2 examples/lighteval_model.py "arc:easy|0"

The gateway is `lmpool http`; if it has a token, the token is the API key. Texts are tokenized in the same
way as by lighteval's models of transformers, with the tokenizer from the folder or the hub name of the served model.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lighteval.models.abstract_model import LightevalModel
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.prompt_manager import PromptManager
from lighteval.utils.cache_management import SampleCache
from openai import OpenAI
from transformers import AutoTokenizer

MAX_IN_FLIGHT = 32
"""Number of concurrent requests, enough to fill the batch of a worker."""


class GatewayModel(LightevalModel):  # type: ignore[misc]  # lighteval has no types.
    """A model of the gateway at `OPENAI_BASE_URL`. `config` has the model's name, and the system prompt if any."""

    add_special_tokens = False
    max_length = 0

    def __init__(self, config: Any) -> None:
        self.config = config
        self._client = OpenAI(timeout=600, max_retries=8)
        served = self._client.models.retrieve(config.model_name).model_dump()
        self.max_length = served["max_model_len"]
        self._tokenizer = AutoTokenizer.from_pretrained(served["root"])
        self.prompt_manager = PromptManager(system_prompt=config.system_prompt)
        self._cache = SampleCache(config)  # lighteval needs this attribute; no method here uses the cache.

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the served model."""
        return self._tokenizer

    def loglikelihood(self, docs: list[Any]) -> list[Any]:
        """The log-probability of each choice of each question."""
        return self._map(self._score, docs)

    def greedy_until(self, docs: list[Any]) -> list[Any]:
        """Continuations of prompts: the most likely tokens, or samples at temperature 1 if the task wants several."""
        return self._map(self._generate, docs)

    def loglikelihood_rolling(self, docs: list[Any]) -> list[Any]:
        """Not available: tasks about whole texts, such as perplexity."""
        raise NotImplementedError("for the perplexity of texts use lm-evaluation-harness or examples/perplexity.py")

    def _map(self, request: Callable[[Any], Any], docs: list[Any]) -> list[Any]:
        with ThreadPoolExecutor(MAX_IN_FLIGHT) as threads:
            return list(threads.map(request, docs))

    def _score(self, doc: Any) -> Any:
        question = self.prompt_manager.prepare_prompt(doc)
        contexts, choices = self.tok_encode_pair(question, doc.choices, pairwise=True)
        prompts = [(context + choice)[-self.max_length :] for context, choice in zip(contexts, choices, strict=True)]
        found = self._complete(prompts, max_tokens=0, extra_body={"prompt_logprobs": 1})
        logprobs, is_greedy = [], []
        for scored, choice in zip(found, choices, strict=True):
            places = scored.prompt_logprobs[-len(choice) :]
            entries = [place[str(token)] for place, token in zip(places, choice, strict=True)]
            logprobs.append(sum(entry["logprob"] for entry in entries))
            is_greedy.append(all(entry["rank"] == 1 for entry in entries))
        tokens = {"input_tokens": contexts[0], "output_tokens": choices}
        return ModelResponse(logprobs=logprobs, argmax_logits_eq_gold=is_greedy, **tokens)

    def _generate(self, doc: Any) -> Any:
        ids = self.tok_encode(self.prompt_manager.prepare_prompt(doc))[1 - self.max_length :]
        length = min(doc.generation_size or self.max_length // 2, self.max_length - len(ids))
        how = {"max_tokens": length, "n": doc.num_samples, "temperature": float(doc.num_samples > 1)}
        stop = list(doc.stop_sequences or [])
        found = self._complete(ids, stop=stop, seed=0, **how)
        return ModelResponse(text=[choice.text for choice in found], input_tokens=ids)

    def _complete(self, prompt: Any, **how: Any) -> list[Any]:
        found = self._client.completions.create(model=self.config.model_name, prompt=prompt, **how)
        return list(found.choices)
