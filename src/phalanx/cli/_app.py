"""The command line: a group that imports a verb only when it is called, and turns errors into
lines and exit codes."""

from __future__ import annotations

import ast
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from phalanx.cli._os_errors import convert_uncaught_os_error
from phalanx.core.errors import (
    EnvironmentProblem,
    ExitCode,
    JobError,
    PhalanxError,
    format_nearest_word_hint,
)
from phalanx.core.garbage import pausing_garbage_collection
from phalanx.core.output import (
    flush_standard_streams,
    open_closed_standard_streams,
    redirect_stream_to_devnull,
    warn,
)
from phalanx.core.registry import list_modules_of_registry
from phalanx.core.terminal import filtering_standard_streams

VERBS_PACKAGE = "phalanx.cli"
TRY_IT_EPILOG = (
    "Try it: phalanx train (a small decoder on this interpreter's own source text, two ranks or"
    " more)"
)
# typer exports only a leaf of its exceptions: BadParameter < UsageError < ClickException.
UsageMistake: type[Exception] = typer.BadParameter.__mro__[1]
AnyMistake: type[Exception] = typer.BadParameter.__mro__[2]


class OutputClosedError(Exception):
    """Whoever read our standard output has gone. `exit_code` is that of the verb, where it had
    ended by then."""

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


class VerbCommand(TyperCommand):
    """A verb, whose options are read by libraries that are imported then."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with pausing_garbage_collection():
            return super().parse_args(ctx, args)


class VerbGroup(TyperGroup):
    """One file of this folder per verb. A verb's help line is read from its file, not imported."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list_modules_of_registry(VERBS_PACKAGE)

    def get_command(self, ctx: Any, name: str) -> Any:
        if name not in list_modules_of_registry(VERBS_PACKAGE):
            return None
        with pausing_garbage_collection():
            module = importlib.import_module(f"{VERBS_PACKAGE}.{name}")
            return self._build_command(name, module)

    def _build_command(self, name: str, module: Any) -> Any:
        if hasattr(module, "COMMANDS"):
            return _build_sub_verbs(name, module)
        # Without rich's markup click formats the help, and asks `format_commands`; `_run` tells
        # errors, in place of typer's own tracebacks.
        app = typer.Typer(
            add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
        )
        example = getattr(module, "EXAMPLE", None)
        app.command(name=name, cls=VerbCommand, epilog=example)(module.command)
        return typer.main.get_command(app)

    def invoke(self, ctx: Any) -> Any:
        result = None
        try:
            result = super().invoke(ctx)
            # Here, not at exit, where Python itself would report a pipe that is broken.
            sys.stdout.flush()
            return result
        except BrokenPipeError as error:
            # typer ends with exit code 1 on a broken pipe.
            raise OutputClosedError(result if isinstance(result, int) else ExitCode.OK) from error

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in list_modules_of_registry(VERBS_PACKAGE):
            from phalanx.cli._spelling import suggest_verb

            suggestion = format_nearest_word_hint(
                args[0], list_modules_of_registry(VERBS_PACKAGE)
            ) or suggest_verb(args[0])
            raise UsageMistake("; ".join(filter(None, [f"no verb {args[0]!r}", suggestion])))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(
                [(name, read_help_line(name)) for name in list_modules_of_registry(VERBS_PACKAGE)]
            )


class SubVerbGroup(TyperGroup):
    """The verbs of a verb: `COMMANDS` of its module."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            suggestion = format_nearest_word_hint(args[0], list(self.commands))
            problem = f"no verb {args[0]!r} of {ctx.info_name}"
            raise UsageMistake("; ".join(filter(None, [problem, suggestion])))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        lines = {
            name: join_first_paragraph(command.callback.__doc__)
            for name, command in self.commands.items()
        }
        with formatter.section("Verbs"):
            formatter.write_dl(list(lines.items()))


def _build_sub_verbs(name: str, module: Any) -> Any:
    """A verb whose module has `COMMANDS` (functions by name) and `EXAMPLE_OF_COMMAND` (a line of
    help for each)."""
    app = typer.Typer(
        cls=SubVerbGroup,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    # The callback does nothing: it carries the help of the group.
    app.callback(help=module.__doc__, epilog=module.EXAMPLE)(lambda: None)
    for sub_verb, function in module.COMMANDS.items():
        app.command(name=sub_verb, epilog=module.EXAMPLE_OF_COMMAND[sub_verb])(function)
    group = typer.main.get_group(app)
    group.name = name
    return group


def read_help_line(verb: str) -> str:
    """The first sentence of a verb's module docstring."""
    source = (Path(__file__).parent / f"{verb}.py").read_text(encoding="utf-8")
    return join_first_paragraph(ast.get_docstring(ast.parse(source)))


