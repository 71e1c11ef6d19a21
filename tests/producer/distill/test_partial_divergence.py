"""Divergences from some tokens and a tail bound the divergence of the whole distributions from both sides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lmpool.distill import States, divergence, partial_divergence, partial_divergence_error, tiles
from lmpool.errors import SettingsError
from tests.producer.distill import reference

BETAS = (0.0, 0.3, 1.0)
RANDOM = np.random.default_rng(1)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of at most 3 positions and 16 tokens, so that small inputs have several tiles; and equal random numbers."""
    monkeypatch.setitem(globals(), "RANDOM", np.random.default_rng(1))
    torch.manual_seed(0)
    monkeypatch.setattr(tiles, "TILE_NUMBERS", 48)
    monkeypatch.setattr(tiles, "MAX_ROWS", 3)


def logits(count: int = 5, size: int = 37) -> Any:
    return (2 * RANDOM.standard_normal((count, size))).astype(np.float32)


def known_of(rows: Any, ids: Any, temperature: float = 1.0) -> tuple[tuple[Any, Any], Any]:
    """What a pool sends about these tokens: values, ids and tail."""
    p = reference.log_softmax(rows, temperature)
    values = np.where(ids >= 0, np.take_along_axis(p, np.maximum(ids, 0), axis=1), -np.inf)
    rest = p.copy()
    for row, named in zip(rest, ids, strict=True):
        row[named[named >= 0]] = -np.inf
    with np.errstate(divide="ignore"):
        tail = np.log(np.exp(rest).sum(axis=1))
    return (values.astype(np.float32), ids), tail.astype(np.float32)


def top(rows: Any, k: int) -> Any:
    return np.argsort(-rows, axis=1)[:, :k].copy()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_value_is_that_of_rows_whose_other_tokens_are_one_token(beta: float, temperature: float) -> None:
    teacher, student = logits(), logits()
    ids = top(teacher, 6)
    ids[1, 4:] = ids[2] = -1  # Padding; the third position names no token.
    known, tail = known_of(teacher, ids, temperature)
    of_student, rest = known_of(student, ids, temperature)
    expected = reference.divergence(np.column_stack([known[0], tail]), np.column_stack([of_student[0], rest]), beta)
    options: Any = {"beta": beta, "temperature": temperature, "reduction": "none"}
    np.testing.assert_allclose(partial_divergence(known, tail, student, **options), expected, rtol=1e-4, atol=1e-6)
    values = partial_divergence(known, tail, torch.tensor(student), **options)
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-6)
    assert expected[2] == 0


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("kind", ["top", "targets", "all"])
def test_the_whole_divergence_lies_between_the_value_and_the_value_plus_the_error(beta: float, kind: str) -> None:
    teacher, student = logits(200, 41), logits(200, 41)
    student[:100] = teacher[:100] + student[:100] / 10  # Half of the students are close to the teacher.
    ids = top(teacher if kind == "top" else student, 41 if kind == "all" else 5)
    known, tail = known_of(teacher, ids)
    full = reference.divergence(teacher, student, beta)
    low = partial_divergence(known, tail, student, beta=beta, reduction="none")
    for array in (np.asarray, torch.tensor):
        error = np.asarray(partial_divergence_error(known, tail, array(student), beta=beta, is_top=kind == "top"))
        assert (low <= full + 1e-5).all()
        assert (full <= low + error + 1e-5).all()
        if kind == "all":
            np.testing.assert_allclose(low, full, rtol=1e-4, atol=1e-6)
            np.testing.assert_array_equal(error, 0)
        else:
            assert np.isinf(error).all() == (beta == 1)
    if kind == "top" and beta == 0:
        assert (error <= partial_divergence_error(known, tail, student) + 1e-5).all()


def test_a_repeated_token_counts_once() -> None:
    """As in the most likely tokens and the targets of one request, joined."""
    teacher, student = logits(), logits()
    targets = np.column_stack([top(teacher, 2), [[7]] * 5, [[7]] * 5, [[-1]] * 5])
    joined, tail = known_of(teacher, np.column_stack([top(teacher, 4), targets]))
    once = np.array([sorted({*ids} - {-1}) + [-1] * (10 - len({*ids} - {-1})) for ids in joined[1].tolist()])
    expected = partial_divergence(*known_of(teacher, once), student)
    for array in (np.asarray, torch.tensor):
        np.testing.assert_allclose(partial_divergence(joined, tail, array(student)), expected, rtol=1e-6)
    assert joined[1].tolist() == np.column_stack([top(teacher, 4), targets]).tolist(), "the caller's array has changed"


