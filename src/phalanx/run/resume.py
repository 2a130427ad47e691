"""`--resume RUN key=value`: the run's job with what was changed on top, and what each change
does to the training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.checkpoint.reading.verify import find_checkpoint_problems
from phalanx.checkpoint.stores import Store, find_newest_readable_step, open_store_of_run
from phalanx.core.digest import digest, find_differing_dotted_keys
from phalanx.core.errors import CheckpointError, JobError, JobProblem, LayoutError, UsageError
from phalanx.core.files import read_json
from phalanx.core.units import plural
from phalanx.job.findings import describe_value
from phalanx.job.learning_rate import list_learning_rate_overrides_on_resume
from phalanx.job.load import load_job, load_job_json
from phalanx.job.schema import Job, Parallel
from phalanx.optim.schedule import learning_rate
from phalanx.plan.cluster import detect_cluster
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.precision import replace_precision, resolve_precision
from phalanx.plan.stored_plan import read_stored_plan_or_none

# With other values of these a checkpoint would not fit, or samples would be repeated or skipped.
UNCHANGEABLE_KEYS = ("run.seed", "model.", "data.")
# Its state lies in the checkpoint.
UNCHANGEABLE_KEYS_ONCE_SAVED = ("optim.kind",)
# Whatever they are, the samples are the same.
DATA_READING_KEYS = (
    "data.workers",
    "data.worker_timeout_s",
)
_EDITED_JOB = (
    "job.json was edited since the run wrote it (plan.json knows its digest), and what it says now"
    " holds: this may not be the training that the run began with; changes that are given as"
    " overrides (--resume RUN key=value) are named, or refused"
)
DEGREE_KEYS = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


@dataclass(frozen=True)
class JobChange:
    """One key of the job that is another one from `step` on.

    `effect` says what that does; `is_other_training`: steps after it are not those that the run
    would have done.
    """

    key: str
    before: Any
    after: Any
    effect: str
    is_other_training: bool

    def describe_change(self) -> str:
        before, after = describe_value(self.before), describe_value(self.after)
        return f"{self.key} {before} -> {after}: {self.effect}"


@dataclass(frozen=True)
class ResumedRun:
    """A run that is continued.

    `step` is that of the checkpoint it continues from, 0 without one.
    """

    run_dir: Path
    job: Job
    step: int
    changes: tuple[JobChange, ...]
    rate: str
    """The sentence about the learning rate, if a change moves it; else empty."""
    is_job_edited: bool = False
    """True if job.json is not as the run wrote it: which keys are others is not known."""

    @property
    def is_other_training(self) -> bool:
        return any(change.is_other_training for change in self.changes)

    def summary_lines(self) -> list[str]:
        """Lines for people; none if the job is unchanged."""
        edited = []
        if self.is_job_edited:
            edited = [f"warn    {_EDITED_JOB}"]
        if not self.changes:
            return edited
        lines = [*edited]
        lines += [f"changed {change.describe_change()}" for change in self.changes]
        if self.rate:
            lines.append(f"warn    {self.rate}")
        if self.is_other_training:
            lines.append(
                f"        from step {self.step + 1} on this is not the training that the run began"
                " with"
            )
        return lines

    def facts(self) -> dict[str, Any]:
        """Facts for the run's record."""
        changed = {change.key: [change.before, change.after] for change in self.changes}
        words = [change.describe_change() for change in self.changes]
        if self.is_job_edited:
            words.append(_EDITED_JOB)
        if self.rate:
            words.append(self.rate)
        summary = "; ".join(words) or "with the same job"
        return {"step": self.step, "changed": changed, "told": summary}


def load_resumed_job(resume: str, overrides: Sequence[str]) -> ResumedRun:
    """Load the run in the directory `resume` with `overrides` on its job.

    Raises UsageError where there is no run, JobError for keys that a run keeps, and LayoutError,
    with all that would have to be said besides, for ranks that the run's other keys do not fit.
    """
    run_dir = Path(resume)
    if not (run_dir / "job.json").is_file():
        raise UsageError(
            "no run to resume is there",
            where=resume,
            fix="give a directory that phalanx train wrote",
        )
    was = load_job_json(run_dir / "job.json", [f"run.dir={resume}"])
    job = _load_job_with_overrides(run_dir, was, overrides)
    if job.precision.compute == "auto" != was.precision.compute:
        # Asked for: what it means on this machine.
        job, _ = resolve_precision(job, detect_cluster(job.cluster.device))
    return _compare_with_run(run_dir, was, job)


