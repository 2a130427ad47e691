"""Sums of many parts in a narrow type: what is computed in bf16 must add up in float32, or a sum of
equal parts ends where one more part is less than its last digit. Rows in bf16 do not see that:
their bands are wider."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import torch

from phalanx.core.block_sizes import BlockSizes, use_block_sizes
from phalanx.job.schema import Job
from phalanx.mesh.attend_blocks import compute_attention_by_blocks
from phalanx.mesh.shared_memory.reduction import reduce_into
from phalanx.nn.objective import CausalOutput, causal_cross_entropy
from phalanx.parallel.context.attention import all_gather_attention, ring_attention
from phalanx.parallel.context.block_attention import OnlineSoftmaxOutput
from phalanx.parallel.context.chunks import SequenceChunksOfRanks
from phalanx.parallel.context.group import GRADIENTS, ContextGroup
from phalanx.verify.definitions.check import make_difference
from phalanx.verify.row import Difference

JUDGED = (
    "that sums over ranks, over chunks of logits and over blocks of attention are made in float32"
    " where the job computes in bf16, and gradients travel in it between ranks of cp"
)
CAUSE = "a sum of many equal parts in bf16 is not so many times one part: {} is added up in bf16"
NARROW = torch.bfloat16
# bf16 has 8 digits: 256 + 1 is 256.
NUM_PARTS = 320
# Parts are rounded to bf16, each alike; a sum that is rounded with each of them is off by 10 % and
# more.
TOLERANCE = 0.03
TOLERANCE_OF_EXACT_SUMS = 1e-5


def find_narrow_sums(job: Job) -> Iterator[Difference]:
    """The sums that lose what float32 would keep."""
    yield from _compare_sums_over_ranks()
    yield from _compare_head_gradient()
    yield from _compare_merged_blocks()
    yield from _compare_blocks_of_attention()
    yield from _compare_attention_over_ranks("ring", ring_attention)
    yield from _compare_attention_over_ranks("all-gather", all_gather_attention)


def _list_differences(
    name: str, value: torch.Tensor, expected: torch.Tensor, tolerance: float
) -> Iterator[Difference]:
    error = float((value.double() - expected.double()).norm() / expected.double().norm())
    if not error <= tolerance:
        yield make_difference("narrow sum:", name, error, CAUSE.format(name))


def _compare_sums_over_ranks() -> Iterator[Difference]:
    """Of numbers that are too small for the type, one by one, beside the first of them, and not
    together."""
    for dtype, large in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        parts = [torch.full((7,), number, dtype=dtype) for number in (large, 1.0, 1.0, 1.0, 1.0)]
        operands = [part.view(torch.uint8).numpy() for part in parts]
        for reduce_op, share in (("sum", 1.0), ("avg", 1 / len(parts))):
            result = torch.zeros(7, dtype=dtype)
            reduce_into([result.view(torch.uint8).numpy()], operands, dtype, reduce_op)
            # Rounded once.
            expected = (torch.full((7,), large + 4.0) * share).to(dtype)
            name = f"what ranks {'add up' if share == 1 else 'average'} in shared memory"
            yield from _list_differences(name, result, expected, TOLERANCE_OF_EXACT_SUMS)


def _compare_head_gradient() -> Iterator[Difference]:
    """Of as many equal tokens as there are parts, in a chunk each."""
    generator = torch.Generator().manual_seed(0)
    hidden_D = torch.randn(8, generator=generator)
    head_VD = torch.randn(11, 8, generator=generator)
    objective, gradients = causal_cross_entropy(1), []
    # Not those of the row: each token is a chunk.
    with use_block_sizes(BlockSizes()):
        for count in (1, NUM_PARTS):
            head = head_VD.clone().requires_grad_()
            hidden_BTD = hidden_D.expand(1, count, 8).to(NARROW).requires_grad_()
            targets = {"targets": torch.full((1, count), 3)}
            objective(CausalOutput(hidden_BTD, head), targets)[0].backward()
            assert head.grad is not None
            gradients.append(head.grad)
    one, many = gradients
    name = "the head's gradient over chunks of logits"
    yield from _list_differences(name, many, NUM_PARTS * one, TOLERANCE_OF_EXACT_SUMS)


def _compare_merged_blocks() -> Iterator[Difference]:
    """The outputs of blocks of keys, each with its own weight, merged one by one."""
    generator = torch.Generator().manual_seed(0)
    q_BHTE = torch.zeros(1, 1, 3, 4, dtype=NARROW)
    outs = torch.randn(NUM_PARTS, *q_BHTE.shape, generator=generator)
    lses = torch.randn(NUM_PARTS, *q_BHTE.shape[:-1], generator=generator)
    running = OnlineSoftmaxOutput.make_empty(q_BHTE)
    for out, lse in zip(outs, lses, strict=True):
        running.merge_block(slice(0, 3), out, lse)
    expected = (lses.double().softmax(0).unsqueeze(-1) * outs.double()).sum(0)
    name = "attention's output over blocks of keys"
    yield from _list_differences(name, running.out, expected, TOLERANCE_OF_EXACT_SUMS)


def _make_attention_inputs(num_queries: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values and the output's gradient in bf16, of two keys and equal queries."""
    generator = torch.Generator().manual_seed(3)
    sizes = ((1, 4, 1, 16), (1, 4, 2, 16), (1, 4, 2, 16), (1, 4, 1, 16))
    q, k, v, grad = (torch.randn(size, generator=generator).to(NARROW) for size in sizes)
    return q.repeat(1, 1, num_queries, 1), k, v, grad.repeat(1, 1, num_queries, 1)


