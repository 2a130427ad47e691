"""Gradients of what ranks of a tensor-parallel group hold alike and see a part each of: summed
once a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from phalanx.mesh.logical import (
    TensorParallelCut,
    apply_cut_to_shard,
    full_name,
    get_local_tensor,
    make_logical_shard,
)
from phalanx.mesh.tensor_group import TensorParallelGroup


class PartialGradientSum:
    """Norms between regions under sequence parallelism, norms of heads, keys and values of more
    ranks than heads.

    All of them go through one all-reduce per step, after data parallelism has reduced its share,
    which is linear, too. So norms between regions need no collective in each block.
    """

    def __init__(
        self,
        group: TensorParallelGroup,
        partial: Sequence[tuple[str, nn.Parameter]],
        cuts: Mapping[str, TensorParallelCut],
    ) -> None:
        self._group, self._cuts = group, cuts
        self._partial = {name for name, _ in partial}
        self._shared = {
            name for name, cut in cuts.items() if any(box.num_replicas > 1 for box in cut.boxes)
        }

    @torch.no_grad()
    def sum_over_ranks(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Sum gradients over the ranks, in place. `named`: what an optimizer updates, as data
        parallelism has left it."""
        pieces = [
            piece for name, p in named for piece in self._list_gradient_parts(full_name(name), p)
        ]
        if not pieces:
            return
        wide = torch.float32
        for gradient, _, _ in pieces:
            wide = torch.promote_types(wide, gradient.dtype)
        device = pieces[0][0].device
        # One flat tensor and one all-reduce; a rank without a share of a piece adds zeros there.
        flat = torch.zeros(
            sum(g.numel() * places for g, _, places in pieces), dtype=wide, device=device
        )
        at, reduced = 0, []
        for gradient, index, places in pieces:
            start = at + index * gradient.numel()
            reduced.append(flat[start : start + gradient.numel()])
            reduced[-1].copy_(gradient.reshape(-1))
            at += places * gradient.numel()
        summed = self._group.all_reduce(flat)
        for (gradient, _, _), part in zip(pieces, reduced, strict=True):
            # The sum is a new tensor; the views of `flat` still say where each piece lies.
            start = part.storage_offset()
            gradient.copy_(summed[start : start + gradient.numel()].view(gradient.shape))

    def _list_gradient_parts(
        self, name: str, parameter: nn.Parameter
    ) -> list[tuple[torch.Tensor, int, int]]:
        """(gradient, which of the distinct ones this rank holds, how many there are)."""
        if parameter.grad is None or name not in self._partial | self._shared:
            return []
        gradient = get_local_tensor(parameter.grad)
        if name in self._partial:
            return [(gradient, 0, 1)]
        shard = apply_cut_to_shard(
            self._cuts[name], make_logical_shard(name, parameter, replica=0, num_replicas=1)
        )
        pieces, rank, size = [], self._group.rank, self._group.size
        for box in shard.boxes:
            if box.num_replicas > 1:
                where = tuple(
                    slice(o, o + n) for o, n in zip(box.local_offset, box.size, strict=True)
                )
                # Ranks that hold a block alike are neighbours.
                pieces.append((gradient[where], rank // box.num_replicas, size // box.num_replicas))
        return pieces
