"""Every backend returns the correct row of each prompt, whatever other prompts are in the batch."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from lmpool.protocol.adapter import name_of
from lmpool.protocol.row import no_new_rows
from lmpool.vocabulary import Vocabulary
from lmpool.workers.backends.engines import check_canary
from lmpool.workers.execution.contract import WritesInPlace
from tests.contract.driver import Opened, Slots, prompt
from tests.contract.model import PIECES, V, write_tokenizer
from tests.contract.subjects import DEVICE, KV_TOKENS, MAX_BATCH, MAX_BATCH_TOKENS, ROUNDS


def test_ragged_prompts_run_together(opened: Opened, draw: random.Random) -> None:
    most = opened.backend.info.max_prompt_tokens
    prompts = [prompt(draw, length) for length in (1, 2, 3, 5, 17, 31, 32, 33, 64, 65, 100, most - 1, most)]
    draw.shuffle(prompts)
    opened.check(prompts, opened.ask(prompts))


@pytest.mark.parametrize("token", [0, V - 1])
def test_the_first_and_the_last_id_are_tokens_like_others(opened: Opened, token: int) -> None:
    prompts = [[token], [token] * 5, [token, 3, token]]
    opened.check(prompts, opened.ask(prompts))


def test_a_prompt_alone(opened: Opened, draw: random.Random) -> None:
    prompts = [prompt(draw, 9)]
    opened.check(prompts, opened.ask(prompts))


def test_rows_are_computed_in_shared_memory(opened: Opened, draw: random.Random) -> None:
    backend, slots = opened.backend, Slots()
    if not isinstance(backend, WritesInPlace):
        return
    slots.lend(backend)
    try:
        for lengths in ((9,), (5, 30)):
            prompts = [prompt(draw, length) for length in lengths]
            opened.check(prompts, opened.ask(prompts))
            assert all(map(slots.have, opened.blocks))
        backend.write_to(no_new_rows)
        opened.check(prompts, opened.ask(prompts))
        assert not any(map(slots.have, opened.blocks))
    finally:
        backend.write_to(no_new_rows)


def test_prompts_grow_token_by_token(opened: Opened, draw: random.Random) -> None:
    contexts = [prompt(draw, length) for length in (5, 16, 31, 40)]
    for _ in range(ROUNDS):
        opened.check(contexts, opened.ask(contexts))
        contexts = [[*ids, draw.randrange(V)] for ids in contexts]


def test_contexts_that_outnumber_a_batch_grow(opened: Opened, draw: random.Random) -> None:
    contexts = [prompt(draw, 12) for _ in range(3 * MAX_BATCH)]
    for _ in range(4):
        opened.check(contexts, opened.ask(contexts))
        contexts = [[*ids, draw.randrange(V)] for ids in contexts]


def test_contexts_grow_by_several_tokens(opened: Opened, draw: random.Random) -> None:
    ids = prompt(draw, 6)
    for length in (1, 2, 3, 7, 16, 33):
        ids = ids + prompt(draw, length)
        opened.check([ids], opened.ask([ids]))


def test_contexts_that_outnumber_a_batch_grow_by_several_tokens(opened: Opened, draw: random.Random) -> None:
    contexts = [prompt(draw, 12 + at) for at in range(MAX_BATCH + 2)]
    for _ in range(ROUNDS // 4):
        opened.check(contexts, opened.ask(contexts))
        contexts = [[*ids, *prompt(draw, draw.randrange(1, 8))] for ids in contexts]


def test_branches_of_one_prefix(opened: Opened, draw: random.Random) -> None:
    stem = prompt(draw, 37)
    opened.check([stem], opened.ask([stem]))
    branches = [[*stem, token] for token in range(MAX_BATCH + 3)]
    opened.check(branches, opened.ask(branches))
    twigs = [[*branch, token] for branch in branches[:4] for token in range(3)]
    opened.check(twigs, opened.ask(twigs))


def test_a_parent_and_its_child_run_together(opened: Opened, draw: random.Random) -> None:
    stem = prompt(draw, 20)
    prompts = [stem[:size] for size in (20, 19, 18, 10)]
    opened.check(prompts, opened.ask(prompts))


def test_a_context_may_step_back_and_branch(opened: Opened, draw: random.Random) -> None:
    stem = prompt(draw, 18)
    for ids in (stem, [*stem, 1], [*stem, 1, 2], [*stem, 1, 3], stem, [*stem, 4], [*stem, 1, 2, 5]):
        opened.check([ids], opened.ask([ids]))


def test_a_prompt_submitted_twice_is_answered_once(opened: Opened, draw: random.Random) -> None:
    job = opened.job(prompt(draw, 11))
    opened.backend.submit([job, job])
    opened.backend.submit([job])
    other = opened.submit([prompt(draw, 3)])  # A second result of `job` would arrive before the result of `other`.
    opened.finish([job.digest])
    opened.finish(other)


def test_the_same_ids_under_several_names_have_the_same_row(opened: Opened, draw: random.Random) -> None:
    prompts = [prompt(draw, 21)] * 5
    opened.check(prompts, opened.ask(prompts))
    opened.check(prompts[:1], opened.ask(prompts[:1]))


def test_prompts_longer_than_a_step_are_computed_in_parts(opened: Opened, draw: random.Random) -> None:
    lengths = (MAX_BATCH_TOKENS + 1, 2 * MAX_BATCH_TOKENS, 3 * MAX_BATCH_TOKENS - 1, 5, MAX_BATCH_TOKENS, 1)
    prompts = [prompt(draw, length) for length in lengths]
    opened.check(prompts, opened.ask(prompts))


def test_more_prompts_than_run_at_once(opened: Opened, draw: random.Random) -> None:
    prompts = [prompt(draw, draw.randrange(1, 40)) for _ in range(6 * MAX_BATCH)]
    opened.check(prompts, opened.ask(prompts))


def test_more_prefixes_than_memory_holds(opened: Opened, draw: random.Random) -> None:
    prompts = [prompt(draw, 100) for _ in range(3 * KV_TOKENS // 100)]
    for at in range(0, len(prompts), 5):
        opened.check(prompts[at : at + 5], opened.ask(prompts[at : at + 5]))
    extended = [[*ids, 7] for ids in (prompts[0], prompts[-1], prompts[len(prompts) // 2])]
    opened.check(extended, opened.ask(extended))


def test_growing_contexts_give_way_to_a_prompt_that_needs_the_memory(opened: Opened, draw: random.Random) -> None:
    contexts = [prompt(draw, 90) for _ in range(MAX_BATCH)]
    for _ in range(3):
        contexts = [[*ids, draw.randrange(V)] for ids in contexts]
        opened.check(contexts, opened.ask(contexts))
    long = [prompt(draw, opened.backend.info.max_prompt_tokens) for _ in range(4)]
    opened.check(long, opened.ask(long))
    contexts = [[*ids, draw.randrange(V)] for ids in contexts]
    opened.check(contexts, opened.ask(contexts))


def test_prompts_join_while_others_run(opened: Opened, draw: random.Random) -> None:
    prompts = [prompt(draw, draw.randrange(1, 150)) for _ in range(20)]
    digests = []
    for at in range(0, len(prompts), 2):
        digests += opened.submit(prompts[at : at + 2])
        opened.step()
    opened.check(prompts, opened.finish(digests))


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_with_little_memory(opened: Opened, seed: int) -> None:
    """Prompts grow, branch and are aborted, with long prompts between them; every row must equal the reference."""
    draw = random.Random(1000 + seed)
    most = opened.backend.info.max_prompt_tokens
    asked: dict[bytes, list[int]] = {}
    contexts = [prompt(draw, draw.randrange(1, 70)) for _ in range(2 * MAX_BATCH)]
    for _ in range(ROUNDS):
        chosen = draw.sample(range(len(contexts)), draw.randrange(1, len(contexts)))
        for index in chosen:
            grown = [*contexts[index], draw.randrange(V)]
            contexts[index] = grown if len(grown) < most else prompt(draw, draw.randrange(1, 30))
        batch = [contexts[index] for index in chosen]
        if draw.random() < 0.2:
            batch.append(prompt(draw, draw.randrange(most // 2, most)))
        asked.update(zip(opened.submit(batch), batch, strict=True))
        if draw.random() < 0.2:
            dropped = draw.choice(list(asked))
            opened.backend.abort([dropped])
            del asked[dropped]
        for _ in range(draw.randrange(3)):
            if not asked.keys() <= opened.rows.keys():
                opened.step()
        answered = [digest for digest in asked if digest in opened.rows]
        opened.check([asked.pop(digest) for digest in answered], [opened.rows[digest] for digest in answered])
    opened.check(list(asked.values()), opened.finish(list(asked)))


def test_capacity_falls_with_jobs_in_flight_and_recovers(opened: Opened, draw: random.Random) -> None:
    backend = opened.backend
    free = backend.capacity()
    assert free >= backend.batch >= 1
    digests = opened.submit([prompt(draw, 4) for _ in range(free)])
    assert backend.capacity() <= 0
    opened.finish(digests)
    assert backend.capacity() == free


def test_dropped_prompts_are_not_answered_and_others_are(opened: Opened, draw: random.Random) -> None:
    prompts = [prompt(draw, length) for length in (8, 9, 2 * MAX_BATCH_TOKENS, 10, 11)]
    digests = opened.submit(prompts)
    opened.backend.abort([digests[0], digests[2], bytes(16)])
    opened.check([prompts[1], *prompts[3:]], opened.finish([digests[1], *digests[3:]]))
    assert not {digests[0], digests[2]} & (opened.rows.keys() | opened.failures.keys())
    opened.check(prompts, opened.ask(prompts))


def test_a_prompt_may_be_dropped_when_half_of_it_is_computed(opened: Opened, draw: random.Random) -> None:
    long, others = prompt(draw, 3 * MAX_BATCH_TOKENS), [prompt(draw, 6), prompt(draw, 7)]
    digests = opened.submit([long, *others])
    opened.step()
    opened.backend.abort(digests[:1])
    opened.check(others, opened.finish(digests[1:]))
    opened.check([long], opened.ask([long]))


def test_dropped_prompts_free_their_slots(opened: Opened, draw: random.Random) -> None:
    backend = opened.backend
    free = backend.capacity()
    digests = opened.submit([prompt(draw, 2 * MAX_BATCH_TOKENS) for _ in range(free)])
    opened.step()
    backend.abort(digests)
    assert backend.capacity() == free
    # Wait for another prompt: an engine may still compute an aborted prompt, which ends before later prompts.
    opened.ask([prompt(draw, 3)])


def test_the_counters_count_computed_prompts(opened: Opened, draw: random.Random) -> None:
    before = opened.backend.stats()
    opened.ask([prompt(draw, 5), prompt(draw, 6)])
    after = opened.backend.stats()
    assert after.rows == before.rows + 2
    assert after.tokens == before.tokens + 11
    assert after.steps > before.steps
    assert 0 <= after.reused <= after.tokens


def test_prefixes_are_counted_as_reused(opened: Opened, draw: random.Random) -> None:
    if not opened.subject.has_model:
        assert opened.backend.stats().reused == 0  # A backend without a model reuses no keys and values.
        return
    ids = prompt(draw, 96)
    opened.ask([ids])
    before = opened.backend.stats().reused
    opened.ask([[*ids, 1]])
    assert opened.backend.stats().reused - before >= 64


def test_the_reuse_of_growing_contexts_is_counted_exactly(opened: Opened, draw: random.Random) -> None:
    if not opened.subject.has_model:
        return
    contexts = [prompt(draw, 40) for _ in range(3)]
    for at, new in enumerate((1, 1, 3, 2, 8, 1)):
        longer, before = [[*ids, *prompt(draw, new)] for ids in contexts], opened.backend.stats()
        opened.check(longer, opened.ask(longer))
        after = opened.backend.stats()
        assert after.tokens - before.tokens == sum(map(len, longer))
        if at > 1:  # From the third round on, a backend detects that each prompt extends an earlier prompt.
            assert after.reused - before.reused == sum(map(len, contexts))
        contexts = longer


def test_adapters_are_told_apart(opened: Opened, adapter_folders: dict[str, Path], draw: random.Random) -> None:
    names = ["", *map(name_of, opened.backend.adapters)]
    assert set(names) == ({"", *adapter_folders} if opened.subject.has_adapters else {""})
    prompts = [prompt(draw, length) for length in (3, 33, 40, 70)]
    for _ in range(3):
        digests = {name: opened.submit(prompts, name) for name in names}
        for name in names:
            opened.check(prompts, opened.finish(digests[name]), name)
        prompts = [[*ids, draw.randrange(V)] for ids in prompts]


def test_the_canary_passes(opened: Opened) -> None:
    check_canary(opened.backend)


def test_the_info_says_what_is_served(opened: Opened) -> None:
    info = opened.backend.info
    assert (info.backend, info.vocab_size, info.dtype) == (opened.subject.name, V, "float32")
    assert not info.lossy
    assert info.encoding == "f32"
    assert info.revision


def test_the_device_is_one_of_torch(opened: Opened) -> None:
    device = torch.device(opened.backend.device)
    assert str(device) == opened.backend.device
    assert device.type == "cpu" or device.index is not None
    assert device.type in ("cpu", DEVICE.partition(":")[0])


def test_a_vocabulary_has_as_many_tokens_as_a_row_has_entries(opened: Opened) -> None:
    vocabulary = opened.backend.vocabulary()
    assert vocabulary is None or len(vocabulary) == V


def test_a_model_without_a_tokenizer_is_served_without_a_vocabulary(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    if not opened.subject.has_model:
        return  # A backend without a model has no files from which a tokenizer could be missing.
    assert opened.backend.vocabulary() is None
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("lmpool.")]
    assert "producer.trie" in line


def test_the_vocabulary_is_that_of_the_tokenizer_in_the_folder(opened: Opened, model_folder: Path) -> None:
    if not opened.subject.has_model:
        return
    before = set(model_folder.iterdir())
    write_tokenizer(model_folder)
    try:
        vocabulary = opened.backend.vocabulary()
    finally:
        for path in set(model_folder.iterdir()) - before:
            path.unlink()
    assert vocabulary == Vocabulary([*PIECES.values(), *[b""] * (V - len(PIECES))])
