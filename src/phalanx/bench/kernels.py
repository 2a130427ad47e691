"""The operations of a training step on one rank, each as a call that can be timed: products,
copies, norms, activations, attention, loss, optimizer, and a whole block to check them by.

They are phalanx's own modules where it has some, so that what is measured is what a run does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from phalanx.bench.block_shape import HEAD_DIM, make_block_shape
from phalanx.bench.items import BenchItem
from phalanx.mesh.attend import compute_attention
from phalanx.nn.block import Block
from phalanx.nn.objective import CausalOutput, causal_cross_entropy
from phalanx.nn.rotary import make_rotary_table, rotate

TORCH_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
LOSS_CHUNK_TOKENS = 1024


@dataclass(frozen=True)
class TimedCall:
    """A call, its FLOPs, and the bytes that it must at least read and write."""

    call: Callable[[], object]
    flops: float = 0.0
    num_bytes: float = 0.0


def build_timed_call(item: BenchItem, device: torch.device) -> TimedCall:
    """The call that `item` measures, with random inputs on `device`."""
    torch.manual_seed(0)
    return CALL_BUILDERS[item.kind](item, device)


def _build_random_tensor(item: BenchItem, device: torch.device, *size: int) -> torch.Tensor:
    return torch.randn(*size, device=device).to(TORCH_DTYPES[item.dtype])


def _build_matmul_call(item: BenchItem, device: torch.device) -> TimedCall:
    rows, cols, inner = item.size
    flops = 2.0 * rows * cols * inner
    num_bytes = TORCH_DTYPES[item.dtype].itemsize * (rows * inner + inner * cols + rows * cols)
    if item.dtype == "fp8":
        return TimedCall(_build_fp8_matmul(item, device), flops, num_bytes)
    lhs, rhs = (
        _build_random_tensor(item, device, rows, inner),
        _build_random_tensor(item, device, inner, cols),
    )
    # As a linear layer calls them: y = x W^T, grad_x = grad_y W, grad_W = grad_y^T x.
    if item.mode == "forward":
        rhs = _build_random_tensor(item, device, cols, inner).T
    elif item.mode == "weight_grad":
        lhs = _build_random_tensor(item, device, inner, rows).T
    out = torch.empty(rows, cols, dtype=lhs.dtype, device=device)
    return TimedCall(lambda: torch.mm(lhs, rhs, out=out), flops, num_bytes)


def _build_fp8_matmul(item: BenchItem, device: torch.device) -> Callable[[], object]:
    rows, cols, inner = item.size
    lhs = torch.randn(rows, inner, device=device).to(TORCH_DTYPES["fp8"])
    rhs = torch.randn(cols, inner, device=device).to(TORCH_DTYPES["fp8"]).T
    scale = torch.ones((), device=device)

    def multiply() -> object:
        return torch._scaled_mm(lhs, rhs, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)

    return multiply


def _build_copy_call(item: BenchItem, device: torch.device) -> TimedCall:
    source = torch.randn(item.size[0] // 4, device=device)
    target = torch.empty_like(source)
    return TimedCall(lambda: target.copy_(source), num_bytes=2.0 * item.size[0])


def _build_host_transfer_call(item: BenchItem, device: torch.device) -> TimedCall:
    host = torch.randn(item.size[0] // 4).pin_memory()
    remote = torch.empty_like(host, device=device)
    source, target = host, remote
    if item.kind == "device_to_host":
        source, target = remote, host
    return TimedCall(lambda: target.copy_(source, non_blocking=True), num_bytes=float(item.size[0]))


def _build_launch_overhead_call(item: BenchItem, device: torch.device) -> TimedCall:
    """A product of 8 x 8: what calling an operation costs, and with training its two backward
    products, and the work of autograd."""
    lhs = _build_random_tensor(item, device, 8, 8)
    layer = nn.Linear(8, 8, bias=False, device=device, dtype=lhs.dtype)
    if item.mode == "forward":
        with torch.no_grad():
            return TimedCall(_wrap_in_no_grad(lambda: layer(lhs)))
    lhs.requires_grad_()
    grad = torch.ones(8, 8, dtype=lhs.dtype, device=device)
    return TimedCall(lambda: torch.autograd.grad(layer(lhs), (lhs, layer.weight), grad))


def _wrap_in_no_grad(call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return call()

    return run


def _build_forward_or_training_call(
    call: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], mode: str
) -> Callable[[], object]:
    """`call(*inputs)`, in training with the gradients of all of them."""
    if mode == "forward":
        return _wrap_in_no_grad(lambda: call(*inputs))
    leaves = tuple(tensor.requires_grad_() for tensor in inputs)
    grad = torch.randn_like(call(*leaves))
    return lambda: torch.autograd.grad(call(*leaves), leaves, grad)


# Tensors of the operation's size that it reads and writes: (forward, forward and backward).
TENSORS_MOVED_BY_OPERATION = {
    "add": (3, 3),
    "rms_norm": (2, 5),
    "gated_activation": (3, 8),
    "rotary": (2, 4),
}


def _build_elementwise_call(item: BenchItem, device: torch.device) -> TimedCall:
    tokens, width = item.size
    x = _build_random_tensor(item, device, tokens, width)
    inputs: tuple[torch.Tensor, ...] = (x, _build_random_tensor(item, device, tokens, width))
    call: Callable[..., torch.Tensor] = torch.add
    if item.kind == "rms_norm":
        inputs, call = (x, torch.ones(width, dtype=x.dtype, device=device)), _apply_rms_norm
    elif item.kind == "gated_activation":
        call = _apply_gated_activation
    elif item.kind == "rotary":
        positions = torch.arange(tokens, device=device)[None]
        table = make_rotary_table(positions, make_block_shape(width), x.dtype)
        inputs = (x.view(1, tokens, -1, HEAD_DIM).transpose(1, 2),)
        call = functools.partial(rotate, table=table)
    traffic = TENSORS_MOVED_BY_OPERATION[item.kind][item.mode == "training"]
    num_bytes = float(traffic * x.numel() * x.itemsize)
    return TimedCall(_build_forward_or_training_call(call, inputs, item.mode), num_bytes=num_bytes)


def _apply_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def _apply_gated_activation(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def _build_attention_call(item: BenchItem, device: torch.device) -> TimedCall:
    batch, heads, tokens, width = item.size
    queries, keys, values = (
        _build_random_tensor(item, device, batch, heads, tokens, width) for _ in range(3)
    )

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return compute_attention(q, k, v, None, is_causal=True)

    # Two products of the pairs that a causal mask keeps; the backward has five, of which one is the
    # forward's again.
    flops = 4.0 * batch * heads * width * tokens * (tokens + 1) / 2
    if item.mode == "training":
        flops *= 3
    return TimedCall(
        _build_forward_or_training_call(attend, (queries, keys, values), item.mode), flops
    )


def _build_cross_entropy_call(item: BenchItem, device: torch.device) -> TimedCall:
    """phalanx's own loss of hidden states: logits, loss and both gradients."""
    tokens, width, vocab = item.size
    hidden = _build_random_tensor(item, device, 1, tokens, width).requires_grad_()
    head = nn.Parameter(torch.randn(vocab, width, device=device))
    targets = torch.randint(vocab, (1, tokens), device=device)
    objective = causal_cross_entropy(LOSS_CHUNK_TOKENS)

    def run() -> object:
        loss, _ = objective(CausalOutput(hidden, head), {"targets": targets})
        return torch.autograd.grad(loss, (hidden, head))

    num_bytes = 18.0 * tokens * vocab
    return TimedCall(run, 6.0 * tokens * width * vocab, num_bytes)


