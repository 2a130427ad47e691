"""What must hold in any training, checked while it trains and told as events; training goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from phalanx.core.phases import WORLD_AXIS
from phalanx.core.roll_back import UnequalSteps
from phalanx.core.units import plural
from phalanx.job.schema import Job
from phalanx.observe.bus import Bus
from phalanx.observe.events import InvariantChecked, ReplicasReplayed
from phalanx.parallel.executor import Batch, Objective
from phalanx.parallel.step_stats import LocalLoss, StepStats
from phalanx.train.corruption import NO_MAJORITY
from phalanx.train.count_checks import (
    count_targets_and_tokens,
    find_router_load_mismatches,
    is_rank_counting_its_samples,
    map_routers_by_name,
)
from phalanx.train.evaluation_checks import EvaluationChecks
from phalanx.train.invariant_tallies import MAX_NAMED_PARAMETERS, InvariantTallies
from phalanx.train.memory_checks import MemoryChecks
from phalanx.train.pipeline_record import is_first_rank_of_stage
from phalanx.train.state import TrainState
from phalanx.train.step_replay import (
    OwnLosses,
    digest_rank_weights,
    find_wrong_rank,
    gather_unequal_steps,
)
from phalanx.train.weight_blocks import HeldBlocks
from phalanx.train.weight_checks import WeightChecks, WeightFindings

NUM_BATCH_COUNT_FLAGS = 2
"""Numbers that `RunInvariants.count_batch_for_reduction` adds to the flags of a step."""


class RunInvariants:
    """Checks the steps of `state` as observe.invariants_every says, and emits what it finds.

    Inactive before `start`, and with 0. `unequal`: steps in which replicas came to differ in the
    attempt before, compared when they are done again.
    """

    def __init__(
        self,
        job: Job,
        state: TrainState,
        bus: Bus,
        objective: Objective,
        unequal: UnequalSteps | None = None,
    ) -> None:
        self._job, self._state, self._bus, self._objective = job, state, bus, objective
        self._mesh = state.model.mesh
        self._tallies = InvariantTallies(bus)
        self._routers = map_routers_by_name(state.model.module)
        self._weights: WeightChecks | None = None
        self._check_interval, self._last_step = job.observe.invariants_every, job.train.steps
        self._counts_batch = is_rank_counting_its_samples(self._mesh)
        self._is_leader = is_first_rank_of_stage(self._mesh)
        self._first_step = 0
        self._counts = (math.nan, math.nan)
        self._summarized_step = 0
        # The last step in which replicas were found equal, and what was found since.
        self._equal_step = -1
        self._corruption_flags = (0.0, 0.0)
        self._memory: MemoryChecks | None = None
        self._num_memory_failures = 0
        self._evaluations: EvaluationChecks | None = None
        # A check is acted on two steps after it.
        self._own_losses = OwnLosses(job.observe.invariants_every + 4)
        # On rank 0: the step of the last check that found replicas unequal, and ranks' digests.
        self._found_unequal: tuple[int, list[str]] | None = None
        self._before = unequal
        self._losses_again: tuple[tuple[float, ...], ...] = ((),) * self._mesh.world_size

    def start(self) -> None:
        """Begin with the next step. Collective."""
        if self._check_interval:
            self._first_step = self._state.step + 1
            self._weights = WeightChecks(self._state.model, self._state.optimizer)
            self._evaluations = EvaluationChecks(self._state.model)
        if self._job.resilience.check_memory_every:
            self._memory = MemoryChecks(self._state)

    def hold_own_loss(self, step: int, sums: LocalLoss) -> None:
        """Keep the loss of this rank's own samples of `step`, for `gather_unequal_steps`."""
        if self._weights is not None:
            self._own_losses.add(step, sums.loss_sum)

    def gather_unequal_steps(self, equal_step: int) -> UnequalSteps:
        """What all ranks computed since `equal_step`, up to the check that found replicas unequal.
        Collective."""
        return gather_unequal_steps(
            self._state.model, self._own_losses, equal_step, self._found_unequal
        )

    def count_batch_for_reduction(self, microbatches: Sequence[Batch]) -> tuple[float, ...]:
        """Numbers of this rank's part of the batch, for the reduction of the step:
        NUM_BATCH_COUNT_FLAGS of them, or none."""
        if self._weights is None:
            return ()
        if not self._counts_batch:
            return 0.0, 0.0
        return count_targets_and_tokens(microbatches, self._objective)

    def remove_counts_from_flags(self, facts: StepStats) -> StepStats:
        """`facts` without what `count` has added to the flags."""
        if self._weights is None:
            return facts
        num_targets, num_tokens = facts.flags[-NUM_BATCH_COUNT_FLAGS:]
        self._counts = num_targets, num_tokens
        return replace(facts, flags=facts.flags[:-NUM_BATCH_COUNT_FLAGS])

    def build_corruption_flags(self) -> tuple[float, ...]:
        """Numbers on corruption for the reduction of the step: NUM_CORRUPTION_FLAGS of them, zeros
        where nothing was found.

        Rank 0 tells of replicas that were equal and are so no longer; each rank of its own memory,
        if that has changed since the last update.
        """
        flags, self._corruption_flags = self._corruption_flags, (0.0, 0.0)
        return *flags, *self._check_own_memory()

    def _check_own_memory(self) -> tuple[float, float]:
        if self._memory is None:
            return 0.0, 0.0
        changed = self._memory.find_changed_tensors()
        if not changed:
            return 0.0, 0.0
        rank = self._mesh.rank
        self._num_memory_failures += 1
        self._bus.emit(
            InvariantChecked(
                step=self._memory.digested_step,
                name="memory_unchanged",
                ok=False,
                num_failed=self._num_memory_failures,
                num_tensors=len(changed),
                tensors=changed[:MAX_NAMED_PARAMETERS],
                ranks=[rank],
                looked_at="parameters and the optimizer's state of this rank between two updates",
            )
        )
        return 1.0, float(rank)

    def digest_before_update(self) -> None:
        """Before the update of the next step."""
        if self._weights is not None and self._is_check_due(self._state.step + 1):
            self._weights.digest_before_update()

    def finish_step(self, facts: StepStats) -> None:
        """After a step that is done, applied or not. Collective."""
        if self._memory is not None:
            interval = self._job.resilience.check_memory_every
            if self._state.step % interval == 0:
                with self._state.model.phases("record"):
                    self._memory.digest_after_step()
        if self._weights is None:
            return
        step = self._state.step
        # Of an earlier step: the reduction of this one has waited for the device.
        self._check_and_record_weights(self._weights.take_weight_findings())
        if self._is_check_due(step):
            with self._state.model.phases("optimizer"):
                self._weights.finish_step(step)
                if self._before is not None and step == self._before.last_step:
                    self._gather_losses_again(self._before)
        self._check_and_record_target_counts(step, facts)
        self._check_and_record_router_loads(step)

    def begin_evaluation(self) -> None:
        """Before an evaluation between two steps."""
        if self._evaluations is not None:
            with self._state.model.phases("evaluate"):
                self._evaluations.digest_before_evaluation()

    def finish_evaluation(self) -> None:
        """After an evaluation that came to its end. Collective; waits for the device."""
        if self._evaluations is None:
            return
        phases = self._state.model.phases
        with phases("evaluate"):
            changed = self._evaluations.find_changed_weights()
            with phases("collective", "all_gather changed weights", axis=WORLD_AXIS):
                by_rank = self._mesh.gather_json(changed)
        if self._mesh.rank != 0:
            return
        ranks = [rank for rank, names in enumerate(by_rank) if names]
        self._tallies.record_and_emit(
            InvariantChecked(
                step=self._state.step,
                name="unchanged_by_evaluation",
                ok=not ranks,
                tensors=list(dict.fromkeys(name for names in by_rank for name in names)),
                ranks=ranks,
                looked_at="the weights that each rank trains"
                f" ({plural(self._evaluations.num_digested, 'tensor')} on rank 0), before and after"
                " an evaluation",
                not_looked_at=self._evaluations.not_looked_at,
            )
        )

    def emit_summary(self) -> None:
        """Emit what was checked so far. Waits for the device."""
        step = self._state.step
        if self._weights is None or step == self._summarized_step:
            return
        self._summarized_step = step
        if self._mesh.device.type == "cuda":
            torch.cuda.current_stream(self._mesh.device).synchronize()
        self._check_and_record_weights(self._weights.take_weight_findings())
        self._tallies.emit_summary()

    def _is_check_due(self, step: int) -> bool:
        return step in (self._first_step, self._last_step) or step % self._check_interval == 0

    def _check_and_record_weights(self, findings: WeightFindings | None) -> None:
        if findings is None or self._weights is None or self._weights.held is None:
            return
        held, step = self._weights.held, findings.step
        if not findings.unequal.ranks:
            self._equal_step = step
        elif self._equal_step >= 0:
            # Found unequal from the start they were never equal: that is no memory's fault.
            odd = findings.unequal.ranks
            code = 2.0 + odd[0] if len(odd) == 1 else NO_MAJORITY
            self._corruption_flags = (code, float(self._equal_step))
            self._found_unequal = step, digest_rank_weights(findings.digests)
        if self._before is not None and step == self._before.last_step:
            self._emit_replay(self._before, findings)
        self._tallies.record_and_emit(
            InvariantChecked(
                step=step,
                name="replicas_equal",
                ok=not findings.unequal.ranks,
                tensors=findings.unequal.names,
                ranks=findings.unequal.ranks,
                looked_at=_describe_compared_blocks(held),
                not_looked_at=_describe_blocks_not_compared(
                    held, self._weights.state_blocks.incomparable
                ),
            )
        )
        foreign = sum(findings.num_foreign.values())
        missing, removed, replaced = findings.missing, findings.removed, findings.replaced
        ranks = sorted({*missing.ranks, *removed.ranks, *replaced.ranks, *findings.num_foreign})
        self._tallies.record_and_emit(
            InvariantChecked(
                step=step,
                name="optimizer_parameters",
                ok=not ranks,
                tensors=[*missing.names, *removed.names, *replaced.names],
                replaced=replaced.names,
                removed=removed.names,
                ranks=ranks,
                expected=0.0,
                actual=float(foreign),
                looked_at=f"{plural(findings.num_trained, 'tensor')} that ask for gradients",
            )
        )
        if not findings.is_applied:
            return
        not_looked_at = []
        num_still = findings.num_trained - findings.num_moving
        if num_still:
            not_looked_at.append(
                f"{plural(num_still, 'tensor')} without a gradient, or with one whose update is"
                " near the rounding of its elements"
            )
        self._tallies.record_and_emit(
            InvariantChecked(
                step=step,
                name="parameters_moved",
                ok=not findings.stuck.ranks,
                tensors=findings.stuck.names,
                ranks=findings.stuck.ranks,
                looked_at=f"{plural(findings.num_moving, 'tensor')} that had to move",
                not_looked_at=not_looked_at,
            )
        )

    def _gather_losses_again(self, before: UnequalSteps) -> None:
        losses = self._own_losses.list_after_step(before.first_step - 1)
        with self._state.model.phases("collective", "all_gather losses of ranks", axis=WORLD_AXIS):
            by_rank = self._mesh.gather_json([loss for _, loss in losses])
        self._losses_again = tuple(map(tuple, by_rank))

    def _emit_replay(self, before: UnequalSteps, findings: WeightFindings) -> None:
        rank, why = -1, "replicas came to differ once more"
        if not findings.unequal.ranks:
            again = replace(
                before,
                losses=self._losses_again,
                digests=tuple(digest_rank_weights(findings.digests)),
            )
            layout = self._mesh.layout
            rank, why = find_wrong_rank(
                before, again, losses_tell=layout.dp_replicate == layout.world_size
            )
        self._bus.emit(ReplicasReplayed(findings.step, rank, why))

    def _check_and_record_target_counts(self, step: int, facts: StepStats) -> None:
        if self._mesh.rank != 0:
            return
        expected = self._counts[0]
        if math.isnan(expected):
            self._tallies.record_not_possible(
                step, "targets_counted", "only the objective knows which of the data are targets"
            )
            return
        looked_at = "targets of the batch, counted in the data, and those of the loss"
        if facts.num_targets == expected:
            # In every step, and so without an event that nobody gets.
            self._tallies.record_passed("targets_counted", step, looked_at)
            return
        self._tallies.record_and_emit(
            InvariantChecked(
                step=step,
                name="targets_counted",
                ok=False,
                expected=expected,
                actual=float(facts.num_targets),
                looked_at=looked_at,
            )
        )

    def _check_and_record_router_loads(self, step: int) -> None:
        if not self._routers or not self._is_leader:
            return
        findings = find_router_load_mismatches(
            self._routers, self._state.model.expert_load, self._counts[1]
        )
        not_looked_at = []
        if findings.uncounted:
            not_looked_at.append(
                f"{plural(len(findings.uncounted), 'router')} that are frozen or say nothing of"
                " experts per token, or a batch that does not tell its tokens"
            )
        if not findings.num_compared:
            self._tallies.record_not_possible(step, "expert_loads", *not_looked_at)
            return
        expected = actual = math.nan
        if findings.wrong:
            expected, actual = findings.expected, findings.actual
        self._tallies.record_and_emit(
            InvariantChecked(
                step=step,
                name="expert_loads",
                ok=not findings.wrong,
                tensors=findings.wrong,
                expected=expected,
                actual=actual,
                looked_at=f"{plural(findings.num_compared, 'router')} of this stage",
                not_looked_at=not_looked_at,
            )
        )


def _describe_compared_blocks(held: HeldBlocks) -> str:
    weights = f"{plural(held.weights.num_shared, 'block')} of weights that several ranks hold"
    if not held.state.num_shared:
        return weights
    return f"{weights}, and the optimizer's state of {held.state.num_shared}"


def _describe_blocks_not_compared(held: HeldBlocks, incomparable_state: Sequence[str]) -> list[str]:
    reasons = []
    weights, state = held.weights, held.state
    num_weights_alone = weights.num_blocks - weights.num_shared
    if num_weights_alone:
        reasons.append(f"{plural(num_weights_alone, 'block')} that one rank alone holds")
    if held.num_state_alone:
        reasons.append(
            f"the optimizer's state of {plural(held.num_state_alone, 'block')}, which one rank"
            " alone holds"
        )
    if incomparable_state:
        reasons.append(
            "state of the optimizer that is no plain tensor of floating-point numbers:"
            f" {', '.join(incomparable_state)}"
        )
    if state.num_left_out:
        reasons.append(
            f"the optimizer's state of {plural(state.num_left_out, 'block')}, which was not equal"
            " when it was compared first"
        )
    return reasons
