"""Results of positions queries, assembled from the parts that an engine computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lmpool.errors import WorkerError
from lmpool.protocol.query import PositionsQuery
from lmpool.workers.backends.row_encoder import NO_DISTRIBUTION, Piece, PositionAnswers
from lmpool.workers.execution.contract import BackendJob

V = 11
LENGTH = 10
IDS = np.arange(1, LENGTH + 1, dtype="<u4")
LOGITS = torch.randn(LENGTH, V, generator=torch.Generator().manual_seed(1))


def opened(*names: str, query: PositionsQuery) -> PositionAnswers:
    """Pending results of several requests for the same prompt."""
    answers = PositionAnswers()
    for name in names:
        answers.open(name, BackendJob(name.encode(), IDS.tobytes(), positions=query))
    return answers


def compute(answers: PositionAnswers, name: str, positions: range, logits: Tensor = LOGITS) -> None:
    """Add the logits of some positions of a request, as if one forward had computed them."""
    answers.add(answers.wanted(name, positions, 0), 0, logits[positions.start : positions.stop])


@pytest.mark.parametrize("first", range(1, LENGTH))
@pytest.mark.parametrize(
    "query",
    [
        PositionsQuery(3),
        PositionsQuery(0, 4),
        PositionsQuery(0, 2, values="logits").among(np.array([1, 5, 7])),
        PositionsQuery.scores_from(4),
        PositionsQuery.scores_from(4, logits=True),
    ],
)
def test_parts_give_the_same_result_as_the_whole(query: PositionsQuery, first: int) -> None:
    answers = opened("whole", "parts", "twice", query=query)
    compute(answers, "whole", range(LENGTH))
    for positions in (range(first), range(first, LENGTH)):
        compute(answers, "parts", positions)
    # An engine that has preempted the prompt computes earlier positions again.
    for positions in (range(first), range(first // 2), range(first // 2, LENGTH)):
        compute(answers, "twice", positions)
    expected = answers.take("whole")
    assert not isinstance(expected, str)
    assert expected.shape == (len(query.span(LENGTH)) * query.width(V),)
    for name in ("parts", "twice"):
        np.testing.assert_array_equal(answers.take(name), expected)
        assert answers.first_missing(name) is None


@pytest.mark.parametrize("size", range(1, 2 * LENGTH))
def test_logits_of_several_prompts_may_arrive_in_slices(size: int) -> None:
    answers = opened("a", "b", query=PositionsQuery(2))
    # One forward returns the logits of two prompts, with positions between them that no query has requested.
    pieces = [*answers.wanted("a", range(LENGTH), 0), *answers.wanted("b", range(LENGTH), LENGTH)]
    assert pieces == [Piece("a", range(2, LENGTH), 2), Piece("b", range(2, LENGTH), LENGTH + 2)]
    forward = torch.cat((LOGITS, LOGITS.flip(0)))
    for first in range(0, len(forward), size):
        answers.add(pieces, first, forward[first : first + size])
    for name, logits in (("a", LOGITS), ("b", LOGITS.flip(0))):
        np.testing.assert_array_equal(answers.take(name), torch.log_softmax(logits[2:], -1).numpy().ravel())


def test_other_requests_want_nothing_and_logits_of_dropped_ones_are_ignored() -> None:
    answers = opened("a", query=PositionsQuery(2))
    assert answers.wanted("row", range(5), 0) == []
    assert (answers.first_missing("row"), answers.first_missing("a")) == (None, 2)
    pieces = answers.wanted("a", range(5), 0)
    answers.drop("a")
    answers.add(pieces, 0, LOGITS[:5])
    assert answers.first_missing("a") is None


def test_a_missing_position_is_an_error() -> None:
    answers = opened("a", query=PositionsQuery(2))
    compute(answers, "a", range(4))
    assert answers.first_missing("a") == 4
    with pytest.raises(WorkerError, match="has computed position 6, and not 4"):
        compute(answers, "a", range(6, LENGTH))
    with pytest.raises(WorkerError, match="has ended a prompt without position 4"):
        answers.take("a")


@pytest.mark.parametrize("query", [PositionsQuery(0), PositionsQuery(0, 2), PositionsQuery.scores_from(1)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_distribution_give_no_answer(query: PositionsQuery, value: float) -> None:
    answers = opened("a", query=query)
    spoilt = LOGITS.clone()
    spoilt[1, 5] = value
    compute(answers, "a", range(4), spoilt)
    assert answers.take("a") == NO_DISTRIBUTION, "however much is missing"
