"""Runs a layout: builds its module, trains it, compares it with a trace and gathers every rank's
observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch

from phalanx.core.block_sizes import BlockSizes, use_block_sizes
from phalanx.job.schema import Job
from phalanx.mesh.mesh import Mesh
from phalanx.mesh.recorded_init import get_initial_values_of_module
from phalanx.nn.build import build_objective
from phalanx.optim.build import build_optimizer
from phalanx.parallel.executor import Batch
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.plan import Plan
from phalanx.run.one_process.original_module import build_original_module
from phalanx.verify.begin import replace_learning_rate
from phalanx.verify.compare_steps import RankObservations, train_beside_reference
from phalanx.verify.number_types import parameter_dtype_of_row
from phalanx.verify.outputs import LayoutOutputs
from phalanx.verify.plain.training import PLAIN_OPTIMIZERS, OptimizerDefinition
from phalanx.verify.reduction_types import (
    ReductionTypes,
    RotaryTableTypes,
    watching_reduction_types,
)
from phalanx.verify.routes import LayoutRouting, read_expert_choices
from phalanx.verify.row_gradients import (
    BatchPart,
    FirstWrongGradients,
    are_gradients_sums_over_rows,
    fit_part_counts,
    write_part_gradients_or_none,
)
from phalanx.verify.trace_facts import TOLERANCE_OF_DTYPE, Trace
from phalanx.verify.trainer_reference import make_optimizer_definition


@dataclass
class LayoutResult:
    """The result of one layout: `observations` of each rank, and `apart`, the errors by design.

    `watch`: this rank's routers; `choices`: those of all ranks, in the form of `verify.routes`.
    `is_filled_in_parts`: the user's module was built without memory, and each rank has filled its
    parts. `has_rotary_tables`: the types of these were looked at.
    """

    observations: list[Any]
    apart: dict[str, float]
    notes: tuple[str, ...]
    watch: LayoutRouting
    choices: dict[str, torch.Tensor] = field(default_factory=dict)
    is_filled_in_parts: bool = False
    has_rotary_tables: bool = False


@dataclass
class LayoutRun:
    """One layout of a job."""

    job: Job
    plan: Plan
    _model: ParallelModel | None = None
    _is_filled_in_parts: bool = False

    @property
    def has_unfinished_schedule(self) -> bool:
        pipeline = None if self._model is None else self._model.pipeline
        return pipeline is not None and pipeline.is_under_way

    def run(
        self,
        trace: Trace,
        steps: Sequence[Sequence[Batch]],
        mesh: Mesh,
        whole_steps: Sequence[Sequence[Batch]],
    ) -> LayoutResult:
        """Train `steps`, this rank's microbatches of each of `whole_steps`. Collective."""
        objective, watch = build_objective(self.job), LayoutRouting()
        model, notes = self._build_parallel_model(trace, mesh)
        watch.attach(model)
        outputs = LayoutOutputs(model)
        tables = RotaryTableTypes(model.module, self.plan, trace.dtype)
        first_wrong = FirstWrongGradients()
        with watching_reduction_types(self.plan, mesh, trace.dtype) as reductions:
            reductions.watch_written_gradients(model)
            observations = train_beside_reference(
                model,
                objective,
                steps,
                trace,
                lambda lr: self._build_watched_optimizer(model, lr, reductions),
                rule=self._find_optimizer_definition(),
                seed=self.job.run.seed,
                first_wrong=first_wrong,
            )
        # Observations go in one chunk: else what loses a chunk of a tensor would garble them, too.
        with use_block_sizes(BlockSizes()):
            types = {
                "narrow_reductions": reductions.narrow,
                "narrow_tables": tables.narrow,
                "has_rotary_tables": tables.is_judged,
            }
            result = self._gather_result(
                trace, mesh, observations, types, outputs, watch, notes, whole_steps
            )
            self._count_parts_of_wrong_gradients(result, first_wrong, trace, mesh, whole_steps)
            return result

    def _find_optimizer_definition(self) -> OptimizerDefinition | None:
        """None for an optimizer of the user's own."""
        if self.job.optim.kind not in PLAIN_OPTIMIZERS:
            return None
        return make_optimizer_definition(self.job.optim)

    def _build_watched_optimizer(
        self, model: ParallelModel, lr: float, reductions: ReductionTypes
    ) -> torch.optim.Optimizer:
        optimizer = build_optimizer(model, replace_learning_rate(self.job.optim, lr))
        optimizer.register_step_post_hook(reductions.count_update)
        return optimizer

    def _gather_result(
        self,
        trace: Trace,
        mesh: Mesh,
        observations: RankObservations,
        types: Mapping[str, Any],
        outputs: LayoutOutputs,
        watch: LayoutRouting,
        notes: tuple[str, ...],
        whole_steps: Sequence[Sequence[Batch]],
    ) -> LayoutResult:
        own_observations = {
            **observations.to_json(),
            **types,
            "is_filled_in_parts": self._is_filled_in_parts,
        }
        all_observations = mesh.gather_json(own_observations)
        tolerance = TOLERANCE_OF_DTYPE[parameter_dtype_of_row(trace.dtype)]
        # Where a forward begins to go wrong is asked of a loss that is off: it takes as long as a
        # step. All ranks have the same observations.
        if _is_any_loss_off(all_observations, trace, tolerance):
            _observe_wrong_outputs(
                all_observations, outputs, trace, mesh, tolerance, whole_steps[0]
            )
        return LayoutResult(
            all_observations,
            observations.apart,
            notes,
            watch,
            watch.gather(read_expert_choices(trace.directory)),
            is_filled_in_parts=self._is_filled_in_parts,
            has_rotary_tables=any(observed["has_rotary_tables"] for observed in all_observations),
        )

    def _count_parts_of_wrong_gradients(
        self,
        result: LayoutResult,
        first_wrong: FirstWrongGradients,
        trace: Trace,
        mesh: Mesh,
        whole_steps: Sequence[Sequence[Batch]],
    ) -> None:
        """Add to the observations how many times each part of the batch counts in gradients that
        are off, in the first step in which some are: asked of these alone, for it takes as long as
        a few steps. Collective."""
        steps = [step for step in mesh.gather_json(first_wrong.step) if step >= 0]
        if not steps:
            return
        step = min(steps)
        if not are_gradients_sums_over_rows(self.plan, trace):
            return
        parts: list[BatchPart] | None = None
        if mesh.rank == 0:
            parts = write_part_gradients_or_none(
                self.job, self.plan, trace, step, whole_steps[step]
            )
        bodies = mesh.gather_json(parts and [astuple(part) for part in parts])[0]
        if bodies is None:
            return
        counts = fit_part_counts(first_wrong, self.plan, trace, step)
        body_of_rank = {"step": step, "is_off": first_wrong.step == step, "counts": counts}
        num_rows = len(next(iter(whole_steps[step][0].values())))
        for observed, body in zip(result.observations, mesh.gather_json(body_of_rank), strict=True):
            observed["part_counts"] = {
                **body,
                "parts": bodies,
                "rows_of_rank": max(1, num_rows // self.plan.layout.data_parallel_size),
            }

    def _build_parallel_model(
        self, trace: Trace, mesh: Mesh
    ) -> tuple[ParallelModel, tuple[str, ...]]:
        module, notes = build_original_module(
            self.job, self.plan, parameter_dtype_of_row(trace.dtype), materialize=False
        )
        self._is_filled_in_parts = get_initial_values_of_module(module) is not None
        self._model = parallelize(module, self.plan, mesh, seed=self.job.run.seed)
        return self._model, notes


def _observe_wrong_outputs(
    all_observations: Sequence[dict[str, Any]],
    outputs: LayoutOutputs,
    trace: Trace,
    mesh: Mesh,
    tolerance: float,
    first_step: Sequence[Batch],
) -> None:
    """Add to the observations of each rank where its forwards begin to go wrong, and of the first
    step which tokens do there. Collective."""
    firsts = outputs.find_first_wrong_output(trace.directory, tolerance)
    other_microbatch = outputs.find_other_microbatch(trace.directory, tolerance)
    findings = (firsts, outputs.num_compared, other_microbatch)
    for observed, gathered in zip(all_observations, mesh.gather_json(findings), strict=True):
        observed["outputs"], observed["num_outputs"], observed["other_microbatch"] = gathered
    places = [
        output[1]
        for observed in all_observations
        for output in observed["outputs"]
        if output[0] == 0
    ]
    if not places:
        return
    documents = [batch["document_ids"] for batch in first_step if "document_ids" in batch]
    wrong_tokens = outputs.sort_wrong_tokens(
        trace.directory, min(places), tolerance, torch.cat(documents) if documents else None
    )
    bodies = mesh.gather_json(wrong_tokens and wrong_tokens.to_json())
    for observed, body in zip(all_observations, bodies, strict=True):
        observed["wrong_tokens"] = body


def _is_any_loss_off(
    observations: Sequence[Mapping[str, Any]], trace: Trace, tolerance: float
) -> bool:
    """True if the loss of a step on some rank is further than `tolerance` from the reference's."""
    for observed in observations:
        for loss, step in zip(observed["losses"], trace.steps, strict=True):
            # Not `>`: NaN is above any.
            if not abs(loss - step.loss) <= tolerance * abs(step.loss):
                return True
    return False
