"""Imported by the fork server of the tests: imports all modules of the `lmpool` command and of a starting worker.

These imports must start no thread and open no file or connection, because a fork would break them. The fork server
does not import torch, because torch reads its environment at import, and some workers must run without torch.
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
"""Modules that workers and `lmpool web` import after they parse their options; some may not be installed."""


def _command(text: str) -> None:
    pass


for _group in ("lmpool.commands", "lmpool.backends"):
    for _part in entry_points(group=_group):
        _part.load()
for _name in _LATER:
    with suppress(ImportError):
        import_module(_name)
# Parse a command line, because Typer imports more modules when it does this for the first time.
_app = typer.Typer()
_app.command()(_command)
_app(["text"], standalone_mode=False)
# Freeze objects: otherwise a forked process copies most memory pages at its first garbage collection.
gc.freeze()
