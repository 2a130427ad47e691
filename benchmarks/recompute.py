"""What each way of recomputing saves and costs: bytes kept, predicted and alive, and seconds of a
step, as ratios.

    python benchmarks/recompute.py [--layers N] [--dim N] [--seq-len N] [--rows N] [--repeats N]

One process, one thread, fp32. `kept` are the bytes of the storages that the model's forward leaves
alive, weights left out; `predicted` is what the plan says. `step` is the processor time of a
forward and backward, the least of the repeats, over that of "none". The modes take turns, so that a
busy machine slows all of them alike.
"""

from __future__ import annotations

import argparse
import time
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.job.schema import Job
from phalanx.mesh.mesh import Mesh
from phalanx.nn.build import build_model
from phalanx.nn.objective import causal_cross_entropy
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.cluster import Cluster
from phalanx.plan.layout import Layout
from phalanx.plan.memory import bytes_at_forward_end
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.workload import Workload

MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "every-k, k = 2": {"recompute": "every-k", "recompute_every": 2},
    "sqrt": {"recompute": "sqrt"},
}


class Alive(TorchDispatchMode):
    """Bytes of the storages that operations made and that are still there."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.now = 0
        self._known = {weight.untyped_storage()._cdata for weight in weights}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.untyped_storage()._cdata not in self._known
            ):
                storage = tensor.untyped_storage()
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return out

    def _gone(self, known: int, num_bytes: int) -> None:
        self._known.discard(known)
        self.now -= num_bytes


def plan_of(arguments: argparse.Namespace, train: dict[str, Any]) -> Plan:
    dim = arguments.dim
    job = Job.model_validate(
        {
            "model": {
                "num_layers": arguments.layers,
                "dim": dim,
                "num_heads": dim // 64,
                "vocab_size": 256,
            },
            "data": {"seq_len": arguments.seq_len},
            "train": {"global_batch_size": arguments.rows, **train},
            "parallel": {"ranks": 1},
        }
    )
    return make_plan(job, cluster=Cluster("cpu", 1, 1 << 40))


def built(plan: Plan) -> ParallelModel:
    module = build_model(Job(), plan.model_shape)
    return parallelize(module, plan, Mesh(Layout(), 0, 0, torch.device("cpu")), seed=0)


def kept(model: ParallelModel, batch: dict[str, torch.Tensor]) -> int:
    """Of the model alone: the loss is the same in every mode."""
    with Alive(model.module.parameters()) as alive:
        outputs = model.module(batch["inputs"])
        with_graph = alive.now
        del outputs
    return with_graph


def step_s(model: ParallelModel, batch: dict[str, torch.Tensor]) -> float:
    began = time.process_time()
    model.forward_backward([batch], causal_cross_entropy(2048))
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, value in (
        ("layers", 12),
        ("dim", 256),
        ("seq-len", 256),
        ("rows", 8),
        ("repeats", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokens = torch.randint(0, 256, (arguments.rows, arguments.seq_len))
    batch = {"inputs": tokens, "targets": tokens}
    plans = {name: plan_of(arguments, train) for name, train in MODES.items()}
    models = {name: built(plan) for name, plan in plans.items()}
    measured = {name: kept(model, batch) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(arguments.repeats + 1):  # the first warms up
        for name, model in models.items():
            seconds[name].append(step_s(model, batch))
    alone = min(seconds["none"][1:])
    print("| mode | kept, predicted | kept, measured | step / none |\n|---|---|---|---|")
    for name, plan in plans.items():
        work = Workload(arguments.rows, arguments.seq_len, "fp32", plan.activations.recompute, 2048)
        predicted = bytes_at_forward_end(
            plan.model_shape, replace(work, segments=plan.activations.recompute_segments)
        )
        ratio = min(seconds[name][1:]) / alone
        print(
            f"| {name} | {predicted / 2**20:.1f} MiB | {measured[name] / 2**20:.1f} MiB |"
            f" {ratio:.2f} |"
        )


if __name__ == "__main__":
    main()
