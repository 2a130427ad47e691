"""What a traced module keeps from the forward to the backward: `ActivationCosts` from its trace."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from phalanx.job.costs import BlockBytes, FreedGradients, LossBytes, RankMicrobatch
from phalanx.job.shapes.block_activations import count_chunked_loss
from phalanx.job.shapes.traced import (
    BytesBySourceLayers,
    ModuleTrace,
    TracedPart,
    TracedProduct,
    TracePoint,
    find_trace_of_precision,
)

if TYPE_CHECKING:
    from phalanx.job.shapes.measured import MeasuredModule


@dataclass(frozen=True)
class TracedActivations:
    """The activations of the measured module `shape`, which has a trace."""

    shape: MeasuredModule
    _blocks: dict[tuple[object, ...], BlockBytes] = field(
        default_factory=dict, repr=False, compare=False
    )

    def block(self, layer: int, batch: RankMicrobatch) -> BlockBytes:
        trace = self._find_trace_for(batch)
        kind = self._get_block_kind(trace, layer)
        size = (batch.micro_batch_size, batch.seq_len, batch.cp, batch.tp, batch.sequence_parts)
        key = (trace.precision, kind, *size)
        if key not in self._blocks:
            self._blocks[key] = self._count_block(layer, batch)
        return self._blocks[key]

    def list_block_kinds(self, batch: RankMicrobatch) -> Sequence[Hashable]:
        trace = self._find_trace_for(batch)
        return [self._get_block_kind(trace, layer) for layer in range(self.shape.num_layers)]

    def _get_block_kind(self, trace: ModuleTrace, layer: int) -> tuple[Hashable, ...]:
        """What decides the bytes of a block: what it does at each point, and which of its layers
        tensor parallelism cut. Rules go by names, so that blocks that do the same may be cut
        otherwise."""
        does = tuple(point.blocks[layer] for point in trace.points)
        return (*does, self._layers_cut_by_block[layer])

    @cached_property
    def _layers_cut_by_block(self) -> tuple[frozenset[str], ...]:
        """The names within each block of its layers that are cut."""
        return tuple(
            frozenset(
                name.removeprefix(f"{block}.")
                for name in self.shape.column_cut
                if name.startswith(f"{block}.")
            )
            for block in self.shape.block_names
        )

    def _count_block(self, layer: int, batch: RankMicrobatch) -> BlockBytes:
        cut = _PartCut(self.shape, f"{self.shape.block_names[layer]}.", batch)

        def estimate(count: Callable[[TracedPart], int]) -> int:
            return self._estimate(lambda point: count(point.block(layer)), batch)

        return BlockBytes(
            saved=estimate(lambda part: cut.count_cut_bytes(part.saved))
            + estimate(lambda part: cut.count_gathered_bytes(part, is_kept=True)),
            entering=estimate(lambda part: part.entering) // batch.sequence_parts,
            products=estimate(lambda part: cut.count_cut_bytes(part.results)),
            products_in_both=estimate(lambda part: cut.count_cut_bytes(part.results_saved)),
            weight_inputs=estimate(cut.count_weight_input_bytes),
            passing=estimate(lambda part: part.passing) // batch.tp,
            gathered=estimate(lambda part: cut.count_gathered_bytes(part, is_kept=False)),
        )

    def count_bytes_in_every_stage(self, batch: RankMicrobatch) -> int:
        return self._estimate(lambda point: point.shared, batch)

    def count_embedding_bytes(self, batch: RankMicrobatch) -> int:
        cut = _PartCut(self.shape, "", batch)
        return self._estimate(lambda point: cut.count_cut_bytes(point.before.saved), batch)

    def count_final_norm_bytes(self, batch: RankMicrobatch) -> int:
        cut = _PartCut(self.shape, "", batch)
        return self._estimate(lambda point: cut.count_cut_bytes(point.after.saved), batch)

    def count_final_norm_passing_bytes(self, batch: RankMicrobatch) -> int:
        return 0  # the trace looks at blocks alone

    def count_block_mask_bytes(self, batch: RankMicrobatch) -> int:
        return 0

    def count_loss_bytes(self, batch: RankMicrobatch) -> LossBytes:
        """Bytes of the loss: arithmetic where the objective multiplies by the head, else as
        traced."""
        head = self._find_trace_for(batch).points[0].head
        if head is not None:
            rows, dim = head
            if self.shape.is_head_cut:
                rows = -(-rows // batch.tp)
            return count_chunked_loss(batch, rows, dim)
        cut = _PartCut(self.shape, "", batch)
        parts = 1
        if self.shape.is_head_cut:
            parts = batch.tp
        saved_bytes = self._estimate(lambda point: cut.count_cut_bytes(point.loss.saved), batch)
        passing = self._estimate(lambda point: point.loss.passing, batch) // parts
        return LossBytes(saved_bytes + passing, saved_bytes, passing)

    def count_message_bytes(self, batch: RankMicrobatch) -> int:
        if not self.shape.num_layers:
            return 0
        return self._estimate(lambda point: point.block(0).entering, batch) // batch.sequence_parts

    def fp8_params(self) -> int:
        linear = sum(holder.num_params for holder in self.shape.holders if holder.num_outputs)
        return min(linear, self.shape.blocks_params)

    def count_fp8_cast_bytes(self, tokens: int) -> int:
        most = 0
        for holder in self.shape.holders:
            if holder.kind == "linear":
                most = max(most, holder.num_inputs * (tokens + holder.num_outputs))
        return most

    def find_freed_gradients(self, ep: int) -> FreedGradients:
        table = matrix = 0
        for holder in self.shape.holders:
            size = holder.num_outputs * holder.num_inputs
            if holder.kind == "embedding":
                table = max(table, size)
            else:
                matrix = max(matrix, size)
        return FreedGradients(table, self.shape.block_params, matrix, matrix)

    def _find_trace_for(self, batch: RankMicrobatch) -> ModuleTrace:
        trace = find_trace_of_precision(self.shape.traces, batch.compute_bytes)
        assert trace is not None, "a module has activations only where it was traced"
        return trace

    def _estimate(self, count: Callable[[TracePoint], int], batch: RankMicrobatch) -> int:
        trace = self._find_trace_for(batch)
        # Attention of a part of a sequence meets the keys of all of it.
        length = batch.seq_len // batch.cp
        return trace.estimate(count, batch.micro_batch_size, length, batch.seq_len)


@dataclass(frozen=True)
class _PartCut:
    """The share of a part's bytes that tensor parallelism leaves on one rank; `prefix` makes names
    within the part to names within the model."""

    shape: MeasuredModule
    prefix: str
    batch: RankMicrobatch

    def is_cut(self, sources: Sequence[str]) -> bool:
        return any(f"{self.prefix}{source}" in self.shape.column_cut for source in sources)

    def count_cut_bytes(self, groups: Sequence[BytesBySourceLayers]) -> int:
        total = 0
        for group in groups:
            parts = self.batch.sequence_parts
            if self.is_cut(group.sources):
                parts = self.batch.tp
            total += group.num_bytes // parts
        return total

    def count_gathered_bytes(self, part: TracedPart, *, is_kept: bool) -> int:
        """Bytes that inputs of column-parallel layers have more than a part of the sequence:
        `is_kept`, of those that other products read, too, and that are kept from the forward; else
        of those that the backward gathers again."""
        if self.batch.sequence_parts == 1:
            return 0
        read_by_others = {
            product.input_id
            for product in part.products
            if f"{self.prefix}{product.holder}" not in self.shape.column_cut
        }
        total = 0
        for product in self._list_inputs_once(part):
            is_gathered = f"{self.prefix}{product.holder}" in self.shape.column_cut
            is_gathered &= not self.is_cut(product.is_input_cut_with)
            if is_gathered and (product.input_id in read_by_others) is is_kept:
                ungathered_bytes = product.input_bytes
                total += ungathered_bytes - ungathered_bytes // self.batch.sequence_parts
        return total

    def count_weight_input_bytes(self, part: TracedPart) -> int:
        """Bytes that weight gradients are computed from: inputs of products, each once, and the
        gradients of what they put out."""
        total = 0
        for product in self._list_inputs_once(part):
            is_cut = self.is_cut(product.is_input_cut_with)
            total += product.input_bytes // (self.batch.tp if is_cut else 1)
        for product in part.products:
            is_cut = f"{self.prefix}{product.holder}" in self.shape.column_cut
            total += product.output_bytes // (self.batch.tp if is_cut else 1)
        return total

    @staticmethod
    def _list_inputs_once(part: TracedPart) -> list[TracedProduct]:
        by_input: dict[int, TracedProduct] = {}
        for product in part.products:
            by_input.setdefault(product.input_id, product)
        return list(by_input.values())
