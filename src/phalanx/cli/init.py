"""Write a job file with every key, its words and its default, ready to edit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from phalanx.job.schema import Job

EXAMPLE = "Example: phalanx init job.toml"


def command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file to write; - prints it.")] = "job.toml",
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
    minimal: Annotated[bool, typer.Option("--minimal", help="Only the keys that are set, without words.")] = False,
    from_run: Annotated[
        str | None, typer.Option("--from-run", metavar="RUN", help="Write the job that this run had.")
    ] = None,
    editor: Annotated[
        bool, typer.Option("--editor", help="Also write job.schema.json beside it, which editors complete from.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of job files; writes nothing.")
    ] = False,
) -> int:
    """Write a job file with every key, its words and its default, ready to edit.

    As it is written it is the default job. Keys that people rarely set are commented out.

    \b
    phalanx init --minimal                    only what people set first
    phalanx init --editor                     with the schema from which editors complete and check
    phalanx init again.toml --from-run RUN    the job that a run had
    """
    from phalanx.core.terminal import print_document
    from phalanx.job.json_schema import FILE
    from phalanx.job.template import job_template

    if schema:
        print_document(_schema_text(), end="")
        return 0
    text = job_template(
        _job_of(from_run) if from_run else None,
        file=file if file != "-" else "job.toml",
        minimal=minimal,
        schema_file=f"./{FILE}" if editor else None,
    )
    if file == "-":
        print_document(text, end="")
        return 0
    _write(file, text, force=force, editor=editor)
    return 0


def _write(file: str, text: str, *, force: bool, editor: bool) -> None:
    """Raises UsageError where something is in the way, ResourceError where nothing can be written."""
    import shlex
    from pathlib import Path

    from phalanx.core.errors import UsageError
    from phalanx.core.files import resource_error, write_bytes_atomic
    from phalanx.job.json_schema import FILE

    path = Path(file)
    try:
        is_there, is_directory = path.exists(), path.is_dir()
        if is_directory:
            raise UsageError("is a directory", where=file, fix=f"did you mean {str(path / 'job.toml')!r}?")
        if is_there and not force:
            raise UsageError("is there already", where=file, fix="use --force to replace it, or give another name")
        if not path.parent.is_dir():
            raise UsageError(f"there is no directory {str(path.parent)!r}", where=file, fix="create it first")
        write_bytes_atomic(path, text.encode(), durable=False)
        print(f"wrote   {path}; next: phalanx train {shlex.quote(str(path))}")
        if editor:  # always the one of this release: nobody edits it
            write_bytes_atomic(path.with_name(FILE), _schema_text().encode(), durable=False)
            print(f"wrote   {path.with_name(FILE)}")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if isinstance(error, ValueError):
            raise UsageError("is not a possible path", where=ascii(file)) from None
        raise resource_error(error, "writing the job file", path) from None


def _job_of(run: str) -> Job:
    from pathlib import Path

    from phalanx.core.errors import UsageError
    from phalanx.job.load import load_job_json

    file = Path(run) / "job.json"
    if not file.is_file():
        raise UsageError("no run is there", where=run, fix="give a directory that phalanx train wrote")
    return load_job_json(file)


def _schema_text() -> str:
    from importlib.resources import files

    from phalanx.job.json_schema import FILE

    return files("phalanx.job").joinpath(FILE).read_text("utf-8")
