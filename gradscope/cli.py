"""The `gradscope` command: registers the commands and turns errors into one line and an exit code.

Exit codes: 0 fine, 1 an asked-for condition is met, 2 the user's to mend, 3 a bug of ours, 130 interrupted.
"""

from __future__ import annotations

import importlib
import keyword
import os
import sys
import warnings
from typing import Any, TextIO

import typer
import typer.core
import typer.main

from gradscope.errors import GradscopeError, nearest
from gradscope.extras import extra_of, installing

# Some releases of typer carry their own copy of click, so its errors are reached through typer's own.
UsageError: Any = typer.BadParameter.__mro__[1]
CommandLineError: Any = typer.BadParameter.__mro__[2]

EXIT_USER_ERROR = 2
EXIT_BUG = 3
EXIT_INTERRUPTED = 130

COMMANDS = {
    "demo": "Train a tiny workflow under two policies, diagnose both runs and compare them, on a CPU.",
    "train": "Train a workflow with instrumentation on.",
    "evaluate": "Measure the accuracy of a run's checkpoint on held-out problems.",
    "diagnose": "Say what went wrong in a saved run, how sure that is, and what the log cannot tell.",
    "inspect": "Show what a run holds: steps, gaps, segments, sizes, provenance, damage.",
    "watch": "Show a run in the terminal while it grows.",
    "repair": "Save what can be saved of a damaged run or HDF5 file into a new file.",
    "migrate": "Bring a run of an older schema version to the present one.",
    "figures": "Draw the mechanism figures of one or several runs.",
    "import": "Make a run file of the log of another tool.",
    "export": "Write a run's numbers for another tool.",
    "list": "List presets or plug-ins.",
    "doctor": "Check this installation and what it can do here.",
}


class LazyGroup(typer.core.TyperGroup):
    """A command group that imports a command's module only when that command runs."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the commands in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns the typer command called `cmd_name`; None leads to the parser's own message."""
        if cmd_name not in COMMANDS:
            return None
        # A command may be called as a word of Python's own; its file and function then end in `_`.
        own = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name
        module = importlib.import_module(f"gradscope.commands.{own}")
        function = getattr(module, f"{cmd_name}_", None) or getattr(module, cmd_name)
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        single.command(name=cmd_name)(function)
        return typer.main.get_command(single)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the command, or fails with the nearest name."""
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in COMMANDS:
            raise UsageError(f"no command '{name}'.{nearest(name, COMMANDS)} Try 'gradscope --help'.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Lists the commands from the table, without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(value: bool) -> None:
    if value:
        from gradscope import __version__

        typer.echo(f"gradscope {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Train multi-agent LLM workflows, record what each role's gradient does, and tell why a run broke."""


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits with the code that says how it went."""
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        _run(arguments)


def _run(arguments: list[str] | None) -> None:
    command = typer.main.get_command(app)
    try:
        code = command.main(
            args=arguments or sys.argv[1:] or ["--help"], prog_name="gradscope", standalone_mode=False
        )
    except GradscopeError as error:
        sys.exit(_fail(str(error), EXIT_USER_ERROR))
    except CommandLineError as error:
        sys.exit(_fail(error.format_message(), EXIT_USER_ERROR))
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(_fail("interrupted", EXIT_INTERRUPTED))
    except BrokenPipeError:
        # The reader of our output went away (`| head`); there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError):
            package = (error.name or "").partition(".")[0]
            if extra := extra_of(package):
                sys.exit(_fail(_missing(package, extra), EXIT_USER_ERROR))
        import traceback

        traceback.print_exc()
        sys.exit(_fail("this is a bug in gradscope; please report the lines above", EXIT_BUG))
    sys.exit(code if isinstance(code, int) else 0)


def _missing(package: str, extra: str) -> str:
    return f"this command needs the package {package}, which is not installed. {installing(extra)}."


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Prints a warning in one line, without the place in the code that gave it."""
    print(f"gradscope: warning: {' '.join(str(message).split())}", file=file or sys.stderr)


def _fail(message: str, code: int) -> int:
    print(f"gradscope: {' '.join(message.split())}", file=sys.stderr)
    return code
