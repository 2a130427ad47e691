"""A small training run for tests of resuming: real trainer, loader and checkpoints, in the ranks
of one group."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from checkpoints import Tensors, newest, restore_state
from commands import write_text
from models import share
from phalanx.checkpoint.run_storage import RunStorage
from phalanx.core.files import write_json_atomically
from phalanx.data.corpus import load_corpus
from phalanx.data.loader import RankBatchShare, TrainBatches
from phalanx.data.prepare import prepare_corpus
from phalanx.data.samples import SampleSpec
from phalanx.job.schema import Data, Job, Optim
from phalanx.mesh.mesh import Mesh
from phalanx.nn.objective import causal_cross_entropy
from phalanx.observe.bus import Bus
from phalanx.observe.events import Event, RunStarted, SamplesRead, StepFinished
from phalanx.optim.build import build_optimizer
from phalanx.optim.groups import WeightDecayGroups
from phalanx.optim.optimizers import adamw
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.cluster import Cluster
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.train.state import TrainState
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import TrainingData

SEQ_LEN, BATCH, VOCAB, SEED = 12, 24, 257, 5
STEPS, SAVED = 5, 3  # saved once
CPU = Cluster("cpu", 8, 64 * 2**30)


@dataclass(frozen=True)
class RandomSteps:
    """A rank's microbatches of random tokens, the same of a step whenever it is asked for."""

    rank: int
    num_ranks: int
    num_microbatches: int

    def step_microbatches(self, step: int) -> list[dict[str, torch.Tensor]]:
        drawn = torch.randint(
            VOCAB, (2, BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(step)
        )
        batch = {"inputs": drawn[0], "targets": drawn[1]}
        return share(batch, self.rank, self.num_ranks, self.num_microbatches)


class Everything(nn.Module):
    """Each kind of state a module can have: a tied weight, uneven shapes, one that is frozen,
    running statistics, a constant buffer, and (with `dropout`) random numbers in its forward.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.lookup = nn.Embedding(VOCAB, 11)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(11, 7), nn.GELU(), nn.Linear(7, 11), nn.Tanh())
            for _ in range(2)
        )
        self.statistics = nn.BatchNorm1d(11)
        self.frozen = nn.Linear(11, 11, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(11, VOCAB)
        self.out.weight = self.lookup.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 11))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.lookup(inputs) * self.scale
        for block in self.blocks:
            x = x + block(x)
        x = self.statistics(x.transpose(1, 2)).transpose(1, 2)
        if self.dropout.p:
            x = x * (0.9 + 0.1 * random.random() + 0.1 * np.random.random())
        logits: torch.Tensor = self.out(self.dropout(x + self.frozen(x)))
        return logits


def new_module(dtype: torch.dtype, dropout: float = 0.0, seed: int = 1) -> nn.Module:
    """The same weights on every rank and at every call."""
    torch.manual_seed(seed)
    return Everything(dropout).to(dtype)


class CountedAdamW(torch.optim.AdamW):
    """AdamW that takes smaller steps the more it has taken.

    It counts that in every way in which an optimizer keeps something that belongs to no parameter:
    in its groups as a number, a tensor and a list, and under names of its own.
    """

    def step(self, closure: Any = None) -> Any:
        whole = self.state["whole"]
        whole["seen"] = whole.get("seen", torch.ones(2)) * 1.25
        whole["count"] = whole.get("count", 0) + 1
        self.state["tally"] = self.state.get("tally", 0) + 1
        self.state["beat"] = self.state.get("beat", torch.ones(())) * 1.5
        own = float(whole["seen"].sum() + whole["count"] + self.state["tally"] + self.state["beat"])
        for group in self.param_groups:
            group["updates"] = group.get("updates", 0) + 1
            group["pace"] = group.get("pace", torch.ones(())) * 0.75
            group["recent"] = [*group.get("recent", []), group["updates"] / 4][-2:]
            group["span"] = (group["updates"], *group.get("span", ())[:1])
            group["lr"] *= float(group["pace"]) / (
                own + group["updates"] + sum(group["recent"]) + sum(group["span"])
            )
        return super().step(closure)


def counted_adamw(groups: WeightDecayGroups, optim: Optim) -> torch.optim.Optimizer:
    optimizer = adamw.build(groups, optim)
    optimizer.__class__ = CountedAdamW
    return optimizer


def write_corpus(folder: Path) -> Path:
    """A mixture of two sources in RUN/data of a run that others are copied from."""
    text, more = write_text(folder / "text"), write_text(folder / "more")
    (more / "abc.py").unlink()
    mixture = ({"source": str(text), "weight": 2.0}, {"source": str(more), "weight": 1.0})
    run_dir = folder / "empty"
    prepare_corpus(Data.model_validate(_data(mixture)), run_dir / "data", vocab_size=VOCAB)
    return run_dir


def _data(mixture: Any = ()) -> dict[str, Any]:
    return {"seq_len": SEQ_LEN, "mixture": mixture}


def job_for(num_ranks: int, *, optimizer: str = "adamw", **parallel: Any) -> Job:
    """A run of STEPS steps that is saved after SAVED of them."""
    return Job.model_validate(
        {
            "run": {"seed": SEED},
            "data": _data(),
            "train": {"steps": STEPS, "global_batch_size": BATCH},
            "parallel": {"ranks": num_ranks, **parallel},
            "optim": {"kind": optimizer, "lr": 0.01, "warmup_steps": 2},
            "checkpoint": {"every_steps": SAVED, "at_end": False},
            "eval": {"tokens": 0},
        }
    )


def plan_for(num_ranks: int, **parallel: Any) -> Plan:
    return make_plan(job_for(num_ranks, **parallel), cluster=CPU, vocab_size=VOCAB)


class _Heard(Bus):
    """A bus that keeps what was said."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)
        super().emit(event)


@dataclass(frozen=True)
class Outcome:
    """One rank's account of a run: losses and norms by step, what it read, and whole tensors at
    steps asked for."""

    losses: dict[int, float]
    norms: dict[int, float]
    read: dict[int, str]
    whole: dict[int, Tensors]
    facts: dict[str, Any]


def new_state(
    mesh: Mesh, job: Job, plan: Plan, module: nn.Module, *, tokenizer: str = ""
) -> TrainState:
    torch.set_num_threads(
        1
    )  # until the mesh is closed: two would mostly wait for each other over tensors so small
    model = parallelize(module, plan, mesh, seed=job.run.seed)
    return TrainState(model, build_optimizer(model, job.optim), job.run.seed, tokenizer)


def train(
    state: TrainState,
    job: Job,
    plan: Plan,
    run_dir: Path,
    *,
    attempt: int,
    look_at: tuple[int, ...],
) -> Outcome:
    """From where `state` stands to the last step; RUN/data is there. Collective."""
    mesh = state.model.mesh
    corpus = load_corpus(run_dir / "data")
    spec = SampleSpec(str(corpus.directory), plan.seq_len, job.run.seed, job.data.document_masks)
    share = RankBatchShare(
        plan.global_batch_size,
        plan.micro_batch_size,
        plan.layout.data_parallel_size,
        mesh.data_parallel_rank,
        state.step,
        state.samples_seen,
    )
    data = TrainBatches(spec, share, keep_record=True)
    bus = _Heard(rank=mesh.rank, attempt=attempt, run_dir=run_dir)
    found: dict[int, Tensors] = {}

    def records(step: int) -> list[Event]:
        if step in look_at:
            found[step] = whole_tensors(state)
        return data.record(step)

    trainer = Trainer(
        job,
        plan,
        state,
        bus,
        TrainingData(data, causal_cross_entropy(64), records=records),
        storage=RunStorage.open(run_dir),
    )
    if mesh.rank == 0:
        layout = plan.layout.to_json()
        bus.emit(
            RunStarted(
                "test", plan.job_digest, mesh.world_size, state.step, job.train.steps, "cpu", layout
            )
        )
        write_json_atomically(run_dir / "job.json", job.to_json())
    try:
        trainer.run()
    finally:
        data.close()
        bus.close()
    steps = [event for event in bus.events if isinstance(event, StepFinished)]
    return Outcome(
        losses={event.step: event.loss for event in steps},
        norms={event.step: event.grad_norm for event in steps},
        read={event.step: event.xxh3 for event in bus.events if isinstance(event, SamplesRead)},
        whole=found,
        facts=state.facts(),
    )


def resume(state: TrainState, job: Job, plan: Plan, run_dir: Path) -> Outcome:
    """From the newest checkpoint of the run to the last step; `whole` has what was restored, too.

    Collective.
    """
    restore_state(state, newest(run_dir))
    restored = {state.step: whole_tensors(state)}
    outcome = train(state, job, plan, run_dir, attempt=1, look_at=(STEPS,))
    return replace(outcome, whole=restored | outcome.whole)


def whole_tensors(state: TrainState) -> Tensors:
    """Weights, buffers and optimizer state, gathered by torch and named here: what a restore is
    compared with."""

    def full(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()

    found: Tensors = {name: full(buffer) for name, buffer in state.model.module.named_buffers()}
    for name, parameter in state.model.named_parameters():
        found[name] = full(state.model.module.get_parameter(name))
        for slot, value in state.optimizer.state.get(parameter, {}).items():
            found[f"{name} {slot}"] = full(torch.as_tensor(value))
    return found


def differing(a: Tensors, b: Tensors) -> list[str]:
    """Names whose bits are not the same, or that only one has."""
    names = sorted(set(a) | set(b))
    return [
        name
        for name in names
        if name not in a or name not in b or not torch.equal(a[name], b[name])
    ]


def copy_run(source: Path, target: Path, mesh: Mesh) -> Path:
    """The same run under another name, made by rank 0; its data is where it was. Collective."""
    if mesh.rank == 0:
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("data"))
        (target / "data").symlink_to((source / "data").resolve())
    mesh.barrier()
    return target
