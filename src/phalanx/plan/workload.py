"""What one rank does in a step, and with which part of the model: what memory is counted for.

Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache

from phalanx.core.errors import LayoutError
from phalanx.core.registry import read_module_constant
from phalanx.core.units import format_count
from phalanx.job.costs import ModelCosts
from phalanx.job.model import find_model_kind
from phalanx.job.param_holder import ParamHolder
from phalanx.job.schema import Job, Parallel
from phalanx.job.user_dataset import is_given_unknown_samples
from phalanx.plan.leaf_tree import LAYOUT_FREE, LeafTree
from phalanx.plan.rule_checks import combine_and_check_rules
from phalanx.plan.rules import CUTTING_KINDS, ShardingRule, find_matching_rule
from phalanx.plan.segments import Segment

HOOKS_PACKAGE = "phalanx.parallel.hooks"
MODELS_PACKAGE = "phalanx.nn.models"


@dataclass(frozen=True)
class Workload:
    """The work of one rank in one microbatch."""

    micro_batch_size: int
    seq_len: int  # of an image: its patches (and class token)
    precision: str  # "fp32" | "bf16" | "fp16" | "fp8"
    recompute: str  # a mode of train.recompute; segments say what it means for the model's blocks
    loss_chunk_tokens: int
    num_microbatches: int = 1
    document_masks: bool = False
    optimizer_bytes: int = 8  # per parameter
    copies_state: bool = False  # saves are written from a copy while training goes on
    tp: int = 1
    rules: tuple[ShardingRule, ...] = ()  # by which tp cuts a user's own module
    # With tp: what lies between the cut matrices is cut along the sequence.
    cuts_sequence: bool = False
    compress: str = "none"  # how gradients travel (parallel.compress)
    # Blocks that are recomputed; None: as `recompute` says of each.
    segments: tuple[Segment, ...] | None = None
    offloads_activations: bool = False  # what autograd keeps goes to host memory
    # Not hashed: its rules are a dict, and caches look a workload up.
    options: Parallel = field(default_factory=Parallel, hash=False)
    cp: int = 1  # ranks that each have a part of every sequence
    cp_attention: str = "ring"
    is_compiled: bool = False
    ep: int = 1  # ranks that each have a part of every block's experts
    # With train.deterministic = "layout-free" the most sets of gradients at one time; else 0.
    gradient_copies: int = 0
    # Gathered embedding and head are freed as soon as the loss has read them.
    frees_head: bool = False

    @property
    def sequence_parts(self) -> int:
        """Into how many parts the sequence is cut between the cut matrices."""
        return self.tp if self.cuts_sequence else 1

    @cached_property
    def segments_by_start(self) -> dict[int, Segment]:
        """The segments of `segments` by their first block."""
        return {segment.start: segment for segment in self.segments or ()}

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on this rank."""
        return self.micro_batch_size * self.seq_len // self.cp

    @property
    def compute_bytes(self) -> int:
        """Bytes of one element of activations. In fp8 they are kept in bf16, and cast anew for each
        product."""
        return 4 if self.precision == "fp32" else 2

    @property
    def cast_bytes(self) -> int:
        """Bytes of an element's copy in the compute type; 0 in fp32, where there is none."""
        if self.precision == "fp32":
            return 0
        return self.compute_bytes

    @property
    def error_feedback_bytes(self) -> int:
        """Bytes per parameter that compression has not sent yet. Each rank has its own."""
        if has_error_feedback(self.compress):
            return 4
        return 0


@cache
def has_error_feedback(compress: str) -> bool:
    """True for a compression that keeps what it has not sent in a step, as its file says."""
    return compress != "none" and bool(
        read_module_constant(compress, HOOKS_PACKAGE, "KEEPS_ERROR", False)
    )


def require_trained_parameters(shape: ModelCosts) -> None:
    """Raises LayoutError for a model that has nothing to train, which every rank would refuse."""
    if shape.trained_share > 0:
        return
    if not shape.num_params:
        raise LayoutError(f"model {shape.kind!r} has no parameters, so there is nothing to train")
    raise LayoutError(
        f"model {shape.kind!r} has nothing to train: its {format_count(shape.num_params)}"
        " parameters are all frozen",
        fix="leave requires_grad on for those that should be trained",
    )


