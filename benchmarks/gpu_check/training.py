"""What all trainers share: job, module with its loss, batch, the optimizer's numbers, and the
stop-watch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import phalanx
from gpu_check.cases import Case
from phalanx.job.schema import Job
from phalanx.mesh.logical import collect_module_shards
from phalanx.nn.build import build_model, build_objective
from phalanx.plan.cluster import Cluster, detect_cluster
from phalanx.plan.plan import Plan

LR, BETAS, EPS, MAX_NORM = (
    1e-4,
    (0.9, 0.95),
    1e-8,
    1.0,
)  # no weight decay: trainers differ in what they decay

Say = Callable[[dict[str, Any]], None]


def job_and_plan(case: Case, precision: str = "bf16") -> tuple[Job, Plan]:
    """One rank, constant rate. Raises PhalanxError where phalanx refuses it."""
    job = phalanx.load_job(
        None,
        [
            *case.model,
            f"data.seq_len={case.seq_len}",
            f"train.global_batch_size={case.batch_size}",
            f"train.steps={case.steps}",
            f"train.compile={str(case.compile).lower()}",
            f"precision.compute={precision}",
            f"optim.lr={LR}",
            f"optim.betas=[{BETAS[0]}, {BETAS[1]}]",
            f"optim.eps={EPS}",
            "optim.weight_decay=0.0",
            f"optim.clip_norm={MAX_NORM}",
            "optim.schedule=constant",
            "optim.warmup_steps=0",
            f"cluster.device={case.device}",
        ],
    )
    return job, phalanx.make_plan(job, cluster=cluster_of(case.device), num_ranks=1)


def cluster_of(device: str) -> Cluster:
    if device == "cpu":
        return detect_cluster("cpu")
    properties = torch.cuda.get_device_properties(0)
    return Cluster("cuda", 1, properties.total_memory, properties.name)


def batch_of(case: Case, plan: Plan) -> dict[str, torch.Tensor]:
    """The one batch that every step of every trainer reads, on the host."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        plan.vocab_size, (case.batch_size, case.seq_len + 1), generator=generator
    )
    batch = {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    return (
        {key: value.pin_memory() for key, value in batch.items()}
        if case.device == "cuda"
        else batch
    )


class ModelWithLoss(nn.Module):
    """phalanx's own decoder and objective as any trainer takes them: tensors in, the mean loss
    out."""

    def __init__(self, job: Job, plan: Plan) -> None:
        super().__init__()
        self.model, self.objective = build_model(job, plan.model_shape), build_objective(job)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss_sum, num_targets = self.objective(self.model(inputs), {"targets": targets})
        return loss_sum / num_targets


def build(case: Case) -> tuple[ModelWithLoss, dict[str, torch.Tensor]]:
    """(the model with phalanx's initial weights on the device, blocks compiled as phalanx does;
    the batch)."""
    job, plan = job_and_plan(case)
    module = ModelWithLoss(job, plan).to_empty(device=case.device)
    initialize(module.model, job.run.seed, case.device)
    if case.compile:
        for block in module.model.blocks:  # type: ignore[union-attr]
            block.compile()
    return module, batch_of(case, plan)


def initialize(model: nn.Module, seed: int, device: str) -> None:
    """phalanx's initial weights.

    Drawing a billion takes a core ten seconds: the first trainer of a check leaves them for the
    others in the file that GPU_CHECK_WEIGHTS names.
    """
    stored = Path(os.environ["GPU_CHECK_WEIGHTS"]) if "GPU_CHECK_WEIGHTS" in os.environ else None
    if stored is not None and stored.exists():
        model.load_state_dict(torch.load(stored, map_location=device, weights_only=True))
        return
    with torch.no_grad():
        model.initialize(collect_module_shards(model)[0], seed)  # type: ignore[operator]
    if stored is not None:
        partial = stored.with_suffix(".partial")  # a trainer can be killed in the middle
        torch.save(model.state_dict(), partial)
        partial.rename(stored)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        module.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True
    )


@dataclass
class Watch:
    """Counts steps and times windows of them; says what is known after each window."""

    case: Case
    say: Say
    windows_s: list[float] = field(default_factory=list)
    num_steps: int = 0
    began_s: float = field(default_factory=time.perf_counter)

    def start(self) -> None:
        """Before the model is built: from here on memory counts."""
        if self.case.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def after_step(self) -> None:
        """Waits for the GPU after the first step and between windows, nowhere else."""
        self.num_steps += 1
        timed = self.num_steps - self.case.warmup_steps
        if self.num_steps == 1:
            self._wait()
            self.say({"first_step_s": time.perf_counter() - self.began_s})
        if timed < 0 or timed % self.case.window_steps:
            return
        self._wait()
        now = time.perf_counter()
        if timed > 0:
            self.windows_s.append(now - self._window_began_s)
            self.say(self.facts())
        self._window_began_s = now

    def facts(self) -> dict[str, Any]:
        step_s = [window / self.case.window_steps for window in self.windows_s]
        facts = {
            "step_s": step_s,
            "tokens_per_s": self.case.tokens_per_step / median(step_s),
            "extremes": [
                self.case.tokens_per_step / extreme for extreme in (max(step_s), min(step_s))
            ],
        }
        if self.case.device == "cuda":
            facts["peak_bytes"] = torch.cuda.max_memory_allocated()
        return facts

    def steps(self) -> Iterator[int]:
        """For a loop that is written out: each step, counted when it is done."""
        for step in range(self.case.steps):
            yield step
            self.after_step()

    def _wait(self) -> None:
        if self.case.device == "cuda":
            torch.cuda.synchronize()
