"""A whole run through a pipeline: steps, evaluations, saves, resuming, a sample of text, and what
it tells of itself.

The reference is the same run in one process, in fp64; of what comes after a resumption the run that
went on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from models import BATCH, CPU, SEQ_LEN, VOCAB, decoder_of, global_batches, share
from phalanx.checkpoint.manifest import list_checkpoint_paths_of_run, read_manifest
from phalanx.checkpoint.reading.verify import find_checkpoint_problems
from phalanx.checkpoint.reading.weights import load_weights
from phalanx.checkpoint.run_storage import RunStorage
from phalanx.job.schema import Job
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.objective import causal_cross_entropy
from phalanx.observe.bus import Bus
from phalanx.observe.events import EvalFinished, Event, PipelineMeasured, StepFinished
from phalanx.observe.tail import read_recorded_events
from phalanx.optim.build import build_optimizer
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.pipeline.schedule import Action
from phalanx.plan.planner import make_plan
from phalanx.train.generate import generate_tokens
from phalanx.train.state import TrainState
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import TrainingData
from ranks import run_ranks

STEPS, LAYERS = 6, 4
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "1f1b": (2, {"pp": 2}),
    "zb-v": (2, {"pp": 2, "schedule": "zb-v"}),
    "pp-ddp": (4, {"pp": 2, "dp_replicate": 2}),
}
Batch = Mapping[str, torch.Tensor]


class Objective:
    def __init__(self) -> None:
        self._loss = causal_cross_entropy(16)

    def __call__(self, outputs: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return self._loss(outputs, batch)

    def metrics(self, outputs: Any, batch: Batch) -> Mapping[str, tuple[Any, Any]]:
        hidden = outputs.hidden_BTD
        return {"size": (hidden.square().sum(), hidden.numel())}


@dataclass(frozen=True)
class Steps:
    """This rank's microbatches of each step."""

    rank: int
    num_ranks: int
    num_microbatches: int

    def step_microbatches(self, step: int) -> Sequence[Batch]:
        return share(
            global_batches(STEPS)[step - 1], self.rank, self.num_ranks, self.num_microbatches
        )


def job_of(name: str) -> Job:
    num_ranks, layout = LAYOUTS[name]
    return Job.model_validate(
        {
            "model": {
                "dim": 32,
                "num_layers": LAYERS,
                "num_heads": 4,
                "num_kv_heads": 2,
                "ffn_dim": 40,
            },
            "data": {"seq_len": SEQ_LEN},
            "train": {"global_batch_size": BATCH, "micro_batch_size": 3, "steps": STEPS},
            "eval": {"every_steps": 3},
            "checkpoint": {"every_steps": 3},
            "parallel": {"ranks": num_ranks, **layout},
        }
    )


def trained(rank: int, name: str, folder: str, restore_from: str | None = None) -> list[int]:
    """Train to the end, from the third step on if there is one to `restore_from`.

    Returns a sample.
    """
    job = job_of(name)
    plan = make_plan(job, cluster=CPU, vocab_size=VOCAB)
    bus = Bus(rank=rank, run_dir=Path(folder))
    with open_mesh(plan.layout, device="cpu") as mesh:
        model = parallelize(decoder_of(LAYERS), plan, mesh)
        state = TrainState(model, build_optimizer(model, job.optim), seed=7)
        if restore_from is not None:
            state.restore(list_checkpoint_paths_of_run(Path(restore_from))[0], phases=model.phases)
            assert state.step == 3
        place = (mesh.data_parallel_rank, plan.layout.data_parallel_size)
        held_out = {"": share(global_batches(1)[0], *place, plan.num_microbatches)}
        data = TrainingData(Steps(*place, plan.num_microbatches), Objective(), held_out)
        trainer = Trainer(job, plan, state, bus, data, storage=RunStorage.open(folder))
        assert trainer.run() == "finished"
        sample = generate_tokens(model, [1, 2, 3], num_tokens=8, context=SEQ_LEN, seed=3)
    bus.close()
    return sample


@dataclass(frozen=True)
class Ran:
    folder: Path
    sample: list[int]

    def events(self, kind: type[Event], rank: int = 0) -> list[Any]:
        return [envelope.event for envelope in read_recorded_events(self.folder, kind, rank=rank)]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        module = decoder_of(LAYERS)
        assert load_weights(module, self.folder) == STEPS
        return {key: parameter.detach() for key, parameter in module.named_parameters()}


