"""What planning asks of a model: the protocol `ModelCosts`, and the nouns of its answers.

The planner asks and never inspects: a shape that can answer more (activations of a measured module,
say) is planned better without an edit in `plan`. What a shape cannot say (`activations`, `flops`,
`heads`, `experts`) is None. Formulae lie with the shape that they are of, and need of a microbatch
only what the protocol `Microbatch` names. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from phalanx.job.param_holder import ParamHolder
from phalanx.job.work import ModelWork

DocumentIds = Literal["by name", "as any keyword", "no"]


@dataclass(frozen=True)
class Flops:
    """FLOPs of one forward: products with weights, and attention between tokens."""

    matmul: int
    attention: int = 0

    @property
    def forward(self) -> int:
        return self.matmul + self.attention

    @property
    def training(self) -> int:
        """FLOPs of forward and backward: two gradients for each product of the forward."""
        # d(xW) is one product for the input and one for the weights, each as large as xW.
        return 3 * self.forward


@dataclass(frozen=True)
class ModelFlops:
    """Forward FLOPs of one sample in each part of a model."""

    embedding: Flops
    blocks: tuple[Flops, ...]
    head: Flops
    head_is_done_at_once: bool = False
    """The loss of tokens makes both gradients of the head while it has the logits, in the
    forward."""


@dataclass(frozen=True)
class PartParams:
    """Parameters of a model before, in and after its blocks.

    `looked_up`: those of `before` that are rows of a table. `both`: how many of `after` are the
    same as some of `before`, which a rank with both has once.
    """

    before: int
    blocks: tuple[int, ...]
    after: int
    looked_up: int = 0
    both: int = 0


@dataclass(frozen=True)
class AttentionHeads:
    """The heads of a model's attention that one rank has, of queries and of keys and values; `size`
    features each."""

    queries: int
    keys: int
    size: int


@dataclass(frozen=True)
class ExpertCosts:
    """The experts of a model that tokens choose, in the blocks of `layers`."""

    count: int
    """Experts of one block."""
    per_token: int
    """Experts that a token visits, without shared ones."""
    layers: range
    width: int
    """Features inside of one expert."""
    dim: int
    """Features of a row that travels to an expert, and of one that comes back."""
    params: int
    """Parameters of one expert."""
    params_of_block: int
    """Parameters of all experts of one block, shared ones among them, without the router."""

    def count_chosen_params(self, first_block: int = 0, end: int | None = None) -> int:
        """Parameters of the experts in the blocks from `first_block` to before `end`."""
        last = self.layers.stop
        if end is not None:
            last = end
        # The first blocks may have no experts, so a range of blocks counts from where they begin.
        return max(0, last - max(first_block, self.layers.start)) * self.count * self.params


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of one block for one microbatch, by what they are needed for."""

    saved: int
    """What autograd saves from the forward to the backward."""
    entering: int
    """The block's input: all that full recomputation saves."""
    products: int
    """Results of matrix products and attention: what selective recomputation saves beside the
    input."""
    products_in_both: int
    """The part of `products` that autograd saves without recomputation, too: what is recomputed
    selectively is `saved` without it."""
    weight_inputs: int
    """What weight gradients are computed from, where these wait for the rest of the backward
    (zero-bubble schedules)."""
    passing: int = 0
    """What is alive at the worst moment of the block's backward beside what is saved: gradients on
    their way."""
    feed_forward: int = 0
    """The part of `saved` that is gone when the backward comes to the attention."""
    gathered: int = 0
    """With sequence parallelism, what inputs of column-parallel layers have more than the parts of
    them that count in `saved`: the backward gathers them again. Compiled blocks and those that are
    recomputed keep them, as long as they keep anything."""


@dataclass(frozen=True)
class LossBytes:
    """Bytes of one microbatch's loss: `at_once` where its backward follows. In a pipeline it does
    not: `waiting` lie there until then, and `computing` beside these while it is computed."""

    at_once: int
    waiting: int
    computing: int
    head_gradient: int = 0
    """The part of `waiting` that is the gradient of the head's weight, in fp32: it is there until
    the end of the backward."""


