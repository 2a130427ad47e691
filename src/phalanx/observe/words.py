"""Events as lines of text for people: one line each, safe for any terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.core.printable import printable
from phalanx.core.stop_signals import MORE_RANKS_REASON
from phalanx.core.units import format_bytes, format_count, format_seconds, plural
from phalanx.observe import events
from phalanx.observe.events import Envelope, EvalFinished
from phalanx.observe.failure_rate import MIN_FAILURES_OF_A_RATE, describe_failure_rate
from phalanx.observe.invariant_words import describe_failed_check
from phalanx.observe.units import TEXT_METRIC_UNITS, MetricUnits

MAX_LINE, MAX_SAMPLE = 2000, 100  # a warning is of no use without its end, where it says what to do
# Of the time that ranks want to run: below it all of them stand still, whoever gets less.
_HARDLY_RUNNING_SHARE = 0.02


def _collapse_white_space_and_shorten(text: str, limit: int) -> str:
    # Cut before it is split: of a text of megabytes only one line is wanted.
    return printable(" ".join(text[: 4 * limit].split()), limit)


def describe_event(envelope: Envelope, units: MetricUnits = TEXT_METRIC_UNITS) -> str | None:
    """The line for an event that a person wants to know of, or None for the others."""
    event = envelope.event
    if isinstance(event, events.RunStarted):
        line: str | None = _describe_start(event, is_first=envelope.attempt == 0)
    else:
        line = _describe_event_body(event, units)
    if line is None:
        return None
    return _collapse_white_space_and_shorten(line, MAX_LINE)


def _describe_event_body(event: events.Event, units: MetricUnits) -> str | None:
    """The whole line for an event, of any length; None for one that no person needs."""
    # These have numbers in units of the job's metrics.
    if isinstance(event, events.EvalFinished):
        return _describe_evaluation(event, units)
    if isinstance(event, events.BaselineMeasured):
        return f"baseline {event.name}: {event.loss:.4f} {units.loss}".rstrip()
    describe = _DESCRIBERS.get(type(event))
    if describe is None:
        return None
    return describe(event)


def _describe_taken_weights(event: events.WeightsTaken) -> str:
    line = f"starts from {event.num_tensors} tensors of {event.checkpoint}"
    if event.imported_from:
        line += f", imported from {event.imported_from}"
    if event.num_cast:
        line += f", {event.num_cast} of them rounded"
    return line


def _describe_skipped_step(event: events.StepSkipped) -> str:
    return (
        f"skipped step {event.step}: {event.reason.replace('_', ' ')}"
        f" ({_format_gradient_norm(event.grad_norm)})"
    )


def _describe_postponed_checkpoint(event: events.CheckpointPostponed) -> str:
    since = format_seconds(event.since_s)
    waits_for = f"that of step {event.saving_step} is still being written after {since}"
    return f"checkpoint after step {event.step} waits: {waits_for}"


def _describe_checkpoint_interval(event: events.CheckpointIntervalChosen) -> str:
    interval, stall, took = map(format_seconds, (event.interval_s, event.stall_s, event.save_s))
    why = (
        f"a save stops training for {stall} and takes {took}; a failure each"
        f" {format_seconds(event.mtbf_s)}, as the job says"
    )
    return f"a checkpoint each {interval}: {why}"


def _describe_removed_checkpoints(event: events.CheckpointsRemoved) -> str:
    noun = "checkpoints" if len(event.steps) > 1 else "checkpoint"
    return f"removed old {noun} {', '.join(f'step-{step}' for step in event.steps)}"


def _describe_unusable_checkpoint(event: events.CheckpointUnusable) -> str:
    return f"step-{event.step} cannot be used, going back to the one before: {event.reason}"


def _describe_sample(event: events.TextGenerated) -> str:
    text = _collapse_white_space_and_shorten(event.prompt + event.text, MAX_SAMPLE)
    return f"sample at step {event.step}: {text}"


def _describe_invariant(event: events.InvariantChecked) -> str | None:
    # A summary is for the report.
    if event.is_summary:
        return None
    return f"check failed: {describe_failed_check(event)}"


def _describe_stop_request(event: events.StopRequested) -> str:
    reason = event.reason
    if reason == MORE_RANKS_REASON:
        reason = "more ranks are started"
    return f"stopping after step {event.step}: {reason}"


def name_what_failed(event: events.RankFailed) -> str:
    """ "rank 1"; of a failure that is no known rank's, what else it is of."""
    if event.is_of_all_ranks:
        return "each rank"
    if event.failed_rank >= 0:
        return f"rank {event.failed_rank}"
    if event.cause == "lost_connection":
        return "the connection between ranks"
    return "a process beside the ranks"


