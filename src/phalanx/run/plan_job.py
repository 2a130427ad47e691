"""The plan of a job as `phalanx train` would make it, with what its data says.

Torch-free, and nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from phalanx.data.look import summarize_data_sources
from phalanx.data.tokenizer import BYTE_TOKENIZER_KIND
from phalanx.job.model import build_model_shape, find_vocab_size_of
from phalanx.job.module_probe import TellProgress, measure_foreign_shape
from phalanx.job.schema import Data, Job
from phalanx.job.user_dataset import is_own_dataset
from phalanx.plan.described_cluster import choose_cluster_of_job
from phalanx.plan.plan import Plan
from phalanx.plan.precision import resolve_precision
from phalanx.run.choose_layout import choose_layout
from phalanx.run.data_counts import count_tokens_and_samples_of_unprepared, describe_data_sources
from phalanx.run.mixed_rows import find_mixed_rows_warnings
from phalanx.run.plan_time import PredictedStepTime, predict_step_time_of_plan
from phalanx.run.tokens import find_job_tokens

if TYPE_CHECKING:
    from phalanx.run.initial_weights import InitialWeights


@dataclass(frozen=True)
class PlannedJob:
    """The plan of a job with all its warnings, a line for each source of data that was looked at,
    and the weights it starts from (None for random ones).
    """

    job: Job
    plan: Plan
    data_lines: tuple[str, ...]
    initial: InitialWeights | None
    time: PredictedStepTime | None = None
    """None where the device is no part of this machine."""

    @property
    def has_trainable_data(self) -> bool:
        """False for a model of images while the job names no data: the default source has none."""
        return self.job.data.source != Data().source or not self.plan.model_shape.reads_images

    def to_json(self) -> dict[str, Any]:
        """Facts of `phalanx plan --json`."""
        return {
            **self.plan.to_json(),
            "initial": self.initial and self.initial.to_json(),
            "time": self.time and self.time.to_json(),
        }


def plan_job(
    job: Job, *, checks_initial: bool = True, tell: TellProgress | None = None
) -> PlannedJob:
    """Plan a job as `phalanx train` would. `tell` hears how far the measuring of a module is.

    Raises LayoutError (exit 3), DataError (exit 4) for data that a run would refuse, and with
    `checks_initial` CheckpointError for a model.init_from that is not there or does not fit.
    """
    plan, data_lines = _plan_with_data_sources(job, tell)
    plan = replace(plan, warnings=(*plan.warnings, *find_mixed_rows_warnings(job, plan)))
    initial = None
    if checks_initial and job.model.init_from is not None:
        # Only now: it reads checkpoints, which most jobs have none of.
        from phalanx.run.initial_weights import (
            find_initial_checkpoint,
        )

        initial = find_initial_checkpoint(job.model, plan.model_shape)
    return PlannedJob(
        job,
        plan,
        tuple(data_lines),
        initial,
        predict_step_time_of_plan(plan, choose_cluster_of_job(job)),
    )


def _plan_with_data_sources(job: Job, tell: TellProgress | None) -> tuple[Plan, list[str]]:
    """(the plan, a line for each source of data that was looked at)."""
    cluster = choose_cluster_of_job(job)
    # What a microbatch takes is traced in the type that the plan will have: here, "auto" is the
    # cluster's.
    shape = measure_foreign_shape(resolve_precision(job, cluster)[0], tell=tell)
    tokens = find_job_tokens(job)
    is_usual = _is_default_byte_source(job) and tokens.default in ("", BYTE_TOKENIZER_KIND)
    if is_usual or (
        (shape or build_model_shape(job, vocab_size=1)).reads_images and _needs_data_for_plan(job)
    ):
        chosen = choose_layout(job, cluster=cluster, shape=shape)
        return chosen.make_plan(
            job, cluster=cluster, shape=shape, more=tokens.list_corpus_remarks()
        ), []
    fixed = find_vocab_size_of(job.model)
    look = summarize_data_sources(
        job.data, vocab_size=fixed, default_tokenizer=tokens.default or BYTE_TOKENIZER_KIND
    )
    vocab_size = fixed or look.vocab_size
    chosen = choose_layout(job, cluster=cluster, shape=shape, vocab_size=vocab_size)
    plan = chosen.make_plan(
        job,
        cluster=cluster,
        vocab_size=vocab_size,
        shape=shape,
        data=count_tokens_and_samples_of_unprepared(look),
        more=tokens.list_corpus_remarks(),
    )
    return plan, describe_data_sources(look)


def _is_default_byte_source(job: Job) -> bool:
    """True for the library of this interpreter as bytes: it is always there, and its vocabulary
    is known."""
    return (
        not job.data.mixture
        and job.data.source == Data().source
        and job.data.tokenizer in (None, "bytes")
    )


def _needs_data_for_plan(job: Job) -> bool:
    """A model of images with the default source: its shape can be planned before there is data."""
    return bool(job.data.mixture) or not is_own_dataset(job.data.source)
