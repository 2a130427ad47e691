"""Attention as GPUs are to compute it, on a device that is not there: what draws, and what is
repeated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode

from models import plan
from phalanx.mesh.attend import compute_attention, repeat_key_value_heads
from phalanx.mesh.mesh import Mesh
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.layout import Layout
from second_device import CUDA, second_device


class Attends(nn.Module):
    """Attention as Hugging Face models call it, and torch's own."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.embed = nn.Embedding(37, 16)
        self.own = nn.MultiheadAttention(16, 2, dropout=p, batch_first=True)
        self.head = nn.Linear(16, 37)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        q = x.unflatten(-1, (2, 8)).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            q, q, q, dropout_p=self.p if self.training else 0.0, is_causal=True
        )
        x = x + y.transpose(1, 2).flatten(2)
        x = x + self.own(x, x, x, need_weights=False)[0]
        return self.head(x)


def loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.square().sum(), torch.ones((), dtype=torch.float64, device=logits.device)


@pytest.mark.parametrize(
    ("p", "dropout", "num_fused"), [(0.2, "global", 0), (0.0, "global", 4), (0.2, "local", 4)]
)
def test_dropout_of_attention_is_drawn_where_it_can_be_seen_to(
    p: float, dropout: str, num_fused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A double of the fused kernel, which draws inside of itself.

    Where nothing is dropped it is used all the same, and where ranks may draw for themselves.
    """
    fused: list[float] = []
    real = F.scaled_dot_product_attention

    def double(
        q: torch.Tensor,
        k: Any,
        v: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kw: Any,
    ) -> Any:
        if has_torch_function((q,)):
            return handle_torch_function(double, (q,), q, k, v, attn_mask, dropout_p, *args, **kw)
        if torch.backends.cuda.flash_sdp_enabled():
            fused.append(dropout_p)
        return real(q, k, v, attn_mask, dropout_p, *args, **kw)

    double.__name__ = real.__name__
    monkeypatch.setattr(F, "scaled_dot_product_attention", double)
    batch = {"inputs": torch.arange(24).view(3, 8)}
    with second_device():
        model = parallelize(
            Attends(p), plan(1, dropout=dropout), Mesh(Layout(), 0, 0, CUDA), seed=1
        )
        for _ in range(2):
            model.reduce_and_clip(model.forward_backward([batch], loss))
        assert len(fused) == num_fused
        assert not model.left_to_torch


class Largest(TorchDispatchMode):
    """The most elements that any operation made at once, and the kernels of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.kernels = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.elements = max(self.elements, made.numel())
        if "attention" in func.overloadpacket.__name__:
            self.kernels.add(func.overloadpacket.__name__)
        return made


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_keys_and_values_are_not_repeated_and_attention_is_the_same(
    dtype: torch.dtype, is_masked: bool
) -> None:
    """Reference: keys and values repeated for every head of queries."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 16, 8, dtype=dtype, requires_grad=True) for heads in (8, 2, 2))
    mask = torch.zeros(1, 1, 16, 16, dtype=dtype).masked_fill_(
        torch.ones(16, 16).tril() == 0, -torch.inf
    )
    grad = torch.randn(2, 8, 16, 8, dtype=dtype)

    def results(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = compute_attention(q, keys, values, mask if is_masked else None, is_causal=True)
        return (out, *torch.autograd.grad(out, (q, k, v), grad))

    with Largest() as seen:
        found = results(k, v)
    assert seen.elements <= q.numel(), "no T x T scores"
    assert seen.kernels == {
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    }
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for one, other in zip(
        found, results(repeat_key_value_heads(k, 4), repeat_key_value_heads(v, 4)), strict=True
    ):
        assert (one - other).norm() <= tolerance * other.norm()
    with (
        second_device()
    ):  # a GPU's kernel of masks takes no groups: they are repeated, and no scores are kept
        on_gpu = compute_attention(
            *(x.detach().to(CUDA) for x in (q, k, v)),
            mask.to(CUDA) if is_masked else None,
            is_causal=True,
        )
        assert torch.equal(on_gpu.cpu(), found[0])
