"""A start from a checkpoint draws no initial weights: they would be replaced at once.

What cannot be restored stops.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.checkpoint.run_storage import RunStorage
from phalanx.checkpoint.stores import open_store_of_run
from phalanx.core.errors import CheckpointError
from phalanx.core.phases import PhaseTimer
from phalanx.job.load import load_job
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.nn import init
from phalanx.nn.build import build_model, build_objective
from phalanx.observe.bus import Bus
from phalanx.observe.events import StepFinished
from phalanx.observe.tail import EventTail
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.cluster import Cluster
from phalanx.plan.planner import make_plan
from phalanx.run.prepare import prepare_run
from phalanx.run.rank import run_rank
from phalanx.run.rank_run import RankRunInputs
from phalanx.run.trained.payloads import ModelPayload
from phalanx.run.trained.rank import open_model_on_rank
from phalanx.run.weights import (
    build_training_state,
    list_checkpoints_newest_first,
    restore_newest_readable_checkpoint,
)
from ranks import run_ranks

SMALL = (
    "model.num_layers=2",
    "model.dim=32",
    "model.num_heads=2",
    "model.vocab_size=64",
    "data.seq_len=16",
)
TINY = (*SMALL[:3], "data.seq_len=32", "train.sample_tokens=0", "eval.tokens=0", "observe.sinks=[]")


def counted() -> list[int]:
    """Of this process: how many initial values each draw has made, from now on."""
    made: list[int] = []
    draw = init._make_normals_of_runs

    def watched(key: int, starts: Any, run: int) -> torch.Tensor:
        made.append(len(starts) * run)
        return draw(key, starts, run)

    init._make_normals_of_runs = watched
    return made


LAYOUTS: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "zero1": ("parallel.dp_shard=2", "parallel.zero_stage=1", "parallel.offload=optimizer"),
    "zero3": ("parallel.dp_shard=2", "parallel.keep_whole_below=40"),
    "zero3 on the host": ("parallel.dp_shard=2", "parallel.offload=parameters"),
    "tp": (
        "parallel.tp=2",
        "model.num_experts=4",
        "model.experts_per_token=2",
        "model.expert_ffn_dim=24",
    ),
    "pp": ("parallel.pp=2", "model.tie_embeddings=true"),
}


def restored(rank: int, folder: Path, layout: str) -> dict[str, Any]:
    """What a state that was built without drawing is before and after it is restored, beside the
    one that was saved."""
    job = load_job(None, [*SMALL, "parallel.ranks=2", "cluster.device=cpu", *LAYOUTS[layout]])
    plan = make_plan(job, cluster=Cluster("cpu", 2, 2**33))
    made = counted()
    with open_mesh(plan.layout, device="cpu") as mesh:
        state = build_training_state(job, plan, mesh, PhaseTimer())
        drawn = len(made)
        with torch.no_grad():
            for number, shard in enumerate(state.model.shards().values()):
                shard.tensor.add_(
                    torch.full_like(shard.tensor, number + 1.0)
                )  # no longer what a draw gives
        state.model.refresh()
        storage = RunStorage.open(folder)
        state.save(storage.store, job_digest="", phases=PhaseTimer())
        made.clear()
        again = build_training_state(job, plan, mesh, PhaseTimer(), draws=False)
        empty = not any(shard.tensor.count_nonzero() for shard in again.model.shards().values())
        bus = Bus(rank=rank, attempt=0, run_dir=folder)
        names = list_checkpoints_newest_first(storage, mesh)
        restore_newest_readable_checkpoint(storage, names, again, bus, fallback=False)
        bus.close()
        want, have = state.model.trained_shards(), again.model.trained_shards()
        equal = [name for name in want if torch.equal(want[name].tensor, have[name].tensor)]
        weights = {name: shard.tensor for name, shard in again.model.shards().items()}
        same = all(
            torch.equal(shard.tensor, weights[name]) for name, shard in state.model.shards().items()
        )
        return {
            "drawn": drawn,
            "again": len(made),
            "empty": empty,
            "same": same,
            "all": len(equal) == len(want) > 0,
        }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_restored_is_not_drawn_and_has_the_bits_of_the_checkpoint(
    tmp_path: Path, layout: str
) -> None:
    for found in run_ranks(2, restored, tmp_path, layout):
        assert found.pop("drawn") > 0
        assert found == {"again": 0, "empty": True, "same": True, "all": True}


# The start of a run


def start(
    folder: Path, run: str, attempt: int, *keys: str
) -> tuple[int, list[tuple[int, float]], str]:
    """(how many initial values are drawn, the steps of this start with their loss, what refused
    it)."""
    overrides = [
        *TINY,
        f"data.source={folder / 'text'}",
        "parallel.ranks=1",
        "cluster.device=cpu",
        *keys,
    ]
    job = load_job(None, [*overrides, "train.global_batch_size=2", "optim.schedule=constant"])
    made, refusal, run_dir = counted(), "", folder / run
    with prepare_run(job, run_dir, resume=attempt > 0, num_ranks=None) as ready:
        try:
            run_rank(RankRunInputs(ready.job, ready.plan, run_dir, 0, attempt, time.monotonic()))
        except CheckpointError as error:
            refusal = str(error)
        told = [
            envelope.event
            for envelope in EventTail(run_dir, attempt_from=attempt).read_new_events()
        ]
    return (
        sum(made),
        [(event.step, event.loss) for event in told if isinstance(event, StepFinished)],
        refusal,
    )


def damage(folders: Sequence[Path]) -> None:
    for folder in folders:
        for file in folder.glob("*.safetensors"):
            content = bytearray(file.read_bytes())
            content[-3] ^= 1
            file.write_bytes(content)


def starts(rank: int, folder: Path) -> dict[str, Any]:
    found = {"whole": start(folder, "whole", 0, "train.steps=3", "checkpoint.every_steps=1")}
    found["begun"] = start(folder, "run", 0, "train.steps=2", "checkpoint.every_steps=1")
    found["resumed"] = start(folder, "run", 1, "train.steps=3", "checkpoint.every_steps=1")
    saved = sorted((folder / "run" / "checkpoints").iterdir())
    damage(saved[-1:])
    found["fallback"] = start(folder, "run", 2, "train.steps=3", "checkpoint.fallback=true")
    damage(saved)
    found["none left"] = start(folder, "run", 3, "train.steps=4", "checkpoint.fallback=true")
    found["init_from"] = start(
        folder, "tuned", 0, "train.steps=1", f"model.init_from={folder / 'whole'}"
    )
    return found


def test_a_run_draws_its_initial_weights_once(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("to be or not to be, that is the question " * 200)
    (found,) = run_ranks(1, starts, tmp_path)
    drawn, whole, _ = found["whole"]
    assert drawn > 0
    assert [step for step, _ in whole] == [1, 2, 3]
    assert found["begun"] == (drawn, whole[:2], "")
    assert found["resumed"] == (0, whole[2:], "")
    assert found["fallback"] == (0, whole[2:], ""), "the second newest one, which is whole"
    drawn, steps, refusal = found["none left"]
    assert (drawn, steps) == (0, []), "no step with weights that nobody gave"
    assert "step-" in refusal
    drawn, steps, refusal = found["init_from"]
    assert (drawn, [step for step, _ in steps], refusal) == (0, [1], "")
    assert steps[0][1] < whole[0][1], "trained weights"


def looked_at(rank: int, folder: Path) -> tuple[int, bool]:
    """As `phalanx eval` and `generate` open a checkpoint."""
    job = load_job(None, [*SMALL, "parallel.ranks=1", "cluster.device=cpu"])
    plan = make_plan(job, cluster=Cluster("cpu", 1, 2**33))
    with open_mesh(plan.layout, device="cpu") as mesh:
        state = build_training_state(job, plan, mesh, PhaseTimer())
        state.save(open_store_of_run(folder, None), job_digest="", phases=PhaseTimer())
    made = counted()
    with open_model_on_rank(
        ModelPayload(job, plan, folder, str(folder), step=0, casts=False)
    ) as opened:
        have = opened.model.shards()
        return len(made), all(
            torch.equal(s.tensor, have[name].tensor) for name, s in state.model.shards().items()
        )


def test_a_checkpoint_that_is_looked_at_is_not_drawn_either(tmp_path: Path) -> None:
    assert run_ranks(1, looked_at, tmp_path) == [(0, True)]


def test_what_has_no_weights_yet_does_not_train() -> None:
    job = load_job(None, [*SMALL, "parallel.ranks=1", "cluster.device=cpu"])
    plan = make_plan(job, cluster=Cluster("cpu", 1, 2**33))
    model = parallelize(
        build_model(job, plan.model_shape),
        plan,
        Mesh(plan.layout, 0, 0, torch.device("cpu")),
        initialize=False,
    )
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    batch = {"inputs": tokens, "targets": tokens}
    with pytest.raises(AssertionError, match="nothing was written"):
        model.forward_backward([batch], build_objective(job))
    model.refresh()
    assert model.forward_backward([batch], build_objective(job)).num_targets == 16
