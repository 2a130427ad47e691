"""A rank that opens a checkpoint and evaluates it, or continues texts with it.

The supervisor forks into these.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sized
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.checkpoint.reading.load import load_checkpoint_into_shards
from phalanx.checkpoint.stores import find_checkpoint_at_or_newest
from phalanx.core.black_box import BlackBox, RankIdentity
from phalanx.core.errors import DataError, ExitCode, LayoutError
from phalanx.core.files import write_json_atomically
from phalanx.core.phases import PhaseTimer
from phalanx.core.typed_json import JsonObject
from phalanx.data.corpus import load_corpus
from phalanx.job.schema import Job
from phalanx.launch.paths import black_box_path
from phalanx.launch.rank_link import RankLink
from phalanx.mesh.collective_recorder import record_collectives
from phalanx.mesh.determinism import using_deterministic_algorithms
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.nn.build import build_model, build_objective
from phalanx.parallel.executor import Batch
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.parallelize import discover_transforms, parallelize
from phalanx.plan.plan import Plan
from phalanx.run.data import open_held_out_batches, require_document_mask_support
from phalanx.run.trained.files import PROGRESS_FILE_NAME, RESULT_FILE_NAME, TOKENS_FILE_NAME
from phalanx.run.trained.payloads import EvaluatePayload, GeneratePayload, ModelPayload
from phalanx.train.evaluation import HeldOutBatches
from phalanx.train.evaluator import Evaluator
from phalanx.train.generate import SamplingRule, generate_tokens
from phalanx.train.stop import StopSignalFlags

PROGRESS_INTERVAL_S = 0.2
# Imported in the server, once, instead of in every rank.
discover_transforms()


@dataclass(frozen=True)
class OpenedModel:
    """The checkpoint's model on this rank, as its plan cuts it."""

    job: Job
    plan: Plan
    mesh: Mesh
    model: ParallelModel
    step: int

    @property
    def seed(self) -> int:
        return self.job.run.seed


def evaluate_as_rank(document: JsonObject, link: RankLink) -> int:
    """Evaluate as one rank, of the JSON of an EvaluatePayload.

    Rank 0 writes loss, targets and metrics.
    """
    payload = EvaluatePayload.from_json(document)
    run_dir = payload.model.run_dir
    with open_model_on_rank(payload.model) as opened:
        job, mesh = opened.job, opened.mesh
        corpus = load_corpus(payload.data_dir)
        require_document_mask_support(job, opened.model)
        held_out = open_held_out_batches(job, opened.plan, mesh, corpus, split=payload.split)
        if held_out is None:
            raise DataError(
                "nothing is held out",
                where=f"data.source {corpus.source}",
                fix="raise data.held_out_fraction",
            )
        if mesh.rank == 0:
            held_out = _report_batches_while_iterating(held_out, run_dir)
        began = time.monotonic()
        result = Evaluator(
            opened,
            mesh,
            objective=build_objective(job),
            held_out=held_out,
            source_weights=corpus.weight_of_name,
            stop=StopSignalFlags(),
        ).evaluate()
        if mesh.rank == 0:
            facts = {**asdict(result), "evaluated_s": time.monotonic() - began}
            write_json_atomically(run_dir / RESULT_FILE_NAME, facts)
        mesh.barrier()
    return ExitCode.OK


def continue_texts(document: JsonObject, link: RankLink) -> int:
    """Continue texts as one rank, of the JSON of a GeneratePayload.

    Rank 0 appends a line for each token, as it comes, and for the end of each text.
    """
    payload = GeneratePayload.from_json(document)
    sampling = SamplingRule(**asdict(payload.sampling), num_choices=payload.num_choices)
    with (
        open_model_on_rank(payload.model) as opened,
        open(payload.model.run_dir / TOKENS_FILE_NAME, "a") as file,
    ):

        def tell(**facts: Any) -> None:
            if opened.mesh.rank == 0:
                file.write(json.dumps(facts) + "\n")
                # Each token at once: the console reads along.
                file.flush()

        for number, prompt in enumerate(payload.prompts):
            began = time.monotonic()
            try:
                tokens = generate_tokens(
                    opened.model,
                    list(prompt),
                    num_tokens=payload.num_tokens,
                    context=payload.context,
                    # A seed for each: a text does not depend on how long those before it became.
                    seed=payload.seed + number,
                    sampling=sampling,
                    end=payload.end,
                    on_token=lambda token, number=number: tell(text=number, token=token),  # type: ignore[misc]
                )
            except TypeError as error:
                raise LayoutError(
                    "this model does not generate",
                    why=str(error),
                    fix="logits [batch, seq, vocab] are needed",
                ) from None
            tell(text=number, num_tokens=len(tokens), wall_s=time.monotonic() - began)
        opened.mesh.barrier()
    return ExitCode.OK


@contextlib.contextmanager
def open_model_on_rank(payload: ModelPayload) -> Iterator[OpenedModel]:
    """Join the other ranks, build the model and load its weights. Collective."""
    job, plan = payload.job, payload.plan
    rank = int(os.environ.get("RANK", "0"))
    identity = RankIdentity(rank, plan.layout.world_size, device=plan.device)
    box = BlackBox(black_box_path(payload.run_dir, rank), identity)
    phases = PhaseTimer(box)
    phases.enter("startup")
    timeout_s = job.resilience.collective_timeout_s
    deterministic = using_deterministic_algorithms(
        bool(job.train.deterministic), device=plan.device, compiles=plan.compile
    )
    with (
        deterministic,
        record_collectives(box),
        open_mesh(
            plan.layout,
            device=plan.device,
            timeout_s=timeout_s,
            collectives=plan.parallel.collectives,
        ) as mesh,
    ):
        module = build_model(job, plan.model_shape)
        # The initialisation of a user's own model may make more than a checkpoint holds.
        initialize = not payload.checkpoint or job.model.is_foreign
        model = parallelize(
            module, plan, mesh, phases=phases, seed=job.run.seed, initialize=initialize
        )
        if payload.checkpoint:
            folder = find_checkpoint_at_or_newest(payload.checkpoint)
            load_checkpoint_into_shards(
                folder,
                model.shards(),
                group=mesh,
                phases=phases,
                cast=payload.casts,
                weights_only=True,
            )
            model.refresh()
        phases.leave("startup")
        yield OpenedModel(job, plan, mesh, model, payload.step)


def _report_batches_while_iterating(held_out: HeldOutBatches, run_dir: Path) -> HeldOutBatches:
    """The same batches; how many of all were taken is written now and then."""
    total = sum(len(batches) for batches in held_out.values() if isinstance(batches, Sized))
    done, told_s = 0, 0.0

    def count(batches: Any) -> Iterator[Batch]:
        nonlocal done, told_s
        for batch in batches:
            # Counted when the next one is asked for: it is done by then.
            yield batch
            done += 1
            if time.monotonic() - told_s > PROGRESS_INTERVAL_S:
                told_s = time.monotonic()
                # Progress is for people: a disk that refuses it ends no evaluation.
                with contextlib.suppress(OSError):
                    write_json_atomically(
                        run_dir / PROGRESS_FILE_NAME, {"done": done, "total": total}
                    )

    # Not a generator: batches are iterated anew for each evaluation.
    class Counted:
        def __init__(self, batches: Any) -> None:
            self._batches = batches

        def __iter__(self) -> Iterator[Batch]:
            return count(self._batches)

    return {source: Counted(batches) for source, batches in held_out.items()}
