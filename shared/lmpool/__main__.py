"""The `lmpool` command, and `python -m lmpool` for an environment whose scripts are not on PATH."""

import signal

# Importing the command takes some tenths of a second; during the import, Ctrl-C ends the process without a traceback.
_is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _is_interruptible:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    """Import and run the command line; see `lmpool.cli.main`."""
    from lmpool.cli import main as run

    run(is_interruptible=_is_interruptible)


if __name__ == "__main__":
    main()
