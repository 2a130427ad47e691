"""What surrounds a pipeline: ranks that hold other stages evaluate, save, restore and tell of a
step together.

There is no pipeline at work here: each rank has a stage of its own as its whole model: all that
these paths see. The reference of what a checkpoint holds is one process with every stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from models import CPU
from phalanx.checkpoint.manifest import list_checkpoint_paths_of_run, read_manifest
from phalanx.checkpoint.reading.verify import find_checkpoint_problems
from phalanx.checkpoint.stores import open_store_of_run
from phalanx.core.errors import CheckpointError
from phalanx.core.phases import PhaseTimer
from phalanx.job.schema import Job, Optim
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.observe.bus import Bus
from phalanx.observe.events import PipelineMeasured
from phalanx.observe.tail import read_recorded_events
from phalanx.optim.build import build_optimizer
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.pipeline.executor import PipelineExecutor
from phalanx.parallel.protocol import ModuleWithObjective, ParallelContext
from phalanx.parallel.step_stats import LocalLoss
from phalanx.plan.layout import Layout
from phalanx.plan.pipeline.cut import StageCut
from phalanx.plan.pipeline.pipeline_plan import build_named_pipeline
from phalanx.plan.pipeline.simulate import StageCosts, simulate_timeline
from phalanx.plan.planner import make_plan
from phalanx.train.evaluation import in_evaluation_mode
from phalanx.train.generate import generate_tokens
from phalanx.train.metrics import MetricAccumulator
from phalanx.train.pipeline_record import gather_and_emit_pipeline_spans
from phalanx.train.state import TrainState
from ranks import run_ranks

NUM_STAGES = 2
PIPELINE = build_named_pipeline(
    "1f1b", NUM_STAGES, 4, StageCut((1, 1)), costs=(StageCosts(1.0, 1.0, 1.0),) * NUM_STAGES
)


class Part(nn.Module):
    """The given stages of a model of two: a product each, of its own size, and a count that is
    no parameter."""

    def __init__(self, *stages: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(stage): nn.Linear(3, 2 + stage) for stage in stages})
        for stage in stages:
            self.blocks[str(stage)].register_buffer("seen", torch.full((2,), float(stage)))


def model_of(module: nn.Module, mesh: Mesh) -> ParallelModel:
    job = Job.model_validate(
        {"data": {"seq_len": 1}, "train": {"global_batch_size": 8}, "parallel": {"ranks": 1}}
    )
    plan = make_plan(job, cluster=CPU, num_ranks=1)
    pipeline = PIPELINE if mesh.layout.pp > 1 else None
    plan = replace(plan, layout=mesh.layout, pipeline=pipeline)
    root = ModuleWithObjective(module)
    return ParallelModel(
        ParallelContext(root=root, plan=plan, mesh=mesh, phases=PhaseTimer(), blocks=[], outer=root)
    )


def stages_of(mesh: Mesh) -> tuple[int, ...]:
    return (mesh.coordinates["pp"],) if mesh.layout.pp > 1 else tuple(range(NUM_STAGES))


def state_of(mesh: Mesh, value: float) -> TrainState:
    """All that the optimizer keeps is known by the stage: moments, counts as tensors, and counts
    as numbers."""
    module = Part(*stages_of(mesh))
    model = model_of(module, mesh)
    state = TrainState(model, build_optimizer(model, Optim()), seed=3)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            stage = int(name.split(".")[1])
            parameter.fill_(value + stage)
            kept = state.optimizer.state[parameter]
            kept["exp_avg"].fill_(10 * value + stage)
            kept["step"].fill_(100 * value + stage)
            kept["calls"] = int(1000 * value) + stage
    return state


def numbers(state: TrainState) -> dict[str, float]:
    found = {}
    for name, parameter in state.model.named_parameters():
        kept = state.optimizer.state[parameter]
        found[name] = (
            float(parameter.detach().flatten()[0]),
            float(kept["exp_avg"].flatten()[0]),
            float(kept["step"]),
            kept["calls"],
        )
    return found


def expected(stage: int) -> tuple[float, ...]:
    """Of what was saved with value 1."""
    return (1.0 + stage, 10.0 + stage, 100.0 + stage, 1000 + stage)


def saved(rank: int, layout: Mapping[str, int], folder: str) -> None:
    with open_mesh(Layout(**layout), device="cpu") as mesh:
        state = state_of(mesh, 1.0)
        state.step = 7
        state.save(open_store_of_run(Path(folder), None), job_digest="d", phases=PhaseTimer())


def restored(rank: int, layout: Mapping[str, int], folder: str) -> dict[str, float]:
    with open_mesh(Layout(**layout), device="cpu") as mesh:
        state = state_of(mesh, 5.0)
        if mesh.rank == 0:  # a count that is not made yet is put where it belongs
            for kept in state.optimizer.state.values():
                del kept["calls"]
        state.restore(list_checkpoint_paths_of_run(Path(folder))[-1], phases=PhaseTimer())
        assert state.step == 7
        return numbers(state)


LAYOUTS: list[tuple[int, dict[str, int]]] = [
    (1, {}),
    (2, {"pp": 2}),
    (4, {"pp": 2, "dp_replicate": 2}),
]


@pytest.mark.parametrize(
    ("num_savers", "save_layout", "num_ranks", "layout"),
    [
        # Read as it was written is what is long.
        pytest.param(*saved_by, *read_by, marks=[pytest.mark.long] * (saved_by == read_by))
        for saved_by in LAYOUTS
        for read_by in LAYOUTS
    ],
)
def test_a_checkpoint_has_the_optimizer_of_every_stage(
    num_savers: int,
    save_layout: dict[str, int],
    num_ranks: int,
    layout: dict[str, int],
    tmp_path: Path,
) -> None:
    """Written by any cut, read by any cut; what one rank alone writes is the reference of what
    is in it."""
    run_ranks(num_savers, saved, save_layout, str(tmp_path))
    run_ranks(1, saved, {}, str(tmp_path / "alone"))
    (folder,), (alone,) = (
        list_checkpoint_paths_of_run(tmp_path),
        list_checkpoint_paths_of_run(tmp_path / "alone"),
    )
    assert not find_checkpoint_problems(folder)
    manifest, reference = read_manifest(folder), read_manifest(alone)
    assert manifest.facts == reference.facts
    assert {name: (t.shape, t.dtype) for name, t in manifest.tensors.items()} == {
        name: (t.shape, t.dtype) for name, t in reference.tensors.items()
    }
    for rank, found in enumerate(run_ranks(num_ranks, restored, layout, str(tmp_path))):
        stages = [rank // (num_ranks // NUM_STAGES)] if layout else range(NUM_STAGES)
        assert found == {
            f"blocks.{s}.{kind}": expected(s) for s in stages for kind in ("weight", "bias")
        }


def misfit(rank: int, folder: str) -> str:
    """Numbers of a parameter that no stage has are no number of another stage."""
    with open_mesh(Layout(pp=2), device="cpu") as mesh:
        state = state_of(mesh, 5.0)
        state.model.module.blocks["9"] = state.model.module.blocks.pop(str(rank))
        try:
            TrainState(state.model, state.optimizer, seed=3).restore(
                list_checkpoint_paths_of_run(Path(folder))[-1], phases=PhaseTimer()
            )
        except CheckpointError as error:
            return str(error)
        return ""


def test_what_no_stage_has_is_still_missed(tmp_path: Path) -> None:
    run_ranks(2, saved, {"pp": 2}, str(tmp_path))
    for said in run_ranks(2, misfit, str(tmp_path)):
        assert "does not fit this model" in said
        assert "blocks.0.weight" in said
        assert "blocks.9.weight" in said


class Counting:
    def __call__(self, outputs: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(1.0), torch.tensor(1)

    def metrics(self, outputs: Any, batch: Any) -> dict[str, tuple[float, float]]:
        return {"right": (outputs, 4.0), "none": (0, 0)}


def evaluated(rank: int) -> dict[str, Any]:
    """Only ranks of the last stage see outputs; sums of the others are zeros."""
    with open_mesh(Layout(pp=2, dp_replicate=2), device="cpu") as mesh:
        model = model_of(Part(*stages_of(mesh)), mesh)
        metrics = MetricAccumulator(Counting(), mesh)
        is_last = mesh.coordinates["pp"] == 1
        for _ in range(3 if is_last else 0):
            metrics(float(mesh.data_parallel_rank), {})
        number = float(1 + mesh.data_parallel_rank) if is_last else 0.0
        sums = LocalLoss(*(torch.tensor(number * each, dtype=torch.float64) for each in (3, 1)))
        buffers = [buffer.add_(10 * rank) for buffer in model.module.buffers()]
        before = [buffer.tolist() for buffer in buffers]
        with in_evaluation_mode(model, mesh, seed=1):
            inside = [buffer.tolist() for buffer in buffers]
        return {
            "metrics": metrics.reduce_over_ranks(), "loss": model.reduce_sums(sums), "inside": inside,
            "unchanged": before == [buffer.tolist() for buffer in buffers],
        }  # fmt: skip


def test_stages_without_outputs_evaluate_with_the_others() -> None:
    found = run_ranks(4, evaluated)
    for rank, told in enumerate(found):
        assert told["metrics"] == {"right": (3.0, 24.0), "none": (0.0, 0.0)}, rank
        assert told["loss"] == (3.0, 3)
        assert told["unchanged"]
        stage = rank // 2
        first = 2 * stage  # of the ranks that hold this stage
        assert told["inside"] == [[stage + 10.0 * first] * 2]


def gathered(rank: int, folder: str) -> None:
    """Each rank's spans are those of its stage; of two ranks with the same stage the second
    one's are other ones."""
    with open_mesh(Layout(pp=2, dp_replicate=2), device="cpu") as mesh:
        model = model_of(Part(*stages_of(mesh)), mesh)
        timeline = simulate_timeline(
            PIPELINE.schedule(), [StageCosts(0.5, 0.5, 0.25)] * NUM_STAGES, 0.125
        )
        stage, late_s = mesh.coordinates["pp"], 50.0 * mesh.coordinates["dp_replicate"]
        rows = zip(timeline.schedule.actions[stage], timeline.spans_s[stage], strict=True)
        spans = [(str(action), late_s + float(b), 2 * late_s + float(e)) for action, (b, e) in rows]
        model.pipeline = cast(PipelineExecutor, SimpleNamespace(spans=spans))
        bus = Bus(rank=rank, run_dir=Path(folder))
        for step in (1, 4, 5, 6, 9):
            gather_and_emit_pipeline_spans(step, 9, model, bus)
        bus.close()


