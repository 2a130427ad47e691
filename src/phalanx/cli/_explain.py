"""The table of `--explain`: every value of a job, where it comes from and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.core.terminal import print_coloured, print_document, should_use_colour
from phalanx.core.units import format_seconds
from phalanx.job.copies import apply_job_keys
from phalanx.job.findings import shorten_to_one_line
from phalanx.job.schema import Job
from phalanx.job.toml import format_toml_value
from phalanx.plan.search.describe import describe_layout
from phalanx.plan.search.result import RankedLayout
from phalanx.run.explain import ExplainedValue, build_explained_json, explain_job_values

MAX_VALUE_CHARS = 44  # characters; --json has all of them
_COLOUR_OF_ORIGIN = {
    "file": "32",
    "run": "32",
    "override": "33",
    "derived": "36",
    "preset": "36",
    "default": "2",
}


def format_explained_lines(explained: Sequence[ExplainedValue], *, colour: bool) -> list[str]:
    """An aligned table, section by section."""
    rows = [
        (one, one.key.partition(".")[2], _format_value(one.value), one.where or one.origin)
        for one in explained
    ]
    name_width, value_width, origin_width = (
        max(len(text) for text in column) for column in zip(*[row[1:] for row in rows], strict=True)
    )
    lines: list[str] = []
    section = ""
    for one, name, value, origin in rows:
        if one.key.partition(".")[0] != section:
            section = one.key.partition(".")[0]
            lines += [""] * bool(lines) + [_colour_text(f"[{section}]", "1", colour)]
        padded = f"{value:<{value_width}}  {origin:<{origin_width}}"
        why = ""
        if one.why:
            why = f"  {shorten_to_one_line(one.why, 120)}"
        else:
            padded = padded.rstrip()
        painted = _colour_text(padded, _COLOUR_OF_ORIGIN[one.origin], colour)
        lines.append(f"{name:<{name_width}}  {painted}{why}")
    return lines


def _format_value(value: Any) -> str:
    # TOML has no word for it.
    if value is None:
        return "none"
    return shorten_to_one_line(format_toml_value(value), MAX_VALUE_CHARS)


def _colour_text(text: str, code: str, colour: bool) -> str:
    if not colour:
        return text
    return f"\033[{code}m{text}\033[0m"


def print_explained_job(
    job: Job,
    job_file: str | Path | None,
    overrides: Sequence[str],
    *,
    as_json: bool,
    winner: RankedLayout | None = None,
) -> None:
    """Print every value of `job` with where it comes from, in the layout of `winner` where a search
    chose one."""
    laid_out = job if winner is None else apply_job_keys(job, winner.job_keys)
    explained, plan = explain_job_values(laid_out, job_file, overrides)
    if winner is not None:
        explained = _explain_chosen_keys(explained, winner)
    if as_json:
        import json

        print_document(json.dumps(build_explained_json(explained, plan, job_file), indent=1))
    else:
        colour = should_use_colour()
        # Not print, whose filter would take our colours out.
        print_coloured("\n".join(format_explained_lines(explained, colour=colour)))
        for warning in plan.warnings:
            print_coloured(_colour_text(f"\nwarn    {warning.text}", "33", colour))


def _explain_chosen_keys(
    explained: Sequence[ExplainedValue], winner: RankedLayout
) -> list[ExplainedValue]:
    """`explained`, with the search as the origin of the keys that the job leaves out and the
    layout of `winner` has."""
    why = f"{describe_layout(winner)}: chosen by the search"
    if winner.step_s is not None:
        why += f", {format_seconds(winner.step_s)} a step"
    rows = []
    for one in explained:
        if one.key in winner.job_keys and one.origin not in ("file", "run", "override"):
            one = replace(one, origin="derived", why=why)
        rows.append(one)
    return rows
