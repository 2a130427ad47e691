"""Which of the 32 bits of a number are seen when they flip, as docs/numerics.md says: the detectors
themselves look at a step of a small model."""

from __future__ import annotations

from pathlib import Path

import torch

from phalanx.mesh.bit_digest import compute_bit_digest
from phalanx.resilience.tensors import (
    find_largest_optimizer_tensor,
    find_largest_parameter,
    flip_bit,
)
from phalanx.train.memory_checks import MemoryChecks
from phalanx.train.state_blocks import OptimizerStateBlock, digest_state_block
from phalanx.train.trainer import Trainer
from trained import Case, train_case

BITS = range(32)
HIGHEST_OF_EXPONENT = 30


def flip_bit_of_next_gradient(parameter: torch.nn.Parameter, bit: int) -> None:
    def flip(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        flipped = gradient.clone()
        # Below 2: the exponent's highest bit is 0.
        assert 2.0**-60 < abs(float(flipped.view(-1)[flipped.numel() // 2])) < 2
        flip_bit(flipped, bit=bit)
        return flipped

    handle = parameter.register_hook(flip)


class OnDevice(torch.Tensor):
    """As a tensor of a GPU: the host sees a copy."""

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor).clone()


def test_a_bit_flips_in_the_memory_of_the_tensor_itself() -> None:
    for tensor in (torch.ones(()), torch.ones(3, 5), torch.ones(5, 3).t(), torch.ones(8)[::2]):
        version = tensor._version
        for bit in BITS:
            before = tensor.clone()
            flip_bit(tensor, bit=bit)
            expected = before.reshape(-1).numpy().copy()
            expected.view("uint32")[len(expected) // 2] ^= 1 << bit
            assert tensor.reshape(-1).numpy().tobytes() == expected.tobytes()
            flip_bit(tensor, bit=bit)
        assert tensor._version == version, "autograd would tell of the fault"


def test_a_bit_flips_where_the_host_has_a_copy() -> None:
    tensor = torch.ones(4).as_subclass(OnDevice)
    flip_bit(tensor, bit=31)
    assert tensor.tolist() == [1, 1, -1, 1]


def find_seen_gradient_bits(trainer: Trainer) -> set[int]:
    """Bits of an ordinary gradient whose flip makes the step not finite."""
    model, optimizer = trainer.state.model, trainer.state.optimizer
    parameter = find_largest_parameter(model.module)
    seen = set()
    for bit in BITS:
        flip_bit_of_next_gradient(parameter, bit)
        microbatches = trainer.data.batches.step_microbatches(2)
        sums = model.forward_backward(microbatches, trainer.data.objective, step=2)
        if not model.reduce_and_clip(sums, max_norm=1.0).finite:
            seen.add(bit)
        optimizer.zero_grad(set_to_none=True)
    return seen


def find_seen_memory_bits(trainer: Trainer, tensor: torch.Tensor) -> set[int]:
    """Bits of the state whose flip `resilience.check_memory_every` sees."""
    checks = MemoryChecks(trainer.state)
    seen = set()
    for bit in BITS:
        checks.digest_after_step()
        flip_bit(tensor, bit=bit)
        if checks.find_changed_tensors():
            seen.add(bit)
        flip_bit(tensor, bit=bit)
    return seen


def find_seen_replica_bits(tensor: torch.Tensor) -> set[int]:
    """Bits of a weight whose flip changes the digest that replicas compare."""
    seen = set()
    for bit in BITS:
        other = tensor.clone()
        flip_bit(other, bit=bit)
        if compute_bit_digest(other) != compute_bit_digest(tensor):
            seen.add(bit)
    return seen


def find_seen_replica_bits_of_state(trainer: Trainer) -> set[int]:
    """Bits of each tensor of a weight's state whose flip changes the digest that replicas
    compare."""
    state = trainer.state
    name, parameter = next(iter(state.model.named_parameters()))
    slots = tuple(state.optimizer.state[parameter])
    assert set(slots) == {"step", "exp_avg", "exp_avg_sq"}
    block = OptimizerStateBlock(name, 0, (), slots, ())

    def digest() -> int:
        return int(digest_state_block(block, state.optimizer, parameter, torch.device("cpu")))

    before, seen = digest(), set(BITS)
    for slot in slots:
        for bit in BITS:
            flip_bit(state.optimizer.state[parameter][slot], bit=bit)
            if digest() == before:
                seen.discard(bit)
            flip_bit(state.optimizer.state[parameter][slot], bit=bit)
    assert digest() == before
    return seen


def test_bits_that_are_seen(tmp_path: Path) -> None:
    seen: dict[str, set[int]] = {}

    def flip_bits_after_one_step(trainer: Trainer) -> None:
        trainer.step()
        weight = find_largest_parameter(trainer.state.model.module).detach()
        moment = find_largest_optimizer_tensor(trainer.state.optimizer)
        seen["gradient"] = find_seen_gradient_bits(trainer)
        parameter = find_largest_parameter(trainer.state.model.module)
        num_updates = trainer.state.optimizer.state[parameter]["step"]
        assert num_updates.numel() == 1
        seen["count of updates, in memory"] = find_seen_memory_bits(trainer, num_updates)
        seen["weight, in memory"] = find_seen_memory_bits(trainer, weight)
        seen["moment, in memory"] = find_seen_memory_bits(trainer, moment)
        seen["weight, of replicas"] = find_seen_replica_bits(weight)
        seen["moment, of replicas"] = find_seen_replica_bits_of_state(trainer)

    train_case(0, Case(), tmp_path, change=flip_bits_after_one_step)
    assert seen.pop("gradient") == {HIGHEST_OF_EXPONENT}
    assert set(map(frozenset, seen.values())) == {frozenset(BITS)}
