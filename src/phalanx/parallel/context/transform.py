"""cp: each rank has a part of every sequence's tokens; attention alone sees the others'.

Arithmetic. With w the weights and l_t the loss of target t, a step's gradient is G = sum over all t
of dl_t/dw, over N targets. A rank of cp sums over the targets of its own tokens, and attention's
backward brings it what the tokens of other ranks owe to its keys and values; so its gradient is
that of its own tokens' activations, and G is the sum over the ranks of dp_replicate x dp_shard x
cp. To data parallelism a rank of cp is one more with other data: DDP averages over all D of them,
FSDP and ZeRO split over dp_shard x cp and average over D, and `reduce_and_clip` multiplies the
mean by D x constant / N (see `Layout.gradient_reduction_layout`). Loss and targets are summed over
cp too (`Mesh.is_tp_leader`); no sum is a mean of means, whatever number of targets each rank has.
Samples are counted by data_parallel_rank, which ignores cp: its ranks read the same ones, and cut
them here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx.core.block_sizes import get_block_sizes
from phalanx.core.errors import LayoutError
from phalanx.mesh.attend_blocks import VisibleKeys, is_any_key_masked
from phalanx.mesh.logical import full_name
from phalanx.mesh.seams import find_modules_with_attention_core, has_attention_seam
from phalanx.parallel.context.attention import ATTENTION_FUNCTION_OF_CP_KIND
from phalanx.parallel.context.chunks import SequenceChunksOfRanks
from phalanx.parallel.context.group import ContextGroup
from phalanx.parallel.pipeline.staged import PipelineOfRank
from phalanx.parallel.protocol import ParallelContext, TransformOrder
from phalanx.plan.degree_checks import attention_not_replaceable_error
from phalanx.plan.plan import Plan

PER_TOKEN_BATCH_ENTRIES = ("inputs", "targets", "positions")
Mask = Callable[..., "torch.Tensor | None"]


class ContextParallel:
    order = TransformOrder.CONTEXT

    def is_needed(self, plan: Plan) -> bool:
        return plan.layout.cp > 1

    def apply(self, context: ParallelContext) -> None:
        """Puts another core into each attention, and another maker of masks into the model."""
        module, plan = context.root.module, context.plan
        cores = find_modules_with_attention_core(module)
        _require_replaceable_attention_cores(
            module, cores, is_stage=context.axes.find(PipelineOfRank) is not None
        )
        chunks = SequenceChunksOfRanks(plan.layout.cp, plan.parallel.cp_load_balance)
        group = ContextGroup(context.mesh.submesh("cp").get_group(), chunks, context.phases)
        covers_all = plan.parallel.cp_attention == "ulysses"
        masks = ContextParallelMaskBuilder(group, module.attention_mask, covers_all=covers_all)  # type: ignore[arg-type]
        sequences = ContextParallelRouterSequences(group)
        for part in module.modules():
            if hasattr(part, "sequences"):
                part.sequences = sequences  # type: ignore[assignment]
        for parent, core in cores:
            # The core keeps its window, and makes masks over all ranks' tokens.
            parent.core = ContextParallelAttentionCore(
                core.window, masks, plan.parallel.cp_attention
            )
        module.attention_mask = masks  # type: ignore[assignment]
        context.axes.add(ContextParallelBatchSplitter(group, sequences))
        context.traffic.count_axis_by_sender("cp", group)


def _require_replaceable_attention_cores(
    module: nn.Module, cores: list[tuple[nn.Module, Any]], *, is_stage: bool
) -> None:
    name = type(module).__name__
    if not has_attention_seam(module, is_stage=is_stage):
        raise attention_not_replaceable_error(name)
    for parent, core in cores:
        if not getattr(core, "causal", False) or not hasattr(core, "window"):
            raise LayoutError(
                f"parallel.cp needs causal attention, and that of {name} is not:"
                f" {type(parent).__name__}"
            )
    for raw_name, part in module.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p:
            raise LayoutError(
                f"parallel.cp cannot repeat the dropout of {full_name(raw_name)}, whose masks are"
                " of whole sequences",
                fix="set its probability to 0, or leave parallel.cp out",
            )


@dataclass
class ContextParallelMaskBuilder:
    """Makes masks in place of `attention_mask`: `num_tokens` are this rank's, `document_ids` [B,
    all tokens] are whole.

    Before and after are places in the sequence: positions begin again with each document. Where a
    mask would have more rows than a block of queries, the result is what attention makes masks of
    a block from.
    """

    group: ContextGroup
    make: Mask
    covers_all: bool
    """Of all tokens in the sequence's order; else of this rank's, and the keys of rank 0, rank
    1, ..."""

    def __call__(
        self,
        num_tokens: int,
        window: int,
        document_ids_BT: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor | VisibleKeys | None:
        total, size = num_tokens * self.group.size, self.group.size
        if document_ids_BT is not None and document_ids_BT.shape[1] != total:
            raise LayoutError(
                f"document_ids are of {document_ids_BT.shape[1]} tokens, and sequences have {total}"
            )
        if self.covers_all:
            full_mask = self.make(total, window, document_ids_BT, dtype, device)
        else:
            full_mask = None
        if full_mask is not None or not is_any_key_masked(total, window, document_ids_BT):
            return full_mask
        if self.covers_all or num_tokens > get_block_sizes().query_block:
            return VisibleKeys(document_ids_BT, window, is_causal=True)
        places = [
            self.group.chunks.positions_of_rank_tokens(rank, total, device) for rank in range(size)
        ]
        queries, keys = places[self.group.rank], torch.cat(places)
        back = queries[:, None] - keys[None, :]
        keep = (back >= 0)[None]
        if 0 < window < total:
            keep = keep & (back < window)
        if document_ids_BT is not None:
            keep = keep & (document_ids_BT[:, queries, None] == document_ids_BT[:, None, keys])
        return torch.zeros(keep.shape, dtype=dtype, device=device).masked_fill_(~keep, -torch.inf)[
            :, None
        ]


class ContextParallelAttentionCore(nn.Module):
    """Attention over all ranks' tokens; the interface is that of the core it stands for."""

    causal = True

    def __init__(self, window: int, masks: ContextParallelMaskBuilder, kind: str) -> None:
        super().__init__()
        self.window, self._masks, self._attend = window, masks, ATTENTION_FUNCTION_OF_CP_KIND[kind]

    def forward(
        self,
        q_BHTE: torch.Tensor,
        k_BKTE: torch.Tensor,
        v_BKTE: torch.Tensor,
        positions_BT: torch.Tensor | None,
        document_ids_BT: torch.Tensor | None = None,
        mask: torch.Tensor | VisibleKeys | None = None,
    ) -> torch.Tensor:
        if mask is None:
            mask = self._masks(
                q_BHTE.shape[2], self.window, document_ids_BT, q_BHTE.dtype, q_BHTE.device
            )
        elif isinstance(mask, torch.Tensor) and mask.dtype != q_BHTE.dtype:
            mask = mask.to(q_BHTE.dtype)
        return self._attend(q_BHTE, k_BKTE, v_BKTE, mask, self.window, self._masks.group)


