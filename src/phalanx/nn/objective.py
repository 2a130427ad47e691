"""Objectives: `objective(outputs, batch) -> (loss_sum, num_targets)`, sums so that averages stay
honest.

`loss_sum` is a 0-d tensor that carries gradients, `num_targets` counts the targets it sums over
(0-d integer tensor).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from phalanx.core.batch import IGNORE_INDEX
from phalanx.core.block_sizes import get_block_sizes
from phalanx.core.errors import LayoutError
from phalanx.mesh.malloc import make_uninitialized_like
from phalanx.mesh.tensor_group import ShardedVocabularyLogits, VocabularyShard
from phalanx.nn.routing import ExpertBalance

Objective = Callable[[Any, Mapping[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]


class CausalOutput(NamedTuple):
    """The output of causal models: hidden states, and the weight of the head, which the objective
    applies.

    hidden_BTD: [batch, seq, dim]; head_VD: [vocab, dim]. Where tensor parallelism has cut the head,
    head_VD has the rows that `vocabulary` says, and hidden states must enter through it. `balance`
    is that of a model with experts: an objective hands its loss_sum through `balance.with_loss`.
    `free_head`: where weights are gathered, an objective that `frees_head` calls it once nobody
    reads head_VD any more, in the backward neither; its memory is gone then.
    """

    hidden_BTD: torch.Tensor
    head_VD: torch.Tensor
    vocabulary: VocabularyShard | None = None
    balance: ExpertBalance | None = None
    free_head: Callable[[], None] | None = None


class HeadOutput(CausalOutput):
    """The output of a foreign module that was written to return logits: an objective that asks for
    no hidden states gets those."""

    __slots__ = ()

    def gather_logits(self) -> torch.Tensor:
        """Logits [batch, seq, vocab], as the module itself would return them."""
        head_VD = self.head_VD.to(self.hidden_BTD.dtype)
        if self.vocabulary is None:
            return F.linear(self.hidden_BTD, head_VD)
        return self.vocabulary.gather(F.linear(self.vocabulary.enter(self.hidden_BTD), head_VD))


def takes_classes(objective: Objective) -> Objective:
    """Mark an objective that takes each of batch["labels"], or "targets", for the number of a
    class, or -100: others are then refused with their value before it is called.
    """
    objective.takes_classes = True  # type: ignore[attr-defined]
    return objective


def causal_cross_entropy(chunk_tokens: int) -> Objective:
    """Cross-entropy summed over targets that are not -100, with logits of at most `chunk_tokens`
    tokens at a time, or as many as `get_block_sizes` says."""
    objective = takes_classes(
        _mark_objective_of_vocabulary_parts(
            functools.partial(_sum_causal_cross_entropy, chunk_tokens)
        )
    )
    # It computes the head's gradient in the forward, and is the last to read the head.
    objective.frees_head = True  # type: ignore[attr-defined]
    return objective


def build_logits_cross_entropy(chunk_tokens: int) -> Objective:
    """Cross-entropy of tokens; where logits are [batch, classes], of labels."""
    tokens = causal_cross_entropy(chunk_tokens)

    def objective(
        outputs: Any, batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(outputs, torch.Tensor) and outputs.ndim == 2:
            return classification_cross_entropy(outputs, batch)
        return tokens(outputs, batch)

    return takes_classes(_mark_objective_of_vocabulary_parts(objective))


def _mark_objective_of_vocabulary_parts(objective: Objective) -> Objective:
    """Mark an objective that can do with the logits of a part of the vocabulary; others get them
    put together."""
    objective.reads_vocabulary_parts = True  # type: ignore[attr-defined]
    return objective


def _sum_causal_cross_entropy(
    chunk_tokens: int, outputs: Any, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(outputs, CausalOutput):
        return token_cross_entropy(outputs, batch)
    hidden_BTD = outputs.hidden_BTD
    if outputs.vocabulary is not None:
        hidden_BTD = outputs.vocabulary.enter(hidden_BTD)
    hidden_ND = hidden_BTD.flatten(0, 1)
    targets_N = batch["targets"].flatten()
    loss_sum = _ChunkedCrossEntropy.apply(
        hidden_ND,
        outputs.head_VD,
        targets_N,
        get_block_sizes().loss_chunk_tokens or chunk_tokens,
        torch.is_grad_enabled(),
        outputs.vocabulary,
        outputs.free_head,
    )
    if outputs.balance is not None:
        loss_sum = outputs.balance.with_loss(loss_sum)
    return loss_sum, (targets_N != IGNORE_INDEX).sum()


@takes_classes
@_mark_objective_of_vocabulary_parts
def token_cross_entropy(
    outputs: Any, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy summed over targets that are not -100, for modules that return logits
    [..., vocab]."""
    if isinstance(outputs, ShardedVocabularyLogits):
        targets = batch["targets"].flatten()
        loss_sum = _VocabularyCrossEntropy.apply(
            outputs.logits.flatten(0, -2), targets, outputs.vocabulary
        )
        return loss_sum, (targets != IGNORE_INDEX).sum()
    if not isinstance(outputs, torch.Tensor) or outputs.ndim < 2:
        raise LayoutError(
            f"the model returned {_describe_outputs(outputs)}, which the built-in objective cannot"
            " read",
            fix="return logits [..., vocab] or CausalOutput, or set model.objective",
        )
    targets = batch["targets"].flatten()
    logits = _cast_to_float32_at_least(outputs.flatten(0, -2))
    loss_sum = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return loss_sum, (targets != IGNORE_INDEX).sum()


