"""The imports of the fork server before it forks: all imports of the `lmpool` command, and of a starting worker.

No thread may start here, and nothing may be opened: neither survives a fork. Torch is not imported, because it reads
its environment at import, and a worker that needs no torch must do without it.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from importlib import import_module
from importlib.metadata import entry_points

import typer

_LATER = (
    "lmpool.trie.cpu",
    "lmpool.web.app",
    "lmpool.workers.trie",
    "prometheus_client",
    "pythonjsonlogger.json",
    "uvloop",
)
"""What workers and `lmpool web` import when they have read their command line; not every environment has all of it."""


def _command(text: str) -> None:
    pass


for _group in ("lmpool.commands", "lmpool.backends"):
    for _part in entry_points(group=_group):
        _part.load()
for _name in _LATER:
    with suppress(ImportError):
        import_module(_name)
# Typer imports more when it first reads a command line.
_app = typer.Typer()
_app.command()(_command)
_app(["text"], standalone_mode=False)
# Otherwise a forked process copies most pages at its first garbage collection.
gc.freeze()
