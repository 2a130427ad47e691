"""`RunMetrics`: the events of a run, of all its ranks, added up to metrics.

All is a function of the run directory: whoever reads it anew, later or on another machine, gets the
same counters. So an endpoint may be stopped and started without a gap in them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from phalanx import __version__
from phalanx.core.clocks import build_monotonic_clock_id
from phalanx.observe import events
from phalanx.observe.events import Envelope
from phalanx.report.drift import DriftLog
from phalanx.report.prometheus.definitions import HANG_KINDS, RESTART_CAUSES, SKIP_REASONS
from phalanx.report.prometheus.run_state import RunStateMetrics
from phalanx.report.prometheus.step_metrics import LEAD_RANK, StepMetrics
from phalanx.report.prometheus.values import MetricSnapshot, MetricValues
from phalanx.report.timeline import TimelineBuilder

_SUPERVISOR_RANK = -1


class RunMetrics:
    """The metrics of one run. `run`: its name; `job`: the content of RUN/job.json."""

    def __init__(self, run: str, job: Mapping[str, Any]) -> None:
        self._run, self._model = run, _name_model(job)
        self._values = MetricValues()
        self._state = RunStateMetrics(self._values)
        self._steps = StepMetrics(self._values)
        self._timeline = TimelineBuilder()
        self._drift = DriftLog()
        self._newest: Envelope | None = None
        # Monotonic or wall clock seconds since when a crash would cost training.
        self._unsaved_since: Envelope | None = None
        self._unsaved_before_s = 0.0
        self._saved_step = 0
        # The newest attempt that began, and its ranks.
        self._attempt, self._num_ranks = -1, math.inf
        # Attempts in which rank 0 was heard, and in which any rank did steps.
        self._attempts_of_lead: set[int] = set()
        self._attempts_with_steps: set[int] = set()
        # Failed checks so far, by rank, attempt and invariant.
        self._num_failed_checks: dict[tuple[int, int, str], int] = {}
        self._progress_unix_s: dict[int, float] = {}
        for name in _COUNTERS_FROM_ZERO:
            for labels in _LABELS_FROM_ZERO.get(name, [()]):
                self._values.add(name, 0, *labels)

    @property
    def is_live(self) -> bool:
        """False once the run has ended, until it is resumed."""
        return self._state.is_live

    @property
    def state(self) -> str:
        """One of `definitions.RUN_STATES`."""
        return self._state.state

    def add_event(self, envelope: Envelope) -> None:
        """Add one event. Those of each process must come in its own order."""
        self._state.add_event(envelope)
        self._steps.add_event(envelope)
        self._drift.add_event(envelope)
        if envelope.rank in (_SUPERVISOR_RANK, LEAD_RANK):
            self._timeline.add_event(envelope)
            self._newest = envelope
        if envelope.rank == LEAD_RANK:
            self._attempts_of_lead.add(envelope.attempt)
        if isinstance(envelope.event, events.StepFinished | events.StepsSummed):
            self._attempts_with_steps.add(envelope.attempt)
        if envelope.rank >= 0:
            self.note_progress(envelope.rank, envelope.time_unix_s)
        self._add_other_event(envelope)

    def note_progress(self, rank: int, unix_s: float) -> None:
        """Take note that a rank showed progress at `unix_s`."""
        self._progress_unix_s[rank] = max(self._progress_unix_s.get(rank, 0.0), unix_s)

    @property
    def newest_progress_unix_s(self) -> float:
        """Unix time at which a rank last showed progress; 0 where none has."""
        return max(self._progress_unix_s.values(), default=0.0)

    def build_snapshot(self, num_unreadable: int = 0) -> MetricSnapshot:
        """The values now. `num_unreadable`: lines that the reader could not read."""
        values = self._values
        for rank, unix_s in self._progress_unix_s.items():
            values.set("phalanx_last_progress_timestamp_seconds", unix_s, str(rank))
        values.set("phalanx_unreadable_lines_total", num_unreadable)
        values.set("phalanx_refresh_timestamp_seconds", time.time())
        self._set_drift()
        lifetime_s = self._timeline.build_measured_timeline().alive_s
        if self.is_live and self._newest is not None:
            lifetime_s += _measure_age(self._newest)
        if lifetime_s > 0:
            ratio = min(self._steps.productive_s / lifetime_s, 1.0)
            values.set("phalanx_goodput_ratio", ratio)
        values.clear("phalanx_checkpoint_age_seconds")
        if self.is_live and self._unsaved_since is not None:
            age_s = _measure_age(self._unsaved_since) + self._unsaved_before_s
            values.set("phalanx_checkpoint_age_seconds", age_s)
        snapshot = values.build_snapshot(self._run, self._num_ranks)
        if self._attempts_with_steps <= self._attempts_of_lead:
            return snapshot
        # A file of rank 0 was lost, or lies elsewhere: a count without it would be too low.
        return snapshot.leave_out(_OF_LEAD_RANK_ALONE)

    def _set_drift(self) -> None:
        # What was so of the attempt before is not of one that is too young to say.
        self._values.clear("phalanx_step_drift_ratio")
        self._values.clear("phalanx_memory_drift_bytes")
        slope = self._drift.measure_step_slope()
        if slope is not None and slope.start > 0:
            ratio = slope.least * slope.num_steps / slope.start
            self._values.set("phalanx_step_drift_ratio", ratio)
        for rank, slope in self._drift.measure_memory_slopes().items():
            self._values.set("phalanx_memory_drift_bytes", slope.least, str(rank))

    def _add_other_event(self, envelope: Envelope) -> None:
        values, event = self._values, envelope.event
        match event:
            case events.RunStarted():
                self._add_start(envelope, event)
            case events.EvalFinished():
                self._add_evaluation(event)
            case events.CheckpointSaved():
                self._add_checkpoint(envelope, event)
            case events.CheckpointFailed():
                values.add("phalanx_checkpoints_total", 1, "failed")
            case events.CheckpointPostponed():
                values.add("phalanx_checkpoints_total", 1, "postponed")
            case events.CheckpointUnusable():
                values.add("phalanx_checkpoints_total", 1, "unusable")
            case events.InvariantChecked():
                self._add_check(envelope, event)
            case events.ExpertsLoaded():
                values.set("phalanx_expert_busiest_ratio", event.worst[1])
                values.set("phalanx_expert_dropped_ratio", event.dropped_share)
            case events.GpuMeasured():
                rank = str(envelope.rank)
                values.add("phalanx_gpu_energy_joules_total", event.energy_j, rank)
                if math.isfinite(event.busy_share):
                    values.set("phalanx_gpu_busy_ratio", event.busy_share, rank)
            case events.BlockNormsMeasured():
                for name, norm in event.gradient_norms.items():
                    values.set("phalanx_block_grad_norm", norm, name)
                for name, ratio in event.update_ratios.items():
                    values.set("phalanx_block_update_ratio", ratio, name)
            case events.PipelineMeasured():
                self._add_pipeline(event)
            case events.SinkDropped():
                values.add("phalanx_sink_dropped_events_total", event.num_dropped, event.sink)
            case events.HangFound():
                values.add("phalanx_hangs_total", 1, event.hang_kind)
            case events.RolledBack():
                values.add("phalanx_roll_backs_total", 1, event.cause)
            case events.RankSlow():
                values.set("phalanx_rank_slow", 1, str(int(event.slow_rank)))
            case events.RankSlowEnded():
                values.set("phalanx_rank_slow", 0, str(int(event.slow_rank)))
            case events.LoaderWorkerReplaced():
                values.add("phalanx_loader_worker_replacements_total", 1)

    def _add_start(self, envelope: Envelope, event: events.RunStarted) -> None:
        wide = [f"{axis}={int(degree)}" for axis, degree in event.layout.items() if degree > 1]
        labels = (" ".join(wide), self._model, str(int(event.world_size)), event.device)
        # Of an attempt with another layout: one series at a time.
        self._values.clear("phalanx_run")
        self._values.set("phalanx_run", 1, *labels, __version__)
        if envelope.attempt >= self._attempt:
            self._attempt, self._num_ranks = envelope.attempt, event.world_size
        # Steps after the newest checkpoint that ranks held in memory are still not saved.
        if self._unsaved_since is None or event.step <= self._saved_step:
            self._unsaved_since, self._unsaved_before_s = envelope, 0.0

    def _add_evaluation(self, event: events.EvalFinished) -> None:
        values = self._values
        values.add("phalanx_evaluations_total", 1)
        values.add("phalanx_eval_seconds_total", event.wall_s)
        values.set("phalanx_eval_loss", event.loss)
        for name, value in event.metrics.items():
            values.set("phalanx_eval_metric", value, name)

    def _add_checkpoint(self, envelope: Envelope, event: events.CheckpointSaved) -> None:
        values = self._values
        values.add("phalanx_checkpoints_total", 1, "saved")
        values.set("phalanx_checkpoint_step", event.step)
        values.set("phalanx_checkpoint_timestamp_seconds", envelope.time_unix_s)
        values.add("phalanx_checkpoint_seconds_total", event.wall_s)
        values.add("phalanx_checkpoint_stall_seconds_total", event.stall_s)
        num_bytes = event.num_bytes
        if event.num_new_bytes >= 0:
            num_bytes = event.num_new_bytes
        values.add("phalanx_checkpoint_written_bytes_total", num_bytes)
        self._saved_step = int(event.step)
        # What was trained while it was being written is not in it.
        self._unsaved_since, self._unsaved_before_s = envelope, max(event.wall_s, 0.0)

    def _add_check(self, envelope: Envelope, event: events.InvariantChecked) -> None:
        # A failure that repeats itself is told once, and counted in what is told next.
        key = (envelope.rank, envelope.attempt, event.name)
        num_new = event.num_failed - self._num_failed_checks.get(key, 0)
        if num_new <= 0:
            return
        self._num_failed_checks[key] = int(event.num_failed)
        self._values.add("phalanx_invariant_failures_total", num_new, event.name)
        if event.name == "replicas_equal":
            self._values.add("phalanx_replica_mismatch_total", num_new)

    def _add_pipeline(self, event: events.PipelineMeasured) -> None:
        bubbles = {
            "measured": event.bubble_measured,
            "predicted": event.bubble_predicted,
            "planned": event.bubble_planned,
        }
        for source, ratio in bubbles.items():
            if math.isfinite(ratio):
                self._values.set("phalanx_pipeline_bubble_ratio", ratio, source)


# There from the start: Prometheus takes the first sample of a series for where it begins, and
# an increase from nothing to one for none.
_COUNTERS_FROM_ZERO = (
    "phalanx_steps_total",
    "phalanx_steps_redone_total",
    "phalanx_nonfinite_steps_total",
    "phalanx_tokens_total",
    "phalanx_loss_spikes_total",
    "phalanx_replica_mismatch_total",
    "phalanx_evaluations_total",
    "phalanx_eval_seconds_total",
    "phalanx_checkpoint_seconds_total",
    "phalanx_checkpoint_stall_seconds_total",
    "phalanx_checkpoint_written_bytes_total",
    "phalanx_loader_worker_replacements_total",
    "phalanx_restarts_total",
    "phalanx_hangs_total",
    "phalanx_roll_backs_total",
    "phalanx_skipped_steps_total",
    "phalanx_checkpoints_total",
)
# Rank 0 alone tells them.
_OF_LEAD_RANK_ALONE = frozenset(
    {
        "phalanx_goodput_ratio",
        "phalanx_step",
        "phalanx_target_steps",
        "phalanx_steps_total",
        "phalanx_steps_redone_total",
        "phalanx_skipped_steps_total",
        "phalanx_nonfinite_steps_total",
        "phalanx_tokens_total",
        "phalanx_step_seconds",
        "phalanx_loss",
        "phalanx_grad_norm",
        "phalanx_learning_rate",
        "phalanx_loss_scale",
        "phalanx_loss_spikes_total",
        "phalanx_evaluations_total",
        "phalanx_eval_seconds_total",
        "phalanx_eval_loss",
        "phalanx_eval_metric",
        "phalanx_checkpoints_total",
        "phalanx_checkpoint_step",
        "phalanx_checkpoint_timestamp_seconds",
        "phalanx_checkpoint_age_seconds",
        "phalanx_checkpoint_seconds_total",
        "phalanx_checkpoint_stall_seconds_total",
        "phalanx_checkpoint_written_bytes_total",
    }
)
_LABELS_FROM_ZERO: dict[str, list[tuple[str, ...]]] = {
    "phalanx_restarts_total": [(cause,) for cause in RESTART_CAUSES],
    "phalanx_hangs_total": [(kind,) for kind in HANG_KINDS],
    "phalanx_roll_backs_total": [("loss_spike",), ("corruption",), ("nonfinite_weights",)],
    "phalanx_skipped_steps_total": [(reason,) for reason in SKIP_REASONS],
    "phalanx_checkpoints_total": [("saved",), ("failed",), ("postponed",), ("unusable",)],
}


def _measure_age(envelope: Envelope) -> float:
    """Seconds since an event, by the clock that nobody sets where its process shares it."""
    clock = envelope.clock
    if clock is not None and clock.name and clock.name == build_monotonic_clock_id():
        return max(time.monotonic() - envelope.monotonic_s, 0.0)
    return max(time.time() - envelope.time_unix_s, 0.0)


def _name_model(job: Mapping[str, Any]) -> str:
    """The preset or kind of the job's model; decoder where it names none."""
    model = job.get("model")
    if not isinstance(model, Mapping):
        return ""
    for key in ("preset", "kind"):
        name = model.get(key)
        if isinstance(name, str) and name:
            return name
    return "decoder"
