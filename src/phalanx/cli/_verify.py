"""`phalanx verify`: choose the layouts, run one group of ranks through them, print a line for each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.cli._arguments import split_arguments
from phalanx.cli._json import print_json, printing_json
from phalanx.cli._launched import refuse_launcher
from phalanx.core.errors import ExitCode, LayoutError, PhalanxError, ResourceError, UsageError, did_you_mean
from phalanx.core.registry import is_foreign
from phalanx.core.units import format_count, plural
from phalanx.data.look import look_at_data
from phalanx.data.prepare import prepare_corpus
from phalanx.job.foreign import foreign_shape
from phalanx.job.hugging_face import preloaded
from phalanx.job.load import load_job
from phalanx.job.model import shape_of
from phalanx.job.own_dataset import is_own_dataset
from phalanx.job.schema import Data, Job
from phalanx.launch.paths import next_attempt
from phalanx.launch.supervisor import LaunchSpec, Outcome, supervise
from phalanx.observe.bus import Bus
from phalanx.plan.cluster import detect_cluster
from phalanx.plan.plan import Plan
from phalanx.run.next_command import next_line
from phalanx.run.scratch import Scratch, scratch_directory
from phalanx.verify.cases import (
    SMALL_VOCAB,
    Case,
    all_layouts,
    asked_layout,
    compressed_layouts,
    judged_job,
    make_cases,
    not_judged,
    shrunk,
)
from phalanx.verify.flips import UPDATE_TOLERANCE
from phalanx.verify.pipelines import num_blocks_for
from phalanx.verify.row import ROWS, Row

DTYPES = ("float64", "float32")
DEFAULT_RANKS = 4
MAX_NAMED = 16  # layouts, of a hundred and more, in a message
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
    refuse_launcher("verify")
    with printing_json(request.as_json):
        job, cases, notes, beside = _choose(request)
        if not request.as_json:
            for line in [*notes, *beside]:
                print(line)
        table = Table(request.as_json, beside)
        for case in cases:
            if case.plan is None:
                table.add(_row_of(job, case, "", refused=case.refused))
        table.tell_refused()
        with scratch_directory("verify") as scratch:
            stopped = _judge(job, [case for case in cases if case.plan is not None], request.steps, scratch, table)
        table.tell_refused()
    if stopped is not None:
        return stopped
    if not request.as_json:
        print(table.summary())
        if request.layouts == "asked" and request.model is None and all(row["ok"] for row in table.rows):
            print(next_line("train", *request.arguments))
    return table.exit_code({name.strip() for name in request.layouts.split(",")} - {"all"})


def _choose(request: Request) -> tuple[Job, list[Case], list[str], list[str]]:
    """(the job as it is judged, its layouts, lines about what is judged, lines about what of the job is not)."""
    job_file, overrides = split_arguments(list(request.arguments))
    if request.model is not None:
        key = "kind" if is_foreign(request.model) else "preset"
        overrides = [f"model.{key}={request.model}", *overrides]
    job, notes = load_job(job_file, overrides), []
    parallel = asked_layout(job)
    num_ranks = request.ranks or job.parallel.ranks or _product(parallel) or DEFAULT_RANKS
    has_experts = not job.model.is_foreign and shape_of(job, SMALL_VOCAB).num_experts > 0
    layouts = _layouts(request.layouts, parallel, num_ranks, has_experts=has_experts)
    if request.shrink:
        job, said = shrunk(job, num_blocks=num_blocks_for(keys for _, keys in layouts))
        notes.append(f"shrunk  {said or 'nothing: it is small'}")
    job, beside = judged_job(job, num_ranks), not_judged(job)
    if job.data.mixture or not (job.data.source == Data().source or is_own_dataset(job.data.source)):
        look_at_data(job.data, vocab_size=None)  # what is judged is made up, but data that is not there is a mistake
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
            f"judged  {_model_name(job)}, {plan.num_params:,} parameters, on {plural(num_ranks, 'cpu rank')}: "
            f"{plural(request.steps, 'step')} of {plan.global_batch_size} samples in {_in_microbatches(plans)}"
        )
    return job, cases, notes, beside


def _in_microbatches(plans: Sequence[Plan]) -> str:
    counts = {
        is_cut: {plan.num_microbatches for plan in plans if (plan.pipeline is not None) is is_cut}
        for is_cut in (False, True)
    }
    words = [f"{_listed(counts[False])} microbatches"] if counts[False] else []
    if counts[True]:
        words.append(f"{_listed(counts[True])} {'in pipelines' if words else 'microbatches'}")
    return ", ".join(words)


def _listed(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))


def _layouts(asked: str, own: dict[str, Any], num_ranks: int, *, has_experts: bool) -> list[tuple[str, dict[str, Any]]]:
    """By name, with commas between: "asked" is the job's own, "all" every one of these ranks that can be meant for the
    model. Each once."""
    every = [*all_layouts(num_ranks, experts=has_experts), *compressed_layouts(num_ranks)]
    known = dict([*all_layouts(num_ranks, experts=True), *compressed_layouts(num_ranks)])
    chosen: dict[str, dict[str, Any]] = {}
    for name in (name.strip() for name in asked.split(",")):
        if name not in (*known, "all", "asked"):
            more = f", and {left} more" if (left := len(known) - MAX_NAMED) > 0 else ""
            some = f"asked, all, {', '.join(list(known)[:MAX_NAMED])}{more}"
            hint = did_you_mean(name, [*known, "all", "asked"]) or f"one of {some}: docs/verify.md"
            raise UsageError(f"--layouts: {name!r} is no layout of {plural(num_ranks, 'rank')}", fix=hint)
        chosen |= dict(every) if name == "all" else {name: own if name == "asked" else known[name]}
    return list(chosen.items())


def _product(parallel: dict[str, Any]) -> int:
    product = 1
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        product *= parallel.get(axis, 1)
    return product if product > 1 else 0


def _model_name(job: Job) -> str:
    return (None if job.model.is_foreign else job.model.preset) or job.model.kind or "small"


def _judge(job: Job, cases: Sequence[Case], num_steps: int, scratch: Scratch, table: Table) -> int | None:
    """One group of ranks goes through all layouts in all types; after a crash another goes on behind it.

    Returns an exit code if the person stopped it. Raises ResourceError where a disk refuses: that is no layout's fault.
    """
    if not cases:
        return None
    data_dir, directory = "", scratch.directory
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
            refusal = scratch.refusal_of(outcome)
            if isinstance(refusal, ResourceError):
                raise refusal
            message = scratch.message_of(outcome)
            if not left:
                raise PhalanxError(message)
            dtype, case = left.pop(0)
            table.add(_row_of(job, case, dtype, crashed=message))
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
        preload=("torch", "torch._dynamo", "phalanx.verify.rank", *preloaded(job.model.kind)),
        stepless="judging layouts",
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
    """Prints rows as they come, but for those that are refused, and remembers what they say."""

    def __init__(self, as_json: bool, beside: Sequence[str] = ()) -> None:
        self._as_json, self._beside = as_json, beside
        self.rows: list[dict[str, Any]] = []
        self._refused: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self._as_json:
            print_json("verify-row", {**row, "notes": [*row["notes"], *self._beside]})
            return
        if row["ok"] is None:
            self._refused.append(row)
            return
        for line in describe_row(row):
            print(line)

    def tell_refused(self) -> None:
        """Prints those that have come since the last time."""
        for line in describe_refused(self._refused):
            print(line)
        self._refused = []

    def summary(self) -> str:
        judged = [row for row in self.rows if row["ok"] is not None]
        refused = len({row["layout"] for row in self.rows if row["ok"] is None})
        exact = [row for row in judged if row["compress"] == "none"]
        rounded = [row for row in judged if row["compress"] != "none"]
        parts = [f"{sum(row['ok'] for row in exact)} of {len(exact)} rows equal the reference"] if exact else []
        flipped = sum(bool(row["ok"] and row["flips"]) for row in judged)
        parts += [f"{flipped} of them routed alike, since a near-tie flipped"] if flipped else []
        if rounded:
            good = sum(row["ok"] for row in rounded)
            parts += [f"{good} of {len(rounded)} with compressed gradients do what they should"]
        parts += [f"{plural(refused, 'layout')} refused"] if refused else []
        return f"verdict {', '.join(parts)}"

    def exit_code(self, named: Set[str]) -> int:
        """`named`: layouts that must not be refused."""
        if any(row["ok"] is False for row in self.rows):
            return ExitCode.VERIFICATION
        equal = {row["layout"] for row in self.rows if row["ok"]}  # in some type: not every module has a float64
        refused = {row["layout"] for row in self.rows} - equal
        return ExitCode.JOB if refused & named or (refused and not equal) else ExitCode.OK


def describe_refused(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each reason, with the layouts that it refuses; and the types, where it is not all of them."""
    dtypes: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        dtypes.setdefault((row["refused"], row["layout"]), []).append(row["dtype"])
    names: dict[str, list[str]] = {}
    for (reason, layout), found in dtypes.items():
        only = "" if found == [""] or set(found) == set(DTYPES) else f" ({', '.join(found)})"
        names.setdefault(reason, []).append(f"{layout}{only}")
    return [f"refused {', '.join(layouts)}: {reason}" for reason, layouts in names.items()]


