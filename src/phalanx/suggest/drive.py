"""Proposes sharding rules for the model of a job, in a process of its own. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path

from phalanx.core.errors import LayoutError, PhalanxError
from phalanx.core.files import read_json
from phalanx.data.prepare import prepare_corpus
from phalanx.job.module_probe import measure_foreign_shape
from phalanx.job.schema import Job
from phalanx.job.user_dataset import is_own_dataset
from phalanx.launch.launch_spec import LaunchSpec, RepeatedAttempts
from phalanx.launch.outcome import RunOutcome
from phalanx.launch.paths import next_attempt_number
from phalanx.launch.supervisor import supervise_ranks
from phalanx.observe.bus import Bus
from phalanx.plan.cluster import detect_cluster
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.run.scratch import ScratchDirectory, open_scratch_directory
from phalanx.suggest.suggestion import SUGGESTION_FILE_NAME, Suggestion, SuggestPayload
from phalanx.verify.verified_job import SHRUNK_VOCAB_SIZE, make_verified_job


def suggest_rules_for(job: Job) -> Suggestion:
    """Sharding rules for the job's model, found by running its forward in another process.

    Raises LayoutError where no rules can be suggested, and PhalanxError for what else a user can
    mend.
    """
    job = _strip_layout_and_rules(job)
    plan = make_plan(
        job,
        cluster=detect_cluster("cpu"),
        vocab_size=SHRUNK_VOCAB_SIZE,
        num_ranks=1,
        shape=measure_foreign_shape(job),
    )
    with open_scratch_directory("suggest") as scratch:
        outcome = _run_suggest_rank(job, plan, scratch)
        answer = scratch.directory / SUGGESTION_FILE_NAME
        if not answer.exists():
            _raise_refusal(outcome, scratch)
        return Suggestion.from_json(read_json(answer))


def _strip_layout_and_rules(job: Job) -> Job:
    """The job on one rank, with neither a layout nor rules."""
    body = make_verified_job(job, 1).to_json()
    axes = ("tp", "dp_replicate", "dp_shard", "zero_stage", "sequence_parallel")
    body["parallel"] |= dict.fromkeys(axes, None)
    body["parallel"] |= {"ranks": 1, "rules": {}}
    return Job.model_validate_json(json.dumps(body))


def _run_suggest_rank(job: Job, plan: Plan, scratch: ScratchDirectory) -> RunOutcome:
    run_dir = scratch.directory
    data_dir: Path | None = None
    # A user's own samples fit the module; else inputs are made up, and no corpus is prepared.
    if is_own_dataset(job.data.source) and not job.data.mixture:
        data_dir = prepare_corpus(job.data, run_dir / "data", vocab_size=None).directory
    payload = SuggestPayload(job, plan, run_dir, data_dir)
    spec = LaunchSpec(
        entry="phalanx.suggest.rank:suggest_as_rank",
        attempts=RepeatedAttempts(lambda: payload),
        num_ranks=1,
        run_dir=run_dir,
        preload=("torch", "phalanx.suggest.rank"),
        stepless="looking at the module",
        grace_s=1.0,
    )
    bus = Bus(rank=-1, attempt=next_attempt_number(run_dir), run_dir=run_dir)
    try:
        return supervise_ranks(spec, bus=bus, say=lambda line: None)
    finally:
        bus.close()


def _raise_refusal(outcome: RunOutcome, scratch: ScratchDirectory) -> None:
    """Raise the PhalanxError of a rank that wrote no suggestion."""
    refusal = scratch.find_error_that_rank_raised(outcome)
    if refusal is not None and not isinstance(refusal, LayoutError):
        raise refusal
    message = scratch.build_rank_failure_message(outcome)
    if outcome.exit_code in (LayoutError.exit_code, 1):
        raise LayoutError("no rules can be suggested", why=message)
    raise PhalanxError(message)
