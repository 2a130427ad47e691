"""The bars of a soak as one run: how it ended, its checkpoints, samples and final bits, its goodput
beside the ceiling, and what it left behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint.manifest import list_checkpoint_paths_of_run
from phalanx.checkpoint.reading.verify import find_checkpoint_problems
from phalanx.core.errors import CheckpointError, DataError
from phalanx.core.typed_json import JsonRecord
from phalanx.core.units import plural
from phalanx.data.ledger import check_sample_records
from phalanx.drills.command import CommandEnd
from phalanx.drills.judge import Check, judge_final_bits
from phalanx.drills.record import RunRecord
from phalanx.drills.soak.measure import AnsweredStrike
from phalanx.drills.verdicts import count_starved_ranks
from phalanx.observe.events import CheckpointSaved

CEILING_SHARE_BAR = 0.97
PARTICIPATION_BAR = 0.95
_MAX_SHOWN_PROBLEMS = 3


@dataclass(frozen=True)
class SoakGoodput(JsonRecord):
    """Goodput of both runs (0 to 1), and the ceiling of the disturbed one: the undisturbed goodput,
    if all faults together had taken `charged_s` longer. None: not known."""

    undisturbed: float | None
    disturbed: float | None
    charged_s: float
    ceiling: float | None

    @property
    def share_of_ceiling(self) -> float | None:
        if self.disturbed is None or not self.ceiling:
            return None
        return self.disturbed / self.ceiling


def compute_soak_goodput(
    undisturbed: float | None, disturbed: float | None, undisturbed_wall_s: float, charged_s: float
) -> SoakGoodput:
    """The goodput of a soak, whose undisturbed run took `undisturbed_wall_s`."""
    ceiling = None
    if undisturbed is not None and undisturbed_wall_s > 0:
        ceiling = round(undisturbed * undisturbed_wall_s / (undisturbed_wall_s + charged_s), 4)
    return SoakGoodput(undisturbed, disturbed, round(charged_s, 2), ceiling)


def judge_totals(
    answered: Sequence[AnsweredStrike],
    false_verdicts: Sequence[str],
    record: RunRecord,
    end: CommandEnd,
    *,
    num_steps: int,
    is_bit_equal: bool | None,
    goodput: SoakGoodput,
    participation: float | None,
    num_left: int,
    keeps_all_checkpoints: bool,
) -> list[Check]:
    """All bars of the run as a whole. Reads its checkpoints and the records of its samples."""
    return [
        _judge_end(end),
        *_judge_strikes(answered),
        _judge_false_verdicts(false_verdicts, record),
        judge_checkpoints(record, keeps_all=keeps_all_checkpoints),
        judge_samples(record.run_dir, num_steps),
        judge_final_bits(is_bit_equal),
        _judge_goodput(goodput),
        _judge_participation(participation),
        Check("left behind", plural(num_left, "process", "processes"), "none", num_left == 0),
    ]


def _judge_false_verdicts(false_verdicts: Sequence[str], record: RunRecord) -> Check:
    words = ", ".join(false_verdicts) or "none"
    num_starved = count_starved_ranks(record.envelopes)
    if num_starved:
        words += f" ({plural(num_starved, 'time')} a rank was starved by other processes)"
    return Check("false verdicts", words, "none", not false_verdicts)


def _judge_end(end: CommandEnd) -> Check:
    words = str(end.code)
    if end.is_overdue:
        words += ", killed at its limit"
    return Check("exit code", words, "0, and nobody helped", end.code == 0 and not end.is_overdue)


def _judge_strikes(answered: Sequence[AnsweredStrike]) -> list[Check]:
    struck = sum(each.measured.has_struck for each in answered)
    passed = sum(each.is_passed for each in answered)
    total = len(answered)
    return [
        Check("struck", f"{struck} of {plural(total, 'fault')}", "all", struck == total),
        Check("faults within bars", f"{passed} of {total}", "all", passed == total),
    ]


def judge_checkpoints(record: RunRecord, *, keeps_all: bool) -> Check:
    """Every checkpoint of the run verifies; and with `keeps_all`, each that was ever saved is
    there."""
    bar = "none torn"
    try:
        paths = list_checkpoint_paths_of_run(record.run_dir)
    except CheckpointError as error:
        return Check("checkpoints", str(error), bar, False)
    problems = [str(problem) for path in paths for problem in find_checkpoint_problems(path)]
    if keeps_all:
        saved = {
            int(each.event.step)
            for each in record.envelopes
            if isinstance(each.event, CheckpointSaved)
        }
        missing = saved - {int(path.name.removeprefix("step-")) for path in paths}
        problems += [f"that of step {step} was saved and is gone" for step in sorted(missing)]
    words = f"{plural(len(paths), 'checkpoint')}, each byte verified"
    if problems:
        words = _join_problems(problems)
    return Check("checkpoints", words, bar, bool(paths) and not problems)


def judge_samples(run_dir: Path, num_steps: int) -> Check:
    """Each sample was read exactly once, as `phalanx data ledger` says it, in all steps."""
    bar = "each exactly once"
    try:
        report = check_sample_records(run_dir)
    except DataError as error:
        return Check("samples", str(error), bar, False)
    words = f"{report.num_samples:,} in {report.num_steps:,} steps"
    if report.problems:
        words += f"; {_join_problems(report.problems)}"
    is_whole = report.num_steps == num_steps and not report.num_left_out
    return Check("samples", words, bar, report.ok and is_whole)


def _join_problems(problems: Sequence[str]) -> str:
    shown = list(problems[:_MAX_SHOWN_PROBLEMS])
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown):,} more")
    return "; ".join(shown)


def _judge_goodput(goodput: SoakGoodput) -> Check:
    share, ceiling = goodput.share_of_ceiling, goodput.ceiling
    bar = f"{CEILING_SHARE_BAR:.0%} of the ceiling"
    if share is None or ceiling is None or goodput.disturbed is None:
        return Check("goodput", "not known", bar, False)
    words = f"{goodput.disturbed:.1%}, {share:.0%} of the ceiling of {ceiling:.1%}"
    return Check("goodput", words, bar, share >= CEILING_SHARE_BAR)


def _judge_participation(participation: float | None) -> Check:
    bar = f"{PARTICIPATION_BAR:.0%} of ranks"
    if participation is None:
        return Check("ranks in a step", "not known", bar, False)
    words = f"{participation:.1%} of ranks"
    return Check("ranks in a step", words, bar, participation >= PARTICIPATION_BAR)
