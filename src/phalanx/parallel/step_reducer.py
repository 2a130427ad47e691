"""StepReducer: one reduction of a step's sums over all ranks, then the exact norm, and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from phalanx.core.phases import WORLD_AXIS
from phalanx.mesh.transfer import create_fp64_on_device
from phalanx.parallel.block_norms import BlockNormRequest, BlockSquares
from phalanx.parallel.call.check_objective import require_number_of_targets
from phalanx.parallel.expert.router_load import ReducedRouterLoads
from phalanx.parallel.gradients import (
    LocalBlockReplicas,
    collect_gradients_and_sum_squares,
    list_local_blocks_with_replica_counts,
)
from phalanx.parallel.protocol import ParallelContext
from phalanx.parallel.rank_parameters import ParametersOfRank
from phalanx.parallel.step_stats import LocalLoss, StepStats


class StepReducer:
    """Makes a step of what each rank has summed. Collective.

    `finished_at`: mark of `phases.clock` when this rank left the reduction of the last step, as
    all do at about one time.
    """

    def __init__(
        self,
        context: ParallelContext,
        parameters: ParametersOfRank,
        loads: ReducedRouterLoads,
        block_squares: BlockSquares,
    ) -> None:
        self.finished_at: Any = 0.0
        self._context, self._mesh, self._phases = context, context.mesh, context.phases
        self._parameters, self._loads = parameters, loads
        self._block_squares = block_squares
        self._held: dict[str, tuple[LocalBlockReplicas, ...]] | None = None

    def reduce_and_clip(
        self,
        local_loss: LocalLoss,
        *,
        max_norm: float | None,
        flags: Sequence[float],
        by_block: BlockNormRequest,
    ) -> StepStats:
        """Gradients become those of sum(loss) / sum(targets), scaled down to `max_norm`."""
        with self._context.traffic.counting_step_traffic():
            self._context.hooks.run_before_reduce_hooks(
                self._parameters.iterate_optimizer_parameters()
            )
        # Before the step's reduction, beside which its copy to the host goes on.
        self._loads.reduce_counts_over_ranks()
        with self._phases("optimizer"):
            gradients, squares = self._collect_gradients_and_squares()
            vector = torch.stack((*self._zero_unless_tp_leader(local_loss), squares))
            side_numbers = self._collect_numbers_beside_sums(local_loss, flags, by_block)
            vector = torch.cat((vector, *side_numbers))
        with self._phases("collective", "all_reduce step facts", axis=WORLD_AXIS):
            self._mesh.all_reduce_sum(vector)
            loss_sum, num_targets, total_squares, *rest = vector.tolist()
            reduced_flags, losses, gradient_squares, squares = _split_list(
                rest, map(len, side_numbers)
            )
            num_lacking = reduced_flags.pop()
            if local_loss.by_microbatch:
                loss_sum = math.fsum(losses)
            self.finished_at = self._phases.clock.mark()
        stats = replace(self._create_empty_stats(reduced_flags), block_squares=tuple(squares))
        # All ranks raise or return here, or none: they have one sum.
        require_number_of_targets(num_targets)
        if num_targets == 0:
            return stats
        normalizer = self._context.normalizer
        # FSDP and DDP average over data-parallel ranks, which have different numbers of targets:
        # the mean is made a sum again, and that is divided by all targets.
        num_ranks = self._context.plan.layout.gradient_reduction_layout.data_parallel_size
        is_reduced = num_ranks > 1
        if self._context.plan.is_layout_free:
            # Its gradients are a sum already.
            num_ranks = 1
        factor = normalizer.gradient_multiplier(num_targets, num_ranks)
        norm, loss = factor * total_squares**0.5, loss_sum / num_targets
        stats = replace(stats, block_grad_norms=tuple(factor * s**0.5 for s in gradient_squares))
        # x - x is 0 but for NaN and infinities.
        finite = norm - norm == 0.0 and loss - loss == 0.0
        if finite:
            if max_norm is not None and norm > max_norm:
                factor *= max_norm / norm
            # Exactly 1 without loss scaling where no target is masked and nothing is clipped: then
            # no extra pass over the gradients is made. A stage may have none: all of it frozen.
            if factor != 1.0 and gradients:
                with self._phases("optimizer"):
                    torch._foreach_mul_(gradients, factor)
            # So many ranks hold a parameter at least: with fewer, each has a gradient somewhere.
            # One rank alone reduces nothing, and puts no zeros in place of a gradient.
            may_all_lack_one = num_lacking * self._context.plan.layout.pp >= self._mesh.world_size
            if may_all_lack_one and is_reduced:
                self._context.missing_gradients.remove_those_that_all_ranks_lack(
                    self._parameters.iterate_optimizer_parameters(),
                    self._context.optimizer_params,
                    self._mesh,
                    self._phases,
                    copies=self._context.copies,
                )
        stats = replace(
            stats,
            loss=loss,
            num_targets=_count_targets(num_targets),
            grad_norm=norm,
            finite=finite,
        )
        scale = normalizer.loss_scale
        if scale is not None:
            stats = replace(stats, loss_scale=scale.scale, scale_adapts=scale.is_dynamic)
            # Last: the facts above tell the scale with which this step was computed.
            scale.adjust_after_step(finite=finite)
        return stats

    def _collect_numbers_beside_sums(
        self, local_loss: LocalLoss, flags: Sequence[float], by_block: BlockNormRequest
    ) -> list[torch.Tensor]:
        """fp64 vectors that travel with a step's sums, for it has one reduction, and all ranks act
        on the same numbers: flags and, as the last of these, whether this rank lacks gradients;
        losses of microbatches, squares of gradients by block, squares that were asked for."""
        device = self._mesh.device
        gradient_squares = squares = torch.zeros(0, dtype=torch.float64, device=device)
        if by_block.of_gradients:
            gradient_squares = self._block_squares.sum_gradient_squares(device)
        if by_block.squares is not None:
            squares = by_block.squares
        lacks_gradients = float(self._context.missing_gradients.is_any)
        reduced_flags = create_fp64_on_device((*flags, lacks_gradients), device)
        return [reduced_flags, self._spread_losses(local_loss), gradient_squares, squares]

    def reduce_sums(self, local_loss: LocalLoss) -> tuple[float, int]:
        """(loss per target, number of targets) over all ranks."""
        vector = torch.stack(self._zero_unless_tp_leader(local_loss))
        vector = torch.cat((vector, self._spread_losses(local_loss)))
        loss_sum, num_targets, *losses = self._mesh.all_reduce_sum(vector).tolist()
        require_number_of_targets(num_targets)
        if losses:
            loss_sum = math.fsum(losses)
        if not num_targets:
            return float("nan"), 0
        return loss_sum / num_targets, _count_targets(num_targets)

    def _spread_losses(self, local_loss: LocalLoss) -> torch.Tensor:
        """The loss of each microbatch of all ranks, zero for those of the others: added over ranks
        each is exact, and so is `math.fsum` of them, in any order. Empty where their sum may depend
        on the number of ranks."""
        losses = local_loss.by_microbatch
        spread = local_loss.loss_sum.new_zeros(len(losses), self._mesh.world_size)
        if losses:
            spread[:, self._mesh.rank] = torch.stack(losses).double()
        return spread.flatten()

    def _create_empty_stats(self, flags: Sequence[float]) -> StepStats:
        """A step without targets, and what was sent in it."""
        sent = self._context.traffic.take_sent_bytes_by_axis()
        return StepStats(
            loss=0.0,
            num_targets=0,
            grad_norm=0.0,
            finite=True,
            flags=tuple(flags),
            sent_bytes=sent["dp"],
            sent_tp_bytes=sent["tp"],
            sent_cp_bytes=sent["cp"],
            sent_ep_bytes=sent["ep"],
            sent_pp_bytes=sent["pp"],
        )

    def _collect_gradients_and_squares(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """(this rank's gradients, its part of the sum of their squares)."""
        if self._held is None:
            shards = self._parameters.collect_trained_shards()
            self._held = {
                name: list_local_blocks_with_replica_counts(shard) for name, shard in shards.items()
            }
        gradients, squares = collect_gradients_and_sum_squares(
            self._parameters.iterate_optimizer_parameters(), self._held
        )
        if self._context.plan.is_layout_free:
            # All ranks have all gradients. That of one alone is exact after the reduction, too:
            # thirds of it need not be.
            squares = squares * self._mesh.world_size * (self._mesh.rank == 0)
        # Of gradients in host memory the host has the number, and a copy of it costs a kernel.
        if squares.device != self._mesh.device:
            squares = create_fp64_on_device((squares.item(),), self._mesh.device)[0]
        return gradients, squares

    def _zero_unless_tp_leader(self, local_loss: LocalLoss) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums of this rank, zeros unless it leads its tp group: ranks that read the same samples
        have the same sums, and one of them counts."""
        if self._mesh.is_tp_leader:
            return local_loss.loss_sum, local_loss.num_targets
        return torch.zeros_like(local_loss.loss_sum), torch.zeros_like(local_loss.num_targets)


def _count_targets(num_targets: float) -> int:
    """Weights of samples may add up to a fraction: less than one is not none."""
    return max(1, round(num_targets))


def _split_list(values: list[float], lengths: Iterable[int]) -> list[list[float]]:
    """`values` cut into lists of these lengths, which add up to theirs."""
    parts, start = [], 0
    for length in lengths:
        parts.append(values[start : start + length])
        start += length
    return parts
