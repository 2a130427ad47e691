"""What `phalanx plan` prints under its answer, `--explain TERM`, and `--page`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.core.errors import UsageError

if TYPE_CHECKING:
    from phalanx.plan.advice.terminal import TerminalStyle
    from phalanx.run.plan_advice import AdvisedPlan
    from phalanx.run.search_job import JobSearch


SEARCHED_REMEDIES = (
    "where these name another layout or micro-batch that the job leaves open, the search has"
    " weighed it, within its limits: by its predictions it is slower, a tie, or does not fit. New"
    " is what it does not vary: the batch of a step, nodes and links, the blocks of a stage, keys"
    " that the job fixes"
)


def split_explained_term(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """The arguments without the term of `--explain`, and the term: a word that is neither a job
    file nor an override. Raises UsageError for a second one."""
    rest: list[str] = []
    terms: list[str] = []
    for argument in arguments:
        is_file = argument.endswith((".toml", ".json")) or os.path.exists(argument)
        if is_file or "=" in argument or "." in argument:
            rest.append(argument)
        else:
            terms.append(argument)
    if len(terms) > 1:
        raise UsageError(
            f"{terms[1]!r}: --explain takes one term", fix=f"--explain {'-'.join(terms)}, perhaps"
        )
    return rest, terms[0] if terms else None


def print_term_formula(advised: AdvisedPlan, name: str, *, as_json: bool) -> None:
    """Print the formula of a term with its numbers. Raises UsageError for an unknown one, or one
    of a time that is not predicted."""
    from phalanx.cli._json import print_json
    from phalanx.plan.advice.explain_term import format_explained_term, parse_term_name
    from phalanx.run.plan_advice import explain_term_of_plan

    term = parse_term_name(name)
    explanation = explain_term_of_plan(advised, term)
    if explanation is None and advised.cluster.accelerator is not None:
        raise UsageError(
            f"no time is predicted for model {advised.plan.model_shape.kind!r}, so there is no"
            " formula of it",
            fix="without --explain the plan says why; or explain a category of memory",
        )
    if explanation is None:
        raise UsageError(
            f"the formulas of time are those of named GPUs, not of"
            f" {advised.cluster.name or 'this device'}",
            fix="name GPUs, as in cluster.gpu=h100-sxm, or explain a category of memory",
        )
    explained, total = explanation
    # A price is a sample of some day, and stands nowhere without saying so.
    price_note = advised.cluster.price_note if explained.unit == "$" else ""
    if as_json:
        body = explained.to_json() | {"total": total}
        if price_note:
            body["price_note"] = price_note
        print_json("plan-term", body, indent=1)
    else:
        print("\n".join(format_explained_term(explained, total)))
        if price_note:
            print(f"\n{price_note}")


def print_plan_details(advised: AdvisedPlan, *, all_rules: bool) -> None:
    """Print the waterfall, the memory bars and the rules under a plan's answer."""
    from phalanx.core.terminal import print_coloured
    from phalanx.core.units import format_bytes
    from phalanx.plan.advice.terminal import (
        draw_memory_bars,
        draw_waterfall,
        format_rule_verdicts,
        format_table_answers,
        wrap_lines,
    )
    from phalanx.plan.advice.waterfall import build_waterfall
    from phalanx.plan.notes import list_headroom_notes

    style = detect_terminal_style()
    advice, plan = advised.advice, advised.plan
    lines: list[str] = []
    if advice.time is not None:
        rows = build_waterfall(advice.time.terms, advice.facts.goodput)
        lines += ["", "time    of a step (--explain TERM prints a formula with its numbers)"]
        lines += draw_waterfall(rows, style)
    budget = format_bytes(plan.capacity_bytes)
    lines += [
        "",
        f"memory  by phase, on the rank that needs most, of {budget} that a plan may fill",
    ]
    chosen = plan.chosen
    lines += draw_memory_bars(chosen.predicted_bytes, plan.capacity_bytes, style, chosen.phases)
    for note in list_headroom_notes(advised.job, advised.cluster, plan.world_size):
        lines += wrap_lines(note.removeprefix("memory: "), "  ", style)
    lines += ["", "rules   of thumb, with this plan's numbers"]
    lines += format_rule_verdicts(advice.verdicts, style, shows_all=all_rules)
    if advised.result is not None and any(rule.state == "fails" for rule in advice.verdicts):
        lines += wrap_lines(SEARCHED_REMEDIES, "  ", style)
    if all_rules:
        lines += ["", *format_table_answers(advice.answers, style)]
    # Not print, whose filter would take our colours out.
    print_coloured("\n".join(lines))


def detect_terminal_style() -> TerminalStyle:
    """Bars and colours on a terminal that can, plain lines elsewhere."""
    from phalanx.core.terminal import should_use_colour
    from phalanx.plan.advice.terminal import TerminalStyle

    width = shutil.get_terminal_size((80, 24)).columns
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    has_bars = sys.stdout.isatty() and is_utf8 and os.environ.get("TERM") != "dumb"
    return TerminalStyle(width, has_bars=has_bars, has_colour=should_use_colour())


def write_page(advised: AdvisedPlan, path: Path) -> None:
    """Write the page of a plan, with progress on a terminal."""
    from phalanx.run.plan_advice import write_page_of_plan

    write_page_of_plan(advised, path, _show_page_progress)
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")


def write_page_of_unfit_search(searched: JobSearch, path: Path) -> None:
    """Write the page of a search in which nothing fits."""
    from phalanx.report.plan_collect import collect_unfit_facts
    from phalanx.report.plan_page import write_plan_page

    write_plan_page(path, collect_unfit_facts(searched.result))


def _show_page_progress(number: int, total: int) -> None:
    if sys.stderr.isatty() and number % 10 == 0:
        sys.stderr.write(f"\rpage    plan {number} of {total} for the sliders")
        sys.stderr.flush()
