"""One rank of a group that is judged: rank 0 writes the reference, then all go through the
layouts one by one."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from phalanx.core.block_sizes import (
    SHARED_MEMORY_SIZES,
    BlockSizes,
    restore_shared_memory_sizes,
    shrink_block_sizes,
    use_block_sizes,
)
from phalanx.core.errors import ExitCode, LayoutError
from phalanx.core.typed_json import JsonObject
from phalanx.job.schema import Job
from phalanx.launch.rank_link import RankLink
from phalanx.mesh.attention_kernels import using_unfused_attention_alone
from phalanx.mesh.compat import TORCH_VERSION
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.mesh.shared_memory.opening import current_transport, find_transport_in_place
from phalanx.parallel.compute.fp8 import Float8LinearLayers
from phalanx.parallel.executor import Batch
from phalanx.parallel.parallelize import discover_transforms
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.plan.rule_checks import (
    combine_and_check_rules,
    describe_few_cut_matrices,
    describe_unsharded_matrices,
)
from phalanx.verify.bands import describe_error_bands, summarize_error_bands
from phalanx.verify.batches import (
    cast_steps_to_dtype,
    choose_loss_chunk_tokens,
    make_global_microbatches,
    move_steps_to_device,
    select_rank_rows,
)
from phalanx.verify.cases import DEFINITIONS, LARGER_BATCH, ONE_PROCESS_ROWS, PLAIN
from phalanx.verify.compare_steps import GLOO_STEP, is_gloo_judged
from phalanx.verify.compressed_gradients import (
    choose_compression_tolerance,
    describe_compression_tolerance,
)
from phalanx.verify.definitions_row import compare_with_definitions
from phalanx.verify.hugging_face_row import compare_with_hugging_face, explain_no_hugging_face_row
from phalanx.verify.judged_layout import JudgedLayout
from phalanx.verify.keys_to_blame import name_keys_to_blame
from phalanx.verify.layout_run import LayoutResult, LayoutRun
from phalanx.verify.number_types import (
    FP8,
    near_tie_tolerance,
    parameter_dtype_of_row,
)
from phalanx.verify.payloads import VerifyCase, VerifyPayload
from phalanx.verify.pipelines import SHORTER_SEQUENCE
from phalanx.verify.plain_row import compare_with_plain_implementation, explain_no_plain_row
from phalanx.verify.rate_definition import RATES_JUDGED, find_wrong_rate
from phalanx.verify.read_files import recording_read_files
from phalanx.verify.reduction_types import (
    REDUCTIONS_JUDGED,
    TABLES_JUDGED,
    are_reduction_types_judged,
)
from phalanx.verify.references import ReferenceTraces
from phalanx.verify.rerouted import ReroutedReference, compare_routing_with_reference
from phalanx.verify.row import ROWS_FILE_NAME, Row
from phalanx.verify.scope import list_compared_quantities, list_quantities_not_compared
from phalanx.verify.taken_weights import judge_taken_weights
from phalanx.verify.trace_facts import TOLERANCE_OF_DTYPE, Trace
from phalanx.verify.trainer_cases import TrainerCase, make_trainer_job
from phalanx.verify.trainer_row import TrainerRowContext, compare_trainer_run
from phalanx.verify.verdict import LayoutComparator

# The first torch known to compile attention's backward in float64; 2.11 is known not to.
MIN_TORCH_FOR_COMPILED_FLOAT64 = (2, 13)
# Times, of one block: in training and evaluation, with and without gradients, for each module.
MAX_RECOMPILES = 64
# A quarter of a model, which a stage or a rank of tp may hold, still fills several.
MAX_BUCKETS_OF_MODEL = 32
FP8_NOTE = (
    "fp8 is emulated on the CPU: products of what was rounded are made in float32; kernels of GPUs"
    " are not run"
)
# Imported in the server, once, instead of in every rank: ranks are forks of it.
discover_transforms()

FILLED_IN_PARTS = (
    "weights that each rank fills part by part, as training does for large models, beside those of"
    " the module as one process builds it"
)
READ_IN_PLACE = "shards read in place in every second step, and sent as messages in the others"
READ_IN_PLACE_BESIDE_GLOO = (
    "shards read in place in steps 1 and 3, and sent as messages in the others"
)
OVER_GLOO = f"collectives over gloo in step {GLOO_STEP}, and through shared memory in the others"
FIRST_OVER_GLOO = (
    f"step {GLOO_STEP}, the first that differs, is the one over gloo, and it may be that way alone"
    " that is wrong: parallel.collectives=gloo judges all steps so"
)


def main(document: JsonObject, link: RankLink) -> int:
    """Compare layouts as one rank, of the JSON of a VerifyPayload.

    Returns 0 whatever the rows say.
    """
    run_verify_cases(VerifyPayload.from_json(document))
    return ExitCode.OK


def run_verify_cases(payload: VerifyPayload) -> None:
    """Append a row for each case of `payload` to run_dir/rows.jsonl. Collective."""
    job, run_dir = payload.job, payload.run_dir
    first = _find_plan_of_whole_sequences(payload)
    if payload.device == "cuda":
        # The CPU computes float32 in float32: so must what is compared with it.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with (
        recording_read_files(run_dir) as read_files,
        open_mesh(Layout(dp_replicate=payload.num_ranks), device=payload.device) as mesh,
    ):
        all_steps = make_global_microbatches(
            job, first, payload.data_dir, num_steps=payload.num_steps
        )
        # groupby joins neighbours only: the cases come type by type (`verify.drive`).
        for dtype, cases in itertools.groupby(payload.cases, key=lambda case: case.dtype):
            steps = cast_steps_to_dtype(all_steps, getattr(torch, parameter_dtype_of_row(dtype)))
            references = ReferenceTraces(mesh, run_dir, job, first, dtype, steps)
            for case in cases:
                row = _build_row_of_case(payload, case, references)
                # A refusal is every rank's: rows are counted by whoever reads them.
                if row is not None and mesh.rank == 0:
                    # As each case ends: the process that started us reads along.
                    read_files.write()
                    with open(run_dir / ROWS_FILE_NAME, "a") as file:
                        file.write(json.dumps(row.to_json()) + "\n")


def _find_plan_of_whole_sequences(payload: VerifyPayload) -> Plan:
    """The plan that the reference is of: what one process computes is of the job's own sequences,
    also where the layouts that come first have shorter ones, or a larger batch."""
    for case in payload.cases:
        if SHORTER_SEQUENCE not in case.parallel and LARGER_BATCH not in case.parallel:
            return case.plan
    plan, job = payload.cases[0].plan, payload.job
    if SHORTER_SEQUENCE in payload.cases[0].parallel:
        # Only models of tokens have these.
        plan = replace(plan, seq_len=job.data.seq_len)
    return replace(plan, global_batch_size=job.train.global_batch_size)


def _build_row_of_case(
    payload: VerifyPayload, case: VerifyCase, references: ReferenceTraces
) -> Row | None:
    """The row of a case on rank 0; on the others None, or the same one if it is refused.

    Collective, but for those of one process.
    """
    if case.other_plan is not None:
        return _verify_trainer_run(payload, case, case.other_plan, references)
    if case.name not in ONE_PROCESS_ROWS:
        return compare_layout_with_reference(payload.job, case, references, payload.model_name)
    if references.mesh.rank != 0:
        return None
    if case.name == DEFINITIONS:
        return compare_with_definitions(payload.asked_job or payload.job, payload.model_name)
    row = _verify_by_second_implementation(payload, case, references.steps)
    return replace(row, model=payload.model_name)


def _verify_by_second_implementation(
    payload: VerifyPayload, case: VerifyCase, steps: Sequence[Sequence[Batch]]
) -> Row:
    job, plan = payload.job, case.plan
    if case.name == PLAIN:
        reason = explain_no_plain_row(job, plan)
    else:
        reason = explain_no_hugging_face_row(job, plan)
    if reason:
        return _build_refused_row(case, payload.model_name, case.dtype, reason)
    if case.name == PLAIN:
        row = compare_with_plain_implementation(job, plan, steps, case.dtype)
        return name_keys_to_blame(row, job, plan, steps, case.dtype)
    return compare_with_hugging_face(job, plan, steps, payload.run_dir)


def _verify_trainer_run(
    payload: VerifyPayload, case: VerifyCase, other_plan: Plan, references: ReferenceTraces
) -> Row | None:
    """The row of a run through the trainer on rank 0, None on the others. Collective."""
    mesh = references.mesh
    trainer_place = TrainerRowContext(mesh, payload.run_dir, payload.data_dir, payload.model_name)
    run = TrainerCase(case.name, case.parallel, case.plan, case.other_name, other_plan)
    job = make_trainer_job(payload.job)
    row = compare_trainer_run(job, run, trainer_place)
    if row.ok and job.model.init_from is not None:
        row = judge_taken_weights(row, job, case.plan, payload.run_dir / case.name)
    if mesh.rank != 0:
        return None
    if row.ok is None:
        return row
    wrong_rate = find_wrong_rate(payload.asked_job or payload.job)
    if row.ok and wrong_rate is not None:
        row = replace(row, ok=False, first=wrong_rate)
    return replace(row, judged=(*row.judged, RATES_JUDGED))


def compare_layout_with_reference(
    job: Job, case: VerifyCase, references: ReferenceTraces, model_name: str
) -> Row | None:
    """The row of one layout on rank 0, None on the others. Collective."""
    began = time.monotonic()
    plan, dtype = case.plan, references.dtype
    reference, steps = references.find_trace_for_plan(plan)
    if isinstance(reference, str):
        return _build_refused_row(case, model_name, dtype, reference)
    if plan.compile and dtype == "float64" and TORCH_VERSION < MIN_TORCH_FOR_COMPILED_FLOAT64:
        return _build_refused_row(case, model_name, dtype, _describe_compiler_narrowing_float64())
    if plan.compile:
        _reset_compiler()
    tolerance = _choose_row_tolerance(plan, reference, dtype)
    run = LayoutRun(job, plan)
    try:
        computation = _compute_in_layout(run, plan, references, reference, steps, tolerance)
    except LayoutError as error:
        # Amid a schedule it may be about this rank alone, for which the others wait. Before it,
        # it is about the module, and the same on every rank.
        if run.has_unfinished_schedule:
            raise
        return _build_refused_row(case, model_name, dtype, str(error))
    # The others have the same observations, and nobody to tell.
    if references.mesh.rank != 0:
        return None
    row = _build_judged_row(case, computation, tolerance, job.optim.kind)
    return replace(row, model=model_name, wall_s=round(time.monotonic() - began, 3))


@dataclass(frozen=True)
class _LayoutComputation:
    """The result of a layout's ranks, and how they routed, with the trace that they are judged by.

    `is_read_in_place`: ranks read each other's shards in shared memory; `shares_memory`: they
    exchange tensors through it.
    """

    result: LayoutResult
    routed: ReroutedReference
    is_read_in_place: bool
    shares_memory: bool
    device: str


def _choose_row_tolerance(plan: Plan, reference: Trace, dtype: str) -> float:
    """The relative error that a row of this type allows, with what compression adds to it."""
    judged_dtype = "float32" if reference.narrows else parameter_dtype_of_row(dtype)
    return choose_compression_tolerance(plan.parallel.compress, TOLERANCE_OF_DTYPE[judged_dtype])


def _compute_in_layout(
    run: LayoutRun,
    plan: Plan,
    references: ReferenceTraces,
    reference: Trace,
    steps: list[list[Batch]],
    tolerance: float,
) -> _LayoutComputation:
    """What the ranks of a layout compute of their rows of `steps`, beside `reference`. Collective.

    Raises LayoutError for a module that the layout refuses.
    """
    dtype, device = references.dtype, references.mesh.device.type
    fills_parts = references.is_first_of_layout(plan)
    with (
        use_block_sizes(_choose_block_sizes(dtype, plan, fills_parts=fills_parts)),
        _choosing_kernels(dtype, plan),
        _emulating_fp8_on_cpus(dtype, device),
        open_mesh(plan.layout, device=device, collectives=plan.parallel.collectives) as mesh,
    ):
        rank_steps = select_rank_rows(
            steps, mesh.data_parallel_rank, plan.layout.data_parallel_size
        )
        rank_steps = move_steps_to_device(rank_steps, mesh.device)
        is_read_in_place = _reads_shards_in_place(plan, mesh)
        shares_memory = current_transport() is not None
        result = run.run(reference, rank_steps, mesh, steps)
        near_tie = near_tie_tolerance(reference.rounding_dtype or dtype, tolerance)
        routed = compare_routing_with_reference(result, references, reference, steps, near_tie)
        # A token near the border of two experts may go to the other one by rounding alone:
        # then the reference is what one process computes that routes alike.
        if routed.flips:
            result = run.run(routed.trace, rank_steps, mesh, steps)
            routed = routed.confirm_by_second_run(result)
        else:
            routed = replace(routed, trace=reference)
    return _LayoutComputation(result, routed, is_read_in_place, shares_memory, device)


def _reads_shards_in_place(plan: Plan, mesh: Mesh) -> bool:
    """True if the ranks of dp_shard read each other's shards in shared memory."""
    return (
        plan.layout.gradient_reduction_layout.dp_shard > 1
        and mesh.device_mesh is not None
        and find_transport_in_place(mesh.submesh("dp_shard").get_group()) is not None
    )