def describe_failure_moment(event: events.RankFailed) -> str:
    """ "at step 7 in backward"; of a rank that had not come to a step, that."""
    if event.step >= 1:
        return f"at step {event.step}" + (f" in {event.phase}" if event.phase else "")
    whose = "its" if event.failed_rank >= 0 or event.is_of_all_ranks else "the"
    return (f"in {event.phase}, " if event.phase else "") + f"before {whose} first step"


def _describe_rank_failure(event: events.RankFailed) -> str:
    return (
        f"{name_what_failed(event)} failed {describe_failure_moment(event)}: {event.cause},"
        f" {find_exception_line_of_traceback(event.detail)}, seen after"
        f" {format_seconds(event.detected_s)}"
    )


def _describe_lost_store(event: events.StoreLost) -> str:
    text = f"the process of the rendezvous store ended at step {event.step}"
    if event.ranks_go_on:
        return f"{text} ({event.detail}): ranks go on until they need it"
    return f"{text} ({event.detail})"


def _describe_end_of_slowness(event: events.RankSlowEnded) -> str | None:
    if event.with_attempt:
        # Whether it would still be slow nobody knows.
        return None
    text = f"rank {event.slow_rank} is as fast as the others again at step {event.step}"
    text += f", slow since step {event.first_step}"
    if event.waited_s > 0:
        text += f"; they waited {format_seconds(event.waited_s)} for it"
    return text


def _describe_restart(event: events.RestartScheduled) -> str:
    in_memory = ""
    if event.held_step >= 0:
        in_memory = f"; step {event.held_step} is held in memory"
    pause = ""
    if event.pause_s > 0:
        pause = f"; in {format_seconds(event.pause_s)}, as an outage may be over then"
    counted = f"restart {event.restart} of at most {event.budget}"
    return f"{counted}, from step {event.from_step}{in_memory}{pause}"


def _describe_roll_back(event: events.RolledBack) -> str:
    whose = f"rank {event.failed_rank}: " if event.failed_rank >= 0 else ""
    read_on = ""
    if event.skip_to_sample >= 0:
        read_on = f", and reading on at sample {event.skip_to_sample:,}"
    return (
        f"step {event.step}: {whose}{event.why}; going back to a checkpoint not after step"
        f" {event.not_after_step}{read_on}"
    )


def _describe_changed_layout(event: events.LayoutChanged) -> str:
    return f"{event.text}: {event.why}"


def _describe_run_end(event: events.RunFinished) -> str:
    line = f"{describe_end(event)}, in {format_seconds(event.wall_s)}"
    if event.exit_code:
        line += f", exit code {event.exit_code}"
    return line


def _describe_replaced_loader_worker(event: events.LoaderWorkerReplaced) -> str:
    return f"a loader worker was replaced at step {event.step}: {event.reason}"


def _describe_note(event: events.Note) -> str | None:
    # A note is for machines and the report, unless it says why something is not as one
    # would expect.
    if "why" in event.facts:
        return f"{event.code.replace('_', ' ')}: {event.facts['why']}"
    return None


def describe_end(event: events.RunFinished) -> str:
    """ "finished at step 30", "failed after step 16"."""
    if event.status != "failed":
        return f"{event.status} at step {event.step:,}"
    if event.step < 1:
        return "failed before the first step was done"
    return f"failed after step {event.step:,}"


def _describe_start(event: events.RunStarted, *, is_first: bool) -> str:
    wide = [f"{axis}={degree}" for axis, degree in event.layout.items() if degree > 1]
    layout = " x ".join(wide) or "one rank"
    line = (
        f"{event.run}: {plural(event.world_size, 'rank')} on {event.device}, {layout}, started in"
        f" {format_seconds(event.startup_s)}"
    )
    if event.collectives:
        line += f", collectives through {event.collectives}"
    if event.restored_from:
        line += f", continues at step {event.step} from {event.restored_from}"
    elif not is_first:
        line += ", from the beginning"
    return line


def describe_lost_events(event: events.SinkDropped) -> str:
    """How many events a sink, or the event file of a process, did not get, and why."""
    lost = "dropped"
    if event.num_dropped:
        lost = f"lost {plural(event.num_dropped, 'event')}"
    if event.sink != "events":
        lost = f"sink {event.sink} {lost}"
    return f"{lost}: {event.reason}"


