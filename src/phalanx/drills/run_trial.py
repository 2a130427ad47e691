"""One run of a drill: undisturbed, or with faults; and what it made of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from phalanx.checkpoint.manifest import list_checkpoint_paths_of_run
from phalanx.checkpoint.reading.diff import diff_checkpoints
from phalanx.core.errors import CheckpointError, DataError, PhalanxError, UsageError
from phalanx.core.files import read_whole_regular_file
from phalanx.data.ledger import check_sample_records
from phalanx.drills.aftermath import (
    count_needless_restarts,
    find_over_s,
    list_late_kinds,
    list_restart_moments_s,
)
from phalanx.drills.command import PHALANX_COMMAND, CommandEnd, run_phalanx
from phalanx.drills.job import DrilledJob, format_inject
from phalanx.drills.judge import Bars, Measured, build_bars, finite_or_none
from phalanx.drills.load import average_loads
from phalanx.drills.record import RunRecord, read_run_record
from phalanx.drills.stages import opening_stage
from phalanx.drills.trials import DrillShape, Trial, load_fault
from phalanx.drills.verdicts import Verdict, count_starved_ranks, find_named_ranks, find_verdicts
from phalanx.report.reduce import collect_run_facts
from phalanx.resilience.expectation import (
    EACH_SAMPLE_ONCE,
    NO_VERDICT,
    SAMPLES_LEFT_OUT,
    Ending,
    Expectation,
)
from phalanx.resilience.strikes import Strike

LEFT_WITH_SUPERVISOR = "ended with it"
"""The class of runs whose ranks leave because their supervisor is gone: there is nobody to say it,
and the drill sees it itself."""
_MIN_LIMIT_S = 60.0
_LIMIT_FACTOR = 4.0


@dataclass(frozen=True)
class UndisturbedRun:
    """The run that nothing happened to: what the others are compared with."""

    run_dir: Path
    record: RunRecord
    wall_s: float

    @property
    def step_p99_s(self) -> float:
        """99 of 100 steps took no longer, of all ranks."""
        return self.record.measure_step_quantile_s(0.99)


@dataclass(frozen=True)
class FinishedTrial:
    """A trial that has run: what was measured, its bars, and for the page the curve and what
    happened. `undisturbed_losses`: of the same steps. `restarts`: the steps that later attempts
    went on from."""

    trial: Trial
    measured: Measured
    bars: Bars
    losses: dict[int, float] = field(default_factory=dict)
    undisturbed_losses: dict[int, float] = field(default_factory=dict)
    strikes: tuple[Strike, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    restarts: tuple[int, ...] = ()


@dataclass(frozen=True)
class TrialRunner:
    """Runs trials of one job below `folder`."""

    job: DrilledJob
    shape: DrillShape
    folder: Path
    command: Sequence[str] = PHALANX_COMMAND
    run_limit_s: float | None = None

    def run_undisturbed(
        self, name: str = "undisturbed", overrides: Sequence[str] = ()
    ) -> UndisturbedRun:
        """Train the job without a fault. Raises UsageError where that fails: there is no drill."""
        record, end = self.train(name, overrides, 3600.0)
        if end.code != 0:
            raise UsageError(
                f"the job does not run undisturbed: it ended with exit code {end.code}",
                why=read_last_line(self._log_path(record.run_dir)),
            )
        return UndisturbedRun(record.run_dir, record, end.wall_s)

    def train(
        self, name: str, overrides: Sequence[str], limit_s: float
    ) -> tuple[RunRecord, CommandEnd]:
        """Train the job in a folder of this name, to its end or that of `limit_s` seconds."""
        run_dir = self._make_run_directory(name)
        end = self._run(self._build_train_arguments(run_dir, overrides), run_dir, limit_s)
        return read_run_record(run_dir), end

    def find_limit_s(self, undisturbed: UndisturbedRun) -> float:
        """Seconds after which a run with one fault is given up."""
        return self.run_limit_s or max(_MIN_LIMIT_S, _LIMIT_FACTOR * undisturbed.wall_s)

    def run_trial(self, trial: Trial, undisturbed: UndisturbedRun) -> FinishedTrial:
        """Run the job with the faults of `trial`, and again with --resume where that is due."""
        expectation = load_fault(trial.fault).expectation
        name = f"{trial.fault}-{trial.seed}-{trial.repeat}"
        overrides = (format_inject(trial.inject), *expectation.overrides)
        with opening_stage(expectation.stage, self.folder / name) as prefix:
            run_dir = self._make_run_directory(name)
            limit_s = self.find_limit_s(undisturbed)
            arguments = self._build_train_arguments(run_dir, overrides)
            ends = [self._run(arguments, run_dir, limit_s, prefix)]
            if expectation.ending is Ending.RESUMES and ends[0].code != 0:
                arguments = ["train", "--resume", str(run_dir)]
                ends.append(self._run(arguments, run_dir, limit_s, prefix))
            record = read_run_record(run_dir)
            return self._measure(trial, expectation, record, ends, undisturbed)

    def _make_run_directory(self, name: str) -> Path:
        run_dir = self.folder / name / "run"
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        return run_dir

    def _build_train_arguments(self, run_dir: Path, overrides: Sequence[str]) -> list[str]:
        return ["train", *self.job.arguments, *overrides, f"run.dir={run_dir}"]

    def _run(
        self,
        arguments: Sequence[str],
        run_dir: Path,
        limit_s: float,
        prefix: Sequence[str] = (),
    ) -> CommandEnd:
        return run_phalanx(
            arguments,
            run_dir,
            log=self._log_path(run_dir),
            limit_s=limit_s,
            command=(*prefix, *self.command),
        )

    def _log_path(self, run_dir: Path) -> Path:
        return run_dir.with_suffix(".log")

    def _measure(
        self,
        trial: Trial,
        expectation: Expectation,
        record: RunRecord,
        ends: Sequence[CommandEnd],
        undisturbed: UndisturbedRun,
    ) -> FinishedTrial:
        open_save_steps = 0
        if record.strikes:
            open_save_steps = record.count_steps_of_open_save(
                record.strikes[0],
                self.shape.save_every_steps,
                ranks_leave_later=expectation.ending is Ending.RESUMES,
            )
        bars = build_bars(
            expectation,
            rank=trial.place.rank,
            shape=self.shape,
            step_p99_s=undisturbed.step_p99_s,
            open_save_steps=open_save_steps,
        )
        verdicts = find_verdicts(record.envelopes, bars.verdict)
        if bars.exit_codes[0] < 0 and record.strikes:
            verdicts.append(_build_departure_verdict(record.strikes[0], ends[0]))
        return FinishedTrial(
            trial,
            replace(
                measure_trial(record, verdicts, ends, undisturbed, expectation),
                said=find_words(self._log_path(record.run_dir), expectation.says),
                loss_difference=compare_losses(record.losses, undisturbed.record.losses),
                samples=measure_samples(record.run_dir, self.shape.num_steps)
                if expectation.samples
                else "",
            ),
            bars,
            record.losses,
            undisturbed.record.losses,
            record.strikes,
            tuple(verdicts),
            record.restarts,
        )


def _build_departure_verdict(strike: Strike, end: CommandEnd) -> Verdict:
    """The verdict on ranks whose supervisor was killed: they left at that moment."""
    kind = LEFT_WITH_SUPERVISOR if not end.num_left else NO_VERDICT
    return Verdict(kind, (), strike.step, end.departed_s, "")


def measure_trial(
    record: RunRecord,
    verdicts: Sequence[Verdict],
    ends: Sequence[CommandEnd],
    undisturbed: UndisturbedRun,
    expectation: Expectation,
) -> Measured:
    """Measure how a run took its first strike."""
    strike = record.strikes[0] if record.strikes else None
    again_s = math.nan
    if strike is not None:
        again_s = record.find_trained_again_s(strike, ranks_go_on=expectation.ranks_go_on)
    detection = _measure_detection(strike, verdicts, expectation)
    needless_restarts = 0
    late: tuple[str, ...] = ()
    if strike is not None:
        struck_s = strike.monotonic_s
        over_s = find_over_s(struck_s, again_s, detection.after_s, expectation)
        expected = {expectation.verdict, *expectation.preceded_by}
        late = list_late_kinds(verdicts, over_s, expected)
        needless_restarts = count_needless_restarts(record, struck_s, over_s, expectation)
    return Measured(
        has_struck=strike is not None,
        verdict=detection.kind,
        verdict_text=detection.text,
        ranks=detection.ranks,
        detected_s=detection.after_s,
        detected_steps=detection.after_steps,
        false_verdicts=(*detection.false_verdicts, *late),
        trained_again_s=finite_or_none(again_s),
        lost_steps=record.count_lost_steps(),
        is_bit_equal=compare_final_checkpoints(undisturbed.run_dir, record.run_dir),
        exit_codes=tuple(end.code for end in ends),
        is_overdue=any(end.is_overdue for end in ends),
        num_left=sum(end.num_left for end in ends),
        goodput=read_goodput_of_run(record.run_dir),
        wall_s=round(sum(end.wall_s for end in ends), 4),
        num_restarts=len(list_restart_moments_s(record)),
        needless_restarts=needless_restarts,
        num_starved=count_starved_ranks(record.envelopes),
        load=average_loads([(end.load, end.wall_s) for end in ends]),
    )


@dataclass(frozen=True)
class _Detection:
    """The first verdict after a strike, how long after it came, and the kinds of those before.

    `ranks`: those that it names, or a later one of its class.
    """

    kind: str
    text: str
    ranks: tuple[int, ...]
    after_s: float | None
    after_steps: int | None
    false_verdicts: tuple[str, ...]


def _measure_detection(
    strike: Strike | None, verdicts: Sequence[Verdict], expectation: Expectation
) -> _Detection:
    """The detection of `strike`; of none every verdict is a false one."""
    struck_s = math.inf
    if strike is not None:
        struck_s = strike.monotonic_s
    false_verdicts = tuple(verdict.kind for verdict in verdicts if verdict.monotonic_s < struck_s)
    after = [verdict for verdict in verdicts if verdict.monotonic_s >= struck_s]
    after = [verdict for verdict in after if verdict.kind not in expectation.preceded_by]
    if not after:
        return _Detection(NO_VERDICT, "", (), None, None, false_verdicts)
    first, ranks = after[0], find_named_ranks(after)
    if strike is None:
        return _Detection(first.kind, first.text, ranks, None, None, false_verdicts)
    after_s = round(first.monotonic_s - struck_s, 4)
    after_steps = max(0, first.step - strike.step)
    return _Detection(first.kind, first.text, ranks, after_s, after_steps, false_verdicts)


def compare_final_checkpoints(a: Path, b: Path) -> bool | None:
    """True if the newest checkpoints of two runs are of one step and their tensors have the same
    bits; None if one has none, or it is damaged."""
    first, second = list_checkpoint_paths_of_run(a), list_checkpoint_paths_of_run(b)
    if not first or not second or first[-1].name != second[-1].name:
        return None
    try:
        return not diff_checkpoints(first[-1], second[-1]).tensors
    except CheckpointError:
        return None


def compare_losses(losses: Mapping[int, float], expected: Mapping[int, float]) -> float | None:
    """The largest difference of a step's loss from the `expected` one, as a part of that; None if a
    step is missing, or its loss is not finite."""
    if not expected or losses.keys() != expected.keys():
        return None
    differences = [abs(losses[step] / expected[step] - 1.0) for step in expected]
    if not all(map(math.isfinite, differences)):
        return None
    return float(f"{max(differences):.3g}")


def measure_samples(run_dir: Path, num_steps: int) -> str:
    """What the ledger of samples says of a run of `num_steps` steps: EACH_SAMPLE_ONCE,
    SAMPLES_LEFT_OUT, or its first problem."""
    try:
        report = check_sample_records(run_dir)
    except DataError as error:
        return str(error)
    if report.problems:
        return report.problems[0]
    if report.num_steps != num_steps:
        return f"those of {report.num_steps} of {num_steps} steps"
    return SAMPLES_LEFT_OUT if report.num_left_out else EACH_SAMPLE_ONCE


def read_goodput_of_run(run_dir: Path) -> float | None:
    """The goodput of a run, as its page says it; None without steps."""
    try:
        ledger = collect_run_facts(run_dir).ledger
    except PhalanxError:
        return None
    good_s = ledger.good_s
    if not ledger.wall_s > 0:
        return None
    return finite_or_none(good_s / ledger.wall_s)


def find_words(path: Path, pattern: str) -> str:
    """What a command has said that fits a regular expression, the last of it; "" if nothing, or for
    an empty pattern."""
    if not pattern:
        return ""
    text = " ".join(read_whole_regular_file(path).decode(errors="replace").split())
    matches = [match.group() for match in re.finditer(pattern, text)]
    return matches[-1] if matches else ""


def read_last_line(path: Path) -> str:
    """The last line that a command has said; "" if none."""
    lines = read_whole_regular_file(path).decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