def test_spans_of_all_ranks_become_one_event(tmp_path: Path) -> None:
    run_ranks(4, gathered, str(tmp_path))
    told = [envelope.event for envelope in read_recorded_events(tmp_path, PipelineMeasured)]
    assert [event.step for event in told if isinstance(event, PipelineMeasured)] == [5, 9]
    assert all(
        not list(read_recorded_events(tmp_path, PipelineMeasured, rank=rank)) for rank in (1, 2, 3)
    )
    event = told[0]
    assert isinstance(event, PipelineMeasured)
    reference = simulate_timeline(
        PIPELINE.schedule(), [StageCosts(0.5, 0.5, 0.25)] * NUM_STAGES, 0.125
    )
    assert event.bubble_measured == pytest.approx(float(reference.bubble))
    assert event.bubble_planned == pytest.approx(1 / 5)  # (p - 1) / (m + p - 1)
    assert event.bubble_predicted == pytest.approx(1 / 5), "without what sending takes"
    assert event.stage_seconds == [[0.5, 0.75, 0.0]] * 2
    assert event.in_flight == [2, 1]
    assert [[(begin, end) for _, begin, end in row] for row in event.spans] == [
        [(float(b), float(e)) for b, e in row] for row in reference.spans_s
    ]


def left(rank: int) -> float:
    with open_mesh(Layout(dp_replicate=2), device="cpu") as mesh:
        model = model_of(Part(0, 1), mesh)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        model.reduce_and_clip(LocalLoss(*(torch.ones((), dtype=torch.float64) for _ in range(2))))
        return model.finished_at


def test_ranks_leave_the_reduction_of_a_step_together() -> None:
    """Their common zero where clocks are not one.

    Here there is one clock, on which they can be compared.
    """
    first, second = run_ranks(2, left)
    assert math.isclose(first, second, abs_tol=1.0)
    assert min(first, second) > 0


class Speechless(nn.Module):
    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"nothing": inputs}


def test_a_model_without_logits_is_said_to_have_none_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_mesh(Layout(), device="cpu") as mesh:
        model = model_of(Speechless(), mesh)
        with pytest.raises(TypeError, match="cannot sample from dict"):
            generate_tokens(model, [1, 2], num_tokens=1, context=4, seed=0)
        # a rank that has not the last stage gets what that one's function gave
        monkeypatch.setattr(
            model, "call_then", lambda batch, then: torch.empty(0, dtype=torch.float64)
        )
        with pytest.raises(TypeError, match="cannot sample from what the last stage returns"):
            generate_tokens(model, [1, 2], num_tokens=1, context=4, seed=0)
