"""The layer behind synchronised BatchNorm: statistics of all ranks' microbatch, differentiable, on
any device.

torch's own SyncBatchNorm refuses CPU tensors; this is plain tensor code. One all-gather of (mean,
squared deviations, count) per forward and one all-reduce per backward, both in at least fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from phalanx.core.errors import DataError
from phalanx.core.phases import PhaseTimer


@dataclass(frozen=True)
class BatchStatisticsGroup:
    """Whose microbatch the statistics are of: that of all ranks, or this rank's own."""

    phases: PhaseTimer
    all: bool = True
    group: dist.ProcessGroup | None = None

    def gather(self, rank_values: torch.Tensor) -> torch.Tensor:
        """[ranks, *rank_values.shape]"""
        if not self.all:
            return rank_values[None]
        gathered = torch.empty(
            dist.get_world_size(self.group),
            rank_values.numel(),
            dtype=rank_values.dtype,
            device=rank_values.device,
        )
        with self.phases("collective", "all_gather BatchNorm statistics", axis="dp"):
            dist.all_gather_into_tensor(gathered.view(-1), rank_values, group=self.group)
        return gathered

    def sum_over_ranks(self, sums: torch.Tensor) -> None:
        """Add `sums` up over the ranks, in place."""
        if self.all:
            with self.phases("collective", "all_reduce BatchNorm gradients", axis="dp"):
                dist.all_reduce(sums, group=self.group)


@dataclass
class ChannelStatistics:
    """Statistics of one microbatch: [C] per channel, over `count` elements (0-d) in all, in at
    least fp32."""

    mean: torch.Tensor
    var: torch.Tensor
    count: torch.Tensor


@dataclass
class RecordedBatchStatistics:
    """The statistics of a block's forward, in the order of calls: its recomputation takes them from
    here.

    Gathering them again would be right but needless, and the running ones must move once.
    """

    played: list[ChannelStatistics] = field(default_factory=list)
    replay_at: int | None = None
    """Where the recomputation stands; None while the forward records."""

    def take_next_statistics(self) -> ChannelStatistics | None:
        if self.replay_at is None:
            return None
        self.replay_at += 1
        return self.played[self.replay_at - 1]


class SynchronisedBatchNorm(_BatchNorm):
    """Stands between a module's own class and torch's `_BatchNorm`: the user's forward still
    comes first."""

    _ranks: BatchStatisticsGroup
    _tape: RecordedBatchStatistics | None = None
    _was_called = False

    @torch.compiler.disable
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._was_called = True
        self._check_input_dim(input)
        # FSDP may have cast weights to bf16, and torch's kernel takes no mixture with fp32
        # statistics.
        weight, bias = (
            None if p is None else p.to(_promote_dtype_to_fp32(input))
            for p in (self.weight, self.bias)
        )
        tracks = self.running_mean is not None and self.running_var is not None
        if not self.training and tracks:
            mean, var = cast(torch.Tensor, self.running_mean), cast(torch.Tensor, self.running_var)
            mean, var = (
                mean.to(_promote_dtype_to_fp32(input)),
                var.to(_promote_dtype_to_fp32(input)),
            )
            return F.batch_norm(input, mean, var, weight, bias, False, 0.0, self.eps)
        recorded = self._tape.take_next_statistics() if self._tape is not None else None
        if recorded is None:
            recorded = _combine_statistics_of_ranks(input.detach(), self._ranks)
            if self._tape is not None:
                self._tape.played.append(recorded)
            if self.training and self.track_running_stats and tracks:
                self._update_running_statistics(recorded)
        output: torch.Tensor = _NormaliseWithGivenStatistics.apply(
            input, weight, bias, recorded, self.eps, self._ranks
        )
        return output

    @torch.no_grad()
    def _update_running_statistics(self, statistics: ChannelStatistics) -> None:
        """Move the running statistics, with the unbiased variance, as torch does; momentum None
        averages over all."""
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(self.num_batches_tracked)
        # `_combine_statistics_of_ranks` has refused a count of 1.
        unbiased = statistics.var * (statistics.count / (statistics.count - 1))
        for running, now in ((self.running_mean, statistics.mean), (self.running_var, unbiased)):
            assert running is not None
            running.mul_(1 - (factor or 0.0)).add_((factor or 0.0) * now.to(running.dtype))


