"""Homes of prompts: a prompt's home is the worker that computed a prefix of the prompt."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lmpool.producer.client import submit
from lmpool.producer.client.requests import PendingRequest
from lmpool.producer.client.submit import Homes
from lmpool.protocol.job import Prompt, digest_of


def prompt(ids: list[int], adapter: str = "") -> Prompt:
    data = np.array(ids, "<u4").tobytes()
    return Prompt(data, digest_of(data, adapter), adapter)


def homes_of_two() -> Homes:
    """Return an empty table of homes, of a client whose model has several workers."""
    homes = Homes()
    homes.has_choice = True
    return homes


def home_in(homes: Homes, asked: Prompt) -> bytes:
    return homes.find(asked)[0]


def arranged(homes: Homes, *asked: list[int]) -> list[tuple[list[int], bytes]]:
    requests, found = homes.arrange([PendingRequest(prompt(ids), {}) for ids in asked])
    return [
        (np.frombuffer(request.prompt.ids, "<u4").tolist(), home) for request, home in zip(requests, found, strict=True)
    ]


def random_ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=count)


@pytest.mark.parametrize("length", [1, 15, 16, 63, 64, 65, 200, 5000])
@pytest.mark.parametrize("more", [0, 1, 2, 3, 4])
def test_a_prompt_extended_by_a_few_tokens_has_the_same_home(length: int, more: int) -> None:
    homes = homes_of_two()
    homes.note([prompt(random_ids(1, length))], b"w1")
    homes.note([prompt(random_ids(2, length))], b"w2")
    for seed, home in ((1, b"w1"), (2, b"w2")):
        assert home_in(homes, prompt([*random_ids(seed, length), *range(more)])) == home
        assert home_in(homes, prompt([*random_ids(seed, length), *range(more)], "poet@1")) == b""
    assert home_in(homes, prompt(random_ids(3, length + more))) == b""


def test_a_prompt_that_branches_off_after_a_block_boundary_has_the_same_home() -> None:
    homes, begun = homes_of_two(), random_ids(1, 60)
    homes.note([prompt(begun)], b"w1")
    assert home_in(homes, prompt([*begun[:50], *range(100)])) == b"w1", "48 tokens are the same"
    assert home_in(homes, prompt([*begun[:47], *range(100)])) == b""
    assert home_in(homes, prompt([*begun[:50], *range(1000)])) == b"", "the shared prefix is too far from the end"


def test_the_longest_prefix_decides_the_home() -> None:
    homes, begun = homes_of_two(), random_ids(1, 100)
    homes.note([prompt(begun[:99])], b"new")
    homes.note([prompt(begun[:97])], b"old")
    assert home_in(homes, prompt(begun)) == b"new"
    assert home_in(homes, prompt([*begun[:97], 5])) == b"old"


def test_the_last_worker_that_computed_a_prompt_is_its_home() -> None:
    homes, begun = homes_of_two(), random_ids(1, 20)
    homes.note([prompt(begun)], b"w1")
    homes.note([prompt(begun)], b"w2")
    assert home_in(homes, prompt([*begun, 1])) == b"w2"


def test_prompts_with_a_common_prefix_have_separate_homes() -> None:
    """A home derived from the common prefix alone would send all prompts of a particle filter to one worker."""
    homes, begun = homes_of_two(), random_ids(1, 64)
    for at in range(8):
        homes.note([prompt([*begun, at])], b"w%d" % at)
    assert [home_in(homes, prompt([*begun, at, 1])) for at in range(8)] == [b"w%d" % at for at in range(8)]


def test_a_prompt_with_an_adapter_goes_to_the_worker_that_has_the_adapter_loaded() -> None:
    homes = homes_of_two()
    homes.note([prompt([1, 2], "poet@1")], b"w1")
    homes.note([prompt(random_ids(1, 100), "judge@1")], b"w2")
    for ids in ([7], random_ids(2, 100)):
        assert home_in(homes, prompt(ids, "poet@1")) == b"w1"
        assert home_in(homes, prompt(ids, "judge@1")) == b"w2"
        assert home_in(homes, prompt(ids, "poet@2")) == home_in(homes, prompt(ids)) == b""
    assert home_in(homes, prompt([*random_ids(1, 100), 1], "judge@1")) == b"w2", "the prefix comes before the adapter"


def test_homes_of_workers_that_left_are_removed() -> None:
    homes = homes_of_two()
    homes.note([prompt([1, 2])], b"w1")
    homes.note([prompt([3, 4])], b"w2")
    assert homes.workers == {b"w1": 0, b"w2": 0}
    homes.forget([b"w1"])
    assert (home_in(homes, prompt([1, 2, 3])), home_in(homes, prompt([3, 4, 5]))) == (b"", b"w2")
    assert homes.workers == {b"w2": 0}


def test_the_oldest_homes_are_evicted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "_MAX_HOMES", 10)
    homes = homes_of_two()
    for at in range(100):
        homes.note([prompt([at])], b"w%d" % at)
        homes.note([prompt([7])], b"often")
    known = [at for at in range(100) if home_in(homes, prompt([at, 1]))]
    assert known == [7, *range(91, 100)]
    assert home_in(homes, prompt([7, 1])) == b"often"


def test_a_trie_job_has_the_home_of_its_vocabulary() -> None:
    """A trie job has the digest of its vocabulary in place of a prompt."""
    homes = homes_of_two()
    named = Prompt(b"a vocabulary's digest", b"", "", b"query")
    homes.note([named], b"w1")
    assert home_in(homes, Prompt(b"a vocabulary's digest", b"", "", b"another query")) == b"w1"
    assert home_in(homes, Prompt(b"another vocabulary", b"", "", b"query")) == b""


def test_homes_are_not_recorded_for_a_single_worker() -> None:
    homes = Homes()
    homes.note([prompt([1])], b"w1")
    assert home_in(homes, prompt([1, 2])) == b""
    homes.has_choice = True
    homes.note([prompt([3])], b"w2")
    homes.note([prompt([1])], b"w1")
    assert arranged(homes, [1, 2], [3, 4], [5, 6]) == [([5, 6], b""), ([1, 2], b"w1"), ([3, 4], b"w2")]
    assert homes.arrange([PendingRequest(prompt([5, 6]), {})])[1] == []


def test_prompts_with_the_same_prefix_stay_together_and_the_most_frequent_come_first() -> None:
    homes = homes_of_two()
    homes.note([prompt([1])], b"w1")
    homes.note([prompt([2])], b"w1")
    homes.note([prompt([3])], b"w2")
    asked = [[1, 5], [2, 5], [3, 5], [2, 6], [1, 6], [2, 7]]
    assert arranged(homes, *asked) == [
        ([2, 5], b"w1"), ([2, 6], b"="), ([2, 7], b"="), ([1, 5], b"w1"), ([1, 6], b"="), ([3, 5], b"w2"),
    ]  # fmt: skip