def load_requeued_run(run_dir: Path, job: Job) -> ResumedRun:
    """The run in the directory `run_dir`, which `job` began and a scheduler starts again.

    Raises JobError where it is another job's: for keys that a run keeps.
    """
    was = load_job_json(run_dir / "job.json", [f"run.dir={run_dir}"])
    if job.precision.compute == "auto":
        # The run has begun, in the precision it chose then.
        job = replace_precision(job, was.precision.compute)
    return _compare_with_run(run_dir, was, job)


def _compare_with_run(run_dir: Path, was: Job, job: Job) -> ResumedRun:
    """The run of the job `was`, continued with `job`. Raises JobError for keys that a run keeps."""
    # The store of the job as it was, which `checkpoint.url` may change: a look of its own.
    step = _find_step_to_continue_from(
        open_store_of_run(run_dir, was.checkpoint.url), fallback=job.checkpoint.fallback
    )
    changed_keys = find_differing_dotted_keys(was.to_json(), job.to_json())
    changed_keys = [key for key in changed_keys if key not in DATA_READING_KEYS]
    _refuse_changes_of_fixed_keys(changed_keys, is_saved=step > 0)
    before, after = (
        _flatten_job_to_dotted_keys(was.to_json()),
        _flatten_job_to_dotted_keys(job.to_json()),
    )
    changes = []
    for key in changed_keys:
        changes.append(_build_job_change(key, before.get(key), after.get(key), was, job, step))
    return ResumedRun(
        run_dir,
        job,
        step,
        tuple(changes),
        _describe_learning_rate_change(was, job, step),
        is_job_edited=_is_job_edited(run_dir),
    )


def _is_job_edited(run_dir: Path) -> bool:
    """True if job.json is not the job that the plan.json beside it was made for."""
    plan = read_stored_plan_or_none(run_dir / "plan.json")
    if plan is None:
        return False
    # As it lies there: a later release may have more keys.
    body = read_json(run_dir / "job.json")
    body.get("run", {}).pop("dir", None)
    return digest(body) != plan.job_digest


def _find_step_to_continue_from(store: Store, *, fallback: bool) -> int:
    """The step of the checkpoint that ranks will continue from: the newest, or with `fallback` the
    newest that verifies, of which every byte is read; 0 without one."""
    newest = find_newest_readable_step(store)
    if not fallback or newest < 1:
        return newest
    # What cannot be read is said by the ranks, which read it next.
    with suppress(OSError, CheckpointError):
        for folder in reversed(store.folders()):
            if not find_checkpoint_problems(folder):
                return folder.step
    return newest


def _refuse_changes_of_fixed_keys(changed_keys: Sequence[str], *, is_saved: bool) -> None:
    """Raise JobError for changes of keys that a run keeps; more of them once it has saved."""
    fixed_keys: tuple[str, ...] = UNCHANGEABLE_KEYS
    if is_saved:
        fixed_keys = (*UNCHANGEABLE_KEYS, *UNCHANGEABLE_KEYS_ONCE_SAVED)
    reason = "a resumed run keeps what it was trained with"
    problems = []
    for key in changed_keys:
        if key.startswith(fixed_keys):
            problems.append(JobProblem(key, reason, "override", "start a new run to change it"))
    if problems:
        raise JobError(problems)


def load_job_for_explain(
    job_file: str | None, overrides: Sequence[str], resume: str | None
) -> tuple[Job, str | None]:
    """The job of a command line, and the file that it begins with: a job file, or that of the
    run `resume`."""
    if resume is None:
        return load_job(job_file, overrides), job_file
    return load_resumed_job(resume, overrides).job, str(Path(resume) / "job.json")


