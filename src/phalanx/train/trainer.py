"""The step loop: one step at a time, facts out, decisions by all ranks together."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
import torch

from phalanx.checkpoint.best import BEST, write_best
from phalanx.core.digest import stable_hash64
from phalanx.core.errors import CheckpointError
from phalanx.core.phases import Phases
from phalanx.job.schema import Job
from phalanx.mesh.mesh import Mesh
from phalanx.observe.bus import Bus
from phalanx.observe.events import (
    CheckpointFailed,
    CheckpointSaved,
    EvalFinished,
    Event,
    StepFinished,
    StepSkipped,
    StopRequested,
)
from phalanx.optim.build import set_learning_rate
from phalanx.optim.schedule import learning_rate
from phalanx.parallel.model import Batch, Objective, StepFacts
from phalanx.plan.planner import Plan
from phalanx.train.evaluation import EvalRecord, Evaluation, HeldOut, read_record, undisturbed
from phalanx.train.state import TrainState

RETRY_SAVE_STEPS = 10  # steps between attempts while saving fails (a full disk, say)


class Microbatches(Protocol):
    """Where a step's data comes from: a pure function of the step, so that resuming needs no state."""

    def step_microbatches(self, step: int) -> Sequence[Mapping[str, torch.Tensor]]: ...


class Guard(Protocol):
    """Says why a step that could be applied must not be, or None; may raise to end the run.

    Sees only facts that are equal on all ranks. Steps without finite gradients or targets are never applied; a guard
    sees them, too, and may have had enough of them.
    """

    def reason_to_skip(self, step: int, facts: StepFacts) -> str | None: ...


