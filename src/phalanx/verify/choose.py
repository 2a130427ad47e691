"""Chooses which layouts of a job are compared with one process, and says what is compared.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from phalanx.core.cpp_compiler import find_why_compiler_fails
from phalanx.core.errors import (
    EnvironmentProblem,
    LayoutError,
    UsageError,
    format_nearest_word_hint,
)
from phalanx.core.units import format_count, plural
from phalanx.data.look import summarize_data_sources
from phalanx.job.checks.ranks import find_problems_of_stated_axes
from phalanx.job.model import build_model_shape
from phalanx.job.module_probe import measure_foreign_shape
from phalanx.job.schema import Data, Job
from phalanx.job.shapes.measured import MeasuredModule
from phalanx.job.user_dataset import is_own_dataset
from phalanx.plan.cluster import Cluster, detect_cluster
from phalanx.plan.precision import detect_precision
from phalanx.verify.cases import (
    ONE_PROCESS_ROWS,
    TRAINER_ROW_PREFIX,
    Case,
    convert_case_to_fp8,
    is_judged_in_float64_only,
    list_all_layouts,
    list_gradient_compression_layouts,
    list_layouts_for_narrow_dtypes,
    plan_layout_cases,
    select_axes_set_by_job,
)
from phalanx.verify.number_types import (
    COMPUTE_OF_NARROW_DTYPE,
    FP8,
    is_narrow_dtype,
    resolve_dtype_names,
)
from phalanx.verify.pipelines import count_blocks_for_stages
from phalanx.verify.row import MAX_SEQ_LEN, Row
from phalanx.verify.scope import list_unread_weights
from phalanx.verify.selection_words import (
    RANKS_OF_THREE_AXES,
    ROUNDED_OTHERWISE,
    describe_asked_layout,
    describe_judged_work,
    describe_layouts_left_out,
    describe_parts_without_a_row,
)
from phalanx.verify.trainer_cases import list_trainer_case_names, make_named_trainer_cases
from phalanx.verify.verified_job import (
    SHRUNK_VOCAB_SIZE,
    describe_job_changes,
    list_settings_not_judged,
    make_narrow_dtype_job,
    make_verified_job,
    shrink_job,
)

DEFAULT_NUM_RANKS = 4
DEVICES = ("cpu", "cuda")
MAX_NAMED_LAYOUTS = 16  # layouts, of a hundred and more, in a message
# In float64: a copy per rank, and the reference's gradients of each step on disk.
MIN_LARGE_MODEL_PARAMS = 200_000_000


@dataclass(frozen=True)
class Selection:
    """The layouts that are compared, and the job as it is compared.

    `required`: layouts whose refusal is a failure, because they were named. `notes` and
    `not_judged` are lines for a person: what is compared, and what of the job is not.
    `cases_of_type`: type -> its cases, in the order in which they are judged; a narrow type has
    plans of its own, and fewer.
    """

    job: Job
    cases: tuple[Case, ...]
    num_steps: int
    required: frozenset[str]
    cases_of_type: Mapping[str, tuple[Case, ...]]
    notes: tuple[str, ...]
    not_judged: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    """Settings of the job that no row judges: a part of `not_judged`, which each row repeats."""
    device: str = "cpu"
    asked_job: Job | None = None
    """The job as it was, but for what was shrunk."""

    @property
    def model_name(self) -> str:
        model = self.job.model
        return (None if model.is_foreign else model.preset) or model.kind or "small"

    @property
    def planned(self) -> list[Case]:
        """The cases that have a plan, and so can run."""
        return [case for case in self.cases if case.plan is not None]

    @property
    def work(self) -> list[tuple[str, Case]]:
        """(type, case) of each row that ranks are to write."""
        return [
            (dtype, case)
            for dtype, cases in self.cases_of_type.items()
            for case in cases
            if case.plan is not None
            and (dtype == "float64" or not is_judged_in_float64_only(case.name))
        ]

    @property
    def refused_rows(self) -> list[Row]:
        """A row with the reason for each case that has no plan."""
        rows = [
            self.build_row_without_comparison(case, refused=case.refused)
            for case in self.cases
            if case.plan is None
        ]
        refused = {row.layout for row in rows}
        for dtype, cases in self.cases_of_type.items():
            for case in cases:
                # What fits a layout in one type may not in another.
                if case.plan is None and case.name not in refused:
                    rows.append(
                        self.build_row_without_comparison(case, dtype=dtype, refused=case.refused)
                    )
        return rows

    def build_row_without_comparison(
        self, case: Case, *, dtype: str = "", refused: str = "", crashed: str = ""
    ) -> Row:
        """The row of a case of which nothing was compared, since it was refused or crashed."""
        return Row(
            case.name,
            case.parallel,
            self.model_name,
            dtype,
            ok=None if refused else False,
            errors={},
            tolerance=0.0,
            refused=refused,
            crashed=crashed,
            compress=case.parallel.get("compress", "none"),
        )


def select_layout_cases(
    job: Job,
    layouts: str | Sequence[str],
    *,
    ranks: int | None,
    steps: int,
    shrink: bool | None,
    types: str | Sequence[str] = "",
    device: str = "cpu",
    max_seq_len: int = MAX_SEQ_LEN,
) -> Selection:
    """The selection for `layouts`: "asked", "all", or names (one string with commas, or a
    sequence), in `types`, as `verify_job` has them, on `device`. `shrink` None: where all are
    asked for and the model is built in.

    Raises PhalanxError for a name that is no layout, for data that is not there and for a model
    that is too large.
    """
    layout_names = _parse_layout_names(layouts)
    _require_stated_axes_share_batch(job)
    job_layout = select_axes_set_by_job(job)
    num_ranks = _choose_num_ranks(ranks, job, job_layout)
    axes_of_name = _map_layout_names_to_axes(
        layout_names, job_layout, num_ranks, has_experts=_has_model_experts(job)
    )
    notes = []
    # Their number is what takes the time: a few blocks of small widths go through each of them.
    shrinks_unasked = shrink is None and "all" in layout_names and not job.model.is_foreign
    if shrink or shrinks_unasked:
        job, note = _shrink_and_describe(job, axes_of_name.values(), is_asked=not shrinks_unasked)
        notes.append(note)
        if "asked" in axes_of_name:
            axes_of_name["asked"] = select_axes_set_by_job(job)
    # Before the job is changed, of which this says what is left out.
    compute = detect_precision(job)
    dtypes = resolve_dtype_names(types, compute)
    left_out = [*list_settings_not_judged(job, dtypes), *list_unread_weights(job)]
    omissions = [f"not judged: {setting}" for setting in left_out]
    requested_job, job = job, make_verified_job(job, num_ranks, max_seq_len=max_seq_len)
    notes.append(f"changed {describe_job_changes(requested_job, job)}")
    _require_data_files_exist(job)
    shape = _probe_own_module_shape(job, num_ranks)
    maker = _CaseMaker(
        job, axes_of_name, num_ranks, describe_verify_cluster(device, num_ranks), shape
    )
    cases = maker.make_float64_and_float32_cases("float64" in dtypes, device)
    cases_of_type = {dtype: tuple(cases) for dtype in dtypes if not is_narrow_dtype(dtype)}
    for dtype in filter(is_narrow_dtype, dtypes):
        cases_of_type[dtype] = maker.make_narrow_dtype_cases(dtype)
        omissions += describe_layouts_left_out(dtype, axes_of_name, cases_of_type[dtype])
        left_out += _list_type_of_job_without_a_case(dtype, compute, cases_of_type[dtype])
    with_a_plan = [case.name for case in cases if case.plan is not None]
    omissions.append(
        describe_parts_without_a_row(
            job,
            with_a_plan,
            asked_seq_len=requested_job.data.seq_len,
            device=device,
            lacks_three_axes="all" in layout_names and num_ranks % RANKS_OF_THREE_AXES > 0,
        )
    )
    selection = Selection(
        job,
        tuple(cases),
        num_steps=steps,
        # Of "all" some never fit a model; only one that a person named must not be refused.
        required=frozenset(layout_names) - {"all"},
        cases_of_type=cases_of_type,
        notes=(),
        not_judged=tuple(omissions),
        left_out=tuple(left_out),
        device=device,
        asked_job=requested_job,
    )
    plans = [case.plan for case in cases if case.plan is not None]
    if plans:
        notes.append(describe_judged_work(selection, plans, num_ranks))
    notes += [describe_asked_layout(case) for case in cases if case.name == "asked" and case.plan]
    if device == "cuda":
        name = maker.cluster.name
        notes.append(f"device  {name}: layouts compute on it, the reference on the CPU")
    return replace(selection, notes=tuple(notes))


def _list_type_of_job_without_a_case(
    dtype: str, compute: str, cases: Sequence[Case]
) -> Iterator[str]:
    """A line if the job computes in `dtype`, in which none of the named layouts is judged."""
    is_judged = any(case.plan is not None for case in cases)
    if not is_judged and COMPUTE_OF_NARROW_DTYPE[dtype] == compute:
        yield f"precision.compute={compute}: {ROUNDED_OTHERWISE}"


def _require_stated_axes_share_batch(job: Job) -> None:
    """Raise LayoutError for a batch that the job's own axes cannot share, which its checks leave to
    the plan where it describes GPUs: none is chosen here."""
    for finding in find_problems_of_stated_axes(job):
        raise LayoutError(
            f"{'.'.join(map(str, finding.path))}: {finding.what}",
            why="verify judges the axes that the job states; a plan may choose others for its GPUs",
            fix=finding.fix,
        )


def _shrink_and_describe(
    job: Job, layouts: Iterable[Mapping[str, Any]], *, is_asked: bool
) -> tuple[Job, str]:
    """The job at small sizes that `layouts` can cut, and the line that says what was shrunk."""
    job, changes = shrink_job(job, num_blocks=count_blocks_for_stages(layouts))
    note = f"shrunk  {changes or 'nothing: it is small'}"
    if changes and not is_asked:
        note += "; --no-shrink judges the model as it is"
    return job, note


def _parse_layout_names(layouts: str | Sequence[str]) -> list[str]:
    """The names in `layouts`. Raises UsageError for none, and for what is no name."""
    names: Sequence[str] = ()
    if isinstance(layouts, str):
        names = layouts.split(",")
    elif isinstance(layouts, Sequence):
        names = layouts
    if not names or not all(isinstance(name, str) for name in names):
        raise UsageError(
            f"layouts are one name or more, and not {layouts!r}",
            fix='"asked", "all", "ddp,zero3" or ["ddp", "zero3"], say',
        )
    return [name.strip() for name in names]


@dataclass(frozen=True)
class _CaseMaker:
    """Makes the cases of a judged job. `axes_of_name`: the axes of each layout that was asked
    for."""

    job: Job
    axes_of_name: Mapping[str, Mapping[str, Any]]
    num_ranks: int
    cluster: Cluster
    shape: MeasuredModule | None

    def make_float64_and_float32_cases(self, has_float64: bool, device: str) -> list[Case]:
        """The cases of float64 and float32; refused are those that are judged in float64 alone
        without `has_float64`, and those of the trainer on a GPU."""
        layouts, run_names = [], []
        for name, axes in self.axes_of_name.items():
            if name.startswith(TRAINER_ROW_PREFIX):
                run_names.append(name)
            else:
                layouts.append((name, axes))
        cases = plan_layout_cases(
            self.job,
            layouts,
            num_ranks=self.num_ranks,
            cluster=self.cluster,
            shape=self.shape,
        )
        cases += make_named_trainer_cases(
            self.job,
            run_names,
            num_ranks=self.num_ranks,
            cluster=self.cluster,
            shape=self.shape,
        )
        if not has_float64:
            reason = "judged in float64 alone, which is not among the types"
            cases = _drop_plans_of_refused_cases(cases, is_judged_in_float64_only, reason)
        if device == "cuda":
            reason = "the trainer is judged on the CPU alone"
            cases = _drop_plans_of_refused_cases(
                cases, lambda name: name.startswith(TRAINER_ROW_PREFIX), reason
            )
        compiled = {case.name for case in cases if case.plan is not None and case.plan.compile}
        if compiled and device == "cpu" and (why := find_why_compiler_fails()):
            reason = f"train.compile needs a C++ compiler, and {why}"
            cases = _drop_plans_of_refused_cases(cases, compiled.__contains__, reason)
        return cases

    def make_narrow_dtype_cases(self, dtype: str) -> tuple[Case, ...]:
        """The cases of bf16, fp16 or fp8."""
        cases = plan_layout_cases(
            make_narrow_dtype_job(self.job, dtype),
            list_layouts_for_narrow_dtypes(self.axes_of_name, dtype),
            num_ranks=self.num_ranks,
            cluster=self.cluster,
            shape=_drop_traces(self.shape),
        )
        if dtype == FP8:
            has_torchao = find_spec("torchao") is not None
            cases = [convert_case_to_fp8(case, has_torchao=has_torchao) for case in cases]
        # Compilers fuse, and so round less often than one process does.
        return tuple(case for case in cases if case.plan is None or not case.plan.compile)


def _drop_traces(shape: MeasuredModule | None) -> MeasuredModule | None:
    """`shape` without what it does in a microbatch, which was traced in the job's precision alone:
    the memory of a judged layout is no matter."""
    if shape is None:
        return None
    return replace(shape, traces=())


def _require_data_files_exist(job: Job) -> None:
    """Raise DataError for data that is not there: what is judged is made up, but that is a
    mistake."""
    data = job.data
    if data.mixture or not (data.source == Data().source or is_own_dataset(data.source)):
        summarize_data_sources(data, vocab_size=None)


def _probe_own_module_shape(job: Job, num_ranks: int) -> MeasuredModule | None:
    """The shape of a user's own module, None for any other model. Raises LayoutError for one that
    is too large."""
    shape = measure_foreign_shape(job)
    num_params = (shape or build_model_shape(job, SHRUNK_VOCAB_SIZE)).num_params
    if num_params > MIN_LARGE_MODEL_PARAMS:
        raise LayoutError(
            f"{format_count(num_params)} parameters would be judged in float64 by {num_ranks} ranks"
            " of one machine",
            fix="--shrink judges the same kind of model at small widths",
        )
    return shape


def describe_verify_cluster(device: str, num_ranks: int = 0) -> Cluster:
    """The cluster that ranks compute on.

    Raises UsageError for another name, and EnvironmentProblem where there is no GPU for each rank.
    """
    if device not in DEVICES:
        raise UsageError(f"--device: {device!r} is no device", fix=f"one of {', '.join(DEVICES)}")
    try:
        cluster = detect_cluster(device)
    except EnvironmentProblem as error:
        fix = "--device=cpu judges the same layouts without one"
        raise EnvironmentProblem(error.what, why=error.why, fix=fix) from None
    if device == "cuda" and cluster.num_devices < num_ranks:
        raise EnvironmentProblem(
            f"{plural(num_ranks, 'rank')} need as many GPUs, and this machine has"
            f" {cluster.num_devices}",
            fix=f"--ranks={cluster.num_devices}, or --device=cpu",
        )
    return cluster


def _drop_plans_of_refused_cases(
    cases: Sequence[Case], is_refused: Callable[[str], bool], reason: str
) -> list[Case]:
    """`cases`, without a plan where their name is refused."""
    refused = []
    for case in cases:
        if is_refused(case.name) and case.plan is not None:
            case = replace(case, plan=None, refused=reason)
        refused.append(case)
    return refused


def _map_layout_names_to_axes(
    layout_names: Sequence[str], job_layout: dict[str, Any], num_ranks: int, *, has_experts: bool
) -> dict[str, dict[str, Any]]:
    """The axes of each named layout, by its name.

    "asked" is the job's own layout, "all" is each layout of `num_ranks` ranks that fits the model.
    Raises UsageError for a name that is none of them.
    """
    # Expert layouts are known names for any model: the plan says why one does not fit.
    known = dict(
        [*list_all_layouts(num_ranks, experts=True), *list_gradient_compression_layouts(num_ranks)]
    )
    known |= {
        key: {} for key in (*ONE_PROCESS_ROWS, *list_trainer_case_names(num_ranks, experts=True))
    }
    chosen: dict[str, dict[str, Any]] = {}
    for name in layout_names:
        if name == "all":
            chosen |= dict(
                [
                    *list_all_layouts(num_ranks, experts=has_experts),
                    *list_gradient_compression_layouts(num_ranks),
                ]
            )
            chosen |= {
                key: {}
                for key in (
                    *ONE_PROCESS_ROWS,
                    *list_trainer_case_names(num_ranks, experts=has_experts),
                )
            }
        elif name == "asked":
            chosen[name] = job_layout
        elif name in known:
            chosen[name] = known[name]
        else:
            raise UsageError(
                f"--layouts: {name!r} is no layout of {plural(num_ranks, 'rank')}",
                fix=_suggest_layout_names(name, list(known)),
            )
    return chosen


def _suggest_layout_names(name: str, known: Sequence[str]) -> str:
    num_unnamed = len(known) - MAX_NAMED_LAYOUTS
    more = f", and {num_unnamed} more" if num_unnamed > 0 else ""
    examples = f"asked, all, {', '.join(known[:MAX_NAMED_LAYOUTS])}{more}"
    return (
        format_nearest_word_hint(name, [*known, "all", "asked"])
        or f"one of {examples}: docs/verify.md"
    )


def _choose_num_ranks(ranks: int | None, job: Job, job_layout: dict[str, Any]) -> int:
    """The number of ranks that was asked for; else the job's, or what its layout needs."""
    return (
        ranks or job.parallel.ranks or _multiply_parallel_degrees(job_layout) or DEFAULT_NUM_RANKS
    )


def _has_model_experts(job: Job) -> bool:
    """True for a model of ours with experts; those of a user's own module are not seen."""
    if job.model.is_foreign:
        return False
    return build_model_shape(job, SHRUNK_VOCAB_SIZE).experts is not None


def _multiply_parallel_degrees(parallel: dict[str, Any]) -> int:
    """The product of the degrees that a layout sets; 0 if it sets none above 1."""
    # Not ep, which has no ranks of its own: it spreads experts over those of dp and cp.
    product = 1
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        product *= parallel.get(axis, 1)
    if not product > 1:
        return 0
    return product
