"""Finds the mistake that looks like a difference, from the way in which numbers are off.

Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from phalanx.verify.compare import ZERO_DOTS, TraceComparison
from phalanx.verify.diagnosis_of_experts import ExpertDiagnosis
from phalanx.verify.diagnosis_of_norms import NormDiagnosis
from phalanx.verify.diagnosis_of_stages import WRONG_MICROBATCH_CAUSE, StageDiagnosis
from phalanx.verify.factors import FactorExplainer, format_factor
from phalanx.verify.judged_layout import JudgedLayout
from phalanx.verify.routing_differences import RoutingChange
from phalanx.verify.trace_facts import name_buffers_set, name_weights_set

FEW_DIGITS_CAUSE = (
    "phalanx.nn's router, in one process too, has other scores than a plain implementation makes of"
    " the same inputs: they are computed in fewer digits than float32, or are others"
)
NOT_FINITE_CAUSE = "it is not a finite number"
WRONG_CUT_CAUSE = (
    "a sharding rule cuts elsewhere than between heads or features that belong together, a sum over"
    " the ranks of tp is missing, or a bias is added on every one of them"
)
WRONG_PADDING_CAUSE = (
    "where the ranks of tp do not divide the sequence, tokens that pad it are taken for others, or"
    " the last ones are cut off"
)
WRONG_SEQUENCE_CUT_CAUSE = (
    "a rank of cp attends otherwise than the whole sequence does: a mask of documents or of a"
    " window is dropped, positions begin again on each rank, or blocks of keys are merged without"
    " their weights"
)
LOST_KEY_GRADIENTS_CAUSE = (
    "the loss agrees, and gradients of keys or values do not: what other ranks' tokens owe to this"
    " rank's keys and values does not come back to it"
)
MIXED_ROWS_CAUSE = (
    "the objective lets the rows of a batch see each other, and a rank has only its own: the loss"
    " of a batch is not that of its parts, and changes with the number of ranks and of microbatches"
)
CHANGED_BUFFER_CAUSE = (
    "the forward changes the buffer {name} by what it makes of its rows, and a rank sees only its"
    " own: it follows rank 0's, one microbatch after the other (docs/own-code.md, other buffers);"
    " keep it out of forward"
)
BUFFER_TOLERANCE = 1e-8  # relative; far above float64's rounding


# float32 rounds by 6e-8, float16 by 5e-4 and bfloat16 by 4e-3 at most; sums lose more, or less.
# The cosine that rounding of a few dozen elements has by chance.
MAX_CHANCE_COSINE = 0.4
ERROR_RANGE_OF_NARROW_TYPES = (
    (1e-10, 1e-6, "float32"),
    (3e-5, 3e-4, "float16"),
    (3e-4, 1e-2, "bfloat16"),
)


class DifferenceDiagnosis:
    """Explains differences: each method returns the likely cause of one, in words."""

    def __init__(self, compared: TraceComparison, layout: JudgedLayout) -> None:
        self._compared, self._layout = compared, layout
        self._trace, self._observations = compared.trace, compared.observations
        self._dp, self._tp, self._cp = layout.dp, layout.tp, layout.cp
        self._factors = FactorExplainer(compared.trace, layout)
        self._experts = ExpertDiagnosis(compared, ep=layout.ep, tp=layout.tp, cp=layout.cp)
        self._stages: StageDiagnosis | None = None
        if layout.pipeline is not None:
            self._stages = StageDiagnosis(compared, layout.pipeline)
        self._compute_norms_by_name = NormDiagnosis(compared, self._factors, self._stages)

    def explain_wrong_loss(self, loss: float, step: int) -> str:
        # What its number proves comes before what the layout makes possible.
        if not math.isfinite(loss):
            return NOT_FINITE_CAUSE
        if buffer := self.find_wrong_forward_buffer():
            return CHANGED_BUFFER_CAUSE.format(name=buffer)
        if self._trace.mixed_by == "objective" and step == 0:
            return MIXED_ROWS_CAUSE
        cause = self._explain_loss_as_wrong_mean(loss, step)
        if cause:
            return cause
        if step == 0:
            return self._explain_wrong_first_loss(loss)
        return (
            "all before it agrees, so it saw other weights: a stale copy, or a forward that changes"
            " its own"
        )

    def _explain_loss_as_wrong_mean(self, loss: float, step: int) -> str:
        """The cause of a loss that is a mean of what ranks have, or what one has; "" if it is
        neither."""
        by_rank: list[list[float]] = []
        means: list[float] = []
        for observation in self._observations:
            # A microbatch without targets has no mean: NaN.
            present = [mean for mean in observation["local_means"][step] if mean == mean]
            by_rank.append(present)
            means += present
        if means and _is_nearly_equal(loss, _average_or_nan(means)):
            return "a mean of means: microbatches count alike, however many targets they have"
        for rank, present in enumerate(by_rank):
            if self._dp > 1 and _is_nearly_equal(loss, _average_or_nan(present)):
                return f"it is the loss of rank {rank} alone: it was not reduced"
        return ""

    def _explain_wrong_first_loss(self, loss: float) -> str:
        if self._trace.mixes_rows:
            return (
                "what the module makes of a row depends on the other rows, and a rank has only"
                " its own"
            )
        if self._trace.dropped:
            return (
                f"dropout inside {self._trace.dropped[0]} may not drop what it does in one process"
            )
        causes = self._list_forward_mistakes_of_layout()
        if causes:
            return "; or ".join(causes)
        reference = self._trace.steps[0].loss
        factor = math.inf
        if reference:
            factor = loss / reference
        if not self._factors.explain(factor, 0):
            return (
                "it is no multiple of one process's that the layout's numbers explain: the forward"
                " of some rank, or of all, computes something else"
            )
        return self._factors.describe("it", factor, 0)

    def find_wrong_forward_buffer(self) -> str:
        """The first buffer that a forward changes and that differs from one process; "" if there is
        none.

        A buffer that no checkpoint keeps counts as different: it is not compared.
        """
        steps = range(self._trace.num_steps)
        saved = self._trace.sizes.get(name_buffers_set(0), {})
        for name in self._trace.moved:
            if name in saved and any(
                self._compared.error(name_buffers_set(step), name) > BUFFER_TOLERANCE
                for step in steps
            ):
                return name
        for name in self._trace.moved:
            if name not in saved:
                return name
        return ""

    def explain_misrouted_token(self, reroute: RoutingChange) -> str:
        causes = [self._experts.explain_misrouted_token(reroute)]
        if reroute.phase == "step-0":
            causes += self._list_forward_mistakes_of_layout()
        return "; or ".join(causes)

    def _list_forward_mistakes_of_layout(self) -> list[str]:
        """The mistakes of a first forward that this layout makes possible."""
        causes = []
        if self._stages:
            causes.append(WRONG_MICROBATCH_CAUSE)
        if self._layout.pads_sequences:
            causes.append(WRONG_PADDING_CAUSE)
        if self._tp > 1:
            causes.append(WRONG_CUT_CAUSE)
        if self._cp > 1:
            causes.append(WRONG_SEQUENCE_CUT_CAUSE)
        return causes

    def explain_wrong_grad_norm(self, norm: float, step: int) -> str:
        if not math.isfinite(norm):
            return NOT_FINITE_CAUSE
        return self._compute_norms_by_name.explain(norm, step)

    def explain_wrong_tensor(
        self, label: str, kind: str, name: str, off: Sequence[str], ranks: Sequence[int], step: int
    ) -> str:
        # Before values: parts that do not make the tensor are not comparable with it.
        if self._compared.tensor_coverage_gap(kind, name):
            return (
                "the ranks' parts do not make the tensor: borders of shards are off, or another"
                " dimension is cut than the one that is gathered"
            )
        if any(self._compared.has_wrong_local_shape(kind, name, rank) for rank in ranks):
            return (
                "a rank's part has another shape than its place in the tensor: borders of shards"
                " are off"
            )
        squares = [self._compared.squared_tensor_error(kind, off[0], rank) for rank in ranks]
        if not all(map(math.isfinite, squares)):
            return NOT_FINITE_CAUSE
        if label == "initial weight":
            return "initial weights depend on the layout"
        if label == "buffer":
            return self._explain_wrong_buffer(name)
        if label == "update":
            return self._explain_wrong_update(name, step, ranks)
        if label == "gradient" and not self._trace.sizes[kind][name]:
            return "in one process it has no gradient: it is frozen, or has no part in the loss"
        if buffer := self.find_wrong_forward_buffer():
            return CHANGED_BUFFER_CAUSE.format(name=buffer)
        return self._explain_wrong_gradients(kind, name, off, ranks, step)

    def _explain_wrong_buffer(self, name: str) -> str:
        if name in self._trace.moved:
            return CHANGED_BUFFER_CAUSE.format(name=name)
        cause = (
            "gradients and weights agree, so a rank moves it by its own share of the batch, or"
            " not at all"
        )
        return self._experts.explain_wrong_router_bias(name) or cause

    def _explain_wrong_update(self, name: str, step: int, ranks: Sequence[int]) -> str:
        """The cause of wrong weights after an update whose gradients were one process's, to the
        bit."""
        if self._trace.has_no_gradient(name):
            return (
                "in one process it has no gradient and stays; here it is updated (decay, say):"
                " freeze it"
            )
        kind = name_weights_set(step)
        factors = [self._compared.find_multiple_of_reference(kind, [name], rank) for rank in ranks]
        stays = [rank for rank in ranks if not self._compared.has_weight_moved(kind, name, rank)]
        if stays:
            where = f"rank {', '.join(map(str, stays))}"
            return f"it is not updated on {where}, and stays as it was: a stale part"
        stays = [rank for rank in ranks if self._compared.has_weight_partly_moved(kind, name, rank)]
        if stays:
            where = f"rank {', '.join(map(str, stays))}"
            return (
                f"some of its elements on {where} are not updated, and the others are: borders of"
                " shards are off, or what other ranks update does not reach the model: stale rows"
            )
        holders = self._compared.find_ranks_holding_parameter(name)
        if len(ranks) < len(holders):
            where = f"rank {', '.join(map(str, ranks))}"
            if step > 0:
                return (
                    f"{step} updates agree, and then one does not, only on {where}: the optimizer's"
                    " state there (moments, the count of steps) is not that of one process, or its"
                    " part is stale"
                )
            return (
                f"only on {where}: its part is stale, or is updated otherwise than that of the"
                " other ranks"
            )
        if step == 0 and factors and factors[0] is not None:
            return f"the update is {format_factor(factors[0])} that of one process"
        if step > 0:
            return (
                f"{step} updates agree, and then one does not: the optimizer's state (moments, the"
                " count of steps) or its learning rate is not that of one process, or an update is"
                " left out or made twice"
            )
        return (
            "the optimizer was given one process's gradients and makes another update of them: its"
            " state, decay, borders of shards, or a part that is updated and does not reach the"
            " model"
        )

    def explain_wrong_expert_load(self, load: Sequence[int], expected: Sequence[int]) -> str:
        """The cause of a load (choices of each expert, then those that were dropped) while routers
        choose as in one process."""
        counted, came = sum(load[: len(expected)]), sum(expected)
        if self._dp > 1 and counted * self._dp == came:
            return (
                f"{counted} choices were counted and {came} were made: only those of one rank, so"
                " that biases of routers are moved by other counts than the whole batch's"
            )
        return (
            f"{counted} choices were counted and {came} were made: the load is not that of the"
            " whole batch, for counts of some ranks or microbatches are missing, or counted twice"
        )

    def _explain_wrong_gradients(
        self, kind: str, name: str, off: Sequence[str], ranks: Sequence[int], step: int
    ) -> str:
        """The cause of wrong gradients after a loss that agrees: the backward, or what follows
        it."""
        cause = (
            self._explain_scaled_gradients(kind, off, step)
            or self._experts.explain_wrong_gradients(kind, off, ranks)
            or self._explain_unreduced_gradient(kind, name)
            or self._explain_gradients_by_stage(kind, name, off)
            or self._explain_gradient_by_rank_parts(kind, name, ranks, step)
            or self._explain_shared_blocks(off)
            or self._explain_compression_errors(step)
            or self._explain_narrow_rounding(kind, off, ranks)
        )
        if cause:
            return cause
        num_tensors = len(self._trace.order)
        if self._cp > 1 and step == 0 and any(map(_is_key_or_value_weight, off)):
            return LOST_KEY_GRADIENTS_CAUSE
        if self._layout.is_plainly_data_parallel and self._do_gradients_beyond_agree(kind, off):
            return (
                f"{len(off)} of {num_tensors} tensors differ, and those that the backward meets"
                " later agree: their gradients are not reduced, or not wholly, over the"
                " data-parallel ranks (a bucket, or the end of one), or the backward goes wrong in"
                " them alone"
            )
        if len(off) < num_tensors:
            return (
                f"{len(off)} of {num_tensors} tensors differ: the backward goes wrong where it"
                f" meets {off[-1]}{self._describe_backward_features()}"
            )
        if step > 0:
            return (
                "the step before agrees, and so do its weights and the loss: is something of it"
                " left in gradients?"
            )
        if self._tp > 1:
            return (
                "every gradient differs, and the loss agrees: the backward lacks a sum over the"
                " ranks of tp where the head or the last region is entered"
            )
        return (
            "every gradient differs, not by a factor, and the loss agrees: the backward goes wrong"
            " where it begins: microbatches or tokens weigh otherwise in it than in the loss, or"
            " some of them are lost"
        )

    def _do_gradients_beyond_agree(self, kind: str, off: Sequence[str]) -> bool:
        """True if a gradient is right in a block that the backward meets after that of the first
        wrong one: what it hands on there is right, too."""
        wrong, sizes = set(off), self._trace.sizes[kind]
        names = self._compared.list_tensors_in_forward_order(kind)
        block = off[-1].split(".")[:2]
        for name in names[: names.index(off[-1])]:
            if name not in wrong and sizes[name] > 0 and name.split(".")[:2] != block:
                return True
        return False

    def _explain_compression_errors(self, step: int) -> str:
        """The cause of gradients that are wrong with what compression keeps of them; "" without
        such a compression."""
        if not self._layout.keeps_error:
            return ""
        if step == 0:
            return (
                "what is sent and what the ranks keep do not add up: a part of it is lost, or is"
                " both sent and kept"
            )
        return (
            "in the first step what is sent and what is kept add up, and later they do not: what"
            " was kept is not all sent in the next step"
        )

    def _describe_backward_features(self) -> str:
        """Name what of this layout is special to a backward."""
        words = []
        if self._layout.recompute:
            words.append("what is recomputed there is not what the forward computed")
        if self._layout.has_chunks:
            words.append("a chunk of the sequence has another's gradient, or none")
        if self._tp > 1:
            words.append("a sum over the ranks of tp is missing where its region is entered")
        if not words:
            return ""
        return f": {', or '.join(words)}"

    def _explain_scaled_gradients(self, kind: str, off: Sequence[str], step: int) -> str:
        """The cause of gradients that are all off by a factor, one for all ranks or one for each;
        "" if they are not."""
        # A factor of everything is off everywhere.
        if len(off) != len(self._trace.order):
            return ""
        factors: list[float] = []
        for rank in range(len(self._observations)):
            factor = self._compared.find_multiple_of_reference(kind, off, rank)
            if factor is None:
                return ""
            factors.append(factor)
        if max(factors) - min(factors) <= 1e-4 * max(map(abs, factors)):
            return self._explain_gradients_scaled_alike(factors[0], step)
        if cause := self._explain_gradients_unclipped_on_some_ranks(factors, step):
            return cause
        first = enumerate(factors[:4])
        listed = ", ".join(f"{factor:.4g} x on rank {rank}" for rank, factor in first)
        return (
            f"each rank scaled its gradients by a factor of its own ({listed}): clipped by"
            " local norms"
        )

    def _explain_gradients_scaled_alike(self, factor: float, step: int) -> str:
        """The cause of gradients that are all off by `factor`, on all ranks."""
        if factor == 0:
            return (
                "every gradient is zero: gradients were not reduced into the parameters, or were"
                " cleared before the update"
            )
        if cause := self._explain_factor_of_clipping(step, factor):
            return cause
        sentence = self._factors.describe("every gradient", factor, step)
        if self._factors.explain(factor, step):
            return sentence
        return (
            f"{sentence}, and the loss agrees: what their sum is multiplied with, or divided by"
            " (data-parallel ranks, targets, a loss scale), is another number"
        )

    def _explain_gradients_unclipped_on_some_ranks(
        self, factors: Sequence[float], step: int
    ) -> str:
        """The cause of gradients that are clipped on some ranks alone; "" if they are not."""
        reference = self._trace.steps[step]
        if reference.max_norm is None:
            return ""
        inverse = reference.grad_norm / reference.max_norm
        unclipped = [
            rank for rank, factor in enumerate(factors) if _is_nearly_equal(factor, inverse)
        ]
        if not unclipped or not all(
            _is_nearly_equal(f, inverse) or _is_nearly_equal(f, 1.0) for f in factors
        ):
            return ""
        return (
            f"gradients are not clipped on rank {', '.join(map(str, unclipped))}, and on the others"
            " they are"
        )

    def _explain_gradients_by_stage(self, kind: str, name: str, off: Sequence[str]) -> str:
        if self._stages is None:
            return ""
        cause = self._stages.explain_wrong_gradients(kind, name, off)
        narrow = self._find_narrow_dtype_by_rounding(kind, off)
        if cause and narrow:
            return (
                f"{len(off)} of {len(self._trace.order)} tensors differ, by about the rounding of"
                f" {narrow}: what is computed apart from the others (W), or sent between stages, is"
                f" in {narrow}"
            )
        return cause

    def _explain_gradient_by_rank_parts(
        self, kind: str, name: str, ranks: Sequence[int], step: int
    ) -> str:
        """The cause of one tensor's gradient by what each rank has of it; "" if its parts say
        nothing."""
        if len(ranks) < len(self._compared.find_ranks_holding_parameter(name)):
            return (
                f"only rank {', '.join(map(str, ranks))} differs: its part was not reduced, or is"
                " stale"
            )
        # A tensor of one element is a multiple on every rank: if each has another factor, that says
        # less than that they have parts of it.
        if not self._have_ranks_same_factor(
            kind, name, ranks
        ) and self._do_tp_parts_sum_to_reference(kind, name):
            return (
                f"each rank of tp has its own part of the gradient of {name}, and nobody added them"
                ' up: a rule "partial" is missing, or parts that ranks hold alike are not summed'
            )
        factor = self._compared.find_multiple_of_reference(kind, [name], ranks[0])
        if factor is not None and abs(factor - 1) > 1e-3:
            return self._explain_factor_of_tp_copies(
                name, factor
            ) or self._factors.describe_gradient(name, factor, step)
        return ""

    def _explain_shared_blocks(self, off: Sequence[str]) -> str:
        """The cause of gradients that differ only where some ranks of tp hold a block alike; "" if
        others differ, too."""
        if self._tp == 1 or not all(map(self._compared.has_shared_blocks, off)):
            return ""
        return (
            f"{len(off)} of {len(self._trace.order)} tensors differ, all of them shared by some of"
            " the ranks of tp (keys and values of fewer heads than ranks): parts of ranks that hold"
            " the same heads are not added up as they should: over other ranks, or not all of them"
        )

    def _have_ranks_same_factor(self, kind: str, name: str, ranks: Sequence[int]) -> bool:
        """True if each rank's part of a tensor is the same multiple of the reference."""
        factors = []
        for rank in ranks:
            factor = self._compared.find_multiple_of_reference(kind, [name], rank)
            if factor is None:
                return False
            factors.append(factor)
        return max(factors) - min(factors) <= 1e-4 * max(map(abs, factors))

    def _explain_unreduced_gradient(self, kind: str, name: str) -> str:
        if self._dp == 1 or not self._is_mean_over_ranks_right(kind, name):
            return ""
        return (
            f"each data-parallel rank has a gradient of {name} of its own, and their mean is"
            " right: never averaged"
        )

    def _explain_factor_of_tp_copies(self, name: str, factor: float) -> str:
        """The cause of a wrong factor of a tensor that all ranks of tp hold alike; "" if it is
        none of theirs."""
        if self._tp > 1 and abs(factor / self._tp - 1) < 1e-3:
            return (
                f"the gradient of {name} is {factor:.4g} x the reference: summed over the ranks of"
                ' tp, which have all of it (a rule "replicate" is missing)'
            )
        return ""

    def _do_tp_parts_sum_to_reference(self, kind: str, name: str) -> bool:
        """True if what the ranks of tp have makes the reference once it is added up."""
        along, size = self._project_rank_sum_on_reference(kind, name)
        if not size:
            return False
        # Several ranks may hold the same part, as many as divide tp.
        for copies in range(2, self._tp + 1):
            if self._tp % copies == 0 and abs(along * copies / size - 1) < 1e-6:
                return True
        return False

    def _is_mean_over_ranks_right(self, kind: str, name: str) -> bool:
        """True if what the ranks have, each something else, makes the reference on average."""
        along, size = self._project_rank_sum_on_reference(kind, name)
        # What ranks see for themselves is far from the mean; rounding is not, and is level too.
        is_far = self._compared.error(kind, name) > 0.05
        return is_far and size > 0 and abs(along / size - 1) < 1e-9

    def _project_rank_sum_on_reference(self, kind: str, name: str) -> tuple[float, float]:
        """(sum over ranks of the tensor times the reference, and of the reference squared)."""
        dots = [
            observation["tensors"][kind].get(name, ZERO_DOTS) for observation in self._observations
        ]
        return sum(dot[2] for dot in dots), sum(dot[3] for dot in dots)

    def _explain_factor_of_clipping(self, step: int, factor: float) -> str:
        """The cause of a factor that is the one of clipping; "" for another factor."""
        reference = self._trace.steps[step]
        if reference.max_norm is None:
            return ""
        clipped = reference.max_norm / reference.grad_norm
        for expected, words in ((clipped, "clipped twice"), (1 / clipped, "not clipped")):
            if abs(factor / expected - 1) < 1e-3:
                return f"every gradient is {format_factor(factor)} the reference: {words}"
        # The steps before agree, and they were not clipped.
        if step == 1:
            return (
                f"every gradient is {format_factor(factor)} the reference, in the first step that"
                " is clipped: it is clipped to another norm than the bound"
            )
        return ""

    def _explain_narrow_rounding(self, kind: str, off: Sequence[str], ranks: Sequence[int]) -> str:
        """The narrower type whose rounding has the size of the errors in float64; "" if there is
        none, or if they are not like rounding: in many tensors, on all ranks, and without a
        direction."""
        if self._trace.dtype != "float64" or self._trace.narrows:
            return ""
        if len(off) < max(2, len(self._trace.order) // 4):
            return ""
        if len(ranks) < len(self._compared.find_ranks_holding_parameter(off[-1])):
            return ""
        narrow = self._find_narrow_dtype_by_rounding(kind, off)
        if narrow and self._layout.recompute:
            return (
                f"{len(off)} of {len(self._trace.order)} tensors differ: the backward goes wrong"
                f" where it meets {off[-1]}: what is recomputed there is not what the forward"
                f" computed, by about the rounding of {narrow}"
            )
        if narrow:
            return (
                f"the errors are of the size of {narrow}'s rounding, in {len(off)} tensors and in"
                f" all directions: computed, or reduced, in {narrow}, or of other weights by as"
                " little"
            )
        return ""

    def _find_narrow_dtype_by_rounding(self, kind: str, off: Sequence[str]) -> str:
        """The type whose rounding has the size of errors in float64 that have no direction; "" if
        there is none."""
        if self._trace.dtype != "float64" or self._trace.narrows:
            return ""
        # An error that grows with the tensor is a wrong factor or a wrong input, not rounding.
        directions = sorted(
            abs(self._compared.cosine_of_error_and_reference(kind, name)) for name in off
        )
        if directions[len(directions) // 2] > MAX_CHANCE_COSINE:
            return ""
        error = self._compared.error(kind, off[-1])
        for low, high, narrow in ERROR_RANGE_OF_NARROW_TYPES:
            if low < error < high:
                return narrow
        return ""


def _is_nearly_equal(a: float, b: float) -> bool:
    return b == b and abs(a - b) <= 1e-6 * max(abs(a), abs(b))


def _average_or_nan(values: Sequence[float]) -> float:
    if not values:
        return math.nan
    return sum(values) / len(values)


def _is_key_or_value_weight(name: str) -> bool:
    return name.endswith((".k.weight", ".v.weight"))
