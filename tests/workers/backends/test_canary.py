"""The canary: a worker joins the pool only if its backend's first rows are correct; errors name the fault."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lmpool.errors import SettingsError
from lmpool.protocol.job import decode_ids
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import Encoding, RowBlock, VectorBlock
from lmpool.workers.backends import engines
from lmpool.workers.backends.engines import check_canary
from lmpool.workers.backends.synthetic import SyntheticBackend, SyntheticSettings
from lmpool.workers.execution.contract import BackendJob, Finished

V = 64

Rows = NDArray[np.float32]


class Rowed(SyntheticBackend):
    """A backend that answers no positions queries."""

    @property
    def info(self) -> ModelInfo:
        return replace(super().info, positions=False)


class Faulty(Rowed):
    """A backend with wrong rows: the function `spoil` changes the result of each step."""

    def __init__(self, spoil: Callable[[Finished], Finished], **settings: Any) -> None:
        super().__init__(replace(SyntheticSettings(name="syn", vocab_size=V), **settings))
        self._spoil = spoil

    def step(self) -> Finished:
        return self._spoil(super().step())


def changing(change: Callable[[Rows], Rows]) -> Callable[[Finished], Finished]:
    """A function for `spoil` that applies `change` to the rows of each block, float32 of shape (n, V)."""

    def spoil(finished: Finished) -> Finished:
        blocks = [
            RowBlock(block.digests, np.ascontiguousarray(change(block.numbers)), None, Encoding.F32)
            for block in finished.blocks
        ]
        return Finished(blocks, finished.failures)

    return spoil


def normalised(rows: Rows) -> Rows:
    totals: Rows = np.logaddexp.reduce(rows, axis=1, keepdims=True)
    return rows - totals


def noisy(share: float) -> Callable[[Rows], Rows]:
    """A change that adds noise, different at each call; its standard deviation is `share` times that of the rows."""
    generator = np.random.default_rng(0)
    return lambda rows: normalised(rows + generator.normal(0, share * rows.std(), rows.shape).astype(np.float32))


# Backends that pass the canary


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"encoding": "bf16"},
        {"max_batch": 1},
        {"max_batch": 2},
        {"vocab_size": 1},
        {"vocab_size": 2},
        {"vocab_size": 5},
        {"vocab_size": 50_257},
        {"max_prompt_tokens": 1},
        {"max_prompt_tokens": 2},
        {"vocab_size": 1, "max_prompt_tokens": 1},
    ],
    ids=str,
)
def test_a_correct_backend_passes_and_holds_no_prompts_afterwards(settings: dict[str, Any]) -> None:
    backend = SyntheticBackend(replace(SyntheticSettings(vocab_size=V), **settings))
    room = backend.capacity()
    check_canary(backend)
    assert backend.capacity() == room


@pytest.mark.parametrize("vocab_size", [1, 7, 8])
def test_the_model_accepts_the_prompts(vocab_size: int) -> None:
    asked: list[NDArray[np.uint32]] = []

    class Watched(SyntheticBackend):
        def step(self) -> Finished:
            asked.extend(decode_ids(job.ids) for job in self._jobs.values())
            return super().step()

    check_canary(Watched(SyntheticSettings(vocab_size=vocab_size, max_prompt_tokens=3)))
    assert {len(ids) for ids in asked} == {1, 2, 3}
    assert all(ids.max() < vocab_size for ids in asked)


def take_turns(finished: Finished) -> Finished:
    """Return each row in its own block, in reverse order."""
    return Finished(
        [
            RowBlock([digest], block.numbers[at : at + 1], None, block.encoding)
            for block in finished.blocks
            for at, digest in reversed(list(enumerate(block.digests)))
        ],
        {},
    )


def test_the_order_of_the_answers_does_not_matter() -> None:
    check_canary(Faulty(take_turns))


def test_results_may_take_several_steps() -> None:
    kept: list[Finished] = []

    def delay(finished: Finished) -> Finished:
        kept.append(finished)
        return kept.pop(0) if len(kept) > 5 else Finished([], {})

    check_canary(Faulty(delay))


def test_a_token_may_have_no_probability_at_all() -> None:
    def exclude(rows: Rows) -> Rows:
        rows = rows.copy()
        rows[:, : V // 2] = -np.inf
        return normalised(rows)

    check_canary(Faulty(changing(exclude)))


def test_rounding_may_depend_on_the_batch() -> None:
    check_canary(Faulty(changing(noisy(0.005))))


def test_rows_may_be_nearly_flat() -> None:
    # Make rows like those of an untrained model: rounding errors are as large as the differences between entries.
    generator = np.random.default_rng(0)

    def flatten(rows: Rows) -> Rows:
        return np.float32(-np.log(V)) + generator.normal(0, 4e-7, rows.shape).astype(np.float32)

    check_canary(Faulty(changing(flatten)))


# Backends that do not pass the canary


def swapped(rows: Rows) -> Rows:
    """Give each prompt the row of the previous prompt in the batch."""
    return np.roll(rows, 1, axis=0)


def with_nan(rows: Rows) -> Rows:
    rows = rows.copy()
    rows[:, 3] = np.nan
    return rows


def fail(finished: Finished) -> Finished:
    return Finished([], {digest: "out of memory" for block in finished.blocks for digest in block.digests})


def say_nothing(_: Finished) -> Finished:
    return Finished([], {})


def answer_one(finished: Finished) -> Finished:
    return Finished(take_turns(finished).blocks[:1], {})


def answer_strangers(finished: Finished) -> Finished:
    strangers = [
        replace(block, digests=[bytes([i]) * 16 for i in range(len(block.digests))]) for block in finished.blocks
    ]
    return Finished(strangers, {})


def answer_twice(finished: Finished) -> Finished:
    return Finished(finished.blocks * 2, {})


def without_log_z(finished: Finished) -> Finished:
    (block,) = finished.blocks
    n = len(block.digests)
    return Finished([RowBlock(block.digests, np.zeros((n, V), "<u2"), np.full(n, np.nan, "<f4"), Encoding.BF16)], {})


def one_for_all(rows: Rows) -> Rows:
    return normalised(np.tile(np.linspace(-5, 0, V, dtype=np.float32), (len(rows), 1)))


WRONG: dict[str, tuple[Callable[[Finished], Finished], str]] = {
    "rows of other prompts": (changing(swapped), r"a prompt's row differs by \d.* when others run beside it"),
    "rows that depend on the neighbours": (changing(noisy(0.1)), "a prompt's row differs by .* spread by "),
    "logits": (changing(lambda rows: rows + 1), r"the probabilities of a row sum to exp\(1\), not to 1"),
    "half a distribution": (changing(lambda rows: rows - np.float32(np.log(2))), r"sum to exp\(-0.69\d*\), not to 1"),
    "probabilities": (changing(np.exp), r"the probabilities of a row sum to exp\("),
    "no probability at all": (changing(lambda rows: np.full_like(rows, -np.inf)), r"sum to exp\(-inf\), not to 1"),
    "NaN": (changing(with_nan), r"sum to exp\(nan\), not to 1"),
    "a token too few": (
        changing(lambda rows: normalised(rows[:, :-1])),
        f"has returned rows of {V - 1} entries; its info says V = {V}",
    ),
    "a token too many": (
        changing(lambda rows: np.pad(rows, ((0, 0), (0, 1)))),
        f"has returned rows of {V + 1} entries; its info says V = {V}",
    ),
    "rows of strangers": (answer_strangers, f"results for 4 prompts that were not submitted, such as {'00' * 16}"),
    "each row twice": (answer_twice, "two results in one step for 4 prompts"),
    "no logZ": (without_log_z, "its logZ is nan"),
    "one row for all prompts": (changing(one_for_all), "two prompts whose last tokens differ have the same row"),
    "a failure": (fail, "it fails on a plain prompt: out of memory"),
    "nothing": (say_nothing, "it has answered 0 of 4 prompts after 20 steps"),
    "one answer of three": (answer_one, "it has answered 1 of 4 prompts after 20 steps"),
}


@pytest.mark.parametrize(("spoil", "message"), WRONG.values(), ids=WRONG)
def test_a_backend_with_wrong_rows_is_refused_with_the_reason(
    spoil: Callable[[Finished], Finished], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_MAX_STEPS", 20)
    with pytest.raises(SettingsError, match=f"^model: syn cannot be served by synthetic: .*{message}"):
        check_canary(Faulty(spoil))


def test_a_row_that_is_wrong_only_alone_is_found() -> None:
    def spoil(finished: Finished) -> Finished:
        (block,) = finished.blocks
        return changing(lambda rows: rows + 1)(finished) if len(block.digests) == 1 else finished

    with pytest.raises(SettingsError, match=r"sum to exp\(1\)"):
        check_canary(Faulty(spoil))


@pytest.mark.parametrize(("dtype", "passes"), [("bfloat16", True), ("float16", True), ("float32", False)])
def test_the_tolerance_depends_on_the_dtype(dtype: str, passes: bool) -> None:
    class Rounded(Faulty):
        @property
        def info(self) -> ModelInfo:
            return replace(super().info, dtype=dtype)

    backend = Rounded(changing(noisy(0.03)))
    if passes:
        check_canary(backend)
    else:
        with pytest.raises(SettingsError, match="a prompt's row differs"):
            check_canary(backend)


class Adapted(Rowed):
    """A backend with two adapters that change rows; if `mixes`, a step wrongly uses one adapter for all prompts."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__(SyntheticSettings(name="syn", vocab_size=V))
        self._mixes = mixes
        self._shifts: dict[bytes, int] = {}
        self.adapters = {"one@0f": "", "other@1e": ""}

    def submit(self, jobs: Iterable[BackendJob]) -> None:
        jobs = list(jobs)
        self._shifts |= {job.digest: ["", *self.adapters].index(job.adapter) for job in jobs}
        super().submit(job._replace(adapter="") for job in jobs)

    def step(self) -> Finished:
        finished = super().step()
        (block,) = finished.blocks
        shifts = [self._shifts[digest] for digest in block.digests]
        if self._mixes:
            shifts = [max(shifts)] * len(shifts)
        return Finished([replace(block, numbers=np.stack(list(map(np.roll, block.numbers, shifts))))], {})


