"""The last lines of a finished run, from its own events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from phalanx.checkpoint.best import read_best_step
from phalanx.checkpoint.folder import resolve_place_in_run
from phalanx.core.files import read_json
from phalanx.core.printable import printable
from phalanx.core.registry import is_foreign
from phalanx.core.units import (
    describe_predicted_bytes_error,
    format_bytes,
    format_seconds,
    plural,
)
from phalanx.job.hugging_face import is_hugging_face
from phalanx.observe.events import (
    BaselineMeasured,
    CheckpointSaved,
    Envelope,
    EvalFinished,
    Event,
    MemoryMeasured,
    PipelineMeasured,
    RankFailed,
    RestartScheduled,
    RunStarted,
    StepFinished,
    TextGenerated,
)
from phalanx.observe.invariant_words import describe_failed_check
from phalanx.observe.tail import EventTail, read_recorded_events
from phalanx.observe.units import MetricUnits
from phalanx.observe.words import (
    describe_failure_moment,
    find_exception_line_of_traceback,
    name_what_failed,
)
from phalanx.plan.pipeline.bubble import MAX_BUBBLE_WITHOUT_WARNING
from phalanx.plan.timing.step_time import StepTime
from phalanx.report.bottleneck.cause import BottleneckVerdict
from phalanx.report.bottleneck.describe import describe_basis, describe_bottleneck
from phalanx.report.bubble import MeasuredPipeline
from phalanx.report.facts import (
    NOUN_OF_BYTES_SENT_OVER_AXIS,
    RunFacts,
    describe_sent_bytes,
    describe_skipped_steps,
)
from phalanx.report.formats import dict_or_empty, is_same_layout
from phalanx.report.invariant_facts import InvariantFacts

Kind = TypeVar("Kind", bound=Event)


def list_end_of_run_lines(facts: RunFacts) -> list[str]:
    """Held-out loss beside its baselines, memory predicted | measured, a sample, the last
    checkpoint and the best; and what the owner of the run whose `facts` were collected may regret:
    steps that were not applied, what drifts."""
    run_dir = facts.run_dir
    envelopes = EventTail(run_dir).read_new_events()
    events = [envelope.event for envelope in envelopes]
    evaluation = _find_last_event(events, EvalFinished)
    baselines = {event.name: event for event in _select_events_of(events, BaselineMeasured)}
    sample = _find_last_event(events, TextGenerated)
    saved = _find_last_event(events, CheckpointSaved)
    lines: list[str] = []
    why = describe_skipped_steps(facts.steps.step, facts.skipped)
    if why is not None:
        lines.append(f"warning {why}")
    lines += [f"warning {drift.describe()}" for drift in facts.drifts]
    if evaluation is not None:
        lines += _list_evaluation_lines(evaluation, baselines, facts.units)
    lines += _list_sent_bytes_lines(events)
    lines += _list_pipeline_lines(events, run_dir)
    lines += _list_time_lines(envelopes, run_dir)
    lines += _list_bottleneck_lines(facts.bottleneck)
    lines += _list_memory_lines(facts)
    lines += _list_invariant_lines(facts.invariants)
    if sample is not None:
        # Tabs first, of which `printable` would make one blank each.
        text = (sample.prompt + sample.text).expandtabs(4).strip("\n").split("\n")
        lines.append("sample  " + "\n        ".join(printable(line) for line in text))
    if saved is not None:
        lines.append(
            f"saved   {resolve_place_in_run(run_dir, saved.path)} ({format_bytes(saved.num_bytes)})"
        )
    best = read_best_step(run_dir)
    if best is not None:
        location = resolve_place_in_run(run_dir, best.checkpoint)
        lines.append(
            f"best    {location} ({printable(best.metric)} {best.value:.4f} at step {best.step})"
        )
    return lines


def _select_events_of(events: list[Event], kind: type[Kind]) -> list[Kind]:
    return [event for event in events if isinstance(event, kind)]


def _find_last_event(events: list[Event], kind: type[Kind]) -> Kind | None:
    for event in reversed(events):
        if isinstance(event, kind):
            return event
    return None


def _list_evaluation_lines(
    evaluation: EvalFinished, baselines: dict[str, BaselineMeasured], units: MetricUnits
) -> list[str]:
    """The held-out loss beside its baselines, by source and by metric, and the best one."""
    parts = [f"model {evaluation.loss:.3f}"]
    parts += [f"{name} {baseline.loss:.3f}" for name, baseline in baselines.items()]
    title = "held out"
    if units.loss:
        title = f"held out, {units.format_loss_with_unit}"
    num_targets = f"({evaluation.num_targets:,} {units.items})"
    lines = [f"loss    {title}: {'  '.join(parts)}   {num_targets}"]
    lines += _list_source_loss_lines(evaluation) + _list_metric_lines(evaluation)
    trigram = next((event for name, event in baselines.items() if "trigram" in name), None)
    if trigram is not None:
        ahead = trigram.loss - evaluation.loss
        verdict = "worse"
        if ahead > 0:
            verdict = "better"
        lines.append(f"        the model is {abs(ahead):.3f} nats {verdict} than the trigram")
    if 0 < evaluation.best_step != evaluation.step:
        best = f"{evaluation.best:.3f}"
        if evaluation.judged_by != "loss":
            best = f"{printable(evaluation.judged_by)} {best}"
        lines.append(f"        the best was {best}, at step {evaluation.best_step}")
    return lines


def list_restart_lines(run_dir: Path, num_restarts: int) -> list[str]:
    """A line that says how often this command restarted its ranks, and each cause once."""
    if not num_restarts:
        return []
    causes: list[str] = []
    last = ""
    for envelope in read_recorded_events(run_dir, RankFailed, RestartScheduled, rank=-1):
        event = envelope.event
        if isinstance(event, RankFailed):
            last = (
                f"{name_what_failed(event)} {_name_step(event)}:"
                f" {printable(find_exception_line_of_traceback(event.detail), 300)}"
            )
        elif isinstance(event, RestartScheduled):
            # What failed last before a restart is its cause.
            causes.append(last)
    # A continued run has the restarts of earlier commands before those of this one.
    causes = causes[-num_restarts:]
    if not causes:
        return []
    times = "once" if len(causes) == 1 else f"{len(causes)} times"
    return [f"again   the ranks were started again {times}, after {_join_causes(causes)}"]


def _name_step(event: RankFailed) -> str:
    return f"at step {event.step}" if event.step >= 1 else describe_failure_moment(event)


def _join_causes(causes: list[str]) -> str:
    """Each cause once, in order, with how often it came if that is more than once."""
    parts = []
    for cause, count in Counter(causes).items():
        if count > 1:
            cause = f"{cause} ({count} times)"
        parts.append(cause)
    return "; ".join(parts)


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        facts = read_json(path)
    except (OSError, ValueError):
        return {}
    return dict_or_empty(facts)


def _list_source_loss_lines(evaluation: EvalFinished) -> list[str]:
    """One line for each source of a mixture, the losses below each other."""
    losses = evaluation.loss_by_source
    width = max(map(len, losses), default=0)
    return [f"        {printable(name):<{width}}  {loss:.3f}" for name, loss in losses.items()]


def _list_metric_lines(evaluation: EvalFinished) -> list[str]:
    """One line for each metric of the user's objective, below each other."""
    metrics = evaluation.metrics
    width = max(map(len, metrics), default=0)
    return [f"        {printable(name):<{width}}  {value:.4f}" for name, value in metrics.items()]


