"""What stands in a dry run for the few functions of the program that talk to other ranks to learn
something, or read numbers to go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx.core.errors import LayoutError, PhalanxError
from phalanx.mesh import grouped
from phalanx.mesh.tensor_group import TensorParallelGroup
from phalanx.parallel import parallelize as parallelizing
from phalanx.parallel.data_parallel.compression import GradientCompression
from phalanx.parallel.data_parallel.own_rows import OwnRowsReduction
from phalanx.parallel.expert import transform as expert_parallel
from phalanx.parallel.pipeline import executor as pipelining
from phalanx.parallel.pipeline.p2p import PipelineProcessGroups, TensorSpec
from phalanx.parallel.pipeline.shape_inference import Compute
from phalanx.verify.dry_run.tracker import StorageTracker


@dataclass
class StageBoundarySpec:
    """The form of what stages of a pipeline hand on, which the first stage knows.

    `num_tokens`: T of the whole sequences, where tensor parallelism has cut them.
    """

    spec: TensorSpec | None = None
    num_tokens: int = 0

    def to_json(self) -> dict[str, Any] | None:
        if self.spec is None:
            return None
        dtype = str(self.spec.dtype).removeprefix("torch.")
        return {"shape": list(self.spec.shape), "dtype": dtype, "num_tokens": self.num_tokens}

    @classmethod
    def from_json(cls, body: Mapping[str, Any] | None) -> StageBoundarySpec:
        if body is None:
            return cls()
        spec = TensorSpec(tuple(body["shape"]), getattr(torch, body["dtype"]))
        return cls(spec, body["num_tokens"])


@contextlib.contextmanager
def standing_in_for_other_ranks(
    boundary: StageBoundarySpec, tracker: StorageTracker
) -> Iterator[None]:
    """Inside, the program goes on without other ranks and without numbers.

    `boundary` is learned from the first stage, and known to the others.
    """

    def infer_stage_input_specs(
        module: nn.Module,
        stage_group: PipelineProcessGroups,
        rank_of_stage: tuple[int, ...],
        compute: Compute,
        group: TensorParallelGroup | None = None,
    ) -> dict[int, TensorSpec]:
        """The same form for all stages, learned by this rank where it has the first one."""
        if rank_of_stage[0] == stage_group.rank:
            # Before a first step, and of no other one: what it says is not the step's.
            with torch.no_grad(), tracker.ignoring_collectives():
                hidden = compute(0, None)
            boundary.spec = TensorSpec(tuple(hidden.shape), hidden.dtype)
            boundary.num_tokens = 0 if group is None else group.num_tokens
        if boundary.spec is None:
            raise LayoutError(
                "the form of what stages hand on is known after the first stage's run"
            )
        if group is not None:
            group.num_tokens = boundary.num_tokens
        return dict.fromkeys(range(1, len(rank_of_stage)), boundary.spec)

    replaced = (
        (pipelining, "infer_stage_input_specs", infer_stage_input_specs),
        (parallelizing, "raise_first_refusal_on_all_ranks", _raise_refusal_of_own_stage),
        (GradientCompression, "attach_to_ddp", _leave_ddp_without_hook),
        (OwnRowsReduction, "attach_to_ddp", _leave_ddp_without_hook),
        (grouped, "read_rows_per_expert", build_even_expert_counts),
        (expert_parallel, "read_sent_and_arriving_counts", build_even_exchange_counts),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in replaced:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, stand_in)
        yield


def _leave_ddp_without_hook(
    reduction: GradientCompression | OwnRowsReduction, ddp: nn.Module
) -> None:
    """What reduces instead is `ddp_buckets.DdpBucketReductions`."""


def _raise_refusal_of_own_stage(
    stage_group: PipelineProcessGroups, refusal: PhalanxError | None
) -> None:
    if refusal is not None:
        raise refusal


def build_even_expert_counts(counts_E: torch.Tensor, num_rows: int) -> list[int]:
    """Counts of experts that are busy alike, for `read_rows_per_expert`."""
    return grouped.split_rows_evenly_over_experts(num_rows, len(counts_E))


def build_even_exchange_counts(
    counts_PE: torch.Tensor, arrived_PE: torch.Tensor, num_rows: int, rank: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Counts where every rank sends to all experts alike, for `read_sent_and_arriving_counts`."""
    num_ranks, per_rank = counts_PE.shape
    counts = grouped.split_rows_evenly_over_experts(num_rows, num_ranks * per_rank)
    sent = [counts[start : start + per_rank] for start in range(0, len(counts), per_rank)]
    return sent, [sent[rank]] * num_ranks
