"""The wall clock of a run, charged to what it was spent on."""

from __future__ import annotations

import math
from collections.abc import Iterable

from phalanx.observe import events
from phalanx.observe.events import Envelope
from phalanx.report.facts import StepColumns, WallTimeBreakdown
from phalanx.report.formats import finite_or_zero
from phalanx.report.history import StepHistory
from phalanx.report.ledger import RankLedger
from phalanx.report.story import select_story_events
from phalanx.report.timeline import RunTimeline

# Of a rank's ledger: what lies beside its steps, and is in no event of a step.
_PARTS_OF_THE_REST = ("restart", "failure", "other phases", "ending")


def charge_wall_time(
    timeline: RunTimeline,
    story: list[Envelope],
    steps: StepColumns,
    history: StepHistory,
    skipped: list[events.StepSkipped],
    lead: RankLedger | None,
) -> WallTimeBreakdown:
    """Charge the wall clock: steps that stand, what they waited for, steps that were not applied,
    steps that were undone, starting (if that is known), the rest. `lead`: the ledger of the rank
    whose steps these are, which knows of what lies between attempts and after the last step."""
    starts = select_story_events(story, events.RunStarted)
    wall_s = timeline.alive_s
    data_s = _sum_positive(steps.groups_s["data"])
    checkpoint_s = _sum_positive(steps.groups_s["checkpoint"])
    in_steps_s = _sum_positive(steps.groups_s["evaluate"])
    stages_s = _sum_positive(steps.groups_s["pipeline"])
    between_steps_s = _sum_finite(
        event.wall_s for event in select_story_events(story, events.EvalFinished)
    )
    # A save between two steps is charged to the next one's phases but not to its seconds:
    # unaccounted is then negative. No more than the save: what another phase has in the next step,
    # as the record of a step, is in the seconds of that one.
    between_s = _sum_positive(
        min(-finite_or_zero(spare_s), save_s)
        for spare_s, save_s in zip(
            steps.groups_s["unaccounted"], steps.groups_s["checkpoint"], strict=True
        )
    )
    step_s = _sum_finite(steps.step_s) + between_s
    # What a step's own phases have is taken out of it: no second is charged twice.
    parts = {
        "training steps": max(step_s - data_s - checkpoint_s - in_steps_s - stages_s, 0.0),
        "waiting for data": data_s,
    }
    if stages_s:
        parts["waiting for other stages"] = stages_s
    for name, lost_s in _sum_seconds_of_skipped_steps(steps, skipped).items():
        taken_s = min(lost_s, parts.get(name, 0.0))
        if taken_s:
            parts[name] -= taken_s
            parts["skipped steps"] = parts.get("skipped steps", 0.0) + taken_s
    parts |= {
        "checkpoints": checkpoint_s,
        "evaluation": in_steps_s + between_steps_s,
        "steps done again": history.rolled_back_s,
    }
    if _knows_starts(story, history):
        parts["starting"] = _sum_finite(start.startup_s for start in starts)
    # Never less than its parts, so that what is left for "everything else" is not negative.
    wall_s = max(wall_s, sum(parts.values()))
    rest_s = wall_s - sum(parts.values())
    for name in _PARTS_OF_THE_REST:
        part_s = min(lead.parts_s[name] if lead is not None else 0.0, rest_s)
        if part_s > 0:
            parts[name], rest_s = part_s, rest_s - part_s
    parts["everything else"] = rest_s
    return WallTimeBreakdown(wall_s, parts)


def find_wall_seconds(
    story: list[Envelope], timeline: RunTimeline, ledger: WallTimeBreakdown
) -> float:
    """The duration that the only command of a run reported at its end; else the span of the events
    of all commands, of which one that was killed reported nothing."""
    end = story[-1].event if story else None
    is_one_command = timeline.num_commands == 1
    if is_one_command and isinstance(end, events.RunFinished) and math.isfinite(end.wall_s):
        return end.wall_s
    if ledger.wall_s > 0:
        return ledger.wall_s
    return math.nan


def _knows_starts(story: list[Envelope], history: StepHistory) -> bool:
    """False where an attempt has steps, and nobody said how long it took to start: rank 0 does,
    whose file may be lost."""
    started = {each.attempt for each in story if isinstance(each.event, events.RunStarted)}
    return history.first_step.keys() <= started


def _sum_seconds_of_skipped_steps(
    steps: StepColumns, skipped: list[events.StepSkipped]
) -> dict[str, float]:
    """Seconds of the steps that were not applied, by the part they would be charged to."""
    numbers = {int(event.step) for event in skipped}
    training_s = stages_s = 0.0
    for row, step in enumerate(steps.step):
        if step in numbers:
            in_groups_s = {
                name: max(steps.groups_s[name][row], 0.0)
                for name in ("data", "checkpoint", "evaluate", "pipeline")
            }
            stages_s += in_groups_s["pipeline"]
            step_s = finite_or_zero(steps.step_s[row])
            training_s += max(step_s - sum(in_groups_s.values()), 0.0)
    return {"training steps": training_s, "waiting for other stages": stages_s}


def _sum_positive(seconds: Iterable[float]) -> float:
    return sum(max(value, 0.0) for value in seconds)


def _sum_finite(seconds: Iterable[float]) -> float:
    return sum(finite_or_zero(value) for value in seconds)