def _list_sent_bytes_lines(events: list[Event]) -> list[str]:
    """A line about the bytes a rank sends in a step: gradients if they are compressed, and what
    goes over tp, cp, ep and pp. Empty if there is nothing to say."""
    last, start = _find_last_event(events, StepFinished), _find_last_event(events, RunStarted)
    if last is None or start is None:
        return []
    # plain_bytes of 0: nobody counted.
    is_usual = last.sent_bytes == start.plain_bytes or not start.plain_bytes
    amounts = {
        "gradients": "" if is_usual else describe_sent_bytes(last.sent_bytes, start.plain_bytes),
    }
    for axis, sent_bytes in last.sent_by_axis.items():
        amounts[f"{NOUN_OF_BYTES_SENT_OVER_AXIS[axis]} over {axis}"] = describe_sent_bytes(
            sent_bytes, 0
        )
    parts = [f"{noun} {text}" for noun, text in amounts.items() if text]
    if parts:
        return [f"wire    {'; '.join(parts)}"]
    return []


def _list_pipeline_lines(events: list[Event], run_dir: Path) -> list[str]:
    """Lines about how long the ranks of a pipeline wait for each other, measured and predicted,
    and what to do if that is too long."""
    last = _find_last_event(events, PipelineMeasured)
    measured = MeasuredPipeline.from_event(last, _read_json_object(run_dir / "plan.json"), run_dir)
    if last is None or measured is None:
        return []
    line = f"bubble  {measured.describe_wait()}, at step {last.step}"
    if measured.has_long_bubble:
        line += f": more than {100 * MAX_BUBBLE_WITHOUT_WARNING:.0f} %"
    return [line, *[f"        {remedy}" for remedy in measured.suggest_remedies()]]


