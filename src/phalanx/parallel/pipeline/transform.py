"""pp: each rank keeps the blocks of its stages, and what stands before or after the blocks where it
is needed.

The module stays the user's own, under its own names: blocks of other stages are emptied, parameters
outside the blocks that other stages hold become placeholders, and calls of blocks go through the
`StageForward` of this rank.
"""

from __future__ import annotations

import fnmatch
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from phalanx.core.errors import LayoutError
from phalanx.mesh.blocks import list_last_stage_module_names
from phalanx.mesh.devices import is_cpu
from phalanx.mesh.logical import full_name
from phalanx.parallel.pipeline.p2p import PipelineProcessGroups
from phalanx.parallel.pipeline.placeholder import (
    AbsentParameterPlaceholder,
    release_tensors_of_absent_block,
)
from phalanx.parallel.pipeline.stage_forward import StageBoundaryReached, StageForward
from phalanx.parallel.pipeline.staged import PipelineOfRank
from phalanx.parallel.pipeline.weight_grads import defer_weight_gradients_of_linears
from phalanx.parallel.protocol import ParallelContext, TransformOrder
from phalanx.plan.pipeline.pipeline_plan import Pipeline
from phalanx.plan.plan import Plan


class PipelineStages:
    order = TransformOrder.PIPELINE

    def is_needed(self, plan: Plan) -> bool:
        return plan.layout.pp > 1

    def apply(self, context: ParallelContext) -> None:
        pipeline, module = context.plan.pipeline, context.root.module
        assert pipeline is not None, "a plan with pp has a pipeline"
        _require_blocks_for_stages(module, context.blocks, pipeline)
        stage_group, stage_forward = (
            _open_pipeline_process_groups(context),
            StageForward(len(context.blocks), pipeline.num_stages),
        )
        stage_forward.can_look = not context.plan.compile
        holding = PipelineParameterPlacement(module, context.blocks, pipeline)
        holding.require_known_parameters_outside_blocks()
        own_rank = stage_group.rank
        holding.require_one_name_per_shared_parameter()
        absent = holding.replace_absent_by_placeholders(
            own_rank, stage_forward, context.mesh.device
        )
        stage_forward.outside = holding.list_parameters_outside_blocks()
        rank_names = holding.ranks_by_parameter_of_rank(own_rank)
        holders = {name: ranks for name, ranks in rank_names.items() if len(ranks) > 1}
        stages = {name: holding.stages_holding(name) for name in rank_names}
        context.copies.update(
            {name: (ranks.index(own_rank), len(ranks)) for name, ranks in holders.items()}
        )
        ranges = pipeline.stages.block_ranges
        rank_blocks: list[int] = []
        for stage in pipeline.stages_of_rank(own_rank):
            rank_blocks += range(*ranges[stage])
        blocks = context.blocks
        rank_parts = holding.find_modules_outside_other_blocks(rank_blocks)
        for index, block in enumerate(blocks):
            stage_forward.intercept_block(block, index)
            if index not in rank_blocks:
                release_tensors_of_absent_block(
                    block,
                    holding.get_block_name(index),
                    stage_forward,
                    context.mesh.device,
                    shared=rank_parts,
                )
        context.blocks = [blocks[index] for index in rank_blocks]
        if (
            any(action.kind == "W" for action in pipeline.schedule().actions[own_rank])
            and not context.plan.compile
        ):
            defer_weight_gradients_of_linears(module)
        context.root.forward = functools.partial(  # type: ignore[method-assign]
            _run_forward_to_stage_boundary, stage_forward, context.root.forward
        )
        context.traffic.count_axis_by_sender("pp", stage_group)
        context.axes.add(
            PipelineOfRank(pipeline, stage_group, stage_forward, holders, stages, absent)
        )


