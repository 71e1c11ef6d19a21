"""From logits to rows that lose nothing that the model computed, to what is wanted of them, and the torch device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmpool.errors import SettingsError
from lmpool.protocol.query import PositionsQuery, TopK, pack_top
from lmpool.protocol.row import Encoding, NewRows, RowBlock, no_new_rows

_CACHED_NUMBERS = 1 << 19
"""Logits that the steps of narrowing find in the processor's cache again (2 MiB)."""

_SLICED_NUMBERS = 1 << 24
"""Logits whose exactness is looked at together on an accelerator (64 MiB)."""

# Of CUDA: for all devices, not the current one alone; what another backend of this process has asked for before.
_PORTABLE, _REGISTERED_ALREADY = 1, 712

_NARROW = {torch.bfloat16: Encoding.BF16, torch.float16: Encoding.F16}
_log = logging.getLogger(__name__)


class EncodedRows(NamedTuple):
    """What became of a batch's logits.

    Attributes:
        block: the rows, or None if there are none.
        failures: digest -> message of the prompts whose logits are no distribution.
    """

    block: RowBlock | None
    failures: dict[bytes, str]


class _Numbers(NamedTuple):
    """Rows still on the device: numbers (n, V), logZ (n,) unless they are F32, and which rows are sound (n,)."""

    encoding: Encoding
    numbers: Tensor
    log_z: Tensor | None
    sound: Tensor


