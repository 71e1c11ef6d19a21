"""Temporary folders of one worker, which the next worker removes if the first one was killed."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory


class LockedFolder(TemporaryDirectory[str]):
    """A folder with a file that this process has locked until the folder is removed or the process has ended."""

    lock: int

    def cleanup(self) -> None:
        """Remove the folder; the next worker removes what is left."""
        with suppress(OSError):  # The folder is removed again when it is no longer used.
            os.close(self.lock)  # NFS does not remove an open file.
        super().cleanup()


def locked_folder(prefix: str, parent: Path) -> LockedFolder:
    """Create a folder whose name begins with `prefix`, and remove the folders of killed workers, which have no lock."""
    for path in parent.glob(f"{prefix}*/lock"):
        with suppress(OSError), path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            rmtree(path.parent, ignore_errors=True)
    folder = LockedFolder(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
    new = Path(folder.name, "new")
    folder.lock = os.open(new, os.O_CREAT | os.O_WRONLY)
    with suppress(OSError):  # This file system has no locks, so that no worker removes folders.
        fcntl.flock(folder.lock, fcntl.LOCK_EX)
    new.rename(new.with_name("lock"))  # Only now can other workers find the file.
    return folder
