"""Events as lines of text for people: one line each, safe for any terminal."""

from __future__ import annotations

import math

from phalanx.core.printable import printable
from phalanx.core.units import format_bytes, format_count, format_seconds, plural
from phalanx.observe import events
from phalanx.observe.events import Envelope, EvalFinished
from phalanx.observe.units import TEXT, Units

MAX_LINE, MAX_SAMPLE = 2000, 100  # a warning is of no use without its end, where it says what to do


def _squeeze(text: str, limit: int) -> str:
    return printable(" ".join(text[: 4 * limit].split()), limit)


def describe_event(envelope: Envelope, units: Units = TEXT) -> str | None:
    """The line for an event that a person wants to know of, or None for the others."""
    line = _words(envelope.event, units)
    return None if line is None else _squeeze(line, MAX_LINE)


def _words(event: events.Event, units: Units) -> str | None:
    match event:
        case events.RunStarted():
            layout = (
                " x ".join(
                    f"{axis}={degree}" for axis, degree in event.layout.items() if degree > 1
                )
                or "one rank"
            )
            start = (
                f", continues at step {event.step} from {event.restored_from}"
                if event.restored_from
                else ""
            )
            took = format_seconds(event.startup_s)
            return (
                f"{event.run}: {plural(event.world_size, 'rank')} on {event.device}, {layout},"
                f" started in {took}{start}"
            )
        case events.WeightsTaken():
            came = f", imported from {event.imported_from}" if event.imported_from else ""
            cast = f", {event.num_cast} of them rounded" if event.num_cast else ""
            return f"starts from {event.num_tensors} tensors of {event.checkpoint}{came}{cast}"
        case events.StepSkipped():
            return (
                f"skipped step {event.step}: {event.reason.replace('_', ' ')}"
                f" ({_norm(event.grad_norm)})"
            )
        case events.EvalFinished():
            return _evaluation(event, units)
        case events.BaselineMeasured():
            return f"baseline {event.name}: {event.loss:.4f} {units.loss}".rstrip()
        case events.CheckpointSaved():
            return _describe_saved(event)
        case events.CheckpointPostponed():
            since = format_seconds(event.since_s)
            waits_for = f"that of step {event.saving_step} is still being written after {since}"
            return f"checkpoint after step {event.step} waits: {waits_for}"
        case events.CheckpointIntervalChosen():
            interval, stall, took = map(
                format_seconds, (event.interval_s, event.stall_s, event.save_s)
            )
            why = (
                f"a save stops training for {stall} and takes {took}; a failure each"
                f" {format_seconds(event.mtbf_s)}"
            )
            return f"a checkpoint each {interval}: {why}"
        case events.CheckpointsRemoved():
            names = ", ".join(f"step-{step}" for step in event.steps)
            return f"removed old checkpoint{'s' if len(event.steps) > 1 else ''} {names}"
        case events.CheckpointFailed():
            return _describe_failed(event)
        case events.CheckpointUnusable():
            return f"step-{event.step} cannot be used, going back to the one before: {event.reason}"
        case events.TextGenerated():
            return f"sample at step {event.step}: {_squeeze(event.prompt + event.text, MAX_SAMPLE)}"
        case events.PipelineMeasured():
            return _pipeline(event)
        case events.StopRequested():
            return f"stopping after step {event.step}: {event.reason}"
        case events.RankFailed():
            where = f" at step {event.step}" + (f" in {event.phase}" if event.phase else "")
            detected = f", seen after {format_seconds(event.detected_s)}"
            return (
                f"rank {event.failed_rank} failed{where}: {event.cause},"
                f" {exception_line(event.detail)}{detected}"
            )
        case events.RestartScheduled():
            return f"restart {event.restart} of at most {event.budget}, from step {event.from_step}"
        case events.RunFinished():
            code = f", exit code {event.exit_code}" if event.exit_code else ""
            return f"{event.status} at step {event.step} after {format_seconds(event.wall_s)}{code}"
        case events.LoaderWorkerReplaced():
            return f"a loader worker was replaced at step {event.step}: {event.reason}"
        case events.SinkDropped():
            lost = f"lost {plural(event.num_dropped, 'event')}" if event.num_dropped else "dropped"
            return (
                f"{lost}: {event.reason}"
                if event.sink == "events"
                else f"sink {event.sink} {lost}: {event.reason}"
            )
        case events.Note():
            # A note is for machines and the report, unless it says why something is not as one
            # would expect.
            return (
                f"{event.code.replace('_', ' ')}: {event.facts['why']}"
                if "why" in event.facts
                else None
            )
    return None


def _describe_saved(event: events.CheckpointSaved) -> str:
    size, took = format_bytes(event.num_bytes), format_seconds(event.wall_s)
    new = (
        f", {format_bytes(event.num_new_bytes)} of it new"
        if 0 <= event.num_new_bytes < event.num_bytes
        else ""
    )
    stall = (
        f", training stood still for {format_seconds(event.stall_s)}"
        if 0 < event.stall_s < event.wall_s / 2
        else ""
    )
    return f"saved checkpoint of step {event.step}: {event.path} ({size}{new}, {took}{stall})"


def _describe_failed(event: events.CheckpointFailed) -> str:
    where = "" if event.path in event.reason else f" ({event.path})"
    consequence = _describe_consequence(event)
    return f"checkpoint of step {event.step} failed: {event.reason}{where}{consequence}"


def describe_repeated_failure(event: events.CheckpointFailed) -> str:
    """The line for a save that failed as the one before did."""
    return (
        f"checkpoint of step {event.step} failed for the same reason{_describe_consequence(event)}"
    )


def _describe_consequence(event: events.CheckpointFailed) -> str:
    return "; training goes on, and tries again later" if event.training_goes_on else ""


def _pipeline(event: events.PipelineMeasured) -> str:
    predicted, planned = (100 * share for share in (event.bubble_predicted, event.bubble_planned))
    sentence = (
        f"{event.schedule}: ranks wait {100 * event.bubble_measured:.1f} % of step {event.step} for"
        " other stages"
    )
    expected = [f"predicted {predicted:.1f} %"] if math.isfinite(predicted) else []
    expected += [f"planned {planned:.1f} %"] if math.isfinite(planned) else []
    return sentence + (f" ({', '.join(expected)})" if expected else "")


def _evaluation(event: EvalFinished, units: Units) -> str:
    best = ""
    if event.best_step == event.step:
        best = ", the best so far"
    elif event.best_step > 0:
        best = f", best {event.best:.4f} at step {event.best_step}"
    if best and event.judged_by != "loss":
        best += f" by {_squeeze(event.judged_by, 60)}"
    sources = [f"{_squeeze(name, 60)} {loss:.4f}" for name, loss in event.loss_by_source.items()]
    each = f": {', '.join(sources)}" if sources else ""
    loss = f"held-out loss {event.loss:.4f} {units.loss}".rstrip()
    size, took = (
        f"{format_count(event.num_targets).replace(' ', '')} {units.items}",
        format_seconds(event.wall_s),
    )
    also = "".join(f", {_squeeze(name, 60)} {value:.4f}" for name, value in event.metrics.items())
    return f"{loss}{also} at step {event.step}{best} ({size}, {took}){each}"


def _norm(grad_norm: float) -> str:
    return (
        f"gradient norm {grad_norm:.3g}" if math.isfinite(grad_norm) else "gradient norm not finite"
    )


def exception_line(text: str) -> str:
    """The line of a traceback that names the exception."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no detail"