class RowEncoder:
    """Turns logits into blocks of rows.

    Rows of a bfloat16 or float16 model travel as its logits and their logZ, bit for bit, as long as the
    logits survive the narrow dtype; all others as float32 log-probabilities.

    Args:
        dtype: the model's.
        lossy: send rows that would travel as float32 as float16 instead, which loses bits.

    Attributes:
        new_rows: gives the memory of rows, where it has some: a CPU computes them there, a GPU copies them there.
    """

    def __init__(self, dtype: torch.dtype, *, lossy: bool) -> None:
        self._dtype = dtype
        self._lossy = lossy
        self.new_rows: NewRows = no_new_rows
        # Address and size of memory that the GPU writes to by itself; None once there was some that it cannot write to.
        self._mapped: set[tuple[int, int]] | None = set()

    def encoding_of(self, logits: Tensor) -> Encoding:
        """How logits of shape (n, V) like these would travel."""
        return self._numbers(logits).encoding

    def encode(self, digests: list[bytes], logits: Tensor) -> EncodedRows:
        """Encode a batch.

        Args:
            digests: the prompt of each row.
            logits: tensor of shape (n, V) of any float dtype, on any device. -inf is a probability of 0.
        """
        encoding, numbers, log_z, sound = self._numbers(logits)
        failures = {}
        if not bool(sound.all()):
            kept = sound.tolist()
            failures = {digest: _fault(row) for digest, row, ok in zip(digests, logits, kept, strict=True) if not ok}
            digests = [digest for digest, ok in zip(digests, kept, strict=True) if ok]
            numbers, log_z = numbers[sound], None if log_z is None else log_z[sound]
        if not digests:
            return EncodedRows(None, failures)
        if encoding is Encoding.BF16:
            # numpy has no bfloat16.
            numbers = numbers.view(torch.int16)
        rows = self._copied_to_new_rows(numbers, encoding) if numbers.is_cuda else None
        if rows is None:
            rows = _to_host(numbers).numpy().view(encoding.dtype)
        block = RowBlock(digests, rows, None if log_z is None else log_z.cpu().numpy(), encoding)
        return EncodedRows(block, failures)

    def _copied_to_new_rows(self, numbers: Tensor, encoding: Encoding) -> NDArray[Any] | None:
        """Rows of a GPU, copied by it to memory that is there for them; None where it can write to none."""
        rows = None if self._mapped is None else self.new_rows(len(numbers), numbers.shape[1], encoding)
        if rows is None or self._mapped is None:
            return None
        whole = _whole_memory_of(rows)
        if whole not in self._mapped and not _map_to_gpu(*whole, numbers.device):
            self._mapped = None
            return None
        self._mapped.add(whole)
        _copy_rows(numbers, rows)
        torch.cuda.current_stream(numbers.device).synchronize()
        return rows

    def _numbers(self, logits: Tensor) -> _Numbers:
        if self._dtype == torch.bfloat16 and logits.dtype == torch.float32 and logits.device.type == "cpu":
            narrow = _narrowed_on_cpu(logits.contiguous(), self.new_rows)
            if narrow is not None:
                return narrow
        # On an accelerator in slices: engines have given nearly all memory to keys and values.
        rows = max(1, _SLICED_NUMBERS // max(1, logits.shape[1]))
        slices = torch.split(logits, rows) if logits.is_cuda else (logits,)
        exact = [self._narrowed(part) for part in slices]
        if None not in exact:
            joined = _joined([part for part in exact if part is not None])
            log_z = _joined([torch.logsumexp(part.float(), dim=-1) for part in slices])
            memory = _memory_for(joined, joined.dtype, self.new_rows)
            numbers = joined if memory is None else memory.copy_(joined)
            return _Numbers(_NARROW[joined.dtype], numbers, log_z, log_z.isfinite())
        del exact
        logprobs = None if self._lossy else _log_softmax_on_cpu(logits, self.new_rows)
        if logprobs is None:
            logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        # A single NaN or +inf among the logits makes the whole row NaN.
        sound = ~logprobs[:, 0].isnan()
        if not self._lossy:
            return _Numbers(Encoding.F32, logprobs, None, sound)
        # float16 is finest around 0, where the likeliest tokens should be.
        log_z = -logprobs.amax(dim=-1)
        return _Numbers(Encoding.F16, (logprobs + log_z[:, None]).half(), log_z, sound)

    def _narrowed(self, logits: Tensor) -> Tensor | None:
        """The logits in the model's 16-bit dtype if that loses nothing."""
        if self._dtype not in _NARROW:
            return None
        if logits.dtype == self._dtype:
            return logits
        narrow = logits.to(self._dtype)
        wide = narrow.to(logits.dtype)
        # NaN equals nothing: the row that has one is refused, and must not decide how the others travel.
        is_exact = torch.equal(wide, logits) or bool(((wide == logits) | logits.isnan()).all())
        return narrow if is_exact else None


def _scores(logits: Tensor, tokens: Sequence[int]) -> NDArray[np.float32]:
    """What tokens score after the prefixes that gave these logits, float32 (m,); it takes no row of float32."""
    targets = torch.tensor(tokens, device=logits.device)
    rows = _rows_at_once(logits)
    parts = zip(torch.split(logits, rows), torch.split(targets, rows), strict=True)
    losses = [torch.nn.functional.cross_entropy(part.float(), wanted, reduction="none") for part, wanted in parts]
    scores: NDArray[np.float32] = (-torch.cat(losses)).cpu().numpy()
    return scores


def expected_at(logits: Tensor, query: PositionsQuery, following: Sequence[int]) -> NDArray[np.float32]:
    """What is wanted of positions that have these logits.

    Args:
        logits: tensor of shape (m, V) of any float dtype, on any device.
        query: says what.
        following: the tokens that come after the positions.

    Returns:
        float32 of shape (m, width); NaN where logits are no distribution.
    """
    if query.values == "scores":
        return _scores(logits, following)[:, None]
    ids = query.target_ids
    targets, tokens = torch.from_numpy(ids).to(logits.device), torch.tensor(following, device=logits.device)
    parts, at_once = [], _rows_at_once(logits)
    for first in range(0, len(logits), at_once):
        values = _values_at(logits[first : first + at_once].float(), query)
        if query.is_of_next_token:
            values = values.gather(1, tokens[first : first + at_once, None])
        elif query.targets:
            values = values[:, targets]
        if query.top:
            best = _largest_of(values, query.top)
            parts.append(pack_top(best._replace(ids=ids[best.ids]) if query.targets else best))
        else:
            parts.append(values.cpu().numpy())
    return np.concatenate(parts)


def _values_at(logits: Tensor, query: PositionsQuery) -> Tensor:
    """Log-probabilities or logits, float32 (m, V), or their logZ, (m, 1); NaN where logits are no distribution."""
    if query.values == "logprobs":
        return torch.log_softmax(logits, dim=-1)
    log_z = _log_z(logits)[:, None]
    sound = log_z.isfinite()
    return torch.where(sound, log_z if query.values == "logz" else logits, torch.nan)


def _rows_at_once(logits: Tensor) -> int:
    """So many that they stay in the processor's cache."""
    return max(1, (_SLICED_NUMBERS if logits.is_cuda else _CACHED_NUMBERS) // logits.shape[1])


def _largest_of(rows: Tensor, k: int) -> TopK:
    """The `k` largest entries of each of some rows, as `lmpool.protocol.query.top` orders them."""
    values, ids = torch.topk(rows, min(k + 1, rows.shape[1]), dim=-1)
    least = values[:, k - 1 : k]
    # Torch does not say which of equal ones it takes: where some that equal the least are left out, the lowest ids
    # count.
    is_unsure = (values[:, k:] == least).any(dim=1)
    values, ids = values[:, :k], ids[:, :k]
    if is_unsure.any():
        count = torch.arange(rows.shape[1], device=rows.device)
        equal = torch.where(rows[is_unsure] == least[is_unsure], count, rows.shape[1])
        lowest = torch.topk(equal, k, dim=-1, largest=False, sorted=True).values
        above = (values[is_unsure] > least[is_unsure]).sum(dim=1, keepdim=True)
        place = count[:k] - above
        ids[is_unsure] = torch.where(place < 0, ids[is_unsure], lowest.gather(1, place.clamp(min=0)))
    found = TopK(values.cpu().numpy(), ids.cpu().numpy())
    order = np.lexsort((found.ids, -found.values), axis=-1)
    return TopK(np.take_along_axis(found.values, order, axis=1), np.take_along_axis(found.ids, order, axis=1))


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" is the first accelerator, else the CPU.

    Raises:
        SettingsError: this machine has no such device.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:
        # What torch says is of its own builds and kernels; AssertionError is how one without CUDA answers.
        raise SettingsError(f"device: {name!r} cannot be used: {_why_unusable(name)}") from error
    if device.type == "meta":
        raise SettingsError(f"device: 'meta' computes nothing: {_why_unusable(name)}")
    return device


def log_threads(device: str) -> None:
    """Say in the log where rows are computed, and with how many of torch's threads on the CPU."""
    threads = torch.get_num_threads()
    _log.info("computing on %s; CPU threads: %d", device, threads, extra={"threads": threads})


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _memory_for(logits: Tensor, dtype: torch.dtype, new_rows: NewRows) -> Tensor | None:
    """Memory for the rows of logits (n, V) on the CPU, as numbers of a dtype, if there is some: `NewRows`."""
    encoding = _NARROW.get(dtype, Encoding.F32)
    memory = None if logits.device.type != "cpu" else new_rows(len(logits), logits.shape[1], encoding)
    if memory is None:
        return None
    # numpy has no bfloat16.
    return (
        torch.from_numpy(memory.view(np.int16)).view(dtype) if encoding is Encoding.BF16 else torch.from_numpy(memory)
    )


def _log_softmax_on_cpu(logits: Tensor, new_rows: NewRows) -> Tensor | None:
    """Log-probabilities in the memory that there is for rows, some at a time so that they stay in the cache."""
    logprobs = _memory_for(logits, torch.float32, new_rows)
    if logprobs is None:
        return None
    rows = max(1, _CACHED_NUMBERS // max(1, logits.shape[1]))
    for at in range(0, len(logits), rows):
        logprobs[at : at + rows] = torch.log_softmax(logits[at : at + rows], dim=-1, dtype=torch.float32)
    return logprobs


def _narrowed_on_cpu(logits: Tensor, new_rows: NewRows) -> _Numbers | None:
    """float32 logits as bfloat16 if that loses nothing, some rows at a time so that they stay in the cache.

    As whole-batch operations this takes more than twice the processor's time. A NaN is no loss: its row fails.
    """
    narrow, log_z = None, torch.empty(len(logits))
    rows = max(1, _CACHED_NUMBERS // max(1, logits.shape[1]))
    bits = logits.numpy().view(np.uint32)
    for at in range(0, len(logits), rows):
        part = logits[at : at + rows]
        # bfloat16 is the upper half of float32: nothing is lost when all lower halves are zero.
        if np.bitwise_or.reduce(bits[at : at + rows], axis=None) & 0xFFFF and not _loses_only_nan(part):
            return None
        if narrow is None:
            # Only now: of a model whose logits never fit, slots would be taken in vain in each step.
            memory = _memory_for(logits, torch.bfloat16, new_rows)
            narrow = torch.empty(logits.shape, dtype=torch.bfloat16) if memory is None else memory
        narrow[at : at + rows] = part
        log_z[at : at + rows] = _log_z(part)
    return None if narrow is None else _Numbers(Encoding.BF16, narrow, log_z, log_z.isfinite())


def _log_z(logits: Tensor) -> Tensor:
    """The logarithm of the sum of the exponentials of some rows of logits, float32 (m,), that fit the cache."""
    if logits.device.type != "cpu":
        return torch.logsumexp(logits, dim=-1)
    # The fused kernel is much faster than logsumexp. The likeliest token has the smallest rounding error.
    return logits.amax(-1) - torch.log_softmax(logits, -1).amax(-1)


def _loses_only_nan(logits: Tensor) -> bool:
    return bool(((logits.bfloat16().float() == logits) | logits.isnan()).all())


def _to_host(numbers: Tensor) -> Tensor:
    """A block's one copy; from an accelerator into pinned memory, which is several times as fast."""
    if not numbers.is_cuda:
        # Rows of memory that is for rows are apart from each other, and contiguous themselves.
        return numbers if numbers.device.type == "cpu" and numbers.stride(1) == 1 else numbers.cpu().contiguous()
    numbers = numbers.contiguous()
    copied = numbers.to("cpu", non_blocking=True)
    torch.cuda.current_stream(numbers.device).synchronize()
    return copied


def _copy_rows(numbers: Tensor, rows: NDArray[Any]) -> None:
    """Have rows copied, each by itself: torch copies what is apart from each other by way of other memory."""
    # Of types of 16 bits numpy lacks one.
    memory = torch.from_numpy(rows.view(np.int16 if rows.dtype.itemsize == 2 else np.float32)).view(numbers.dtype)
    for row, to in zip(numbers, memory, strict=True):
        to.copy_(row, non_blocking=True)


def _whole_memory_of(rows: NDArray[Any]) -> tuple[int, int]:
    """Address and size of the memory that an array is a view of."""
    whole: Any = rows
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    if isinstance(whole.base, memoryview):
        whole = np.frombuffer(memoryview(whole.base.obj), np.uint8)
    return whole.ctypes.data, whole.nbytes


def _map_to_gpu(address: int, size: int, device: torch.device) -> bool:
    """Have a GPU write to memory of this process by itself: else each copy goes by way of memory of the driver's."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        error = int(cudart.cudaHostRegister(address, size, _PORTABLE))
    if error == _REGISTERED_ALREADY:
        error = 0
    if error:
        _log.warning("rows are copied to shared memory, the GPU cannot write there: cudaHostRegister: error %d", error)
        # CUDA tells of an error once more at the next launch, whoever launches.
        with suppress(RuntimeError):
            torch.zeros(1, device=device)
    return not error


def _fault(logits: Tensor) -> str:
    """Why one row of logits is no distribution."""
    values = logits.float().cpu().numpy()
    for name, faulty in (("NaN", np.isnan(values)), ("+inf", np.isposinf(values))):
        if faulty.any():
            return f"the model returned {faulty.sum()} of {faulty.size} logits as {name}: its row has no finite logZ"
    return f"the model returned -inf for all {values.size} logits: its row has no finite logZ"


def _why_unusable(name: str) -> str:
    kind = name.partition(":")[0]
    here = f"this machine has {', '.join(_devices())}"
    if kind == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        return f"{here}, and this torch is built without CUDA: install one with it"
    if kind == "cuda" and not torch.cuda.is_available():
        return f"{here}: torch finds no GPU (`nvidia-smi` tells whether the driver does)"
    if kind == "mps":
        return f"{here}. 'mps' is the GPU of a Mac with Apple silicon, macOS 14 or later"
    return here


def _devices() -> list[str]:
    devices = ["'cpu'", *(f"'cuda:{index}'" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        devices.append("'mps'")
    return devices
