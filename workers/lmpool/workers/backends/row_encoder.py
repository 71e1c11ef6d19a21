"""Encoding of logits as rows, without losing a bit that the model computed; and the choice of the torch device."""

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
from lmpool.protocol.query import PositionsQuery, TopK, pack_top
from lmpool.protocol.row import Encoding, NewRows, RowBlock, no_new_rows
from lmpool.workers.execution.contract import QUERY_ERRORS, BackendJob, failure_of

_CACHED_NUMBERS = 1 << 19
"""Logits per slice on a CPU (2 MiB in float32), so that all operations on a slice find it in the processor's cache."""

_SLICED_NUMBERS = 1 << 24
"""Logits per slice on an accelerator (64 MiB in float32), where engines leave little free memory."""

_PORTABLE = 1  # cudaHostRegister flag: register the memory for all devices.
_REGISTERED_ALREADY = 712  # cudaHostRegister error: another backend of this process registered the memory.

_NARROW = {torch.bfloat16: Encoding.BF16, torch.float16: Encoding.F16}
_log = logging.getLogger(__name__)

NO_DISTRIBUTION = "the model returned logits that are no distribution: NaN or infinite"


class EncodedRows(NamedTuple):
    """The encoded logits of a batch.

    Attributes:
        block: the rows, or None if every prompt failed.
        failures: digest -> message, for prompts whose logits are not a distribution.
    """

    block: RowBlock | None
    failures: dict[bytes, str]


class _Numbers(NamedTuple):
    """Rows on the device: numbers (n, V), logZ (n,) unless they are F32, and whether each is a distribution (n,)."""

    encoding: Encoding
    numbers: Tensor
    log_z: Tensor | None
    sound: Tensor