def _run_forward_to_stage_boundary(
    stage_forward: StageForward, forward: Callable[..., Any], args: Any, kwargs: Any, then: Any
) -> Any:
    """Run a stage's forward, which ends where the next one goes on; data parallelism wraps this
    call."""
    try:
        output = forward(args, kwargs, then)
    except StageBoundaryReached as end:
        # FSDP registers no hook on a view.
        if end.hidden._base is None:
            return end.hidden
        return end.hidden.clone()
    stage_forward.require_all_blocks_called()
    return output


def _open_pipeline_process_groups(context: ParallelContext) -> PipelineProcessGroups:
    mesh = context.mesh.submesh("pp")
    group = mesh.get_group()
    up = group
    # Over NCCL the two ways of a pair would wait for each other in one group.
    if not is_cpu(context.mesh.device):
        up = context.mesh.open_second_group("pp")
    return PipelineProcessGroups(
        mesh.get_local_rank(),
        tuple(dist.get_process_group_ranks(group)),
        group,
        up,
        context.mesh.device,
    )


def _require_blocks_for_stages(
    module: nn.Module, blocks: Sequence[nn.Module], pipeline: Pipeline
) -> None:
    num_planned = sum(pipeline.stages.num_blocks)
    if len(blocks) < 2 or len(blocks) != num_planned:
        if len(blocks) < 2:
            why = "shows no repeated blocks"
        else:
            why = f"has {len(blocks)} blocks, {num_planned} were planned"
        raise LayoutError(
            f"{type(module).__name__} cannot be cut into {pipeline.num_stages} stages: it {why}",
            fix=(
                "keep blocks of one class in an nn.ModuleList, or name them: block_pattern ="
                ' "layers.*"'
            ),
        )


