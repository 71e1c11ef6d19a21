"""The KV pool of the hf backend: which prefixes it holds, its memory, and the keys and values that it returns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmpool.workers.backends.hf import forward
from lmpool.workers.backends.hf.forward import KVLayout, KVPool, Path, PrefixSlots, new_tokens

CPU = torch.device("cpu")
SHAPES = ((2, 3), (2, 3), (1, 4), (1, 2))
LAYOUT = KVLayout(SHAPES, torch.float32, (CPU, CPU))
# Two layers on two devices: torch treats "cpu" and "cpu:0" as different devices.
SPLIT = KVLayout(SHAPES, torch.float32, (CPU, torch.device("cpu:0")))


def hold(slots: PrefixSlots, *prompts: list[int]) -> list[Path]:
    """Run a step over prompts, without a model; returns the pool slots that each prompt has taken."""
    paths = [slots.match(ids) for ids in prompts]
    slots.begin(paths)
    return [slots.extend(ids, path)[1] for ids, path in zip(prompts, paths, strict=True)]


def held(slots: PrefixSlots, ids: list[int]) -> int:
    return len(slots.match(ids))


def test_a_prompt_finds_its_longest_held_prefix() -> None:
    slots = PrefixSlots(100)
    hold(slots, [1, 2, 3, 4])
    assert [held(slots, ids) for ids in ([1, 2, 3, 4, 5], [1, 2, 9], [2, 3], [1, 2, 3, 4])] == [4, 2, 0, 4]


def test_a_branch_shares_the_slots_of_the_stem() -> None:
    slots = PrefixSlots(100)
    hold(slots, [1, 2, 3], [1, 2, 4, 5])
    assert len(slots) == 5
    assert slots.match([1, 2, 3])[:2] == slots.match([1, 2, 4])[:2]


def test_equal_tokens_computed_twice_in_one_step_take_one_slot() -> None:
    slots = PrefixSlots(100)
    first, second = hold(slots, [1, 2, 3], [1, 2, 3])
    assert (len(first), len(second), len(slots)) == (3, 0, 3)


def test_the_least_recently_used_branch_is_evicted_first_and_leaf_first() -> None:
    slots = PrefixSlots(6)
    hold(slots, [1, 2, 3])
    hold(slots, [1, 5, 6])
    hold(slots, [1, 2, 3])
    hold(slots, [7, 8])
    assert held(slots, [1, 2, 3]) == 3
    assert held(slots, [7, 8]) == 2
    assert held(slots, [1, 5, 6]) == 2


def test_slots_that_a_step_uses_are_not_freed_in_it() -> None:
    slots = PrefixSlots(4)
    hold(slots, [1, 2, 3])
    path, other = slots.match([1, 2, 3]), slots.match([4, 5, 6])
    slots.begin([path, other])
    assert len(slots.extend([4, 5, 6], other)[1]) == 1
    assert slots.match([1, 2, 3]) == path


def test_the_pool_holds_the_start_of_a_prompt_that_is_longer() -> None:
    slots = PrefixSlots(3)
    hold(slots, [1, 2, 3, 4, 5])
    assert held(slots, [1, 2, 3, 4, 5]) == 3


@settings(max_examples=150)
@given(
    capacity=st.integers(1, 30),
    steps=st.lists(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=4), max_size=25),
)
def test_no_slot_is_lost_or_cut_off_from_the_root(capacity: int, steps: list[list[list[int]]]) -> None:
    slots = PrefixSlots(capacity)
    for prompts in steps:
        hold(slots, *prompts)
        reachable = {0}
        edges = dict(slots._children)
        for edge, slot in sorted(edges.items(), key=lambda item: -slots._stamps[item[1]]):
            assert edge >> 32 in reachable
            reachable.add(slot)
        assert len(reachable) == len(slots) + 1 <= capacity + 1
        assert len(slots) + len(slots._free) == len(slots._edges) - 1
        if len(prompts) == 1:
            assert held(slots, prompts[0]) == min(len(prompts[0]), capacity)


@settings(max_examples=40)
@given(
    capacity=st.integers(1, 12),
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=2, max_size=12),
)
def test_a_mark_shows_whether_a_path_is_held_and_the_longest(capacity: int, prompts: list[list[int]]) -> None:
    slots = PrefixSlots(capacity)
    marked = []
    for ids in prompts:
        path = slots.match(ids)
        marked.append((ids, path, slots.mark(path)))
        hold(slots, ids)
        for earlier, known, mark in marked:
            found = slots.match(earlier)
            # `holds` may be false for an equal path: a slot that was freed and assigned again counts as another slot.
            assert not slots.holds(known, mark) or found[: len(known)] == known
            if slots.holds(known, mark):
                assert slots.is_longest(earlier, known) == (found == known)
                assert slots.match(earlier, known=known) == found


def packed(ids: list[int]) -> bytes:
    return np.array(ids, "<u4").tobytes()


def test_a_prompt_that_extends_a_recent_one_by_a_few_tokens_finds_its_slots() -> None:
    slots, ids = PrefixSlots(200), list(range(100))
    hold(slots, ids)
    path = slots.match(ids)
    slots.remember(packed(ids), path)
    assert slots.recall(packed(ids)) is path
    assert slots.recall(packed([*ids, *range(8)])) is path
    assert slots.recall(packed([*ids, *range(9)])) is None, "it is looked up token by token"
    assert slots.recall(packed([7, *ids[1:], 1])) is None, "only its last tokens are the same"
    assert slots.recall(packed(ids), root=201) is None
    assert slots.match([*ids, 5], known=slots.recall(packed([*ids, 5]))) == path
    slots._clock += 1
    slots._evict(slots.capacity)
    assert slots.recall(packed(ids)) is None, "its slots were freed"


def test_remembered_prompts_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_MAX_REMEMBERED_TOKENS", 250)
    slots = PrefixSlots(1000)
    prompts = [list(range(first, first + 100)) for first in (0, 200, 400)]
    for ids in (*prompts, prompts[2]):
        hold(slots, ids)
        slots.remember(packed(ids), slots.match(ids))
    assert [slots.recall(packed(ids)) is not None for ids in prompts] == [False, True, True]
    short = list(range(600, 620))
    hold(slots, short)
    slots.remember(packed(short), slots.match(short))
    assert slots.recall(packed(short)) is None


def put(pool: KVPool, prompts: list[list[int]], new: int, values: torch.Tensor) -> torch.Tensor:
    """Run a step that computes `values` (n, new, width); returns all keys and values as (n, length, width)."""
    paths = [pool.slots.match(ids) for ids in prompts]
    block = pool.gather([len(ids) for ids in prompts], paths, new)
    for group, storage in zip(block.tokens, pool._storages, strict=True):
        for tokens, ids, path in zip(group, prompts, paths, strict=True):
            known = path[: max(0, len(ids) - new)]
            assert torch.equal(tokens[-len(ids) :][: len(known)], storage[list(known)])
    at = 0
    for layer, (keys, sizes) in enumerate(zip(LAYOUT.shapes[::2], LAYOUT.shapes[1::2], strict=True)):
        parts = []
        for heads, size in (keys, sizes):
            part = values[..., at : at + heads * size].unflatten(-1, (heads, size))  # type: ignore[no-untyped-call]
            parts.append(part.transpose(1, 2))
            at += heads * size
        whole, _ = block.cache.update(*parts, layer)
        assert whole.shape == (len(prompts), keys[0], block.tokens[0].shape[1], keys[1])
    pool.store(prompts, paths, block)
    return torch.cat(block.tokens, dim=-1)


@pytest.mark.parametrize("layout", [LAYOUT, SPLIT], ids=["one-device", "two-devices"])
def test_gathered_keys_and_values_are_the_stored_ones(layout: KVLayout) -> None:
    pool = KVPool(layout, 50)
    values = torch.randn(2, 4, LAYOUT.width)
    put(pool, [[1, 2, 3, 4], [1, 2, 3]], 4, values)
    more = torch.randn(3, 1, LAYOUT.width)
    block = put(pool, [[1, 2, 3, 4, 5], [1, 2, 6], [7]], 1, more)
    assert torch.equal(block[0, :4], values[0])
    assert torch.equal(block[1, 2:4], values[0, :2])
    assert torch.equal(block[:, 4:], more)
    again = put(pool, [[1, 2, 6, 9]], 1, more[:1])
    assert torch.equal(again[0, :3], torch.cat([values[0, :2], more[1]]))


def test_a_prompt_that_grows_is_gathered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, counts = KVPool(LAYOUT, 50), [0]
    select = torch.index_select

    def counted(storage: torch.Tensor, dim: int, index: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        counts[-1] += len(index)
        return select(storage, dim, index, out=out)

    def steps(prompts: list[list[int]], new: int) -> int:
        counts.append(0)
        put(pool, prompts, new, torch.randn(len(prompts), new, LAYOUT.width))
        return counts[-1]

    ids = list(range(40))
    put(pool, [ids], 40, torch.randn(1, 40, LAYOUT.width))  # Let the pool allocate scratch memory for later steps.
    monkeypatch.setattr(torch, "index_select", counted)
    other = list(range(100, 108))
    assert [steps([other[:end]], 2) for end in (2, 4, 6, 8)] == [0, 0, 0, 0]
    assert steps([other], 1) == 0
    # One slot is copied again: the last step recomputed the last token of `other`, whose slot keeps the first result.
    assert steps([[*other, 7]], 1) == 1
    assert steps([[*other, 7], [*other, 8]], 1) == 18
    assert steps([[*other, 7, 9]], 1) == 9


@settings(max_examples=150)
@given(
    capacity=st.integers(1, 30),
    steps=st.lists(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=2), max_size=25),
)
def test_gathered_keys_and_values_are_those_of_the_slots(capacity: int, steps: list[list[list[int]]]) -> None:
    pool = KVPool(LAYOUT, capacity)
    for prompts in steps:
        new = max(new_tokens(len(ids), held(pool.slots, ids)) for ids in prompts)
        put(pool, prompts, new, torch.randn(len(prompts), new, LAYOUT.width))


def test_padding_is_finite_in_memory_that_held_nan() -> None:
    pool = KVPool(LAYOUT, 50)
    pool._storages[0][1:].fill_(torch.nan)
    put(pool, [[1, 2, 3, 4]], 4, torch.ones(1, 4, LAYOUT.width))
    assert put(pool, [[1, 2, 3, 4, 5], [9]], 1, torch.ones(2, 1, LAYOUT.width)).isfinite().all()


@pytest.mark.parametrize("max_bytes", [0, 1, 1000, 12_345, 1 << 20])
def test_the_pool_keeps_to_its_bytes(max_bytes: int) -> None:
    capacity = LAYOUT.capacity(max_bytes)
    assert capacity == max(0, max_bytes // LAYOUT.slot_bytes - 1)
    if capacity:
        pool = KVPool(LAYOUT, capacity)
        assert pool._storages[0].nbytes < (capacity + 1) * LAYOUT.slot_bytes <= max_bytes
        for start in range(0, 5 * capacity, 7):
            hold(pool.slots, list(range(start, start + 7)))
        assert capacity - capacity // 32 - 7 <= len(pool.slots) <= capacity


def test_a_failed_store_frees_all_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KVPool(LAYOUT, 50)
    put(pool, [[1, 2]], 2, torch.ones(1, 2, LAYOUT.width))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "tensor", fail)  # `store` calls torch.tensor to make the indices of its copy.
        with pytest.raises(RuntimeError):
            put(pool, [[1, 2, 3]], 1, torch.ones(1, 1, LAYOUT.width))
    assert held(pool.slots, [1, 2, 3]) == 0
