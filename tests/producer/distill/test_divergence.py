"""Divergences equal their definitions in float64, and need no array of all positions and all tokens."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmpool.distill import States, divergence, tiles
from lmpool.errors import SettingsError
from lmpool.protocol.row import Head
from tests.producer.distill import reference

BETAS = (0.0, 0.3, 1.0)
RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of at most 3 positions and 16 tokens, so that small inputs have several tiles; and equal random numbers."""
    monkeypatch.setitem(globals(), "RANDOM", np.random.default_rng(0))
    torch.manual_seed(0)
    monkeypatch.setattr(tiles, "TILE_NUMBERS", 48)
    monkeypatch.setattr(tiles, "MAX_ROWS", 3)


def logits(count: int = 5, size: int = 37, scale: float = 3.0) -> Any:
    return (scale * RANDOM.standard_normal((count, size))).astype(np.float32)


def head(size: int = 37, width: int = 4, **more: Any) -> Head:
    fields = {"bias": None, "scale": 1.0, "soft_cap": None, "dtype": "float32", **more}
    # These numbers are exact in 16 bits, as the weights of 16-bit models are.
    return Head(np.round(4 * RANDOM.standard_normal((size, width))).astype(np.float32) / 4, **fields)


def both(teacher: Any, student: Any, **options: Any) -> list[Any]:
    """The divergences that numpy and torch compute."""
    options = {"reduction": "none", **options}
    tensors = [value if isinstance(value, States) else torch.tensor(value) for value in (teacher, student)]
    ours = divergence(teacher, student, **options)
    assert isinstance(ours, np.ndarray)
    with torch.no_grad():
        theirs = divergence(*tensors, **options)
    return [ours, theirs.numpy()]


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", [1.0, 0.5, 4.0])
def test_the_divergence_of_rows_is_that_of_the_definition(beta: float, temperature: float) -> None:
    teacher, student = logits(), logits()
    for values in both(teacher, student, beta=beta, temperature=temperature):
        np.testing.assert_allclose(values, reference.divergence(teacher, student, beta, temperature), rtol=2e-5)


