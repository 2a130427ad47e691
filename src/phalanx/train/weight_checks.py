"""What must hold of weights at an update: the optimizer has the model's parameters, each of them
that has a gradient moves, and ranks that hold the same block have the same bits, also of the
optimizer's state.

Nothing here waits for the device: what is found there is read when a later step has waited for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from phalanx.core.phases import WORLD_AXIS
from phalanx.core.units import plural
from phalanx.mesh.bit_digest import compute_bit_digest
from phalanx.mesh.logical import full_name, get_local_tensor
from phalanx.mesh.transfer import create_fp64_on_device, start_copy_of_numbers_to_host
from phalanx.parallel.model import ParallelModel
from phalanx.train.state_blocks import (
    OptimizerStateBlocks,
    digest_state_block,
    list_state_blocks,
    name_state_of,
)
from phalanx.train.weight_blocks import (
    GatheredBlocks,
    HeldBlocks,
    TensorsOnRanks,
    WeightBlock,
    find_modules_with_shared_buffers,
    gather_block_lists,
    list_weight_blocks,
    map_parameters_and_shared_buffers,
    view_block_elements,
)

NUM_SAMPLED_ELEMENTS = 1024
"""Elements of a tensor that are asked whether the update must change one of them."""
MIN_UPDATE_PER_ROUNDING = 64.0
"""So many times the rounding of a weight its update must be before it is missed."""
NUM_GATHERED_COUNTS = 2
"""Numbers of a rank in what ranks gather: parameters of the optimizer that the model has not, and
of the model that it had not when the checks began."""
# Flags of a tensor on a rank, in what ranks gather.
_STUCK, _MISSING, _MUST_MOVE, _REPLACED, _REMOVED = 1, 2, 4, 8, 16


@dataclass(frozen=True)
class WeightFindings:
    """Result of the checks of one step over all ranks.

    `is_applied`: it had an update. `stuck`: what had to move and did not; `missing`: what is
    trained, and the optimizer does not update; `removed`: what the model had when the checks began,
    and has no longer; `replaced`: where else somebody has put something in
    the place of a parameter since the last check, which FSDP has taken out again; `num_foreign`: by
    rank, parameters of the optimizer that are none of the model's. `num_moving` tensors had to
    move, of `num_trained`. `digests`: [ranks, blocks], of the blocks of each rank, those of the
    optimizer's state among them.
    """

    step: int
    is_applied: bool
    unequal: TensorsOnRanks
    stuck: TensorsOnRanks
    missing: TensorsOnRanks
    removed: TensorsOnRanks
    replaced: TensorsOnRanks
    num_foreign: dict[int, int]
    num_moving: int
    num_trained: int
    digests: NDArray[np.int64]


class WeightChecks:
    """The checks of the weights of `model`, which `optimizer` updates. All ranks make them
    together; the first `finish_step` exchanges what each rank holds, and waits for the device.

    `state_blocks`: what this rank holds of the optimizer's state, known from then on.
    """

    def __init__(self, model: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer, self._mesh = model, optimizer, model.mesh
        self._alike = find_modules_with_shared_buffers(model.module)
        tensors = map_parameters_and_shared_buffers(model, self._alike)
        self._blocks = list_weight_blocks(model, tensors)
        self._digest_device = self._mesh.device
        if self._blocks:
            # The host's, where parameters are offloaded.
            self._digest_device = get_local_tensor(tensors[self._blocks[0].name]).device
        self._columns: dict[str, list[int]] = defaultdict(list)
        for column, block in enumerate(self._blocks):
            self._columns[block.name].append(column)
        self._names, self._aliases = list(tensors), model.aliases()
        self.state_blocks = OptimizerStateBlocks((), 0, ())
        self._gathered: GatheredBlocks | None = None
        self._was_state_compared = False
        # Of the update that is being checked: what must move, and digests before it.
        self._must_move: dict[str, torch.Tensor] = {}
        self._before: dict[str, list[torch.Tensor]] = {}
        # Names of what this rank trains since the checks began, at the last of them.
        self._added: list[str] = []
        self._pending: tuple[int, bool, Callable[[], list[float]]] | None = None

    @torch.no_grad()
    def digest_before_update(self) -> None:
        """Digest what the update that follows may change."""
        model_tensors = map_parameters_and_shared_buffers(self._model, self._alike)
        updated = _select_trainable_parameters(self._map_optimizer_tensors_by_name())
        groups = self._optimizer.param_groups
        group_of = {id(p): group for group in groups for p in group["params"]}
        for name, parameter in updated.items():
            if parameter.grad is None or name not in self._columns or not groups:
                continue
            # What the optimizer does not have should move as what it has.
            group = group_of.get(id(parameter), groups[0])
            self._must_move[name] = is_update_above_rounding(parameter, group)
            self._before[name] = self._digest_blocks_of_tensor(name, model_tensors[name], parameter)

    @torch.no_grad()
    def finish_step(self, step: int) -> None:
        """Compare weights with those before the update, if there was one, and begin to gather the
        digests of all ranks. Collective."""
        gathered = self._gathered or self._gather_blocks()
        model_tensors, in_model = (
            map_parameters_and_shared_buffers(self._model, self._alike),
            self._map_optimizer_tensors_by_name(),
        )
        updated = _select_trainable_parameters(in_model)
        missing, num_foreign = self._find_optimizer_mismatches(
            model_tensors, updated, in_model.values()
        )
        digests = [self._digest_block(block, model_tensors) for block in self._blocks]
        digests_of_state = [
            digest_state_block(block, self._optimizer, in_model.get(block.name), self._mesh.device)
            for block in self.state_blocks.shared
        ]
        movements: dict[str, torch.Tensor] = {}
        for name, before in self._before.items():
            if name not in updated:
                continue
            after = [digests[column] for column in self._columns[name]]
            after += self._digest_optimizer_tensor(model_tensors[name], updated[name])
            # Else something was put in its place within the update: it is `missing`.
            if len(after) == len(before):
                movements[name] = self._build_movement_flags(name, before, after)
        flags = dict.fromkeys(missing, _MISSING)
        flags |= {name: _REMOVED for name in self._columns if name not in model_tensors}
        for place in self._model.take_replaced_parameters():
            name = self._aliases.get(place, place)
            flags[name] = flags.get(name, 0) | _REPLACED
        self._added = [name for name in flags if name not in self._names]
        counts = num_foreign, len(self._added)
        row = torch.cat(
            (
                self._build_gathered_row(gathered, digests, movements, flags, counts),
                self._pad_columns(digests_of_state, gathered.num_state_columns),
            )
        )
        with self._model.phases("collective", "all_gather digests of weights", axis=WORLD_AXIS):
            rows = torch.cat(self._mesh.all_gather(row))
        is_applied = bool(self._before)
        self._must_move, self._before = {}, {}
        self._pending = step, is_applied, start_copy_of_numbers_to_host(rows)

    def take_weight_findings(self) -> WeightFindings | None:
        """On rank 0 the findings of the last `finish_step`, once. The device must have been waited
        for since."""
        if self._pending is None:
            return None
        (step, is_applied, read), self._pending = self._pending, None
        gathered = self._gathered
        if gathered is None or gathered.held is None:
            return None
        rows = np.array(read(), dtype=np.int64).reshape(self._mesh.world_size, -1)
        width = gathered.num_weight_columns
        blocks, blocks_of_state = gathered.held.weights, gathered.held.state
        digests, flags, counts, digests_of_state = np.split(
            rows, [width, 2 * width, 2 * width + NUM_GATHERED_COUNTS], axis=1
        )
        num_foreign, num_added = counts.T.tolist()
        unequal = blocks.find_tensors_unequal_on_ranks(digests)
        state = blocks_of_state.find_tensors_unequal_on_ranks(digests_of_state)
        if not self._was_state_compared:
            # An optimizer of the user's own may round state by chance: what was never equal tells
            # nothing, and must not hide what becomes unequal later.
            blocks_of_state.leave_out_unequal(digests_of_state)
            self._was_state_compared = True
        missing = blocks.find_tensors_on_ranks(flags & _MISSING != 0)
        is_replaced = (flags & _REPLACED != 0) & (flags & _MISSING == 0)
        return WeightFindings(
            step,
            is_applied,
            TensorsOnRanks(
                [*unequal.names, *map(name_state_of, state.names)],
                sorted({*unequal.ranks, *state.ranks}),
            ),
            blocks.find_tensors_on_ranks(flags & _STUCK != 0),
            self._add_to_missing(missing, num_added),
            blocks.find_tensors_on_ranks(flags & _REMOVED != 0),
            blocks.find_tensors_on_ranks(is_replaced),
            {rank: count for rank, count in enumerate(num_foreign) if count},
            len(blocks.find_tensors_on_ranks(flags & _MUST_MOVE != 0).names),
            blocks.num_trained,
            np.hstack((digests, blocks_of_state.clear_left_out(digests_of_state))),
        )

    def _add_to_missing(self, missing: TensorsOnRanks, num_added: Sequence[int]) -> TensorsOnRanks:
        """`missing` with what ranks train since the checks began, `num_added` by rank. This rank
        has names of its own alone."""
        ranks = [rank for rank, count in enumerate(num_added) if count]
        if not ranks:
            return missing
        added = self._added or [plural(max(num_added), "new parameter")]
        return TensorsOnRanks([*missing.names, *added], sorted({*missing.ranks, *ranks}))

    @property
    def held(self) -> HeldBlocks | None:
        """What all ranks hold: on rank 0, after the first `finish_step`."""
        return None if self._gathered is None else self._gathered.held

    def _gather_blocks(self) -> GatheredBlocks:
        """What all ranks hold, once an update was there: many optimizers make their state in the
        first one. Collective."""
        self.state_blocks = list_state_blocks(self._model, self._optimizer)
        with self._model.phases("collective", "all_gather blocks of weights", axis=WORLD_AXIS):
            self._gathered = gather_block_lists(
                self._mesh,
                self._names,
                self._blocks,
                self.state_blocks.shared,
                self.state_blocks.num_alone,
            )
        return self._gathered

    def _map_optimizer_tensors_by_name(self) -> dict[str, nn.Parameter]:
        """By full name, what an optimizer has of each parameter, frozen ones among them."""
        return {full_name(name): p for name, p in self._model.named_parameters()}

    def _digest_block(
        self, block: WeightBlock, model_tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """0-d int64: the digest of `block`, 0 of a tensor that was taken out of the model."""
        if block.name not in model_tensors:
            return torch.zeros((), dtype=torch.int64, device=self._digest_device)
        return compute_bit_digest(view_block_elements(block, model_tensors[block.name]))

    def _digest_blocks_of_tensor(
        self, name: str, tensor: torch.Tensor, updated: nn.Parameter
    ) -> list[torch.Tensor]:
        blocks = [self._blocks[column] for column in self._columns[name]]
        digests = [compute_bit_digest(view_block_elements(block, tensor)) for block in blocks]
        return digests + self._digest_optimizer_tensor(tensor, updated)

    def _digest_optimizer_tensor(
        self, tensor: torch.Tensor, updated: nn.Parameter
    ) -> list[torch.Tensor]:
        """The digest of what stands for `tensor` before the optimizer, where that is less of it or
        a copy."""
        local = get_local_tensor(updated.detach())
        if updated is tensor or (
            local.device == self._mesh.device and local.numel() == get_local_tensor(tensor).numel()
        ):
            return []
        return [compute_bit_digest(local)]

    def _find_optimizer_mismatches(
        self,
        model_tensors: dict[str, torch.Tensor],
        updated: dict[str, nn.Parameter],
        in_model: Iterable[nn.Parameter],
    ) -> tuple[list[str], int]:
        """(names that the optimizer does not update, parameters of it that the model has not)."""
        in_optimizer = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        missing = []
        for name, parameter in updated.items():
            if id(parameter) not in in_optimizer or not _is_model_storage_updated(
                model_tensors[name], parameter
            ):
                missing.append(name)
        return missing, len(in_optimizer - {id(parameter) for parameter in in_model})

    def _build_movement_flags(
        self, name: str, before: list[torch.Tensor], after: list[torch.Tensor]
    ) -> torch.Tensor:
        """_MUST_MOVE and _STUCK, 0-d on the device of the mesh."""
        must = self._move_flag_to_device(self._must_move[name])
        num_blocks = len(self._columns[name])
        is_same = [
            self._move_flag_to_device(old == new) for old, new in zip(before, after, strict=True)
        ]
        stays = is_same[0]
        # A tensor of several blocks has moved if one of them has.
        for same in is_same[1:num_blocks]:
            stays = stays & same
        # This rank's rows of it must have moved, too.
        for same in is_same[num_blocks:]:
            stays = stays | same
        return must * _MUST_MOVE + (must & stays) * _STUCK

    def _move_flag_to_device(self, flag: torch.Tensor) -> torch.Tensor:
        """A flag of offloaded parameters is in host memory: the host has it."""
        if flag.device == self._mesh.device:
            return flag
        return create_fp64_on_device((float(flag),), self._mesh.device)[0] != 0

    def _pad_columns(self, digests: list[torch.Tensor], num_columns: int) -> torch.Tensor:
        """int64 [num_columns]: `digests`, and zeros behind them."""
        row = torch.zeros(num_columns, dtype=torch.int64, device=self._mesh.device)
        if digests:
            row[: len(digests)] = torch.stack(digests)
        return row

    def _build_gathered_row(
        self,
        gathered: GatheredBlocks,
        digests: list[torch.Tensor],
        movements: dict[str, torch.Tensor],
        flags_by_name: dict[str, int],
        counts: Sequence[int],
    ) -> torch.Tensor:
        """The row that this rank hands in: a digest of each block, flags of each (of a tensor with
        the first of its blocks), and `counts`. int64 [2 x columns + NUM_GATHERED_COUNTS]."""
        width, num_blocks = gathered.num_weight_columns, len(self._blocks)
        row = torch.zeros(
            2 * width + NUM_GATHERED_COUNTS, dtype=torch.int64, device=self._mesh.device
        )
        flags = row[width : 2 * width]
        if digests:
            row[:num_blocks] = torch.stack(digests)
            none = row.new_zeros(())
            by_block = [none] * num_blocks
            for name, movement in movements.items():
                by_block[self._columns[name][0]] = movement
            flags[:num_blocks] = torch.stack(by_block)
        for name, number in flags_by_name.items():
            if name in self._columns:
                flags[self._columns[name][0]] += number
        for place, count in enumerate(counts, 2 * width):
            if count:
                row[place].fill_(count)
        return row


def _select_trainable_parameters(parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {name: p for name, p in parameters.items() if p.requires_grad}


def is_update_above_rounding(parameter: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
    """0-d bool: the update of `parameter` by its gradient is far above the rounding of some
    element (of a sample of NUM_SAMPLED_ELEMENTS). `group`: the options of its optimizer."""
    assert parameter.grad is not None
    weights = _view_sampled_elements(get_local_tensor(parameter.detach())).abs()
    gradients = _view_sampled_elements(get_local_tensor(parameter.grad)).abs()
    rounding = weights * (MIN_UPDATE_PER_ROUNDING * torch.finfo(weights.dtype).eps)
    if "betas" in group and "eps" in group:
        # Adam and its kin move by the rate, unless a gradient is as small as eps.
        return ((gradients > 1e3 * group["eps"]) & (rounding < group["lr"])).any()
    # Others by the rate times the gradient at least; a tiny number, for 0 > 0 is False.
    return (gradients.clamp(max=1.0) * group["lr"] > rounding + 1e-30).any()


def _view_sampled_elements(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    # Odd, so that it is no multiple of a row's length.
    stride = flat.numel() // NUM_SAMPLED_ELEMENTS | 1
    return flat[::stride]


def _is_model_storage_updated(tensor: torch.Tensor, updated: nn.Parameter) -> bool:
    """False if what the optimizer updates is no longer memory of the model's tensor; a copy on the
    host never is."""
    if updated is tensor:
        return True
    in_model, in_optimizer = get_local_tensor(tensor.detach()), get_local_tensor(updated.detach())
    if in_model.device != in_optimizer.device or not in_optimizer.numel():
        return True
    return in_model.untyped_storage().data_ptr() == in_optimizer.untyped_storage().data_ptr()
