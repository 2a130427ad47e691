"""The record of steps: the facts of each as events, once, and warnings that its modules give."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.core.process_stat import ProcessorDelayReader
from phalanx.core.units import format_bytes
from phalanx.job.schema import Job
from phalanx.mesh.shared_memory.opening import current_transport
from phalanx.observe.bus import Bus
from phalanx.observe.events import (
    Event,
    Note,
    OperatorsCounted,
    StepFinished,
    StepSkipped,
    TimeBetweenSteps,
)
from phalanx.optim.schedule import learning_rate
from phalanx.parallel.step_stats import StepStats
from phalanx.plan.plan import Plan
from phalanx.train.experts_record import build_expert_event, should_log_experts
from phalanx.train.gpu_record import GpuRecorder
from phalanx.train.memory import MemoryMeter
from phalanx.train.pipeline_record import is_first_rank_of_stage
from phalanx.train.state import TrainState
from phalanx.train.step_detail import StepDetail


@dataclass(frozen=True)
class _StepSeconds:
    """The seconds of one step: from record to record, of the processor, without one where the main
    thread wanted it, and by phase."""

    step_s: float
    cpu_s: float
    queued_s: float
    phases_s: Mapping[str, float]
    communication_s: Mapping[str, float]


class StepRecorder:
    """Emits the facts of each step of `state` on `bus`, once.

    `list_events(step)`: events besides. Without `memory` only what is resident is recorded.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        state: TrainState,
        bus: Bus,
        list_events: Callable[[int], Sequence[Event]],
        memory: MemoryMeter | None = None,
    ) -> None:
        self._job, self._plan, self._state, self._bus = job, plan, state, bus
        self._mesh, self._phases = state.model.mesh, state.model.phases
        self._list_events = list_events
        self._memory = memory or MemoryMeter()
        self._detail = StepDetail(self._mesh.rank, plan.layout, bus.attempt, job.train.steps)
        self._gpu = GpuRecorder(self._mesh.device, bus)
        self._processor_delay = ProcessorDelayReader()
        self._unrecorded: tuple[StepStats, str | None] | None = None
        self.last_finished: StepFinished | None = None
        self._count_from_now()
        self._has_operator_cost = False
        self._warned_draws: set[str] = set()
        self._has_warned_of_room = False
        self._unused: frozenset[str] = frozenset()

    def start(self, asked_s: float | None = None) -> None:
        """Count seconds from here on: what was timed before belongs to no step.

        `asked_s`: when the run was asked for (monotonic), where that is known.
        """
        self._phases.discard()
        self._gpu.start()
        if asked_s is not None:
            seconds = time.monotonic() - asked_s
            self._bus.emit(TimeBetweenSteps(self._state.step, "startup", seconds))
        # Afterwards: the ledger has a restart end where the start-up was emitted, less its seconds,
        # and the first step must not have that moment, too.
        self._count_from_now()

    def _count_from_now(self) -> None:
        self._recorded_s, self._recorded_cpu_s = time.perf_counter(), time.process_time()
        self._recorded_queued_s = self._processor_delay.read_delay_s()

    def exclude_from_next_step(self, activity: str, seconds: float) -> None:
        """Leave out the `seconds` of an activity of TimeBetweenSteps, which no step took, and say
        so."""
        self._recorded_s += seconds
        self._bus.emit(TimeBetweenSteps(self._state.step, activity, seconds))

    def record_ending(self) -> None:
        """Emit the seconds since the last step or evaluation: this rank has done all."""
        self.write_open_window()
        seconds = time.perf_counter() - self._recorded_s
        self._bus.emit(TimeBetweenSteps(self._state.step, "ending", seconds))

    def write_open_window(self) -> None:
        """Write what is known of steps that wait for their sum: no more of them are done."""
        for event in self._detail.flush():
            self._bus.emit(event)

    def hold_step_facts(self, facts: StepStats, skipped: str | None) -> None:
        """Take the facts of a step that is done, to be recorded before its checkpoint is there."""
        self._unrecorded = facts, skipped

    def record_last_step(self) -> None:
        """Emit the facts of the last step, once, with the seconds since the step before.

        A save does it when all is written and before it commits: whoever continues from a
        checkpoint finds every step up to it on record, at whatever moment this process was killed.
        """
        if self._unrecorded is None:
            return
        # Forgotten first, so that a step is never recorded twice.
        (facts, skipped), self._unrecorded = self._unrecorded, None
        now, now_cpu = time.perf_counter(), time.process_time()
        queued_s = self._processor_delay.read_delay_s()
        seconds = _StepSeconds(
            now - self._recorded_s,
            now_cpu - self._recorded_cpu_s,
            queued_s - self._recorded_queued_s,
            self._phases.take(),
            self._phases.take_communication(),
        )
        self._recorded_s, self._recorded_cpu_s = now, now_cpu
        self._recorded_queued_s = queued_s
        # What recording takes belongs to the next step.
        if self._phases.current == "record":
            # The step loop is at it already; a save is not.
            self._emit_step(facts, skipped, seconds)
            return
        with self._phases("record"):
            self._emit_step(facts, skipped, seconds)

    def _emit_step(self, facts: StepStats, skipped: str | None, seconds: _StepSeconds) -> None:
        step, memory = self._state.step, self._memory.read_rank_memory()
        if skipped is not None and self._mesh.rank == 0:
            batch = self._job.train.global_batch_size
            self._bus.emit(
                StepSkipped(step, skipped, facts.grad_norm, self._state.samples_seen - batch, batch)
            )
        if (
            should_log_experts(step, self._job)
            and self._state.model.expert_load
            and is_first_rank_of_stage(self._mesh)
        ):
            self._bus.emit(build_expert_event(step, self._state.model.expert_load))
        finished = StepFinished(
            step=step,
            loss=facts.loss,
            num_targets=facts.num_targets,
            tokens_seen=self._state.tokens_seen,
            learning_rate=learning_rate(self._job, step, self._plan.peak_lr),
            grad_norm=facts.grad_norm,
            step_s=seconds.step_s,
            tokens_per_s=facts.num_targets / seconds.step_s if seconds.step_s > 0 else 0.0,
            phases_s=_round_to_microseconds(seconds.phases_s),
            unaccounted_s=seconds.step_s - sum(seconds.phases_s.values()),
            rss_bytes=memory.rss_bytes,
            sent_bytes=facts.sent_bytes,
            loss_scale=facts.loss_scale,
            sent_tp_bytes=facts.sent_tp_bytes,
            peak_bytes=memory.peak_bytes,
            reserved_bytes=memory.reserved_bytes,
            sent_cp_bytes=facts.sent_cp_bytes,
            sent_ep_bytes=facts.sent_ep_bytes,
            sent_pp_bytes=facts.sent_pp_bytes,
            cpu_s=round(seconds.cpu_s, 6),
            communication_s=_round_to_microseconds(seconds.communication_s),
            own_bytes=memory.own_bytes,
            queued_s=round(seconds.queued_s, 6),
        )
        self.last_finished = finished
        self._emit_finished_step(finished)
        self._gpu.record_if_due(step)
        self._emit_operator_cost()
        self._warn_of_layout_dependent_draws()
        self._warn_of_full_shared_memory()
        self._warn_of_unused_parameters()

    def record_step_of_other_rank(self, finished: StepFinished) -> None:
        """Record the step that the state is of as another rank recorded it: this one was gone
        before it had."""
        self.last_finished = finished
        self._emit_finished_step(finished)

    def _emit_finished_step(self, finished: StepFinished) -> None:
        for event in self._detail.list_events(finished):
            self._bus.emit(event)
        self.record_samples_of_step(finished.step)

    def record_samples_of_step(self, step: int) -> None:
        """Record the samples of a step, as far as the loader knows them and has not told."""
        for event in self._list_events(step):
            self._bus.emit(event)

    def _emit_operator_cost(self) -> None:
        cost = self._state.model.operator_cost
        if cost is None or self._has_operator_cost or self._mesh.rank != 0:
            return
        self._has_operator_cost = True
        self._bus.emit(
            OperatorsCounted(
                self._state.step,
                cost.num_operators,
                self._plan.num_microbatches,
                cost.operator_s,
                cost.matmul_flops_per_s,
            )
        )

    def _warn_of_layout_dependent_draws(self) -> None:
        """Warn, once, of each module whose random numbers depend on the layout."""
        new_reasons: dict[str, str] = {}
        for name, why in self._state.model.left_to_torch.items():
            if name not in self._warned_draws:
                new_reasons[name] = why
        if not new_reasons:
            return
        self._warned_draws |= set(new_reasons)
        if self._plan.layout.world_size == 1 or not is_first_rank_of_stage(self._mesh):
            return
        for name, why in new_reasons.items():
            text = (
                f"{name or 'the model'}: {why}, which depend on the layout; a run repeats itself"
                " all the same"
            )
            # "why" is what the console shows; the plan's own warnings, without one, it has shown
            # before the start.
            self._bus.emit(
                Note("warning", {"warning": "draws_depend_on_layout", "text": text, "why": text})
            )

    def _warn_of_full_shared_memory(self) -> None:
        """Warn, once, that gradients are copied between ranks for want of shared memory, be it of
        one rank alone: sums are right, and steps slower."""
        if self._has_warned_of_room or self._mesh.local_rank != 0:
            return
        transport = current_transport()
        no_room = None if transport is None else transport.no_room
        if no_room is None:
            return
        self._has_warned_of_room = True
        reason = (
            f"/dev/shm has {format_bytes(no_room.free_bytes)} free, and the ranks of this machine"
            f" need twice {format_bytes(no_room.needed_bytes)}"
        )
        if no_room.why:
            reason = f"{no_room.why} ({reason})"
        text = f"gradients are copied and not summed where they lie, which is slower: {reason}"
        facts = {
            "warning": "shared_memory_full",
            "text": text,
            "why": text,
            "needed_bytes": no_room.needed_bytes,
            "free_bytes": no_room.free_bytes,
        }
        self._bus.emit(Note("warning", facts))

    def _warn_of_unused_parameters(self) -> None:
        """Warn, once, of each parameter without part in the loss, where that is allowed: it may be
        a mistake all the same."""
        unused = self._state.model.unused_parameters - self._unused
        if not unused:
            return
        self._unused |= unused
        if is_first_rank_of_stage(self._mesh):
            names = ", ".join(sorted(unused)[:3])
            if len(unused) > 3:
                names += " ..."
            where = f"rank {self._mesh.rank}'s loss of step {self._state.step}"
            text = f"{len(unused)} parameters had no part in {where}: {names}"
            self._bus.emit(Note("unused_parameters", {"why": text, "names": sorted(unused)}))


def _round_to_microseconds(seconds_of: Mapping[str, float]) -> dict[str, float]:
    return {name: round(seconds, 6) for name, seconds in seconds_of.items()}