def _build_judged_row(
    case: VerifyCase, computation: _LayoutComputation, tolerance: float, optimizer: str
) -> Row:
    """The row of a layout's verdict, without the name of the model and the seconds it took."""
    plan, result, routed = case.plan, computation.result, computation.routed
    reference = routed.trace
    verdict = LayoutComparator(
        reference,
        result.observations,
        JudgedLayout.from_plan(plan),
        tolerance=tolerance,
        misrouted=routed.misrouted,
    ).compare()
    errors = verdict.errors
    if plan.parallel.compress != "none":
        errors = {**errors, **result.apart}
    goes_over_gloo = computation.shares_memory and is_gloo_judged(reference)
    reading = READ_IN_PLACE_BESIDE_GLOO if goes_over_gloo else READ_IN_PLACE
    notes = result.notes + _list_row_notes(plan, reference, tolerance, verdict.relaxed)
    if goes_over_gloo and verdict.first is not None and verdict.first.step == GLOO_STEP - 1:
        notes = (*notes, FIRST_OVER_GLOO)
    return Row(
        layout=case.name,
        parallel=case.parallel,
        model="",
        dtype=case.dtype,
        ok=verdict.first is None,
        errors=errors,
        tolerance=summarize_error_bands(reference).median
        if reference.rounding_dtype
        else tolerance,
        first=verdict.first,
        notes=notes,
        judged=(
            *list_compared_quantities(plan, reference, optimizer),
            *((reading,) if computation.is_read_in_place else ()),
            *((OVER_GLOO,) if goes_over_gloo else ()),
            *((FILLED_IN_PARTS,) if result.is_filled_in_parts else ()),
            *((REDUCTIONS_JUDGED,) if are_reduction_types_judged(plan, case.dtype) else ()),
            *((TABLES_JUDGED,) if result.has_rotary_tables else ()),
        ),
        not_judged=list_quantities_not_compared(plan, reference, device=computation.device),
        compress=plan.parallel.compress,
        flips=routed.flips,
        extent=_describe_extent_of_tp(plan),
    )


