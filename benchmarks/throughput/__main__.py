"""`python benchmarks/throughput`: phalanx beside a bare DDP loop and beside two ranks that never
talk, interleaved."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Of the package, not its inside: names stay its own.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from phalanx.core.errors import ExitCode, PhalanxError, UsageError
from phalanx.core.units import MIB, format_seconds
from throughput.cases import CASES, MEANING, Row, plan_rows
from throughput.machine import default_label, machine_facts
from throughput.measure import Measurement, RowError, measure, write_data
from throughput.tables import as_markdown, as_text, extra_lines, table

RESULTS = Path("benchmarks/results")
STEPS, QUICK_STEPS = 10, 8
BUDGET_S = 1500.0


def main(arguments: Sequence[str]) -> int:
    """Measure and print; the exit code is not 0 if a row failed."""
    try:
        options = parse(arguments)
        rows = plan_rows(
            CASES[:1] if options.quick else CASES,
            options.repeats,
            observe=options.observe,
            only=options.only,
        )
        return run(options, rows)
    except PhalanxError as error:
        print(f"bench: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nbench: interrupted; what was measured is in the results file", file=sys.stderr)
        return ExitCode.INTERRUPTED


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Raises UsageError for values that make no benchmark; argparse itself exits with 2."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="contenders:\n" + "\n".join(f"  {name}: {what}" for name, what in MEANING.items()),
    )
    parser.add_argument(
        "--quick", action="store_true", help="the smallest model, one repetition: about a minute"
    )
    parser.add_argument(
        "--steps",
        type=int,
        help=f"measured steps of a row (default {STEPS}, --quick {QUICK_STEPS})",
    )
    parser.add_argument(
        "--warmup", type=int, default=2, help="steps before them that do not count (default 2)"
    )
    parser.add_argument(
        "--repeats", type=int, help="how often everything is measured (default 3, --quick 1)"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="rows with TEXT in case/contender; a+b wants both; may be repeated",
    )
    parser.add_argument(
        "--observe", action="store_true", help="also phalanx without sinks: what observing costs"
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=BUDGET_S,
        help="start no row later than this (default %(default)g)",
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help=f"where raw rows are appended (default {RESULTS})"
    )
    parser.add_argument(
        "--label", default=default_label(), help="names the machine in the file name (%(default)s)"
    )
    options = parser.parse_args(arguments)
    options.steps = (
        options.steps if options.steps is not None else QUICK_STEPS if options.quick else STEPS
    )
    options.repeats = options.repeats if options.repeats is not None else 1 if options.quick else 3
    for name in ("steps", "warmup", "repeats"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} {getattr(options, name)} is less than 1")
    if not options.budget_s > 0:
        raise UsageError(f"--budget-s {options.budget_s:g} is not more than 0")
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", options.label):
        raise UsageError(f"--label {options.label!r}: letters, digits, '.', '_' and '-' only")
    return options


def run(options: argparse.Namespace, rows: Sequence[Row]) -> int:
    """Measure `rows` one after the other, append each to the results file, print the tables."""
    began = time.monotonic()
    path = options.out / f"{time.strftime('%Y-%m-%d')}-{options.label}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"bench": time.strftime("%Y-%m-%dT%H:%M:%S"), "machine": machine_facts()}
    records: list[dict[str, Any]] = []
    print(
        f"{len(rows)} rows of {options.warmup} + {options.steps} steps; raw rows go to {path}",
        flush=True,
    )
    _warm_file_cache()
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as scratch,
        open(path, "a", encoding="utf-8") as results,
    ):
        left_out: list[Row] = []
        for number, row in enumerate(rows, 1):
            if time.monotonic() - began > options.budget_s:
                left_out = list(rows[number - 1 :])
                break
            record = facts | _measured(row, options, Path(scratch))
            records.append(record)
            results.write(json.dumps(record) + "\n")
            results.flush()
            elapsed = format_seconds(time.monotonic() - began)
            print(
                f"[{number}/{len(rows)}] repeat {row.repeat + 1}  {row.name:<36} {_said(record)} "
                f" ({elapsed})",
                flush=True,
            )
    _print_tables(records, left_out, options)
    return ExitCode.INTERNAL if any("error" in record for record in records) else ExitCode.OK


def _warm_file_cache() -> None:
    """Read what every contender imports, so that the first row does not pay for the disk."""
    modules = "import phalanx.run.rank, torch.distributed.run, phalanx.cli.train"
    subprocess.run([sys.executable, "-c", modules], check=False, stdout=subprocess.DEVNULL)


def _measured(row: Row, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The row's record: a measurement, or why there is none."""
    data = scratch / f"ids-{row.case.vocab_size}.npy"
    if not data.exists():
        write_data(data, row.case.vocab_size)
    head = {
        "case": row.case.to_json(),
        "contender": row.contender,
        "repeat": row.repeat,
        "warmup": options.warmup,
    }
    try:
        found: Measurement = measure(
            row, data=data, out=scratch / "row", steps=options.steps, warmup=options.warmup
        )
    except RowError as error:
        return head | {"error": str(error).replace(str(scratch), "")}
    return head | found.to_json()


def _said(record: dict[str, Any]) -> str:
    if "error" in record:
        return f"FAILED: {record['error']}"
    peak = max(record["peak_bytes"]) / MIB
    return (
        f"{record['tokens_per_s']:>7,.0f} tok/s  {record['median_step_s']:.3f} s/step  "
        f"first step {record['first_step_s']:.1f} s  peak {peak:,.0f} MiB"
    )


def _print_tables(
    records: Sequence[dict[str, Any]], left_out: Sequence[Row], options: argparse.Namespace
) -> None:
    if left_out:
        names = ", ".join(
            dict.fromkeys(f"{row.name} (repeat {row.repeat + 1})" for row in left_out)
        )
        print(f"\nbudget of {options.budget_s:g} s spent; left out: {names}")
    if not records:
        return
    lines = table(records)
    print(f"\n{as_text(lines)}\n")
    print("\n".join(extra_lines(records)))
    machine = records[0]["machine"]
    print("\nfor docs/benchmarks.md:\n")
    print(
        f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}; 2 ranks, one thread"
        f" each; medians of {options.repeats}, extremes of the pairs in brackets.\n"
    )
    print(as_markdown(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
