"""The operation of context parallelism, all ranks in this one process, against the reference of
a dozen lines."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from gpu_check.cases import Case
from gpu_check.parity import compare
from gpu_check.training import Say
from phalanx.core.phases import PhaseTimer
from phalanx.mesh.attention_kernels import choose_attention_kernel
from phalanx.nn.attention import make_attention_mask
from phalanx.parallel.context.attention import _BlockwiseAttentionFunction
from phalanx.parallel.context.chunks import SequenceChunksOfRanks
from phalanx.parallel.context.transform import ContextParallelMaskBuilder

RANKS, BATCH, HEADS, KV_HEADS, WIDTH = 4, 2, 4, 2, 64
REFERENCE = Path(__file__).parents[3] / "tests" / "support" / "online_softmax.py"
Tensors = dict[str, torch.Tensor]


@dataclass
class Ring:
    """Stands for a group of ranks: what they send is here already.

    `keys[r]` and `gradients[r]` are those of rank r.
    """

    rank: int
    chunks: SequenceChunksOfRanks
    keys: list[torch.Tensor]
    gradients: list[torch.Tensor]
    phases: PhaseTimer

    @property
    def size(self) -> int:
        return self.chunks.size


class Carrier:
    """Brings every rank's keys to one rank, in the ring's order, and their gradients home."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring

    def iterate_key_value_blocks(self, kv: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        for step in range(self.ring.size):
            owner = (self.ring.rank - step) % self.ring.size
            yield owner, self.ring.keys[owner]

    def compute_own_key_value_gradients(
        self, kv: torch.Tensor, of_block: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        for owner, block in self.iterate_key_value_blocks(kv):
            self.ring.gradients[owner] += of_block(owner, block)
        return torch.zeros_like(kv)


def measure(case: Case, say: Say) -> None:
    attention_by_blocks = _reference()
    rows = {}
    for name, dtype, window, documents in (
        ("bf16", torch.bfloat16, 0, False),
        ("fp16", torch.float16, 0, False),
        ("fp32", torch.float32, 0, False),
        ("bf16, documents", torch.bfloat16, 0, True),
        ("bf16, window", torch.bfloat16, case.ring_tokens // 3, False),
    ):
        given = _given(case, dtype)
        ids = _documents(case) if documents else None
        mask = make_attention_mask(case.ring_tokens, window, ids, dtype, torch.device(case.device))
        kernel = type(choose_attention_kernel(given["q"], mask)).__name__
        exact = _by_reference(attention_by_blocks, given, window, ids)
        rows[f"{name} ({kernel})"] = compare(
            _by_ring(given, window, ids), _by_torch(given, mask), exact
        )
        say({"parity": rows, "agrees": all(row["agrees"] for row in rows.values())})


def _reference() -> Callable[..., torch.Tensor]:
    spec = importlib.util.spec_from_file_location("online_softmax", REFERENCE)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[..., torch.Tensor] = module.attention_by_blocks
    return found


def _given(case: Case, dtype: torch.dtype) -> Tensors:
    """q, k, v and the gradient of the output: [batch, heads, tokens, width]."""
    generator = torch.Generator().manual_seed(1)
    heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "grad": HEADS}
    return {
        name: torch.randn(BATCH, count, case.ring_tokens, WIDTH, generator=generator).to(
            case.device, dtype
        )
        for name, count in heads.items()
    }


def _documents(case: Case) -> torch.Tensor:
    ends = torch.tensor([case.ring_tokens // 5, case.ring_tokens // 2], device=case.device)
    places = torch.arange(case.ring_tokens, device=case.device)
    return (places[:, None] >= ends).sum(1).expand(BATCH, -1)


def _leaves(given: Tensors, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    return [
        given[name].to(dtype or given[name].dtype).detach().clone().requires_grad_()
        for name in ("q", "k", "v")
    ]


def _found(out: torch.Tensor, leaves: list[torch.Tensor]) -> Tensors:
    grads = {f"grad {name}": leaf.grad for name, leaf in zip(("q", "k", "v"), leaves, strict=True)}
    assert all(grad is not None for grad in grads.values())
    return {"out": out.detach(), **grads}  # type: ignore[dict-item]


def _by_torch(given: Tensors, mask: torch.Tensor | None) -> Tensors:
    q, k, v = leaves = _leaves(given)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    out.backward(given["grad"])
    return _found(out, leaves)


def _by_reference(
    attention_by_blocks: Callable[..., torch.Tensor],
    given: Tensors,
    window: int,
    ids: torch.Tensor | None,
) -> Tensors:
    """In fp64, from the numbers that were rounded to the kernels' type."""
    q, k, v = leaves = _leaves(given, torch.float64)
    tokens, per_head = q.shape[2], HEADS // KV_HEADS
    places = torch.arange(tokens, device=q.device)
    back = places[:, None] - places
    keep = (back >= 0) & ((back < window) if window else True)
    rows = []
    for b in range(BATCH):
        seen = keep if ids is None else keep & (ids[b][:, None] == ids[b])
        rows.append(
            torch.stack(
                [
                    attention_by_blocks(
                        q[b, h], k[b, h // per_head], v[b, h // per_head], seen, tokens // RANKS
                    )
                    for h in range(HEADS)
                ]
            )
        )
    out = torch.stack(rows)
    out.backward(given["grad"].double())
    return _found(out, leaves)


def _by_ring(given: Tensors, window: int, ids: torch.Tensor | None) -> Tensors:
    """What RANKS ranks compute, put together in the order of the sequence."""
    chunks, tokens, device = SequenceChunksOfRanks(RANKS), given["q"].shape[2], given["q"].device
    places = [chunks.positions_of_rank_tokens(rank, tokens).to(device) for rank in range(RANKS)]
    keys = [
        torch.stack([given[name].index_select(2, place) for name in ("k", "v")]) for place in places
    ]
    wide = torch.promote_types(given["q"].dtype, torch.float32)
    gradients = [torch.zeros(kv.shape, dtype=wide, device=device) for kv in keys]
    found = {
        name: torch.zeros_like(given[name[-1]], dtype=wide)
        for name in ("grad q", "grad k", "grad v")
    }
    found["out"] = torch.zeros_like(given["q"])
    for rank, place in enumerate(places):
        ring = Ring(rank, chunks, keys, gradients, PhaseTimer())
        q = given["q"].index_select(2, place).requires_grad_()
        make = ContextParallelMaskBuilder(ring, make_attention_mask, covers_all=False)  # type: ignore[arg-type]
        mask = make(len(place), window, ids, q.dtype, device)
        out = _BlockwiseAttentionFunction.apply(
            q, keys[rank][0], keys[rank][1], mask, window, ring, Carrier
        )
        out.backward(given["grad"].index_select(2, place))
        found["out"][:, :, place] = out.detach()
        found["grad q"][:, :, place] = q.grad.to(wide)  # type: ignore[union-attr]
    for place, grad in zip(places, gradients, strict=True):
        found["grad k"][:, :, place], found["grad v"][:, :, place] = grad
    return found
