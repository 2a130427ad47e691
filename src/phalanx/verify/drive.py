"""Compares layouts with one process: starts groups of ranks, collects the rows they write.

Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.core.errors import ExitCode, PhalanxError, ResourceError, UsageError
from phalanx.core.registry import refuse_during_user_import
from phalanx.data.prepare import prepare_corpus
from phalanx.job.hugging_face import list_transformers_modules
from phalanx.job.load import require_job
from phalanx.job.schema import Job
from phalanx.job.user_dataset import is_own_dataset
from phalanx.launch.launch_spec import LaunchSpec, RepeatedAttempts
from phalanx.launch.outcome import RunOutcome
from phalanx.launch.paths import next_attempt_number
from phalanx.launch.supervisor import supervise_ranks
from phalanx.observe.bus import Bus
from phalanx.run.launched import refuse_external_launcher
from phalanx.run.stop_signals import StoppedBySignalError, raising_on_stop_signals
from phalanx.verify.cases import Case
from phalanx.verify.choose import Selection, select_layout_cases
from phalanx.verify.payloads import VerifyCase, VerifyPayload
from phalanx.verify.progress import RowTimeEstimator, VerifyProgress
from phalanx.verify.result import VerifyResult
from phalanx.verify.row import MAX_SEQ_LEN, NUM_STEPS, ROWS_FILE_NAME, Row
from phalanx.verify.stopped_work import VerifyWork, count_rows_of_ranks, open_resumable_verify_work


def verify_job(
    job: Job,
    layouts: str | Sequence[str] = "asked",
    *,
    ranks: int | None = None,
    steps: int = NUM_STEPS,
    shrink: bool | None = None,
    types: str | Sequence[str] = "",
    device: str = "cpu",
    max_seq_len: int = MAX_SEQ_LEN,
    on_selection: Callable[[Selection], None] = lambda selection: None,
    on_row: Callable[[Row], None] = lambda row: None,
    on_progress: Callable[[VerifyProgress], None] = lambda progress: None,
    resume: bool = False,
) -> VerifyResult:
    """Compare layouts of `job` with one process: loss, every gradient, every weight.

    `layouts`: "asked" (the job's own), "all" (each layout of `ranks` ranks), or names (one string
    with commas, or a sequence). `ranks`: how many processes of this machine; by default as many as
    the job says, else 4. `steps`: optimizer steps of each layout. `shrink`: a built-in model is
    compared at two blocks (or as many as the pipelines need) and small widths; None: where
    `layouts` is "all". `types`: "float64", "float32", "bf16", "fp16" and "fp8" (one string with
    commas, or a sequence); by default the first two, and the job's own compute type.
    `device`: where layouts compute, "cpu" or "cuda"; the reference is always the CPU's.
    `max_seq_len`: of longer sequences so many tokens are judged, but for own modules.

    `on_selection` is called once, before ranks start; `on_row` with each row as it comes;
    `on_progress` several times a second. Prints nothing. A rank that crashes is a row; a stop by
    Ctrl-C or SIGTERM is the result's `stop_code`. With `resume`, rows that the same call had before
    a stop are taken over, with a note, if code and versions are the same.
    Raises PhalanxError for what a user can mend.
    """
    refuse_during_user_import("verify_job")
    refuse_external_launcher("verify")
    require_job(job)
    _require_counts(ranks=ranks, steps=steps, max_seq_len=max_seq_len)
    selection = select_layout_cases(
        job,
        layouts,
        ranks=ranks,
        steps=steps,
        shrink=shrink,
        types=types,
        device=device,
        max_seq_len=max_seq_len,
    )
    judged = _JudgedRows(selection.left_out, on_row)
    stop, can_resume = _StopCatcher(), False
    with stop.catching_stop_signals():
        on_selection(selection)
        for row in selection.refused_rows:
            judged.add(row)
        if selection.work:
            with open_resumable_verify_work(selection, resume=resume) as work:
                # What ends in between can be resumed, as far as it is kept.
                can_resume = work.stays
                stop.code = _run_cases_beside_earlier_rows(selection, work, judged, on_progress)
                # What ends otherwise, by an error say, can be resumed, too.
                if stop.code is None:
                    work.stays = False
                can_resume = work.stays
    return VerifyResult(
        tuple(judged.rows),
        selection.notes,
        selection.not_judged,
        selection.required,
        stop_code=stop.code,
        num_missing=len(selection.work) - count_rows_of_ranks(selection, judged.rows),
        left_out=selection.left_out,
        can_resume=can_resume,
    )


def _require_counts(**counts: int | None) -> None:
    """Raise UsageError for what is no number of at least 1; None is not given."""
    for key, count in counts.items():
        if count is not None and (not isinstance(count, int) or count < 1):
            raise UsageError(f"{key}={count!r}: a number of at least 1 is needed")


class _JudgedRows:
    """The rows so far; each is completed and handed on as it comes."""

    def __init__(self, left_out: Sequence[str], on_row: Callable[[Row], None]) -> None:
        self._left_out, self._on_row = left_out, on_row
        self.rows: list[Row] = []

    def add(self, row: Row) -> Row:
        """The row as it was handed on."""
        row = _add_unjudged_settings_to_row(
            _copy_cause_of_earlier_row(row, self.rows), self._left_out
        )
        self.rows.append(row)
        self._on_row(row)
        return row


def _copy_cause_of_earlier_row(row: Row, earlier: Sequence[Row]) -> Row:
    """`row` with the cause that an earlier one of the same layout has for the same kind of
    difference: float64, which comes first, tells more of it than types with fewer digits."""
    if row.first is None:
        return row
    for other in earlier:
        if other.layout == row.layout and other.first is not None:
            if other.first.what == row.first.what:
                return replace(row, first=replace(row.first, cause=other.first.cause))
            cause = f"what makes {other.dtype} differ: {other.first.cause}"
            return replace(row, first=replace(row.first, cause=cause))
    return row


def _add_unjudged_settings_to_row(row: Row, left_out: Sequence[str]) -> Row:
    """`row` with settings of the job that nobody judged, where it was judged itself: what is equal
    is equal without them."""
    if row.ok is None:
        return row
    # Rows that were judged before a stop have them already.
    missing = [setting for setting in left_out if setting not in row.not_judged]
    return replace(row, not_judged=(*row.not_judged, *missing))


@dataclass
class _StopCatcher:
    """The exit code of a stop by Ctrl-C or SIGTERM, None without one."""

    code: int | None = None

    @contextmanager
    def catching_stop_signals(self) -> Iterator[None]:
        """End the body at a stop that comes while no ranks are there to take it."""
        try:
            with raising_on_stop_signals():
                yield
        except StoppedBySignalError as error:
            self.code = int(error.exit_code)
        except KeyboardInterrupt:
            self.code = int(ExitCode.INTERRUPTED)


def _run_cases_beside_earlier_rows(
    selection: Selection,
    work: VerifyWork,
    judged: _JudgedRows,
    on_progress: Callable[[VerifyProgress], None],
) -> int | None:
    """Take over the rows that are kept of the same work, and run the other cases; the exit code of
    a stop, or None."""
    for row in work.earlier_rows:
        judged.add(row)
    names = [(dtype, case.name) for dtype, case in selection.work]
    times = RowTimeEstimator(names, len(work.earlier_rows))

    def keep_row(row: Row) -> None:
        work.keep_row(judged.add(row))
        times.count_finished_row()

    return _run_cases_restarting_after_crash(
        selection, work, keep_row, on_tick=lambda: on_progress(times.read())
    )


def _run_cases_restarting_after_crash(
    selection: Selection,
    work: VerifyWork,
    add_row: Callable[[Row], None],
    *,
    on_tick: Callable[[], None],
) -> int | None:
    """Run one group of ranks through each case in each type that has no row yet; after a crash,
    another goes on behind it.

    Returns the exit code of a stop, or None. Raises ResourceError where a disk refuses: that is no
    layout's fault.
    """
    job, scratch = selection.job, work.scratch
    directory = scratch.directory
    data_dir: Path | None = None
    if is_own_dataset(job.data.source) and not job.data.mixture:
        data_dir = prepare_corpus(job.data, directory / "data", vocab_size=None).directory
    # float64 first: references in float32 look for its traces (`_find_float64_trace_directory`).
    remaining = selection.work[len(work.earlier_rows) :]
    while remaining:
        row_reader = _AppendedRowReader(directory / ROWS_FILE_NAME, add_row)

        def tick(reader: _AppendedRowReader = row_reader) -> None:
            reader.read_new_rows()
            on_tick()

        outcome = _run_cases_in_one_rank_group(
            selection, remaining, directory, data_dir, on_tick=tick
        )
        # The last rows may have come behind the last tick.
        row_reader.read_new_rows()
        if outcome.status in ("interrupted", "preempted"):
            return outcome.exit_code
        # Rows come in the order of the cases: the first without one is where the group stopped.
        remaining = remaining[row_reader.num_rows :]
        if outcome.status == "failed":
            refusal = scratch.find_error_that_rank_raised(outcome)
            if isinstance(refusal, ResourceError):
                raise refusal
            message = scratch.build_rank_failure_message(outcome)
            # Every case has its row: the failure is no layout's.
            if not remaining:
                raise PhalanxError(message)
            dtype, case = remaining.pop(0)
            add_row(selection.build_row_without_comparison(case, dtype=dtype, crashed=message))
        # The next group's reader counts its rows from zero.
        (directory / ROWS_FILE_NAME).unlink(missing_ok=True)
    return None


def _run_cases_in_one_rank_group(
    selection: Selection,
    work: Sequence[tuple[str, Case]],
    directory: Path,
    data_dir: Path | None,
    *,
    on_tick: Callable[[], None],
) -> RunOutcome:
    cases = tuple(
        VerifyCase(dtype, case.name, case.parallel, case.plan, case.other_name, case.other_plan)
        for dtype, case in work
        if case.plan is not None
    )
    num_ranks = cases[0].plan.world_size
    payload = VerifyPayload(
        job=selection.job,
        run_dir=directory,
        data_dir=data_dir,
        num_steps=selection.num_steps,
        num_ranks=num_ranks,
        model_name=selection.model_name,
        cases=cases,
        device=selection.device,
        asked_job=selection.asked_job,
    )
    spec = LaunchSpec(
        entry="phalanx.verify.rank:main",
        attempts=RepeatedAttempts(lambda: payload),
        num_ranks=num_ranks,
        run_dir=directory,
        # Imported once, by the server that all ranks are forks of.
        preload=(
            "torch",
            "torch._dynamo",
            "phalanx.verify.rank",
            *list_transformers_modules(selection.job.model.kind),
        ),
        stepless="judging layouts",
        grace_s=1.0,
    )
    bus = Bus(rank=-1, attempt=next_attempt_number(directory), run_dir=directory)
    try:
        return supervise_ranks(spec, bus=bus, on_tick=on_tick, say=lambda line: None)
    finally:
        bus.close()


class _AppendedRowReader:
    """Reads the rows that ranks append to a file, and hands each on once."""

    def __init__(self, path: Path, add_row: Callable[[Row], None]) -> None:
        self._path, self._add_row = path, add_row
        self.num_rows = 0

    def read_new_rows(self) -> None:
        try:
            # What follows the last line end is a row that is being written.
            lines = self._path.read_text(encoding="utf-8").split("\n")[:-1]
        except FileNotFoundError:
            return
        for line in lines[self.num_rows :]:
            self._add_row(Row.from_json(json.loads(line)))
        self.num_rows = len(lines)