class RowEncoder:
    """Turns logits into blocks of rows.

    The rows of a bfloat16 or float16 model are its logits with their logZ, bit for bit, if the logits survive the
    narrow dtype. All other rows are float32 log-probabilities.

    Args:
        dtype: the model's.
        lossy: encode rows as float16 that would otherwise be float32, which loses bits.

    Attributes:
        new_rows: provides shared memory for rows. A CPU computes rows there, a GPU copies them there.
    """

    def __init__(self, dtype: torch.dtype, *, lossy: bool) -> None:
        self._dtype = dtype
        self._lossy = lossy
        self.new_rows: NewRows = no_new_rows
        # Address and size of the memory that the GPU can write to; None after CUDA has refused to register some.
        self._mapped: set[tuple[int, int]] | None = set()

    def encoding_of(self, logits: Tensor) -> Encoding:
        """The encoding of logits (n, V) like these."""
        return self._numbers(logits).encoding

    def encode(self, digests: list[bytes], logits: Tensor) -> EncodedRows:
        """Encode the logits (n, V) of a batch, of any float dtype, on any device. -inf is a probability of 0."""
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
            numbers = numbers.view(torch.int16)  # numpy has no bfloat16.
        rows = self._copied_to_new_rows(numbers, encoding) if numbers.is_cuda else None
        if rows is None and numbers.is_cuda:
            # Into pinned memory, which is several times as fast.
            copied = numbers.contiguous().to("cpu", non_blocking=True)
            torch.cuda.current_stream(numbers.device).synchronize()
            rows = copied.numpy().view(encoding.dtype)
        elif rows is None:
            # In shared memory each row is contiguous, and rows are apart from each other.
            copied = numbers.cpu()
            rows = (copied if copied.stride(1) == 1 else copied.contiguous()).numpy().view(encoding.dtype)
        return EncodedRows(RowBlock(digests, rows, None if log_z is None else log_z.cpu().numpy(), encoding), failures)

    def _copied_to_new_rows(self, numbers: Tensor, encoding: Encoding) -> NDArray[Any] | None:
        """Rows that the GPU has copied to shared memory; None if it can write to none."""
        if self._mapped is None or (rows := self.new_rows(len(numbers), numbers.shape[1], encoding)) is None:
            return None
        whole = _whole_memory_of(rows)
        if whole not in self._mapped and not _map_to_gpu(*whole, numbers.device):
            self._mapped = None
            return None
        self._mapped.add(whole)
        memory = _as_tensor(rows, numbers.dtype)
        # Row by row: torch copies rows that are not contiguous with each other through a temporary buffer.
        for row, target in zip(numbers, memory, strict=True):
            target.copy_(row, non_blocking=True)
        torch.cuda.current_stream(numbers.device).synchronize()
        return rows

    def _numbers(self, logits: Tensor) -> _Numbers:
        if (narrow := self._narrowed(logits)) is not None:
            return narrow
        logprobs = None if self._lossy else self._memory_for(logits, torch.float32)
        if logprobs is None:
            logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        else:
            rows = rows_per_slice(logits)
            for at in range(0, len(logits), rows):
                logprobs[at : at + rows] = torch.log_softmax(logits[at : at + rows], dim=-1, dtype=torch.float32)
        # A single NaN or +inf among the logits makes the whole row NaN.
        sound = ~logprobs[:, 0].isnan()
        if not self._lossy:
            return _Numbers(Encoding.F32, logprobs, None, sound)
        # float16 is most precise around 0, so that is where the most likely tokens must be.
        log_z = -logprobs.amax(dim=-1)
        return _Numbers(Encoding.F16, (logprobs + log_z[:, None]).half(), log_z, sound)

    def _narrowed(self, logits: Tensor) -> _Numbers | None:
        """The logits in the model's 16-bit dtype if that loses nothing.

        On a CPU, slices take half the time of operations on the whole batch.
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
                # Only now: the logits of some models never fit, and would reserve shared memory in each step.
                memory = self._memory_for(logits, self._dtype)
                made = logits if is_narrow else torch.empty_like(logits, dtype=self._dtype)
                numbers = made if memory is None else memory
            if numbers is not logits:
                numbers[at : at + rows] = part
            log_z[at : at + rows] = torch.logsumexp(part.float(), dim=-1) if is_narrow else log_z_of(part.float())
        return None if numbers is None else _Numbers(_NARROW[self._dtype], numbers, log_z, log_z.isfinite())

    def _memory_for(self, logits: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Shared memory for the rows of logits (n, V) on a CPU; None on other devices and where there is none."""
        encoding = _NARROW.get(dtype, Encoding.F32)
        if logits.device.type != "cpu" or (memory := self.new_rows(len(logits), logits.shape[1], encoding)) is None:
            return None
        return _as_tensor(memory, dtype)


