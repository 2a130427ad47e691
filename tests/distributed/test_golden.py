"""Runs and checkpoints that earlier commits wrote are read, printed and continued
(tests/golden/README.md)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from commands import TINY, events, run
from phalanx.checkpoint.manifest import read_manifest
from phalanx.checkpoint.reading.weights import load_weights
from phalanx.core.errors import ExitCode
from phalanx.core.files import read_json
from phalanx.job.load import load_job_json
from phalanx.nn.build import build_model
from phalanx.nn.models.decoder import Decoder
from phalanx.observe.events import CheckpointSaved, RunStarted, StepFinished
from phalanx.plan.plan import Plan

GOLDEN = Path(__file__).parents[1] / "golden" / "2026-11-23"
PRINTED = {
    "report": ("report", "run"),
    "checkpoint-ls": ("checkpoint", "ls", "run"),
    "checkpoint-verify": ("checkpoint", "verify", "run"),
    "checkpoint-diff": ("checkpoint", "diff", "run", "imported"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "golden"))


def assert_holds(new: Any, old: Any, where: str = "") -> None:
    """Everything in the JSON document `old` is in `new`, which may have more keys."""
    if isinstance(old, Mapping):
        assert old.keys() <= new.keys(), where
        for key in old.keys() - {"written_unix_s"}:  # a file's time
            assert_holds(new[key], old[key], f"{where}.{key}")
    elif isinstance(old, list):
        assert len(new) == len(old), where
        for index, value in enumerate(old):
            assert_holds(new[index], value, f"{where}[{index}]")
    else:
        assert new == old, where


def stored_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The model's tensors of a checkpoint put together from its pieces, by the safetensors
    library alone."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    files = {name: load_file(checkpoint / name) for name in manifest["files"]}
    weights = {}
    for name, facts in manifest["tensors"].items():
        if not name.startswith("optim/"):
            weights[name] = torch.full(
                facts["shape"], torch.nan, dtype=getattr(torch, facts["dtype"])
            )
            for piece in facts["pieces"]:
                ranges = zip(piece["offset"], piece["size"], strict=True)
                box = tuple(slice(offset, offset + size) for offset, size in ranges)
                weights[name][box] = files[piece["file"]][piece["key"]].reshape(piece["size"])
    return weights


def golden_model(run_dir: Path) -> Decoder:
    plan = Plan.from_json(read_json(run_dir / "plan.json"))
    model = build_model(load_job_json(run_dir / "job.json", []), plan.model_shape)
    assert isinstance(model, Decoder)
    return model.to_empty(device="cpu")


def test_what_commands_print_of_a_run_is_what_they_printed(folder: Path) -> None:
    for name, arguments in PRINTED.items():
        done = run(*arguments, "--json", cwd=folder)
        assert done.code == (ExitCode.VERIFICATION if name == "checkpoint-diff" else 0), done.err
        assert_holds(json.loads(done.out), read_json(folder / "printed" / f"{name}.json"), name)


def test_job_plan_events_and_weights_of_a_run_are_read(folder: Path) -> None:
    job = load_job_json(folder / "run" / "job.json", [])
    assert_holds(job.to_json(), read_json(folder / "run" / "job.json"))
    plan = Plan.from_json(read_json(folder / "run" / "plan.json"))
    assert (plan.world_size, plan.layout.dp_shard, plan.parallel.zero_stage) == (2, 2, 2)
    steps = events(folder / "run", StepFinished)  # every line of every process must parse
    assert [envelope.event.step for envelope in steps if envelope.rank == 0] == [1, 2, 3, 4]
    for checkpoint in ("run/checkpoints/step-3", "imported/checkpoints/step-0"):
        model = golden_model(folder / "run")
        assert load_weights(model, folder / checkpoint) == read_manifest(folder / checkpoint).step
        stored = stored_weights(folder / checkpoint)
        assert stored.keys() == model.state_dict().keys() - {"lm_head.weight"}
        for name, tensor in stored.items():
            torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=0)


def test_a_run_is_continued_to_its_last_step(folder: Path) -> None:
    done = run("train", "--resume", "run", "train.sample_tokens=0", cwd=folder)
    assert done.code == 0, done.err
    run_dir = folder / "run"
    restored = [
        envelope.event for envelope in events(run_dir, RunStarted) if envelope.event.restored_from
    ]
    assert [(event.step, event.restored_from) for event in restored] == [(3, "step-3")]
    assert events(run_dir, CheckpointSaved)[-1].event.step == 6
    last = [
        envelope.event.step for envelope in events(run_dir, StepFinished) if envelope.attempt == 1
    ]
    assert set(last) == {4, 5, 6}
    assert (
        run("checkpoint", "diff", str(GOLDEN / "run"), "run/checkpoints/step-3", cwd=folder).code
        == 0
    )
    assert run("checkpoint", "verify", "run", "--all", cwd=folder).code == 0


def test_imported_weights_are_what_a_run_starts_from(folder: Path) -> None:
    shape = ("model.init_from=imported", "model.dim=8", "model.num_layers=2", "model.ffn_dim=32")
    tied = (
        "model.tie_embeddings=true",
        "data.source=text/license.txt",
        "data.seq_len=8",
        "optim.lr=1e-30",
    )
    short = (
        "train.global_batch_size=2",
        "train.steps=1",
        "parallel.ranks=1",
        "run.dir=new",
        "optim.warmup_steps=0",
    )
    done = run("train", *TINY, *shape, *tied, *short, cwd=folder)
    assert done.code == 0, done.err
    for name, tensor in stored_weights(folder / "new" / "checkpoints" / "step-1").items():
        expected = stored_weights(folder / "imported" / "checkpoints" / "step-0")[name]
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)