@dataclass(frozen=True)
class FreedGradients:
    """Gradients that are made anew and freed in every microbatch: parameters of the embedding's
    table, of the largest block, and of its largest matrix.

    `first`: those of what a block's backward comes to first, the last matrix of its feed-forward;
    of experts a rank's.
    """

    table: int
    block: int
    matrix: int
    first: int = 0


class RankMicrobatch(Protocol):
    """The part of a microbatch that one rank works on: activations depend on it."""

    @property
    def micro_batch_size(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def compute_bytes(self) -> int:
        """Bytes of one element: 4 in fp32, 2 in bf16."""

    @property
    def cast_bytes(self) -> int:
        """Bytes of an element's copy in the compute type; 0 in fp32, where there is none."""

    @property
    def sequence_parts(self) -> int: ...
    @property
    def tp(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def cp_attention(self) -> str: ...
    @property
    def document_masks(self) -> bool: ...
    @property
    def loss_chunk_tokens(self) -> int: ...


class ActivationCosts(Protocol):
    """Bytes that one rank has of one microbatch besides states."""

    def block(self, layer: int, batch: RankMicrobatch) -> BlockBytes:
        """Bytes of the block `layer` for one microbatch."""

    def list_block_kinds(self, batch: RankMicrobatch) -> Sequence[Hashable]:
        """The kind of each block: `block` says the same of all blocks of one kind."""

    def count_bytes_in_every_stage(self, batch: RankMicrobatch) -> int:
        """Bytes that every stage of a pipeline makes for itself: masks that its blocks share, and
        tables of angles."""

    def count_embedding_bytes(self, batch: RankMicrobatch) -> int:
        """Bytes that the part before the blocks saves."""

    def count_final_norm_bytes(self, batch: RankMicrobatch) -> int:
        """Bytes that the norm before the head saves."""

    def count_final_norm_passing_bytes(self, batch: RankMicrobatch) -> int:
        """Bytes, in the backward of the norm before the head, beside what the parts before it
        save; 0 where that is never the worst moment, or nobody knows."""

    def count_block_mask_bytes(self, batch: RankMicrobatch) -> int:
        """Bytes, at the worst moment, of masks that are made for a block of queries at a time."""

    def count_loss_bytes(self, batch: RankMicrobatch) -> LossBytes: ...

    def count_message_bytes(self, batch: RankMicrobatch) -> int:
        """Bytes of what goes from one block to the next: a message between stages."""

    def count_fp8_cast_bytes(self, tokens: int) -> int:
        """Bytes of what one product casts to fp8, of the largest: what goes in, and the matrix."""

    def fp8_params(self) -> int:
        """Parameters of the layers that multiply in fp8."""

    def find_freed_gradients(self, ep: int) -> FreedGradients: ...


class ModelCosts(Hashable, Protocol):
    """A model as planning knows it; of tp, what `shard` returns: the part that one rank holds."""

    # What it is

    @property
    def kind(self) -> str: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_batchnorms(self) -> int: ...
    @property
    def num_dropouts(self) -> int:
        """Layers with a probability above 0."""

    @property
    def num_narrow_params(self) -> int:
        """Trained parameters of fewer than 32 bits."""

    @property
    def num_idle_layers(self) -> int:
        """Dropout and BatchNorm layers that train in evaluation mode."""

    # What a sample is

    @property
    def image_size(self) -> int: ...
    @property
    def num_channels(self) -> int: ...
    @property
    def num_classes(self) -> int: ...
    @property
    def reads_images(self) -> bool:
        """True for images in, one label each; False for tokens in, the next token of each."""

    def get_sample_noun(self, *, of_own_data: bool) -> str:
        """Its samples in words: "sequences", "images"; "samples" where only a user's own dataset
        says what they are."""

    @property
    def longest_sequence(self) -> int:
        """Tokens that a sample may have; 0: as many as one likes."""

    @property
    def takes_document_ids(self) -> DocumentIds:
        """The way in which its forward takes them: only one that names them may keep documents
        apart."""

    @property
    def vocab_size(self) -> int: ...
    def choose_vocab_size(self, data_size: int | None) -> int:
        """The vocabulary of a run on data of `data_size` tokens; 0 where there is none."""

    def count_sample_tokens(self, seq_len: int) -> int:
        """Tokens of one sample: the job's sequence length, or what an image is cut into."""

    def count_targets(self, num_tokens: int) -> int:
        """Targets of `num_tokens` of one sample: the next token of each, or one label."""

    # Parameters

    @property
    def num_params(self) -> int: ...
    @property
    def num_active_params(self) -> int:
        """Parameters that take part in one token: of the experts, only the ones it visits."""

    @property
    def trained_share(self) -> float:
        """The part of the parameters, 0 to 1, that is not frozen."""

    @property
    def blocks_params(self) -> int: ...
    def count_largest_block_params(self, ep: int = 1) -> int:
        """Parameters of the largest block; of experts those that one rank of `ep` has."""

    def count_all_blocks_params(self, ep: int = 1) -> int:
        """Parameters of all blocks together, counted likewise."""

    def params_by_group(self) -> dict[str, int]:
        """Parameters of the whole model by what they do."""

    def count_part_params(
        self, first_stage: Sequence[str] = (), last_stage: Sequence[str] = (), ep: int = 1
    ) -> PartParams:
        """Parameters before, in and after the blocks, where the job's `first_stage` and
        `last_stage` name parts."""

    # What can be cut, and how

    @property
    def experts(self) -> ExpertCosts | None: ...
    @property
    def may_have_routers(self) -> bool:
        """True if there may be routers that send tokens to experts."""

    @property
    def heads(self) -> AttentionHeads | None:
        """The heads, which tp and ulysses divide; None where only sharding rules say."""

    @property
    def is_per_token_outside_regions(self) -> bool | None:
        """True if ranks of tp can do with a part of the sequence between what is cut; None where
        only the built module says."""

    @property
    def why_samples_stay_whole(self) -> str:
        """Why cp cannot cut a sample; "" if it can."""

    @property
    def has_attention_seam(self) -> bool:
        """True if its attention can be swapped for one that asks other ranks."""

    @property
    def shard_rules(self) -> tuple[tuple[str, str], ...]:
        """(pattern, rule) of what the model brings for tensor parallelism."""

    @property
    def has_proven_rules(self) -> bool:
        """True if tests hold `shard_rules`: only what a job puts in their place needs a check."""

    @property
    def module_names(self) -> tuple[str, ...]:
        """The names of all modules, the first being the model itself ("")."""

    @property
    def holders(self) -> tuple[ParamHolder, ...]:
        """The modules that hold parameters themselves."""

    @property
    def block_names(self) -> tuple[str, ...]: ...

    def shard(self, tp: int, cut: Callable[[ParamHolder], ParamHolder]) -> ModelCosts:
        """The part of the model that one rank of `tp` holds; `cut` says what sharding rules leave
        of a module's parameters."""

    # What computing costs

    def flops(self, seq_len: int) -> ModelFlops | None:
        """FLOPs of each part; None where nobody knows how often a parameter is used."""

    def flops_per_token(self, seq_len: int) -> dict[str, int] | None:
        """FLOPs for one token, the average over a sample: forward `matmul` and `attention`;
        `training`: 3x both. None where nobody knows them, or weights are frozen."""

    def work(self, seq_len: int) -> ModelWork | None:
        """The work of one sample, by block and product; None where only a trace says."""

    @property
    def activations(self) -> ActivationCosts | None: ...

    # What is stored

    @property
    def has_token_table(self) -> bool:
        """True if ids are looked up in a table of `vocab_size` rows."""

    def list_stored_tensors(self) -> dict[str, tuple[int, ...]] | None:
        """Names and shapes of the tensors that a checkpoint holds; None where only the built module
        says."""

    def to_json(self) -> dict[str, Any]: ...