class AnyDimensionsBatchNorm(SynchronisedBatchNorm):
    """A BatchNorm that takes [N, C, ...] of any kind, as torch's SyncBatchNorm does."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.ndim}")


def _promote_dtype_to_fp32(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def find_buffers_that_differ_between_ranks(module: nn.Module) -> list[torch.Tensor]:
    """Buffers that may come to differ between ranks: all but those of synchronised BatchNorms, and
    of modules that say `buffers_are_alike`."""
    norms = [
        part
        for part in module.modules()
        if isinstance(part, SynchronisedBatchNorm) and part._ranks.all
    ]
    alike = [part for part in module.modules() if getattr(part, "buffers_are_alike", False)]
    same = {id(buffer) for part in (*norms, *alike) for buffer in part.buffers()}
    return [buffer for buffer in module.buffers() if id(buffer) not in same]


def _list_non_channel_dims(tensor: torch.Tensor) -> list[int]:
    return [dim for dim in range(tensor.ndim) if dim != 1]


def _reshape_to_broadcast_over_channels(
    per_channel: torch.Tensor, like: torch.Tensor
) -> torch.Tensor:
    """[C] to [1, C, 1, ...]."""
    return per_channel.view(1, -1, *(1,) * (like.ndim - 2))


@torch.no_grad()
def _combine_statistics_of_ranks(
    input: torch.Tensor, ranks: BatchStatisticsGroup
) -> ChannelStatistics:
    """Mean and variance over all ranks, from each rank's own (Chan et al. 1983), the same bits
    on every rank."""
    channels, count = input.shape[1], input.numel() // max(1, input.shape[1])
    # Squared deviations from each rank's own mean: sums of squares would cancel where the mean is
    # large beside the spread. Mean, deviations and count in one message; a rank without rows sends
    # zeros.
    rank_sums = torch.zeros(
        2 * channels + 1, dtype=_promote_dtype_to_fp32(input), device=input.device
    )
    if count:
        var, mean = torch.var_mean(
            input.to(_promote_dtype_to_fp32(input)), dim=_list_non_channel_dims(input), correction=0
        )
        rank_sums[:channels], rank_sums[channels:-1], rank_sums[-1] = mean, var * count, count
    all_sums = ranks.gather(rank_sums)
    means, squares, counts = all_sums[:, :channels], all_sums[:, channels:-1], all_sums[:, -1:]
    total = counts.sum()
    # Asked only where it can be so: reading a number back stops a GPU.
    if count <= 1 and total <= 1:
        raise DataError(
            f"BatchNorm needs more than 1 value per channel in training, and "
            f"{'all ranks together have' if ranks.all else 'a rank has'} {int(total)}",
            fix="use a larger train.micro_batch_size",
        )
    # Every rank adds the same rows in the same order, and so gets the same bits.
    mean = (means * counts).sum(0) / total
    var = (squares + counts * (means - mean).square()).sum(0) / total
    return ChannelStatistics(mean, var, total)


class _NormaliseWithGivenStatistics(torch.autograd.Function):
    """(input - mean) / sqrt(var + eps) x weight + bias, where mean and var are functions of
    every rank's input."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        statistics: ChannelStatistics,
        eps: float,
        ranks: BatchStatisticsGroup,
    ) -> torch.Tensor:
        ctx.ranks, ctx.has_bias = ranks, bias is not None
        scale = torch.rsqrt(statistics.var + eps)
        ctx.save_for_backward(input, weight, statistics.mean, scale, statistics.count)
        return F.batch_norm(input, statistics.mean, statistics.var, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:  # type: ignore[override]
        """With x^ the normalised input and <> the mean over all ranks: dx = (dy - <dy> - x^ <dy
        x^>) weight / std."""
        input, weight, mean, scale, count = ctx.saved_tensors
        wide = mean.dtype
        dims = _list_non_channel_dims(input)
        grad = grad_output.to(wide)
        centred = (input.to(wide) - _reshape_to_broadcast_over_channels(mean, input)).mul_(
            _reshape_to_broadcast_over_channels(scale, input)
        )
        grad_bias, grad_weight = grad.sum(dims), (grad * centred).sum(dims)
        grad_input = None
        if ctx.needs_input_grad[0]:
            # A copy: the gradients of weight and bias stay this rank's own, and data parallelism
            # reduces them.
            sums = torch.cat((grad_bias, grad_weight))
            ctx.ranks.sum_over_ranks(sums)
            means = sums / count
            channels = mean.numel()
            factor = scale if weight is None else scale * weight
            grad_input = grad - _reshape_to_broadcast_over_channels(means[:channels], input)
            grad_input -= centred.mul_(_reshape_to_broadcast_over_channels(means[channels:], input))
            grad_input = grad_input.mul_(_reshape_to_broadcast_over_channels(factor, input)).to(
                input.dtype
            )
        return (
            grad_input,
            grad_weight if weight is not None else None,
            grad_bias if ctx.has_bias else None,
            None,
            None,
            None,
        )