@dataclass
class ContextParallelRouterSequences:
    """Facts that a router needs of the tokens that other ranks have; the interface is that of the
    seam.

    The first `padding` tokens of sequences are none of theirs: they take no expert's room.
    """

    group: ContextGroup
    padding: int = 0

    def total(self, counts_BE: torch.Tensor) -> torch.Tensor:
        return self.group.all_gather(counts_BE.contiguous()).sum(0)

    def length(self, num_tokens: int) -> int:
        return num_tokens * self.group.size - self.padding

    def earlier(self, chosen_BTE: torch.Tensor) -> torch.Tensor:
        chunks, rank = self.group.chunks, self.group.rank
        if self.padding:
            places = chunks.positions_of_rank_tokens(
                rank, chosen_BTE.shape[1] * self.group.size, chosen_BTE.device
            )
            chosen_BTE = chosen_BTE * (places >= self.padding)[:, None]
        rank_choices = chosen_BTE.unflatten(
            1, (chunks.chunks_per_rank, -1)
        )  # [B, chunks of a rank, tokens of a chunk, E]
        counts = self.group.all_gather(
            rank_choices.sum(2).contiguous()
        )  # [ranks, B, chunks of a rank, E]
        counts_of_chunk: dict[int, torch.Tensor] = {}
        for r in range(chunks.size):
            for at, chunk in enumerate(chunks.list_chunks_of_rank(r)):
                counts_of_chunk[chunk] = counts[r, :, at]
        # In the order of the sequence, where the sum of all chunks before one says what came before
        # it.
        in_order = torch.stack(
            [counts_of_chunk[chunk] for chunk in range(chunks.num_chunks)], dim=1
        )
        earlier = in_order.cumsum(1) - in_order
        before = torch.stack(
            [earlier[:, chunk] for chunk in chunks.list_chunks_of_rank(rank)], dim=1
        )
        return (rank_choices.cumsum(2) - rank_choices + before[:, :, None]).flatten(1, 2)


@dataclass(frozen=True)
class ContextParallelBatchSplitter:
    """The split of a batch for a model whose ranks have parts of sequences."""

    group: ContextGroup
    sequences: ContextParallelRouterSequences

    def keep_own_tokens_of_batch(
        self, batch: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """This rank's tokens of `batch` [B, T], with their positions in the sequence. document_ids
        stay whole: masks are of all of them.

        Raises LayoutError for a length that does not divide, and for what is none of these.
        """
        unsplit_keys = [
            key for key in batch if key not in (*PER_TOKEN_BATCH_ENTRIES, "document_ids")
        ]
        tokens = batch.get("inputs")
        if unsplit_keys or tokens is None or tokens.ndim != 2:
            raise LayoutError(
                "parallel.cp cuts sequences of tokens, and a batch has"
                f" {', '.join(unsplit_keys) or 'no such inputs'}",
                fix="leave parallel.cp out",
            )
        length = tokens.shape[1]
        places = self.group.chunks.positions_of_rank_tokens(self.group.rank, length, tokens.device)
        full_batch = {
            "positions": torch.arange(length, device=tokens.device).expand_as(tokens),
            **batch,
        }
        for key in full_batch.keys() & PER_TOKEN_BATCH_ENTRIES:
            full_batch[key] = full_batch[key].index_select(1, places)
        return full_batch

    @contextmanager
    def pad_batch_to_equal_chunks(
        self, batch: Mapping[str, torch.Tensor]
    ) -> Iterator[dict[str, torch.Tensor]]:
        """A batch of inputs alone of any length, with a document of its own before it, so that it
        divides.

        Inside, routers know of it.
        """
        tokens = batch["inputs"]
        # Padding comes first: the last token, whose output is wanted, stays the last one.
        before = -tokens.shape[1] % self.group.chunks.num_chunks
        places = torch.arange(-before, tokens.shape[1], device=tokens.device).expand(
            tokens.shape[0], -1
        )
        self.sequences.padding = before
        try:
            yield {
                "inputs": nn.functional.pad(tokens, (before, 0)),
                "positions": places.clamp(min=0),
                "document_ids": (places >= 0).long(),
            }
        finally:
            self.sequences.padding = 0


parallelism = ContextParallel()