def _attend_by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor
) -> dict[str, torch.Tensor]:
    """In float64: all queries see all keys."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    out = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
    out.backward(grad.double())
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return {"output": out.detach(), "queries": q.grad, "keys": k.grad, "values": v.grad}


def _compare_blocks_of_attention() -> Iterator[Difference]:
    """Gradients of keys and values, to which each block of queries adds as much."""
    # As many keys as queries.
    q, k, v, grad = _make_attention_inputs(NUM_PARTS)
    k, v = (x.repeat(1, 1, NUM_PARTS // 2, 1).requires_grad_() for x in (k, v))
    out = compute_attention_by_blocks(q, k, v, None, window=0, is_causal=False, block=1)
    out.backward(grad)
    assert k.grad is not None
    assert v.grad is not None
    expected = _attend_by_definition(q, k, v, grad)
    for name, gradient in (("keys", k.grad), ("values", v.grad)):
        words = f"the gradient of {name} over blocks of queries"
        yield from _list_differences(words, gradient, expected[name], TOLERANCE)


@dataclass
class _EqualRanks:
    """As a `ContextGroup` of ranks that all have the same tokens and see those of all: what comes
    from another rank is what this one sends. It is the last of them.

    `narrow`: gradients were sent in fewer digits than float32 has.
    """

    size: int
    chunks: SequenceChunksOfRanks = field(init=False)
    narrow: bool = False

    def __post_init__(self) -> None:
        self.chunks = SequenceChunksOfRanks(self.size, "none")

    @property
    def rank(self) -> int:
        return self.size - 1

    def start_ring_exchange(self, tensor: torch.Tensor, tag: int) -> Callable[[], torch.Tensor]:
        self.narrow |= tag == GRADIENTS and tensor.dtype.itemsize < torch.float32.itemsize
        arrived = tensor.clone()
        return lambda: arrived

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.expand(self.size, *tensor.shape)

    def reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        self.narrow |= rows.dtype.itemsize < torch.float32.itemsize
        return rows[self.rank] * self.size


def _compare_attention_over_ranks(
    kind: str, attend: Callable[..., torch.Tensor]
) -> Iterator[Difference]:
    """Output and gradients of attention over many ranks that have the same two tokens each."""
    ranks = _EqualRanks(NUM_PARTS)
    q, k, v, grad = _make_attention_inputs(2)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = torch.zeros(1, 1, 2, 2 * NUM_PARTS, dtype=NARROW)
    out = attend(*inputs, mask, 0, cast(ContextGroup, ranks))
    out.backward(grad)
    all_k, all_v = (x.repeat(1, 1, NUM_PARTS, 1) for x in (k, v))
    expected = _attend_by_definition(q, all_k, all_v, grad)
    # Of the last rank's keys, to which the equal queries of all ranks have added.
    for name in ("keys", "values"):
        expected[name] = NUM_PARTS * expected[name][:, :, -2:]
    gradients = dict(zip(("queries", "keys", "values"), (x.grad for x in inputs), strict=True))
    for name, gradient in gradients.items():
        assert gradient is not None
        words = f"the gradient of {name} over ranks of cp ({kind})"
        yield from _list_differences(words, gradient, expected[name], TOLERANCE)
    if ranks.narrow:
        cause = (
            f"gradients of keys and values travel between ranks of cp ({kind}) in bf16, and not in"
            " float32: each rank on their way rounds them"
        )
        error = torch.finfo(NARROW).eps / 2
        yield make_difference("narrow sum:", f"what ranks of cp send ({kind})", error, cause)
