"""The section [run]."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from phalanx.job.schema.base import Count, Section, Text


class Run(Section):
    """The run's name, and the directory it writes to."""

    name: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9._-]{1,64}$",
            json_schema_extra={"wanted": "a name of 1 to 64 letters, digits, '.', '_' or '-'"},
        ),
    ] = "train"
    """Names the run directory and its pages."""
    dir: Text | None = None
    """Run directory; default runs/<name>-<time>. Everything a run writes is inside."""
    seed: Count = 0
    """Initial weights and sample order are pure functions of it."""
