"""The choice of a layout: the candidates, the memory each takes, the chosen one, and why the rest
is not chosen.

Torch-free. What the job fixes is chosen, else the simplest that fits; a refusal says what would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from phalanx.core.errors import LayoutError
from phalanx.core.units import format_bytes
from phalanx.job.checks.experts import check_experts_have_no_conflicts, find_ranks_for_experts
from phalanx.job.costs import ModelCosts
from phalanx.job.nearest import list_divisors
from phalanx.job.schema import Job
from phalanx.plan.choice import Choice
from phalanx.plan.communication import cp_buffer_bytes, ep_buffer_bytes
from phalanx.plan.layout import Layout
from phalanx.plan.leaf_tree import LAYOUT_FREE
from phalanx.plan.memory import activation_bytes, staging_bytes
from phalanx.plan.memory_phases import find_peak_phase, predict_rank_memory_by_phase
from phalanx.plan.pipeline.memory import (
    predict_pipeline_memory_by_phase,
    predict_rank_activation_bytes,
    predict_rank_staging_bytes,
)
from phalanx.plan.pipeline.pipeline_plan import Pipeline
from phalanx.plan.plan import Candidate
from phalanx.plan.recompute import suggest_recompute
from phalanx.plan.smaller_work import list_smaller_works
from phalanx.plan.workload import Workload, shard_shape

# Bytes by category at the highest moment of each phase of a step.
BytesByPhase = dict[str, dict[str, int]]


class NoFitError(LayoutError):
    """No layout that the job allows fits the memory of its ranks.

    `needed_bytes`: of one rank of the layout that needs least; `capacity_bytes`: what a rank may
    fill.
    """

    def __init__(
        self, what: str, *, needed_bytes: int = 0, capacity_bytes: int = 0, **words: str | None
    ) -> None:
        super().__init__(what, **words)
        self.needed_bytes, self.capacity_bytes = needed_bytes, capacity_bytes


@dataclass(frozen=True)
class CandidateEvaluator:
    """Evaluates candidate layouts: the memory each takes for a model and a rank's work, on ranks
    that may fill `capacity_bytes` each."""

    shape: ModelCosts
    work: Workload
    num_ranks: int
    capacity_bytes: int
    device: str
    pipeline: Pipeline | None = None
    _phases_by_rank: dict[tuple[int, int], tuple[BytesByPhase, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def model_parallel_size(self) -> int:
        """Ranks that work on the same samples."""
        return self.work.cp * self._num_ranks_per_model

    @property
    def _num_ranks_per_model(self) -> int:
        if self.pipeline is None:
            return self.work.tp
        return self.work.tp * self.pipeline.num_ranks

    @property
    def num_ranks_per_model_part(self) -> int:
        """Ranks that hold the same part of the model."""
        return self.num_ranks // self._num_ranks_per_model

    def staging_bytes(self) -> int:
        """Bytes of the copy that a rank's saves are written from."""
        shape = shard_shape(self.shape, self.work.tp, self.work.rules)
        if self.pipeline is not None:
            return max(
                predict_rank_staging_bytes(
                    shape, self.work, self.pipeline, self.num_ranks_per_model_part
                )
            )
        return staging_bytes(shape, self.work, self.num_ranks_per_model_part)

    def predict_host_bytes(self, candidate: Candidate) -> int:
        """Bytes of one rank in the host's memory beside those of its GPU, in the phase of a step
        that has most: states and activations that wait there, and the copy that saves are written
        from. Without a GPU 0."""
        if self.device == "cpu":
            return 0
        evaluator_of_host = replace(self, device="cpu")
        arguments = candidate.zero_stage, candidate.layout.gradient_reduction_layout.dp_shard
        kinds = ["parameters", "gradients", "optimizer"]
        if self.work.offloads_activations:
            kinds.append("activations")
        # Of a pipeline rank by rank: the one that fills the GPU most may not be that of the host.
        num_bytes = max(
            sum(on_host[phase][kind] - on_device[phase][kind] for kind in kinds)
            for on_host, on_device in zip(
                evaluator_of_host._predict_phases_by_rank(*arguments),
                self._predict_phases_by_rank(*arguments),
                strict=True,
            )
            for phase in on_host.keys() & on_device.keys()
        )
        if self.work.copies_state:
            num_bytes += self.staging_bytes()
        return num_bytes

    def predict_memory(self, zero_stage: int, shards: int) -> dict[str, int]:
        """Bytes of one rank by category; of a pipeline, those of the rank that needs most."""
        if self.pipeline is not None:
            return max(
                self.predict_memory_by_pipeline_rank(zero_stage, shards),
                key=lambda memory: sum(memory.values()),
            )
        phases = self.memory_by_phase(zero_stage, shards)
        return phases[find_peak_phase(phases)]

    def memory_by_phase(self, zero_stage: int, shards: int) -> BytesByPhase:
        """Bytes of one rank by category at the highest moment of each phase of a step; of a
        pipeline, those of the rank that needs most."""
        by_rank = self._predict_phases_by_rank(zero_stage, shards)
        return max(by_rank, key=lambda phases: sum(phases[find_peak_phase(phases)].values()))

    def _predict_phases_by_rank(self, zero_stage: int, shards: int) -> tuple[BytesByPhase, ...]:
        """The phases of each rank of a pipeline; without one, of any rank."""
        # A plan asks for the phases, the peak and the ranks of one candidate, one after the other.
        key = (zero_stage, shards)
        if key not in self._phases_by_rank:
            self._phases_by_rank[key] = self._compute_phases_by_rank(*key)
        return self._phases_by_rank[key]

    def _compute_phases_by_rank(self, zero_stage: int, shards: int) -> tuple[BytesByPhase, ...]:
        if self.pipeline is None:
            phases = predict_rank_memory_by_phase(
                self.shape, self.work, zero_stage, shards, self.device, self.num_ranks
            )
            return (phases,)
        return predict_pipeline_memory_by_phase(
            self.shape,
            self.work,
            self.pipeline,
            zero_stage,
            shards,
            self.device,
            self.num_ranks_per_model_part,
        )

    def _add_communication_buffers(self, memories: list[dict[str, int]]) -> list[dict[str, int]]:
        """`memories` with the buffers of cp and ep in their communication."""
        shape = shard_shape(self.shape, self.work.tp, self.work.rules)
        buffers = round(cp_buffer_bytes(shape, self.work) + ep_buffer_bytes(shape, self.work))
        if not buffers:
            return memories
        return [
            memory | {"communication": memory["communication"] + buffers} for memory in memories
        ]

    def predict_memory_by_pipeline_rank(
        self, zero_stage: int, shards: int
    ) -> tuple[dict[str, int], ...]:
        """Bytes by category of each rank of a pipeline."""
        assert self.pipeline is not None
        by_rank = self._predict_phases_by_rank(zero_stage, shards)
        peaks = [phases[find_peak_phase(phases)] for phases in by_rank]
        return tuple(self._add_communication_buffers(peaks))

    def build_pipeline_with_memory(self, candidate: Candidate) -> Pipeline | None:
        """The pipeline with the memory that its ranks need under `candidate`; None if pp is 1."""
        if self.pipeline is None:
            return None
        memory = self.predict_memory_by_pipeline_rank(
            candidate.zero_stage, candidate.layout.gradient_reduction_layout.dp_shard
        )
        return replace(self.pipeline, rank_memory=memory)

    def predict_activation_bytes(self, work: Workload) -> float:
        """Bytes of activations of one rank that does `work`; of a pipeline, those of the rank that
        has most."""
        shape = shard_shape(self.shape, work.tp, work.rules)
        if self.pipeline is not None:
            return max(predict_rank_activation_bytes(shape, work, self.pipeline))
        return activation_bytes(shape, work)

    def has_room_for(self, memory: dict[str, int]) -> bool:
        return sum(memory.values()) <= self.capacity_bytes

    def build_candidate(self, name: str, zero_stage: int, layout: Layout) -> Candidate:
        shards = layout.gradient_reduction_layout.dp_shard
        phases = self.memory_by_phase(zero_stage, shards)
        memory = self.predict_memory(zero_stage, shards)
        return Candidate(name, zero_stage, layout, memory, self.has_room_for(memory), phases=phases)


