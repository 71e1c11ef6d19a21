"""The canary: rows that an engine must get right before its worker joins the pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import SettingsError
from lmpool.prompts import digest_of
from lmpool.rows import Encoding, decode_row
from lmpool.workers.backend import Backend, BackendJob

Row = NDArray[np.float32]

_MOST_STEPS = 1000
_SUM_TOLERANCE = 1e-2
_ROW_TOLERANCE = {Encoding.F32: 2e-2, Encoding.BF16: 0.25, Encoding.F16: 0.1}


def check_canary(backend: Backend) -> None:
    """Have a backend compute rows of which something is known.

    Several prompts are run together, and then each alone: its row must be a distribution over V tokens, and the
    same both times but for rounding. An engine whose rows are captured at the wrong place, or given to the wrong
    prompt, fails here. Must be called in the backend's thread before it serves.

    Raises:
        SettingsError: a row is wrong, or there is none.
    """
    card = backend.card
    length = min(5, card.max_prompt_tokens)
    # Not the first ids: those are special tokens, whose rows are often all alike.
    long = [(card.vocab_size // 3 + 7 * i) % card.vocab_size for i in range(length)]
    prompts = [long, [(token + 1) % card.vocab_size for token in long], long[: (length + 1) // 2]]
    together = _rows(backend, prompts, "together")
    for index, ids in enumerate(prompts):
        alone = _rows(backend, [ids], f"alone-{index}")[0]
        for row in (together[index], alone):
            _check_distribution(backend, row)
        _check_agree(backend, together[index], alone)


def _rows(backend: Backend, prompts: Sequence[list[int]], run: str) -> list[Row]:
    """The rows of some prompts that run together; `run` names them apart from those of other runs."""
    encoded = [np.asarray(ids, "<u4").tobytes() for ids in prompts]
    jobs = [BackendJob(digest_of(ids, f"canary {run} {index}"), ids) for index, ids in enumerate(encoded)]
    backend.submit(jobs)
    found: dict[bytes, Row] = {}
    for _ in range(_MOST_STEPS):
        finished = backend.step()
        if finished.failures:
            raise _wrong(backend, f"it fails on a plain prompt: {next(iter(finished.failures.values()))}")
        for block in finished.blocks:
            for index, digest in enumerate(block.digests):
                data = np.frombuffer(block.encode(index), np.uint8)
                found[digest] = decode_row(data, block.numbers.shape[1])
        if len(found) == len(jobs):
            return [found[job.digest] for job in jobs]
    raise _wrong(backend, f"it has not answered {len(jobs)} prompts after {_MOST_STEPS} steps")


def _check_distribution(backend: Backend, row: Row) -> None:
    if len(row) != backend.card.vocab_size:
        raise _wrong(backend, f"a row has {len(row)} entries, not {backend.card.vocab_size}")
    total = float(np.logaddexp.reduce(row.astype(np.float64)))
    if not abs(total) < _SUM_TOLERANCE:
        raise _wrong(backend, f"the probabilities of a row sum to exp({total:g}), not to 1")


def _check_agree(backend: Backend, together: Row, alone: Row) -> None:
    """Differences are measured against the spread of the row's own entries: an untrained model's are tiny."""
    seen = np.isfinite(together) & np.isfinite(alone)
    error = float(np.sqrt(np.mean(np.square(together[seen] - alone[seen]))))
    spread = float(alone[seen].std())
    if not error <= _ROW_TOLERANCE[backend.card.row_encoding] * spread + 1e-6:
        text = f"a prompt's row differs by {error:.3g} when others run beside it (its entries spread by {spread:.3g})"
        raise _wrong(backend, text)


def _wrong(backend: Backend, what: str) -> SettingsError:
    return SettingsError(f"model: {backend.card.name} cannot be served by {backend.card.backend}: {what}")
