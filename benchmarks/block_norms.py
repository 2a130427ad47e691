"""What norms by block cost: the default model in one process, each second step measured.

    python benchmarks/block_norms.py [--steps N] [--batch N]

Prints the median processor milliseconds of a step without and with the norms of gradients, update
and weights, what they add, and that over a run that measures each observe.norms_every-th step.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import phalanx
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.build import build_model, build_objective
from phalanx.observe.bus import Bus
from phalanx.optim.build import build_optimizer
from phalanx.parallel.parallelize import parallelize
from phalanx.train.block_norms import BlockNormRecorder

NUM_WARM_UP = 10


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="with norms, and without")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = phalanx.load_job(None, [f"train.global_batch_size={args.batch}"])
    plan = phalanx.make_plan(job, num_ranks=1, vocab_size=256)
    with open_mesh(plan.layout, device="cpu") as mesh:
        model = parallelize(build_model(job, plan.model_shape), plan, mesh, seed=0)
        optimizer = build_optimizer(model, job.optim)
        objective = build_objective(job)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(256, (args.batch, job.data.seq_len + 1), generator=generator)
        batch = {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
        # Odd steps are measured, and even ones add up the update: two steps are one measurement.
        norms = BlockNormRecorder(2, plan, model, Bus(rank=0))
        nothing = BlockNormRecorder(0, plan, model, Bus(rank=0))
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for pair in range(2 * args.steps + NUM_WARM_UP):
            is_measured = pair % 2 == 0
            recorder = norms if is_measured else nothing
            began = time.process_time()
            for step in (1, 2):
                loss = model.forward_backward([batch], objective)
                request = recorder.request_norms(step)
                facts = model.reduce_and_clip(loss, max_norm=1.0, by_block=request)
                with recorder.measuring_update(step):
                    model.update(optimizer)
                optimizer.zero_grad(set_to_none=True)
                recorder.finish_step(step, facts)
            if pair >= NUM_WARM_UP:
                seconds[is_measured].append(time.process_time() - began)
    plain_ms = 1000 * statistics.median(seconds[False]) / 2
    added_ms = 1000 * (statistics.median(seconds[True]) - statistics.median(seconds[False]))
    every = job.observe.norms_every
    print(f"a step           {plain_ms:.2f} ms, {plan.num_params:,} parameters")
    print(f"a measurement    {added_ms:.2f} ms")
    print(f"every {every:<10} {100 * added_ms / every / plain_ms:.3f} % of a step")


if __name__ == "__main__":
    main()
