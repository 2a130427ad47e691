"""What the steps of a run add to its metrics."""

from __future__ import annotations

import math
from array import array

from phalanx.observe.events import (
    Envelope,
    RunStarted,
    StepFinished,
    StepSkipped,
    StepsSummed,
    TimeBetweenSteps,
)
from phalanx.observe.loss_spikes import LossSpikeDetector
from phalanx.observe.skipped_steps import SkippedSteps
from phalanx.observe.time_groups import sum_productive_s
from phalanx.report.prometheus.values import MetricValues

LEAD_RANK = 0
MEAN_STEPS = 50


class _MovingMean:
    """The mean of the newest `MEAN_STEPS` values or so: older ones fade."""

    def __init__(self) -> None:
        self.value = 0.0
        self._num_steps = 0

    def add(self, value: float, num_steps: int) -> None:
        """Add `num_steps` values whose mean is `value`."""
        self._num_steps = min(self._num_steps + num_steps, max(MEAN_STEPS, num_steps))
        self.value += (value - self.value) * num_steps / self._num_steps


class StepMetrics:
    """Adds steps to `values`. Facts of all ranks alike (loss, tokens, ...) are taken from rank 0.

    Of rank 0's steps those that stand are kept, eight bytes each for number and seconds: a restart
    takes back what came after its checkpoint.
    """

    def __init__(self, values: MetricValues) -> None:
        self._values = values
        self._spikes = LossSpikeDetector()
        self._newest_step = 0
        self._skipped = SkippedSteps()
        self._means: dict[tuple[str, str], _MovingMean] = {}
        self._standing_steps = array("d")
        self._standing_s = array("d")
        self.productive_s = 0.0
        """Seconds of the steps that stand and were applied, without their waiting for data, saving
        and evaluating."""

    def add_event(self, envelope: Envelope) -> None:
        event = envelope.event
        if isinstance(event, StepFinished):
            rank = str(envelope.rank)
            self._add_seconds_of_rank(event, rank, 1)
            self._add_step_of_rank(event, rank)
            if envelope.rank == LEAD_RANK:
                skip = self._skipped.find_skip(int(event.step), envelope.attempt)
                self._add_step(event, skip)
        elif isinstance(event, StepsSummed):
            self._add_seconds_of_rank(event, str(envelope.rank), max(int(event.num_steps), 1))
        elif isinstance(event, TimeBetweenSteps):
            rank = str(envelope.rank)
            name = "phalanx_between_steps_seconds_total"
            self._values.add(name, event.seconds, rank, event.activity)
        elif isinstance(event, StepSkipped):
            self._values.add("phalanx_skipped_steps_total", 1, event.reason)
            self._skipped.add_event(envelope)
        elif isinstance(event, RunStarted):
            self._values.set("phalanx_target_steps", event.total_steps)
            self._values.set("phalanx_step", event.step)
            self._spikes.forget()

    def _add_seconds_of_rank(
        self, event: StepFinished | StepsSummed, rank: str, num_steps: int
    ) -> None:
        values = self._values
        for phase, seconds in event.phases_s.items():
            values.add("phalanx_phase_seconds_total", seconds, rank, phase)
        # Less than nothing where a phase that ends after the record is charged to the next step.
        values.add_net("phalanx_phase_seconds_total", event.unaccounted_s, rank, "unaccounted")
        for words, seconds in event.communication_s.items():
            axis = words.partition(":")[0]
            values.add("phalanx_communication_seconds_total", seconds, rank, axis)
        waiting_s = event.waiting_s
        self_s = event.step_s - waiting_s
        values.add("phalanx_wait_seconds_total", waiting_s, rank)
        values.add("phalanx_self_seconds_total", self_s, rank)
        if event.cpu_s:
            values.add("phalanx_cpu_seconds_total", event.cpu_s, rank)
        self._set_mean("phalanx_step_wait_seconds", waiting_s, rank, num_steps)
        self._set_mean("phalanx_step_self_seconds", self_s, rank, num_steps)
        values.set("phalanx_memory_resident_bytes", event.rss_bytes, rank)
        if event.peak_bytes:
            values.set("phalanx_memory_peak_bytes", event.peak_bytes, rank)

    def _set_mean(self, name: str, seconds: float, rank: str, num_steps: int) -> None:
        """Move the mean of a rank's newest steps by `num_steps` that took `seconds` together."""
        if not math.isfinite(seconds):
            return
        mean = self._means.setdefault((name, rank), _MovingMean())
        mean.add(seconds / num_steps, num_steps)
        self._values.set(name, mean.value, rank)

    def _add_step_of_rank(self, event: StepFinished, rank: str) -> None:
        values = self._values
        for axis, num_bytes in {"dp": event.sent_bytes, **event.sent_by_axis}.items():
            if num_bytes:
                values.add("phalanx_sent_bytes_total", num_bytes, rank, axis)
        if event.reserved_bytes:
            values.set("phalanx_memory_reserved_bytes", event.reserved_bytes, rank)

    def _add_step(self, event: StepFinished, skip: StepSkipped | None) -> None:
        values, step = self._values, int(event.step)
        values.add("phalanx_steps_total", 1)
        values.add("phalanx_steps_redone_total", step <= self._newest_step)
        self._newest_step = max(self._newest_step, step)
        values.add("phalanx_tokens_total", event.num_targets)
        values.set("phalanx_step", step)
        values.set("phalanx_loss", event.loss)
        values.set("phalanx_grad_norm", event.grad_norm)
        values.set("phalanx_learning_rate", event.learning_rate)
        if event.loss_scale:
            values.set("phalanx_loss_scale", event.loss_scale)
        values.add("phalanx_nonfinite_steps_total", _is_nonfinite(event, skip))
        values.add("phalanx_loss_spikes_total", self._spikes.add_loss(event.loss) is not None)
        if math.isfinite(event.step_s) and event.step_s >= 0:
            values.observe_step_seconds(event.step_s)
            self._add_standing_step(event, skip)

    def _add_standing_step(self, event: StepFinished, skip: StepSkipped | None) -> None:
        step = int(event.step)
        # What an attempt did at or after the next one's first step is undone.
        while self._standing_steps and self._standing_steps[-1] >= step:
            self._standing_steps.pop()
            self.productive_s -= self._standing_s.pop()
        productive_s = 0.0
        if skip is None:
            productive_s = sum_productive_s(event.step_s, event.phases_s)
        self._standing_steps.append(step)
        self._standing_s.append(productive_s)
        self.productive_s += productive_s


def _is_nonfinite(event: StepFinished, skip: StepSkipped | None) -> bool:
    if math.isfinite(event.loss) and math.isfinite(event.grad_norm):
        return False
    # By overflows fp16's loss scale finds its height.
    has_overflowed = skip is not None and skip.reason == "overflow"
    return event.num_targets > 0 and not has_overflowed