def describe_row(row: Mapping[str, Any]) -> list[str]:
    """A line for a row that was judged, and where it differs what, where and why."""
    if row["crashed"]:
        return [
            f"CRASHED {row['layout']:<34} {row['dtype']}",
            *("        " + line for line in row["crashed"].split("\n")),
        ]
    errors = "  ".join(
        f"{name} {row['errors'][name]:.0e}"
        for name in ("loss", "norm", "gradient", "sent", "weight", "buffer", "evaluation", "update")
        if name in row["errors"]
    )
    head = "DIFFERS"
    if row["ok"]:
        head = "lossy  " if row["compress"] != "none" else "flipped" if row["flips"] else "equal  "
    allowed = f"{row['tolerance']:.0e}" + (f", update {UPDATE_TOLERANCE:.0e}" if "update" in row["errors"] else "")
    lines = [f"{head} {row['layout']:<34} {row['dtype']}  {errors}  (allowed {allowed}, {row['wall_s']:.1f} s)"]
    if row["first"]:
        lines += [f"        first   {row['first']['text']}", f"        perhaps {row['first']['cause']}"]
    if row["flips"]:
        more = len(row["flips"]) - 1
        lines.append(f"        flip    {row['flips'][0]['text']}" + (f"; and {more} more" if more else ""))
        lines.append(
            "        note    routing flips are near-ties: judged beside one process that routes as the layout does"
        )
    return lines + [f"        note    {note}" for note in row["notes"]]


def _row_of(job: Job, case: Case, dtype: str, *, refused: str = "", crashed: str = "") -> dict[str, Any]:
    ok = None if refused else False
    compress = case.parallel.get("compress", "none")
    row = Row(
        case.name,
        case.parallel,
        _model_name(job),
        dtype,
        ok,
        {},
        0.0,
        refused=refused,
        crashed=crashed,
        compress=compress,
    )
    return row.to_json()