@pytest.mark.parametrize("beta", BETAS)
def test_large_logits_lose_no_digits(beta: float) -> None:
    """Neither logits of 10,000 and more, nor a common offset, nor a largest logit that only the last tile has."""
    rows = logits()
    rows[:, -1] += 20
    for teacher, student in ((rows * 1e4, logits() * 1e4), (rows + np.float32(1e4), np.round(logits()) - 1e4)):
        for values in both(teacher, student.astype(np.float32), beta=beta):
            expected = reference.divergence(teacher, student.astype(np.float32), beta)
            np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)
    same = rows * np.float32(1e4)
    for values in both(same, same, beta=beta):
        np.testing.assert_allclose(values, 0, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_excluded_tokens_give_inf_only_where_the_divergence_is_infinite(beta: float) -> None:
    teacher, student = logits(), logits()
    teacher[0, :20] = student[1, :20] = -np.inf  # The first tile has no token of one side.
    teacher[2, ::2] = student[2, ::2] = -np.inf
    teacher[3, 30], student[3, 31] = -1e4, -np.inf
    expected = reference.divergence(teacher, student, beta)
    assert np.isinf(expected).tolist() == {0.0: [0, 1, 0, 1, 0], 0.3: [0] * 5, 1.0: [1, 0, 0, 0, 0]}[beta]
    for values in both(teacher, student, beta=beta):
        np.testing.assert_allclose(values, expected, rtol=2e-5)
    teacher[4, 30], student[4, 30] = -1e4, -np.inf  # exp(-1e4) is 0 in float32, but the token is possible.
    if beta == 0:
        assert all(np.isinf(values[4]) for values in both(teacher, student))


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"dtype": "bfloat16", "scale": 0.5, "soft_cap": 2.0},
        {"bias": RANDOM.standard_normal(37).astype(np.float32)},
        {"dtype": "float16"},
        {"down": RANDOM.standard_normal((2, 4)).astype(np.float32), "up": np.ones((37, 2), np.float32), "scale": 0.5},
    ],
    ids=["plain", "capped", "bias", "float16", "lora"],
)
def test_states_with_a_head_are_the_rows_that_the_head_computes(beta: float, more: dict[str, Any]) -> None:
    taught, of_teacher, student = np.round(logits(5, 4)), head(**more), logits()
    expected = reference.divergence(of_teacher.logits(taught), student, beta, 2.0)
    # torch may round the 16-bit logits of a product differently, because it adds in another order.
    tolerance = 2e-5 if more.get("dtype") is None else 2e-2
    for values in both(States.of(taught, of_teacher), student, beta=beta, temperature=2.0):
        np.testing.assert_allclose(values, expected, rtol=tolerance, atol=1e-6)
    of_student = States(logits(5, 6), RANDOM.standard_normal((37, 6)).astype(np.float32))
    expected = reference.divergence(of_teacher.logits(taught), of_student.hidden @ of_student.weights.T, beta)
    values = divergence(States.of(taught, of_teacher), of_student, beta=beta, reduction="none")
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-6)
    tensors = States(torch.tensor(of_student.hidden), torch.tensor(of_student.weights))
    values = divergence(States.of(taught, of_teacher), tensors, beta=beta, reduction="none")
    np.testing.assert_allclose(values, expected, rtol=max(1e-4, tolerance), atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_are_those_of_finite_differences(beta: float, temperature: float) -> None:
    """For logits; and for hidden states, weights and bias of a capped, scaled head, each alone and together."""
    teacher = torch.tensor(logits(4, 9), dtype=torch.float64)
    teacher[0, 3] = -torch.inf if beta < 1 else 0.0
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5], dtype=torch.float64)
    options: Any = {"beta": beta, "temperature": temperature, "weights": weights, "reduction": "sum"}
    student = torch.tensor(logits(4, 9), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda rows: divergence(teacher, rows, **options), (student,))

    arrays = [torch.randn(shape, dtype=torch.float64) for shape in ((4, 3), (9, 3), (9,))]
    for chosen in ((True, True, True), (True, False, False), (False, True, False)):
        inputs = tuple(array.detach().requires_grad_(needed) for array, needed in zip(arrays, chosen, strict=True))
        assert torch.autograd.gradcheck(
            lambda h, w, b: divergence(teacher, States(h, w, b, scale=0.7, soft_cap=1.5), **options), inputs
        )


def test_gradients_in_16_bits_are_those_of_torch() -> None:
    """Gradients of bfloat16 arrays are summed in float32, also under autocast with float32 weights."""
    hidden, weights = torch.randn(40, 16).bfloat16(), torch.randn(3000, 16) / 4
    teacher = torch.randn(40, 3000)
    found = []
    for ours in (True, False):
        inputs = [hidden.clone().requires_grad_(), weights.clone().requires_grad_()]
        with torch.autocast("cpu", torch.bfloat16):
            if ours:
                loss = divergence(teacher, States(inputs[0], inputs[1]))
            else:
                logits_ = torch.nn.functional.linear(*inputs).float()
                loss = torch.nn.functional.kl_div(
                    logits_.log_softmax(-1), teacher.log_softmax(-1), reduction="batchmean", log_target=True
                )
            loss.backward()
        assert [array.grad.dtype for array in inputs if array.grad is not None] == [torch.bfloat16, torch.float32]
        found.append([loss.item(), *(array.grad.float() for array in inputs if array.grad is not None)])
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        assert (one - other).norm() < 2**-8 * other.norm(), "half of the relative precision of bfloat16"


