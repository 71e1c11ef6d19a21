"""Encodes logits as rows without changing a bit, extracts values at positions, and picks the torch device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmpool.errors import SettingsError, WorkerError, first_line
from lmpool.protocol.job import decode_ids
from lmpool.protocol.picks import TopK
from lmpool.protocol.query import NO_TOKEN, PositionsQuery, pack_top
from lmpool.protocol.row import Encoding, NewRows, RowBlock, no_new_rows
from lmpool.workers.backends.output_head import pack_states
from lmpool.workers.execution.contract import QUERY_ERRORS, BackendJob, failure_of

# Logits per slice on a CPU (2 MiB in float32): few enough that the slice stays in the processor's cache.
_CACHED_NUMBERS = 1 << 19
# Logits per slice on an accelerator (64 MiB in float32): few, because engines leave little device memory free.
_SLICED_NUMBERS = 1 << 24
_SPARE_ENTRIES = 64  # Entries beyond the k largest that are fetched, so that they rarely end among equal entries.
_PORTABLE = 1  # cudaHostRegister flag: register the memory for all devices.
_REGISTERED_ALREADY = 712  # cudaHostRegister error: another backend of this process has registered the memory already.

_NARROW = {torch.bfloat16: Encoding.BF16, torch.float16: Encoding.F16}
_log = logging.getLogger(__name__)

MAX_LOGITS = 1 << 25  # Max logits at positions that a backend computes at once: 128 MiB in float32.
NO_DISTRIBUTION = "the model returned logits that are no distribution: NaN or infinite"


class EncodedRows(NamedTuple):
    """The encoded logits of a batch."""

    block: RowBlock | None  # The encoded rows; None if every prompt failed.
    failures: dict[bytes, str]  # Digest -> message of each prompt whose logits are not a distribution.


class _Numbers(NamedTuple):
    """Rows on the device: numbers (n, V); logZ (n,), or None for F32; whether each row is a distribution (n,)."""

    encoding: Encoding
    numbers: Tensor
    log_z: Tensor | None
    sound: Tensor


class RowEncoder:
    """Turns logits into blocks of rows.

    If a bfloat16 or float16 model's logits fit its dtype without loss, a row holds these logits and their logZ. All
    other rows hold float32 log-probabilities.

    Args:
        dtype: dtype of the model.
        lossy: encode as float16 the rows that would otherwise be float32; this loses bits.

    Attributes:
        is_lossy: whether rows that would otherwise be float32 are encoded as float16.
        new_rows: function that provides shared memory for rows. A CPU computes rows in this memory, a GPU copies to it.
    """

    def __init__(self, dtype: torch.dtype, *, lossy: bool) -> None:
        self._dtype = dtype
        self.is_lossy = lossy
        self.new_rows: NewRows = no_new_rows
        # Address and size of each memory that the GPU can write to; None after CUDA refused to register memory.
        self._mapped: set[tuple[int, int]] | None = set()

    def encode(self, digests: list[bytes], logits: Tensor) -> EncodedRows:
        """Encode a batch of logits (n, V), of any float dtype, on any device. A logit of -inf means probability 0."""
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
            numbers = numbers.view(torch.int16)  # View bfloat16 as integers, because numpy has no bfloat16.
        rows = self._copied_to_new_rows(numbers, encoding) if numbers.is_cuda else None
        if rows is None and numbers.is_cuda:
            # Copy without blocking, so that torch uses pinned memory, which is several times as fast.
            copied = numbers.contiguous().to("cpu", non_blocking=True)
            torch.cuda.current_stream(numbers.device).synchronize()
            rows = copied.numpy().view(encoding.dtype)
        elif rows is None:
            # Copy only rows that are not contiguous. In shared memory each row is contiguous, with gaps between rows.
            copied = numbers.cpu()
            rows = (copied if copied.stride(1) == 1 else copied.contiguous()).numpy().view(encoding.dtype)
        return EncodedRows(RowBlock(digests, rows, None if log_z is None else log_z.cpu().numpy(), encoding), failures)

    def _copied_to_new_rows(self, numbers: Tensor, encoding: Encoding) -> NDArray[Any] | None:
        """Have the GPU copy rows to shared memory, and return them; None if the GPU can write to no shared memory."""
        if self._mapped is None or (rows := self.new_rows(len(numbers), numbers.shape[1], encoding)) is None:
            return None
        whole = _whole_memory_of(rows)
        if whole not in self._mapped and not _map_to_gpu(*whole, numbers.device):
            self._mapped = None
            return None
        self._mapped.add(whole)
        memory = _as_tensor(rows, numbers.dtype)
        # Copy row by row: with gaps between the rows, torch would copy the whole batch through a temporary buffer.
        for row, target in zip(numbers, memory, strict=True):
            target.copy_(row, non_blocking=True)
        torch.cuda.current_stream(numbers.device).synchronize()
        return rows

    def _numbers(self, logits: Tensor) -> _Numbers:
        if (narrow := self._narrowed(logits)) is not None:
            return narrow
        logprobs = None if self.is_lossy else self._memory_for(logits, torch.float32)
        if logprobs is None:
            logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        else:
            rows = rows_per_slice(logits)
            for at in range(0, len(logits), rows):
                logprobs[at : at + rows] = torch.log_softmax(logits[at : at + rows], dim=-1, dtype=torch.float32)
        # A single NaN or +inf among the logits makes the whole row NaN.
        sound = ~logprobs[:, 0].isnan()
        if not self.is_lossy:
            return _Numbers(Encoding.F32, logprobs, None, sound)
        # Shift each row so that its most likely token is at 0, where float16 is most precise.
        log_z = -logprobs.amax(dim=-1)
        return _Numbers(Encoding.F16, (logprobs + log_z[:, None]).half(), log_z, sound)

    def _narrowed(self, logits: Tensor) -> _Numbers | None:
        """The logits in the model's 16-bit dtype; None if the dtype would lose bits.

        The logits are processed in slices: on a CPU, slices take half the time of operations on the whole batch.
        """
        if self._dtype not in _NARROW:
            return None
        numbers, is_narrow = None, logits.dtype == self._dtype
        log_z, rows = torch.empty(len(logits), device=logits.device), rows_per_slice(logits)
        for at in range(0, len(logits), rows):
            part = logits[at : at + rows]
            if not is_narrow and not _is_exact(part, self._dtype):
                return None
            if numbers is None:
                # Reserve shared memory only after the first slice fits the dtype: the logits of some models never fit.
                memory = self._memory_for(logits, self._dtype)
                made = logits if is_narrow else torch.empty_like(logits, dtype=self._dtype)
                numbers = made if memory is None else memory
            if numbers is not logits:
                numbers[at : at + rows] = part
            log_z[at : at + rows] = torch.logsumexp(part.float(), dim=-1) if is_narrow else log_z_of(part.float())
        return None if numbers is None else _Numbers(_NARROW[self._dtype], numbers, log_z, log_z.isfinite())

    def _memory_for(self, logits: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Shared memory for the rows of logits (n, V) on a CPU; None on other devices, or without shared memory."""
        encoding = _NARROW.get(dtype, Encoding.F32)
        if logits.device.type != "cpu" or (memory := self.new_rows(len(logits), logits.shape[1], encoding)) is None:
            return None
        return _as_tensor(memory, dtype)