def _describe_saved_checkpoint(event: events.CheckpointSaved) -> str:
    facts = [format_bytes(event.num_bytes)]
    if 0 <= event.num_new_bytes < event.num_bytes:
        facts.append(f"{format_bytes(event.num_new_bytes)} of it new")
    facts.append(format_seconds(event.wall_s))
    # A stall of more than half of the time is that of a save that training waited for.
    if 0 < event.stall_s < event.wall_s / 2:
        facts.append(f"training stood still for {format_seconds(event.stall_s)}")
    return f"saved checkpoint of step {event.step}: {event.path} ({', '.join(facts)})"


def _describe_failed_checkpoint(event: events.CheckpointFailed) -> str:
    line = f"checkpoint of step {event.step} failed: {event.reason}"
    if event.path not in event.reason:
        line += f" ({event.path})"
    return line + _describe_consequence(event)


def describe_repeated_save_failure(event: events.CheckpointFailed) -> str:
    """The line for a save that failed as the one before did."""
    return (
        f"checkpoint of step {event.step} failed for the same reason{_describe_consequence(event)}"
    )


def _describe_consequence(event: events.CheckpointFailed) -> str:
    if not event.training_goes_on:
        return ""
    return "; training goes on, and tries again later"


def _describe_pipeline(event: events.PipelineMeasured) -> str:
    sentence = (
        f"{event.schedule}: ranks wait {100 * event.bubble_measured:.1f} % of step {event.step} for"
        " other stages"
    )
    expected = []
    if math.isfinite(event.bubble_predicted):
        expected.append(f"predicted {100 * event.bubble_predicted:.1f} %")
    if math.isfinite(event.bubble_planned):
        expected.append(f"planned {100 * event.bubble_planned:.1f} %")
    if not expected:
        return sentence
    return f"{sentence} ({', '.join(expected)})"


def _describe_evaluation(event: EvalFinished, units: MetricUnits) -> str:
    best = ""
    if event.best_step == event.step:
        best = ", the best so far"
    elif event.best_step > 0:
        best = f", best {event.best:.4f} at step {event.best_step}"
    if best and event.judged_by != "loss":
        best += f" by {_collapse_white_space_and_shorten(event.judged_by, 60)}"
    values = [f"held-out loss {event.loss:.4f} {units.loss}".rstrip()]
    values += _format_named_values(event.metrics)
    num_targets = format_count(event.num_targets).replace(" ", "")
    line = (
        f"{', '.join(values)} at step {event.step}{best} ({num_targets} {units.items},"
        f" {format_seconds(event.wall_s)})"
    )
    sources = _format_named_values(event.loss_by_source)
    if sources:
        line += f": {', '.join(sources)}"
    return line


def _format_named_values(values: Mapping[str, float]) -> list[str]:
    # Names are the user's: paths, patterns and keys of any length.
    return [
        f"{_collapse_white_space_and_shorten(name, 60)} {value:.4f}"
        for name, value in values.items()
    ]


def _format_gradient_norm(grad_norm: float) -> str:
    if not math.isfinite(grad_norm):
        return "gradient norm not finite"
    return f"gradient norm {grad_norm:.3g}"


def find_exception_line_of_traceback(text: str) -> str:
    """The line of a traceback that names the exception."""
    for line in reversed(text.splitlines()):
        if line.strip():
            return line
    return "no detail"


def _describe_reliability(event: events.ReliabilityMeasured) -> str:
    text = f"hour {event.hour + 1}: goodput {event.goodput:.1%}"
    if event.participation < 1:
        text += f", with {event.participation:.0%} of the ranks"
    if event.num_failures > 0 and math.isfinite(event.mean_between_failures_s):
        alive_s = event.num_failures * event.mean_between_failures_s
        text += f"; {describe_failure_rate(int(event.num_failures), alive_s)}"
    if event.num_failures >= MIN_FAILURES_OF_A_RATE and math.isfinite(event.best_save_every_s):
        best = format_seconds(event.best_save_every_s)
        text += f"; if failures go on like that, a save each {best} loses least"
    return text


def _describe_hang(event: events.HangFound) -> str:
    noun = "rank" if len(event.culprits) == 1 else "ranks"
    ranks = ", ".join(map(str, event.culprits))
    text = f"no progress for {format_seconds(event.detected_s)} at step {event.step}"
    if event.collective:
        text += f" before {event.collective}"
    return f"{text}: {event.hang_kind}, {noun} {ranks}"


