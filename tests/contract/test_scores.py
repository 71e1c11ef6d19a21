"""Every backend returns correct scores, values at positions, and continuations."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lmpool.protocol.adapter import name_of
from lmpool.protocol.query import GenerateQuery, PositionsQuery, unpack_continuation, unpack_top
from lmpool.protocol.row import Row, unpack_numbers, width_of
from lmpool.workers.execution.in_flight import InFlightPrompt
from lmpool.workers.execution.yielding import advance, begin
from tests.contract.driver import Opened, prompt
from tests.contract.model import reference_states
from tests.contract.subjects import MAX_BATCH_TOKENS


def scored(opened: Opened, prompts: list[list[int]], starts: list[int]) -> None:
    """Score prompts in one batch, and check the scores."""
    assert opened.backend.info.positions == opened.subject.positions
    if not opened.subject.positions:
        return
    for ids, start, scores in zip(prompts, starts, opened.score(prompts, starts), strict=True):
        opened.check_scores(ids, start, scores)


@pytest.mark.parametrize("count", [1, 5, 20])
def test_scores_are_the_entries_of_the_rows_of_all_prefixes(opened: Opened, draw: random.Random, count: int) -> None:
    prompts = [prompt(draw, draw.randint(2, 60)) for _ in range(count)]
    scored(opened, prompts, [draw.randint(1, len(ids) - 1) for ids in prompts])


def test_scores_and_rows_of_the_same_prompts_do_not_disturb_each_other(opened: Opened, draw: random.Random) -> None:
    prompts = [prompt(draw, 20 + at) for at in range(6)]
    digests = opened.submit(prompts)
    scored(opened, prompts, [1, 5, 19, 20, 10, 2])
    opened.check(prompts, opened.finish(digests))
    # Request rows of the scored prompts and of longer ones: backends may reuse the scored prompts' keys and values.
    opened.check(prompts, opened.ask(prompts))
    scored(opened, [ids + prompt(draw, 3) for ids in prompts], [7] * 6)


def test_a_scored_prompt_may_be_as_long_as_the_longest(opened: Opened, draw: random.Random) -> None:
    scored(opened, [prompt(draw, opened.backend.info.max_prompt_tokens), prompt(draw, 2)], [1, 1])


def test_scores_under_adapters_are_those_of_the_adapter(opened: Opened, draw: random.Random) -> None:
    if opened.subject.positions:
        for adapter in map(name_of, opened.backend.adapters):
            ids = prompt(draw, 15)
            (scores,) = opened.score([ids], [3], adapter)
            opened.check_scores(ids, 3, scores, adapter)


def test_a_scored_prompt_is_counted_once_and_does_not_reuse_its_own_chunks(opened: Opened, draw: random.Random) -> None:
    prompts = [prompt(draw, 2 * MAX_BATCH_TOKENS + 20), prompt(draw, 9)]
    before = opened.backend.stats()
    scored(opened, prompts, [10, 3])
    if opened.subject.positions:
        after = opened.backend.stats()
        assert after.tokens - before.tokens == sum(map(len, prompts))
        # Allow a few reused tokens: by chance the prompt may begin like an earlier prompt.
        assert after.reused - before.reused < MAX_BATCH_TOKENS


def expected(opened: Opened, ids: list[int], start: int, adapter: str = "") -> Row:
    """The reference rows of all positions from `start` on, (n, V)."""
    return np.stack(opened.references([ids[: at + 1] for at in range(start, len(ids))], adapter))


def expecting(opened: Opened, prompts: list[list[int]], start: int, adapter: str = "") -> None:
    """Run positions queries of all kinds, and check their results."""
    assert opened.backend.info.positions == opened.subject.positions
    if not opened.subject.positions:
        return  # A worker sends no positions queries to a backend whose info lacks `positions`.
    tolerance, vocab_size = opened.subject.tolerance, opened.backend.info.vocab_size
    targets = [vocab_size - 1, 0, 7]
    by_way = [
        opened.expect(prompts, query, adapter)
        for query in (
            PositionsQuery(start),
            PositionsQuery(start, targets=np.array(targets, "<u4").tobytes()),
            PositionsQuery(start, 5),
            PositionsQuery(start, values="logits"),
            PositionsQuery(start, logz=True),
            PositionsQuery(start, 3, values="logits"),
            PositionsQuery(start, 2, values="logits").among(np.array(sorted(targets))),
        )
    ]
    scores = opened.score([[*ids, 1] for ids in prompts], [start + 1] * len(prompts), adapter, logits=True)
    ways = zip(prompts, scores, *by_way, strict=True)
    for ids, score_logits, rows, entries, packed, logits, log_z, packed_logits, packed_few in ways:
        reference = expected(opened, ids, start, adapter)
        assert rows.shape == reference.shape
        assert float(np.abs(rows - reference).max()) <= tolerance
        assert float(np.abs(entries - reference[:, targets]).max()) <= tolerance
        largest = unpack_top(packed, vocab_size)
        # Compare sorted values only, because tokens of nearly equal probability may have either order.
        assert float(np.abs(largest.values - -np.sort(-reference)[:, :5]).max()) <= tolerance
        own = np.take_along_axis(reference, largest.ids, axis=1)
        assert float(np.abs(own - largest.values).max()) <= tolerance
        assert float(np.abs(logits - log_z - reference).max()) <= tolerance
        likeliest = unpack_top(packed_logits, vocab_size, of_row=False).values
        assert float(np.abs(likeliest - -np.sort(-logits)[:, :3]).max()) <= tolerance
        few = unpack_top(packed_few, vocab_size, of_row=False)
        assert float(np.abs(few.values - -np.sort(-logits[:, targets])[:, :2]).max()) <= tolerance
        assert float(np.abs(few.values - np.take_along_axis(logits, few.ids, axis=1)).max()) <= tolerance
        following = logits[np.arange(len(logits)), [*ids[start + 1 :], 1]]
        assert float(np.abs(score_logits - following).max()) <= tolerance


@pytest.mark.parametrize("start", [0, 1, 7])
def test_every_position_has_the_row_of_its_prefix(opened: Opened, draw: random.Random, start: int) -> None:
    expecting(opened, [prompt(draw, draw.randint(8, 40)) for _ in range(6)], start)


def test_positions_of_long_and_of_cached_prompts(opened: Opened, draw: random.Random) -> None:
    long = prompt(draw, 2 * MAX_BATCH_TOKENS + 5)
    opened.ask([long[:30]])
    expecting(opened, [long], 0)
    expecting(opened, [long[:31]], 30)


def test_positions_under_adapters_are_those_of_the_adapter(opened: Opened, draw: random.Random) -> None:
    for adapter in map(name_of, opened.backend.adapters):
        expecting(opened, [prompt(draw, 12)], 2, adapter)


def test_hidden_states_are_those_of_transformers_and_give_the_rows(opened: Opened, draw: random.Random) -> None:
    info = opened.backend.info
    assert bool(info.hidden) == opened.subject.has_hidden
    if not info.hidden:
        return  # A worker sends no queries for hidden states to a backend whose info lacks `hidden`.
    size = width_of(info.hidden, info.dtype)
    prompts = [prompt(draw, length) for length in (1, 9, 30, MAX_BATCH_TOKENS + 5)]
    plain = expected(opened, prompts[1], 0)
    other = opened.submit([prompt(draw, 20)])
    for adapter in ("", *map(name_of, opened.backend.adapters)):
        start = 0 if adapter else 3
        asked = prompts[start > 0 :]
        found = opened.expect(asked, PositionsQuery(start, values="hidden", size=size), adapter)
        for ids, packed in zip(asked, found, strict=True):
            states = unpack_numbers(packed, len(packed), info.hidden, info.dtype)
            assert states.shape == (len(ids) - start, info.hidden)
            # Hidden states are about as large as logits, and larger than the differences of adapters.
            assert float(np.abs(states - reference_states(ids, adapter)[start:]).max()) <= opened.subject.tolerance
        if not adapter:
            states = unpack_numbers(found[0], len(found[0]), info.hidden, info.dtype)
            made = opened.head().logprobs(states)
            assert float(np.abs(made - plain[start:]).max()) <= opened.subject.tolerance
    opened.finish(other)


def test_positions_scores_and_rows_do_not_disturb_each_other(opened: Opened, draw: random.Random) -> None:
    prompts = [prompt(draw, 20 + at) for at in range(4)]
    digests = opened.submit(prompts)
    expecting(opened, prompts, 3)
    scored(opened, prompts, [4] * 4)
    opened.check(prompts, opened.finish(digests))


@pytest.mark.parametrize("adapter_number", [None, 0])
def test_continuations_are_drawn_from_the_rows_of_their_prefixes(
    opened: Opened, draw: random.Random, adapter_number: int | None
) -> None:
    adapters = sorted(map(name_of, opened.backend.adapters))
    if adapter_number is not None and not adapters:
        return
    adapter = "" if adapter_number is None else adapters[adapter_number]
    prompts = [prompt(draw, length) for length in (1, 9, 33, 33)]
    wanted = [GenerateQuery(most, 0.0, 1.0, 0) for most in (1, 6, 12, 12)]
    jobs = []
    for ids, query in zip(prompts, wanted, strict=True):
        job = opened.job(ids, adapter)
        jobs.append(InFlightPrompt(job.digest, job.ids, job.adapter, generate=query))
        begin(jobs[-1], query)
    by_digest = {job.digest: job for job in jobs}
    other = opened.submit([prompt(draw, 20)])
    opened.backend.submit(jobs)
    answers: dict[bytes, Row] = {}
    for _ in range(1000):
        finished, longer = advance(opened.backend.step(), by_digest)
        assert not finished.failures
        assert all(block.digests == other for block in finished.blocks)
        opened.backend.submit(longer)
        if finished.answers is not None:
            answers.update(zip(finished.answers.digests, finished.answers.vectors, strict=True))
        if len(answers) == len(jobs):
            break
    for job, ids, query in zip(jobs, prompts, wanted, strict=True):
        made = unpack_continuation(answers[job.digest], opened.backend.info.vocab_size)
        assert len(made.ids) == query.most
        for place, token in enumerate(made.ids.tolist()):
            row = opened.subject.reference([*ids, *made.ids[:place].tolist()], adapter)
            # Each token of the continuation must be the most likely token, except for rounding errors.
            assert row[token] >= row.max() - 2 * opened.subject.tolerance
            assert abs(made.logprobs[place] - row[token]) <= opened.subject.tolerance


def test_a_fresh_row_is_the_row(opened: Opened, draw: random.Random) -> None:
    prompts = [prompt(draw, 12) for _ in range(3)]
    opened.ask(prompts)
    jobs = [opened.job(ids)._replace(fresh=True) for ids in prompts]
    opened.backend.submit(jobs)
    opened.check(prompts, opened.finish([job.digest for job in jobs]))
