"""What happened along the way, under the loss and on its axis: faults, restarts, skips, saves."""

from __future__ import annotations

import math

from phalanx.observe import events
from phalanx.observe.events import Envelope
from phalanx.observe.words import describe_event
from phalanx.report.facts import RunFacts
from phalanx.report.formats import number_or_nan
from phalanx.report.lanes import Lane, LaneMark, draw_lanes
from phalanx.report.markup import Html
from phalanx.report.scales import choose_scale
from phalanx.report.sections.curves import find_step_range
from phalanx.report.sections.raw import draw_raw_link

# By lane: the events, the sign, and how bad they are.
_SIGNS: tuple[tuple[str, type[events.Event], str, str], ...] = (
    ("faults", events.RankFailed, "✕", "bad"),
    ("faults", events.CheckpointFailed, "!", "bad"),
    ("faults", events.CheckpointUnusable, "!", "bad"),
    ("faults", events.LoaderWorkerReplaced, "!", "warn"),
    ("faults", events.RankSlow, "~", "warn"),
    ("faults", events.StoreLost, "!", "warn"),
    ("faults", events.InvariantChecked, "≠", "bad"),
    ("starts", events.RestartScheduled, "↻", "warn"),
    ("starts", events.LayoutChanged, "↔", "warn"),
    ("starts", events.RolledBack, "↶", "warn"),
    ("starts", events.Note, "▶", "calm"),
    ("starts", events.StopRequested, "■", "calm"),
    ("skips", events.StepSkipped, "✕", "warn"),
    ("saves", events.CheckpointSaved, "●", "calm"),
    ("evals", events.EvalFinished, "◆", "calm"),
)


def draw_happenings(facts: RunFacts) -> Html | None:
    """The lanes; None where nothing happened, or no step was done."""
    steps = find_step_range(facts)
    if steps is None:
        return None
    marks: dict[str, list[LaneMark]] = {name: [] for name, _, _, _ in _SIGNS}
    for envelope in facts.story:
        for name, kind, sign, css_class in _SIGNS:
            if isinstance(envelope.event, kind) and _is_of_lane(envelope.event):
                mark = _build_mark(envelope, sign, css_class, facts)
                if mark is not None:
                    marks[name].append(mark)
    # As the loss chart above chooses it: ends exactly at the steps.
    scale = choose_scale(list(steps), snug=True)
    return draw_lanes(
        "What happened, at which step",
        [Lane(name, of_lane) for name, of_lane in marks.items()],
        scale,
    )


def _is_of_lane(event: events.Event) -> bool:
    """False for notes other than that of a resume, and checks that hold."""
    if isinstance(event, events.Note):
        return event.code == events.RESUMED
    return not isinstance(event, events.InvariantChecked) or not event.ok


def _build_mark(envelope: Envelope, sign: str, css_class: str, facts: RunFacts) -> LaneMark | None:
    step = _find_step(envelope.event)
    if not math.isfinite(step):
        return None
    text = describe_event(envelope, facts.units) or envelope.event.kind().replace("_", " ")
    if isinstance(envelope.event, events.Note):
        text = f"resumed at step {step:,.0f}"
    return LaneMark(step, sign, text, css_class, draw_raw_link(facts, envelope))


def _find_step(event: events.Event) -> float:
    if isinstance(event, events.RestartScheduled):
        return float(max(event.from_step, event.held_step))
    if isinstance(event, events.Note):
        return number_or_nan(event.facts.get("step"))
    return float(getattr(event, "step", math.nan))
