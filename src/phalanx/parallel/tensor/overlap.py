"""Matrix products beside a collective, in chunks of tokens: one chunk is computed while another
travels.

The same sums in the same order as without chunks, but for the bias and the gradient of a weight,
which are added up chunk by chunk. `parallel.tp_chunks=1` is the serial way, for debugging.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from phalanx.mesh.gathered_input import RegionInput
from phalanx.mesh.tensor_group import SEQUENCE_DIM, TensorParallelGroup

# A region with this attribute gathers its input, whose `is_kept` says what its layers keep of it.
REGION_INPUT_ATTRIBUTE = "phalanx_region_input"


def multiply_row_parallel_in_chunks(
    x: torch.Tensor, weight: torch.Tensor, group: TensorParallelGroup
) -> torch.Tensor:
    """`group.leave(x @ weight.T)`. x: [B, T, features of this rank]."""
    if x.ndim < 3 or (group.cuts_sequence and x.shape[SEQUENCE_DIM] % group.size):
        # Tokens that must be padded are not worth chunks.
        return group.leave(F.linear(x, weight))
    # Cast here, where autograd sees it: the functions below give gradients of the compute type.
    weight = weight.to(x.dtype)
    result: torch.Tensor = (
        _ChunkedRowReduceScatterFunction if group.cuts_sequence else _ChunkedRowAllReduceFunction
    ).apply(x, weight, group)
    return result


def overlap_column_parallel_layers(
    region: nn.Module, columns: Sequence[nn.Module], group: TensorParallelGroup
) -> None:
    """Have `columns`, linear layers that all take the input of `region`, enter it together.

    The first that is called computes what all of them put out; the others find theirs.
    """
    region_input = RegionInput(group, is_kept=not group.gathers_input_again)
    setattr(region, REGION_INPUT_ATTRIBUTE, region_input)
    shared = _ColumnsOfSharedInput(group, list(columns), region_input)
    for column in columns:
        column.forward = functools.partial(shared.get_output_of_column, column)  # type: ignore[method-assign]
    region.register_forward_hook(shared.forget_outputs)


@dataclass
class _ColumnsOfSharedInput:
    group: TensorParallelGroup
    columns: list[nn.Module]
    region_input: RegionInput
    _input: torch.Tensor | None = None
    _outputs: dict[nn.Module, torch.Tensor] = field(default_factory=dict)

    def get_output_of_column(self, column: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if x is not self._input:
            outputs = self._compute_all_columns(x)
            # Columns of one region are called in any order, each once, on the same tensor object.
            self._input, self._outputs = x, dict(zip(self.columns, outputs, strict=True))
        return self._outputs.pop(column)

    def forget_outputs(self, *_: object) -> None:
        self._input, self._outputs = None, {}

    def _compute_all_columns(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = [column.weight for column in self.columns]
        biases = [column.bias for column in self.columns]
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        # A padded sequence has a last part with tokens that are none: it is entered as one piece.
        if self.group.cuts_sequence and self.group.num_tokens % self.group.size:
            entered = self.group.enter(x)
            return tuple(F.linear(entered, w, b) for w, b in zip(weights, biases, strict=True))
        cast = [w.to(x.dtype) for w in weights]
        outputs: tuple[torch.Tensor, ...]
        if self.group.cuts_sequence:
            outputs = _ColumnsOfGatheredInputFunction.apply(
                x, self.group, self.region_input.is_kept, *cast
            )
        else:
            outputs = _ColumnsOfCopiedInputFunction.apply(x, self.group, *cast)
        return tuple(
            out if bias is None else out + bias.to(out.dtype)
            for out, bias in zip(outputs, biases, strict=True)
        )


def _split_tokens_into_chunks(length: int, group: TensorParallelGroup) -> list[slice]:
    """Spans of tokens, as even as it goes."""
    # A chunk has at least one token, so a short sequence has fewer chunks.
    count = max(1, min(group.chunks, length))
    return [slice(length * i // count, length * (i + 1) // count) for i in range(count)]


def _flatten_tokens(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


class _ChunkedRowAllReduceFunction(torch.autograd.Function):
    """All-reduce of one chunk while the next is multiplied; the backward needs nobody."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: TensorParallelGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        parts = [
            group.start_all_reduce(F.linear(x[:, rows], weight))
            for rows in _split_tokens_into_chunks(x.shape[SEQUENCE_DIM], group)
        ]
        with group.timing_collective("all_reduce", "all_reduce activations"):
            return torch.cat([group.wait(part) for part in parts], dim=SEQUENCE_DIM)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight, _flatten_tokens(grad).T @ _flatten_tokens(x), None


