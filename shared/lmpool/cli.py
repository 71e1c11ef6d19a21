"""The `lmpool` command: assembled from the parts that are installed, errors as one line and exit code 2.

Names and reasons that it prints come from a server that others write to: a terminal shows them, no more.

`main_as_child` is the same command as a child that ends with its parent: the parent holds the other end of its
standard input and writes nothing. However the parent ends, the kernel closes that end, and the child ends at once with
everything that it has started.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
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

from lmpool.errors import LMPoolError, LogFormatter, SettingsError, printable, to_json
from lmpool.settings import set_openmp_defaults

LAUNCH = "from lmpool.cli import main_as_child; main_as_child()"
"""The program of the child, for `python -c`."""

FOLDER_VARIABLE = "LMPOOL_ATTACHED_FOLDER"
"""Names a folder that is removed when the parent ends without having ended this process."""

INTERRUPTED = 130
"""The exit code of what Ctrl-C has ended."""

_GROUP = "lmpool.commands"
_TRACEBACK_VARIABLE = "LMPOOL_TRACEBACK"

# An argument as messages name it, and options that are called otherwise.
_ARGUMENT = re.compile(r"\b([a-z_]+)=(?:True\b|\"\w+\")?(?=[\s,;:.)]|$)")
_CALLED = {"when_absent": "--no-wait"}

# Some releases of typer carry a copy of click of their own: take the classes from typer itself.
_UsageError: type[Exception]
_ClickException: type[Exception]
_UsageError, _ClickException = typer.BadParameter.__mro__[1:3]

_STDIN = 0
# Wider than any table.
_WHOLE = 1_000_000


def say(text: str, *, err: bool = False) -> None:
    """Print one line.

    Args:
        text: what to say.
        err: on standard error.
    """
    typer.echo(printable(text), err=err)


def say_json(value: Any) -> None:
    """Print a value as one line of JSON, in ASCII."""
    typer.echo(to_json(value))


class Terminal(Console):
    """Where tables are printed: in their strings rich sees no markup. What is no terminal gets them whole and plain."""

    def __init__(self, *, err: bool = False) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, stderr=err)
        # With FORCE_COLOR in its environment rich sees a terminal, whose width COLUMNS tells.
        is_told = self.is_terminal and "COLUMNS" in os.environ
        if not is_told and not self.file.isatty():
            self.width = _WHOLE

    def render_str(self, text: str, **options: Any) -> Text:
        """The text that a string becomes; every string in what is printed comes through here."""
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


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """What is common to all commands."""


def main(*, is_interruptible: bool = False) -> None:
    """Run the command line; exits 0, 2 on an error (a few have codes of their own), 130 on Ctrl-C.

    Args:
        is_interruptible: Ctrl-C raises KeyboardInterrupt from now on, and ends the process at once when all is done.
    """
    if logging.lastResort is not None:  # What shows warnings as long as nobody has set up a log.
        logging.lastResort.setFormatter(_Warnings())
    # What others have registered may import torch, whichever command is run.
    set_openmp_defaults()
    try:
        if is_interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        # What is imported stays: looking for garbage among it is a tenth of the time.
        gc.disable()
        add_commands(sys.argv[1:2])
        gc.freeze()
        gc.enable()
        code = app(standalone_mode=False)
    except _UsageError as error:
        code = _usage(cast(typer.BadParameter, error))
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except SettingsError as error:
        code = _fail(_with_option(str(error)))
    except LMPoolError as error:
        _fail(str(error))
        code = error.exit_code
    except _ClickException as error:
        code = _fail(str(error))
    except BrokenPipeError:
        # The reader of our output has gone, as with `| head`; nothing is left to say, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:  # noqa: BLE001 The one place where a bug becomes a line for the user.
        if os.environ.get(_TRACEBACK_VARIABLE):
            for line in traceback.format_exc().splitlines():
                say(line, err=True)
        code = _fail(f"unexpected {type(error).__name__}: {error} (set {_TRACEBACK_VARIABLE}=1 for the traceback)")
    if is_interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


def add_commands(names: Sequence[str] = ()) -> None:
    """Add to `app` the parts that have these commands; all parts where a name is of no command, or none is given.

    Importing the others, and telling typer of them, takes longer than a request does.
    """
    points = entry_points(group=_GROUP)
    named = points if not names or set(names) - points.names else [point for point in points if point.name in names]
    parts = {point.value: point for point in named}
    for _, point in sorted(parts.items()):
        point.load()(app)


def _usage(error: typer.BadParameter) -> int:
    """A wrong command line: one line, or the help when nothing was given at all."""
    message = error.format_message()
    if not message.strip():
        return 2  # The help has been printed already.
    if len(message.splitlines()) > 1:
        for line in message.splitlines():
            say(line)
        return 2
    if "unexpected extra argument" in message and "model" in _options():
        message = f"{message}; a model is named by --model, and a text of several words is quoted"
    return _fail(f"{message} (see `{error.ctx.command_path if error.ctx else 'lmpool'} --help`)")


def _fail(message: str) -> int:
    say(f"lmpool: {' '.join(_with_options(message).split())}", err=True)
    return 2


class _Warnings(LogFormatter):
    """Formats the warnings of a command: with options where the log has arguments of Python."""

    def format(self, record: logging.LogRecord) -> str:
        return _with_options(super().format(record))


@cache
def _options() -> dict[str, str]:
    """The options of the command that was given: name of the argument -> option."""
    command: Any = typer.main.get_command(app)
    for word in sys.argv[1:]:
        command = getattr(command, "commands", {}).get(word, command)
    options = {param.name: _written(param.opts) for param in command.params if param.opts[0].startswith("-")}
    # Some arguments are called otherwise, and messages name what the user has given.
    named = {option.lstrip("-").replace("-", "_"): option for option in options.values()} | options
    others = {option for param in command.params for option in param.secondary_opts}
    return named | {name: option for name, option in _CALLED.items() if option in others}


def _written(names: list[str]) -> str:
    """The name of an option that was given, or its own, of which its others are aliases."""
    words = {word.partition("=")[0] for word in sys.argv}
    long = [name for name in names if name.startswith("--")] or names
    return next((name for name in names if name in words), long[0])


def _with_options(text: str) -> str:
    """A message for users of Python, such as "allow more time (timeout=)", for those of the command line."""
    return _ARGUMENT.sub(lambda match: _options().get(match[1], match[0]), text)


def _with_option(text: str) -> str:
    """The text of a SettingsError, which begins with the name of a setting, for whoever gave it as an option."""
    name, colon, rest = text.partition(":")
    option = _options().get(name, "")
    is_given = bool(option) and any(word.partition("=")[0] == option for word in sys.argv)
    return f"{option}{colon}{rest}" if is_given else text


def main_as_child() -> None:
    """Run the command line in a session of its own."""
    with contextlib.suppress(PermissionError):  # It has one already.
        os.setsid()
    threading.Thread(
        target=_end_with_parent, args=(os.environ.pop(FOLDER_VARIABLE, ""),), name="lmpool-parent", daemon=True
    ).start()
    sys.argv[0] = "lmpool"  # What its messages say.
    main()


def _end_with_parent(folder: str) -> None:
    with contextlib.suppress(OSError):
        while os.read(_STDIN, 1024):
            pass
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