@takes_classes
def classification_cross_entropy(
    outputs: Any, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy summed over labels that are not -100, for modules that return logits
    [batch, classes].

    Labels are batch["labels"], or "targets" of a batch that calls them so.
    """
    if not isinstance(outputs, torch.Tensor) or outputs.ndim != 2:
        raise LayoutError(
            "classification needs logits [batch, classes]; the model returned"
            f" {_describe_outputs(outputs)}",
            fix="return them, or set model.objective",
        )
    name = "labels" if "labels" in batch else "targets"
    labels, logits = batch[name], _cast_to_float32_at_least(outputs)
    loss_sum = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return loss_sum, (labels != IGNORE_INDEX).sum()


def _cast_to_float32_at_least(logits: torch.Tensor) -> torch.Tensor:
    # float64 stays: a reference is computed in it.
    if logits.dtype == torch.float64:
        return logits
    return logits.float()


def _describe_outputs(outputs: Any) -> str:
    if isinstance(outputs, torch.Tensor):
        return f"a tensor {list(outputs.shape)}"
    return type(outputs).__name__


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes both gradients while each chunk's logits exist, so that no logits are kept or
    computed twice.

    Matmuls run in the hidden states' type; softmax, loss and the head's gradient accumulate in at
    least fp32.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden_ND: torch.Tensor,
        head_VD: torch.Tensor,
        targets_N: torch.Tensor,
        chunk: int,
        grad: bool,
        vocabulary: VocabularyShard | None,
        free_head: Callable[[], None] | None,
    ) -> torch.Tensor:
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        head = head_VD.to(hidden_ND.dtype)
        # float64, for it adds up the losses of any number of chunks.
        loss_sum = torch.zeros((), dtype=torch.float64, device=hidden_ND.device)
        grad_hidden, grad_head = None, None
        if grad:
            grad_hidden = torch.empty_like(hidden_ND)
        shape = min(chunk, hidden_ND.shape[0]), head.shape[0]
        # Every chunk has the same room: freed and taken anew, it would leave holes in a CPU's heap
        # (mesh.malloc).
        room_CV = make_uninitialized_like(shape, wide, hidden_ND)
        low_CV = room_CV
        if wide != hidden_ND.dtype:
            low_CV = make_uninitialized_like(shape, hidden_ND.dtype, hidden_ND)
        num_tokens = hidden_ND.shape[0]
        for start in range(0, num_tokens, chunk):
            rows = slice(start, start + chunk)
            hidden = hidden_ND[rows]
            logits, grad_logits = room_CV[: len(hidden)], low_CV[: len(hidden)]
            torch.mm(hidden, head.T, out=grad_logits)
            if low_CV is not room_CV:
                logits.copy_(grad_logits)
            loss_sum += _sum_loss_and_write_gradient(logits, targets_N[rows], vocabulary)
            if grad_hidden is not None:
                if low_CV is not room_CV:
                    grad_logits.copy_(logits)
                torch.mm(grad_logits, head, out=grad_hidden[rows])
                if free_head is not None and start + chunk >= num_tokens:
                    free_head()
                # Of one chunk it is where the head was. Wide, because it is added up over all.
                if grad_head is None:
                    grad_head = torch.zeros(head_VD.shape, dtype=wide, device=head_VD.device)
                _add_chunk_to_head_gradient(grad_head, grad_logits, hidden, room_CV)
        if grad:
            if grad_head is None:  # without tokens
                grad_head = head_VD.new_zeros(head_VD.shape, dtype=wide)
            ctx.save_for_backward(grad_hidden, grad_head)
            ctx.head_dtype = head_VD.dtype
        return loss_sum.to(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor) -> Any:  # type: ignore[override]
        grad_hidden, grad_head = ctx.saved_tensors
        # In place, for a graph is gone through once; run again (retain_graph), it would be scaled
        # twice.
        grad_hidden.mul_(grad_loss)
        grad_head.mul_(grad_loss)
        return grad_hidden, grad_head.to(ctx.head_dtype), None, None, None, None, None


def _add_chunk_to_head_gradient(
    grad_head_VD: torch.Tensor,
    grad_logits_CV: torch.Tensor,
    hidden_CD: torch.Tensor,
    room_CV: torch.Tensor,
) -> None:
    """Add a chunk's part of the head's gradient in place.

    In the compute type a product cannot be added to a wider sum as it is made: it exists, in as
    many parts of the vocabulary as `room_CV` can hold, where the chunk's logits were.
    """
    if grad_logits_CV.dtype == grad_head_VD.dtype:
        grad_head_VD.addmm_(grad_logits_CV.T, hidden_CD)
        return
    dim = hidden_CD.shape[1]
    room = room_CV.view(-1).view(hidden_CD.dtype)
    num_rows = room.numel() // dim
    # Hidden states are wider than all of a chunk's logits.
    if num_rows == 0:
        grad_head_VD += grad_logits_CV.T @ hidden_CD
        return
    for grad_VD, grad_CV in zip(
        grad_head_VD.split(num_rows), grad_logits_CV.split(num_rows, dim=1), strict=True
    ):
        product_VD = room[: grad_VD.numel()].view_as(grad_VD)
        torch.mm(grad_CV.T, hidden_CD, out=product_VD)
        grad_VD += product_VD


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits [N, this rank's rows of the vocabulary] of a module."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits_NV: torch.Tensor, targets_N: torch.Tensor, vocabulary: VocabularyShard
    ) -> torch.Tensor:
        wide = torch.promote_types(logits_NV.dtype, torch.float32)
        # A copy in any case: logits are the module's, and the loss is computed in place.
        grad_logits = logits_NV.to(wide, copy=True)
        loss_sum = _sum_loss_and_write_gradient(grad_logits, targets_N, vocabulary)
        ctx.save_for_backward(grad_logits)
        ctx.dtype = logits_NV.dtype
        return loss_sum.to(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor) -> Any:  # type: ignore[override]
        (grad_logits,) = ctx.saved_tensors
        return grad_logits.mul_(grad_loss).to(ctx.dtype), None, None


def _sum_loss_and_write_gradient(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, vocabulary: VocabularyShard | None
) -> torch.Tensor:
    """The loss summed over the targets, fp64; `logits_NV` becomes its gradient.

    With a vocabulary, logits are those of this rank's rows: the ranks agree on each row's maximum,
    and add up its exponentials and the logit of its target; logits themselves are never put
    together.
    """
    valid = targets_N != IGNORE_INDEX
    # Where there is no target any index will do: `valid` takes it out again.
    picked, is_here, peak = targets_N.where(valid, 0), valid, logits_NV.amax(dim=1)
    if vocabulary is not None:
        picked = picked - vocabulary.first_vocabulary_row
        is_here = valid & (picked >= 0) & (picked < logits_NV.shape[1])
        picked, peak = picked.where(is_here, 0), vocabulary.max_over_ranks(peak)
    # Without a vocabulary any other negative target is refused by gather.
    picked = picked[:, None]
    # In place from here on: another tensor of this size would double what a loss needs.
    logits_NV -= peak[:, None]
    at_target = logits_NV.gather(1, picked).squeeze(1)
    logits_NV.exp_()
    norm = logits_NV.sum(dim=1)
    if vocabulary is not None:
        norm, at_target = vocabulary.sum_over_ranks(
            torch.stack((norm, at_target.where(is_here, 0.0)))
        )
    loss_sum = torch.where(valid, norm.log() - at_target, 0.0).sum(dtype=torch.float64)
    # Now probabilities; minus one-hot they are the gradient.
    logits_NV /= norm[:, None]
    logits_NV.scatter_add_(1, picked, -is_here[:, None].to(logits_NV.dtype))
    logits_NV *= valid[:, None]
    return loss_sum
