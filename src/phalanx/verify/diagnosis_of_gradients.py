"""Finds the mistake behind wrong gradients after a loss that agrees: in the backward, or in what
follows it.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.verify.compare import ZERO_DOTS, TraceComparison
from phalanx.verify.diagnosis_of_experts import ExpertDiagnosis
from phalanx.verify.diagnosis_of_rows import RowDiagnosis
from phalanx.verify.diagnosis_of_stages import StageDiagnosis
from phalanx.verify.factors import FactorExplainer, format_factor, is_nearly_equal
from phalanx.verify.judged_layout import JudgedLayout

LOST_KEY_GRADIENTS_CAUSE = (
    "the loss agrees, and gradients of keys or values do not: what other ranks' tokens owe to this"
    " rank's keys and values does not come back to it"
)
WRONG_SCORES_GRADIENT_CAUSE = (
    "gradients of queries and keys differ, and those of values agree: the backward of the softmax"
    " goes wrong, whose sum over a row is that over all keys that its query attends to: that of a"
    " block of keys, or of another output"
)
# A mistake of some tokens, or of the border of a part, is in few rows of a matrix.
MAX_SHARE_OF_FEW_ROWS = 0.25
# Of an error, and of the gradient of the step before.
MIN_COSINE_OF_WHAT_IS_LEFT = 0.999
# Of what a gradient is off by: so far a copy of that of the step before is from it.
MAX_SHARE_OF_A_STALE_GRADIENT = 1e-3
# The cosine that rounding of a few dozen elements has by chance.
MAX_CHANCE_COSINE = 0.4
# float32 rounds by 6e-8, float16 by 5e-4 and bfloat16 by 4e-3 at most; sums lose more, or less.
ERROR_RANGE_OF_NARROW_TYPES = (
    (1e-10, 1e-6, "float32"),
    (3e-5, 3e-4, "float16"),
    (3e-4, 1e-2, "bfloat16"),
)


class GradientDiagnosis:
    """Explains gradients that differ where the loss agrees."""

    def __init__(
        self,
        compared: TraceComparison,
        layout: JudgedLayout,
        factors: FactorExplainer,
        experts: ExpertDiagnosis,
        stages: StageDiagnosis | None,
        rows: RowDiagnosis,
    ) -> None:
        self._compared, self._layout = compared, layout
        self._trace, self._observations = compared.trace, compared.observations
        self._dp, self._tp, self._cp = layout.dp, layout.tp, layout.cp
        self._factors, self._experts, self._stages = factors, experts, stages
        self._rows = rows

    def explain(
        self, kind: str, name: str, off: Sequence[str], ranks: Sequence[int], step: int
    ) -> str:
        """The cause of wrong gradients of tensors `off`, in forward order: that of `name`, which
        is wrong on `ranks`, is reported."""
        cause = (
            self._explain_what_is_left(kind, name, off)
            or self._explain_scaled_gradients(kind, off, step)
            or self._experts.explain_wrong_gradients(kind, off, ranks)
            or self._explain_unreduced_gradient(kind, name)
            or self._explain_gradients_by_stage(kind, name, off)
            or self._rows.explain(step)
            or self._explain_gradient_by_rank_parts(kind, name, off, ranks, step)
            or self._explain_rows_with_one_factor(kind, off, step)
            or self._explain_shared_blocks(off)
            or self._explain_compression_errors(step)
            or self._explain_narrow_rounding(kind, off, ranks)
        )
        return cause or self._explain_by_first_wrong_tensor(kind, off, step)

    def _explain_what_is_left(self, kind: str, name: str, off: Sequence[str]) -> str:
        """The cause of a gradient that is off by a multiple of that of the step before; "" if it is
        not."""
        sums = [0.0] * 4
        for observation in self._observations:
            dots = observation.get("left", {}).get(kind, {}).get(name, (0.0,) * 4)
            sums = [total + part for total, part in zip(sums, dots, strict=True)]
        error, crossed, before, from_before = sums
        if before and from_before < MAX_SHARE_OF_A_STALE_GRADIENT**2 * error:
            return (
                f"{len(off)} of {len(self._trace.order)} tensors differ, {name} is its gradient of"
                " the step before: a stale copy, or one that arrives a step late"
            )
        if not crossed**2 > MIN_COSINE_OF_WHAT_IS_LEFT**2 * error * before:
            return ""
        return (
            f"{len(off)} of {len(self._trace.order)} tensors differ, {name} by"
            f" {format_factor(crossed / before)} its gradient of the step before: that is left in"
            " gradients, which were not cleared"
        )

    def _explain_by_first_wrong_tensor(self, kind: str, off: Sequence[str], step: int) -> str:
        """The cause of gradients whose numbers show nothing, by where the backward goes wrong."""
        num_tensors = len(self._trace.order)
        if special := self._trace.describe_first_special_step(step):
            return (
                f"{len(off)} of {num_tensors} tensors differ, and in the steps before all agree:"
                f" this is the first step that has {special}, and what is computed otherwise for"
                " that is wrong, or something of the step before is left in gradients"
            )
        # What is nearer to the loss owes nothing to keys.
        if self._cp > 1 and step == 0 and _is_key_or_value_weight(off[-1]):
            if _are_only_scores_wrong(off):
                return WRONG_SCORES_GRADIENT_CAUSE
            return LOST_KEY_GRADIENTS_CAUSE
        if self._layout.is_plainly_data_parallel and self._do_gradients_beyond_agree(kind, off):
            return (
                f"{len(off)} of {num_tensors} tensors differ, and those that the backward meets"
                " later agree: their gradients are not reduced, or not wholly, over the"
                " data-parallel ranks (a bucket, or the end of one), or the backward goes wrong in"
                " them alone"
            )
        if self._is_handed_on_rightly(kind, off):
            if self._are_biases_of_right_weights(off):
                return (
                    f"{len(off)} of {num_tensors} tensors differ, all of them biases, and the"
                    " weights of their layers agree, as does what the backward hands on: the"
                    " gradient of a bias is the sum over all tokens of what its layer is given, and"
                    " theirs is that of a part of them (one rank of tp's, say), or of some twice"
                )
            return (
                f"{len(off)} of {num_tensors} tensors differ, and those that the backward meets"
                " later agree: what it hands on is right, and these weights' own gradients are not:"
                " what their layers keep of their input is another microbatch's, or a part of it"
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
        returned = self._layout.describe_returned_tensors()
        returned = returned and f", or {returned}"
        if self._tp > 1:
            return (
                "every gradient differs, and the loss agrees: the backward lacks a sum over the"
                f" ranks of tp where the head or the last region is entered{returned}"
            )
        return (
            "every gradient differs, not by a factor, and the loss agrees: the backward goes wrong"
            " where it begins: microbatches or tokens weigh otherwise in it than in the loss, or"
            f" some of them are lost{returned}"
        )

    def _is_handed_on_rightly(self, kind: str, off: Sequence[str]) -> bool:
        """True if ranks of tp, which keep parts of what their layers are given, have wrong
        gradients of weights alone, and right ones of what the backward meets after them."""
        is_kept = self._layout.keeps_saved_tensors and not self._layout.has_chunks
        return self._tp > 1 and is_kept and self._do_gradients_beyond_agree(kind, off)

    def _are_biases_of_right_weights(self, off: Sequence[str]) -> bool:
        """True if all of `off` are biases of layers whose weights have right gradients."""
        right = set(self._trace.order) - set(off)
        return all(
            name.endswith(".bias") and f"{name.removesuffix('.bias')}.weight" in right
            for name in off
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
        if returned := self._layout.describe_returned_tensors():
            words.append(returned)
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
        off_ranks = [
            (rank, factor) for rank, factor in enumerate(factors) if not is_nearly_equal(factor, 1)
        ]
        listed = ", ".join(
            f"{format_factor(factor)} on rank {rank}" for rank, factor in off_ranks[:4]
        )
        cause = (
            "clipped by local norms"
            if self._trace.steps[step].max_norm is not None
            else "what a rank multiplies them with, or divides them by, is a number of its own"
        )
        return f"each rank scaled its gradients by a factor of its own ({listed}): {cause}"

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
            rank for rank, factor in enumerate(factors) if is_nearly_equal(factor, inverse)
        ]
        if not unclipped or not all(
            is_nearly_equal(f, inverse) or is_nearly_equal(f, 1.0) for f in factors
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
        self, kind: str, name: str, off: Sequence[str], ranks: Sequence[int], step: int
    ) -> str:
        """The cause of one tensor's gradient by what each rank has of it; "" if its parts say
        nothing."""
        if len(ranks) < len(self._compared.find_ranks_holding_parameter(name)):
            listed = ", ".join(map(str, ranks))
            if all(self._observations[r]["tensors"][kind][name][1] == 0 for r in ranks):
                return (
                    f"only rank {listed} differs, and has no gradient, or zeros: it is taken there"
                    " for a parameter that nobody uses, or its part was cleared, or not reduced"
                )
            words = self._describe_wrong_rows(kind, name, ranks)
            if self._tp > 1 and self._dp == 1:
                words += (
                    ", or a backward cuts what ranks of tp have put together elsewhere than where"
                    " each of them put its part"
                )
            return f"only rank {listed} differs: its part was not reduced, or is stale{words}"
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
        if off == [name] and self._has_size_of_reference(kind, name):
            return (
                f"{name} alone differs, and its gradient is as long as it should be, in another"
                " direction: the same elements in another order (transposed, or as they lie in"
                " memory), or with other signs"
            )
        return ""

    def _has_size_of_reference(self, kind: str, name: str) -> bool:
        """True if the norm of a gradient of several elements is right, far from it as it is."""
        sizes = [seen["tensors"][kind].get(name, ZERO_DOTS) for seen in self._observations]
        ours, theirs = (sum(dots[i] for dots in sizes) for i in (1, 3))
        is_far = self._compared.error(kind, name) > 0.05
        return is_far and abs(ours - theirs) <= 1e-9 * theirs

    def _describe_wrong_rows(self, kind: str, name: str, ranks: Sequence[int]) -> str:
        """Say in which rows a matrix is wrong, where these are few on each of `ranks`; else ""."""
        wrong_rows = [
            self._observations[rank].get("wrong_rows", {}).get(kind, {}) for rank in ranks
        ]
        if not all(name in of_rank for of_rank in wrong_rows):
            return ""
        num_rows, num_wrong, num_zero, _ = (
            sum(numbers) for numbers in zip(*(of_rank[name] for of_rank in wrong_rows), strict=True)
        )
        if not 0 < num_wrong <= MAX_SHARE_OF_FEW_ROWS * num_rows:
            return ""
        first = min(of_rank[name][3] for of_rank in wrong_rows)
        words = f", or few of its rows have another gradient: {num_wrong} of {num_rows} differ"
        if num_zero == num_wrong:
            words += " and are zero, as those of a padding token are"
        return f"{words}, row {first} the first"

    def _explain_rows_with_one_factor(self, kind: str, off: Sequence[str], step: int) -> str:
        """The cause of a matrix that alone differs, and of which some rows are one multiple of the
        reference; "" of all others."""
        if len(off) > 1:
            return ""
        (name,) = off
        of_ranks = [
            observation["row_factors"][kind][name]
            for observation in self._observations
            if name in observation.get("row_factors", {}).get(kind, {})
        ]
        if not of_ranks or not all(is_nearly_equal(of_ranks[0][2], other[2]) for other in of_ranks):
            return ""
        num_alike, num_rows, factor = of_ranks[0]
        meaning = self._factors.explain(factor, step)
        return (
            f"{name} alone differs: {num_alike} of {num_rows} rows are {format_factor(factor)} the"
            " reference, and the others by no one factor: it has two uses (a head that is tied with"
            " an embedding), and in its gradient the part of one, which these rows have alone, has"
            f" another factor than that of the other{meaning and f': {meaning}'}"
        )

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
        if self._dp == 1:
            return ""
        if self._is_mean_over_ranks_right(kind, name):
            return (
                f"each data-parallel rank has a gradient of {name} of its own, and their mean is"
                " right: never averaged"
            )
        if self._is_sum_over_ranks_right(kind, name):
            return (
                f"each data-parallel rank has a part of the gradient of {name} of its own, and what"
                " they have adds up to one process's: not added up over these ranks"
            )
        return ""

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

    def _is_sum_over_ranks_right(self, kind: str, name: str) -> bool:
        """True if what the data-parallel ranks have, each something else, adds up to the
        reference."""
        along, size = self._project_rank_sum_on_reference(kind, name)
        if not size or abs(along * self._dp / size - 1) > 1e-9:
            return False
        ranks = self._compared.find_ranks_holding_parameter(name)
        dots_of = [self._observations[rank]["tensors"][kind].get(name, ZERO_DOTS) for rank in ranks]
        # A rank that has all of it, or ranks that have the same, are another mistake.
        is_far = all(dots[0] > 0.05**2 * dots[3] for dots in dots_of)
        return is_far and len({dots[1] for dots in dots_of}) > 1

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
        norm_factor = self._observations[0]["norms"][step] / reference.grad_norm
        was_off_before = abs(norm_factor / factor - 1) < 0.1 * abs(factor - 1)
        # The steps before agree, and they were not clipped.
        if step == 1 and not was_off_before:
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
        returned = self._layout.describe_returned_tensors()
        if narrow and returned:
            return (
                f"{len(off)} of {len(self._trace.order)} tensors differ: the backward goes wrong"
                f" where it meets {off[-1]}: {returned}, by about the rounding of {narrow}"
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


def _are_only_scores_wrong(off: Sequence[str]) -> bool:
    """True if of the attention that the last of `off` is in queries are off and values are not."""
    attention = off[-1].rsplit(".", 2)[0]
    return f"{attention}.q.weight" in off and f"{attention}.v.weight" not in off


def _is_key_or_value_weight(name: str) -> bool:
    return name.endswith((".k.weight", ".v.weight"))
