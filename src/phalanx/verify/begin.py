"""The weights and the learning rate with which the judged steps begin, in one process and in each
layout."""

from __future__ import annotations

import torch
from torch import nn

from phalanx.job.schema import Optim
from phalanx.parallel.model import ParallelModel
from phalanx.verify.trace import TraceTensorReader
from phalanx.verify.trace_facts import BEGIN_KIND, Trace

INIT_NOISE_STD = 0.1  # standard deviation


@torch.no_grad()
def randomize_constant_parameters(module: nn.Module) -> tuple[str, ...]:
    """Add noise to each trainable parameter whose elements are all equal (a norm's 1, a bias's or
    an adapter's 0), and return their names: a constant hides what should move it, and what is
    added or multiplied in another order."""
    generator = torch.Generator().manual_seed(0)
    names = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad or parameter.numel() < 2 or parameter.is_complex():
            continue
        if bool((parameter == parameter.flatten()[0]).all()):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += (INIT_NOISE_STD * noise).to(parameter.dtype)
            names.append(name)
    return tuple(names)


@torch.no_grad()
def load_leader_starting_weights(module: nn.Module, leader: Trace) -> None:
    """Give a module the weights with which the first step of `leader` begins."""
    with TraceTensorReader(leader, BEGIN_KIND) as reader:
        for name, parameter in module.named_parameters():
            parameter.copy_(reader.read(name))


@torch.no_grad()
def load_starting_weights_of_trace(model: ParallelModel, trace: Trace) -> None:
    """Give a layout the weights with which the first step of `trace` begins, where its own are
    others. Collective."""
    shards, is_changed = model.shards(), False
    with TraceTensorReader(trace, BEGIN_KIND) as reader:
        for name in trace.sizes[BEGIN_KIND]:
            if name not in shards:
                continue
            shard = shards[name]
            for box in shard.boxes:
                local_block = shard.tensor[box.slices_in_local_tensor]
                reference_block = reader.block(name, box.global_offset, box.size)
                if local_block.shape == reference_block.shape and not torch.equal(
                    local_block.cpu(), reference_block
                ):
                    local_block.copy_(reference_block)
                    is_changed = True
    if is_changed:
        model.refresh()


def replace_learning_rate(optim: Optim, lr: float | None) -> Optim:
    """The job's optimizer with the learning rate of a reference; None: its own."""
    if lr is None:
        return optim
    return optim.model_copy(update={"lr": lr})
