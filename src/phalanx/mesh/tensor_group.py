"""What the ranks of one tensor-parallel group say to each other, as operations that autograd goes
through.

Activations are [B, T, ...]. With `cuts_sequence` (sequence parallelism) what lies between the
regions that work on parts of the features is cut along T: a region is entered by an all-gather and
left by a reduce-scatter, and the backward does the opposite. Without it, it is entered as it is and
left by an all-reduce, and the backward enters by an all-reduce (Shoeybi et al. 2019, Korthikanti et
al. 2022).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from phalanx.core.phases import PhaseTimer
from phalanx.mesh.devices import is_on_cpu

SEQUENCE_DIM = 1  # the dimension that sequence parallelism cuts
_ops = torch.ops._c10d_functional


@dataclass
class TensorParallelGroup:
    """The group as one rank sees it. `name` is torch's of the process group.

    `gathers_input_again`: the forward keeps this rank's part of what enters a region, and the
    backward gathers it again.
    `num_tokens`: T of the forward under way, which a cut sequence alone does not say: it is padded
    to a multiple of the ranks. `counts` and `num_bytes`: collectives this rank took part in by
    kind, and the bytes of what came of them.
    """

    name: str
    rank: int
    size: int
    phases: PhaseTimer
    cuts_sequence: bool = False
    chunks: int = 1
    gathers_input_again: bool = False
    num_tokens: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)

    @property
    def sent_bytes(self) -> float:
        """Bytes that this rank has sent so far by ring algorithms, outside compiled code: of an
        all-reduce's result (w - 1) / w twice, of an all-gather's once, of a reduce-scatter's part
        w - 1 times as much."""
        num_others, output_bytes = self.size - 1, self.num_bytes
        return (
            2 * output_bytes["all_reduce"] + output_bytes["all_gather"]
        ) * num_others / self.size + output_bytes["reduce_scatter"] * num_others

    # Between autograd and the rest

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Into a region: all tokens, on every rank."""
        entered: torch.Tensor = (
            _AllGatherTokensFunction if self.cuts_sequence else _CopyInputFunction
        ).apply(x, self)
        return entered

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Out of a region: the sum over ranks of what each has made."""
        leave = _ReduceScatterTokensFunction if self.cuts_sequence else _SumOutputFunction
        output: torch.Tensor = leave.apply(x, self)
        return output

    def select_tokens_of_rank(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sequence of what all ranks hold alike; all of it where it is
        not cut."""
        if not self.cuts_sequence:
            return x
        padded = self._pad_to_multiple_of_ranks(x)
        length = padded.shape[SEQUENCE_DIM] // self.size
        return padded.narrow(SEQUENCE_DIM, self.rank * length, length)

    def all_gather_features(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """The last dimension of all ranks, `sizes` long, together.

        What follows is the same on every rank.
        """
        gathered: torch.Tensor = _AllGatherFeaturesFunction.apply(x, self, tuple(sizes))
        return gathered

    # Collectives: none of these is differentiable

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        with self.timing_collective("all_reduce", "all_reduce activations"):
            return self.wait(self.start_all_reduce(x, op))

    def start_all_reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return self._count_sent_bytes("all_reduce", _ops.all_reduce(x.contiguous(), op, self.name))

    def start_all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[ranks * x.shape[0], ...]: what each rank has, one after another."""
        x = x.contiguous()
        if is_on_cpu(x) and not torch.compiler.is_compiling():
            # Gloo calls the functional one ALLGATHER_COALESCED, and both threads of a group assign
            # that name of their last work to one std::string without a lock. It is too long to lie
            # in the string itself: now and then the heap broke. This one is called ALLGATHER.
            gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
            started = _ops.all_gather_into_tensor_out(x, self.size, self.name, out=gathered)
        else:
            started = _ops.all_gather_into_tensor(x, self.size, self.name)
        return self._count_sent_bytes("all_gather", started)

    def start_reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """[x.shape[0] / ranks, ...]: this rank's part of the sum."""
        started = _ops.reduce_scatter_tensor(x.contiguous(), "sum", self.size, self.name)
        return self._count_sent_bytes("reduce_scatter", started)

    def wait(self, started: torch.Tensor) -> torch.Tensor:
        done: torch.Tensor = _ops.wait_tensor(started)
        return done

    def all_gather_tokens(self, x: torch.Tensor, num_tokens: int | None = None) -> torch.Tensor:
        """[B, T / ranks, ...] of each rank -> [B, T, ...]. `num_tokens`: T, if not that of the
        forward under way."""
        with self.timing_collective("all_gather", "all_gather sequence"):
            parts = self.wait(self.start_all_gather(x))
        tokens = parts.unflatten(0, (self.size, -1)).transpose(0, 1).flatten(1, 2)
        # Without what `_pad_to_multiple_of_ranks` has put behind the last rank's part.
        if num_tokens is None:
            num_tokens = self.num_tokens
        return tokens.narrow(SEQUENCE_DIM, 0, num_tokens)

    def reduce_scatter_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, ...] of each rank -> its part [B, T / ranks, ...] of their sum."""
        parts = (
            self._pad_to_multiple_of_ranks(x)
            .unflatten(SEQUENCE_DIM, (self.size, -1))
            .transpose(0, 1)
            .flatten(0, 1)
        )
        with self.timing_collective("reduce_scatter", "reduce_scatter sequence"):
            return self.wait(self.start_reduce_scatter(parts))

    def timing_collective(self, kind: str, words: str) -> AbstractContextManager[None]:
        # A graph has no clock: the verdict says that these are a part of forward and backward.
        if torch.compiler.is_compiling():
            return nullcontext()
        return self.phases("collective", words, axis="tp")

    def _pad_to_multiple_of_ranks(self, x: torch.Tensor) -> torch.Tensor:
        missing = -x.shape[SEQUENCE_DIM] % self.size
        if not missing:
            return x
        return F.pad(x, (0, 0) * (x.ndim - SEQUENCE_DIM - 1) + (0, missing))

    def _count_sent_bytes(self, kind: str, output: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.counts[kind] += 1
            self.num_bytes[kind] += output.numel() * output.element_size()
        return output


class _CopyInputFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TensorParallelGroup) -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.group.all_reduce(grad), None


class _SumOutputFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TensorParallelGroup) -> torch.Tensor:  # type: ignore[override]
        return group.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, None


class _AllGatherTokensFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TensorParallelGroup) -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        return group.all_gather_tokens(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.group.reduce_scatter_tokens(grad), None


class _ReduceScatterTokensFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TensorParallelGroup) -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        return group.reduce_scatter_tokens(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.group.all_gather_tokens(grad), None


class _AllGatherFeaturesFunction(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, group: TensorParallelGroup, sizes: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.start, ctx.size = sum(sizes[: group.rank]), sizes[group.rank]
        # A gather takes the same length of each rank.
        longest = max(sizes)
        if x.shape[-1] < longest:
            x = F.pad(x, (0, longest - x.shape[-1]))
        with group.timing_collective("all_gather", "all_gather features"):
            gathered = group.wait(group.start_all_gather(x[None]))
        parts = gathered.unflatten(0, (group.size, -1)).squeeze(1)
        own_parts = [part[..., :size] for part, size in zip(parts, sizes, strict=True)]
        return torch.cat(own_parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        # What follows the gather is the same on every rank, so each has the whole gradient: no sum.
        return grad.narrow(-1, ctx.start, ctx.size).contiguous(), None, None


@dataclass(frozen=True)
class VocabularyShard:
    """The tokens whose rows of an embedding or a head this rank holds: [start, start + sizes[rank])
    of all."""

    group: TensorParallelGroup
    sizes: tuple[int, ...]

    @property
    def first_vocabulary_row(self) -> int:
        return sum(self.sizes[: self.group.rank])

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states as they leave the last block -> of all tokens; their gradient is summed
        over the ranks."""
        return self.group.enter(hidden)

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """[..., rows of this rank] -> [..., all]."""
        return self.group.all_gather_features(logits, self.sizes)

    def max_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(x, "max")

    def sum_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(x)


class ShardedVocabularyLogits(NamedTuple):
    """Logits [..., rows of this rank], and which those are."""

    logits: torch.Tensor
    vocabulary: VocabularyShard

    def gather_logits(self) -> torch.Tensor:
        return self.vocabulary.gather(self.logits)