def build_workload(
    job: Job,
    shape: ModelCosts,
    *,
    micro_batch_size: int,
    num_microbatches: int,
    tp: int,
    cp: int = 1,
    ep: int = 1,
) -> Workload:
    """The workload of one rank of a job, without the blocks that are recomputed (see
    `plan.recompute`)."""
    return Workload(
        micro_batch_size,
        _get_sample_tokens(job, shape),
        job.precision.compute,
        job.train.recompute,
        job.train.loss_chunk_tokens,
        num_microbatches,
        document_masks=job.data.document_masks,
        optimizer_bytes=_optimizer_bytes_per_param(job),
        copies_state=_needs_staging_copy(job),
        tp=tp,
        rules=combine_and_check_rules(job.parallel.rules, shape, tp),
        cuts_sequence=cuts_sequence(job, shape),
        compress=job.parallel.compress,
        offloads_activations=job.train.offload_activations,
        options=job.parallel,
        cp=cp,
        cp_attention=job.parallel.cp_attention,
        ep=ep,
        is_compiled=job.train.compile,
        gradient_copies=_count_gradient_copies(job, num_microbatches),
        frees_head=_frees_head(job),
    )


def _count_gradient_copies(job: Job, num_microbatches: int) -> int:
    if job.train.deterministic != LAYOUT_FREE:
        return 0
    return LeafTree.of_job(job).count_gradient_copies(num_microbatches)


def _frees_head(job: Job) -> bool:
    """True if nothing outside of blocks is read in the backward but norms: as the model's file
    says, of the built-in objective."""
    if job.model.is_foreign or job.model.objective is not None:
        return False
    return _is_read_in_forward_only(find_model_kind(job.model))


@cache
def _is_read_in_forward_only(kind: str) -> bool:
    return bool(read_module_constant(kind, MODELS_PACKAGE, "READ_IN_FORWARD_ONLY", ()))


def _get_sample_tokens(job: Job, shape: ModelCosts) -> int:
    """Tokens of one sample. A sample of a user's own dataset for a user's own module counts as one
    where it was not traced: their number is unknown."""
    if is_given_unknown_samples(job) and not getattr(shape, "has_own_samples", False):
        return 1
    return shape.count_sample_tokens(job.data.seq_len)


def _optimizer_bytes_per_param(job: Job) -> int:
    """Bytes of optimizer state per parameter: two fp32 moments of AdamW, one of SGD with momentum.
    An own optimizer counts as AdamW."""
    if job.optim.kind == "sgd":
        return 4 if job.optim.momentum else 0
    return 8


def _needs_staging_copy(job: Job) -> bool:
    """True if anything is saved on the way: the saves at the end and at a stop are waited for,
    and need no copy."""
    return job.checkpoint.asynchronous and (job.checkpoint.has_interval or job.eval.keep_best)


def cuts_sequence(job: Job, shape: ModelCosts) -> bool:
    """True if tp cuts the sequence between the cut matrices. Of a user's own module only what the
    job says counts: the module is not asked here."""
    requested = job.parallel.sequence_parallel
    if requested is None:
        return bool(shape.is_per_token_outside_regions)
    return requested


@lru_cache(maxsize=32)
def shard_shape(shape: ModelCosts, tp: int, rules: tuple[ShardingRule, ...] = ()) -> ModelCosts:
    """The part of a model that one rank of `tp` holds: fewer heads, features and rows of the same
    width.

    A measured module keeps what `rules` do not cut; without rules, all of it. Widths that do not
    divide: of the rank that has most.
    """
    if tp == 1:
        return shape
    return shape.shard(
        tp, lambda holder: _shard_param_holder(holder, find_matching_rule(rules, holder.name), tp)
    )


def _shard_param_holder(holder: ParamHolder, rule: ShardingRule | None, tp: int) -> ParamHolder:
    """The part of `holder` on one rank. A column, or a vocabulary, has a part of its bias, too; a
    row all of it.

    A tied weight counts elsewhere.
    """
    if rule is None or rule.kind not in CUTTING_KINDS or not holder.num_outputs:
        return holder
    width = holder.num_inputs if rule.kind == "row" else holder.num_outputs
    # Widths that tp does not divide: the rank with most decides whether the plan fits.
    rank_width = max(
        sum(span.size for span in rule.list_rank_slices(width, tp, rank, name=holder.name))
        for rank in range(tp)
    )
    if rule.kind != "row":
        return replace(
            holder, num_params=holder.num_params // width * rank_width, num_outputs=rank_width
        )
    # What is left beside whole matrices: a row's bias is not cut.
    bias = holder.num_params % (holder.num_outputs * holder.num_inputs)
    return replace(
        holder,
        num_params=(holder.num_params - bias) // width * rank_width + bias,
        num_inputs=rank_width,
    )