def _build_embedding_call(item: BenchItem, device: torch.device) -> TimedCall:
    """Rows of a table, and the table's gradient, which is as large as the table."""
    tokens, width, vocab = item.size
    table = nn.Parameter(_build_random_tensor(item, device, vocab, width))
    ids = torch.randint(vocab, (tokens,), device=device)
    grad = _build_random_tensor(item, device, tokens, width)
    num_bytes = float(table.itemsize * (3 * tokens * width + vocab * width))
    return TimedCall(
        lambda: torch.autograd.grad(F.embedding(ids, table), table, grad), num_bytes=num_bytes
    )


def _build_adamw_call(item: BenchItem, device: torch.device) -> TimedCall:
    parameter = nn.Parameter(torch.randn(item.size[0], device=device))
    parameter.grad = torch.randn(item.size[0], device=device)
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, weight_decay=0.1, fused=True)
    # Reads weight, gradient and two moments; writes weight and moments.
    return TimedCall(optimizer.step, num_bytes=28.0 * item.size[0])


def _build_block_call(item: BenchItem, device: torch.device) -> TimedCall:
    """A block of phalanx's decoder, forward and backward: what the other measurements are checked
    by."""
    tokens, dim = item.size
    shape = make_block_shape(dim)
    block = Block(shape, 0).to(device)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.02)
    inputs = torch.randn(1, tokens, dim, device=device)
    table = make_rotary_table(torch.arange(tokens, device=device)[None], shape, torch.float32)
    leaves = (inputs.requires_grad_(), *block.parameters())
    grad = torch.randn_like(inputs)
    is_low = item.dtype != "fp32"

    def run() -> object:
        with torch.autocast(device.type, TORCH_DTYPES[item.dtype], enabled=is_low):
            out: Any = block(inputs, table, None)
        return torch.autograd.grad(out, leaves, grad)

    weights = sum(parameter.numel() for parameter in block.parameters())
    return TimedCall(run, 6.0 * tokens * weights)


CALL_BUILDERS: dict[str, Callable[[BenchItem, torch.device], TimedCall]] = {
    "matmul": _build_matmul_call,
    "copy": _build_copy_call,
    "host_to_device": _build_host_transfer_call,
    "device_to_host": _build_host_transfer_call,
    "launch": _build_launch_overhead_call,
    "add": _build_elementwise_call,
    "rms_norm": _build_elementwise_call,
    "gated_activation": _build_elementwise_call,
    "rotary": _build_elementwise_call,
    "attention": _build_attention_call,
    "cross_entropy": _build_cross_entropy_call,
    "embedding": _build_embedding_call,
    "adamw": _build_adamw_call,
    "block": _build_block_call,
}
