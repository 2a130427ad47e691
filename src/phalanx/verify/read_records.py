"""Reads what an attempt of a judged run has recorded. Torch-free."""

from __future__ import annotations

from pathlib import Path

from phalanx.observe.events import (
    BlockNormsMeasured,
    CheckpointSaved,
    EvalFinished,
    StepFinished,
    StepSkipped,
)
from phalanx.observe.tail import read_recorded_events
from phalanx.verify.trainer_cases import LINKED_STEP
from phalanx.verify.trainer_facts import (
    AttemptObservation,
    RecordedNorms,
    RecordedSkip,
    RecordedStep,
)

_KINDS = (StepFinished, StepSkipped, BlockNormsMeasured, EvalFinished, CheckpointSaved)


def read_records_of_attempt(
    run_dir: Path,
    rank: int,
    attempt: int,
    observation: AttemptObservation,
    linked: AttemptObservation | None,
) -> None:
    """Fill `observation` with what `rank` has recorded in an attempt, and `linked` with how much of
    the checkpoint of LINKED_STEP was not written for it."""
    for envelope in read_recorded_events(run_dir, *_KINDS, rank=rank):
        if envelope.attempt != attempt:
            continue
        event = envelope.event
        if isinstance(event, StepFinished):
            observation.recorded += (_convert_step(event),)
        elif isinstance(event, StepSkipped):
            skip = RecordedSkip(event.step, event.reason, event.first_sample, event.num_samples)
            observation.skips += (skip,)
        elif isinstance(event, BlockNormsMeasured):
            norms = (event.gradient_norms, event.update_norms, event.weight_norms)
            observation.norms += (RecordedNorms(event.step, *norms),)
        elif isinstance(event, EvalFinished):
            step = str(event.step)
            observation.evaluations[step] = event.loss
            observation.evaluated_targets[step] = event.num_targets
            observation.evaluated_sources[step] = dict(event.loss_by_source)
        elif (
            isinstance(event, CheckpointSaved) and event.step == LINKED_STEP and linked is not None
        ):
            linked.num_linked_bytes = event.num_bytes - event.num_new_bytes


def _convert_step(event: StepFinished) -> RecordedStep:
    return RecordedStep(
        step=event.step,
        loss=event.loss,
        num_targets=event.num_targets,
        tokens_seen=event.tokens_seen,
        learning_rate=event.learning_rate,
        grad_norm=event.grad_norm,
        loss_scale=event.loss_scale,
        step_s=event.step_s,
        tokens_per_s=event.tokens_per_s,
    )
