"""Your own training loop on any nn.Module: phalanx plans and parallelises, you keep the loop.

Run it on one rank or several; the losses are the same:

    python examples/own_loop.py
    torchrun --nproc-per-node 2 examples/own_loop.py
    torchrun --nproc-per-node 2 examples/own_loop.py parallel.dp_shard=2

With run.dir=DIR it saves at its end, and goes on from what is there, in any layout:

    python examples/own_loop.py run.dir=DIR train.steps=20
    torchrun --nproc-per-node 2 examples/own_loop.py run.dir=DIR parallel.dp_shard=2
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from torch import nn

import phalanx

BATCH, FEATURES = 64, 16


def build() -> nn.Module:
    """A small regression net.

    Built from the same seed on every rank; phalanx checks that it was.
    """
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)
    )


def squared_error(
    outputs: torch.Tensor, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """An objective returns a sum and how many targets it sums over, so that averages are exact
    on any layout."""
    return (outputs - batch["targets"]).square().sum(), torch.tensor(batch["targets"].numel())


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, FEATURES, generator=generator)
    return x, x[:, :4].sin().sum(dim=1, keepdim=True)


def main(overrides: list[str]) -> list[float]:
    job = phalanx.load_job(
        None, [f"train.global_batch_size={BATCH}", "train.steps=30", "data.seq_len=1", *overrides]
    )
    plan = phalanx.make_plan(job, num_ranks=phalanx.running_ranks())
    losses = []
    with phalanx.open_mesh(plan.layout, device="cpu") as mesh:
        model = phalanx.parallelize(build(), plan, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        state = phalanx.TrainState(model, optimizer, job.run.seed)  # the content of a checkpoint
        storage = phalanx.RunStorage.open(job.run.dir) if job.run.dir else None
        if storage and (checkpoints := storage.store.folders()):
            state.restore(checkpoints[-1], phases=model.phases)
        share = BATCH // plan.layout.data_parallel_size
        mine = slice(mesh.data_parallel_rank * share, (mesh.data_parallel_rank + 1) * share)
        for step in range(state.step + 1, job.train.steps + 1):
            x, y = global_batch(step)
            microbatch = {"inputs": x[mine], "targets": y[mine]}
            local_loss = model.forward_backward([microbatch], squared_error)
            # One reduction: the exact loss and gradient norm over all ranks, and clipping.
            stats = model.reduce_and_clip(local_loss, max_norm=1.0)
            if stats.should_apply:
                model.update(optimizer)  # optimizer.step(), and what ranks updated for each other
            optimizer.zero_grad(set_to_none=True)
            losses.append(stats.loss)
            state.step = step
        if storage:  # all ranks together, each its part
            state.save(storage.store, job_digest=plan.job_digest, phases=model.phases)
        if mesh.rank == 0:
            print(f"{plan.layout}: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
    return losses


if __name__ == "__main__":
    main(sys.argv[1:])
