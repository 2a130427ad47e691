"""`MeasuredModule`: what planning knows of a module that was built, counted and traced, a user's
own or one of Hugging Face."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from functools import cached_property
from typing import Any, Self

from phalanx.job.costs import AttentionHeads, DocumentIds, Flops, ModelFlops, PartParams
from phalanx.job.module_names import is_module_inside, matches_module
from phalanx.job.param_holder import ParamHolder
from phalanx.job.shapes.stored_keys import complete_stored_keys
from phalanx.job.shapes.traced import (
    ModuleTrace,
    count_part_flops,
    find_trace_of_precision,
    format_traces_json,
    parse_traces,
)
from phalanx.job.shapes.traced_activations import TracedActivations
from phalanx.job.shapes.traced_work import build_module_work
from phalanx.job.shapes.vit import count_patches
from phalanx.job.work import ModelWork

_COUNTED_TRAINED_SHARE = 0.99
"""Of the parameters: with fewer trained ones training takes less than three forwards."""


@dataclass(frozen=True)
class MeasuredModule:
    """Facts of a module that can be counted without knowing what it computes."""

    kind: str
    num_layers: int
    """0: it shows no blocks."""
    num_params: int
    num_trainable_params: int
    block_params: int
    """Parameters of the largest block, or of the whole module if it shows no blocks."""
    blocks_params: int
    """Parameters of all blocks together."""

    _: KW_ONLY
    vocab_size: int = 0
    max_positions: int = 0
    image_size: int = 0
    patch_size: int = 0
    num_channels: int = 0
    num_classes: int = 0
    num_batchnorms: int = 0
    num_dropouts: int = 0
    """Layers with a probability above 0."""
    num_narrow_params: int = 0
    """Trained parameters of fewer than 32 bits, as its function returns them."""
    num_idle_layers: int = 0
    """Dropout and BatchNorm layers that its function returns in evaluation mode, as training leaves
    them."""
    takes_document_ids: DocumentIds = "by name"
    """How its forward does: only one that names them may keep documents apart."""
    module_names: tuple[str, ...] = ()
    """The names of all its modules, the first being itself ("")."""
    holders: tuple[ParamHolder, ...] = ()
    shard_rules: tuple[tuple[str, str], ...] = ()
    """What it brings for tensor parallelism: (pattern, rule)."""
    blocks: tuple[tuple[str, int], ...] = ()
    """(name, parameters) of each block, in order."""
    last_stage: tuple[str, ...] = ()
    """What it says that a pipeline's last stage holds, too: names of its parts."""
    has_attention_seam: bool = True
    """Whether its attention can be swapped for one that asks other ranks."""
    traces: tuple[ModuleTrace, ...] = ()
    """What it does in a microbatch, in each precision that was asked for; none where it could not
    be traced."""
    why_untraced: str = ""
    is_built_whole: bool = False
    """A large module, whose building could not be recorded: each rank has all of it for a while
    when a run starts."""
    has_own_samples: bool = False
    """It was traced with samples of a user's own: one counts as many tokens as most of its products
    have rows."""
    column_cut: frozenset[str] = frozenset()
    """The layers of which tensor parallelism has left a part of the outputs."""

    # What only the built module says: the protocol's None

    has_proven_rules = False
    has_token_table = False
    may_have_routers = True
    experts = None
    is_per_token_outside_regions = None
    why_samples_stay_whole = ""

    # What computing takes, where it was traced

    @cached_property
    def activations(self) -> TracedActivations | None:
        if not self.traces:
            return None
        return TracedActivations(self)

    @property
    def is_head_cut(self) -> bool:
        """True if tensor parallelism has cut the layer that makes the logits."""
        outside = (name for name in self.column_cut if not is_module_inside(name, self.block_names))
        return any(self._find_holder_kind(name) == "linear" for name in outside)

    def _find_holder_kind(self, name: str) -> str:
        for holder in self.holders:
            if holder.name == name:
                return holder.kind
        return ""

    def list_wide_products(self, compute_bytes: int) -> tuple[str, ...]:
        """The layers of blocks whose products stay in fp32 where the rest computes in 16 bits, as
        traced: torch's product of groups of rows takes no part in autocast."""
        trace = find_trace_of_precision(self.traces, compute_bytes)
        if trace is None or trace.precision == "fp32":
            return ()
        names = [
            product.holder
            for kind in trace.points[0].kinds
            for product in kind.products
            if product.output_bytes >= 4 * product.rows * product.outputs
        ]
        return tuple(dict.fromkeys(names))

    @property
    def heads(self) -> AttentionHeads | None:
        """The heads of its fused attention; None where attention is written out, or cut."""
        if not self.traces or self.column_cut or not self.num_layers:
            return None
        calls = self.traces[0].points[0].block(0).attention
        if not calls:
            return None
        queries, keys, size = calls[0][:3]
        # Some modules repeat keys for every head of queries before the kernel sees them.
        return AttentionHeads(queries, keys, size)

    def flops(self, seq_len: int) -> ModelFlops | None:
        """FLOPs of each part for one sample, as traced; None where it could not be."""
        if not self.traces:
            return None
        trace = self.traces[0]
        head = trace.points[0].head
        blocks = [self._count_block_flops(layer, seq_len) for layer in range(self.num_layers)]
        before = count_part_flops(trace, lambda point: point.before, seq_len)
        after = count_part_flops(trace, lambda point: point.after, seq_len)
        if head is not None:
            after = Flops(after.matmul + 2 * head[0] * head[1] * seq_len, after.attention)
        return ModelFlops(before, tuple(blocks), after, head_is_done_at_once=head is not None)

    def _count_block_flops(self, layer: int, seq_len: int) -> Flops:
        return count_part_flops(self.traces[0], lambda point: point.block(layer), seq_len)

    def flops_per_token(self, seq_len: int) -> dict[str, int] | None:
        flops = self.flops(seq_len)
        # A frozen weight needs no gradient of its own, nor, before the first trained one, of its
        # inputs: how much of three forwards this leaves is not known.
        if flops is None or self.trained_share < _COUNTED_TRAINED_SHARE:
            return None
        parts, tokens = (
            (flops.embedding, *flops.blocks, flops.head),
            self.count_sample_tokens(seq_len),
        )
        matmul = round(sum(part.matmul for part in parts) / tokens)
        attention = round(sum(part.attention for part in parts) / tokens)
        return {
            "matmul": matmul,
            "attention": attention,
            "training": 3 * (matmul + attention),
        }

    def work(self, seq_len: int) -> ModelWork | None:
        """The work of one sample, as traced; None where it could not be, or shows no blocks."""
        if not self.traces or not self.num_layers:
            return None
        return build_module_work(self, seq_len)

    def list_stored_tensors(self) -> None:
        return None

    # What a sample is

    @property
    def reads_images(self) -> bool:
        return self.image_size > 0

    def get_sample_noun(self, *, of_own_data: bool) -> str:
        if self.reads_images:
            return "images"
        if of_own_data or self.has_own_samples:
            return "samples"
        return "sequences"

    @property
    def longest_sequence(self) -> int:
        if self.reads_images:
            return 0
        return self.max_positions

    def count_sample_tokens(self, seq_len: int) -> int:
        """Tokens of one sample: the job's sequence length, or an image's patches and class token;
        of samples of a user's own the rows of most products."""
        if self.has_own_samples:
            return self._num_rows_of_sample
        if not self.reads_images:
            return seq_len
        return count_patches(self.image_size, self.patch_size) + 1

    @cached_property
    def _num_rows_of_sample(self) -> int:
        point = self.traces[0].points[0]
        flops_by_rows: dict[int, int] = defaultdict(int)
        for part in (point.before, *map(point.block, range(self.num_layers)), point.after):
            for product in part.products:
                rows = max(1, product.rows // point.batch)
                flops_by_rows[rows] += product.rows * product.inputs * product.outputs
        return max(flops_by_rows, key=lambda rows: flops_by_rows[rows], default=1)

    def count_targets(self, num_tokens: int) -> int:
        if self.reads_images:
            return 1
        return num_tokens

    def choose_vocab_size(self, data_size: int | None) -> int:
        return data_size or 0

    # Parameters

    @cached_property
    def num_active_params(self) -> int:
        """Of experts those that a token visited as traced; all parameters where nothing was."""
        work = None
        if self.traces:
            work = self.work(self.traces[0].points[0].length)
        if work is None:
            return self.num_params
        idle = 0
        for block in work.blocks:
            if block.num_experts > block.experts_per_token > 0:
                num_idle = block.num_experts - block.experts_per_token
                idle += block.num_routed_params * num_idle // block.num_experts
        return self.num_params - idle

    @property
    def trained_share(self) -> float:
        """Frozen parameters have no gradient and no optimizer state."""
        return self.num_trainable_params / max(1, self.num_params)

    def count_largest_block_params(self, ep: int = 1) -> int:
        return self.block_params

    def count_all_blocks_params(self, ep: int = 1) -> int:
        return self.blocks_params

    def params_by_group(self) -> dict[str, int]:
        return {"blocks": self.blocks_params, "other": self.num_params - self.blocks_params}

    @property
    def block_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.blocks)

    def count_part_params(
        self, first_stage: Sequence[str] = (), last_stage: Sequence[str] = (), ep: int = 1
    ) -> PartParams:
        """Parameters of its parts: what is registered before the first block is before, and what
        `first_stage` names."""
        before: list[ParamHolder] = []
        after: list[ParamHolder] = []
        has_met_a_block, last_parts = False, (*last_stage, *self.last_stage)
        for holder in self.holders:
            if is_module_inside(holder.name, self.block_names):
                has_met_a_block = True
                continue
            # Two ifs, no elif: what both stages name is on both.
            if not has_met_a_block or matches_module(holder.name, first_stage):
                before.append(holder)
            if has_met_a_block or matches_module(holder.name, last_parts):
                after.append(holder)
        shared = [holder for holder in before if holder in after]
        return PartParams(
            _count_params(before),
            tuple(size for _, size in self.blocks),
            _count_params(after),
            looked_up=_count_params([holder for holder in before if holder.kind == "embedding"]),
            both=_count_params(shared) + _count_tied_elements(after),
        )

    def shard(self, tp: int, cut: Callable[[ParamHolder], ParamHolder]) -> Self:
        """The part that one rank holds, where `cut` says it of each module."""
        holders = tuple(cut(holder) for holder in self.holders)
        saved: dict[str, int] = defaultdict(int)  # by module, of all that is inside
        for unsharded, sharded in zip(self.holders, holders, strict=True):
            parts = unsharded.name.split(".")
            # From 0 parts on: "" is the module itself.
            for count in range(len(parts) + 1):
                saved[".".join(parts[:count])] += unsharded.num_params - sharded.num_params
        blocks = tuple((block, size - saved[block]) for block, size in self.blocks)
        column_cut = set()
        for unsharded, sharded in zip(self.holders, holders, strict=True):
            # A table of a part of the vocabulary puts out whole rows.
            if sharded.num_outputs < unsharded.num_outputs and unsharded.kind != "embedding":
                column_cut.add(unsharded.name)
        num_params, sizes = self.num_params - saved[""], [size for _, size in blocks]
        return replace(
            self,
            num_params=num_params,
            # As much of a rank's part is frozen as of the whole.
            num_trainable_params=round(self.trained_share * num_params),
            block_params=max(sizes, default=num_params),
            blocks_params=sum(sizes),
            holders=holders,
            blocks=blocks,
            column_cut=frozenset(column_cut),
        )

    def to_json(self) -> dict[str, Any]:
        return complete_stored_keys(self) | {"measured": self._build_stored_counts()}

    def _build_stored_counts(self) -> dict[str, Any]:
        return {
            "num_params": self.num_params,
            "num_trainable_params": self.num_trainable_params,
            "block_params": self.block_params,
            "blocks_params": self.blocks_params,
            "num_batchnorms": self.num_batchnorms,
            "num_dropouts": self.num_dropouts,
            "num_narrow_params": self.num_narrow_params,
            "num_idle_layers": self.num_idle_layers,
            "takes_document_ids": self.takes_document_ids,
            "names": list(self.module_names),
            "holders": [asdict(holder) for holder in self.holders],
            "shard_rules": [list(rule) for rule in self.shard_rules],
            "blocks": [list(block) for block in self.blocks],
            "last_stage": list(self.last_stage),
            "has_attention_seam": self.has_attention_seam,
            "traces": format_traces_json(self.traces),
            "why_untraced": self.why_untraced,
            "is_built_whole": self.is_built_whole,
            "has_own_samples": self.has_own_samples,
        }


def load_stored_counts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a MeasuredModule from what is stored of it under "measured"."""
    rest = {key: value for key, value in values.items() if key != "names"}
    return rest | {
        "module_names": tuple(values.get("names", ())),
        "holders": tuple(ParamHolder(**holder) for holder in values.get("holders", ())),
        "shard_rules": tuple((pattern, text) for pattern, text in values.get("shard_rules", ())),
        "blocks": tuple((name, size) for name, size in values.get("blocks", ())),
        "last_stage": tuple(values.get("last_stage", ())),
        "traces": parse_traces(values.get("traces", ())),
    }


def _count_params(holders: Collection[ParamHolder]) -> int:
    return sum(map(_count_elements, holders))


def _count_elements(holder: ParamHolder) -> int:
    """Elements of a module's parameters. A tied weight counts where it is met first, and another
    rank has it, too."""
    return max(holder.num_params, holder.num_outputs * holder.num_inputs)


def _count_tied_elements(holders: Collection[ParamHolder]) -> int:
    return sum(_count_elements(holder) - holder.num_params for holder in holders)
