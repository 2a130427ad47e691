"""The state of a run that its ranks still hold in memory after they lost one of them.

A rank that only lost another one keeps what it held (`HeldState`), leaves its process groups and
joins the next attempt. There the ranks compare what they hold: where every block of the state is
held by one of them after the same step, that step is continued from (`restore_from_held_states`).
Each rank takes what it held itself, and receives the rest from a rank that held the same blocks. A
rank that holds nothing never gives anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from phalanx.core.digest import digest
from phalanx.mesh.logical import LogicalShard
from phalanx.mesh.mesh import Mesh
from phalanx.observe.events import StepFinished
from phalanx.optim.state import build_restore_functions, make_missing_slots
from phalanx.train.state import TrainState


@dataclass(frozen=True)
class HeldState:
    """The whole state after `step` as one rank held it, and what it recorded of that step. Its
    tensors are those of training."""

    step: int
    facts: dict[str, Any]
    shards: dict[str, LogicalShard]
    finished: StepFinished | None = None

    @property
    def blocks(self) -> dict[str, str]:
        """By tensor, a digest of the blocks of it that are held."""
        return {name: _digest_blocks(shard) for name, shard in self.shards.items()}

    @property
    def specs(self) -> dict[str, list[Any]]:
        return {name: [list(s.global_shape), s.dtype] for name, s in self.shards.items()}


@dataclass(frozen=True)
class RestoreFromMemory:
    """The ranks that held the state which training continues from, and the record of its step by
    one of them."""

    holders: tuple[int, ...]
    finished: StepFinished | None


@dataclass(frozen=True)
class _StoredSpec:
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class _Holder:
    """A rank that holds a state, and what it said of it."""

    rank: int
    facts: dict[str, Any]
    blocks: dict[str, str]
    specs: dict[str, list[Any]]
    finished: dict[str, Any] | None


def hold_state(state: TrainState, finished: StepFinished | None) -> HeldState | None:
    """The state as it is in memory after an error; None where a part of it is of another step than
    the rest. `finished`: the record of its last step."""
    if not state.is_whole:
        return None
    shards = {}
    for name, shard in state.shards().items():
        # Without what hangs on a parameter: its gradient, and through its hooks the old groups.
        shards[name] = shard.like(name, shard.tensor.detach())
    if finished is not None and finished.step != state.step:
        finished = None
    return HeldState(state.step, state.facts(), shards, finished)


@torch.no_grad()
def restore_from_held_states(
    state: TrainState, held_state: HeldState | None, *, newest_saved_step: int
) -> RestoreFromMemory | None:
    """Continue from the state that ranks still hold, if all of it is there; None where it is not.

    Collective. A step of before `newest_saved_step` is left to the checkpoint. Without it `state`
    is left as it was, or with empty tensors of the optimizer.
    """
    mesh = state.model.mesh
    own_message = None
    if held_state is not None:
        finished = held_state.finished and asdict(held_state.finished)
        contents = [held_state.step, held_state.facts, held_state.blocks, held_state.specs]
        own_message = [*contents, finished]
    messages = mesh.gather_json(own_message)
    steps = sorted({message[0] for message in messages if message is not None}, reverse=True)
    for step in steps:
        if step < newest_saved_step:
            break
        holders = []
        for rank, message in enumerate(messages):
            if message is not None and message[0] == step:
                holders.append(_Holder(rank, *message[1:]))
        own_held = held_state if held_state is not None and held_state.step == step else None
        if _restore_from_holders(state, mesh, holders, own_held):
            return _build_restore(holders)
    return None


def _build_restore(holders: Sequence[_Holder]) -> RestoreFromMemory:
    finished = None
    for holder in holders:
        if holder.finished is not None:
            finished = StepFinished(**holder.finished)
            break
    return RestoreFromMemory(tuple(holder.rank for holder in holders), finished)


def _restore_from_holders(
    state: TrainState, mesh: Mesh, holders: Sequence[_Holder], held_state: HeldState | None
) -> bool:
    """Take the state of `holders`, if they hold all blocks that any rank needs. Collective."""
    specs: dict[str, _StoredSpec] = {}
    numbers: dict[str, Any] = {}
    for holder in holders:
        for name, (shape, dtype) in holder.specs.items():
            specs[name] = _StoredSpec(tuple(shape), dtype)
        numbers |= holder.facts["optimizer"].get("numbers", {})
    named = list(state.model.named_parameters())
    full_shapes = {name: shard.global_shape for name, shard in state.model.shards().items()}
    undos = make_missing_slots(state.optimizer, named, specs, full_shapes)
    restores = build_restore_functions(state.optimizer, named, numbers, elsewhere=specs)
    shards = state.shards()
    needed = {name: _digest_blocks(shard) for name, shard in shards.items()}
    needed_by_rank = mesh.gather_json(needed)
    transfers = _plan_transfers(needed_by_rank, holders)
    if transfers is None:
        for undo in undos:
            undo()
        return False
    for source, target, name in transfers:
        if mesh.rank == source == target:
            assert held_state is not None
            shards[name].tensor.copy_(held_state.shards[name].tensor)
        elif mesh.rank == source:
            assert held_state is not None
            _send(held_state.shards[name].tensor, target, mesh)
        elif mesh.rank == target:
            _receive(shards[name].tensor, source, mesh)
    state.finish_restoring(holders[0].facts, restores)
    return True


def _plan_transfers(
    needed_by_rank: Sequence[Mapping[str, str]], holders: Sequence[_Holder]
) -> list[tuple[int, int, str]] | None:
    """(source, target, tensor) of each tensor that a rank needs, in an order that all ranks follow;
    None if somebody needs what nobody holds."""
    transfers = []
    for target, needed in enumerate(needed_by_rank):
        for name, blocks in sorted(needed.items()):
            sources = [holder.rank for holder in holders if holder.blocks.get(name) == blocks]
            if not sources:
                return None
            # Those who need something ask different holders, and nobody asks itself over a wire.
            source = target if target in sources else sources[target % len(sources)]
            transfers.append((source, target, name))
    return transfers


def _digest_blocks(shard: LogicalShard) -> str:
    boxes = [[*box.global_offset, *box.local_offset, *box.size] for box in shard.boxes]
    return digest([list(shard.global_shape), shard.dtype, list(shard.tensor.shape), boxes])


def _send(tensor: torch.Tensor, target: int, mesh: Mesh) -> None:
    dist.send(tensor.contiguous(), target, group=mesh.group)


def _receive(tensor: torch.Tensor, source: int, mesh: Mesh) -> None:
    received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    dist.recv(received, source, group=mesh.group)
    tensor.copy_(received)
