"""bf16 and fp16 in products of axes: each layout trains as one process in fp32 does, to the digits
of its type.

What a layout computes is held to 1e-5 in float32 (`phalanx verify`); here it is only its types that
are new.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from models import CPU, VOCAB, fill, shape
from phalanx.job.schema import Job
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.models.decoder import Decoder, example_batch
from phalanx.nn.objective import causal_cross_entropy
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.run.one_process.plain_loss import compute_textbook_cross_entropy
from phalanx.verify.cases import list_all_layouts
from ranks import run_ranks

ROWS, SEQ_LEN, STEPS, LR = 16, 16, 4, 0.5
TOLERANCE = {
    "bf16": 3e-3,
    "fp16": 5e-4,
}  # of the loss: both have few digits, and rounding grows over the steps
MORE_FOR_EXPERTS = 8  # some tokens visit another expert than in fp32
EXPERTS = {
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_ffn_dim": 24,
    "num_shared_experts": 1,
    "balance_loss": 0.05,
    "balance_bias": 0.01,
}
SHAPES = {"dense": shape(num_kv_heads=4, num_layers=4), "experts": None}
SHAPES["experts"] = replace(SHAPES["dense"], **EXPERTS)
PRODUCTS = {
    "dense": (
        "pp2-zero3-tp2-1f1b",
        "hsdp2x4-zero3-cp2",
        "zero3-tp2-cp2",
        "pp2-tp2-cp2-zb-v",
        "ddp-tp2-cp2",
    ),
    "experts": (
        "pp2-zero3-tp2-ep2-1f1b",
        "zero3-tp2-cp2-ep4",
        "hsdp2x4-zero3-ep4",
        "pp2-zero3-cp2-ep4-zb-v",
    ),
}
ON_FOUR = {"dense": ("pp2-cp2-1f1b",), "experts": ("zero3-tp2-ep2",)}


def module_of(of: DecoderShape) -> Decoder:
    module = Decoder(of)
    fill(module)
    return module


def steps() -> list[dict[str, torch.Tensor]]:
    """The same batch in each: its loss falls by far more than rounding."""
    batch = example_batch(SHAPES["dense"], ROWS, SEQ_LEN, seed=0)
    batch["targets"][0, :5] = -100
    batch["targets"][5] = -100
    return [batch] * STEPS


def plan_of(kind: str, parallel: dict[str, Any], precision: str, num_ranks: int) -> Plan:
    parts = {"pp": 4, "micro": 2}
    own = {key: value for key, value in parallel.items() if "." not in key}
    model = {"dim": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 40}
    body: dict[str, Any] = {
        "model": model | (EXPERTS if kind == "experts" else {}),
        "data": {"seq_len": SEQ_LEN},
        "train": {"global_batch_size": ROWS},
        "parallel": {"ranks": num_ranks, **own},
        "precision": {
            "compute": precision,
            **({"loss_scale_initial": 2.0**12} if precision == "fp16" else {}),
        },
    }
    shares = num_ranks // (own.get("pp", 1) * own.get("tp", 1) * own.get("cp", 1))
    body["train"]["micro_batch_size"] = ROWS // shares // parts["pp" if "pp" in own else "micro"]
    return make_plan(Job.model_validate(body), cluster=CPU, vocab_size=VOCAB)


def alone(kind: str) -> list[float]:
    """Losses of a plain loop in fp32."""
    module, losses = module_of(SHAPES[kind]), []
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    for batch in steps():
        optimizer.zero_grad()
        total, targets = compute_textbook_cross_entropy(
            module(batch["inputs"], batch["positions"]), batch
        )
        total.backward()
        for parameter in module.parameters():
            parameter.grad /= targets
        losses.append(total.item() / int(targets))
        module.after_step() if hasattr(module, "after_step") else None
        optimizer.step()
    return losses


def train_in_each(
    rank: int, num_ranks: int, names: dict[str, tuple[str, ...]]
) -> dict[str, list[tuple[float, bool]]]:
    """(loss, whether the step was applied) of each step, by kind, layout and type."""
    known, found = dict(list_all_layouts(num_ranks, experts=True)), {}
    for kind, layouts in names.items():
        for name in layouts:
            for precision in TOLERANCE:
                plan = plan_of(kind, known[name], precision, num_ranks)
                with open_mesh(plan.layout, device="cpu") as mesh:
                    model = parallelize(module_of(SHAPES[kind]), plan, mesh)
                    optimizer = torch.optim.SGD(list(model.parameters()), lr=LR)
                    seen = []
                    for batch in steps():
                        optimizer.zero_grad()
                        mine = {
                            k: t[mesh.data_parallel_rank :: plan.layout.data_parallel_size]
                            for k, t in batch.items()
                        }
                        parts = zip(
                            *(t.split(plan.micro_batch_size) for t in mine.values()), strict=True
                        )
                        microbatches = [dict(zip(mine, part, strict=True)) for part in parts]
                        facts = model.reduce_and_clip(
                            model.forward_backward(microbatches, causal_cross_entropy(16))
                        )
                        if facts.should_apply:
                            model.update(optimizer)
                        seen.append((facts.loss, facts.should_apply))
                    found[f"{kind} {name} {precision}"] = seen
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [(4, ON_FOUR), pytest.param(8, PRODUCTS, marks=pytest.mark.long)],
    ids=["four ranks", "products"],
)
def test_each_type_trains_as_fp32_does(num_ranks: int, names: dict[str, tuple[str, ...]]) -> None:
    first, *others = run_ranks(num_ranks, train_in_each, num_ranks, names, deadline_s=600.0)
    assert len(first) == len(TOLERANCE) * sum(map(len, names.values()))
    assert all(found == first for found in others), (
        "every rank has the same losses, and skips the same steps"
    )
    for kind in names:
        wanted = alone(kind)
        assert wanted[-1] < 0.9 * wanted[0], "something was learned"
        for key, seen in first.items():
            if key.startswith(f"{kind} "):
                assert all(usable for _, usable in seen), key
                tolerance = TOLERANCE[key.rpartition(" ")[2]] * (
                    MORE_FOR_EXPERTS if kind == "experts" else 1
                )
                assert [loss for loss, _ in seen] == pytest.approx(wanted, rel=tolerance), key