def join_first_paragraph(docstring: str | None) -> str:
    """The first paragraph of a docstring, as one line."""
    return " ".join((docstring or "").split("\n\n")[0].split())


def _print_version_and_exit(is_wanted: bool) -> None:
    if is_wanted:
        from phalanx import __version__

        print(f"phalanx {__version__}")
        raise typer.Exit


def build_app() -> Any:
    """The command group of `phalanx`."""
    app = typer.Typer(
        cls=VerbGroup,
        epilog=TRY_IT_EPILOG,
        no_args_is_help=True,
        add_completion=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def phalanx(
        version: bool = typer.Option(
            False,
            "--version",
            help="Show the version and exit.",
            is_eager=True,
            callback=_print_version_and_exit,
        ),
    ) -> None:
        """Plans, proves, runs and protects distributed PyTorch training."""

    # A group, with the options that install completion.
    return typer.main.get_command(app)


def run_command_line(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code. User errors are printed without a traceback."""
    # First, so that no other file gets the number of a closed stream.
    open_closed_standard_streams()
    try:
        with filtering_standard_streams():
            code = _invoke_app(arguments)
            # Python would flush at exit, and end with a code of its own where that is refused.
            flush_standard_streams()
            return code
    finally:
        # Its process may go on, and a server that was started for the command is not to.
        server_process = sys.modules.get("phalanx.launch.server_process")
        if server_process is not None:
            server_process.end_server_ahead()


def _find_modules_in_working_directory() -> None:
    """Let package.module:factory be found beside where you stand; last, so that nothing there
    stands in for a library.

    Raises EnvironmentProblem where that directory was removed: no relative path leads anywhere.
    """
    try:
        folder = os.getcwd()
    except OSError as error:
        raise EnvironmentProblem(
            f"the directory that you stand in cannot be reached ({error.strerror})",
            fix="cd into one that is there",
        ) from None
    if folder not in sys.path:
        sys.path.append(folder)


def _invoke_app(arguments: Sequence[str]) -> int:
    try:
        _find_modules_in_working_directory()
        # Not standalone: click would end the process, with exit codes of its own.
        result = build_app().main(list(arguments), prog_name="phalanx", standalone_mode=False)
        if isinstance(result, int):
            return result
        return ExitCode.OK
    except PhalanxError as error:
        print_error(error)
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    except typer.Exit as stop:
        return stop.exit_code
    except (BrokenPipeError, OutputClosedError) as closed:
        # Whoever read has enough: no failure. Python flushes at exit, which would be refused again.
        redirect_stream_to_devnull(sys.stdout)
        return getattr(closed, "exit_code", ExitCode.OK)
    except AnyMistake as mistake:
        # By its name: typer does not export the class.
        if type(mistake).__name__ == "NoArgsIsHelpError":
            mistake.show()  # type: ignore[attr-defined]
        else:
            warn(f"phalanx: {_usage_error_message(mistake, arguments)}")
        return ExitCode.USAGE
    except Exception as error:
        problem = convert_uncaught_os_error(error)
        if problem is not None:
            print_error(problem)
            return problem.exit_code
        # A bug, or user code that nobody expected to fail: its traceback is the message.
        warn(traceback.format_exc().rstrip())
        return ExitCode.INTERNAL


def _usage_error_message(mistake: Any, arguments: Sequence[str]) -> str:
    """The message for a wrong command line: the mistake, what was probably meant, the verb's
    help."""
    context = getattr(mistake, "ctx", None)
    verb = "phalanx"
    if context:
        verb = context.command_path
    option = getattr(mistake, "option_name", None)
    # By its name, as above.
    if isinstance(option, str) and type(mistake).__name__ == "NoSuchOption":
        from phalanx.cli._spelling import suggest_option

        options: list[str] = []
        takes_keys = False
        for parameter in context.command.params if context else ():
            options += parameter.opts
            takes_keys |= parameter.name == "arguments"
        advice = f"see {verb} --help"
        if meant := suggest_option(option, options, arguments, takes_keys=takes_keys):
            advice = f"{meant}, or {advice}"
        return f"No such option: {option}; {advice}"
    return f"{mistake.format_message().rstrip('.')}; see {verb} --help"


def print_error(error: PhalanxError) -> None:
    """Print an error: each problem of a job on its own line."""
    lines = [str(error)]
    if isinstance(error, JobError):
        lines = str(error).splitlines()
    warn(*(f"phalanx: {line}" for line in lines))
