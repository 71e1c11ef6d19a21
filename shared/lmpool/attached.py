"""The `lmpool` command as a child that ends with its parent: `python -c LAUNCH worker …`.

The parent holds the other end of this process's standard input and writes nothing. However the parent ends, the
kernel closes that end, and this process ends at once with everything that it has started.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading

from lmpool import cli

LAUNCH = "from lmpool.attached import main; main()"
"""The program of the child, for `python -c`."""

FOLDER_VARIABLE = "LMPOOL_ATTACHED_FOLDER"
"""Names a folder that is removed when the parent ends without having ended this process."""

_STDIN = 0


def main() -> None:
    """Run the command line in a session of its own."""
    with contextlib.suppress(PermissionError):  # It has one already.
        os.setsid()
    threading.Thread(
        target=_end_with_parent, args=(os.environ.pop(FOLDER_VARIABLE, ""),), name="lmpool-parent", daemon=True
    ).start()
    sys.argv[0] = "lmpool"  # What its messages say.
    cli.main()


def _end_with_parent(folder: str) -> None:
    with contextlib.suppress(OSError):
        while os.read(_STDIN, 1024):
            pass
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