def _as_tensor(rows: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """The memory of rows as a tensor. numpy lacks one of the 16-bit types."""
    return torch.from_numpy(rows.view(np.int16 if rows.dtype.itemsize == 2 else np.float32)).view(dtype)


def rows_per_slice(logits: Tensor) -> int:
    """Rows of logits (n, V) to compute together."""
    return max(1, (_SLICED_NUMBERS if logits.is_cuda else _CACHED_NUMBERS) // max(1, logits.shape[1]))


def _is_exact(logits: Tensor, dtype: torch.dtype) -> bool:
    """Whether logits lose nothing in a 16-bit dtype."""
    has_halves = dtype is torch.bfloat16 and logits.dtype is torch.float32 and logits.device.type == "cpu"
    # bfloat16 is the upper half of float32: nothing is lost if all lower halves are zero.
    if has_halves and not np.bitwise_or.reduce(logits.numpy().view(np.uint32), axis=None) & 0xFFFF:
        return True
    wide = logits.to(dtype).to(logits.dtype)
    # NaN equals nothing. A row with a NaN is refused, and must not decide the encoding of the others.
    return torch.equal(wide, logits) or bool(((wide == logits) | logits.isnan()).all())


def log_z_of(logits: Tensor) -> Tensor:
    """The log-sum-exp of each row of a slice of logits, float32 (m,)."""
    if logits.device.type != "cpu":
        return torch.logsumexp(logits, dim=-1)
    # The fused kernel is much faster than logsumexp. The most likely token has the smallest rounding error.
    return logits.amax(-1) - torch.log_softmax(logits, -1).amax(-1)


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" is the first accelerator, else the CPU. Refuses a device that does not exist."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        # "meta" has shapes without numbers.
        is_usable, reason = torch.empty(1, device=device).device.type != "meta", "it computes nothing"
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:
        # A torch that is built without CUDA raises AssertionError.
        is_usable, reason = False, first_line(error)
    if not is_usable:
        found = ["'cpu'", *(f"'cuda:{index}'" for index in range(torch.cuda.device_count()))]
        found += ["'mps'"] if torch.backends.mps.is_available() else []
        raise SettingsError(f"device: {name!r} cannot be used: this machine has {', '.join(found)} ({reason})")
    return device


def log_threads(device: str) -> None:
    """Log the device and the number of torch's CPU threads."""
    threads = torch.get_num_threads()
    _log.info("computing on %s; CPU threads: %d", device, threads, extra={"threads": threads})


def _whole_memory_of(rows: NDArray[Any]) -> tuple[int, int]:
    """Address and size of the memory that an array is a view of."""
    whole: Any = rows
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    if isinstance(whole.base, memoryview):
        whole = np.frombuffer(memoryview(whole.base.obj), np.uint8)
    return whole.ctypes.data, whole.nbytes


def _map_to_gpu(address: int, size: int, device: torch.device) -> bool:
    """Let a GPU write to memory of this process directly; otherwise the driver copies through its own buffer."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        error = int(cudart.cudaHostRegister(address, size, _PORTABLE))
    if error in (0, _REGISTERED_ALREADY):
        return True
    _log.warning("the GPU cannot write to shared memory, so rows are copied: cudaHostRegister: error %d", error)
    # CUDA reports an error again at the next launch, which must be this one.
    with suppress(RuntimeError):
        torch.zeros(1, device=device)
    return False


def _fault(logits: Tensor) -> str:
    """Why one row of logits is not a distribution."""
    values = logits.float().cpu().numpy()
    for name, faulty in (("NaN", np.isnan(values)), ("+inf", np.isposinf(values))):
        if faulty.any():
            return f"the model returned {faulty.sum()} of {faulty.size} logits as {name}: its row has no finite logZ"
    return f"the model returned -inf for all {values.size} logits: its row has no finite logZ"


def values_at_positions(logits: Tensor, query: PositionsQuery, following: Sequence[int]) -> NDArray[np.float32]:
    """The values (m, width) that a query requests of positions with logits (m, V); NaN where these are no distribution.

    `following` is the token after each position.
    """
    tokens, at_once = torch.tensor(following, device=logits.device), rows_per_slice(logits)
    ids, parts = query.target_ids, []
    targets = torch.from_numpy(ids).to(logits.device)
    for first in range(0, len(logits), at_once):
        values = _values_at(logits[first : first + at_once].float(), query, tokens[first : first + at_once])
        if query.targets and not query.is_of_next_token:
            values = values[:, targets]
        if query.top:
            best = _largest_of(values, query.top)
            parts.append(pack_top(best._replace(ids=ids[best.ids]) if query.targets else best))
        else:
            parts.append(values.cpu().numpy())
    return np.concatenate(parts)


def _values_at(logits: Tensor, query: PositionsQuery, following: Tensor) -> Tensor:
    """Log-probabilities or logits, float32 (m, V), or their logZ, (m, 1); NaN where logits are no distribution.

    Of the following tokens only, (m, 1), if the query is about them.
    """
    if query.values == "scores":
        # Unlike log_softmax, the loss makes no row of float32.
        return -torch.nn.functional.cross_entropy(logits, following, reduction="none")[:, None]
    if query.values == "logprobs":
        return torch.log_softmax(logits, dim=-1)
    log_z = log_z_of(logits)[:, None]
    values = torch.where(log_z.isfinite(), log_z if query.values == "logz" else logits, torch.nan)
    return values.gather(1, following[:, None]) if query.is_of_next_token else values


def _largest_of(rows: Tensor, k: int) -> TopK:
    """The `k` largest entries of each row, in the order of `lmpool.protocol.query.top`."""
    values, ids = torch.topk(rows, min(k + 1, rows.shape[1]), dim=-1)
    least = values[:, k - 1 : k]
    # topk does not define which of equal entries it returns. Where it leaves out one that equals the least, take the
    # lowest ids instead.
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


class Piece(NamedTuple):
    """Consecutive positions of one prompt in a forward.

    Attributes:
        request: the engine's name of the prompt.
        positions: positions in the prompt.
        row: index of the first position among the forward's logits or hidden states; the others follow.
    """

    request: str
    positions: range
    row: int


@dataclass(slots=True)
class _OpenAnswer:
    """The answer of a prompt in flight: parts of it, or the reason why it failed."""

    job: BackendJob
    query: PositionsQuery
    missing: range
    parts: list[NDArray[np.float32]] = field(default_factory=list)
    failure: str = ""

    def add(self, logits: Tensor) -> None:
        """Add the values of the next positions."""
        begin = self.missing.start
        self.missing = range(begin + len(logits), self.missing.stop)
        if self.failure:
            return
        # The logits of a position predict the token after it.
        following = decode_ids(self.job.ids)[begin + 1 : begin + len(logits) + 1].tolist()
        try:
            self.parts.append(values_at_positions(logits, self.query, following))
            self.failure = NO_DISTRIBUTION if np.isnan(self.parts[-1]).any() else ""
        except QUERY_ERRORS as error:  # It must not end the engine's step, which would end the engine.
            self.failure = failure_of(error)
        if self.failure:
            self.parts.clear()


class PositionAnswers:
    """The answers of all jobs in flight that request values at positions, by the engine's request names.

    An engine may compute a position again after it has evicted a prompt from its memory.
    """

    def __init__(self) -> None:
        self._open: dict[str, _OpenAnswer] = {}

    def __contains__(self, request: str) -> bool:
        return request in self._open

    def open(self, request: str, job: BackendJob) -> None:
        """Start the answer of a job that has a positions query."""
        assert job.positions is not None
        self._open[request] = _OpenAnswer(job, job.positions, job.span)

    def drop(self, request: str) -> None:
        """Discard the answer of a request, if there is one."""
        self._open.pop(request, None)

    def first_missing(self, request: str) -> int | None:
        """The first position that is still to compute; None for requests that answer with a row."""
        answer = self._open.get(request)
        return None if answer is None else answer.missing.start

    def wanted(self, request: str, computed: range, row: int) -> list[Piece]:
        """The missing positions among `computed`, of which the first has the index `row` in the forward's logits."""
        answer = self._open.get(request)
        missing = range(0) if answer is None else answer.missing
        wanted = range(max(missing.start, computed.start), min(missing.stop, computed.stop))
        return [Piece(request, wanted, row + wanted.start - computed.start)] if wanted else []

    def add(self, pieces: Sequence[Piece], first: int, logits: Tensor) -> None:
        """Add the values of a slice of a forward's logits, whose first row has the index `first`.

        Raises:
            WorkerError: the engine has left out a position.
        """
        for piece in pieces:
            begin, end = max(piece.row, first), min(piece.row + len(piece.positions), first + len(logits))
            answer = self._open.get(piece.request)
            if begin < end and answer is not None:
                position = piece.positions[begin - piece.row]
                if position != answer.missing.start:
                    raise WorkerError(f"the engine has computed position {position}, and not {answer.missing.start}")
                answer.add(logits[begin - first : end - first])

    def take(self, request: str) -> NDArray[np.float32] | str:
        """Remove and return the answer of a finished request, float32 (n * width,), or the reason of its failure."""
        answer = self._open.pop(request)
        if not answer.failure and answer.missing:
            raise WorkerError(f"the engine has ended a prompt without position {answer.missing.start}")
        return answer.failure or np.concatenate(answer.parts).ravel()
