"""Several trials in one run: each fault strikes in steps of its own, and is judged by what the run
recorded until the next one struck."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from phalanx.drills.command import CommandEnd
from phalanx.drills.job import format_inject, list_restart_budget_keys
from phalanx.drills.judge import Measured
from phalanx.drills.record import RunRecord
from phalanx.drills.run_trial import (
    FinishedTrial,
    TrialRunner,
    UndisturbedRun,
    compare_final_checkpoints,
    read_goodput_of_run,
)
from phalanx.drills.soak.measure import AnsweredStrike, find_early_verdicts, measure_strikes
from phalanx.drills.soak.mix import PlannedStrike, find_reason_against_mixing
from phalanx.drills.trials import DrillShape, Trial, load_fault, write_inject_texts
from phalanx.drills.verdicts import find_verdicts


def group_trials(trials: Sequence[Trial], most: int) -> list[tuple[Trial, ...]]:
    """The trials in groups that can share a run, `most` in each at most; those that need a run of
    their own are alone. Groups come in the order of their first trials."""
    groups: list[list[Trial]] = []
    open_group: list[Trial] | None = None
    for trial in trials:
        if not _can_share(trial):
            groups.append([trial])
            continue
        if open_group is None or len(open_group) == most:
            open_group = []
            groups.append(open_group)
        open_group.append(trial)
    return [tuple(group) for group in groups]


def _can_share(trial: Trial) -> bool:
    fault = load_fault(trial.fault)
    # What goes on for a while, or needs a key of the job, would meet the others, too.
    return not fault.expectation.overrides and not find_reason_against_mixing(fault, 0.0)


def count_steps_of_part(shape: DrillShape) -> int:
    """The steps of a shared run that belong to one trial: those of a run of its own, and as many
    more as end at a save."""
    save_interval = shape.save_every_steps
    return math.ceil(shape.num_steps / save_interval) * save_interval


def list_keys_of_shared_run(shape: DrillShape, num_trials: int) -> tuple[str, ...]:
    """What a run of so many trials sets in the job."""
    return (
        f"train.steps={num_trials * count_steps_of_part(shape)}",
        *list_restart_budget_keys(num_trials),
    )


def move_trials(trials: Sequence[Trial], shape: DrillShape) -> list[Trial]:
    """The trials at their places in one run: the first in the first part of it, and so on."""
    moved = []
    for number, trial in enumerate(trials):
        step = trial.place.step + number * count_steps_of_part(shape)
        place = replace(trial.place, step=step)
        inject = write_inject_texts(trial.fault, place, shape)
        moved.append(replace(trial, place=place, inject=inject))
    return moved


def run_shared_trials(
    runner: TrialRunner, trials: Sequence[Trial], undisturbed: UndisturbedRun
) -> list[FinishedTrial]:
    """Run trials in one run. `undisturbed`: of the same keys (`list_keys_of_shared_run`).

    Those that did not come to strike, as the run ended before, or a save was put off while another
    was being written, are not among what is returned.
    """
    moved = move_trials(trials, runner.shape)
    first = trials[0]
    name = f"shared-{first.fault}-{first.seed}-{first.repeat}"
    overrides = (
        *list_keys_of_shared_run(runner.shape, len(trials)),
        format_inject([text for trial in moved for text in trial.inject]),
    )
    # The undisturbed run has as many parts: the limit follows from all of them.
    record, end = runner.train(name, overrides, runner.find_limit_s(undisturbed))
    planned = [PlannedStrike(each.fault, each.place, each.inject) for each in moved]
    answered = measure_strikes(record, planned, runner.shape, undisturbed.step_p99_s)
    is_bit_equal = compare_final_checkpoints(undisturbed.run_dir, record.run_dir)
    goodput = read_goodput_of_run(record.run_dir)
    early = tuple(each.kind for each in find_early_verdicts(record))
    finished = []
    for number, (trial, answer) in enumerate(zip(moved, answered, strict=True)):
        if not answer.measured.has_struck:
            continue
        before = early if number == 0 else ()
        part = _list_steps_of_part(runner.shape, number)
        measured = _measure_in_shared_run(
            answer, end, before, is_bit_equal=is_bit_equal, goodput=goodput
        )
        num_restarts = sum(step in part for step in record.restarts)
        measured = replace(measured, num_restarts=num_restarts)
        finished.append(_build_finished_trial(trial, measured, answer, record, undisturbed, part))
    return finished


def _measure_in_shared_run(
    answer: AnsweredStrike,
    end: CommandEnd,
    early: tuple[str, ...],
    *,
    is_bit_equal: bool | None,
    goodput: float | None,
) -> Measured:
    measured = answer.measured
    return Measured(
        has_struck=measured.has_struck,
        verdict=measured.verdict,
        verdict_text=measured.verdict_text,
        ranks=measured.ranks,
        detected_s=measured.detected_s,
        detected_steps=measured.detected_steps,
        false_verdicts=(*early, *measured.false_verdicts),
        trained_again_s=measured.trained_again_s,
        lost_steps=measured.lost_steps,
        num_starved=measured.num_starved,
        is_bit_equal=is_bit_equal,
        exit_codes=(end.code,),
        is_overdue=end.is_overdue,
        num_left=end.num_left,
        goodput=goodput,
        wall_s=round(end.wall_s, 4),
        load=end.load,
    )


def _list_steps_of_part(shape: DrillShape, number: int) -> range:
    length = count_steps_of_part(shape)
    return range(number * length + 1, (number + 1) * length + 1)


def _build_finished_trial(
    trial: Trial,
    measured: Measured,
    answer: AnsweredStrike,
    record: RunRecord,
    undisturbed: UndisturbedRun,
    part: range,
) -> FinishedTrial:
    return FinishedTrial(
        trial,
        measured,
        answer.bars,
        {step: loss for step, loss in record.losses.items() if step in part},
        {step: loss for step, loss in undisturbed.record.losses.items() if step in part},
        tuple(strike for strike in record.strikes if strike.step in part),
        tuple(each for each in find_verdicts(record.envelopes) if each.step in part),
        tuple(step for step in record.restarts if step in part),
    )