def _list_time_lines(envelopes: list[Envelope], run_dir: Path) -> list[str]:
    """A line about the time of a step, predicted and measured; none where it was not predicted."""
    plan = _read_json_object(run_dir / "plan.json")
    body = dict_or_empty(plan.get("step_time"))
    step_seconds = _list_step_seconds(envelopes, dict_or_empty(plan.get("layout")))
    try:
        predicted = StepTime.from_json(body)
        predicted_s = predicted.total_s
    except (KeyError, TypeError, ValueError):
        return []  # a plan of before, or one that cannot be read
    if not step_seconds or not predicted_s > 0:
        return []
    measured_s = median(step_seconds)
    error = (
        f"{100 * abs(predicted_s / measured_s - 1):.0f} % too"
        f" {_name_error_direction(predicted_s, measured_s)}"
    )
    inside = "inside"
    if not predicted.low_s <= measured_s <= predicted.high_s:
        inside = "outside"
    interval = f"{format_seconds(predicted.low_s)} to {format_seconds(predicted.high_s)}"
    return [
        f"time    a step: {format_seconds(predicted_s)} predicted, {format_seconds(measured_s)}"
        f" measured (median of {plural(len(step_seconds), 'step')}; the plan was {error}; {inside}"
        f" its 80 % interval, {interval})"
    ]


def _name_error_direction(predicted_s: float, measured_s: float) -> str:
    if predicted_s > measured_s:
        return "high"
    return "low"


WARM_UP_STEPS = 3  # of an attempt: allocations, compilation, first reads


def _list_step_seconds(envelopes: list[Envelope], layout: dict[str, Any]) -> list[float]:
    """The seconds of each step, without the first ones, of the newest attempt with enough of them;
    none where there is none, or it had another layout than the plan's."""
    step_s_of: dict[int, list[float]] = {}
    layout_of: dict[int, dict[str, int]] = {}
    for envelope in envelopes:
        if isinstance(envelope.event, StepFinished):
            step_s_of.setdefault(envelope.attempt, []).append(envelope.event.step_s)
        elif isinstance(envelope.event, RunStarted):
            layout_of[envelope.attempt] = envelope.event.layout
    enough = [number for number, steps in step_s_of.items() if len(steps) >= 2 * WARM_UP_STEPS]
    if not enough:
        return []
    if not is_same_layout(layout_of.get(max(enough), layout), layout):
        return []
    return step_s_of[max(enough)][WARM_UP_STEPS:]


def _list_bottleneck_lines(verdict: BottleneckVerdict | None) -> list[str]:
    """Lines on what bounds the steps, and what to do about it, or that the evidence does not
    suffice; none where no step was recorded."""
    if verdict is None:
        return []
    lines = [f"bounds  {describe_bottleneck(verdict)}"]
    if not verdict.is_of_last_attempt:
        lines.append(f"        looked at: {describe_basis(verdict)}")
    if verdict.main is not None and (verdict.main.kind != "compute" or verdict.main.gains):
        lines += [f"        {text}" for text in (*verdict.main.evidence, verdict.main.action)]
    return lines


def _list_memory_lines(facts: RunFacts) -> list[str]:
    """A line about the rank with the highest peak, predicted and measured."""
    # A run that went on with fewer ranks has events of ranks that are gone.
    ranks = [
        rank for rank in sorted(facts.memory) if facts.world_size is None or rank < facts.world_size
    ]
    if not ranks:
        return []
    rank = max(ranks, key=lambda each: _peak_bytes(facts.memory[each]))
    memory = facts.memory[rank]
    predicted, measured = memory.predicted_bytes.get("peak", 0), _peak_bytes(memory)
    if not predicted or not measured:
        return []
    error = f"the plan was {describe_predicted_bytes_error(predicted, measured)}"
    if not memory.predicts_activations:
        error = "activations not predicted"
    elif measured > predicted and not memory.is_of_training:
        error = f"the plan has steps of training alone, and no phase {memory.peak_phase}"
    if _trains_own_module(facts.run_dir):
        error += "; what your modules import is counted"
    return [
        f"memory  peak of rank {rank}: {format_bytes(predicted)} predicted,"
        f" {format_bytes(measured)} measured{_describe_peak_moment(memory)} ({error}), on top of"
        f" {format_bytes(memory.runtime_bytes)} for interpreter and torch"
    ]


def _trains_own_module(run_dir: Path) -> bool:
    """True if the user's own code builds the model: it is imported when training has begun."""
    kind = dict_or_empty(_read_json_object(run_dir / "job.json").get("model")).get("kind")
    return isinstance(kind, str) and is_foreign(kind) and not is_hugging_face(kind)


def _list_invariant_lines(facts: Sequence[InvariantFacts]) -> list[str]:
    """A line about the invariants of the run that held, and one for each that did not."""
    names_held = [each.name.replace("_", " ") for each in facts if each.has_held]
    lines = []
    if names_held:
        lines.append(f"checks  held: {', '.join(map(printable, names_held))}")
    for each in facts:
        if each.failures:
            lines.append(f"warning check failed: {describe_failed_check(each.failures[0])}")
    return lines


def _peak_bytes(memory: MemoryMeasured) -> float:
    return memory.measured_bytes.get("peak", 0)


def _describe_peak_moment(memory: MemoryMeasured) -> str:
    if not memory.peak_phase:
        return ""
    return f" in {memory.moment_in_words}"