def test_the_bounds_are_reached() -> None:
    """Forward KL by a tail on the student's least likely token; Jensen-Shannon by tails with no token in common."""
    teacher, student = np.log(np.array([[0.6, 0.2, 0.2], [0.5, 0.3, 0.2]], np.float32))[:, None]
    error = partial_divergence_error(*known_of(teacher, np.array([[0, 1]])), student, is_top=True)
    np.testing.assert_allclose(error, 0, atol=1e-6)
    student = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))
    teacher = np.log(np.array([[0.9, 1e-30, 1e-30, 0.1]], np.float32))
    known, tail = known_of(teacher, np.array([[0]]))
    whole = divergence(teacher, student)
    bound = partial_divergence(known, tail, student) + partial_divergence_error(known, tail, student)
    np.testing.assert_allclose(bound, whole, rtol=1e-5)
    student = np.log(np.array([[0.5, 0.5, 1e-30, 1e-30]], np.float32))
    whole = divergence(teacher, student, beta=0.5)
    bound = partial_divergence(known, tail, student, beta=0.5) + partial_divergence_error(
        known, tail, student, beta=0.5
    )
    np.testing.assert_allclose(bound, whole, rtol=1e-5)


def test_the_ids_of_all_positions_may_have_one_axis_and_the_value_of_padding_is_ignored() -> None:
    teacher, student = logits(), logits()
    known, tail = known_of(teacher, np.array([[3, 0, -1]] * 5))
    values = np.where(known[1] < 0, 0, known[0])
    for ids in (known[1], known[1][0].astype(np.int32)):
        for array in (np.asarray, torch.tensor):
            found = partial_divergence((array(values), array(ids)), tail, array(student))
            np.testing.assert_allclose(found, partial_divergence(known, tail, student), rtol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_tails_that_vanish_in_float32_may_still_be_infinitely_different(beta: float) -> None:
    sides = np.array([[0.0, -120.0, -121.0]], np.float32), np.array([[0.0, 0.0, -np.inf]], np.float32)
    teacher, student = sides if beta == 0 else sides[::-1]
    assert np.isinf(reference.divergence(teacher, student, beta)).all()
    known, tail = known_of(teacher, np.array([[0]]))
    tail = np.array([np.logaddexp.reduce(reference.log_softmax(teacher)[0, 1:])], np.float32)
    assert np.isinf(partial_divergence_error(known, tail, student, beta=beta)).all()


def test_excluded_tokens_give_inf_only_where_the_divergence_is_infinite() -> None:
    teacher, student = logits(3), logits(3)
    ids = top(teacher, 4)
    student[0, ids[0, 1]] = teacher[1, ids[1, 3]] = -np.inf
    student[2, [at for at in range(37) if at not in ids[2]]] = -np.inf  # No tail.
    known, tail = known_of(teacher, ids)
    assert np.isinf(partial_divergence(known, tail, student, reduction="none")).tolist() == [True, False, True]
    reverse = partial_divergence(known, tail, student, beta=1, reduction="none")
    assert np.isinf(reverse).tolist() == [False, True, False]
    assert np.isfinite(partial_divergence(known, tail, student, beta=0.5, reduction="none")).all()


@pytest.mark.parametrize("beta", BETAS)
def test_gradients_are_those_of_finite_differences(beta: float) -> None:
    teacher = logits(4, 19)
    ids = top(teacher, 3)
    ids[0, 1] = -1
    (values, ids), tail = known_of(teacher, ids)
    known = torch.tensor(values, dtype=torch.float64), torch.tensor(ids)
    options: Any = {"beta": beta, "temperature": 0.7, "weights": np.array([1, 2, 0, 1])}
    rows = torch.tensor(logits(4, 19), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda rows: partial_divergence(known, tail, rows, **options), (rows,))
    hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(19, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *arrays: partial_divergence(known, tail, States(*arrays), **options), (hidden, weights)
    )


def test_gradients_without_a_tail_are_finite() -> None:
    """If all tokens are named, or if all others are excluded, also by the student."""
    teacher, student = logits(2, 9), logits(2, 9)
    teacher[1, 5:] = student[1, 5:] = -np.inf
    ids = np.array([[*range(9)], [*range(5), -1, -1, -1, -1]])
    rows = torch.tensor(student, requires_grad=True)
    partial_divergence(*known_of(teacher, ids), rows, reduction="sum").backward()
    assert rows.grad is not None
    expected = np.exp(reference.log_softmax(student)) - np.exp(reference.log_softmax(teacher))
    np.testing.assert_allclose(rows.grad, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([[1, 37]], "known: ids from 1 to 37 must be from 0 to 36, or -1 for padding"),
        ([[-2, 3]], "known: ids from -2 to 3 must be from 0 to 36"),
        ([[3]], r"known, tail: shapes \(1, 2\), \(1, 1\), \(1,\) must be \(n, k\), \(n, k\) and \(n,\), where n = 1"),
        ([[1.0, 2.0]], "known: ids of .*float.* must be whole numbers"),
    ],
)
def test_malformed_tokens_are_refused_in_one_line(ids: Any, text: str) -> None:
    known = np.log(np.full((1, 2), 0.25, np.float32)), np.array(ids)
    for array in (np.asarray, torch.tensor):
        with pytest.raises(SettingsError, match=text):
            partial_divergence(known, np.log([0.5]), array(logits(1)))
