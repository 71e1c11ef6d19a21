"""The `lmpool` command, assembled from the installed parts of lmpool; an error prints one line and exits with code 2.

The command prints names and reasons that other users wrote to the server, so it escapes control characters.

`main_as_child` runs the same command as a child process that ends with its parent. The parent holds the write end of
the child's standard input and writes nothing. However the parent ends, the kernel closes the pipe. Then the child ends
at once, together with all processes that it has started.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points, version
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.text import Text

from lmpool.errors import LMPoolError, LogFormatter, SettingsError, printable, to_json, use_options
from lmpool.settings import set_openmp_defaults

LAUNCH = "from lmpool.cli import main_as_child; main_as_child()"  # Code that `python -c` runs in a child process.
FOLDER_VARIABLE = "LMPOOL_ATTACHED_FOLDER"  # Environment variable: folder to remove when the parent process ends.
# Environment variable: file descriptor to which a process writes a line for its parent once the process serves.
READY_VARIABLE = "LMPOOL_READY_DESCRIPTOR"
INTERRUPTED = 130  # The exit code after Ctrl-C.
_TRACEBACK_VARIABLE = "LMPOOL_TRACEBACK"
_CALLED = {"when_absent": "--no-wait"}  # Argument of a Python function -> its command-line option, if the names differ.

# Some releases of typer carry their own copy of click: take the classes from typer itself.
_UsageError, _ClickException = cast(tuple[type[Exception], type[Exception]], typer.BadParameter.__mro__[1:3])
_STDIN = 0  # The descriptor of standard input.
_UNLIMITED_COLUMNS = 1_000_000  # Width of a table that is printed to a pipe or a file: wider than any table.


def say(text: str, *, err: bool = False) -> None:
    """Print one line, to standard error if `err`."""
    typer.echo(printable(text), err=err)


def say_json(value: Any) -> None:
    """Print a value as one line of JSON, in ASCII."""
    typer.echo(to_json(value))


class Terminal(Console):
    """Prints tables. rich interprets no markup in their strings; a pipe or a file gets plain tables at full width."""

    def __init__(self, *, err: bool = False) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, stderr=err)
        # With FORCE_COLOR in the environment, rich assumes a terminal, and COLUMNS sets the width of the table.
        if not self.file.isatty() and not (self.is_terminal and "COLUMNS" in os.environ):
            self.width = _UNLIMITED_COLUMNS

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape a string for printing; rich calls this method for every string."""
        return super().render_str(printable(text), **options)


app = typer.Typer(
    name="lmpool",
    help="Full next-token log-probability rows from a pool of model workers, with one shared cache.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"lmpool {version('lmpool')}")
        raise typer.Exit


_Version = typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)


@app.callback()
def _root(show_version: Annotated[bool, _Version] = False) -> None:
    """Options that every command has."""


def main(*, is_interruptible: bool = False) -> None:
    """Run the command line and exit with code 0, 2 after an error (some errors have other codes), or 130 after Ctrl-C.

    If `is_interruptible`, Ctrl-C raises KeyboardInterrupt during the command, and ends the process after the command.
    """
    if logging.lastResort is not None:  # This handler prints warnings until logging is configured.
        logging.lastResort.setFormatter(LogFormatter())
    # Set OpenMP's defaults first: any command may import a plugin that imports torch.
    set_openmp_defaults()
    use_options(lambda name: _options().get(name))
    try:
        if is_interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        # Collect no garbage during imports: searching the imported modules would take a tenth of the start-up time.
        gc.disable()
        add_commands(sys.argv[1:2])
        gc.freeze()
        gc.enable()
        code = app(standalone_mode=False)
    except _UsageError as error:
        code = _usage(cast(typer.BadParameter, error))
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except LMPoolError as error:
        option = _options().get(getattr(error, "setting", ""), "")
        is_given = option and any(word.partition("=")[0] == option for word in sys.argv)
        _fail(f"{option}: {cast(SettingsError, error).problem}" if is_given else str(error))
        code = error.exit_code
    except _ClickException as error:
        code = _fail(str(error))
    except BrokenPipeError:
        # The program that reads our output has closed the pipe, as `| head` does. Print nothing else, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:  # noqa: BLE001 An error in lmpool itself also prints one line.
        if os.environ.get(_TRACEBACK_VARIABLE):
            for line in traceback.format_exc().splitlines():
                say(line, err=True)
        code = _fail(f"unexpected {type(error).__name__}: {error} (set {_TRACEBACK_VARIABLE}=1 for the traceback)")
    if is_interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


def add_commands(names: Sequence[str] = ()) -> None:
    """Add the parts that have the commands `names` to `app`; all parts if a name is unknown or `names` is empty.

    Importing all parts and registering them with typer takes longer than a request.
    """
    points = entry_points(group="lmpool.commands")
    wanted = set(names) if names and points.names.issuperset(names) else points.names
    for _, point in sorted({point.value: point for point in points if point.name in wanted}.items()):
        point.load()(app)


def _usage(error: typer.BadParameter) -> int:
    """Print one line about a wrong command line."""
    message = error.format_message()
    if len(lines := message.strip().splitlines()) != 1:  # Called without arguments, typer has printed the help.
        for line in lines:
            say(line)
        return 2
    if "unexpected extra argument" in message and "model" in _options():
        message = f"{message}; a model is named by --model, and a text of several words is quoted"
    return _fail(f"{message} (see `{error.ctx.command_path if error.ctx else 'lmpool'} --help`)")


def _fail(message: str) -> int:
    say(f"lmpool: {' '.join(message.split())}", err=True)
    return 2


@cache
def _options() -> dict[str, str]:
    """The running command's options: name of a Python argument or of an option -> option as the user wrote it."""
    command: Any = typer.main.get_command(app)
    for word in sys.argv[1:]:
        command = getattr(command, "commands", {}).get(word, command)
    written = {word.partition("=")[0] for word in sys.argv}
    options: dict[str, str] = {}
    for param in command.params:
        names = [name for name in param.opts if name.startswith("--")] or param.opts
        if names[0].startswith("-"):
            option = next((name for name in param.opts if name in written), names[0])
            options |= {option.lstrip("-").replace("-", "_"): option, param.name: option}
        options |= {name: option for name, option in _CALLED.items() if option in param.secondary_opts}
    return options


def report_ready(text: str = "ready") -> None:
    """Report once to the parent process that this process serves; see `READY_VARIABLE`."""
    with contextlib.suppress(KeyError, ValueError, OSError):
        descriptor = int(os.environ.pop(READY_VARIABLE))
        os.write(descriptor, text.encode())
        os.close(descriptor)


def main_as_child() -> None:
    """Run the command line in a new session, as a child that ends with its parent."""
    with contextlib.suppress(PermissionError):  # The error means that this process leads a session already.
        os.setsid()
    folder = os.environ.pop(FOLDER_VARIABLE, "")

    def end_with_parent() -> None:
        with contextlib.suppress(OSError):
            while os.read(_STDIN, 1024):
                pass
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_parent, name="lmpool-parent", daemon=True).start()
    sys.argv[0] = "lmpool"  # The name of the program in messages.
    main()