def _as_tensor(rows: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """View the memory of rows as a tensor of a dtype; numpy itself has no bfloat16."""
    return torch.from_numpy(rows.view(np.int16 if rows.dtype.itemsize == 2 else np.float32)).view(dtype)


def rows_per_slice(logits: Tensor) -> int:
    """The number of rows of logits (n, V) to process in one slice."""
    return max(1, (_SLICED_NUMBERS if logits.is_cuda else _CACHED_NUMBERS) // max(1, logits.shape[1]))


def _is_exact(logits: Tensor, dtype: torch.dtype) -> bool:
    """Whether logits can be converted to a 16-bit dtype without loss."""
    has_halves = dtype is torch.bfloat16 and logits.dtype is torch.float32 and logits.device.type == "cpu"
    # bfloat16 is the upper half of float32: the conversion is exact if all lower halves are zero.
    if has_halves and not np.bitwise_or.reduce(logits.numpy().view(np.uint32), axis=None) & 0xFFFF:
        return True
    wide = logits.to(dtype).to(logits.dtype)
    # Accept NaN, which equals no number: a row with NaN fails later, and must not change the encoding of other rows.
    return torch.equal(wide, logits) or bool(((wide == logits) | logits.isnan()).all())


def log_z_of(logits: Tensor) -> Tensor:
    """The log-sum-exp of each row of a slice of logits, float32 (m,)."""
    if logits.device.type != "cpu":
        return torch.logsumexp(logits, dim=-1)
    # The fused log_softmax is much faster than logsumexp. Use the largest logit, where the rounding error is smallest.
    return logits.amax(-1) - torch.log_softmax(logits, -1).amax(-1)


def pick_device(name: str) -> torch.device:
    """The torch device `name`; "auto" is the first accelerator, else the CPU. Refuses a device that does not exist."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        if torch.empty(1, device=device).device.type != "meta":
            return device
        reason = "it computes nothing"  # Tensors on the device "meta" have shapes and no numbers.
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:
        reason = first_line(error)  # torch raises AssertionError for "cuda" if it was built without CUDA.
    found = ["'cpu'", *(f"'cuda:{index}'" for index in range(torch.cuda.device_count()))]
    found += ["'mps'"] if torch.backends.mps.is_available() else []
    raise SettingsError(f"device: {name!r} cannot be used: this machine has {', '.join(found)} ({reason})")


def log_threads(device: str) -> None:
    """Log the device of a backend and the number of torch's CPU threads."""
    threads = torch.get_num_threads()
    _log.info("computing on %s; CPU threads: %d", device, threads, extra={"threads": threads})


def _whole_memory_of(rows: NDArray[Any]) -> tuple[int, int]:
    """Address and size of the whole memory of which an array is a view."""
    whole: Any = rows
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    if isinstance(whole.base, memoryview):
        whole = np.frombuffer(memoryview(whole.base.obj), np.uint8)
    return whole.ctypes.data, whole.nbytes


def _map_to_gpu(address: int, size: int, device: torch.device) -> bool:
    """Register memory of this process, so that a GPU writes to it directly and not through the driver's buffer."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        error = int(cudart.cudaHostRegister(address, size, _PORTABLE))
    if error in (0, _REGISTERED_ALREADY):
        return True
    _log.warning("the GPU cannot write to shared memory, so rows are copied: cudaHostRegister: error %d", error)
    # Launch a kernel and ignore its error, because CUDA reports the error of the registration again at the next launch.
    with suppress(RuntimeError):
        torch.zeros(1, device=device)
    return False


def _fault(logits: Tensor) -> str:
    """The reason why a row of logits is not a distribution."""
    values = logits.float().cpu().numpy()
    for name, faulty in (("NaN", np.isnan(values)), ("+inf", np.isposinf(values))):
        if faulty.any():
            return f"the model returned {faulty.sum()} of {faulty.size} logits as {name}: its row has no finite logZ"
    return f"the model returned -inf for all {values.size} logits: its row has no finite logZ"


def values_at_positions(states: Tensor, query: PositionsQuery, ids: bytes, begin: int) -> NDArray[np.float32] | None:
    """The values (m, width) that a query requests at the m positions from `begin` on.

    None if a value is NaN, or a hidden state is infinite. A log-probability may be -inf.

    Args:
        states: logits (m, V) of the positions, or hidden states (m, d) for a query that requests these.
        query: the query.
        ids: the token ids of the whole prompt, encoded as in a job.
        begin: the first of the positions.
    """
    if query.values == "hidden":  # Check before packing, which may turn numbers into NaN.
        return pack_states(states) if bool(states.isfinite().all()) else None
    positions, parts = range(begin, begin + len(states)), []
    following = np.zeros(len(states), np.int64)  # The token after each position; 0 after the prompt's last position.
    known = decode_ids(ids)[begin + 1 : begin + 1 + len(states)]
    following[: len(known)] = known
    targets = query.targets_at(positions)
    at_once = rows_per_slice(states)
    for first in range(0, len(states), at_once):
        cut = slice(first, first + at_once)
        parts.append(_values_at(states[cut].float(), query, targets[cut], following[cut]))
    values = np.concatenate(parts)
    return None if np.isnan(values).any() else values


def _values_at(
    logits: Tensor, query: PositionsQuery, targets: NDArray[np.int64], following: NDArray[np.int64]
) -> NDArray[np.float32]:
    """The values (m, width) at positions with logits (m, V), in the order of `PositionsQuery.of`.

    They are NaN for logits that are no distribution.
    """
    highest, temperature = logits.amax(-1, keepdim=True), query.temperature
    # Subtract the largest logit before the division: float32 has too few digits for quotients of small temperatures.
    shifted = logits if temperature == 1 else (logits - highest).div_(temperature)
    rows = logprobs = torch.log_softmax(shifted, dim=-1)
    if query.values == "logits":
        rows = torch.where(logprobs[:, :1].isnan(), torch.nan, logits if temperature == 1 else logits / temperature)
    if not query.is_of_entries:
        return np.asarray(rows.cpu().numpy())
    columns, named, device = list[NDArray[np.float32]](), list[Tensor](), logits.device
    if query.top:
        choices = query.choice_ids
        best = _largest_of(rows if choices is None else rows[:, torch.from_numpy(choices).to(device)], query.top)
        best = best if choices is None else best._replace(ids=choices[best.ids])
        columns.append(pack_top(best))
        named.append(torch.from_numpy(best.ids).to(device))
    if query.targets:
        ids = torch.from_numpy(np.array(targets)).to(device)  # Targets for all positions are a read-only view.
        is_padding = ids == NO_TOKEN
        columns.append(rows.gather(1, ids.masked_fill(is_padding, 0)).masked_fill(is_padding, -torch.inf).cpu().numpy())
        named.append(ids.masked_fill(is_padding, rows.shape[1]))
    if query.next_token:
        columns.append(rows.gather(1, torch.from_numpy(following).to(device)[:, None]).cpu().numpy())
    if query.logz:
        # Use the largest logit, where the rounding error is smallest.
        columns.append((highest / temperature - logprobs.amax(-1, keepdim=True)).cpu().numpy())
    if query.tail:
        columns.append(_tail_of(rows, torch.cat(named, dim=1)).cpu().numpy())
    return np.concatenate(columns, axis=1)


def _tail_of(rows: Tensor, named: Tensor) -> Tensor:
    """The log-sum-exp (m, 1) of the entries of rows (m, V) that are not in `named` (m, k); the id V is padding."""
    rest = rows.new_full((len(rows), rows.shape[1] + 1), -torch.inf)
    rest[:, :-1] = rows
    rest.scatter_(1, named, -torch.inf)
    highest = rest.amax(-1, keepdim=True)
    # See `log_z_of`; here all entries of a row may be -inf.
    tail = highest - torch.log_softmax(rest, -1).amax(-1, keepdim=True)
    return torch.where(highest.isneginf(), highest, tail)


def _largest_of(rows: Tensor, k: int) -> TopK:
    """The `k` largest entries of each row, in the order of `lmpool.protocol.picks.top`."""
    # torch.topk does not define which of several equal entries it returns, and 16-bit logits have many equal entries.
    # So fetch more entries, and choose the lowest ids among equal entries.
    values, ids = torch.topk(rows, min(k + _SPARE_ENTRIES, rows.shape[1]), dim=-1)
    ids, order = torch.sort(ids, dim=-1)
    values, order = torch.sort(values.gather(1, order), dim=-1, descending=True, stable=True)
    ids, least = ids.gather(1, order), values[:, k - 1 : k]
    # If the last fetched entry equals the k-th, entries with lower ids may be missing.
    is_unsure = (values[:, -1:] == least).any(dim=1) & (values.shape[1] < rows.shape[1])
    values, ids = values[:, :k], ids[:, :k]
    if is_unsure.any():
        count = torch.arange(rows.shape[1], device=rows.device)
        equal = torch.where(rows[is_unsure] == least[is_unsure], count, rows.shape[1])
        lowest = torch.topk(equal, k, dim=-1, largest=False, sorted=True).values
        above = (values[is_unsure] > least[is_unsure]).sum(dim=1, keepdim=True)
        place = count[:k] - above
        ids[is_unsure] = torch.where(place < 0, ids[is_unsure], lowest.gather(1, place.clamp(min=0)))
    return TopK(values.cpu().numpy(), ids.cpu().numpy())


class Piece(NamedTuple):
    """Consecutive positions of one prompt in a forward."""

    request: str  # The engine's request name of the prompt.
    positions: range  # Range of positions in the prompt.
    row: int  # Index of the first position in the forward's logits or hidden states; the next positions follow it.


@dataclass(slots=True)
class _OpenAnswer:
    """The incomplete answer of a prompt in flight: the values computed so far, or the reason of a failure."""

    job: BackendJob
    query: PositionsQuery
    missing: range
    parts: list[NDArray[np.float32]] = field(default_factory=list)
    failure: str = ""

    def add(self, states: Tensor) -> None:
        """Add the values of the next positions, from their logits or hidden states."""
        begin = self.missing.start
        self.missing = range(begin + len(states), self.missing.stop)
        if self.failure:
            return
        try:
            if (values := values_at_positions(states, self.query, self.job.ids, begin)) is None:
                self.failure = NO_DISTRIBUTION
            else:
                self.parts.append(values)
        except QUERY_ERRORS as error:  # Fail this prompt only: an exception in the engine's step would end the engine.
            self.failure = failure_of(error)
        if self.failure:
            self.parts.clear()


class PositionAnswers:
    """The incomplete answers of all jobs in flight that request values at positions, by the engine's request names.

    Values of a position that has values already are ignored: engines compute preempted prompts again.
    """

    def __init__(self) -> None:
        self._open: dict[str, _OpenAnswer] = {}

    def open(self, request: str, job: BackendJob) -> None:
        """Start to collect the answer of a job that has a positions query."""
        assert job.positions is not None
        self._open[request] = _OpenAnswer(job, job.positions, job.span)

    def drop(self, request: str) -> None:
        """Discard the answer of a request, if there is one."""
        self._open.pop(request, None)

    def first_missing(self, request: str) -> int | None:
        """The first position that the engine must still compute; None for a request whose result is a row."""
        answer = self._open.get(request)
        return None if answer is None else answer.missing.start

    def wanted(self, request: str, computed: range, row: int) -> list[Piece]:
        """The positions of `computed` that a request still misses; `row`: row of the first position in the logits."""
        answer = self._open.get(request)
        missing = range(0) if answer is None else answer.missing
        wanted = range(max(missing.start, computed.start), min(missing.stop, computed.stop))
        return [Piece(request, wanted, row + wanted.start - computed.start)] if wanted else []

    def wants_states(self, request: str) -> bool:
        """Whether a request wants hidden states, and not values that are computed from logits."""
        answer = self._open.get(request)
        return answer is not None and answer.query.values == "hidden"

    def add(self, pieces: Sequence[Piece], first: int, states: Tensor) -> None:
        """Add the values of a slice of a forward's logits, or of its hidden states if the pieces' requests want them.

        `first` is the index of the slice's first row.

        Raises:
            WorkerError: the engine has not computed the next missing position.
        """
        for piece in pieces:
            begin, end = max(piece.row, first), min(piece.row + len(piece.positions), first + len(states))
            answer = self._open.get(piece.request)
            if begin < end and answer is not None:
                position = piece.positions[begin - piece.row]
                if position != answer.missing.start:
                    raise WorkerError(f"the engine has computed position {position}, and not {answer.missing.start}")
                answer.add(states[begin - first : end - first])

    def take(self, request: str) -> NDArray[np.float32] | str:
        """Remove a finished request; returns its answer, float32 (n * width,), or the reason of its failure."""
        answer = self._open.pop(request)
        if not answer.failure and answer.missing:
            raise WorkerError(f"the engine has ended a prompt without position {answer.missing.start}")
        return answer.failure or np.concatenate(answer.parts).ravel()
