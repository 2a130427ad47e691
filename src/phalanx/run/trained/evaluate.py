"""Evaluate a checkpoint: find the data it is evaluated on, start the ranks once, return what they
measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.core.errors import CheckpointError, DataError, UsageError
from phalanx.core.files import read_json
from phalanx.data.corpus import Corpus, verify_corpus_checksums
from phalanx.data.order import split_by_weights
from phalanx.data.prepare import prepare_corpus
from phalanx.data.tokenizer import BYTE_TOKENIZER_KIND
from phalanx.data.tokenizer_files import collect_tokenizer_files
from phalanx.data.tokens import Split
from phalanx.job.schema import Eval, Job
from phalanx.job.user_dataset import is_own_dataset
from phalanx.observe.events import EvalFinished
from phalanx.observe.tail import read_recorded_events
from phalanx.observe.units import MetricUnits, choose_metric_units_of_job
from phalanx.plan.plan import Plan
from phalanx.plan.warnings import NO_EXTRA_REASONS_OR_WARNINGS, ExtraReasonsAndWarnings
from phalanx.run.scratch import ScratchDirectory
from phalanx.run.tokens import find_job_tokens
from phalanx.run.trained.files import PROGRESS_FILE_NAME, RESULT_FILE_NAME
from phalanx.run.trained.launch import (
    build_model_payload_fields,
    require_result_file,
    run_payload_in_ranks,
)
from phalanx.run.trained.model import DATA_KEYS, TrainedModel
from phalanx.run.trained.payloads import EvaluatePayload

# What a command line may change of the job that trained the model.
EVALUATION_KEYS = (
    *("data", "eval", "parallel", "precision", "cluster", "resilience.collective_timeout_s"),
    *(
        "train.micro_batch_size",
        "train.global_batch_size",
        "train.compile",
        "train.loss_chunk_tokens",
    ),
)
# e to a little more than this is no fp64: the largest is about e^709.8.
MAX_EXPONENT_OF_PERPLEXITY = 700.0


@dataclass(frozen=True)
class EvaluationData:
    """The corpus and the split of it that a model is evaluated on.

    `is_of_run`: the run that trained the model evaluated on the same data. `max_tokens`: the most
    tokens (samples of a user's own dataset) that are evaluated, where the split has more. `remarks`
    say which tokenizer made the tokens, and warn where the weights do not know them.
    """

    corpus: Corpus
    split: Split
    is_of_run: bool
    max_tokens: int | None = None
    remarks: ExtraReasonsAndWarnings = NO_EXTRA_REASONS_OR_WARNINGS


@dataclass(frozen=True)
class EvaluationTask:
    """A model, its evaluation data and the plan by which ranks share the work."""

    model: TrainedModel
    data: EvaluationData
    plan: Plan


@dataclass(frozen=True)
class EvaluationProgress:
    """Number of batches that a rank has evaluated, and the number in all."""

    num_done: int
    num_batches: int


@dataclass(frozen=True)
class EvaluationResult:
    """Results that ranks measured. Losses are means per target; `metrics` are those of the
    objective, by name.

    `recorded_loss`: the loss that the run recorded at the same step, over equally many targets of
    the same data; None if it recorded none.
    """

    task: EvaluationTask
    loss: float
    loss_by_source: Mapping[str, float]
    metrics: Mapping[str, float]
    num_targets: int
    evaluated_s: float
    recorded_loss: float | None
    units: MetricUnits

    @property
    def perplexity(self) -> float | None:
        """e to the power of the loss; None where the loss is not in nats."""
        if not self.units.loss:
            return None
        if self.loss >= MAX_EXPONENT_OF_PERPLEXITY:
            return math.inf
        return math.exp(self.loss)

    def to_json(self) -> dict[str, Any]:
        """The facts of `phalanx eval --json`, without the seconds it took in all."""
        model, data, plan = self.task.model, self.task.data, self.task.plan
        run, split, loss_by_source = None, "held_out", {}
        if model.run_dir is not None:
            run = str(model.run_dir)
        if data.split == "train":
            split = "all" if data.max_tokens is None else "part"
        if len(self.loss_by_source) > 1:
            loss_by_source = dict(self.loss_by_source)
        return {
            "checkpoint": model.name,
            "step": model.step,
            "run": run,
            "source": data.corpus.source,
            "split": split,
            "max_tokens": data.max_tokens,
            "loss": self.loss,
            "unit": self.units.loss or None,
            "perplexity": self.perplexity,
            "num_targets": self.num_targets,
            "loss_by_source": loss_by_source,
            "metrics": self.metrics,
            "recorded_loss": self.recorded_loss,
            "evaluated_s": self.evaluated_s,
            "world_size": plan.world_size,
            "layout": plan.layout.to_json(),
            "device": plan.device,
            "warnings": [warning.text for warning in data.remarks.warnings],
        }


def prepare_evaluation(model: TrainedModel, scratch: ScratchDirectory) -> EvaluationTask:
    """Prepare the data to evaluate `model` on and plan how ranks share the work.

    The data is the run's own, or what the model's overrides name, which is prepared inside
    `scratch`. Raises UsageError, DataError, CheckpointError or LayoutError.
    """
    model = _use_default_eval_tokens(model)
    data = _prepare_evaluation_corpus(model, scratch.directory)
    if data.split == "train" and not model.overridden_keys("eval.tokens"):
        model = _copy_model_with_eval_tokens(model, _compute_tokens_to_read_all(data.corpus))
    if not _is_split_read_whole(data, model.job.eval.tokens):
        data = replace(data, max_tokens=model.job.eval.tokens)
    return EvaluationTask(model, data, model.make_plan(vocab_size=data.corpus.vocab_size))


def evaluate(
    task: EvaluationTask,
    scratch: ScratchDirectory,
    *,
    on_progress: Callable[[EvaluationProgress | None], None],
) -> EvaluationResult:
    """Start the ranks of `task` and return what they measured.

    `on_progress` is called several times a second; with None until ranks have counted a batch.
    Raises the PhalanxError of a rank, or RanksEndedError.
    """
    directory, data = scratch.directory, task.data
    model = build_model_payload_fields(task.model, task.plan, scratch)
    payload = EvaluatePayload(model, data.corpus.directory.absolute(), data.split)
    progress_file = directory / PROGRESS_FILE_NAME
    run_payload_in_ranks(
        payload, scratch, lambda: on_progress(_read_evaluation_progress(progress_file))
    )
    require_result_file(directory / RESULT_FILE_NAME)
    facts = read_json(directory / RESULT_FILE_NAME)
    recorded_loss = None
    if data.is_of_run:
        recorded_loss = _find_loss_recorded_by_run(task.model, facts["num_targets"])
    return EvaluationResult(
        task=task,
        loss=facts["loss"],
        loss_by_source=facts["loss_by_source"],
        metrics=facts["metrics"],
        num_targets=facts["num_targets"],
        evaluated_s=facts["evaluated_s"],
        recorded_loss=recorded_loss,
        units=choose_metric_units_of_job(task.model.job.to_json()),
    )


def _use_default_eval_tokens(model: TrainedModel) -> TrainedModel:
    """A run that evaluates nothing while it trains (eval.tokens=0) is evaluated all the same."""
    if model.job.eval.tokens:
        return model
    if model.overridden_keys("eval.tokens"):
        raise UsageError(
            "eval.tokens=0 leaves nothing to evaluate",
            fix="give a number of tokens, or leave it out",
        )
    return _copy_model_with_eval_tokens(model, Eval().tokens)


def _copy_model_with_eval_tokens(model: TrainedModel, num_tokens: int) -> TrainedModel:
    evaluation = model.job.eval.model_copy(update={"tokens": num_tokens})
    return replace(model, job=model.job.model_copy(update={"eval": evaluation}))


def _is_split_read_whole(data: EvaluationData, eval_tokens: int) -> bool:
    """True if `eval_tokens` are enough for each token of the split that another one predicts, or
    for each sample of a user's own dataset."""
    corpus = data.corpus
    if corpus.user is not None:
        return eval_tokens >= corpus.user.num_held_out
    budgets = split_by_weights(eval_tokens, corpus.weights)
    return all(
        component.splits[data.split].num_tokens - 1 <= budget
        for component, budget in zip(corpus.components, budgets, strict=True)
    )


def _compute_tokens_to_read_all(corpus: Corpus) -> int:
    """The eval.tokens by which every source of a mixture is read to its end: sources share it by
    their weights.
    """
    total_weight = sum(corpus.weights)
    num_tokens = 0
    for component, weight in zip(corpus.components, corpus.weights, strict=True):
        size = component.splits["train"].num_tokens
        # Solved for all tokens: a source gets tokens * weight / total_weight of them.
        num_tokens = max(num_tokens, math.ceil((size + 1) * total_weight / weight))
    return num_tokens


def _prepare_evaluation_corpus(model: TrainedModel, directory: Path) -> EvaluationData:
    """The run's own data, or what the overrides name, prepared in `directory`."""
    corpus_of_run = model.corpus()
    if corpus_of_run is not None and not model.overridden_keys(*DATA_KEYS):
        verify_corpus_checksums(corpus_of_run)
        _require_samples_to_evaluate(corpus_of_run, "held_out")
        return EvaluationData(corpus_of_run, "held_out", is_of_run=True)
    names_source = bool(model.overridden_keys("data.source", "data.mixture"))
    if model.folder is None and not names_source:
        raise UsageError("nothing says on what", where=model.location, fix="add data.source=TEXT")
    job = _use_tokenizer_of_run(model, corpus_of_run)
    # Of data that the model was not trained on, no part has to be held out: all of it is evaluated.
    reads_all = names_source and not is_own_dataset(job.data.source)
    reads_all = reads_all and not model.overridden_keys("data.held_out_fraction")
    settings = job.data
    split: Split = "held_out"
    if reads_all:
        settings = job.data.model_copy(update={"held_out_fraction": 0.0, "seq_len": 1})
        split = "train"
    vocab_size = None
    if model.plan is not None and model.plan.vocab_size:
        vocab_size = model.plan.vocab_size
    tokens = find_job_tokens(job)
    tokenizer = tokens.default or BYTE_TOKENIZER_KIND
    corpus = prepare_corpus(
        settings, directory / "data", vocab_size=vocab_size, default_tokenizer=tokenizer
    )
    _require_tokenizer_of_model(model, corpus)
    _require_samples_to_evaluate(corpus, split)
    return EvaluationData(
        corpus, split, is_of_run=False, remarks=tokens.list_corpus_remarks(corpus)
    )


def _use_tokenizer_of_run(model: TrainedModel, corpus_of_run: Corpus | None) -> Job:
    """The job, by which other text goes through the tokenizer of the run's text, wherever the run
    has it.
    """
    job = model.job
    if corpus_of_run is None or not corpus_of_run.is_text:
        return job
    if model.overridden_keys("data.tokenizer") or is_own_dataset(job.data.source):
        return job
    from phalanx.data.token_sources import find_token_source_kind

    sources = [part.source for part in job.data.mixture] or [job.data.source]
    # Token ids need no tokenizer.
    if all(find_token_source_kind(source) is not None for source in sources):
        return job
    path = collect_tokenizer_files(corpus_of_run).files.get("tokenizer.json")
    tokenizer = None
    if path is not None:
        tokenizer = str(path.absolute())
    return job.model_copy(update={"data": job.data.model_copy(update={"tokenizer": tokenizer})})


def _require_tokenizer_of_model(model: TrainedModel, corpus: Corpus) -> None:
    of_model, of_data = model.tokenizer_digest, corpus.tokenizer_digest
    if of_model and of_data and of_model != of_data:
        raise CheckpointError(
            f"it was trained on tokens of tokenizer {of_model}, and the data is of {of_data}",
            where=model.name,
            fix=(
                "give text, which goes through the run's own tokenizer, or shards that were built"
                " with it"
            ),
        )


def _require_samples_to_evaluate(corpus: Corpus, split: Split) -> None:
    """Raise DataError unless `split` has a sample, or two tokens, of which one predicts the
    other."""
    if corpus.user is not None:
        size, least = corpus.user.num_held_out, 1
    else:
        size, least = corpus.splits[split].num_tokens, 2
    if size < least:
        problem = "there is no token to predict"
        if split == "held_out":
            problem = "nothing is held out to evaluate"
        raise DataError(
            problem,
            where=f"data.source {corpus.source}",
            fix="give data.source=TEXT, all of which is evaluated",
        )


def _read_evaluation_progress(path: Path) -> EvaluationProgress | None:
    try:
        facts = read_json(path)
        return EvaluationProgress(facts["done"], facts["total"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _find_loss_recorded_by_run(model: TrainedModel, num_targets: int) -> float | None:
    """The last loss that the run recorded at this step over as many targets; None if there is
    none."""
    if model.run_dir is None:
        return None
    loss = None
    for envelope in read_recorded_events(model.run_dir, EvalFinished):
        event = envelope.event
        if (
            isinstance(event, EvalFinished)
            and event.step == model.step
            # Over other data the losses could not be compared.
            and event.num_targets == num_targets
        ):
            loss = event.loss
    return loss
