"""Job files on disk: write a new one, and read the job that a run resolved."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.errors import UsageError
from phalanx.core.files import write_bytes_atomically
from phalanx.job.json_schema import SCHEMA_FILE_NAME
from phalanx.job.load import load_job_json
from phalanx.job.schema import Job


def read_schema_text() -> str:
    """The JSON Schema of this release's job files, from which editors complete."""
    return files("phalanx.job").joinpath(SCHEMA_FILE_NAME).read_text("utf-8")


def load_job_of_run(run: str) -> Job:
    """Load the job that a run resolved. Raises UsageError if no run is there, JobError if its job
    is not one.
    """
    file = Path(run) / "job.json"
    if not file.is_file():
        raise UsageError(
            "no run is there", where=run, fix="give a directory that phalanx train wrote"
        )
    return load_job_json(file)


def write_job_file(file: str, text: str, *, force: bool) -> Path:
    """Write a job file. Raises UsageError if something is in the way, ResourceError if it cannot be
    written.

    With `force` an old file is replaced.
    """
    path = Path(file)
    try:
        if path.is_dir():
            raise UsageError(
                "is a directory", where=file, fix=f"did you mean {str(path / 'job.toml')!r}?"
            )
        if path.exists() and not force:
            raise UsageError(
                "is there already",
                where=file,
                fix="use --force to replace it, or give another name",
            )
        # A directory that is misspelt is more likely than one that is to be made.
        if not path.parent.is_dir():
            raise UsageError(
                f"there is no directory {str(path.parent)!r}", where=file, fix="create it first"
            )
        # Atomic, because --force replaces what somebody wrote.
        write_bytes_atomically(path, text.encode(), durable=False)
    except ValueError:  # a NUL in the name
        raise UsageError("is not a possible path", where=ascii(file)) from None
    except OSError as error:
        raise build_path_resource_error(error, "writing the job file", path, place="FILE") from None
    return path


def write_schema_beside(job_file: Path) -> Path:
    """Write the JSON Schema into the job file's directory, over an older one: nobody edits it.
    Raises ResourceError.
    """
    path = job_file.with_name(SCHEMA_FILE_NAME)
    try:
        write_bytes_atomically(path, read_schema_text().encode(), durable=False)
    except OSError as error:
        raise build_path_resource_error(
            error, "writing the job file", job_file, place="FILE"
        ) from None
    return path
