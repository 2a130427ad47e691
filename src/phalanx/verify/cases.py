"""Which layouts a model is judged in, each with its plan, or why it is refused. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.core.errors import LayoutError
from phalanx.core.registry import list_modules_of_registry
from phalanx.job.checks.pipeline import check_pipeline_has_no_conflicts
from phalanx.job.checks.training import check_layout_free_is_proven
from phalanx.job.costs import ModelCosts
from phalanx.job.model import build_model_shape
from phalanx.job.schema import Job, Parallel
from phalanx.plan.cluster import Cluster
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.verify import combined_layouts, contexts, pipelines
from phalanx.verify.number_types import FP8
from phalanx.verify.verified_job import NUM_MICROBATCHES, SHRUNK_VOCAB_SIZE, build_job_from_dict

# No layouts: runs through the trainer have names of their own, which begin so.
TRAINER_ROW_PREFIX = "trainer-"
# No layouts: phalanx's own module in one process, beside a second implementation of it.
PLAIN, HUGGING_FACE = "plain", "hugging-face"
# Neither: parts of training that no layout runs, in one process beside their definitions.
DEFINITIONS = "definitions"
ONE_PROCESS_ROWS = (PLAIN, HUGGING_FACE, DEFINITIONS)
# Of the rows that have several steps' microbatches in one; and what their names end with.
MANY_MICROBATCHES = 3 * NUM_MICROBATCHES
MANY_MICROBATCHES_SUFFIX = f"-{MANY_MICROBATCHES}-microbatches"
# Of the rows whose steps are one microbatch; and what their names end with.
ONE_MICROBATCH_SUFFIX = "-1-microbatch"
MICROBATCH_SIZE = "train.micro_batch_size"
ONE_MICROBATCH_OVERRIDE: dict[str, Any] = {MICROBATCH_SIZE: "a rank's share of the batch"}
# Ways of tensor parallelism that change which sums are made, and not how they are rounded.
CHUNKS_OF_ODD_SEQUENCE_SUFFIX, CHUNKS_OF_RECOMPUTED_SUFFIX = "-odd-sequence-chunks", "-chunks-full"
# As large as several steps: how large these are is known when there is a job.
LARGER_BATCH = "train.global_batch_size"
JOINED_STEPS_OVERRIDE: dict[str, Any] = {LARGER_BATCH: "several steps"}
OPTION_KEYS = (
    *("accumulate", "keep_whole_below", "prefetch", "offload", "static_graph"),
    *("unused_parameters", "blocks_per_unit"),
)

_FLOAT64_SUFFIXES = (
    *(MANY_MICROBATCHES_SUFFIX, ONE_MICROBATCH_SUFFIX, combined_layouts.OPTIONS_SUFFIX),
    *(CHUNKS_OF_ODD_SEQUENCE_SUFFIX, CHUNKS_OF_RECOMPUTED_SUFFIX),
)
_DEFAULT_OPTIONS = {key: Parallel.model_fields[key].default for key in OPTION_KEYS}

AXIS_KEYS = (
    *("dp_replicate", "dp_shard", "zero_stage", "tp", "sequence_parallel"),
    *(*contexts.CONTEXT_KEYS, *combined_layouts.EXPERT_KEYS, *pipelines.PIPELINE_KEYS),
)
_DEFAULT_AXES = {key: Parallel.model_fields[key].default for key in AXIS_KEYS}


@dataclass(frozen=True)
class Case:
    """One layout. `plan` is None where it is refused, and `refused` says why."""

    name: str
    parallel: Mapping[str, Any]
    plan: Plan | None
    refused: str = ""
    other_name: str = ""
    other_plan: Plan | None = None
    """Of a run through the trainer: the layout in which it is resumed, too."""


def is_judged_in_float64_only(name: str) -> bool:
    """True for what is judged in float64 alone: it is no layout, or a layout whose rounding other
    rows judge."""
    return (
        name in ONE_PROCESS_ROWS
        or name.startswith(TRAINER_ROW_PREFIX)
        or name.endswith(_FLOAT64_SUFFIXES)
    )


def convert_case_to_fp8(case: Case, *, has_torchao: bool) -> Case:
    """A case in bf16 as one in fp8, which ranks on CPUs emulate; refused where `has_torchao` is
    False, which does the layouts' products."""
    if case.plan is None:
        return case
    if not has_torchao:
        refused = "precision.compute=fp8 is judged with torchao, which is not installed"
        return replace(case, plan=None, refused=refused)
    return replace(case, plan=replace(case.plan, precision="fp8"))


