"""Reference rows of a checkpoint: transformers' float32 rows of a few prompts, with which a worker compares its rows.

The rows are computed on a CPU when a worker starts, or once by `lmpool verify MODEL --write`, which stores the rows
next to the checkpoint. The canary compares an engine only with itself; the reference finds an engine that computes
another function: keys and values of too few bits, an adapter without its scale, attention without its soft cap.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast
from zipfile import BadZipFile

import numpy as np

from lmpool.cli import LAUNCH
from lmpool.errors import SettingsError, first_line
from lmpool.protocol.adapter import name_of
from lmpool.protocol.row import Row
from lmpool.workers.backends.checkpoint import checkpoint_folder, checkpoint_revision, quantisation_of
from lmpool.workers.backends.engines import MAX_CHECKED_ADAPTERS, EngineBackend, compute_rows, unservable
from lmpool.workers.backends.lora import check_adapter
from lmpool.workers.backends.settings import ModelSettings, parse_engine_args
from lmpool.workers.execution.contract import Backend

FILE = "lmpool_reference.npz"
"""Name of the file next to a checkpoint. Engines ignore the file, and the digest of the checkpoint leaves it out."""

DIGEST = "LMPOOL_REFERENCE_DIGEST"
"""Environment variable: digest of the checkpoint, so that the process that a worker starts does not read all files."""

BOUNDS = {"float32": 5e-3, "float16": 2e-2, "bfloat16": 0.1}
"""Dtype -> largest accepted RMS difference from the reference, divided by the standard deviation of the reference.

Twice the largest measured difference; for float32 more, because GPUs may multiply with the precision of float16.
"""

QUANTISED_BOUND = 0.5
"""The same for quantised weights, with which engines may round activations to 8 bits too."""

# Min standard deviation of a row to divide by: the rows of an untrained model may differ by rounding only.
_MIN_SPREAD = 1e-3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReferenceRows:
    """Correct rows of a few prompts.

    Attributes:
        digest: digest of the checkpoint's files.
        prompts: the token ids of each prompt.
        rows: revision of an adapter, or "" for the model alone -> rows of the prompts, float32 of shape (n, V).
    """

    digest: str
    prompts: list[list[int]]
    rows: dict[str, Row]

    def write(self, path: Path) -> None:
        """Write the reference to a file in numpy's format npz; replaces an earlier file at once."""
        named: dict[str, Any] = {f"rows {revision}": rows for revision, rows in self.rows.items()}
        whole = [token for ids in self.prompts for token in ids]
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with part.open("wb") as file:
                lengths = list(map(len, self.prompts))
                np.savez(file, digest=self.digest, ids=np.array(whole, "<u4"), lengths=lengths, **named)
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            reason = f"{path} cannot be written: {error.strerror or error}"
            raise SettingsError(f"to: {reason}; name another file, and copy it next to the checkpoint") from error

    @classmethod
    def read(cls, path: Path) -> ReferenceRows:
        """Read a file that `write` has written."""
        try:
            with path.open("rb") as opened, np.lib.npyio.NpzFile(opened) as file:
                ends = np.cumsum(file["lengths"])
                prompts = [ids.tolist() for ids in np.split(file["ids"], ends)[:-1]]
                names = [name for name in file.files if name.startswith("rows ")]
                rows = {name.removeprefix("rows "): file[name] for name in names}
                return cls(str(file["digest"]), prompts, rows)
        except (OSError, ValueError, KeyError, BadZipFile) as error:
            remedy = "remove it, or write it again with `lmpool verify MODEL --write`"
            raise SettingsError(f"verify: {path} is no reference: {first_line(error)}; {remedy}") from error


class Difference(NamedTuple):
    """The difference between a worker's row and the reference."""

    tokens: int  # Length of the prompt.
    adapter: str  # "name@revision", or "" for the model alone.
    largest: float  # Largest difference of an entry.
    share: float  # RMS difference of the entries, divided by the standard deviation of the reference's entries.


def open_verified(settings: ModelSettings, make: Callable[[], Backend]) -> Backend:
    """Make a backend, and refuse it if its rows differ from the reference. `make` loads the model of `settings`."""
    # Compute the reference first, while all memory is free.
    reference = find_reference(settings)
    backend = make()
    try:
        bound = bound_of(settings, backend)
        for found in compare(backend, reference):
            if not found.share <= bound:
                of = f" with the adapter {name_of(found.adapter)!r}" if found.adapter else ""
                what = f"a row of {found.tokens} tokens{of} differs from transformers in float32 by {found.share:.3g}"
                remedy = "change its dtype or the engine's options, and compare with `lmpool verify`"
                reason = f"{what} of the row's spread, more than the {bound:g} of rounding: {remedy}"
                raise unservable(backend, reason)
    except BaseException:
        backend.close()
        raise
    cast(EngineBackend, backend).reset_stats()
    return backend