@dataclass
class StopFlags:
    """What this rank was asked by signals. Ranks agree on it in the reduction of each step."""

    sigterm: bool = False
    sigint: bool = False

    def listen(self) -> None:
        """From now on SIGTERM and SIGINT ask for a stop at a step boundary."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "sigterm", True))
        signal.signal(signal.SIGINT, lambda *_: setattr(self, "sigint", True))


class StopAskedError(Exception):
    """All ranks agreed, inside an evaluation, to stop. Never leaves the trainer."""


class Trainer:
    """Advances a TrainState to the job's last step, evaluating `held_out` on the way and at the end if it is given.

    `run_dir=None` never saves. `records(step)` is what else there is to say of a step that is done. Events go to
    `bus`; nothing here formats text or knows who reads.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        mesh: Mesh,
        state: TrainState,
        bus: Bus,
        *,
        data: Microbatches,
        objective: Objective,
        held_out: HeldOut | None = None,
        guards: Sequence[Guard] = (),
        stop: StopFlags | None = None,
        run_dir: Path | None = None,
        records: Callable[[int], Sequence[Event]] = lambda step: (),
    ) -> None:
        self.job, self.plan, self.mesh, self.state, self.bus = job, plan, mesh, state, bus
        self.data, self.objective, self.held_out, self.guards = data, objective, held_out, tuple(guards)
        self.stop = stop or StopFlags()
        self.run_dir, self.records = run_dir, records
        self.phases: Phases = state.model.phases
        self._process = psutil.Process()
        self._saved_step = state.step
        self._last_save_s = time.monotonic()
        self._retry_save_at: int | None = None
        self._unrecorded: tuple[StepFacts, str | None] | None = None
        self._recorded_s = time.perf_counter()
        self._evals = EvalRecord()

    def run(self) -> str:
        """Train until the last step or an agreed stop. Returns "finished", "sigterm" or "sigint".

        On every rank: CheckpointError if the save at the end or at a stop fails, NumericsError if a guard gives up.
        """
        self._evals = read_record(self.run_dir, self.state.step, self.mesh)
        self.phases.take()
        self._recorded_s = time.perf_counter()
        reason = self._evaluate_if_due()  # of the step that is continued from, if a stop or a crash kept it from being
        while reason is None and self.state.step < self.job.train.steps:
            facts, _ = self._unrecorded = self.step()
            sigterm, sigint, save_due = (vote > 0 for vote in facts.votes)
            is_last = self.state.step == self.job.train.steps
            if sigterm or sigint or (is_last and self.job.checkpoint.at_end):
                self.save(is_last_chance=True)
            elif self._save_is_due(save_due):
                self.save()
            self._record()
            reason = "sigterm" if sigterm else "sigint" if sigint else self._evaluate_if_due()
        if reason is None:
            return "finished"
        self.bus.emit(StopRequested(self.state.step, reason))
        return reason

    def step(self) -> tuple[StepFacts, str | None]:
        """One optimizer update. Returns its facts, and why it was skipped if it was."""
        step = self.state.step + 1
        self.phases.step = step
        # What a user's module draws (dropout) is a function of (seed, step, share of the batch): resuming repeats it.
        torch.manual_seed(stable_hash64("step", self.state.seed, step, self.mesh.data_parallel_rank) % 2**63)
        with self.phases("data"):
            microbatches = self.data.step_microbatches(step)
        model, optimizer = self.state.model, self.state.optimizer
        sums = model.forward_backward(microbatches, self.objective)
        facts = model.finish_step(sums, max_norm=self.job.optim.clip_norm, votes=self._votes())
        reasons = [facts.reason_to_skip, *(guard.reason_to_skip(step, facts) for guard in self.guards)]
        skipped = next((reason for reason in reasons if reason), None)
        with self.phases("optimizer"):
            if skipped is None:
                set_learning_rate(optimizer, learning_rate(self.job, step))
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.state.step = step
        self.state.tokens_seen += facts.num_targets
        self.state.samples_seen += self.job.train.global_batch_size
        return facts, skipped

    def _votes(self) -> tuple[float, float, float]:
        minutes = self.job.checkpoint.every_minutes
        due = minutes is not None and self.mesh.rank == 0 and time.monotonic() - self._last_save_s >= minutes * 60
        return float(self.stop.sigterm), float(self.stop.sigint), float(due)

    def _save_is_due(self, voted: bool) -> bool:
        if self._retry_save_at is not None:  # the last save failed: wait, whatever asks for one
            return self.state.step >= self._retry_save_at
        every = self.job.checkpoint.every_steps
        return voted or (every is not None and self.state.step % every == 0)

    def save(self, *, is_last_chance: bool = False) -> None:
        """Save if this step is not saved yet. A failure is an event: training goes on and tries again later.

        Where there is no later, the CheckpointError is raised, on every rank.
        """
        if self.run_dir is None or self._saved_step == self.state.step:
            return
        began = time.perf_counter()
        try:
            path, num_bytes = self.state.save(
                self.run_dir, job_digest=self.plan.job_digest, phases=self.phases, before_commit=self._record
            )
        except CheckpointError as error:
            self._retry_save_at = self.state.step + RETRY_SAVE_STEPS
            if self.mesh.rank == 0:
                self.bus.emit(CheckpointFailed(self.state.step, error.where or "", str(error)))
            if is_last_chance:
                self._record()
                raise
            return
        self._saved_step, self._last_save_s, self._retry_save_at = self.state.step, time.monotonic(), None
        if self.mesh.rank == 0:
            name = str(path.relative_to(self.run_dir))
            self.bus.emit(CheckpointSaved(self.state.step, name, num_bytes, time.perf_counter() - began))

    def _record(self) -> None:
        """Emit the facts of the last step, once, with the seconds since the step before.

        A save does it when all is written and before it commits: whoever continues from a checkpoint finds every step
        up to it on record, at whatever moment this process was killed.
        """
        if self._unrecorded is None:
            return
        (facts, skipped), self._unrecorded = self._unrecorded, None
        now = time.perf_counter()
        self._emit(facts, skipped, now - self._recorded_s)
        self._recorded_s = now

    def _emit(self, facts: StepFacts, skipped: str | None, step_s: float) -> None:
        phases_s = self.phases.take()
        step = self.state.step
        if skipped is not None and self.mesh.rank == 0:
            batch = self.job.train.global_batch_size
            self.bus.emit(StepSkipped(step, skipped, facts.grad_norm, self.state.samples_seen - batch, batch))
        self.bus.emit(
            StepFinished(
                step=step,
                loss=facts.loss,
                num_targets=facts.num_targets,
                tokens_seen=self.state.tokens_seen,
                learning_rate=learning_rate(self.job, step),
                grad_norm=facts.grad_norm,
                step_s=step_s,
                tokens_per_s=facts.num_targets / step_s,
                phases_s={name: round(seconds, 6) for name, seconds in phases_s.items()},
                unaccounted_s=step_s - sum(phases_s.values()),
                rss_bytes=self._process.memory_info().rss,
            )
        )
        for event in self.records(step):
            self.bus.emit(event)

    def _evaluate_if_due(self) -> str | None:
        """Evaluate between two steps, or after the last. Returns "sigterm" or "sigint" if all agreed to stop instead:
        the step is saved then, and whoever continues begins with the evaluation.
        """
        step, every = self.state.step, self.job.eval.every_steps
        is_due = step == self.job.train.steps or (every is not None and step % every == 0 and step > 0)
        if self.held_out is None or not is_due or self._evals.has(step):
            return None
        self.phases.step = step  # the first thing after a restart, perhaps
        began = time.perf_counter()
        with self.phases.apart():
            try:
                found = self.evaluate()
            except StopAskedError as asked:
                self.save(is_last_chance=True)
                return str(asked)
        wall_s = time.perf_counter() - began
        self._recorded_s += wall_s  # no step took this time
        self._conclude(found, wall_s)
        return None

    def evaluate(self) -> Evaluation:
        """The loss on the held-out batches. Collective; training goes on as if it had not been."""
        assert self.held_out is not None, "there is nothing to evaluate"
        loss_by_source: dict[str, float] = {}
        total_loss, total_targets = 0.0, 0
        with self.phases("evaluate"), undisturbed(self.state.model, self.mesh, self.state.seed):
            for source, batches in self.held_out.items():
                sums = self.state.model.evaluate(self._until_stopped(batches), self.objective)
                loss, num_targets = self.state.model.reduce_sums(sums)
                if num_targets:
                    loss_by_source[source] = loss
                    total_loss, total_targets = total_loss + loss * num_targets, total_targets + num_targets
        loss = next(iter(loss_by_source.values())) if len(loss_by_source) == 1 else math.nan
        if len(loss_by_source) > 1:
            loss = total_loss / total_targets
        return Evaluation(self.state.step, loss, total_targets, loss_by_source)

    def _until_stopped(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches; before each, all ranks agree whether to go on: an evaluation may outlast a grace period."""
        for batch in batches:
            votes = torch.tensor([self.stop.sigterm, self.stop.sigint], dtype=torch.float64, device=self.mesh.device)
            with self.phases("collective", "all_reduce stop votes"):
                sigterm, sigint = self.mesh.all_reduce_sum(votes).tolist()
            if sigterm or sigint:
                raise StopAskedError("sigterm" if sigterm else "sigint")
            yield batch

    def _conclude(self, found: Evaluation, wall_s: float) -> None:
        """Keep the step if it is the best and the job wants that, then say what was found.

        In this order: an evaluation that is on record is not done again, so all that it leads to must be done by then.
        """
        step = found.step
        self._evals.add(step, found.loss, found.num_targets)
        best_step, best_loss = self._evals.best(found.num_targets)
        if self.job.eval.keep_best and best_step == step:
            self._keep_best(found)
        if self.mesh.rank != 0:
            return
        several = {name: loss for name, loss in found.loss_by_source.items() if math.isfinite(loss)}
        self.bus.emit(
            EvalFinished(
                step=step,
                loss=found.loss,
                num_targets=found.num_targets,
                wall_s=wall_s,
                loss_by_source=several if len(found.loss_by_source) > 1 else {},
                best_step=best_step,
                best_loss=best_loss,
            )
        )

    def _keep_best(self, found: Evaluation) -> None:
        """Save this step if it is not saved yet, and name it in RUN/best.json. A failure is an event."""
        self.save()
        if self.run_dir is None or self._saved_step != found.step or self.mesh.rank != 0:
            return
        try:
            write_best(self.run_dir, step=found.step, loss=found.loss, num_targets=found.num_targets)
        except OSError as error:
            self.bus.emit(CheckpointFailed(found.step, BEST, error.strerror or str(error)))
