"""`phalanx verify`: choose the layouts, run one group of ranks through them, print a line for each."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.cli._arguments import split_arguments
from phalanx.cli._json import print_json, printing_json
from phalanx.core.errors import ExitCode, LayoutError, PhalanxError, UsageError
from phalanx.core.registry import is_foreign
from phalanx.core.units import format_count
from phalanx.data.prepare import prepare_corpus
from phalanx.job.load import load_job
from phalanx.job.model import shape_of
from phalanx.job.own_dataset import is_own_dataset
from phalanx.job.schema import Job
from phalanx.launch.paths import next_attempt
from phalanx.launch.supervisor import LaunchSpec, Outcome, supervise
from phalanx.observe.bus import Bus
from phalanx.plan.cluster import detect_cluster
from phalanx.plan.planner import foreign_shape
from phalanx.verify.cases import SMALL_VOCAB, Case, all_layouts, asked_layout, judged_job, make_cases, shrunk
from phalanx.verify.row import ROWS, Row

DTYPES = ("float64", "float32")
DEFAULT_RANKS = 4
LARGE_PARAMS = 200_000_000  # in float64, a copy per rank and the reference's gradients on disk


@dataclass(frozen=True)
class Request:
    """The command line."""

    arguments: tuple[str, ...]
    model: str | None
    layouts: str
    ranks: int | None
    shrink: bool
    steps: int
    as_json: bool


def verify(request: Request) -> int:
    """The verb. Raises PhalanxError for what a user can mend; returns the exit code."""
    with printing_json(request.as_json):
        job, cases, notes = _choose(request)
        if not request.as_json:
            print("\n".join(notes))
        table = Table(request.as_json)
        for case in cases:
            if case.plan is None:
                table.add(_row_of(job, case, "", refused=case.refused))
        with tempfile.TemporaryDirectory(prefix="phalanx-verify-") as directory:
            stopped = _judge(
                job, [case for case in cases if case.plan is not None], request.steps, Path(directory), table
            )
    if stopped is not None:
        return stopped
    if not request.as_json:
        print(table.summary())
    return table.exit_code(asked=request.layouts == "asked")


def _choose(request: Request) -> tuple[Job, list[Case], list[str]]:
    """(the job as it is judged, its layouts, lines about what is judged)."""
    if request.layouts not in ("asked", "all"):
        raise UsageError(f"--layouts {request.layouts!r}", fix="asked (the job's own layout) or all")
    job_file, overrides = split_arguments(list(request.arguments))
    if request.model is not None:
        key = "kind" if is_foreign(request.model) else "preset"
        overrides = [f"model.{key}={request.model}", *overrides]
    job, notes = load_job(job_file, overrides), []
    if request.shrink:
        job, said = shrunk(job)
        notes.append(f"shrunk  {said or 'nothing: it is small'}")
    parallel = asked_layout(job)
    num_ranks = request.ranks or job.parallel.ranks or _product(parallel) or DEFAULT_RANKS
    job = judged_job(job, num_ranks)
    layouts = list(all_layouts(num_ranks)) if request.layouts == "all" else [("asked", parallel)]
    shape = foreign_shape(job)
    num_params = (shape or shape_of(job, SMALL_VOCAB)).num_params
    if num_params > LARGE_PARAMS:
        raise LayoutError(
            f"{format_count(num_params)} parameters would be judged in float64 by {num_ranks} ranks of one machine",
            fix="--shrink judges the same kind of model at small widths",
        )
    cases = make_cases(job, layouts, num_ranks=num_ranks, cluster=detect_cluster("cpu"), shape=shape)
    plans = [case.plan for case in cases if case.plan is not None]
    if plans:
        plan = plans[0]
        notes.append(
            f"judged  {_model_name(job)}, {plan.num_params:,} parameters, on {num_ranks} cpu ranks: "
            f"{request.steps} steps of {plan.global_batch_size} samples in {plan.num_microbatches} microbatches"
        )
    return job, cases, notes


def _product(parallel: dict[str, Any]) -> int:
    product = 1
    for axis in ("dp_replicate", "dp_shard"):
        product *= parallel.get(axis, 1)
    return product if product > 1 else 0


def _model_name(job: Job) -> str:
    return (None if job.model.is_foreign else job.model.preset) or job.model.kind or "small"


def _judge(job: Job, cases: Sequence[Case], num_steps: int, directory: Path, table: Table) -> int | None:
    """One group of ranks goes through all layouts in all types; after a crash another goes on behind it.

    Returns an exit code if the person stopped it.
    """
    if not cases:
        return None
    data_dir = ""
    if is_own_dataset(job.data.source) and not job.data.mixture:
        data_dir = str(prepare_corpus(job.data, directory / "data", vocab_size=None).directory)
    left = [(dtype, case) for dtype in DTYPES for case in cases]
    while left:
        rows = _Rows(directory / ROWS, table)
        outcome = _run_group(job, left, num_steps, directory, data_dir, rows)
        rows.poll()
        if outcome.status in ("interrupted", "preempted"):
            return outcome.exit_code
        left = left[rows.num_seen :]
        if outcome.status == "failed":
            if not left:
                raise PhalanxError(outcome.message)
            dtype, case = left.pop(0)
            table.add(_row_of(job, case, dtype, crashed=outcome.message))
        (directory / ROWS).unlink(missing_ok=True)
    return None


def _run_group(
    job: Job, work: Sequence[tuple[str, Case]], num_steps: int, directory: Path, data_dir: str, rows: _Rows
) -> Outcome:
    plans = [case.plan for _, case in work if case.plan is not None]
    payload = {
        "job": job.to_json(),
        "run_dir": str(directory),
        "data_dir": data_dir,
        "num_steps": num_steps,
        "num_ranks": plans[0].world_size,
        "model": _model_name(job),
        "work": [
            {"dtype": dtype, "name": case.name, "parallel": dict(case.parallel), "plan": plan.to_json()}
            for (dtype, case), plan in zip(work, plans, strict=True)
        ],
    }
    spec = LaunchSpec(
        entry="phalanx.verify.rank:main",
        payload=payload,
        num_ranks=plans[0].world_size,
        run_dir=directory,
        preload=("torch", "torch._dynamo", "phalanx.verify.rank"),
        max_restarts=0,
        grace_s=1.0,
    )
    bus = Bus(rank=-1, attempt=next_attempt(directory), run_dir=directory)
    try:
        return supervise(spec, bus=bus, on_tick=rows.poll, say=lambda line: None)
    finally:
        bus.close()


class _Rows:
    """The rows that ranks append to a file, handed on as they come."""

    def __init__(self, path: Path, table: Table) -> None:
        self._path, self._table = path, table
        self.num_seen = 0

    def poll(self) -> None:
        try:
            lines = self._path.read_text(encoding="utf-8").split("\n")[:-1]
        except FileNotFoundError:
            return
        for line in lines[self.num_seen :]:
            self._table.add(json.loads(line))
        self.num_seen = len(lines)


class Table:
    """Prints rows as they come, and remembers what they say."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self._as_json:
            print_json("verify-row", row)
            return
        for line in describe_row(row):
            print(line)

    def summary(self) -> str:
        judged = [row for row in self.rows if row["ok"] is not None]
        good = sum(row["ok"] for row in judged)
        refused = len(self.rows) - len(judged)
        parts = [f"{good} of {len(judged)} rows equal the reference"]
        parts += [f"{refused} row{'s' if refused > 1 else ''} refused"] if refused else []
        return f"verdict {', '.join(parts)}"

    def exit_code(self, *, asked: bool) -> int:
        if any(row["ok"] is False for row in self.rows):
            return ExitCode.VERIFICATION
        equal = {row["layout"] for row in self.rows if row["ok"]}  # in some type: not every module has a float64
        is_refused = any(row["layout"] not in equal for row in self.rows)
        return ExitCode.JOB if is_refused and (asked or not equal) else ExitCode.OK