class PipelineParameterPlacement:
    """Finds which ranks of a pipeline hold which parameters of a module that is still whole."""

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module], pipeline: Pipeline) -> None:
        self._module, self._pipeline = module, pipeline
        prefixes = {id(block): full_name(name) for name, block in module.named_modules()}
        # With a dot at the end: layers.1 is no prefix of layers.10.
        self._block_of = {f"{prefixes[id(block)]}.": index for index, block in enumerate(blocks)}
        self._stage_of_block = [
            pipeline.stages.stage_of_block(index) for index in range(len(blocks))
        ]
        self._names = {full_name(name) for name, _ in module.named_modules()} - {""}
        parameters = [
            (full_name(name), p) for name, p in module.named_parameters(remove_duplicate=False)
        ]
        # By the parameter's identity: a tied one has several names.
        self._stages: dict[int, set[int]] = {}
        self._by_name: dict[str, nn.Parameter] = dict(parameters)
        after = False
        # In the order of registration, which says what comes before the blocks and what after.
        for name, parameter in parameters:
            block = self.find_block_index(name)
            after = after or block is not None
            self._stages.setdefault(id(parameter), set()).update(
                self._find_stages_of_parameter(name, block, after)
            )

    def find_block_index(self, name: str) -> int | None:
        return next(
            (index for prefix, index in self._block_of.items() if name.startswith(prefix)), None
        )

    def find_modules_outside_other_blocks(self, blocks: Sequence[int]) -> frozenset[nn.Module]:
        """All modules outside the blocks, and those inside of `blocks`: another block may have
        one of them, too."""
        owners = {None, *blocks}
        parts = []
        for name, part in self._module.named_modules(remove_duplicate=False):
            if self.find_block_index(f"{full_name(name)}.") in owners:
                parts.append(part)
        return frozenset(parts)

    def get_block_name(self, index: int) -> str:
        return next(prefix[:-1] for prefix, number in self._block_of.items() if number == index)

    def _find_stages_of_parameter(self, name: str, block: int | None, after: bool) -> set[int]:
        last = self._pipeline.num_stages - 1
        if block is not None:
            return {self._stage_of_block[block]}
        stages = {last if after else 0}
        wishes = (
            (0, self._pipeline.first_stage),
            (last, (*self._pipeline.last_stage, *list_last_stage_module_names(self._module))),
        )
        for stage, patterns in wishes:
            if any(_is_module_or_inside(name, pattern) for pattern in patterns):
                stages.add(stage)
        return stages

    def require_known_parameters_outside_blocks(self) -> None:
        """Raises LayoutError for names that nothing has, and for what a placeholder cannot
        replace."""
        wished = {
            "parallel.first_stage": self._pipeline.first_stage,
            "parallel.last_stage": self._pipeline.last_stage,
        }
        for key, patterns in wished.items():
            for pattern in patterns:
                if not any(
                    _is_module_or_inside(name, pattern) for name in (*self._names, *self._by_name)
                ):
                    raise LayoutError(f"{key}: the model has no {pattern!r}")
        for name, part in self._module.named_modules():
            if (
                isinstance(part, _BatchNorm)
                and self.find_block_index(f"{full_name(name)}.") is None
            ):
                raise LayoutError(
                    f"{full_name(name)} is a BatchNorm outside the blocks, whose statistics one"
                    " stage would have",
                    fix="move it into a block, or do without parallel.pp",
                )

    def stages_holding(self, name: str) -> tuple[int, ...]:
        """Stages that hold a parameter, in ascending order."""
        return tuple(sorted(self._stages[id(self._by_name[name])]))

    def ranks_holding(self, name: str) -> tuple[int, ...]:
        """Ranks of the pipeline that hold a parameter, in ascending order."""
        return tuple(
            sorted({self._pipeline.rank_of_stage[stage] for stage in self.stages_holding(name)})
        )

    def require_one_name_per_shared_parameter(self) -> None:
        """Raises LayoutError for a parameter that two ranks would have under different names: in
        blocks of both."""
        names: dict[int, list[str]] = {}
        for name, parameter in self._by_name.items():
            names.setdefault(id(parameter), []).append(name)
        for stored, *duplicates in names.values():
            if self.find_block_index(stored) is not None and len(self.ranks_holding(stored)) > 1:
                raise LayoutError(
                    f"{stored} and {duplicates[0]} are one parameter, and stages of different ranks"
                    " would each have it",
                    fix=(
                        "set parallel.stage_blocks so that one stage has both, or give each its own"
                    ),
                )

    def list_parameters_outside_blocks(self) -> tuple[tuple[nn.Module, str], ...]:
        """Modules and keys of the parameters outside the blocks, of those that are still there."""
        outside = []
        for prefix, part in self._module.named_modules():
            if self.find_block_index(f"{full_name(prefix)}.") is not None:
                continue
            for key, parameter in part._parameters.items():
                if parameter is not None:
                    outside.append((part, key))
        return tuple(outside)

    def ranks_by_parameter_of_rank(self, rank: int) -> dict[str, tuple[int, ...]]:
        """The holders of what `rank` has."""
        holders = {}
        for name in self._by_name:
            ranks = self.ranks_holding(name)
            if rank in ranks:
                holders[name] = ranks
        return holders

    def replace_absent_by_placeholders(
        self, rank: int, stage_forward: StageForward, device: Any
    ) -> frozenset[str]:
        """Put placeholders where `rank` does not hold a parameter outside the blocks; names of
        modules that have some."""
        stripped: Counter[str] = Counter()
        for prefix, part in self._module.named_modules():
            owner = full_name(prefix)
            if self.find_block_index(f"{owner}.") is not None:
                continue
            for key, parameter in list(part._parameters.items()):
                name = f"{owner}.{key}" if owner else key
                if parameter is None or rank in self.ranks_holding(name):
                    continue
                del part._parameters[key]
                setattr(
                    part,
                    key,
                    AbsentParameterPlaceholder.create_for_parameter(
                        parameter.detach(), name, stage_forward, device
                    ),
                )
                stripped[owner] += 1
            # A checkpoint takes buffers from the first stage alone.
            if rank != self._pipeline.rank_of_stage[0]:
                part._non_persistent_buffers_set.update(part._buffers)
        return frozenset(stripped)


def _is_module_or_inside(name: str, pattern: str) -> bool:
    """True for the thing itself, and for what is inside of it."""
    parts = name.split(".")
    return any(
        fnmatch.fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1)
    )


parallelism = PipelineStages()