def list_layouts_for_narrow_dtypes(
    layouts: Mapping[str, Mapping[str, Any]], dtype: str
) -> list[tuple[str, Mapping[str, Any]]]:
    """The layouts that are judged in a narrow type: all that do not compress gradients, which
    rounds them more; in fp8 those without tp and pp, with which no job trains in it."""
    narrow: list[tuple[str, Mapping[str, Any]]] = []
    for name, axes in layouts.items():
        is_cut = axes.get("tp", 1) > 1 or axes.get("pp", 1) > 1
        if dtype == FP8 and is_cut:
            continue
        if "compress" not in axes and not is_judged_in_float64_only(name):
            narrow.append((name, axes))
    return narrow


def select_axes_set_by_job(job: Job) -> dict[str, Any]:
    """The axes that the job sets."""
    keys = (
        *AXIS_KEYS,
        "tp_chunks",
        "compress",
        "compress_rank",
        "compress_fraction",
        *OPTION_KEYS,
        *pipelines.MODEL_STAGE_KEYS,
    )
    settings = {key: getattr(job.parallel, key) for key in keys}
    return {
        key: value for key, value in settings.items() if value != Parallel.model_fields[key].default
    }


def list_gradient_compression_layouts(num_ranks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """DDP with each way of compressing gradients, as `verify` names them."""
    if num_ranks > 1:
        for kind in list_modules_of_registry("phalanx.parallel.hooks"):
            yield f"ddp-{kind}", {"dp_replicate": num_ranks, "compress": kind}


def list_all_layouts(
    num_ranks: int, *, experts: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every layout of exactly `num_ranks` ranks that can be named today; with `experts` those
    that spread them, too."""
    for tp in (d for d in range(1, num_ranks + 1) if num_ranks % d == 0):
        for name, axes in _list_data_parallel_layouts(num_ranks // tp):
            if tp == 1:
                yield name, axes
                continue
            prefix = "" if name == "one" else f"{name}-"
            yield f"{prefix}tp{tp}", {**axes, "tp": tp}
            if name == "one":
                yield f"tp{tp}-whole-sequence", {**axes, "tp": tp, "sequence_parallel": False}
                yield f"tp{tp}-chunks", {**axes, "tp": tp, "tp_chunks": 3}
                both = {"sequence_parallel": False, "tp_chunks": 3}
                yield f"tp{tp}-whole-sequence-chunks", {**axes, "tp": tp, **both}
                yield f"tp{tp}-selective", {**axes, "tp": tp, "train.recompute": "selective"}
                yield f"tp{tp}-odd-sequence", {**axes, "tp": tp, **pipelines.ODD_SEQUENCE_OVERRIDE}
                chunks = {**axes, "tp": tp, "tp_chunks": 3}
                yield (
                    f"tp{tp}{CHUNKS_OF_ODD_SEQUENCE_SUFFIX}",
                    {**chunks, **pipelines.ODD_SEQUENCE_OVERRIDE},
                )
                yield f"tp{tp}{CHUNKS_OF_RECOMPUTED_SUFFIX}", {**chunks, "train.recompute": "full"}
    if num_ranks == 1:
        yield "one-offload-optimizer", {"offload": "optimizer"}
        yield f"one{MANY_MICROBATCHES_SUFFIX}", dict(JOINED_STEPS_OVERRIDE)
        yield f"one{ONE_MICROBATCH_SUFFIX}", dict(ONE_MICROBATCH_OVERRIDE)
        return
    yield from list_recompute_layouts(num_ranks)
    yield from list_data_parallel_variants(num_ranks)
    yield from contexts.list_context_parallel_layouts(num_ranks)
    yield from pipelines.list_pipeline_layouts(num_ranks)
    yield from combined_layouts.list_option_layouts(num_ranks)
    yield from combined_layouts.list_three_axis_layouts(num_ranks)
    if experts:
        yield from combined_layouts.list_expert_layouts(num_ranks)


def _list_data_parallel_layouts(num_ranks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    if num_ranks == 1:
        yield "one", {}
        return
    yield "ddp", {"dp_replicate": num_ranks}
    for stage in (1, 2, 3):
        yield f"zero{stage}", {"dp_shard": num_ranks, "zero_stage": stage}
    for replicas in (d for d in range(2, num_ranks) if num_ranks % d == 0):
        for stage in (1, 2, 3):
            axes = {
                "dp_replicate": replicas,
                "dp_shard": num_ranks // replicas,
                "zero_stage": stage,
            }
            yield f"hsdp{replicas}x{num_ranks // replicas}-zero{stage}", axes


RECOMPUTE_LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp-selective": {"train.recompute": "selective"},
    "ddp-every2": {"train.recompute": "every-k", "train.recompute_every": 2},
    "zero2-mixed": {"train.recompute": "mixed", "train.recompute_every": 2},
    "ddp-offload-activations": {"train.offload_activations": True},
    "zero3-full": {"train.recompute": "full"},
    "zero3-selective": {"train.recompute": "selective", "train.offload_activations": True},
    "zero3-sqrt": {"train.recompute": "sqrt"},
}


def list_recompute_layouts(num_ranks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each way of keeping less, in a layout or two.

    What goes by memory ("budget") only chooses among these.
    """
    for name, settings in RECOMPUTE_LAYOUTS.items():
        axes = {"dp_shard": num_ranks, "zero_stage": 3}
        if name.startswith("ddp"):
            axes = {"dp_replicate": num_ranks}
        yield name, {**axes, **settings}


def list_data_parallel_variants(num_ranks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ways of running data parallelism, several of those that have nothing to do with each other
    at a time."""
    zero = {stage: {"dp_shard": num_ranks, "zero_stage": stage} for stage in (1, 2, 3)}
    yield "ddp-static", {"dp_replicate": num_ranks, "static_graph": True}
    yield f"ddp{MANY_MICROBATCHES_SUFFIX}", {"dp_replicate": num_ranks, **JOINED_STEPS_OVERRIDE}
    yield f"ddp{ONE_MICROBATCH_SUFFIX}", {"dp_replicate": num_ranks, **ONE_MICROBATCH_OVERRIDE}
    for stage in (1, 3):
        yield f"zero{stage}{ONE_MICROBATCH_SUFFIX}", {**zero[stage], **ONE_MICROBATCH_OVERRIDE}
    yield (
        "ddp-unused-offload-optimizer",
        {"dp_replicate": num_ranks, "unused_parameters": "allow", "offload": "optimizer"},
    )
    yield "zero1-offload-optimizer", {**zero[1], "offload": "optimizer"}
    yield (
        "zero2-accumulate-offload-optimizer",
        {**zero[2], "accumulate": "sharded", "offload": "optimizer"},
    )
    yield (
        "zero3-units2-whole",
        {**zero[3], "blocks_per_unit": 2, "keep_whole_below": 64, "prefetch": 1},
    )
    yield (
        "zero3-one-unit-offload-parameters",
        {**zero[3], "blocks_per_unit": "all", "offload": "parameters"},
    )
    for replicas in (d for d in range(2, num_ranks) if num_ranks % d == 0):
        axes = {"dp_replicate": replicas, "dp_shard": num_ranks // replicas, "zero_stage": 3}
        accumulate = {"accumulate": "sharded", "keep_whole_below": 64}
        name = f"hsdp{replicas}x{num_ranks // replicas}"
        yield f"{name}-accumulate", {**axes, **accumulate}
        once = {"zero_stage": 2, **ONE_MICROBATCH_OVERRIDE}
        yield f"{name}-zero2{ONE_MICROBATCH_SUFFIX}", {**axes, **once}
        # The first split alone: `_list_data_parallel_layouts` has all of them.
        break


def list_axes_without_one_microbatch_row(plan: Plan) -> list[str]:
    """The axes of the plan's layout that no row has whose steps are one microbatch: in these
    ranks talk as in the last of several. None of a pipeline, whose microbatches are many."""
    if plan.pipeline is not None:
        return []
    axes = [axis for axis in ("cp", "tp", "ep") if getattr(plan.layout, axis) > 1]
    if plan.layout.dp_replicate > 1 and plan.parallel.zero_stage == 1:
        axes.append("copies of the shards of ZeRO-1")
    return axes


def plan_layout_cases(
    job: Job,
    layouts: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    num_ranks: int,
    cluster: Cluster,
    shape: ModelCosts | None,
) -> list[Case]:
    """A plan for each layout and each way of recomputing the job asks for.

    Refused ones carry the reason.
    """

    def make_case_plan(body: Mapping[str, Any]) -> Plan:
        vocab_size = (shape.vocab_size if shape else 0) or SHRUNK_VOCAB_SIZE
        case_job = build_job_from_dict(body)
        for finding in check_layout_free_is_proven.run(case_job):
            raise LayoutError(finding.what)
        return make_plan(
            case_job,
            cluster=cluster,
            vocab_size=vocab_size,
            num_ranks=num_ranks,
            shape=shape,
        )

    num_blocks = (shape or build_model_shape(job, SHRUNK_VOCAB_SIZE)).num_layers
    cases = []
    for name, axes in layouts:
        parallel = pipelines.resolve_uneven_stage_blocks(axes, num_blocks)
        parallel = pipelines.resolve_odd_sequence_override(parallel, job.data.seq_len, num_ranks)
        num_microbatches = NUM_MICROBATCHES
        is_one_microbatch = parallel.pop(MICROBATCH_SIZE, None) is not None
        if is_one_microbatch:
            num_microbatches = 1
        if LARGER_BATCH in parallel:
            num_microbatches = MANY_MICROBATCHES
            num_joined = num_microbatches // NUM_MICROBATCHES
            parallel[LARGER_BATCH] = num_joined * job.train.global_batch_size
        body = job.to_json()
        # What a layout does not name has its default here, not what the job asks for.
        body["parallel"] |= _DEFAULT_AXES | {"compress": "none"} | _DEFAULT_OPTIONS
        # What a module needs, whatever the layout.
        body["parallel"]["unused_parameters"] = job.parallel.unused_parameters
        for key, value in parallel.items():
            section, _, name_of_key = key.rpartition(".")
            body[section or "parallel"][name_of_key] = value
        try:
            if "pp" in parallel:
                _refuse_settings_that_pipelines_lack(build_job_from_dict(body))
            else:
                # Without a pipeline there is no stage to hold modules of the model.
                body["parallel"] |= dict.fromkeys(pipelines.MODEL_STAGE_KEYS, ())
            # A first plan says how many microbatches there are, the second has their size.
            first = make_case_plan(body)
            count = pipelines.num_microbatches(first) or num_microbatches
            body["train"]["micro_batch_size"] = first.global_batch_size // (
                count * first.layout.data_parallel_size
            )
            if is_one_microbatch:
                parallel[MICROBATCH_SIZE] = body["train"]["micro_batch_size"]
            cases.append(Case(name, parallel, make_case_plan(body)))
        except LayoutError as error:
            cases.append(Case(name, parallel, None, str(error)))
    return cases


def _refuse_settings_that_pipelines_lack(job: Job) -> None:
    """Raises LayoutError for what the job asks for, and a pipeline cannot do."""
    for problem in check_pipeline_has_no_conflicts.run(job):
        raise LayoutError(f"{'.'.join(map(str, problem.path))} is {problem.what}", fix=problem.fix)
