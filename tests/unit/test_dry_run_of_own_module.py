"""The plan of a user's own module for GPUs that are not here: what `phalanx plan --dry-run` runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cli._plan_dry_run import _plan_for_dry_run
from phalanx.job import module_probe
from phalanx.job.load import load_job

MODULE = """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(self.up(x).relu())

def build(vocab_size=90):
    return nn.Sequential(nn.Embedding(90, 32), Block(), Block(), nn.Linear(32, 90))
"""


# "auto" is bf16 on an H100 and fp32 on a T4, whatever it is on the machine that plans.
@pytest.mark.parametrize(("gpu", "precision"), [("h100-sxm", "bf16"), ("t4", "fp32")])
def test_a_module_is_traced_in_the_type_of_the_described_gpus(
    gpu: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_of_dry_run.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(module_probe, "SHAPE_CACHE_DIR", tmp_path / "shapes")
    keys = ["model.kind=own_of_dry_run:build", f"cluster.gpu={gpu}", "parallel.ranks=2"]
    planned = _plan_for_dry_run(load_job(None, [*keys, "data.seq_len=16"]), None)
    assert planned.plan.precision == precision
    assert planned.plan.chosen.predicted_bytes["activations"] > 0
