"""Finds the mistake that looks like a difference, from the way in which numbers are off.

Torch-free.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from phalanx.verify.compare import TraceComparison
from phalanx.verify.diagnosis_of_attention import AttentionDiagnosis
from phalanx.verify.diagnosis_of_experts import ExpertDiagnosis
from phalanx.verify.diagnosis_of_gradients import GradientDiagnosis
from phalanx.verify.diagnosis_of_norms import NormDiagnosis
from phalanx.verify.diagnosis_of_outputs import OTHER_WEIGHTS, OutputDiagnosis
from phalanx.verify.diagnosis_of_rows import RowDiagnosis
from phalanx.verify.diagnosis_of_stages import (
    FIRST_MASKS_CAUSE,
    OTHER_TARGETS_CAUSE,
    WRONG_MICROBATCH_CAUSE,
    StageDiagnosis,
)
from phalanx.verify.diagnosis_of_updates import UpdateDiagnosis
from phalanx.verify.factors import (
    SHARED_FLOAT32_FACTOR,
    FactorExplainer,
    format_factor,
    is_nearly_equal,
)
from phalanx.verify.judged_layout import JudgedLayout
from phalanx.verify.routing_differences import RoutingChange
from phalanx.verify.trace_facts import name_buffers_set
from phalanx.verify.wrong_tokens import TokenEvidence

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
# Outside of blocks nothing attends.
WRONG_SEQUENCE_PLACES_CAUSE = (
    "a rank of cp takes other tokens of the sequence than its own, or gives them other positions:"
    " these begin again on each rank, or go on from one document to the next"
)
WRONG_ATTENTION_CAUSE = (
    "attention in blocks, as layouts have it, computes something else than attention with one mask:"
    " a mask of documents or of a window is another one, or blocks of keys and of queries are put"
    " together wrongly"
)
WRONG_LOSS_OF_RIGHT_OUTPUTS_CAUSE = (
    "what the model's modules make of each token agrees on all ranks, and the loss of it does not:"
    " the objective computes another loss, targets are those of other tokens or samples, masked"
    " targets count, or logits of a chunk of tokens are left out or weigh otherwise"
)
ROUNDED_LOSS_CAUSE = (
    "it, the sum of those of microbatches, or a factor of it, is rounded to float32"
)
WRONG_LOSS_OF_A_CUT_HEAD_CAUSE = (
    "a sharding rule cuts the head elsewhere than between tokens of the vocabulary, or a sum or a"
    " maximum over the ranks of tp is missing in its loss (the softmax, the logit of the target)"
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
WRONG_BLOCKS_CAUSE = (
    "all that differ are of several blocks (fused matrices that tp cuts), and the others agree: a"
    " block is taken to lie elsewhere in a rank's part, is filled from another part of what is"
    " stored or drawn, or its borders are others"
)
FILLED_PARTS_CAUSE = (
    "ranks build the module without memory and fill their parts, as training does for large models:"
    " what they take from stored weights, or draw again, is not what one process builds"
)
UNDRAWN_PARTS_CAUSE = (
    "it is not a finite number: ranks build the module without memory and fill their parts, as"
    " training does for large models, and a part of it is what the memory had before: what one"
    " process draws or stores there is not drawn or stored again"
)
MISSING_STATE_CAUSE = "no rank has it among its state: neither have checkpoints"
EQUAL_BUFFERS_CAUSE = (
    "gradients and weights agree, and all ranks have the same values: what moves it has another"
    " factor (momentum) or other statistics than the whole batch's, or is nothing"
)
BUFFER_TOLERANCE = 1e-8  # relative; far above float64's rounding


class DifferenceDiagnosis:
    """Explains differences: each method returns the likely cause of one, in words."""

    def __init__(self, compared: TraceComparison, layout: JudgedLayout) -> None:
        self._compared, self._layout = compared, layout
        self._trace, self._observations = compared.trace, compared.observations
        self._dp, self._tp, self._cp = layout.dp, layout.tp, layout.cp
        self._factors = FactorExplainer(compared.trace, layout)
        self._experts = ExpertDiagnosis(compared, layout)
        self._outputs = OutputDiagnosis(compared, layout)
        self._stages: StageDiagnosis | None = None
        if layout.pipeline is not None:
            self._stages = StageDiagnosis(compared, layout.pipeline, layout.recompute)
        self._updates = UpdateDiagnosis(compared)
        self._norms = NormDiagnosis(compared, self._factors, self._stages)
        self._rows = RowDiagnosis(compared.observations, compared.trace.dtype)
        self._gradients = GradientDiagnosis(
            compared, layout, self._factors, self._experts, self._stages, self._rows
        )

    def explain_wrong_loss(self, loss: float, step: int) -> str:
        # What its number proves comes before what the layout makes possible.
        if not math.isfinite(loss):
            return NOT_FINITE_CAUSE
        if buffer := self.find_wrong_forward_buffer():
            return CHANGED_BUFFER_CAUSE.format(name=buffer)
        if self._trace.mixed_by == "objective" and step == 0:
            return MIXED_ROWS_CAUSE
        # Of a forward that computes something else a mean may be anything, by chance one of these.
        wrong_output = self._outputs.find_first_wrong(step)
        if not wrong_output:
            cause = self._explain_loss_as_wrong_mean(loss, step)
            if cause:
                return cause
        if cause := self._rows.explain(step):
            return f"some sequences do not count once: {cause}"
        if step == 0:
            return self._explain_wrong_first_loss(loss, wrong_output)
        if cause := self._outputs.explain_unequal_replicas(step):
            return f"all before it agrees, and {cause}"
        if special := self._trace.describe_first_special_step(step):
            return (
                f"all before it agrees, and it is the first step that has {special}: what is"
                " computed otherwise for that is wrong; or it saw other weights: a stale copy"
            )
        return (
            "all before it agrees, so it saw other weights: a stale copy, or a forward that changes"
            " its own"
        )

    def _explain_loss_as_wrong_mean(self, loss: float, step: int) -> str:
        """The cause of a loss that is a mean of what ranks have, or what one has; "" if it is
        neither."""
        reference = self._trace.steps[step].loss
        by_rank: list[list[float]] = []
        means: list[float] = []
        total, num_targets = 0.0, 0
        for observation in self._observations:
            # A microbatch without targets has no mean: NaN.
            present = [mean for mean in observation["local_means"][step] if mean == mean]
            by_rank.append(present)
            means += present
            counts = [count for count in observation["local_targets"][step] if count]
            total += sum(map(operator.mul, present, counts))
            num_targets += sum(counts)
        # Where targets weigh alike, the mistake is in what each microbatch's loss is.
        if num_targets and is_nearly_equal(loss, total / num_targets):
            return ""
        if means and _is_told_from(reference, loss, _average_or_nan(means)):
            return "a mean of means: microbatches count alike, however many targets they have"
        for rank, present in enumerate(by_rank):
            if self._dp > 1 and _is_told_from(reference, loss, _average_or_nan(present)):
                return f"it is the loss of rank {rank} alone: it was not reduced"
        return ""

    def _are_outputs_compared(self) -> bool:
        """True if what modules make of tokens was compared on every rank."""
        return all(observation.get("num_outputs", 0) for observation in self._observations)

    def _explain_wrong_first_loss(self, loss: float, wrong_output: str) -> str:
        if cause := self._outputs.explain_statistics(0):
            return cause
        if self._trace.mixes_rows:
            return (
                "what the module makes of a row depends on the other rows, and a rank has only"
                " its own"
            )
        if self._trace.dropped:
            return (
                f"dropout inside {self._trace.dropped[0]} may not drop what it does in one process"
            )
        if self._stages and (cause := self._stages.explain_wrong_inputs()):
            return cause
        if cause := self._outputs.explain_unequal_replicas(0):
            return cause
        reference = self._trace.steps[0].loss
        factor = loss / reference if reference else math.inf
        meaning = self._factors.explain(factor, 0)
        if not wrong_output and self._are_outputs_compared() and not meaning:
            return self._explain_loss_of_right_outputs()
        evidence = TokenEvidence.from_json(
            observation.get("wrong_tokens") for observation in self._observations
        )
        if evidence is not None:
            return self._explain_wrong_attention(evidence)
        causes = self._list_forward_mistakes_of_layout(wrong_output)
        if causes:
            return "; or ".join(causes)
        # What modules make of tokens is no sum that somebody multiplies: their loss may be any.
        if meaning == SHARED_FLOAT32_FACTOR and not wrong_output:
            return f"it is {format_factor(factor)} the reference: {ROUNDED_LOSS_CAUSE}"
        if meaning and not wrong_output:
            return self._factors.describe("it", factor, 0)
        if _is_attention(wrong_output):
            return WRONG_ATTENTION_CAUSE
        words = f"the forward of {self._outputs.describe_wrong_ranks(0)} computes something else"
        if self._layout.gathers_weights:
            words += OTHER_WEIGHTS
        if meaning:
            return words
        return f"it is no multiple of one process's that the layout's numbers explain: {words}"

    def _explain_loss_of_right_outputs(self) -> str:
        causes = [WRONG_LOSS_OF_RIGHT_OUTPUTS_CAUSE]
        if self._tp > 1:
            causes.append(WRONG_LOSS_OF_A_CUT_HEAD_CAUSE)
        if self._stages:
            causes.append(OTHER_TARGETS_CAUSE)
        return "; or ".join(causes)

    def _explain_wrong_attention(self, evidence: TokenEvidence) -> str:
        """The cause of the first output that differs, which is of an attention."""
        causes = []
        if self._stages:
            if evidence.has_right_input and evidence.has_documents_of_first_forward():
                return FIRST_MASKS_CAUSE
            causes += self._stages.list_causes_of_wrong_attention(evidence)
        if self._layout.pads_sequences:
            causes.append(WRONG_PADDING_CAUSE)
        if self._tp > 1:
            causes.append(WRONG_CUT_CAUSE)
        if self._tp == 1 or self._cp > 1:
            causes.append(AttentionDiagnosis(evidence, self._layout).explain())
        return "; or ".join(causes)

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
        wrong_output = ""
        if reroute.phase == "step-0":
            wrong_output = self._outputs.find_first_wrong(0)
        causes = [self._experts.explain_misrouted_token(reroute, wrong_output)]
        if reroute.phase == "step-0":
            unequal = self._outputs.explain_unequal_replicas(0)
            causes += [unequal] if unequal else self._list_forward_mistakes_of_layout()
        # Attention comes before experts of its block, and agrees.
        if wrong_output.endswith(".moe"):
            causes = [cause for cause in causes if cause != WRONG_SEQUENCE_CUT_CAUSE]
        return "; or ".join(causes)

    def _list_forward_mistakes_of_layout(self, wrong_output: str = "") -> list[str]:
        """The mistakes of a first forward that this layout makes possible.

        `wrong_output`: the first module that makes something else, if one is known.
        """
        causes = []
        if self._stages:
            causes.append(WRONG_MICROBATCH_CAUSE)
        if self._layout.pads_sequences:
            causes.append(WRONG_PADDING_CAUSE)
        if self._tp > 1:
            causes.append(WRONG_CUT_CAUSE)
        if self._cp > 1:
            is_in_block = any(map(str.isdecimal, wrong_output.split(".")))
            causes.append(
                WRONG_SEQUENCE_CUT_CAUSE
                if is_in_block or not wrong_output
                else WRONG_SEQUENCE_PLACES_CAUSE
            )
        return causes

    def explain_wrong_grad_norm(self, norm: float, step: int) -> str:
        if not math.isfinite(norm):
            return NOT_FINITE_CAUSE
        return self._norms.explain(norm, step)

    def explain_wrong_tensor(
        self, label: str, kind: str, name: str, off: Sequence[str], ranks: Sequence[int], step: int
    ) -> str:
        # Before values: parts that do not make the tensor are not comparable with it.
        if self._compared.tensor_coverage_gap(kind, name):
            if not self._compared.find_ranks_holding_parameter(name):
                return MISSING_STATE_CAUSE
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
        is_finite = all(map(math.isfinite, squares))
        if label == "initial weight":
            return self._explain_wrong_initial_weight(off, is_finite=is_finite)
        if not is_finite:
            return NOT_FINITE_CAUSE
        if label == "buffer":
            return self._explain_wrong_buffer(kind, name)
        if label == "update":
            return self._updates.explain(name, step, ranks)
        if label == "gradient" and not self._trace.sizes[kind][name]:
            return "in one process it has no gradient: it is frozen, or has no part in the loss"
        if buffer := self.find_wrong_forward_buffer():
            return CHANGED_BUFFER_CAUSE.format(name=buffer)
        return self._gradients.explain(kind, name, off, ranks, step)

    def _explain_wrong_initial_weight(self, off: Sequence[str], *, is_finite: bool) -> str:
        if not is_finite:
            return UNDRAWN_PARTS_CAUSE if self._is_filled_in_parts() else NOT_FINITE_CAUSE
        if self._are_all_of_several_blocks(off):
            return WRONG_BLOCKS_CAUSE
        if self._is_filled_in_parts():
            return FILLED_PARTS_CAUSE
        return "initial weights depend on the layout"

    def _is_filled_in_parts(self) -> bool:
        """True if ranks have built the module without memory, and filled their parts."""
        return any(observation.get("is_filled_in_parts") for observation in self._observations)

    def _are_all_of_several_blocks(self, names: Sequence[str]) -> bool:
        """True if each of `names` is of several blocks on every rank, as fused matrices are that tp
        cuts, and the model has others, too."""
        names_on_ranks = {
            name for observation in self._observations for name in observation["boxes"]
        }
        return names_on_ranks > set(names) and all(
            len(observation["boxes"].get(name, ())) > 1
            for name in names
            for observation in self._observations
        )

    def _explain_wrong_buffer(self, kind: str, name: str) -> str:
        if name in self._trace.moved:
            return CHANGED_BUFFER_CAUSE.format(name=name)
        cause = (
            "gradients and weights agree, so a rank moves it by its own share of the batch, or"
            " not at all"
        )
        holders = self._compared.find_ranks_holding_parameter(name)
        if len({self._compared.squared_tensor_error(kind, name, rank) for rank in holders}) == 1:
            cause = EQUAL_BUFFERS_CAUSE
        return self._experts.explain_wrong_router_bias(name) or cause

    def explain_wrong_evaluation(self, rank: int) -> str:
        """The cause of the loss that an evaluation has on `rank`, of weights that agree."""
        cause = (
            "weights and buffers agree, so a forward without gradients does something else than"
            " one with them"
        )
        for observation in self._observations:
            for name in observation.get("training_in_evaluation", ()):
                return (
                    f"{cause}: modules are in training mode in an evaluation, {name or 'the model'}"
                    " the first, and drop, or move statistics"
                )
        if self._observations[rank]["num_evaluated"] != self._trace.num_evaluated:
            return f"{cause}: {self.explain_wrong_evaluated_targets(rank)}"
        return cause

    def explain_wrong_evaluated_targets(self, rank: int) -> str:
        return (
            f"an evaluation counts {self._observations[rank]['num_evaluated']} targets, not"
            f" {self._trace.num_evaluated}: microbatches are left out, count twice or weigh alike"
            " whatever they have, or ranks that read the same samples count each"
        )

    def explain_wrong_expert_load(
        self, loads: Sequence[Sequence[int] | None], rank: int, expected: Sequence[int]
    ) -> str:
        """The cause of the load (choices of each expert, then those that were dropped) of `rank`
        while routers choose as in one process; `loads` of all ranks, None where one has not the
        router."""
        load = loads[rank]
        assert load is not None, f"rank {rank} has no such router"
        if list(load[:-1]) == list(expected[:-1]):
            return (
                f"{load[-1]:g} choices are said to be dropped for want of room, and"
                f" {expected[-1]:g} were; those that came are counted rightly"
            )
        if cause := self._experts.explain_reordered_load(load, expected):
            return cause
        counted, came = sum(load[:-1]), sum(expected[:-1])
        if cause := self._experts.explain_load_of_axis(loads, expected):
            return f"{counted} choices were counted and {came} were made: {cause}"
        if self._dp > 1 and counted * self._dp == came:
            return (
                f"{counted} choices were counted and {came} were made: only those of one rank, so"
                " that biases of routers are moved by other counts than the whole batch's"
            )
        return (
            f"{counted} choices were counted and {came} were made: the load is not that of the"
            " whole batch, for counts of some ranks or microbatches are missing, or counted twice"
        )


def _is_attention(module: str) -> bool:
    """True for a name like blocks.0.self_attn, and not for that of a norm before it."""
    own_name = module.rpartition(".")[2]
    return "att" in own_name and "norm" not in own_name


def _average_or_nan(values: Sequence[float]) -> float:
    if not values:
        return math.nan
    return sum(values) / len(values)


def _is_told_from(reference: float, loss: float, mean: float) -> bool:
    """True if the loss is `mean` but for rounding, and that is not as near to the reference."""
    return is_nearly_equal(loss, mean) and abs(loss - mean) <= 1e-2 * abs(loss - reference)