def find_reference(settings: ModelSettings) -> ReferenceRows:
    """The reference next to the checkpoint; without a stored one, the reference is computed, in another process."""
    folder = folder_of(settings)
    digest = checkpoint_revision(folder)
    path, revisions = stored_path(folder, settings), {}
    for source in islice(settings.adapter_folders.values(), MAX_CHECKED_ADAPTERS):
        revisions[checkpoint_revision(check_adapter(source, folder))] = source
    if path.is_file():
        reference = ReferenceRows.read(path)
        if reference.digest != digest:
            remedy = f"write it again: lmpool verify {settings.model} --write"
            raise SettingsError(f"verify: {path} belongs to other files than {folder} has now: {remedy}")
        if revisions.keys() <= reference.rows.keys():
            return reference
    with TemporaryDirectory(prefix="lmpool-reference-") as place:
        _run_writer(settings, Path(place) / FILE, digest)
        return ReferenceRows.read(Path(place) / FILE)


def folder_of(settings: ModelSettings) -> Path:
    """The folder of the checkpoint."""
    file = getattr(settings, "gguf_file", None)
    return checkpoint_folder("model", settings.model, settings.revision, gguf_file=file)


def stored_path(folder: Path, settings: ModelSettings) -> Path:
    """The path of a checkpoint's stored reference; each GGUF file of a folder has its own."""
    file = getattr(settings, "gguf_file", None)
    return folder / (FILE if file is None else f"{file}.{FILE}")


def compare(backend: Backend, reference: ReferenceRows) -> list[Difference]:
    """Compare a backend's rows with the reference; call it in the backend's thread, before the backend serves."""
    info = backend.info
    checked = islice(backend.adapters, MAX_CHECKED_ADAPTERS)
    revisions = {"": ""} | {adapter: adapter.partition("@")[2] for adapter in checked}
    compared = [adapter for adapter, revision in revisions.items() if revision in reference.rows]
    wanted = [
        (adapter, index, ids)
        for adapter in compared
        for index, ids in enumerate(reference.prompts)
        if len(ids) <= info.max_prompt_tokens
    ]
    found = []
    rows = compute_rows(backend, [(ids, adapter) for adapter, _, ids in wanted], "reference")
    for (adapter, index, ids), row in zip(wanted, rows, strict=True):
        expected = reference.rows[revisions[adapter]][index]
        if row.shape != expected.shape:
            raise unservable(backend, f"its rows have {len(row)} entries, and the reference has {len(expected)}")
        seen = np.isfinite(expected)
        error, spread = np.abs(row[seen] - expected[seen]), float(expected[seen].std())
        share = float(np.sqrt(np.mean(np.square(error)))) / max(spread, _MIN_SPREAD)
        found.append(Difference(len(ids), adapter, float(error.max()), share))
    return found


def bound_of(settings: ModelSettings, backend: Backend) -> float:
    """The largest accepted `Difference.share` of a backend's rows."""
    online = settings.quantization or parse_engine_args(getattr(settings, "engine_args", [])).get("quantization")
    if online or quantisation_of(folder_of(settings)):
        return QUANTISED_BOUND
    return BOUNDS.get("float16" if backend.info.lossy else backend.info.dtype, QUANTISED_BOUND)


def _run_writer(settings: ModelSettings, path: Path, digest: str) -> None:
    """Have another process compute the reference: it frees its memory, and no engine has changed its torch."""
    words = ["verify", str(folder_of(settings)), "--write", f"--to={path}"]
    adapters = islice(settings.adapter_folders.items(), MAX_CHECKED_ADAPTERS)
    words += [f"--adapters={name}={source}" for name, source in adapters]
    words += [f"--gguf-file={file}"] if (file := getattr(settings, "gguf_file", None)) is not None else []
    words += ["--trust-remote-code"] if settings.trust_remote_code else []
    _log.info("computing reference rows in float32 on the CPU; `lmpool verify %s --write` stores them", settings.model)
    command = [sys.executable, "-P", "-c", LAUNCH, *words]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", DIGEST: digest}
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, env=environment, text=True, stdin=pipe, stdout=null, stderr=pipe) as process:
        assert process.stderr is not None
        printed = process.stderr.read().strip()
    if process.returncode < 0:
        reason = f"signal {-process.returncode} ended the process that computes the reference: is memory full?"
        raise SettingsError(f"verify: {reason} {advice(settings.model)}")
    if process.returncode:
        raise SettingsError(printed.rpartition("\n")[2].removeprefix("lmpool: "))


def advice(model: str) -> str:
    """What to do if a machine has too little memory for the reference of a model."""
    command = f"lmpool verify {model} --write"
    return f"Run `{command}` on a machine with more memory, and copy {FILE} next to the checkpoint, or omit --verify"