def _flatten_job_to_dotted_keys(job: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key, as `find_differing_dotted_keys` names them."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        flat[prefix] = value
        if isinstance(value, Mapping):
            for key, inner in value.items():
                walk(f"{prefix}.{key}".removeprefix("."), inner)

    walk("", job)
    return flat


# --- what a change does ---------------------------------------------------------------------------


def _build_job_change(
    key: str, before: Any, after: Any, was: Job, job: Job, step: int
) -> JobChange:
    for prefix, describe, is_other_training in _CHANGE_DESCRIPTIONS:
        if key.startswith(prefix):
            return JobChange(key, before, after, describe(was, job, step), is_other_training)
    return JobChange(
        key,
        before,
        after,
        _make_change_describer("holds from step {next} on")(was, job, step),
        True,
    )


def _make_change_describer(text: str) -> Callable[[Job, Job, int], str]:
    return lambda was, job, step: text.format(next=step + 1)


def _describe_steps_change(was: Job, job: Job, step: int) -> str:
    ends = ""
    if job.optim.schedule != "constant":
        ends = f", and the {job.optim.schedule} schedule ends there"
    num_left = job.train.steps - step
    return (
        f"{plural(max(num_left, 0), 'step')} left instead of {max(was.train.steps - step, 0)}{ends}"
    )


def _describe_batch_change(was: Job, job: Job, step: int) -> str:
    return (
        f"steps from {step + 1} on read {job.train.global_batch_size} samples each; none is read"
        " twice or left out"
    )


_SAME_MATHEMATICS_TEXT = "the same mathematics, rounded otherwise"
# By the beginning of a key, the first that fits: (beginning, words of (job before, job after,
# step), other training?).
_CHANGE_DESCRIPTIONS: tuple[tuple[str, Callable[[Job, Job, int], str], bool], ...] = (
    ("train.steps", _describe_steps_change, True),
    ("train.global_batch_size", _describe_batch_change, True),
    ("train.sample_tokens", _make_change_describer("of the text at the end alone"), False),
    ("train.compile", _make_change_describer(_SAME_MATHEMATICS_TEXT), False),
    ("train.deterministic", _make_change_describer(f"{_SAME_MATHEMATICS_TEXT}, on GPUs"), False),
    ("train.", _make_change_describer("the same mathematics, in other memory and time"), False),
    ("optim.", _make_change_describer("holds from step {next} on"), True),
    ("precision.", _make_change_describer("numbers are rounded so from step {next} on"), True),
    ("parallel.compress", _make_change_describer("gradients travel so from step {next} on"), True),
    (
        "parallel.sync_batchnorm",
        _make_change_describer("statistics are made so from step {next} on"),
        True,
    ),
    ("parallel.dropout", _make_change_describer("dropout draws so from step {next} on"), True),
    ("parallel.", _make_change_describer(_SAME_MATHEMATICS_TEXT), False),
    ("cluster.", _make_change_describer("where it runs; the same mathematics"), False),
    (
        "eval.",
        _make_change_describer("evaluations from step {next} on; training does not change"),
        False,
    ),
    (
        "checkpoint.url",
        _make_change_describer(
            "checkpoints are looked for and saved there; those of before stay where they are"
        ),
        False,
    ),
    (
        "checkpoint.fallback",
        _make_change_describer(
            "it continues from the newest checkpoint that verifies, with step {next}"
        ),
        False,
    ),
    ("checkpoint.", _make_change_describer("how it is saved; training does not change"), False),
    ("observe.", _make_change_describer("what is recorded; training does not change"), False),
    (
        "resilience.max_skipped_steps",
        _make_change_describer("when it gives up on steps that are not finite"),
        False,
    ),
    ("resilience.inject", _make_change_describer("faults that are put in"), False),
    (
        "resilience.",
        _make_change_describer("how failures are met; training does not change"),
        False,
    ),
    ("run.", _make_change_describer("what the run is called; training does not change"), False),
    ("data.", _make_change_describer("how samples are read; they are the same"), False),
)


def _describe_learning_rate_change(was: Job, job: Job, step: int) -> str:
    """A sentence that compares the learning rate with the one before the change, and says how to
    keep it; empty if it is the same."""
    now = learning_rate(job, step + 1)
    if step + 1 <= was.train.steps:
        expected, when = learning_rate(was, step + 1), "would have been"
    else:
        expected, when = (
            learning_rate(was, was.train.steps),
            f"was at step {was.train.steps}, the last one,",
        )
    # A ratio of 1e-9: the same rate, computed in another order.
    if step == 0 or abs(now - expected) <= 1e-9 * max(now, expected) or job.train.steps <= step:
        return ""
    keep = f"optim.schedule=constant optim.warmup_steps=0 optim.lr={expected:.4g}"
    return (
        f"the learning rate of step {step + 1} is {now:.3g}; it {when} {expected:.3g} "
        f"({now / expected:.2g} x); to stay there: {keep}"
    )


# --- ranks that the run's other keys do not fit ---------------------------------------------------


def _load_job_with_overrides(run_dir: Path, was: Job, overrides: Sequence[str]) -> Job:
    """The run's job with `overrides`.

    A layout that does not fit is a LayoutError with all the keys that make one.
    """
    layout_keys = []
    for text in overrides:
        key = text.partition("=")[0].strip()
        if key.startswith("parallel."):
            layout_keys.append(key)
    plan = read_plan_of_run(run_dir)
    try:
        job = _load_job_of_run(run_dir, was, overrides)
        refusal = None
        if layout_keys:
            refusal = _find_layout_error(job, plan)
    except JobError as error:
        about_layout = [
            problem for problem in error.problems if problem.key.startswith("parallel.")
        ]
        # The job is at fault elsewhere, too: keys of the layout alone would not mend it.
        if not layout_keys or len(about_layout) < len(error.problems):
            raise
        first = about_layout[0]
        job, refusal = was, LayoutError(first.what, where=first.key, fix=first.fix)
        if not (more := _find_layout_overrides_to_add(run_dir, was, overrides, layout_keys, plan)):
            raise
    else:
        if refusal is None:
            return job
        more = _find_layout_overrides_to_add(run_dir, was, overrides, layout_keys, plan)
    if more:
        refusal.fix = (
            f"the run has {_describe_layout_overrides(was, more)}: say what becomes of it,"
            f" {' '.join([*overrides, *more])}"
        )
    raise refusal


def _load_job_of_run(run_dir: Path, was: Job, overrides: Sequence[str]) -> Job:
    run_dir_override = f"run.dir={run_dir}"
    return load_job_json(
        run_dir / "job.json",
        [*overrides, *list_learning_rate_overrides_on_resume(was, overrides), run_dir_override],
    )


def read_plan_of_run(run_dir: Path) -> Plan | None:
    """The plan that the run in `run_dir` was last started with; None where it cannot be read."""
    return read_stored_plan_or_none(run_dir / "plan.json")


def _find_layout_error(job: Job, plan: Plan | None) -> LayoutError | None:
    """The error of the job's layout; None if it can run, or if the model's shape is unknown."""
    if plan is None:
        return None
    cluster = detect_cluster(job.cluster.device)
    try:
        make_plan(job, cluster=cluster, vocab_size=plan.vocab_size or None, shape=plan.model_shape)
    except LayoutError as error:
        return error
    return None


def _find_layout_overrides_to_add(
    run_dir: Path, was: Job, overrides: Sequence[str], layout_keys: Sequence[str], plan: Plan | None
) -> list[str]:
    """The fewest keys of the run's own layout that have to go for the overrides to fit, as
    overrides; empty if none."""

    def fits(more: Sequence[str]) -> bool:
        try:
            return (
                _find_layout_error(_load_job_of_run(run_dir, was, [*overrides, *more]), plan)
                is None
            )
        except JobError:
            return False

    # "none": as the plan chooses.
    for degree in ("1", "none"):
        reset = _list_layout_reset_overrides(was.parallel, layout_keys, degree)
        if fits(list(reset.values())):
            for key in list(reset):
                if fits([text for name, text in reset.items() if name != key]):
                    # Not needed after all: as few keys as possible are named.
                    del reset[key]
            return list(reset.values())
    return []


def _list_layout_reset_overrides(
    run_layout: Parallel, layout_keys: Sequence[str], degree: str
) -> dict[str, str]:
    """An override for each key of the run's layout that was not asked for anew: its default, or
    `degree`."""
    usual = Parallel()
    overrides = {}
    for key in Parallel.model_fields:
        name, default = f"parallel.{key}", getattr(usual, key)
        if name in layout_keys or getattr(run_layout, key) == default:
            continue
        value = degree
        if key not in DEGREE_KEYS:
            value = _format_override_value(default)
        overrides[name] = f"{name}={value}"
    return overrides


def _format_override_value(value: Any) -> str:
    """A value as an override says it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if value == {}:
        return "{}"
    if value in ((), []):
        return "[]"
    return str(value)


def _describe_layout_overrides(was: Job, more: Sequence[str]) -> str:
    described = []
    for text in more:
        name = text.partition("=")[0]
        value = getattr(was.parallel, name.removeprefix("parallel."))
        described.append(f"{name}={_format_override_value(value)}")
    return ", ".join(described)
