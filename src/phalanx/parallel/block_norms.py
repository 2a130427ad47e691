"""Squares of gradients, weights and updates by block of the model, each element counted once
however many ranks hold it.

A rank has its part of each square: the sum over ranks, in the one reduction of a step, is that of
the whole model, in every layout. Nothing here waits for the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from phalanx.mesh.logical import full_name, get_local_tensor
from phalanx.mesh.transfer import create_fp64_on_device
from phalanx.parallel.gradients import (
    LocalBlockReplicas,
    choose_norm_dtype,
    list_local_blocks_with_replica_counts,
    split_gradients_for_exact_norm,
)
from phalanx.parallel.rank_parameters import ParametersOfRank
from phalanx.plan.plan import Plan


def name_model_blocks(module: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, str]:
    """By full name of each parameter of a whole module, the name of its block.

    That is the repeated block that it is in ("blocks.3"); outside of these the module that is as
    deep as the list they are in ("embed", beside "blocks"; "model.norm", beside "model.layers").
    """
    names = {id(part): full_name(name) for name, part in module.named_modules()}
    prefixes = [f"{names[id(block)]}." for block in blocks]
    depth = max(prefixes[0].count(".") - 1, 1) if prefixes else 1
    block_of: dict[str, str] = {}
    for raw_name, _ in module.named_parameters(remove_duplicate=False):
        name = full_name(raw_name)
        inside = (prefix[:-1] for prefix in prefixes if name.startswith(prefix))
        outside = ".".join(name.split(".")[:-1][:depth]) or name
        block_of[name] = next(inside, outside)
    return block_of


@dataclass(frozen=True)
class BlockNormRequest:
    """What the reduction of a step adds up by block: the squares of its gradients, and `squares` of
    each rank [N, as many on all of them], fp64 on the device of training."""

    of_gradients: bool = False
    squares: torch.Tensor | None = None


NO_BLOCK_NORMS = BlockNormRequest()


class BlockSquares:
    """Adds up squares of this rank's part of a model by block, in the order of `names`."""

    def __init__(
        self, block_of: Mapping[str, str], parameters: ParametersOfRank, plan: Plan, rank: int
    ) -> None:
        self.names = tuple(dict.fromkeys(block_of.values()))
        self._index_of_block = {name: index for index, name in enumerate(self.names)}
        self._block_of, self._parameters = block_of, parameters
        self._is_layout_free, self._is_first_rank = plan.is_layout_free, rank == 0
        self._held: dict[str, tuple[LocalBlockReplicas, ...]] | None = None
        self._before: dict[str, torch.Tensor] = {}

    def sum_gradient_squares(self, device: torch.device) -> torch.Tensor:
        """This rank's part of the squares of gradients [blocks], fp64 on `device`."""
        gradients: dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters.iterate_optimizer_parameters():
            if parameter.grad is not None:
                gradients[full_name(name)] = get_local_tensor(parameter.grad)
        return self._sum_squares(gradients, device)

    def hold_weights(self) -> None:
        """Copy what the optimizer is about to change."""
        for name, weight in self._iterate_trained_weights():
            self._before[name] = weight.to(choose_norm_dtype([weight]), copy=True)

    def sum_update_squares(self, device: torch.device) -> torch.Tensor:
        """This rank's part of the squares of the update since `hold_weights` and, behind them, of
        the weights that were held [2 x blocks], fp64 on `device`."""
        before, self._before = self._before, {}
        weights = self._sum_squares(before, device)
        now = dict(self._iterate_trained_weights())
        for name, weight in before.items():
            weight.sub_(now[name])
        return torch.cat((self._sum_squares(before, device), weights))

    def _iterate_trained_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        for name, parameter in self._parameters.iterate_optimizer_parameters():
            if parameter.requires_grad:
                yield full_name(name), get_local_tensor(parameter.detach())

    def _sum_squares(
        self, tensors: Mapping[str, torch.Tensor], device: torch.device
    ) -> torch.Tensor:
        if self._held is None:
            shards = self._parameters.collect_trained_shards()
            self._held = {
                name: list_local_blocks_with_replica_counts(shard) for name, shard in shards.items()
            }
        # By block of the model and number of holders: one kernel for all norms, and one for each
        # of these to add them up.
        pieces: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
        for name, tensor in tensors.items():
            # Of an uneven cut the last ranks may hold nothing.
            if not tensor.numel():
                continue
            index = self._index_of_block[self._block_of[name]]
            for block in self._held[name]:
                pieces[index, block.num_holders].append(tensor[block.where])
        sums: list[torch.Tensor | None] = [None] * len(self.names)
        groups = {key: split_gradients_for_exact_norm(group) for key, group in pieces.items()}
        all_pieces = [piece for group in groups.values() for piece in group]
        if not all_pieces:
            return create_fp64_on_device((0.0,) * len(self.names), device)
        norms = torch._foreach_norm(all_pieces, 2, dtype=choose_norm_dtype(all_pieces))
        squares = torch.stack(norms).double().square()
        parts = squares.split([len(group) for group in groups.values()])
        for (index, holders), part in zip(groups, parts, strict=True):
            square = part.sum() * self._compute_share(holders)
            known = sums[index]
            sums[index] = square if known is None else known + square
        zero = squares.new_zeros(())
        by_block = torch.stack([zero if square is None else square for square in sums])
        # Of gradients in host memory the host has the numbers, and a copy of them costs kernels.
        if by_block.device != device:
            by_block = create_fp64_on_device(by_block.tolist(), device)
        return by_block

    def _compute_share(self, holders: int) -> float:
        """The part of a square that this rank brings, of `holders` that have it."""
        if self._is_layout_free:
            # All ranks have all. That of one alone is exact after the reduction, too.
            return float(self._is_first_rank)
        return 1.0 / holders
