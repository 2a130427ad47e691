"""fp8 as torchao emulates it on a CPU: against products cast by hand, against fp32 in each
layout; and its refusals."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models import BATCH, CPU, SEQ_LEN, VOCAB, decoder, fill, global_batches, plan, shape, share
from phalanx.core.errors import EnvironmentProblem, JobError, LayoutError
from phalanx.job.load import load_job
from phalanx.job.schema import Job
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.objective import causal_cross_entropy
from phalanx.parallel.compute.fp8 import (
    Float8LinearLayers,
    convert_linear_layers_to_fp8,
    has_widths_for_fp8,
    require_fp8_device,
)
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.cluster import Cluster, detect_least_compute_capability
from phalanx.plan.memory import fp8_cast_bytes
from phalanx.plan.nvidia import Gpu
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.workload import Workload
from phalanx.run import needs
from ranks import run_ranks

GPU = Cluster("cuda", 1, 80 * 2**30)
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "ddp": (2, {"dp_replicate": 2}),
    "zero3": (2, {"dp_shard": 2, "zero_stage": 3}),
    "cp": (2, {"cp": 2}),
    "experts": (2, {"dp_shard": 2, "ep": 2}),
}
# Every token visits every expert: other digits could send it to others.
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "experts_per_token": 4,
    "expert_ffn_dim": 32,
    "num_shared_experts": 1,
}


@pytest.fixture
def torchao() -> ModuleType:
    found: ModuleType = pytest.importorskip("torchao")
    return found


def cast(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """What is left of `x` in fp8 with one scale, which brings its largest element to the largest
    there is."""
    scale = torch.finfo(kind).max / x.abs().max().double()
    return (x * scale.float()).to(kind).float() / scale.float()


def test_a_product_and_its_gradients_are_those_of_what_was_cast(torchao: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, grad = (
        torch.randn(shape, generator=generator) for shape in ((32, 48), (64, 48), (32, 64))
    )
    layer = nn.Linear(48, 64, bias=False)
    with torch.no_grad():
        layer.weight.copy_(w)
    block = nn.Sequential(layer, nn.Linear(64, 24))  # 24 is no multiple of 16
    assert convert_linear_layers_to_fp8(block, emulate=True) == 1
    x.requires_grad_()
    out = block[0](x)
    out.backward(grad)
    low_x, low_w, low_grad = (
        cast(x.detach(), torch.float8_e4m3fn),
        cast(w, torch.float8_e4m3fn),
        cast(grad, torch.float8_e5m2),
    )
    for found, wanted in (
        (out, low_x @ low_w.T),
        (x.grad, low_grad @ low_w),
        (block[0].weight.grad, low_grad.T @ low_x),
    ):
        assert found is not None
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(out, F.linear(x, w), rtol=1e-3, atol=1e-3)
    assert [name for name, _ in block.named_parameters()] == ["0.weight", "1.weight", "1.bias"]


class Twice(nn.Linear):
    pass


def test_subclasses_and_odd_widths_stay_as_they_are() -> None:
    assert [
        has_widths_for_fp8(part)
        for part in (nn.Linear(16, 32), nn.Linear(24, 32), nn.Linear(32, 24), Twice(16, 32))
    ] == [*(True, False, False, False)]


def plan_of(name: str) -> Plan:
    num_ranks, layout = LAYOUTS[name]
    if name != "experts":
        return plan(num_ranks, **layout)
    body = {
        "model": {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, **EXPERTS},
        "data": {"seq_len": SEQ_LEN},
        "train": {"global_batch_size": BATCH},
        "parallel": {"ranks": num_ranks, **layout},
    }
    return make_plan(Job.model_validate(body), cluster=CPU, vocab_size=VOCAB)


def one_step(rank: int, name: str) -> dict[str, Any]:
    num_ranks, layout = LAYOUTS[name]
    found = {}
    Float8LinearLayers.emulate = True  # of this forked rank
    for precision in ("fp32", "bf16", "fp8"):
        a_plan = replace(plan_of(name), precision=precision)
        with open_mesh(a_plan.layout, device="cpu") as mesh:
            module = (
                Decoder(replace(shape(), **EXPERTS))
                if name == "experts"
                else decoder(tied=True, dtype=torch.float32)
            )
            fill(module)
            model = parallelize(module, a_plan, mesh)
            batch = share(
                global_batches(1)[0],
                mesh.data_parallel_rank,
                num_ranks if "cp" not in layout else 1,
                1,
            )
            facts = model.reduce_and_clip(model.forward_backward(batch, causal_cross_entropy(16)))
            kinds = {
                type(part).__name__ for part in module.modules() if isinstance(part, nn.Linear)
            }
            found[precision] = (facts.loss, facts.grad_norm, facts.should_apply, kinds)
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_trains_in_it_to_its_digits(name: str, torchao: ModuleType) -> None:
    """bf16 has three digits, fp8 not two; both are those of fp32."""
    for found in run_ranks(LAYOUTS[name][0], one_step, name):
        loss, norm, usable, kinds = found["fp8"]
        assert usable
        assert any("Float8Linear" in kind for kind in kinds), kinds
        assert loss == pytest.approx(found["fp32"][0], rel=0.02)
        assert norm == pytest.approx(found["fp32"][1], rel=0.1)
        assert (loss, norm) != found["bf16"][:2]


# What the plan says


def job(**parallel: int) -> Job:
    body = {
        "data": {"seq_len": 128},
        "train": {"global_batch_size": 8},
        "precision": {"compute": "fp8"},
    }
    return Job.model_validate(body | {"parallel": {"ranks": 1, **parallel}})


def test_activations_are_kept_in_bf16_and_blocks_have_no_cast_weights() -> None:
    fp8 = make_plan(job(), cluster=GPU)
    bf16 = make_plan(
        job().model_copy(
            update={"precision": Job().precision.model_copy(update={"compute": "bf16"})}
        ),
        cluster=GPU,
    )
    ours, theirs = fp8.chosen.phases, bf16.chosen.phases
    same = ("parameters", "gradients", "optimizer", "activations", "loss")
    for phase in ("forward", "backward"):
        assert {key: ours[phase][key] for key in same} == {key: theirs[phase][key] for key in same}
    model, tokens = fp8.model_shape, 8 * 128
    no_casts = 2 * model.blocks_params
    # Where the loss is made no block multiplies, and what one casts is gone.
    assert ours["forward"]["communication"] == theirs["forward"]["communication"] - no_casts
    products = model.ffn_dim * (
        tokens + model.dim
    )  # of the widest: its input and its matrix, a byte each
    assert fp8_cast_bytes(model, Workload(8, 128, "fp8", "none", 2048)) == products


def test_a_cpu_is_refused() -> None:
    with pytest.raises(
        LayoutError, match=r"needs GPUs, and this plan is for CPUs .*; set precision.compute=bf16"
    ):
        make_plan(job(), cluster=CPU)
    with pytest.raises(LayoutError, match="this rank is on cpu"):
        require_fp8_device(torch.device("cpu"))


def test_tokens_that_kernels_cannot_take_are_refused() -> None:
    odd = load_job(
        None, ["precision.compute=fp8", "data.seq_len=9", f"train.global_batch_size={BATCH}"]
    )
    with pytest.raises(
        LayoutError, match="multiplies 16 tokens at a time, and a rank's microbatch has 108"
    ):
        make_plan(odd, cluster=GPU, num_ranks=1)


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_tp_and_pp_are_refused_while_loading(axis: str) -> None:
    with pytest.raises(
        JobError, match=f"layouts without tp and pp, and parallel.{axis} is 2"
    ) as caught:
        load_job(None, ["precision.compute=fp8", f"parallel.{axis}=2"])
    assert caught.value.exit_code == 3


def test_an_older_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(
        EnvironmentProblem, match=r"capability 8\.9, and A100 has 8\.0; set precision.compute=bf16"
    ):
        require_fp8_device(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    require_fp8_device(torch.device("cuda", 0))
    monkeypatch.setattr(needs, "detect_least_compute_capability", lambda: (8, 0))
    monkeypatch.setattr(needs, "_is_package_installed", lambda name: True)
    with pytest.raises(
        EnvironmentProblem, match=r"capability 8\.9, and one here has 8\.0"
    ) as caught:
        needs.require_packages(job(), "cuda")
    assert caught.value.exit_code == 6
    monkeypatch.setattr(needs, "detect_least_compute_capability", lambda: (9, 0))
    needs.require_packages(job(), "cuda")


def test_without_torchao_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(EnvironmentProblem, match=r"needs torchao .*; pip install 'phalanx\[gpu\]'"):
        convert_linear_layers_to_fp8(nn.Sequential(nn.Linear(16, 16)))
    monkeypatch.setattr(needs, "_is_package_installed", lambda name: name != "torchao")
    with pytest.raises(EnvironmentProblem, match="needs torchao; pip install"):
        needs.require_packages(job(), "cuda")


@pytest.mark.parametrize(
    ("capabilities", "found"),
    [([(9, 0), (8, 6)], (8, 6)), ([], None), ([(0, 0)], None), ([(10, 0)], (10, 0))],
)
def test_the_least_able_gpu_counts(
    capabilities: list[tuple[int, int]], found: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [Gpu("one", 1, "", capability) for capability in capabilities]
    monkeypatch.setattr("phalanx.plan.cluster.list_visible_gpus", lambda: gpus)
    assert detect_least_compute_capability() == found
