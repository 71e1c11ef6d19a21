"""Replace this process by another program that ends with its parent: `python end_with_parent.py PARENT COMMAND…`.

The benchmark starts all its processes through this program, so that no process survives a SIGKILL of the benchmark.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # The option PR_SET_PDEATHSIG of prctl(2).


def main() -> None:
    """Ask the kernel to end this process with its parent, then become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    if os.getppid() != parent:
        sys.exit("the benchmark has ended")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