def _choose_block_sizes(dtype: str, plan: Plan, *, fills_parts: bool = False) -> BlockSizes:
    """Sizes so small that each loop of a layout runs several times, where the reference has one
    block. In float32 attention has one mask, and shared memory the usual chunks, as in training:
    what has one block there is judged, too."""
    sizes = shrink_block_sizes()
    # A bucket more is a collective more: a larger model has larger ones.
    num_bytes = plan.num_params * getattr(torch, parameter_dtype_of_row(dtype)).itemsize
    sizes = replace(
        sizes, bucket_bytes=max(sizes.bucket_bytes or 1, num_bytes // MAX_BUCKETS_OF_MODEL | 1)
    )
    num_tokens = plan.micro_batch_size * plan.seq_len // plan.layout.cp
    # No more turns than that, which take collectives with tp; the last one has fewer tokens.
    chunk = choose_loss_chunk_tokens(num_tokens)
    if chunk > 1:
        sizes = replace(sizes, loss_chunk_tokens=chunk)
    usual = BlockSizes()
    # A user's module is built as large ones are, without memory, and filled part by part. Once for
    # each layout, for recording takes longer than building what is small.
    if dtype != "float64" or not fills_parts:
        sizes = replace(sizes, recorded_init_bytes=usual.recorded_init_bytes)
    if dtype == "float32":
        sizes = replace(sizes, query_block=usual.query_block)
        return restore_shared_memory_sizes(sizes)
    return _grow_shared_memory_sizes(sizes)


def _grow_shared_memory_sizes(sizes: BlockSizes) -> BlockSizes:
    """`sizes` with those of shared memory larger by as much as buckets are: a bucket has three
    chunks in a larger model, too. None becomes larger than it usually is."""
    usual, smallest = BlockSizes(), shrink_block_sizes()
    assert sizes.bucket_bytes
    assert smallest.bucket_bytes
    growth = sizes.bucket_bytes / smallest.bucket_bytes
    grown = {
        name: min(getattr(usual, name), int(getattr(smallest, name) * growth) | 1)
        for name in SHARED_MEMORY_SIZES
    }
    return replace(sizes, **grown)


def _has_unfused_attention(dtype: str, plan: Plan) -> bool:
    """True for rows whose blocks of attention are computed by the kernel that fits any device."""
    return dtype == "float64" and plan.layout.cp > 1 and plan.parallel.cp_attention == "all-gather"


@contextmanager
def _emulating_fp8_on_cpus(dtype: str, device: str) -> Iterator[None]:
    """Inside, a CPU multiplies as a GPU with fp8 would, where a row is of that type."""
    before = Float8LinearLayers.emulate
    Float8LinearLayers.emulate = dtype == FP8 and device == "cpu"
    try:
        yield
    finally:
        Float8LinearLayers.emulate = before


def _choosing_kernels(dtype: str, plan: Plan) -> AbstractContextManager[None]:
    """The context of a row's attention kernels: usually those that its device chooses."""
    if _has_unfused_attention(dtype, plan):
        return using_unfused_attention_alone()
    return nullcontext()


def _describe_compiler_narrowing_float64() -> str:
    first = ".".join(map(str, MIN_TORCH_FOR_COMPILED_FLOAT64))
    return (
        f"torch {torch.__version__} compiles a backward in float64 to float32's; {first} does not"
    )


def _reset_compiler() -> None:
    # What dynamo has compiled often, for whichever layout, it would leave eager without a word.
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = MAX_RECOMPILES
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def _describe_extent_of_tp(plan: Plan) -> str:
    if plan.layout.tp == 1:
        return ""
    rules = combine_and_check_rules(plan.parallel.rules, plan.model_shape, plan.layout.tp)
    return describe_few_cut_matrices(rules, plan.model_shape)


def _list_row_notes(
    plan: Plan, trace: Trace, tolerance: float, relaxed: Sequence[str]
) -> tuple[str, ...]:
    """Sentences about what a row does not compare, or compares less strictly."""
    notes = []
    if _has_unfused_attention(trace.dtype, plan):
        notes.append(
            "blocks of attention are not fused: the kernel of devices without a faster one"
        )
    if plan.layout.tp > 1:
        rules = combine_and_check_rules(plan.parallel.rules, plan.model_shape, plan.layout.tp)
        notes.append(describe_unsharded_matrices(rules, plan.model_shape))
    if trace.rounding_dtype not in ("", trace.dtype):
        notes.append(
            f"the module rounds to {trace.rounding_dtype} by itself on its way, and is judged by"
            " what that costs"
        )
    elif trace.narrows and trace.dtype == "float64":
        notes.append(
            "the module computes in fewer digits than float64 on its way, and is judged by those"
        )
    if plan.parallel.compress != "none":
        notes.append(describe_compression_tolerance(plan.parallel.compress, tolerance))
    if trace.dtype == FP8:
        notes.append(FP8_NOTE)
    if trace.rounding_dtype:
        notes.append(describe_error_bands(trace))
    if relaxed:
        notes.append(
            f"judged by what rounding to float32 costs in one process: {', '.join(relaxed[:3])}"
        )
    return tuple(filter(None, notes))


def _build_refused_row(case: VerifyCase, model_name: str, dtype: str, reason: str) -> Row:
    return Row(case.name, case.parallel, model_name, dtype, None, {}, 0.0, refused=reason)