def _describe_nonfinite(event: events.NonFiniteFound) -> str:
    if event.was_repeated:
        return (
            f"step {event.step} was not finite, and computed again it is: something went wrong in a"
            " processor, in memory or on the way, or code of yours computes something else each"
            " time; what is finite is applied"
        )
    if event.origin == "unknown":
        part = "a value"
        if event.failed_rank >= 0:
            part = f"the loss of rank {event.failed_rank}"
        line = (
            f"step {event.step}: {part} was not finite, and no origin was found: forwards are"
            " finite when they are computed again"
        )
        return line + _describe_why_not_repeated(event)
    thing = {"output": "output", "gradient": "gradient"}.get(event.origin, "value")
    line = f"step {event.step}: the first {thing} that is not finite is that of {event.found_in}"
    if event.origin == "backward":
        line = (
            f"step {event.step}: the first gradient that is not finite is made in the backward of"
            f" {event.found_in}"
        )
    if event.failed_rank >= 0:
        line += f" on rank {event.failed_rank}"
    if event.samples:
        line += f", of samples {', '.join(f'{number:,}' for number in event.samples)}"
    if event.why:
        line += f" ({event.why})"
    return line + _describe_why_not_repeated(event)


def _describe_replay(event: events.ReplicasReplayed) -> str:
    if event.failed_rank < 0:
        return f"step {event.step} done again does not tell which rank was wrong: {event.why}"
    return f"step {event.step} done again: rank {event.failed_rank} was wrong: {event.why}"


def _describe_why_not_repeated(event: events.NonFiniteFound) -> str:
    if not event.why_not_repeated:
        return ""
    return f"; the step is left out: {event.why_not_repeated}"


def _describe_slow_rank(event: events.RankSlow) -> str:
    if event.why:
        text = f"rank {event.slow_rank} is slow since step {event.first_step}: {event.why}"
        return text + _compare_processor_shares(event)
    text = (
        f"rank {event.slow_rank} is slow since step {event.first_step}: {event.factor:.2f} times as"
        f" long as the others for its own work, most in {event.phase}"
    )
    if event.cpu_share > 0 and event.cpu_share < 0.8 * event.peers_cpu_share:
        text += (
            f"; it has {event.cpu_share:.2g} cores meanwhile, the others"
            f" {event.peers_cpu_share:.2g}"
        )
    return text


def _compare_processor_shares(event: events.RankSlow) -> str:
    """The part of the time that the rank and the others got a processor for when they wanted one;
    empty where that is no less than of the others, or the same in whole percents."""
    if event.cpu_share >= event.peers_cpu_share:
        return ""
    own_share, peers_share = f"{event.cpu_share:.0%}", f"{event.peers_cpu_share:.0%}"
    if own_share != peers_share:
        return f"; it runs {own_share} of the time that it wants to, the others {peers_share}"
    if event.peers_cpu_share < _HARDLY_RUNNING_SHARE:
        share = f"{_HARDLY_RUNNING_SHARE:.0%}"
        return f"; it and the others run less than {share} of the time that they want to"
    return ""


# How the line of each type of event that a person wants to know of is made.
_DESCRIBERS: dict[type[events.Event], Callable[[Any], str | None]] = {
    events.WeightsTaken: _describe_taken_weights,
    events.NonFiniteFound: _describe_nonfinite,
    events.ReplicasReplayed: _describe_replay,
    events.StepSkipped: _describe_skipped_step,
    events.CheckpointSaved: _describe_saved_checkpoint,
    events.CheckpointPostponed: _describe_postponed_checkpoint,
    events.CheckpointIntervalChosen: _describe_checkpoint_interval,
    events.CheckpointsRemoved: _describe_removed_checkpoints,
    events.CheckpointFailed: _describe_failed_checkpoint,
    events.CheckpointUnusable: _describe_unusable_checkpoint,
    events.TextGenerated: _describe_sample,
    events.PipelineMeasured: _describe_pipeline,
    events.InvariantChecked: _describe_invariant,
    events.StopRequested: _describe_stop_request,
    events.RankFailed: _describe_rank_failure,
    events.HangFound: _describe_hang,
    events.StoreLost: _describe_lost_store,
    events.RankSlow: _describe_slow_rank,
    events.RankSlowEnded: _describe_end_of_slowness,
    events.ReliabilityMeasured: _describe_reliability,
    events.RestartScheduled: _describe_restart,
    events.RolledBack: _describe_roll_back,
    events.LayoutChanged: _describe_changed_layout,
    events.RunFinished: _describe_run_end,
    events.LoaderWorkerReplaced: _describe_replaced_loader_worker,
    events.SinkDropped: describe_lost_events,
    events.Note: _describe_note,
}
