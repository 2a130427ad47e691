"""What must not depend on the device, or on where tensors lie: masks of dropout, offloading, and
how often a step waits for the device.

Each case by itself: one that fails is a line of the table.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import phalanx
from gpu_check.cases import Case
from gpu_check.training import Say, cluster_of
from phalanx.core.errors import PhalanxError
from phalanx.mesh.counter_rng import make_dropout_keep_mask
from phalanx.nn.build import build_model, build_objective
from phalanx.optim.build import build_optimizer

STEPS = 4
SAME = 1e-4  # relative, of losses: kernels that add up in another order each time
MOST_SYNCS = 3  # of a step of one dense model on one GPU
SMALL = (
    "model.num_layers=2",
    "model.dim=256",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.vocab_size=512",
    "data.seq_len=128",
    "train.global_batch_size=4",
    "train.sample_tokens=0",
    "optim.warmup_steps=0",
)


@dataclass(frozen=True)
class Found:
    """`error` against `limit`; `note` says of what, or why there is none."""

    error: float
    limit: float
    note: str

    def to_row(self) -> dict[str, Any]:
        return {
            "worst": self.note,
            "error": self.error,
            "limit": self.limit,
            "agrees": self.error <= self.limit,
        }


def measure(case: Case, say: Say) -> None:
    run_cases(CASES, case, say)


def run_cases(cases: dict[str, Callable[[Case], Found]], case: Case, say: Say) -> None:
    """All of them, whatever becomes of one; rows are said as they come."""
    rows: dict[str, Any] = {}
    for name, check in cases.items():
        try:
            rows[name] = check(case).to_row()
        except PhalanxError as error:  # what this device or torch has not is no difference
            rows[name] = Found(0.0, 0.0, f"refused: {error}").to_row()
        except Exception as error:
            text = (str(error).strip().splitlines() or [""])[0]
            rows[name] = Found(math.inf, 0.0, f"{type(error).__name__}: {text}"[:160]).to_row()
        say({"parity": rows, "agrees": all(row["agrees"] for row in rows.values())})


def compare_masks(case: Case) -> Found:
    """Share of elements whose bit is another one on the device."""
    differing = total = 0
    for sizes, offsets, whole in (
        ((64, 1000), None, None),
        ((3, 7, 129), (5, 2, 31), (16, 16, 257)),
        ((1, 1 << 20), None, None),
    ):
        box = {"offsets": offsets, "global_sizes": whole}
        masks = [
            make_dropout_keep_mask(2**61 + 7, 0.9, sizes, **box, device=device)
            for device in ("cpu", case.device)
        ]
        differing += int((masks[0] != masks[1].cpu()).sum())
        total += masks[0].numel()
    return Found(differing / total, 0.0, "bits of masks")


def compare_offloading(key: str) -> Callable[[Case], Found]:
    """Losses with a key of offloading against those without."""

    def check(case: Case) -> Found:
        plain, offloaded = (losses_of(case, *keys) for keys in ((), (key,)))
        error = max(abs(a / b - 1) for a, b in zip(offloaded, plain, strict=True))
        return Found(error, SAME, "losses")

    return check


def count_syncs(case: Case) -> Found:
    """How often the last step waits for the device, as torch warns of it."""
    if case.device != "cuda":
        return Found(0.0, float(MOST_SYNCS), "no GPU: not counted")
    syncs: list[int] = []
    losses_of(case, "precision.compute=bf16", count=syncs)
    return Found(float(syncs[-1]), float(MOST_SYNCS), "waits for the device in a step")


@dataclass
class _Syncs:
    """Counts torch's warnings of synchronising calls while it is open."""

    num: int = 0
    _caught: Any = field(default=None)

    def __enter__(self) -> _Syncs:
        self._catcher = warnings.catch_warnings(record=True)
        self._caught = self._catcher.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *exc: object) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self.num = sum("synchroniz" in str(warning.message) for warning in self._caught)
        self._catcher.__exit__(*exc)


def losses_of(case: Case, *keys: str, count: list[int] | None = None) -> list[float]:
    """Of a few steps of a small model on one batch; `count` gets the number of syncs of each
    step."""
    fixed = (f"train.steps={STEPS}", f"cluster.device={case.device}")
    job = phalanx.load_job(None, [*SMALL, *fixed, *keys])
    plan = phalanx.make_plan(job, cluster=cluster_of(case.device), num_ranks=1)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(plan.vocab_size, (4, plan.seq_len + 1), generator=generator)
    batch = {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    if case.device == "cuda":
        batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    losses, objective = [], build_objective(job)
    with phalanx.open_mesh(plan.layout, device=plan.device) as mesh:
        model = phalanx.parallelize(
            build_model(job, plan.model_shape), plan, mesh, seed=job.run.seed
        )
        optimizer = build_optimizer(model, job.optim)

        def step(number: int) -> None:
            sums = model.forward_backward([batch], objective, step=number)
            losses.append(model.reduce_and_clip(sums, max_norm=1.0).loss)
            model.update(optimizer)
            optimizer.zero_grad(set_to_none=True)

        for number in range(1, STEPS + 1):
            if count is None:
                step(number)
                continue
            with _Syncs() as syncs:
                step(number)
            count.append(syncs.num)
    return losses


CASES = {
    "dropout's masks on the CPU and here": compare_masks,
    "optimizer in the host's memory": compare_offloading("parallel.offload=optimizer"),
    "activations in the host's memory": compare_offloading("train.offload_activations=true"),
    "waits for the device in a step": count_syncs,
}