def test_a_growing_prompt_is_checked() -> None:
    class Forgetful(Rowed):
        """A backend with wrong rows for a prompt that extends the previous prompt."""

        last = b"?"

        def step(self) -> Finished:
            first = next(iter(self._jobs.values())).ids
            continues = len(self._jobs) == 1 and first[:-4] == self.last
            self.last = first
            finished = super().step()
            return changing(lambda rows: np.roll(rows, 1))(finished) if continues else finished

    with pytest.raises(SettingsError, match="a prompt's row differs by .* when it grows token by token"):
        check_canary(Forgetful(SyntheticSettings(name="syn", vocab_size=V)))


def test_adapters_are_checked() -> None:
    check_canary(Adapted(mixes=False))
    with pytest.raises(SettingsError, match="a prompt's row differs by .* when others run beside it"):
        check_canary(Adapted(mixes=True))


class Scored(SyntheticBackend):
    """A backend with wrong scores: `spoil` changes the scores of a prompt, or returns None to leave them out."""

    def __init__(self, spoil: Callable[[Rows], Rows | None]) -> None:
        super().__init__(SyntheticSettings(name="syn", vocab_size=V))
        self._spoil = spoil

    def step(self) -> Finished:
        finished = super().step()
        if finished.answers is None:
            return finished
        spoilt = [self._spoil(scores) for scores in finished.answers.vectors]
        kept = [
            (digest, scores)
            for digest, scores in zip(finished.answers.digests, spoilt, strict=True)
            if scores is not None
        ]
        return finished._replace(answers=VectorBlock(*map(list, zip(*kept, strict=True))) if kept else None)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda scores: scores - 1, r"a token scores \[.*\], and its entry in the row is"),
        (lambda scores: np.full_like(scores, np.nan), r"a token scores \[array\(\[nan\]"),
        (lambda scores: np.append(scores, scores), "a token scores"),
        (lambda scores: None, "it has answered 0 of 1 prompts after 20 steps"),
    ],
    ids=["another", "NaN", "too many", "none"],
)
def test_wrong_scores_are_refused(
    spoil: Callable[[Rows], Rows | None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_MAX_STEPS", 20)
    check_canary(Scored(lambda scores: scores))
    with pytest.raises(SettingsError, match=message):
        check_canary(Scored(spoil))