def test_positions_without_weight_add_nothing_even_if_they_have_no_number() -> None:
    teacher, student = logits(), logits()
    weights = np.array([2.0, 0.0, 1.0, 0.0, 0.5], np.float32)
    expected = reference.divergence(teacher, student, 0.3) * weights
    teacher[1, 0], student[3] = np.nan, -np.inf
    options: Any = {"beta": 0.3, "weights": weights}
    np.testing.assert_allclose(divergence(teacher, student, reduction="none", **options), expected, rtol=1e-5)
    np.testing.assert_allclose(divergence(teacher, student, reduction="sum", **options), expected.sum(), rtol=1e-5)
    np.testing.assert_allclose(divergence(teacher, student, **options), expected.sum() / 3.5, rtol=1e-5)
    assert divergence(teacher, student, weights=np.zeros(5)) == 0, "a batch may have no position with weight"
    assert divergence(teacher, student, **options | {"weights": weights.astype(np.float64)}).dtype == np.float32
    rows = torch.tensor(student, requires_grad=True)
    divergence(teacher, rows, **options | {"weights": weights > 0}).backward()
    assert rows.grad is not None
    assert rows.grad.isfinite().all()
    assert (rows.grad != 0).any(dim=1).tolist() == [True, False, True, False, True]


def test_columns_of_padding_are_left_out_when_the_vocabulary_is_named() -> None:
    teacher, student = logits(5, 30), logits(5, 37)
    for values in both(teacher, student, vocab_size=28):
        np.testing.assert_allclose(values, reference.divergence(teacher[:, :28], student[:, :28], 0), rtol=2e-5)
    with pytest.raises(SettingsError, match=r"student: 37 tokens, but the teacher has 30; .* pass vocab_size=30"):
        divergence(teacher, student)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"beta": 1.5}, "beta: 1.5 must be a number from 0 to 1"),
        ({"temperature": 0}, "temperature: 0 must be a number of at least 1e-06"),
        ({"reduction": "batchmean"}, "reduction: 'batchmean' is not one of none, sum, mean"),
        ({"weights": np.ones(4)}, r"weights: shape \(4,\) must be \(5,\), one for each position"),
        ({"vocab_size": 38}, "vocab_size: 38 must be a whole number from 1 to 37"),
        ({"teacher": logits(4)}, "teacher: 4 positions, but the student has 5"),
        (
            {"student": logits()[None]},
            r"student: logits of shape \(1, 5, 37\) must be an array or tensor with two axes",
        ),
        ({"teacher": [[0.0]]}, "teacher: logits of shape list must be"),
    ],
)
def test_malformed_arguments_are_refused_in_one_line(options: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError, match=text) as caught:
        divergence(**{"teacher": logits(), "student": logits(), **options})
    assert "\n" not in str(caught.value)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the number of elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


@pytest.mark.parametrize("beta", BETAS)
def test_no_tensor_has_all_positions_and_all_tokens(beta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward from states make no tensor larger than a tile, or than an array of the head."""
    monkeypatch.setattr(tiles, "TILE_NUMBERS", 4096)
    monkeypatch.setattr(tiles, "MAX_ROWS", 64)
    count, size, width = 128, 1000, 8
    hidden, weights = torch.randn(count, width, requires_grad=True), torch.randn(size, width, requires_grad=True)
    teacher = States.of(logits(count, width), head(size, width, dtype="bfloat16"))
    with Largest() as largest:
        divergence(teacher, States(hidden, weights), beta=beta).backward()
    assert hidden.grad is not None
    assert weights.grad is not None
    assert largest.numbers == max(4096, size * width)

    # Tiles of few positions do not have all tokens: they would need a copy of the whole head.
    wide = States(torch.randn(2, 512), torch.randn(size, 512).bfloat16(), dtype="float32")
    with Largest() as largest, torch.no_grad():
        divergence(wide, wide, beta=beta)
    assert largest.numbers <= 4096 + 512

    student = States(logits(count, width), head(size, width).weights)
    divergence(teacher, student, beta=beta)  # The first call also imports modules, which need memory.
    tracemalloc.start()
    try:
        divergence(teacher, student, beta=beta)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < count * size * 4 / 2
