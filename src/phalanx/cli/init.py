"""Write a job file with every key, its words and its default, ready to edit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLE = "Example: phalanx init job.toml"


def command(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The file to write; - prints it.")
    ] = "job.toml",
    force: Annotated[
        bool, typer.Option("--force", help="Replace the file if it is there.")
    ] = False,
    minimal: Annotated[
        bool, typer.Option("--minimal", help="Only the keys that are set, without words.")
    ] = False,
    from_run: Annotated[
        str | None,
        typer.Option("--from-run", metavar="RUN", help="Write the job that this run had."),
    ] = None,
    editor: Annotated[
        bool,
        typer.Option(
            "--editor", help="Also write job.schema.json beside it, which editors complete from."
        ),
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
    import shlex

    from phalanx.cli._arguments import refuse_options_without_effect
    from phalanx.cli._output_files import require_no_device
    from phalanx.core.errors import UsageError
    from phalanx.core.terminal import print_document
    from phalanx.job.job_file import (
        load_job_of_run,
        read_schema_text,
        write_job_file,
        write_schema_beside,
    )
    from phalanx.job.json_schema import SCHEMA_FILE_NAME
    from phalanx.job.template import format_job_template
    from phalanx.run.next_command import format_program_command, spell_path_as_argument

    if file == "-":
        refuse_options_without_effect("where the file is printed", {"--editor": editor})
    if from_run == "":
        raise UsageError("--from-run names no run", fix="give a directory that phalanx train wrote")
    if schema:
        print_document(read_schema_text(), end="")
        return 0
    text = format_job_template(
        None if from_run is None else load_job_of_run(from_run),
        file=file if file != "-" else "job.toml",
        minimal=minimal,
        schema_file=f"./{SCHEMA_FILE_NAME}" if editor else None,
    )
    if file == "-":
        print_document(text, end="")
        return 0
    if force:
        require_no_device(Path(file))
    path = write_job_file(file, text, force=force)
    command = f"{format_program_command()} train {shlex.quote(spell_path_as_argument(path))}"
    print(f"wrote   {path}; next: {command}")
    if editor:
        print(f"wrote   {write_schema_beside(path)}")
    return 0
