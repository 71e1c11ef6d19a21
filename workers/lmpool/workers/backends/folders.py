"""Temporary folders of one worker, which the next worker removes if the first one was killed."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory


def locked_folder(prefix: str, parent: Path) -> TemporaryDirectory[str]:
    """Create a folder whose name begins with `prefix`, and remove the folders of killed workers.

    The worker holds a lock on a file in the folder until its process ends. A folder without a lock has no worker.
    """
    for path in parent.glob(f"{prefix}*/lock"):
        with suppress(OSError), path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            rmtree(path.parent, ignore_errors=True)
    folder = TemporaryDirectory(prefix=prefix, dir=parent)
    new = Path(folder.name, "new")
    lock = os.open(new, os.O_CREAT | os.O_WRONLY)  # Open until the process ends.
    with suppress(OSError):  # This file system has no locks, so that no worker removes folders.
        fcntl.flock(lock, fcntl.LOCK_EX)
    new.rename(new.with_name("lock"))  # Only now can other workers find the file.
    return folder
