"""`lmpool verify`: compares a backend's rows with reference rows, and prints or stores the reference."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from pkgutil import resolve_name

from rich.table import Table

from lmpool.cli import Terminal, say
from lmpool.errors import SettingsError
from lmpool.workers.backends.reference import ReferenceRows, bound_of, compare, find_reference, folder_of, stored_path
from lmpool.workers.backends.settings import HfSettings, ModelSettings
from lmpool.workers.execution.contract import BackendSettings


def write_reference(settings: BackendSettings, to: str | None) -> None:
    """Compute the reference of a checkpoint, and write it next to the checkpoint or to the file `to`."""
    if not isinstance(settings, HfSettings):
        raise SettingsError("write: the reference does not depend on the backend: leave out --backend")
    # Only this call imports torch.
    reference: ReferenceRows = resolve_name("lmpool.workers.backends.hf.reference:compute_reference")(settings)
    path = stored_path(folder_of(settings), settings) if to is None else Path(to).expanduser()
    reference.write(path)
    adapters = len(reference.rows) - 1
    also = f", for the model and {adapters} adapter{'s' * (adapters != 1)}" if adapters else ""
    say(f"wrote the rows of {len(reference.prompts)} prompts{also} to {path}")


def print_differences(settings: BackendSettings) -> bool:
    """Print by how much the rows of a backend differ from the reference; returns whether all are within the bound."""
    if not isinstance(settings, ModelSettings):
        raise SettingsError("backend: it loads no checkpoint, so there is no reference to compare with")
    reference = find_reference(settings)
    with closing(settings.open()) as backend:
        found, bound = compare(backend, reference), bound_of(settings, backend)
    table = Table("tokens", "adapter", "largest difference", "of the row's spread", "bound")
    for tokens, adapter, largest, share in found:
        table.add_row(str(tokens), adapter, f"{largest:.3g}", f"{share:.3g}", f"{bound:g}")
    Terminal().print(table)
    is_right = all(each.share <= bound for each in found)
    name = f"{backend.info.name} ({backend.info.backend}, {backend.info.dtype})"
    say(f"{name}: {'the rows agree' if is_right else 'the rows do not agree'} with transformers in float32")
    return is_right