def describe_row(row: Mapping[str, Any]) -> list[str]:
    """A line for a row, and where it differs what, where and why."""
    if row["ok"] is None:
        return [f"refused {' '.join(word for word in (row['layout'], row['dtype']) if word)}: {row['refused']}"]
    if row["crashed"]:
        return [
            f"CRASHED {row['layout']:<16} {row['dtype']}",
            *("        " + line for line in row["crashed"].split("\n")),
        ]
    errors = "  ".join(
        f"{name} {row['errors'][name]:.0e}"
        for name in ("loss", "norm", "gradient", "weight", "buffer", "update")
        if name in row["errors"]
    )
    head = "equal  " if row["ok"] else "DIFFERS"
    lines = [
        f"{head} {row['layout']:<16} {row['dtype']}  {errors}  (allowed {row['tolerance']:.0e}, {row['wall_s']:.1f} s)"
    ]
    if row["first"]:
        lines += [f"        first   {row['first']['text']}", f"        perhaps {row['first']['cause']}"]
    return lines + [f"        note    {note}" for note in row["notes"]]


def _row_of(job: Job, case: Case, dtype: str, *, refused: str = "", crashed: str = "") -> dict[str, Any]:
    ok = None if refused else False
    row = Row(case.name, case.parallel, _model_name(job), dtype, ok, {}, 0.0, refused=refused, crashed=crashed)
    return row.to_json()