def evaluate_candidates(
    job: Job, evaluator: CandidateEvaluator, *, weighs_alternatives: bool = True
) -> list[Candidate]:
    """The candidate layouts of a job, from the simplest to the one that shards most; without
    `weighs_alternatives` only the one that the job fixes, where it fixes one."""
    layouts = _list_candidate_layouts(job, evaluator)
    if not weighs_alternatives:
        fixed = _find_fixed_zero_stage(job, layouts[0][2])
        if fixed is not None:
            layouts = [layout for layout in layouts if layout[1] == fixed.value]
    return [evaluator.build_candidate(*layout) for layout in layouts]


def _list_candidate_layouts(
    job: Job, evaluator: CandidateEvaluator
) -> list[tuple[str, int, Layout]]:
    """(name, ZeRO stage, layout) of each candidate of a job."""
    tp, cp = evaluator.work.tp, evaluator.work.cp
    pp = evaluator.model_parallel_size // (cp * tp)
    shares = evaluator.num_ranks // (pp * cp * tp)
    # One rank has each part of the model: there is nobody to share state or gradients with.
    if shares == 1 and cp == 1:
        name = "one"
        if pp > 1:
            name = "pp"
        elif tp > 1:
            name = "tp"
        return [(name, 0, Layout(pp=pp, tp=tp))]
    shard = job.parallel.dp_shard or shares // job.parallel.degrees.dp_replicate
    if shard == 1 and cp == 1:
        # Nothing is sharded; what sharding over all ranks would take is said all the same.
        shard = shares
    layouts = []
    ep = evaluator.work.ep
    # The simplest first: `choose_candidate` takes the first that fits.
    for name, stage in (("ddp", 0), ("zero1", 1), ("zero2", 2), ("zero3", 3)):
        if stage > 0 and job.train.deterministic == LAYOUT_FREE:
            continue  # gradients are added whole
        if stage == 1 and ep > 1:
            continue  # experts are reduced over other ranks than the rest
        split = shard
        if stage == 0:
            # Whole copies need no dp_shard but that which ep folds over.
            split = job.parallel.degrees.num_expert_shards
        layout = Layout(pp=pp, dp_replicate=shares // split, dp_shard=split, cp=cp, tp=tp, ep=ep)
        layouts.append((name, stage, layout))
    return layouts


def explain_candidate(
    candidate: Candidate, chosen: Candidate, capacity_bytes: int, reason: str
) -> Candidate:
    """`candidate` with the reason why it was chosen, which is `reason`, or why it was not."""
    if candidate is chosen:
        return replace(candidate, chosen=True, why=reason)
    if not candidate.fits:
        short = candidate.total_bytes - capacity_bytes
        return replace(candidate, why=f"does not fit: {format_bytes(short)} too much")
    if candidate.zero_stage > chosen.zero_stage:
        saved = chosen.total_bytes - candidate.total_bytes
        why = "no smaller here, for more communication"
        if saved > 0:
            why = f"saves {format_bytes(saved)} that are not needed, for more communication"
        return replace(candidate, why=why)
    return replace(candidate, why="the job asks for another")


def choose_candidate(
    job: Job,
    candidates: Sequence[Candidate],
    evaluator: CandidateEvaluator,
    *,
    advises: bool = True,
) -> tuple[Candidate, list[str]]:
    """The layout that the job fixes, else the first that fits in the order one, ddp, zero1, zero2,
    zero3; and the reasons.

    Raises LayoutError where nothing does that the job allows, with what would where it `advises`.
    """
    allowed, reasons = _filter_candidates_by_job(job, candidates)
    for candidate in allowed:
        if candidate.fits:
            if len(allowed) > 1:
                reasons.append(
                    f"{candidate.name}: the simplest that fits"
                    f" ({format_bytes(candidate.total_bytes)} of the"
                    f" {format_bytes(evaluator.capacity_bytes)} per rank that a plan may fill)"
                )
            return candidate, reasons
    raise _build_no_fit_error(job, allowed, candidates, evaluator, advises=advises)


def _filter_candidates_by_job(
    job: Job, candidates: Sequence[Candidate]
) -> tuple[list[Candidate], list[str]]:
    """The candidates that the job leaves, and what is to be said where it leaves one."""
    runnable = [candidate for candidate in candidates if _can_offload(job, candidate)]
    if not runnable:
        _require_offloadable_candidate(job, candidates[0])
    choice = _find_fixed_zero_stage(job, candidates[0].layout)
    if choice is None:
        return runnable, []
    # The stage is always among them: zero1 beside ep, which is left out,
    # `check_model_parallel_degrees` refused.
    (only,) = (candidate for candidate in candidates if candidate.zero_stage == choice.value)
    _require_offloadable_candidate(job, only)
    return [only], [choice.why or f"{only.name} over {only.layout}, as the job says"]


def _find_fixed_zero_stage(job: Job, layout: Layout) -> Choice[int] | None:
    """The ZeRO stage that the job's keys leave as the only one, with a reason if it is another
    than that the job says so; None if several are left."""
    parallel, shares = job.parallel, layout.data_parallel_size
    shard, replicate, stage = parallel.dp_shard, parallel.dp_replicate, parallel.zero_stage
    if layout.cp > 1 and stage:
        return Choice(stage, "")  # cp alone has ranks enough to shard over
    if shares == 1:
        return None
    if shard or stage or (replicate is not None and replicate < shares):
        if (shard or shares // parallel.degrees.dp_replicate) == 1:
            return Choice(0, "")
        return Choice(stage or 3, "")
    if replicate == shares:
        return Choice(0, "ddp, as the job says")
    if parallel.compress != "none":
        return Choice(0, "ddp: parallel.compress is for it")
    return None


def _can_offload(job: Job, candidate: Candidate) -> bool:
    """True where a layout has what parallel.offload moves: whole parameters have no shards that
    could wait on the host."""
    return candidate.zero_stage >= 2 or not job.parallel.has_parameters_on_host


def _require_offloadable_candidate(job: Job, candidate: Candidate) -> None:
    if not _can_offload(job, candidate):
        raise LayoutError(
            "parallel.offload=parameters needs shards, and"
            f" {candidate.name} holds every parameter whole",
            fix=(
                "set parallel.zero_stage=2 or 3 over two ranks or more, or"
                " parallel.offload=optimizer"
            ),
        )


def _build_no_fit_error(
    job: Job,
    allowed: Sequence[Candidate],
    candidates: Sequence[Candidate],
    evaluator: CandidateEvaluator,
    *,
    advises: bool,
) -> NoFitError:
    """The error when no allowed candidate fits: what is missing, for what, and what would fit."""
    # The layout that comes nearest: what the message says is what is missing at least.
    least = min(allowed, key=lambda candidate: candidate.total_bytes)
    largest = max(least.predicted_bytes, key=lambda part: least.predicted_bytes[part])
    fix = None
    if advises:
        fix = _suggest_what_fits(job, least, candidates, evaluator)
    return NoFitError(
        f"{least.name} needs {format_bytes(least.total_bytes)} per rank and"
        f" {format_bytes(evaluator.capacity_bytes)} are there",
        why=f"the largest part is {largest}, {format_bytes(least.predicted_bytes[largest])}",
        fix=fix,
        needed_bytes=least.total_bytes,
        capacity_bytes=evaluator.capacity_bytes,
    )


def _suggest_what_fits(
    job: Job, least: Candidate, candidates: Sequence[Candidate], evaluator: CandidateEvaluator
) -> str:
    """What would fit where no allowed candidate does, of which `least` comes nearest."""
    fitting = [candidate for candidate in candidates if candidate.fits]
    if evaluator.capacity_bytes == 0:
        # `Headroom.capacity` ends at 0: then no layout fits, and no change of the model helps.
        return "use fewer ranks: interpreter and torch alone fill what each of them has"
    if fitting:
        return f"{fitting[0].name} would fit"
    # From what changes the job least to what changes the machine.
    return (
        _suggest_recompute_that_fits(least, evaluator)
        or suggest_ep_degree(job, evaluator, least)
        or _suggest_smaller_work(least, evaluator)
        or _suggest_more_ranks(evaluator)
    )


def _suggest_recompute_that_fits(candidate: Candidate, evaluator: CandidateEvaluator) -> str:
    """The mode of recompute that would make a candidate fit, or ""."""
    return suggest_recompute(
        evaluator.shape,
        evaluator.work,
        lambda work: _fits_with(work, candidate, evaluator),
        evaluator.predict_activation_bytes,
    )


def _suggest_smaller_work(candidate: Candidate, evaluator: CandidateEvaluator) -> str:
    """Keys that would make a candidate fit, counted with them, as a fix; "" if none does."""
    works = list_smaller_works(
        evaluator.work, evaluator.shape.num_layers, is_pipeline=evaluator.pipeline is not None
    )
    for keys, work in works:
        if _fits_with(work, candidate, evaluator):
            return f"set {keys}"
    return ""


def _fits_with(work: Workload, candidate: Candidate, evaluator: CandidateEvaluator) -> bool:
    memory = replace(evaluator, work=work).predict_memory(
        candidate.zero_stage, candidate.layout.gradient_reduction_layout.dp_shard
    )
    return evaluator.has_room_for(memory)


def _suggest_more_ranks(evaluator: CandidateEvaluator) -> str:
    """The number of ranks, doubled until zero3 fits if each has as much memory as these have, as a
    fix; or what stays too large."""
    memory: dict[str, int] = {}
    # Up to 32,768 times as many: what does not fit then is not a matter of ranks.
    for doubled in range(1, 16):
        more = evaluator.num_ranks * 2**doubled
        # Ranks of cp count as shards, as in `Layout.gradient_reduction_layout`.
        memory = replace(evaluator, num_ranks=more).predict_memory(
            3, more // evaluator.model_parallel_size * evaluator.work.cp
        )
        if evaluator.has_room_for(memory):
            return (
                f"use more ranks ({more:,} with as much memory each: zero3 fits there) or a smaller"
                " model"
            )
    largest = max(memory, key=lambda part: memory[part])
    return (
        f"use a smaller model or ranks with more memory: more ranks do not help, over {more:,} of"
        f" them {largest} alone take {format_bytes(memory[largest])}"
    )


def list_ep_degrees(job: Job, evaluator: CandidateEvaluator, candidate: Candidate) -> Iterator[int]:
    """The degrees of ep above 1 that a candidate could have, in ascending order."""
    experts = evaluator.shape.experts
    # zero1 and ep exclude each other, see `evaluate_candidates`.
    if evaluator.work.ep > 1 or experts is None or candidate.zero_stage == 1:
        return
    # What is in the way of ep is in the way of any degree above 1.
    spread = job.model_copy(update={"parallel": job.parallel.model_copy(update={"ep": 2})})
    if check_experts_have_no_conflicts.run(spread):
        return
    ranks = find_ranks_for_experts(job, evaluator.num_ranks)
    if ranks is not None:
        yield from (
            degree for degree in list_divisors(math.gcd(ranks[0], experts.count)) if degree > 1
        )


def suggest_ep_degree(job: Job, evaluator: CandidateEvaluator, candidate: Candidate) -> str:
    """The smallest ep that would make a candidate fit, as a fix; "" if none does."""
    for degree in list_ep_degrees(job, evaluator, candidate):
        spread = replace(evaluator, work=replace(evaluator.work, ep=degree))
        if evaluator.has_room_for(
            spread.predict_memory(
                candidate.zero_stage, candidate.layout.gradient_reduction_layout.dp_shard
            )
        ):
            assert evaluator.shape.experts is not None
            num_of_rank = evaluator.shape.experts.count // degree
            return f"set parallel.ep={degree}: each rank then has {num_of_rank} of the experts"
    return ""
