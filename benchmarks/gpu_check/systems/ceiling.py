"""How fast this device multiplies bf16 matrices: large square ones, and those of the model."""

from __future__ import annotations

import time
from typing import Any

import torch

from gpu_check.cases import Case
from gpu_check.training import Say, job_and_plan
from phalanx.job.shapes.decoder import DecoderShape

ROUNDS = 5
WARMUPS = 3


def measure(case: Case, say: Say) -> None:
    """FLOP/s: of the square the best of a few rounds, which is the ceiling; of the model's
    products all together."""
    say(machine(case))
    side = case.square
    say(
        {
            "square": side,
            "square_flops_per_s": max(rate(case, side, side, side) for _ in range(ROUNDS)),
        }
    )
    job, plan = job_and_plan(case)
    shape, flops, seconds = plan.model_shape, 0.0, 0.0
    say({"flops_per_token": plan.flops_per_token, "num_params": plan.num_params})
    for m, n, k, times in products(shape, case.tokens_per_step, job.train.loss_chunk_tokens):
        one = 2.0 * m * n * k
        flops += times * one
        seconds += times * one / rate(case, m, n, k)
    say({"model_flops_per_s": flops / seconds})


def machine(case: Case) -> dict[str, Any]:
    name = torch.cuda.get_device_name(0) if case.device == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda}


def products(shape: DecoderShape, tokens: int, chunk: int) -> list[tuple[int, int, int, int]]:
    """(m, n, k, how many of them in a step) of forward, and of both gradients of each."""
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    of_blocks = [
        (shape.dim, heads),
        (shape.dim, kv_heads),
        (shape.dim, kv_heads),
        (heads, shape.dim),
    ]
    wide = [(shape.dim, shape.ffn_dim)] * (2 if shape.is_gated else 1)
    of_blocks += [*wide, (shape.ffn_dim, shape.dim)]
    rows = [(tokens, into, out, shape.num_layers) for into, out in of_blocks]
    chunk = min(chunk, tokens)
    rows.append((chunk, shape.dim, shape.vocab_size, tokens // chunk))
    return [
        product
        for m, into, out, times in rows
        for product in ((m, out, into, times), (m, into, out, times), (out, into, m, times))
    ]


def rate(case: Case, m: int, n: int, k: int) -> float:
    """FLOP/s of [m, k] @ [k, n], random numbers: on zeros a GPU is faster than on anything that
    is learned from."""
    a, b = (
        torch.randn(*size, dtype=torch.bfloat16, device=case.device) for size in ((m, k), (k, n))
    )
    out = torch.empty(m, n, dtype=torch.bfloat16, device=case.device)
    once_s = _time(case, a, b, out, WARMUPS) / WARMUPS
    count = max(3, min(1000, int(case.rate_s / max(once_s, 1e-6))))
    return 2.0 * m * n * k * count / _time(case, a, b, out, count)


def _time(case: Case, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, count: int) -> float:
    if case.device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        torch.mm(a, b, out=out)
    if case.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
