"""What context parallelism needs of a job and its model, and what it takes. Torch-free."""

from __future__ import annotations

from phalanx.core.errors import LayoutError
from phalanx.core.units import format_bytes
from phalanx.job.hugging_face import is_hugging_face
from phalanx.job.nearby import divisors, multiples_near, nearest
from phalanx.job.schema import Job
from phalanx.job.shape import ModelShape
from phalanx.plan.memory import Workload, of_one_rank
from phalanx.plan.rules import heads_of


def load_balance(job: Job) -> str:
    """How sequences are cut.

    Ulysses computes on whole ones: cutting them in a better order would win nothing.
    """
    return "none" if job.parallel.cp_attention == "ulysses" else job.parallel.cp_load_balance


def context_parallel_degree(job: Job, shape: ModelShape, tp: int) -> int:
    """The degree of cp.

    Raises LayoutError for what it cannot do, naming the nearest that it can.
    """
    cp = job.parallel.cp or 1
    if cp == 1:
        return 1
    if shape.is_known and shape.reads_images:
        raise LayoutError(
            f"parallel.cp {cp} cuts sequences of tokens, and a {shape.kind} reads images",
            fix="leave parallel.cp out",
        )
    if is_hugging_face(job.model.kind):
        raise LayoutError(
            f"parallel.cp {cp} needs an attention that asks other ranks for their keys and values,"
            " and those of Hugging Face have no such seam",
            fix="leave parallel.cp out, or see docs/context-parallel.md for the seam",
        )
    if shape.measured is not None and not shape.measured.has_attention_seam:
        raise no_attention_seam(shape.kind)
    if job.model.objective is not None:
        raise LayoutError(
            f"parallel.cp {cp} gives an objective a part of each sequence, and nobody knows if"
            " yours can do with it",
            fix="leave model.objective or parallel.cp out",
        )
    if job.train.compile:
        raise LayoutError(
            "parallel.cp sends keys and values from inside of attention, which train.compile cannot"
            " compile",
            fix="set train.compile=false",
        )
    if job.parallel.compress != "none":
        raise LayoutError(
            f"parallel.compress={job.parallel.compress} is for ddp alone, and the job has context"
            " parallelism",
            fix="set parallel.cp=1, or parallel.compress=none",
        )
    chunks = cp * (2 if load_balance(job) == "zigzag" else 1)
    if job.data.seq_len % chunks:
        raise LayoutError(
            f"parallel.cp {cp} cuts a sequence into {chunks} chunks, which do not divide"
            f" data.seq_len {job.data.seq_len}",
            fix=f"nearest seq_len: {multiples_near(job.data.seq_len, chunks)}",
        )
    if job.parallel.cp_attention == "ulysses" and shape.is_known:
        _require_heads(cp, shape, tp)
    return cp


def no_attention_seam(what: str) -> LayoutError:
    return LayoutError(
        f"parallel.cp needs a model whose attention can be swapped, and {what} has no such seam",
        fix="leave parallel.cp out, or see docs/context-parallel.md for the seam",
    )


def _require_heads(cp: int, shape: ModelShape, tp: int) -> None:
    heads, kv_heads = shape.num_heads // tp, max(1, shape.num_kv_heads // tp)
    if heads % cp == 0 and kv_heads % cp == 0:
        return
    of = f" on each of the {tp} ranks of tp" if tp > 1 else ""
    legal = [d for d in divisors(kv_heads) if d > 1]
    raise LayoutError(
        f"parallel.cp {cp} does not divide {heads_of(heads, kv_heads)}{of}, as ulysses needs",
        fix=(f"nearest: {nearest(cp, legal)}, or " if legal else "set ")
        + "parallel.cp_attention=ring",
    )


def context_bytes(shape: ModelShape, work: Workload) -> float:
    """Of what is under way in one attention, at the worst moment of its backward: of ring two
    blocks of keys and values, and of their gradients in fp32, twice; of all-gather all of them; of
    ulysses queries, keys, values and outputs with their gradients, before and after.

    `shape`: of one rank of tp.
    """
    if work.cp == 1 or not shape.is_known:
        return 0
    kv = 2 * work.tokens * shape.num_kv_heads * shape.head_dim
    c = work.compute_bytes
    if work.cp_attention == "all-gather":
        return kv * work.cp * (c + 4)
    if work.cp_attention == "ulysses":
        return 2 * (kv + 2 * work.tokens * shape.num_heads * shape.head_dim) * c
    return 2 * kv * (c + 4)


def sent_bytes_of_step(shape: ModelShape, work: Workload) -> float:
    """What a rank sends to the others of cp in a step without recomputation.

    `shape`: of one rank of tp.

    Ring and all-gather: (cp - 1) blocks of keys and values in the forward, again in the backward,
    and as many of gradients in at least fp32. Ulysses: (cp - 1)/cp of queries, keys, values and
    outputs, forward and backward.
    """
    others, c = work.cp - 1, work.compute_bytes
    kv, q = (
        2 * work.tokens * heads * shape.head_dim for heads in (shape.num_kv_heads, shape.num_heads)
    )
    num_products = shape.num_layers * work.num_microbatches
    if work.cp_attention == "ulysses":
        return num_products * 2 * (kv + q) * c * others / work.cp
    return num_products * others * kv * (2 * c + max(4, c))


def context_reasons(job: Job, shape: ModelShape, work: Workload) -> list[str]:
    """Lines of a plan."""
    if work.cp == 1:
        return []
    how = {
        "zigzag": "an early and a late chunk each, so that all have equal work",
        "none": "one run of tokens each",
    }
    lines = [
        f"cp: {work.cp} ranks have {job.data.seq_len // work.cp} of each sequence's"
        f" {job.data.seq_len} tokens, {how[load_balance(job)]}; {work.cp_attention} attention"
    ]
    if shape.is_known:
        sent = format_bytes(sent_bytes_of_step(of_one_rank(shape, work.tp, work.rules), work))
        lines[0] += f" sends {sent} per rank and step"
    if job.parallel.cp_attention == "ulysses" and job.parallel.cp_load_balance != load_balance(job):
        lines.append(
            "cp_load_balance is left to ulysses, which has equal work with one run of tokens each"
        )
    return lines
