"""The squared norm of the gradients, each element counted once however many ranks hold it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from phalanx.core.block_sizes import get_block_sizes
from phalanx.core.errors import LayoutError
from phalanx.mesh.devices import is_on_cpu
from phalanx.mesh.logical import LogicalShard, full_name, get_local_tensor


@dataclass(frozen=True)
class LocalBlockReplicas:
    """A block of what this rank holds of a tensor, and how many ranks hold it alike."""

    where: tuple[slice, ...]
    num_holders: int


def list_local_blocks_with_replica_counts(shard: LogicalShard) -> tuple[LocalBlockReplicas, ...]:
    """The blocks of a shard: the whole tensor as one, unless parts of it are on different numbers
    of ranks."""
    counts = {shard.num_replicas * box.num_replicas for box in shard.boxes}
    if len(counts) <= 1:
        return tuple(LocalBlockReplicas((), count) for count in counts)
    blocks = []
    for box in shard.boxes:
        where = tuple(slice(o, o + n) for o, n in zip(box.local_offset, box.size, strict=True))
        blocks.append(LocalBlockReplicas(where, shard.num_replicas * box.num_replicas))
    return tuple(blocks)


def require_dense_gradients(module: nn.Module) -> None:
    """Raises LayoutError for an embedding whose gradient names the rows that it is for."""
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Embedding | nn.EmbeddingBag) or not layer.sparse:
            continue
        if layer.weight.requires_grad:
            raise _refuse_sparse_gradient(f"{full_name(name)}.weight")


@contextmanager
def naming_sparse_gradients(module: nn.Module) -> Iterator[None]:
    """Raises LayoutError in place of what a backward raises that met a sparse gradient, as
    `F.embedding(..., sparse=True)` makes it: DDP says only which type it did not expect, and FSDP
    which operator it has not."""
    try:
        yield
    except RuntimeError as error:
        for name, parameter in module.named_parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise _refuse_sparse_gradient(full_name(name)) from error
        # FSDP has taken it from its parameter by now.
        if isinstance(error, NotImplementedError) and "'Sparse" in str(error):
            raise _refuse_sparse_gradient("a parameter") from error
        raise


def _refuse_sparse_gradient(name: str) -> LayoutError:
    return LayoutError(
        f"the gradient of {name} is sparse: ranks reduce dense ones",
        fix="build the embedding without sparse=True",
    )


def collect_gradients_and_sum_squares(
    named: Iterable[tuple[str, nn.Parameter]], blocks: Mapping[str, tuple[LocalBlockReplicas, ...]]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """(this rank's gradients, its part of their squares: 0-d fp64 where the gradients are, on the
    CPU without any).

    The parts of all ranks add up to the square of the norm. Raises LayoutError for a sparse one.
    """
    # Grouped by the number of holders: one kernel for the norms of each group.
    gradients: list[torch.Tensor] = []
    by_holders: dict[int, list[torch.Tensor]] = defaultdict(list)
    for name, parameter in named:
        # Of an uneven cut the last ranks may hold nothing.
        if parameter.grad is None or not (gradient := get_local_tensor(parameter.grad)).numel():
            continue
        if gradient.is_sparse:
            raise _refuse_sparse_gradient(full_name(name))
        gradients.append(gradient)
        for block in blocks[full_name(name)]:
            by_holders[block.num_holders].append(gradient[block.where])
    squares: torch.Tensor | None = None
    for holders, group_gradients in by_holders.items():
        norms = torch._foreach_norm(
            split_gradients_for_exact_norm(group_gradients),
            2,
            dtype=choose_norm_dtype(group_gradients),
        )
        # Ranks that hold the same gradient each bring an equal part of its square.
        # In fp64 from here on, as all sums of the step's one reduction.
        part = torch.stack(norms).double().square().sum() / holders
        squares = part if squares is None else squares + part
    if squares is None:
        squares = torch.zeros((), dtype=torch.float64)
    return gradients, squares


def split_gradients_for_exact_norm(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of one device cut small: the CPU's norm adds squares one after another in fp32 and
    loses 0.2 % of 50 M elements."""
    if not is_on_cpu(gradients[0]):
        return gradients
    size = get_block_sizes().norm_elements
    return [piece for gradient in gradients for piece in gradient.reshape(-1).split(size)]


def choose_norm_dtype(gradients: list[torch.Tensor]) -> torch.dtype:
    """The type that norms are computed in, at least fp32: a norm of half-precision gradients in
    their own type has three digits."""
    wide = torch.float32
    for gradient in gradients:
        wide = torch.promote_types(wide, gradient.dtype)
    return wide
