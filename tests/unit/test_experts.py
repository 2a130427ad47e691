"""Mixture of experts against a loop over sequences, tokens and experts that follows the papers'
formulas."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from models import shape
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.mesh import grouped
from phalanx.nn import experts
from phalanx.nn.experts import MixtureOfExperts
from phalanx.nn.grouped import GroupedLinear
from phalanx.nn.models.decoder import build
from phalanx.nn.objective import causal_cross_entropy
from phalanx.nn.routing import ExpertBalance, compute_expert_capacity
from second_device import CUDA, second_device

B, T, E, K = 3, 7, 6, 2
MIXTRAL = replace(
    shape(), dim=16, num_experts=E, experts_per_token=K, expert_ffn_dim=12, balance_loss=0.1
)
DEEPSEEK = replace(
    MIXTRAL, num_shared_experts=2, router_scores="sigmoid", router_scale=2.5, balance_bias=0.01
)
CASES = {
    "mixtral": MIXTRAL,
    "deepseek": DEEPSEEK,
    "not normalized": replace(MIXTRAL, router_normalize=False, num_shared_experts=1),
    "with capacity": replace(MIXTRAL, expert_capacity=1.0),
    "tight": replace(DEEPSEEK, expert_capacity=0.5),
    "two matrices": replace(MIXTRAL, activation="gelu"),
}


def made(shape: DecoderShape) -> MixtureOfExperts:
    torch.manual_seed(0)
    moe = MixtureOfExperts(shape, ExpertBalance()).double()
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if moe.router.bias is not None:
        torch.nn.init.normal_(moe.router.bias, std=0.2)
    return moe


def reference(
    moe: MixtureOfExperts, x: torch.Tensor, shape: DecoderShape
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(outputs, balance loss, choices that were dropped)."""
    logits = x @ moe.router.weight.T
    scores = logits.softmax(-1) if shape.router_scores == "softmax" else logits.sigmoid()
    shares, bias = (
        scores / scores.sum(-1, keepdim=True),
        0 if moe.router.bias is None else moe.router.bias,
    )
    room = math.ceil(shape.expert_capacity * T * K / E) if shape.expert_capacity else T
    rows, loss, dropped, experts = [], torch.zeros((), dtype=x.dtype), 0, moe.experts
    for b in range(B):
        chose, taken = [0] * E, [0] * E
        for t in range(T):
            best = (scores[b, t] + bias).topk(K).indices.tolist()
            total = sum(scores[b, t, e] for e in best) if shape.router_normalize else 1
            out = torch.zeros_like(x[b, t]) if moe.shared is None else moe.shared(x[b, t])
            for e in best:
                chose[e] += 1
                if taken[e] == room:
                    dropped += 1
                    continue
                taken[e] += 1
                inner = experts.up.weight[e] @ x[b, t]
                gate = None if experts.gate is None else experts.gate.weight[e] @ x[b, t]
                inner = F.gelu(inner) if gate is None else F.silu(gate) * inner
                out = out + shape.router_scale * scores[b, t, e] / total * (
                    experts.down.weight[e] @ inner
                )
            rows.append(out)
        loss = loss + shape.balance_loss * T * sum(
            E / (K * T) * chose[e] * shares[b, :, e].mean() for e in range(E)
        )
    return torch.stack(rows).view_as(x), loss, dropped


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_a_loop(case: str) -> None:
    shape = CASES[case]
    moe = made(shape)
    x = torch.randn(B, T, shape.dim, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(B, T, shape.dim, dtype=torch.float64)
    moe.router.balance.scale = 0.7
    out = moe(x)
    found = torch.autograd.grad((out * weight).sum(), [x, *moe.parameters()])
    wanted_out, loss, dropped = reference(moe, x, shape)
    wanted = torch.autograd.grad((wanted_out * weight).sum() + 0.7 * loss, [x, *moe.parameters()])
    torch.testing.assert_close(out, wanted_out, rtol=0, atol=1e-12)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    load = moe.router.load.take(E, x.device)
    assert int(load[:-1].sum()) == B * T * K
    assert int(load[-1]) == dropped
    assert (dropped > 0) == (shape.expert_capacity > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [16, 6])
def test_grouped_products_equal_one_product_for_each_expert(dtype: torch.dtype, width: int) -> None:
    """Also where an expert has no rows, or none has."""
    torch.manual_seed(1)
    for sizes in ((3, 0, 5, 1), (0, 0, 0, 0)):
        layer = GroupedLinear(4, width, 2 * width).to(dtype)
        torch.nn.init.normal_(layer.weight)
        x = torch.randn(sum(sizes), width, dtype=dtype, requires_grad=True)
        out = layer(x, torch.tensor(sizes))
        (gx, gw) = torch.autograd.grad(out.sum(), [x, layer.weight])  # a gradient with strides of 0
        parts = [F.linear(rows, w) for rows, w in zip(x.split(sizes), layer.weight, strict=True)]
        wanted = torch.autograd.grad(torch.cat(parts).sum(), [x, layer.weight])
        close = (
            {"rtol": 0.02, "atol": 0.05}
            if dtype is torch.bfloat16
            else {"rtol": 1e-5, "atol": 1e-5}
        )
        torch.testing.assert_close(out, torch.cat(parts), **close)
        torch.testing.assert_close(gx, wanted[0], **close)
        torch.testing.assert_close(gw, wanted[1], **close)


def test_the_decoder_has_what_the_shape_says_and_its_objective_weighs_the_balance_loss() -> None:
    model = build(replace(DEEPSEEK, num_layers=3, num_dense_layers=1)).double()
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == (
        model.shape.list_tensors()
    )
    assert sum(p.numel() for p in model.parameters()) == model.shape.num_params
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    tokens = torch.randint(model.shape.vocab_size, (2, T))
    loss_sum, count = causal_cross_entropy(64)(model(tokens), {"targets": tokens})
    (loss_sum / count).backward()
    assert float(model.balance.scale) == pytest.approx(1 / int(count))


def test_a_balance_loss_that_nobody_weighs_is_an_error_and_not_silence() -> None:
    moe = made(MIXTRAL)
    with pytest.raises(RuntimeError, match="has no weight"):
        moe(torch.randn(B, T, MIXTRAL.dim, dtype=torch.float64)).sum().backward()


def test_capacity_is_the_even_share_times_a_factor_rounded_up() -> None:
    assert [compute_expert_capacity(128, 2, 8, factor) for factor in (1.0, 1.25, 0.01)] == [
        32,
        40,
        1,
    ]
    assert compute_expert_capacity(7, 2, 6, 1.0) == math.ceil(14 / 6)


class _Seen(TorchDispatchMode):
    """The names of all operations, backwards included."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def added_by_index(
    row_RD: torch.Tensor, row_KN: torch.Tensor, weight_R: torch.Tensor | None = None
) -> torch.Tensor:
    """The reference: index_add, which adds up in the order of rows on a CPU, and in any order on
    a GPU."""
    out_ND = row_RD.new_zeros(row_KN.shape[1], row_RD.shape[1])
    places = {int(row): token for of_token in row_KN for token, row in enumerate(of_token)}
    token_R = torch.tensor([places[row] for row in range(len(row_RD))], dtype=torch.int64)
    weighted = row_RD if weight_R is None else row_RD * weight_R[:, None].to(row_RD.dtype)
    return out_ND.index_add_(0, token_R, weighted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("capacity", [0.0, 0.5, 1.0])
def test_rows_are_added_up_in_one_order(
    capacity: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reference: index_add on the CPU, to the last bit; and it is none, which on a GPU has
    another order each time."""
    torch.manual_seed(5)
    layer = MixtureOfExperts(
        replace(
            MIXTRAL,
            num_experts=5,
            experts_per_token=3,
            balance_loss=0.0,
            expert_capacity=capacity,
        ),
        ExpertBalance(),
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    layer = layer.to(dtype)
    x = torch.randn(3, 7, 16, dtype=dtype)

    def results() -> list[torch.Tensor]:
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        out.sin().sum().backward()
        return [out.detach(), leaf.grad, *(p.grad for p in layer.parameters())]  # type: ignore[list-item]

    with _Seen() as seen:
        found = results()
    assert not [name for name in seen.names if name.startswith("index_add")], seen.names
    monkeypatch.setattr(experts, "_sum_rows_by_token", added_by_index)
    for one, other in zip(found, results(), strict=True):
        assert torch.equal(one, other)


def test_experts_without_rows_have_gradient_zero_whatever_a_kernel_leaves_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A double of a grouped product that writes nothing for a group without rows, where NaN was
    before."""

    def poisoned(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        ends = [0, *offs.cpu().tolist()]
        made = torch.full(
            (len(offs), a.shape[0], b.shape[1]), torch.nan, dtype=a.dtype, device=a.device
        )
        for group, (start, end) in enumerate(itertools.pairwise(ends)):
            if end > start:
                made[group] = a[:, start:end] @ b[start:end]
        return made

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", poisoned)
    with second_device():
        counts = torch.tensor([3, 0, 5], device=CUDA)
        a, b = (torch.randn(8, 16, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
        made = grouped.compute_expert_weight_gradients(a, b, counts).cpu()
    assert torch.equal(made[1], torch.zeros(16, 16, dtype=torch.bfloat16))
    assert not made.isnan().any()
    assert made[0].any()
    assert made[2].any()
