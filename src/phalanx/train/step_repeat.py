"""A step that is not finite: where it began, and the same step once more where its forwards are
finite when they are computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phalanx.core.errors import NumericsError
from phalanx.observe.bus import Bus
from phalanx.parallel.block_norms import BlockNormRequest
from phalanx.parallel.executor import Batch
from phalanx.parallel.step_stats import LocalLoss, StepStats
from phalanx.train.backward_watch import BackwardWatch
from phalanx.train.corruption import OnCorruption
from phalanx.train.nonfinite import NonFiniteFinder
from phalanx.train.randomness import seed_generators
from phalanx.train.state import TrainState
from phalanx.train.training_data import TrainingData

STILL_NOT_FINITE = "computed again it is not finite either"


class NonFiniteStepRepeater:
    """Says where steps that are not finite began, and repeats those of which neither the batch nor
    the weights need be at fault. `on_corruption` = "stop": the run ends there."""

    def __init__(
        self,
        state: TrainState,
        data: TrainingData,
        bus: Bus,
        *,
        max_norm: float | None,
        on_corruption: OnCorruption,
    ) -> None:
        self._state, self._data, self._bus = state, data, bus
        self._max_norm, self._on_corruption = max_norm, on_corruption
        self._finder = NonFiniteFinder(state, data.objective, data.sample_numbers)

    def find_origin_and_repeat(
        self,
        step: int,
        microbatches: Sequence[Batch],
        sums: LocalLoss,
        facts: StepStats,
        norms: BlockNormRequest,
    ) -> StepStats:
        """Emit where `step` began not to be finite, whose sums on this rank and facts these are,
        and repeat it if its forwards are finite now.

        Returns the facts of the step as it stands, whose gradients are there. Raises NumericsError
        if a step that was repeated is to end the run. Collective.
        """
        origin = self._finder.find(step, microbatches, sums)
        if origin is None:
            return facts
        model = self._state.model
        if origin.origin in ("gradient", "unknown") and not origin.why_not_repeated:
            watch = BackwardWatch(model)
            with watch.watching():
                repeated, sums = self._repeat(step, microbatches, norms)
            # What ranks said in the step's own reduction they have said once.
            facts = replace(repeated, flags=facts.flags)
            origin = replace(origin, was_repeated=facts.finite)
            if not facts.finite:
                origin = self._finder.find_in_backward(origin, watch, sums)
                origin = replace(origin, why_not_repeated=STILL_NOT_FINITE)
        if model.mesh.rank == 0:
            self._bus.emit(origin)
        if origin.was_repeated and self._on_corruption == "stop":
            raise NumericsError(
                f"step {step} was not finite, and computed again it is: something went wrong in a"
                " processor, in memory or on the way, or code of yours computes something else each"
                " time",
                why='resilience.on_corruption = "stop"',
                fix="find the machine at fault; the newest checkpoint may be continued from",
            )
        return facts

    def _repeat(
        self, step: int, microbatches: Sequence[Batch], norms: BlockNormRequest
    ) -> tuple[StepStats, LocalLoss]:
        state = self._state
        state.undo_forward()
        state.optimizer.zero_grad(set_to_none=True)
        seed_generators("step", state.seed, step, state.model.mesh.data_parallel_rank)
        sums = state.model.forward_backward(microbatches, self._data.objective, step=step)
        facts = state.model.reduce_and_clip(sums, max_norm=self._max_norm, by_block=norms)
        return facts, sums