def run(name: str, folder: Path, restore_from: Path | None = None) -> Ran:
    samples = run_ranks(
        LAYOUTS[name][0], trained, name, str(folder), restore_from and str(restore_from)
    )
    assert all(sample == samples[0] for sample in samples), "every rank has the same tokens"
    return Ran(folder, samples[0])


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    return {name: run(name, tmp_path_factory.mktemp(name)) for name in LAYOUTS}


def off(found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """The largest difference of a weight."""
    assert found.keys() == reference.keys()
    return max(float((found[key] - reference[key]).abs().max()) for key in reference)


PIPELINES = sorted(set(LAYOUTS) - {"one"})


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_trains_evaluates_and_writes_as_one_process_does(
    ran: dict[str, Ran], name: str
) -> None:
    found, reference = ran[name], ran["one"]
    losses, wanted = (
        [(e.step, e.loss) for e in r.events(StepFinished)] for r in (found, reference)
    )
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in wanted], rel=1e-10)
    assert off(found.weights, reference.weights) < 1e-8
    evaluations, judged = (r.events(EvalFinished) for r in (found, reference))
    assert [e.step for e in evaluations] == [3, STEPS]
    for one, other in zip(evaluations, judged, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-9)
        assert one.num_targets == other.num_targets
        assert one.metrics["size"] == pytest.approx(other.metrics["size"], rel=1e-9)
    assert found.sample == reference.sample


@pytest.mark.parametrize("name", PIPELINES)
def test_its_checkpoints_are_those_of_one_process(ran: dict[str, Ran], name: str) -> None:
    for folder, reference in zip(
        *(list_checkpoint_paths_of_run(ran[key].folder) for key in (name, "one")), strict=True
    ):
        assert not find_checkpoint_problems(folder)
        found, wanted = read_manifest(folder), read_manifest(reference)
        assert found.facts == wanted.facts
        assert found.aliases == wanted.aliases
        assert {key: (t.shape, t.dtype) for key, t in found.tensors.items()} == {
            key: (t.shape, t.dtype) for key, t in wanted.tensors.items()
        }


@pytest.mark.parametrize(
    ("writer", "reader"),
    [("1f1b", "1f1b"), ("1f1b", "one"), ("one", "zb-v"), ("zb-v", "pp-ddp"), ("pp-ddp", "1f1b")],
)
def test_any_cut_continues_from_any_other(
    ran: dict[str, Ran], writer: str, reader: str, tmp_path: Path
) -> None:
    resumed = run(reader, tmp_path, ran[writer].folder)
    assert [e.step for e in resumed.events(StepFinished)] == [4, 5, 6]
    difference = off(resumed.weights, ran[writer].weights)
    assert difference == 0.0 if writer == reader else difference < 1e-8


@pytest.mark.parametrize("name", PIPELINES)
def test_what_it_tells_of_a_step_could_have_happened(ran: dict[str, Ran], name: str) -> None:
    """Spans of several processes on one clock: nothing is computed before what it needs."""
    plan = make_plan(job_of(name), cluster=CPU, vocab_size=VOCAB)
    assert plan.pipeline is not None
    events = ran[name].events(PipelineMeasured)
    assert [event.step for event in events] == [5, STEPS]
    for event in events:
        schedule = plan.pipeline.schedule()
        assert [[action for action, _, _ in row] for row in event.spans] == [
            list(map(str, r)) for r in schedule.actions
        ]
        when = {
            Action.from_text(action): (begin, end)
            for row in event.spans
            for action, begin, end in row
        }
        last = schedule.num_stages - 1
        for action, (begin, end) in when.items():
            before = end
            if action.kind == "F" and action.stage > 0:
                before = when[Action("F", action.stage - 1, action.microbatch)][1]
            elif action.kind in "BI" and action.stage < last:
                kinds = [Action(kind, action.stage + 1, action.microbatch) for kind in ("B", "I")]
                before = next(when[needed][1] for needed in kinds if needed in when)
            else:
                before = begin
            assert before <= begin <= end, action
        assert min(begin for begin, _ in when.values()) == 0.0
        assert 0 <= event.bubble_measured < 1
        assert event.num_blocks == list(plan.pipeline.stages.num_blocks)
        assert event.splits_backward == (name == "zb-v")
    for rank in range(LAYOUTS[name][0]):
        assert all(e.phases_s["pipeline"] > 0 for e in ran[name].events(StepFinished, rank))
