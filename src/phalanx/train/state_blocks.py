"""The optimizer's state of weights that several ranks train alike: it must have the same bits on
all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from phalanx.mesh.bit_digest import compute_bit_digest
from phalanx.mesh.logical import full_name, get_local_tensor
from phalanx.parallel.model import ParallelModel
from phalanx.train.weight_blocks import hash_block_identity, hash_to_signed_64_bits, split_shard

# Types whose values follow from the same gradients in one way. Quantized state (8 bits and fewer)
# may be rounded by chance, and then by another one on each replica.
_COMPARABLE_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_COUNT_DTYPES = _COMPARABLE_DTYPES | {torch.int64, torch.int32}


@dataclass(frozen=True)
class OptimizerStateBlock:
    """The optimizer's state of a block of the parameter `name`: `where` in the storage of this rank
    (all of it if empty).

    `key` is the same on each rank that holds this block. `slots` are of the parameter's shape,
    `whole_slots` of another one, as counts of steps: these belong to all that the rank trains of
    the parameter.
    """

    name: str
    key: int
    where: tuple[slice, ...]
    slots: tuple[str, ...]
    whole_slots: tuple[str, ...]


@dataclass(frozen=True)
class OptimizerStateBlocks:
    """The blocks of this rank whose state other ranks have, too.

    `num_alone`: blocks whose state no other rank has. `incomparable`: names of state that is no
    plain tensor of floating-point numbers, which may differ between replicas.
    """

    shared: tuple[OptimizerStateBlock, ...]
    num_alone: int
    incomparable: tuple[str, ...]


def list_state_blocks(
    model: ParallelModel, optimizer: torch.optim.Optimizer
) -> OptimizerStateBlocks:
    """The blocks of state that this rank's optimizer has now."""
    shards = model.trained_shards()
    shared: list[OptimizerStateBlock] = []
    incomparable: dict[str, None] = {}
    num_alone = 0
    for raw_name, parameter in model.named_parameters():
        name = full_name(raw_name)
        slots, whole_slots = [], []
        for slot, value in _iterate_tensors_of_state(optimizer, parameter):
            if not _is_comparable(value):
                incomparable[slot] = None
            elif value.shape == parameter.shape:
                slots.append(slot)
            else:
                whole_slots.append(slot)
        shard = shards.get(name)
        # Of an uneven cut the last ranks may hold nothing.
        if shard is None or not shard.boxes or not (slots or whole_slots):
            continue
        parts = split_shard(shard)
        for boxes, where in parts:
            if shard.num_replicas == 1 and all(box.num_replicas == 1 for box in boxes):
                num_alone += 1
                continue
            # State of another shape is that of all parts together.
            own_whole_slots = tuple(whole_slots) if len(parts) == 1 else ()
            key = hash_to_signed_64_bits(
                hash_block_identity(shard, boxes), *slots, "of another shape", *own_whole_slots
            )
            shared.append(OptimizerStateBlock(name, key, where, tuple(slots), own_whole_slots))
    return OptimizerStateBlocks(tuple(shared), num_alone, tuple(incomparable))


def digest_state_block(
    block: OptimizerStateBlock,
    optimizer: torch.optim.Optimizer,
    parameter: nn.Parameter | None,
    device: torch.device,
) -> torch.Tensor:
    """A digest of the bits of all state of a block: 0-d int64 on `device`, which it does not wait
    for; 0 where `parameter` is no longer there. A word that changes in one tensor of it changes the
    digest with certainty."""
    state = {} if parameter is None else dict(_iterate_tensors_of_state(optimizer, parameter))
    digest = torch.zeros((), dtype=torch.int64, device=device)
    for slot in (*block.slots, *block.whole_slots):
        value = state.get(slot)
        if value is None:
            continue
        local = get_local_tensor(value.detach())
        if slot in block.slots:
            local = local[block.where]
        # An odd factor for each: the same value in another slot differs, and a change of one is
        # never lost.
        digest_of_slot = compute_bit_digest(local) * (hash_to_signed_64_bits(slot) | 1)
        # The host reads its own memory: a copy to the device would wait for that.
        digest = digest + (int(digest_of_slot) if local.device.type == "cpu" else digest_of_slot)
    return digest


def _iterate_tensors_of_state(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter
) -> Iterator[tuple[str, torch.Tensor]]:
    """(slot, tensor) of the state of `parameter`, in the order of their names."""
    state: Any = optimizer.state.get(parameter, {})
    if not isinstance(state, Mapping):
        return
    for slot in sorted(state, key=str):
        if isinstance(slot, str) and isinstance(state[slot], torch.Tensor):
            yield slot, state[slot]


def _is_comparable(value: torch.Tensor) -> bool:
    """False for a type of tensor whose storage is not one of plain numbers, and for types of
    numbers that may be rounded by chance."""
    local = value.to_local() if isinstance(value, DTensor) else value
    if type(local) not in (torch.Tensor, nn.Parameter) or local.layout is not torch.strided:
        return False
    return local.dtype in (_COUNT_DTYPES if local.numel() == 1 else _COMPARABLE_DTYPES)


def name_state_of(name: str) -> str:
    """The name of the optimizer's state of a parameter, as events tell it."""
    return f"{name} (optimizer's state)"