class _ChunkedRowReduceScatterFunction(torch.autograd.Function):
    """Chunks of every rank's part of the sequence: reduce-scatter on the way out, all-gather on
    the way back."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: TensorParallelGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        by_rank = x.unflatten(SEQUENCE_DIM, (group.size, -1))  # [B, ranks, T / ranks, F]
        parts = []
        for rows in _split_tokens_into_chunks(by_rank.shape[2], group):
            product = F.linear(by_rank[:, :, rows], weight)
            # Transposed to [ranks, B, tokens, F]: a reduce-scatter cuts the first dimension.
            parts.append((product.shape, group.start_reduce_scatter(product.transpose(0, 1))))
        with group.timing_collective("reduce_scatter", "reduce_scatter sequence"):
            done = [group.wait(part).view(shape[0], *shape[2:]) for shape, part in parts]
        return torch.cat(done, dim=SEQUENCE_DIM)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        group: TensorParallelGroup = ctx.group
        by_rank = x.unflatten(SEQUENCE_DIM, (group.size, -1))
        spans = _split_tokens_into_chunks(by_rank.shape[2], group)
        parts = [group.start_all_gather(grad[:, rows]) for rows in spans]
        # All gathers are started before the first product: each travels beside those before it.
        grad_x, grad_weight = torch.empty_like(by_rank), torch.zeros_like(weight)
        for rows, part in zip(spans, parts, strict=True):
            with group.timing_collective("all_gather", "all_gather sequence"):
                gathered = group.wait(part).unflatten(0, (group.size, -1)).transpose(0, 1)
            grad_x[:, :, rows] = gathered @ weight
            grad_weight += _flatten_tokens(gathered).T @ _flatten_tokens(by_rank[:, :, rows])
        return grad_x.flatten(1, 2), grad_weight, None


class _ColumnsOfCopiedInputFunction(torch.autograd.Function):
    """Forward: nobody is needed.

    Backward: the all-reduce of one chunk of the input's gradient beside the next, and the weights'
    gradients while the last ones travel.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, group: TensorParallelGroup, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.group = group
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[override]
        x, *weights = ctx.saved_tensors
        group: TensorParallelGroup = ctx.group
        parts = []
        for rows in _split_tokens_into_chunks(x.shape[SEQUENCE_DIM], group):
            parts.append(
                group.start_all_reduce(_sum_input_gradients([g[:, rows] for g in grads], weights))
            )
        grad_weights = [_flatten_tokens(grad).T @ _flatten_tokens(x) for grad in grads]
        with group.timing_collective("all_reduce", "all_reduce activations"):
            grad_x = torch.cat([group.wait(part) for part in parts], dim=SEQUENCE_DIM)
        return grad_x, None, *grad_weights


class _ColumnsOfGatheredInputFunction(torch.autograd.Function):
    """Forward: a chunk is multiplied while the next is gathered.

    Backward: reduce-scatter as in `_ColumnsOfCopiedInputFunction`, beside a second gather of the
    input: the forward keeps this rank's part of it. `keeps_input`: it keeps all, for a block that
    is recomputed.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        group: TensorParallelGroup,
        keeps_input: bool,
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        spans = _split_tokens_into_chunks(x.shape[SEQUENCE_DIM], group)
        parts = [group.start_all_gather(x[:, rows]) for rows in spans]
        by_rank = (x.shape[0], group.size, *x.shape[1:-1])  # [B, ranks, T / ranks]
        outputs = [x.new_empty(*by_rank, weight.shape[0]) for weight in weights]
        gathered = x.new_empty(*by_rank, x.shape[-1]) if keeps_input else x
        for rows, part in zip(spans, parts, strict=True):
            chunk = _wait_for_gathered_chunk(group, part)
            if keeps_input:
                gathered[:, :, rows] = chunk
            for output, weight in zip(outputs, weights, strict=True):
                output[:, :, rows] = F.linear(chunk, weight)
        ctx.save_for_backward(gathered, *weights)
        ctx.group, ctx.keeps_input = group, keeps_input
        return tuple(output.flatten(1, 2) for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[override]
        saved, *weights = ctx.saved_tensors
        group: TensorParallelGroup = ctx.group
        by_rank = [grad.unflatten(SEQUENCE_DIM, (group.size, -1)) for grad in grads]
        spans = _split_tokens_into_chunks(by_rank[0].shape[2], group)
        # Gathers travel beside the products of the inputs' gradients, which do not need them.
        gathers = []
        if not ctx.keeps_input:
            gathers = [group.start_all_gather(saved[:, rows]) for rows in spans]
        parts = []
        for rows in spans:
            product = _sum_input_gradients([g[:, :, rows] for g in by_rank], weights)
            parts.append((product.shape, group.start_reduce_scatter(product.transpose(0, 1))))
        if ctx.keeps_input:
            gathered = saved
        else:
            chunks = [_wait_for_gathered_chunk(group, part) for part in gathers]
            gathered = torch.cat(chunks, dim=2)
        grad_weights = [_flatten_tokens(grad).T @ _flatten_tokens(gathered) for grad in by_rank]
        with group.timing_collective("reduce_scatter", "reduce_scatter sequence"):
            done = [group.wait(part).view(shape[0], *shape[2:]) for shape, part in parts]
        return torch.cat(done, dim=SEQUENCE_DIM), None, None, *grad_weights


def _wait_for_gathered_chunk(group: TensorParallelGroup, started: torch.Tensor) -> torch.Tensor:
    """[B, ranks, tokens, D] of a gather that was started with [B, tokens, D]."""
    with group.timing_collective("all_gather", "all_gather sequence"):
        return group.wait(started).unflatten(0, (group.size, -1)).transpose(0, 1)


def _sum_input_gradients(
    grads: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> torch.Tensor:
    total = grads[0] @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        total += grad @ weight
    return total
