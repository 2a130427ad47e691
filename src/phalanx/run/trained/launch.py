"""Start the ranks of a verb that opens a checkpoint, and raise what they refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from phalanx.core.errors import ExitCode, PhalanxError
from phalanx.core.secrets import Redactor
from phalanx.job.hugging_face import list_transformers_modules
from phalanx.launch.launch_spec import LaunchSpec, RepeatedAttempts
from phalanx.launch.supervisor import supervise_ranks
from phalanx.observe.bus import Bus
from phalanx.plan.plan import Plan
from phalanx.run.scratch import ScratchDirectory
from phalanx.run.trained.model import TrainedModel
from phalanx.run.trained.payloads import EvaluatePayload, GeneratePayload, ModelPayload

# By the payload: the function of phalanx.run.trained.rank that takes it, and what ranks do there,
# as messages say it.
ENTRY_OF_PAYLOAD: Mapping[type, tuple[str, str]] = {
    EvaluatePayload: ("evaluate_as_rank", "evaluating"),
    GeneratePayload: ("continue_texts", "generating"),
}


class RanksEndedEarlyError(Exception):
    """Ranks that ended before their work was done, and refused nothing.

    A person stopped them, or code failed: then `message` has its traceback, without secrets.
    `exit_code` is that of the process that started them.
    """

    def __init__(self, exit_code: int, message: str = "") -> None:
        super().__init__(message)
        self.exit_code, self.message = exit_code, message


def build_model_payload_fields(
    model: TrainedModel, plan: Plan, scratch: ScratchDirectory
) -> ModelPayload:
    """The part of a payload that says which model ranks open, how they share it and where they
    write."""
    checkpoint = ""
    if model.folder is not None:
        checkpoint = model.folder.url
    return ModelPayload(
        job=model.job,
        plan=plan,
        run_dir=scratch.directory,
        checkpoint=checkpoint,
        step=model.step or 0,
        casts=model.is_imported,
    )


def run_payload_in_ranks(
    payload: EvaluatePayload | GeneratePayload,
    scratch: ScratchDirectory,
    on_tick: Callable[[], None],
) -> None:
    """Run the work of `payload` on the ranks of its plan until they are done.

    Raises the PhalanxError that a rank raised, or RanksEndedError.
    """
    directory, model = scratch.directory, payload.model
    function, doing = ENTRY_OF_PAYLOAD[type(payload)]
    spec = LaunchSpec(
        entry=f"phalanx.run.trained.rank:{function}",
        attempts=RepeatedAttempts(lambda: payload),
        num_ranks=model.plan.world_size,
        run_dir=directory,
        preload=(
            "torch",
            "torch._dynamo",
            "phalanx.run.trained.rank",
            *list_transformers_modules(model.job.model.kind),
        ),
        stepless=doing,
        # There is nothing to save.
        grace_s=1.0,
    )
    bus = Bus(rank=-1, attempt=0, run_dir=directory)
    try:
        outcome = supervise_ranks(spec, bus=bus, on_tick=on_tick, say=lambda line: None)
    finally:
        bus.close()
    if (refusal := scratch.find_error_that_rank_raised(outcome)) is not None:
        raise refusal
    if outcome.status == "failed":
        message = Redactor(os.environ).redact_text(scratch.build_rank_failure_message(outcome))
        raise RanksEndedEarlyError(outcome.exit_code or ExitCode.INTERNAL, message)
    if outcome.exit_code != ExitCode.OK:
        raise RanksEndedEarlyError(outcome.exit_code)


def require_result_file(path: Path) -> None:
    """Raise PhalanxError where ranks ended well and left nothing: a module of the user's that
    exits, say.
    """
    if not path.is_file():
        raise PhalanxError(
            "the ranks ended and left no result", fix="look for an exit() in your own code"
        )
