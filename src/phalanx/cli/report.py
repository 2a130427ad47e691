"""What bounds a run, and its page; or two runs side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli._complete import complete_run_directory
from phalanx.cli._options import RunArgument

EXAMPLE = "Example: phalanx report runs/train-20260101-120000"


def command(
    run: RunArgument,
    other: Annotated[
        str | None,
        typer.Argument(
            metavar="OTHER",
            help="Another run: compare the two term by term; writes no page.",
            autocompletion=complete_run_directory,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write the page there, not into the run."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the run's facts as JSON; writes no page.")
    ] = False,
) -> int:
    """Say how a run ended and what bounds it, and write its page, one self-contained file."""
    from phalanx.cli._json import print_errors_as_json, print_json
    from phalanx.cli._output_files import require_page_or_new_file

    with print_errors_as_json(as_json):
        run_dir = _require_run(run)
        if out is not None and (other is not None or as_json):
            from phalanx.core.errors import UsageError

            raise UsageError("--out is for the page, and none is written here", fix="leave it out")
        if out is not None:
            require_page_or_new_file(out)
        if other is not None:
            return _compare(run_dir, _require_run(other), as_json=as_json)
        from phalanx.report.reduce import collect_run_facts

        facts = collect_run_facts(run_dir)
        if as_json:
            from phalanx.report.summary import build_run_json

            print_json("run", build_run_json(facts), indent=1)
            return 0
        from phalanx.core.errors import ResourceError
        from phalanx.report.bottleneck.describe import list_verdict_lines
        from phalanx.report.facts import describe_skipped_steps
        from phalanx.report.failures import list_failure_lines
        from phalanx.report.ledger import list_ledger_warnings
        from phalanx.report.page import write_report
        from phalanx.report.run_status import list_status_lines

        # Before the words: whoever reads three lines of them (head -3) has the page of now, too.
        unwritten = None
        try:
            page = write_report(run_dir, facts, path=out)
        except ResourceError as error:
            unwritten = error
        print(*list_status_lines(facts), sep="\n")
        for line in list_failure_lines(facts):
            print(line)
        if facts.bottleneck is not None:
            print(*list_verdict_lines(facts.bottleneck), sep="\n")
        skipped = describe_skipped_steps(facts.steps.step, facts.skipped)
        if skipped is not None:
            print(skipped)
        for drift in facts.drifts:
            print(drift.describe())
        for gap in [*facts.list_gaps(), *list_ledger_warnings(facts.rank_ledgers)]:
            print(f"warn    {gap}", file=sys.stderr)
        if unwritten is not None:
            raise unwritten
        print(page)
    return 0


def _require_run(run: str) -> Path:
    """The directory of a run. Raises UsageError if none is there."""
    from phalanx.core.errors import UsageError

    run_dir = Path(run)
    if not (run_dir / "events").is_dir():
        raise UsageError(
            "no run is there", where=run, fix="give a directory that phalanx train wrote"
        )
    return run_dir


def _compare(first: Path, second: Path, *, as_json: bool) -> int:
    import os

    from phalanx.cli._json import print_json
    from phalanx.core.secrets import Redactor
    from phalanx.report.compare import compare_runs, list_comparison_lines
    from phalanx.report.reduce import collect_run_facts

    comparison = compare_runs(collect_run_facts(first), collect_run_facts(second))
    if as_json:
        facts = {"first": str(first), "second": str(second), **comparison.to_json()}
        print_json("run-comparison", facts, indent=1)
        return 0
    # Values of two jobs: none of them may be a password.
    redactor = Redactor(os.environ)
    for line in list_comparison_lines(comparison, (first.name, second.name)):
        print(redactor.redact_value(line))
    return 0
