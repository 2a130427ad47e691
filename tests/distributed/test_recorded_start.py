"""Large modules of users start sharded: what building them does is recorded, and each rank fills
its own parts with the very numbers that one process gets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zoo import write_config
from phalanx.core.phases import PhaseTimer
from phalanx.job.load import load_job
from phalanx.mesh.mesh import open_mesh
from phalanx.mesh.recorded_init import find_recorded_init
from phalanx.nn import build
from phalanx.plan.cluster import Cluster
from phalanx.plan.planner import make_plan
from phalanx.run.weights import build_state
from ranks import run_ranks

LAYOUTS: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "zero1": ("parallel.dp_shard=2", "parallel.zero_stage=1"),
    "zero1, offloaded": (
        "parallel.dp_shard=2",
        "parallel.zero_stage=1",
        "parallel.offload=optimizer",
    ),
    "zero3": ("parallel.dp_shard=2", "parallel.keep_whole_below=40"),
    "zero3 on the host": ("parallel.dp_shard=2", "parallel.offload=parameters"),
    "tp": ("parallel.tp=2",),
    "pp": ("parallel.pp=2",),
}


def compare_starts(rank: int, kind: str, layout: str) -> dict[str, Any]:
    """Shards of a module whose building was recorded, beside those of one that was built whole."""
    arguments = [f"model.kind={kind}", "parallel.ranks=2", "cluster.device=cpu", "data.seq_len=16"]
    job = load_job(None, [*arguments, *LAYOUTS[layout]])
    plan = make_plan(job, cluster=Cluster("cpu", 2, 2**33))
    found: dict[str, Any] = {}
    with open_mesh(plan.layout, device="cpu") as mesh:
        for first_bytes in (0, 2**40):
            build.RECORDED_FROM_BYTES = first_bytes
            state = build_state(job, plan, mesh, PhaseTimer())
            module = state.model.module
            is_recorded = find_recorded_init(module) is not None
            assert is_recorded == (first_bytes == 0)
            found[str(is_recorded)] = {
                name: shard.tensor.clone() for name, shard in state.model.shards().items()
            }
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            found[f"{is_recorded} buffers"] = buffers
            assert not any(tensor.is_meta for tensor in module.state_dict().values())
        mesh.barrier()
    return {
        "shards": find_differing(found["True"], found["False"]),
        "buffers": find_differing(found["True buffers"], found["False buffers"]),
        "num": len(found["True"]),
    }


def find_differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    names = sorted(found.keys() ^ expected.keys())
    return names + [
        n for n in found.keys() & expected.keys() if not torch.equal(found[n], expected[n])
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_fills_its_part_with_the_numbers_of_one_process(
    tmp_path: Path, layout: str
) -> None:
    pytest.importorskip("transformers")
    name = "qwen3_moe" if layout == "tp" else "llama"
    kind = f"hf:{write_config(tmp_path, name)}"
    for found in run_ranks(2, compare_starts, kind, layout):
        assert found["num"] > 5
        assert found["shards"] == found["buffers"] == []
