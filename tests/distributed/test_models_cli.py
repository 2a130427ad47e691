"""Published shapes and images through the command line: trained, or refused before anything is
written."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import TINY, environment, finish, loss_curve, run, run_all, start, write_text
from phalanx.core.errors import ExitCode

IMAGES = """
import numpy as np


class Greys:
    \"\"\"Noise on a grey that is the label.\"\"\"

    def __init__(self, size, seed):
        generator = np.random.default_rng(seed)
        self.labels = generator.integers(0, 4, size)
        self.images = generator.normal(size=(size, 1, 8, 8)).astype(np.float32)
        self.images += self.labels[:, None, None, None].astype(np.float32)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"inputs": self.images[index], "targets": int(self.labels[index])}


def build(split):
    return Greys(256, 0) if split == "train" else None
"""
GPT2 = (
    "model.preset=gpt2",
    "model.vocab_size=300",
    "data.source=text",
    "data.document_masks=true",
    "parallel.ranks=1",
    "run.dir=gpt2",
)
VIT = (
    "model.kind=vit",
    "model.image_size=8",
    "model.patch_size=4",
    "model.num_channels=1",
    "model.num_classes=4",
)


@pytest.mark.long
def test_a_gpt2_and_a_vision_transformer_learn(tmp_path: Path) -> None:
    """GPT-2's shape with small widths on packed documents; images of a user's own dataset on two
    ranks."""
    write_text(tmp_path / "text")
    (tmp_path / "my_images.py").write_text(IMAGES)
    keys = [key for key in TINY if not key.startswith("data.seq_len")]
    images = (
        "data.source=my_images:build",
        "parallel.ranks=2",
        "run.dir=vit",
        "optim.lr=0.01",
        "train.steps=60",
    )
    env = environment(PYTHONPATH=str(tmp_path))
    processes = [
        start("train", *TINY, *GPT2, cwd=tmp_path),
        start("train", *keys, *VIT, *images, cwd=tmp_path, env=env),
    ]
    for done, (name, steps) in zip(
        [finish(process) for process in processes], (("gpt2", 20), ("vit", 60)), strict=True
    ):
        assert done.code == ExitCode.OK, done.err
        curve = loss_curve(tmp_path / name)
        assert max(curve) == steps
        assert curve[steps] < 0.9 * curve[1]


def test_what_cannot_be_trained_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    jobs = [["train", "model.preset=llama3-8"], ["train", "model.kind=vit"]]
    wanted = ['did you mean "llama3-8b"?', "reads images"]
    for done, words in zip(run_all(jobs, tmp_path), wanted, strict=True):
        assert done.code == ExitCode.JOB
        assert words in done.problem
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("preset", ["mixtral-8x7b", "llama3-405b", "vit-h14"])
def test_every_published_shape_can_be_planned(tmp_path: Path, preset: str) -> None:
    keys = ("parallel.ranks=8", "cluster.memory_gib=8000", "cluster.device=cpu")
    done = run("plan", f"model.preset={preset}", *keys, cwd=tmp_path)
    assert done.code == ExitCode.OK, done.err
    small = run(
        "plan", f"model.preset={preset}", "cluster.memory_gib=4", "cluster.device=cpu", cwd=tmp_path
    )
    assert small.code == ExitCode.JOB
    assert "per rank and" in small.problem
    assert list(tmp_path.iterdir()) == []
