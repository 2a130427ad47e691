"""The trainer, the step loop: one step at a time, facts out, decisions by all ranks together."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from phalanx.checkpoint.ownership.fence import RunOwnershipWatch
from phalanx.checkpoint.run_storage import RunStorage
from phalanx.checkpoint.writing.async_checkpointer import AsyncCheckpointer
from phalanx.checkpoint.writing.checkpoint_schedule import CheckpointSchedule
from phalanx.core.errors import RunTakenError
from phalanx.core.phases import WORLD_AXIS, PhaseTimer
from phalanx.core.roll_back import UnequalSteps
from phalanx.job.schema import Job
from phalanx.mesh.mesh import Mesh
from phalanx.observe.bus import Bus
from phalanx.observe.events import (
    EvalFinished,
    Event,
    StepFinished,
    StopRequested,
)
from phalanx.optim.build import set_learning_rate
from phalanx.optim.schedule import learning_rate
from phalanx.parallel.executor import Batch
from phalanx.parallel.step_stats import StepStats
from phalanx.plan.plan import Plan
from phalanx.train.best import BestCheckpointRecorder
from phalanx.train.block_norms import BlockNormRecorder
from phalanx.train.corruption import NUM_CORRUPTION_FLAGS, OnCorruption, act_on_corruption
from phalanx.train.evaluation import (
    EvalScore,
    Evaluation,
    EvaluationHistory,
    read_evaluation_history,
)
from phalanx.train.evaluator import Evaluator
from phalanx.train.invariants import RunInvariants
from phalanx.train.memory import MemoryMeter
from phalanx.train.old_trainer_call import accept_deprecated_trainer_arguments
from phalanx.train.pipeline_record import gather_and_emit_pipeline_spans
from phalanx.train.randomness import seed_generators
from phalanx.train.state import TrainState
from phalanx.train.step_recorder import StepRecorder
from phalanx.train.step_repeat import NonFiniteStepRepeater
from phalanx.train.step_tracer import StepTracer
from phalanx.train.stop import (
    StopRequestedError,
    StopSignalFlags,
    agree_on_stop,
    choose_stop_reason,
)
from phalanx.train.training_data import TrainingData


class Guard(Protocol):
    """Returns the reason why a step that could be applied must not be, or None; may raise to end
    the run.

    Sees only facts that are equal on all ranks. Steps without finite gradients or targets are never
    applied; a guard sees them, too, and may have had enough of them.
    """

    def reason_to_skip(self, step: int, facts: StepStats) -> str | None: ...


class Trainer:
    """Advances a TrainState to the job's last step, evaluating held-out data on the way and at the
    end if there is some.

    Without `storage` nothing is saved. `stop` has the signals that this rank got, `memory` measures
    it. Events go to `bus`; nothing here formats text or knows who reads.
    """

    @accept_deprecated_trainer_arguments
    def __init__(
        self,
        job: Job,
        plan: Plan,
        state: TrainState,
        bus: Bus,
        data: TrainingData,
        *,
        storage: RunStorage | None = None,
        guards: Sequence[Guard] = (),
        stop: StopSignalFlags | None = None,
        memory: MemoryMeter | None = None,
        on_corruption: OnCorruption = "warn",
        unequal: UnequalSteps | None = None,
    ) -> None:
        self._on_corruption: OnCorruption = on_corruption
        self.job, self.plan, self.state, self.bus = job, plan, state, bus
        self.mesh: Mesh = state.model.mesh
        self.data, self.storage, self.guards = data, storage, tuple(guards)
        self.stop = stop or StopSignalFlags()
        self.phases: PhaseTimer = state.model.phases
        self._recorder = StepRecorder(job, plan, state, bus, data.records, memory)
        self._invariants = RunInvariants(job, state, bus, data.objective, unequal)
        self._norms = BlockNormRecorder(job.observe.norms_every, plan, state.model, bus)
        self._nonfinite = NonFiniteStepRepeater(
            state, data, bus, max_norm=job.optim.clip_norm, on_corruption=on_corruption
        )
        self._tracer = self._build_tracer()
        self._schedule = self._build_checkpoint_schedule()
        self._best = BestCheckpointRecorder(job, self.mesh, bus, storage)
        self._evaluator = self._build_evaluator()
        self._evals = EvaluationHistory()
        self._is_saveable = False
        # Bits of a run that is continued are those of one that never was interrupted.
        self._must_settle_buckets = state.step > 0 and state.model.sets_buckets_anew

    def run(self, asked_s: float | None = None) -> str:
        """Train until the last step or an agreed stop. Returns "finished", "sigterm" or "sigint".

        `asked_s`: when the run was asked for (monotonic seconds): what passed since is start-up.

        On every rank: RunTakenError, after the step that is being done, if another job has taken
        the run; CheckpointError if the save at the end or at a stop fails, or if after the first
        update there is state that no checkpoint holds; NumericsError if a guard gives up.
        """
        try:
            return self._run_steps(asked_s)
        except RunTakenError:
            # The save in flight can no longer be committed: there is nothing to wait for.
            raise
        except BaseException:
            # A step whose reduction was done is done, whatever came after it.
            if self.state.is_whole:
                self._recorder.record_last_step()
            self._recorder.write_open_window()
            if self._schedule is not None:
                self._schedule.abandon(self.job.resilience.grace_s)
            raise
        finally:
            self._tracer.close()

    def _run_steps(self, asked_s: float | None) -> str:
        reason = self._begin_run(asked_s)
        while reason is None and self.state.step < self.job.train.steps:
            self._tracer.begin_step(self.state.step + 1)
            facts, skipped = self.step()
            with self.phases("record"):
                reason = self._act_on_step(facts, skipped)
            self._tracer.end_step(self.state.step)
            if reason is None:
                reason = self._evaluate_if_due()
        self._invariants.emit_summary()
        self._norms.finish()
        if self._schedule is not None:
            # A stop has no time for removals.
            self._schedule.wait_for_save(skip_pruning=reason is not None)
        if reason is None:
            return "finished"
        self.bus.emit(StopRequested(self.state.step, self.stop.name_reason(reason)))
        return reason

    def _begin_run(self, asked_s: float | None) -> str | None:
        """All that comes before the first step, a save and an evaluation that are due among it.
        Returns the reason of a stop that all ranks agreed on by then ("sigterm", "sigint")."""
        if self._evaluator is not None:
            self._evaluator.require_known_metric(self.job.eval.metric)
        run_dir = None if self.storage is None else self.storage.run_dir
        self._evals = read_evaluation_history(
            run_dir, self.state.step, self.mesh, self.job.eval.metric
        )
        self._best.record_best_if_missing(self._evals, self.state.step)
        self._invariants.start()
        self._recorder.start(asked_s)
        reason = None
        if self.state.step > 0:
            # What a run is asked for while its ranks start again must not cost a step more: the
            # grace may last for the save of what they hold alone, and the step may fail as it did.
            with self.phases("collective", "all_reduce stop flags", axis=WORLD_AXIS):
                reason, _ = agree_on_stop(self.stop, self.mesh)
        if self.state.step > self.state.saved_step:
            # Its ranks held it in memory: the save of this step may be what was interrupted.
            self._save_if_due((0.0, 0.0, 0.0), is_stop=reason is not None)
        # Of the step that training continues from, if a stop or a crash came before it.
        return reason or self._evaluate_if_due()

    def _act_on_step(self, facts: StepStats, skipped: str | None) -> str | None:
        """Record the step that is done, and do what its reduction decided. Returns the reason of a
        stop that all ranks agreed on in it."""
        self._recorder.hold_step_facts(facts, skipped)
        gather_and_emit_pipeline_spans(
            self.state.step, self.job.train.steps, self.state.model, self.bus
        )
        if skipped is None:
            # A skipped step makes no optimizer state. All ranks skip alike: this is collective.
            self._require_state_is_saveable()
        sigterm, sigint, is_fenced, trace_request, *rest = facts.flags
        corruption, save_flags = rest[:NUM_CORRUPTION_FLAGS], rest[NUM_CORRUPTION_FLAGS:]
        # Before a save: the run is another job's by now.
        if is_fenced and self._get_storage_fence is not None:
            raise self._get_storage_fence.run_taken_error()
        act_on_corruption(
            corruption, self.state.step, self._on_corruption, self._invariants.gather_unequal_steps
        )
        self._tracer.accept_request(trace_request, self.state.step)
        reason = choose_stop_reason(sigterm, sigint)
        self._save_if_due(save_flags, is_stop=reason is not None)
        self._recorder.record_last_step()
        return reason

    def _save_if_due(self, save_flags: Sequence[float], *, is_stop: bool) -> None:
        if self._schedule is not None:
            is_end = self._is_last_saved_step()
            self._schedule.save_if_due(save_flags, is_stop=is_stop, is_end=is_end)

    def step(self) -> tuple[StepStats, str | None]:
        """One optimizer update. Returns its facts, and why it was skipped if it was."""
        step = self.state.step + 1
        self.phases.step = step
        # What a user's module draws besides dropout is a function of (seed, step, share of the
        # batch): resuming repeats it. Dropout follows the sample instead (parallel.dropout).
        with self.phases("prepare"):
            seed_generators("step", self.state.seed, step, self.mesh.data_parallel_rank)
        with self.phases("data"):
            microbatches = self.data.batches.step_microbatches(step)
        model, optimizer = self.state.model, self.state.optimizer
        if self._must_settle_buckets:
            self._settle_buckets(microbatches[-1], step)
        self.state.begin_step()
        sums = model.forward_backward(microbatches, self.data.objective, step=step)
        with self.phases("record"):
            self._invariants.hold_own_loss(step, sums)
            flags = (
                *self._build_step_flags(),
                *self._invariants.count_batch_for_reduction(microbatches),
            )
        # The step's one reduction: stops, guards and saves act on it, so that all ranks agree.
        norms = self._norms.request_norms(step)
        facts = model.reduce_and_clip(
            sums, max_norm=self.job.optim.clip_norm, flags=flags, by_block=norms
        )
        facts = self._invariants.remove_counts_from_flags(facts)
        if facts.reason_to_skip == "nonfinite_gradients":
            facts = self._nonfinite.find_origin_and_repeat(step, microbatches, sums, facts, norms)
        if facts.should_apply:
            self.state.finite_weights.note_finite_step()
        # Every guard is asked, also about a step that is skipped anyway: guards count such steps.
        reasons = [
            facts.reason_to_skip,
            *(guard.reason_to_skip(step, facts) for guard in self.guards),
        ]
        skipped = next((reason for reason in reasons if reason), None)
        self.state.begin_update()
        with self.phases("optimizer"):
            if skipped is None:
                # A function of the step: nothing to save, and right wherever a run resumes.
                set_learning_rate(optimizer, learning_rate(self.job, step, self.plan.peak_lr))
                self._invariants.digest_before_update()
                with self._norms.measuring_update(step):
                    model.update(optimizer)
            else:
                self.state.undo_forward()
            # Skipped or not. Without gradients their memory is free until the next backward.
            optimizer.zero_grad(set_to_none=True)
        # A skipped step counts, too: its samples are read, and the next step reads others.
        self.state.step = step
        self.state.tokens_seen += facts.num_targets
        self.state.samples_seen += self.job.train.global_batch_size
        self.state.end_update()
        with self.phases("record"):
            self._invariants.finish_step(facts)
            self._norms.finish_step(step, facts)
        return facts, skipped

    def _settle_buckets(self, microbatch: Batch, step: int) -> None:
        """Before the first step of a run that is continued: a forward and a backward after which
        sums of gradients round as they would have, had it not been interrupted."""
        self._must_settle_buckets = False
        self.state.model.settle_buckets(microbatch, self.data.objective, step=step)
        self.state.optimizer.zero_grad(set_to_none=True)
        seed_generators("step", self.state.seed, step, self.mesh.data_parallel_rank)

    def _is_last_saved_step(self) -> bool:
        """True after the last step, if the job saves that."""
        return self.state.step == self.job.train.steps and self.job.checkpoint.at_end

    @property
    def last_finished(self) -> StepFinished | None:
        """The facts of the last step that this rank recorded."""
        return self._recorder.last_finished

    def record_step_of_other_rank(self, finished: StepFinished) -> None:
        """Record the step that the state is of as another rank recorded it."""
        self._recorder.record_step_of_other_rank(finished)

    def record_samples_of_step(self, step: int) -> None:
        """Record the samples of the step that the state is of, as far as the loader knows them."""
        self._recorder.record_samples_of_step(step)

    def record_ending(self) -> None:
        """Emit the seconds since the last step or evaluation, when all is done."""
        self._recorder.record_ending()

    def _require_state_is_saveable(self) -> None:
        """Raise CheckpointError, once, for state that no checkpoint holds: many optimizers make it
        at their first update."""
        if self._is_saveable:
            return
        if self._schedule is not None:
            if self.state.finite_weights.gather_broken():
                # The next step goes back, or says so.
                return
            self._schedule.require_saveable()
        self._is_saveable = True

    def _build_step_flags(self) -> tuple[float, ...]:
        """This rank's flags in the reduction of a step: stops, a lost run, a request to trace,
        corruption that was found, and saves."""
        if self._schedule is not None:
            save_flags = self._schedule.status_flags()
        else:
            save_flags = (0.0, 0.0, 0.0)
        # Rank 0 alone looks at the files: the sum of the flags tells all.
        is_fenced = self.storage is not None and self.mesh.rank == 0 and self.storage.is_lost()
        stops = float(self.stop.sigterm), float(self.stop.sigint), float(is_fenced)
        return (
            *stops,
            self._tracer.look_for_request(),
            *self._invariants.build_corruption_flags(),
            *save_flags,
        )

    def _build_tracer(self) -> StepTracer:
        return StepTracer(
            self.job,
            self.state.model,
            self.bus,
            None if self.storage is None else self.storage.run_dir,
            partial(self._recorder.exclude_from_next_step, "trace"),
            may_write=lambda: self.storage is None or not self.storage.is_lost(),
        )

    @property
    def _get_storage_fence(self) -> RunOwnershipWatch | None:
        if self.storage is None:
            return None
        return self.storage.fence

    def _build_checkpoint_schedule(self) -> CheckpointSchedule | None:
        if self.storage is None:
            return None
        options = self.job.checkpoint
        checkpointer = AsyncCheckpointer(
            self.storage,
            options,
            self.mesh,
            self.bus,
            self.phases,
            job_digest=self.plan.job_digest,
            timeout_s=self.job.resilience.collective_timeout_s,
        )
        return CheckpointSchedule(
            checkpointer,
            options,
            self.mesh,
            self.state,
            self.bus,
            record=self._recorder.record_last_step,
            saved_step=self.state.saved_step,
        )

    def _build_evaluator(self) -> Evaluator | None:
        if self.data.held_out is None:
            return None
        return Evaluator(
            self.state,
            self.mesh,
            objective=self.data.objective,
            held_out=self.data.held_out,
            source_weights=self.data.source_weights,
            stop=self.stop,
            emit=self.bus.emit if self.mesh.rank == 0 else _discard_event,
            fence=self._get_storage_fence,
        )

    @property
    def staging_bytes(self) -> int:
        """Host memory that this rank holds for copies of the state."""
        if self._schedule is not None:
            return self._schedule.staging_bytes
        return 0

    def save(self, *, is_last_chance: bool = False) -> None:
        """Save this step if it is not saved yet, and there is a storage (see
        `CheckpointSchedule.save`)."""
        if self._schedule is not None:
            self._schedule.save(is_last_chance=is_last_chance)

    def _evaluate_if_due(self) -> str | None:
        """Evaluate between two steps, or after the last.

        Returns "sigterm" or "sigint" if all agreed to stop instead: the step is saved then, and
        whoever continues begins with the evaluation.
        """
        step, every_steps = self.state.step, self.job.eval.every_steps
        is_due = step == self.job.train.steps or (
            every_steps is not None and step % every_steps == 0 and step > 0
        )
        if self._evaluator is None or not is_due or self._evals.has_evaluation_of_step(step):
            return None
        # An evaluation may be the first thing after a restart, before any step has set it.
        self.phases.step = step
        # No step took its seconds, and no phase of a step has them.
        with self.phases.exclude_from_step():
            # Inside: the step's own work in a device's queue was waited for.
            began = time.perf_counter()
            try:
                self._invariants.begin_evaluation()
                evaluation = self.evaluate()
                self._invariants.finish_evaluation()
            except StopRequestedError as request:
                if self._schedule is not None:
                    self._schedule.save(is_last_chance=True, prune=False)
                return str(request)
        wall_s = time.perf_counter() - began
        self._recorder.exclude_from_next_step("evaluate", wall_s)
        self._record_evaluation(evaluation, wall_s)
        self._invariants.emit_summary()
        return None

    def evaluate(self) -> Evaluation:
        """Compute loss and metrics on the held-out batches.

        Collective; training goes on as if it had not been.
        """
        assert self._evaluator is not None, "there is nothing to evaluate"
        return self._evaluator.evaluate()

    def _record_evaluation(self, evaluation: Evaluation, wall_s: float) -> None:
        """Save the step if it is the best and the job asks for that, then emit the evaluation.

        An evaluation that is on record is not done again. A best step on record whose job crashed
        before it was saved as such, `BestCheckpointRecorder.record_best_if_missing` does.
        """
        step = evaluation.step
        metric, mode = self.job.eval.metric, self.job.eval.mode or "min"
        score = EvalScore(
            evaluation.loss, evaluation.num_targets, evaluation.get_metric_value(metric)
        )
        # On every rank: whether to save the best step is decided from it by all alike.
        self._evals.add_evaluation(step, score)
        best_step, best = self._evals.best(evaluation.num_targets, mode)
        if self.job.eval.keep_best and best_step == step and self._schedule is not None:
            self.save()
            self._schedule.call_when_saved(partial(self._best.record_best, step, score))
        # After the save, which is collective.
        if self.mesh.rank != 0:
            return
        loss_by_source: dict[str, float] = {}
        if len(evaluation.loss_by_source) > 1:
            for name, loss in evaluation.loss_by_source.items():
                if math.isfinite(loss):
                    loss_by_source[name] = loss
        self.bus.emit(
            EvalFinished(
                step=step,
                loss=evaluation.loss,
                num_targets=evaluation.num_targets,
                wall_s=wall_s,
                loss_by_source=loss_by_source,
                best_step=best_step,
                best_loss=best.loss,
                metrics=dict(evaluation.metrics),
                judged_by=metric,
                best_value=best.value,
            )
        )


def _discard_event(event: Event) -> None:
    """Ignore an event that rank 0 emits."""
