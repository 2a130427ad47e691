"""`phalanx eval`: find the checkpoint and its data, run the ranks once over it, say what came out."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.cli._arguments import split_arguments
from phalanx.cli._checkpoint_output import refusing, tell
from phalanx.cli._json import print_json
from phalanx.cli._launched import refuse_launcher
from phalanx.cli._progress import ProgressLine
from phalanx.core.errors import CheckpointError, DataError, ExitCode, UsageError
from phalanx.core.files import read_json
from phalanx.core.units import format_seconds
from phalanx.data.corpus import Corpus, verify_corpus
from phalanx.data.prepare import prepare_corpus
from phalanx.data.tokenizer import BYTES
from phalanx.data.tokenizer_files import tokenizer_files
from phalanx.data.tokens import Split
from phalanx.job.own_dataset import is_own_dataset
from phalanx.job.schema import Eval, Job
from phalanx.observe.events import EvalFinished
from phalanx.observe.tail import recorded
from phalanx.observe.units import Units, units_of
from phalanx.plan.warnings import NOTHING_MORE, MoreRemarks
from phalanx.run.scratch import scratch_directory
from phalanx.run.tokens import find_tokens
from phalanx.run.trained.launch import require_result, run_ranks
from phalanx.run.trained.model import DATA_KEYS, Subject, describe_ranks, open_subject

SECTIONS = (
    *("data", "eval", "parallel", "precision", "cluster", "resilience.collective_timeout_s"),
    *("train.micro_batch_size", "train.global_batch_size", "train.compile", "train.loss_chunk_tokens"),
)
RESULT, PROGRESS = "result.json", "progress.json"


@dataclass(frozen=True)
class Evaluated:
    """What is evaluated: a corpus, which side of it, and whether that is what the run evaluated, too. `remarks`: by
    which tokens, and whether the weights know those.
    """

    corpus: Corpus
    split: Split
    is_runs_own: bool
    remarks: MoreRemarks = NOTHING_MORE


def evaluate(place: str, arguments: Sequence[str], *, best: bool, as_json: bool) -> int:
    """The verb. Raises PhalanxError for what a user can mend; returns the exit code."""
    began = time.monotonic()
    with refusing(as_json), scratch_directory("eval") as scratch:
        refuse_launcher("eval")
        directory = scratch.directory
        job_file, overrides = split_arguments(arguments)
        subject = open_subject(place, job_file, overrides, best=best, sections=SECTIONS, alone=False)
        subject = _with_tokens_to_evaluate(subject)
        data = _data(subject, directory)
        if data.split == "train" and not subject.gives("eval.tokens"):
            subject = _with_tokens(subject, _all_tokens(data.corpus))
        plan = subject.make_plan(vocab_size=data.corpus.vocab_size)
        if not as_json:
            tell(f"eval    {subject.name}, on {describe_ranks(subject, plan)}")
            tell(f"data    {_data_in_words(data)}")
            for text in data.remarks.reasons:
                tell(f"why     {text}")
            for warning in data.remarks.warnings:
                tell(f"warning {warning.text}")
        with ProgressLine("evaluating") as line:
            more = {"data_dir": str(data.corpus.directory.absolute()), "split": data.split}
            code = run_ranks("evaluate", subject, plan, scratch, more, lambda: _show(directory / PROGRESS, line))
        if code != ExitCode.OK:
            return code
        require_result(directory / RESULT)
        found = read_json(directory / RESULT)
    units = units_of(subject.job.to_json())
    before = _recorded(subject, found) if data.is_runs_own else None
    facts = _facts(subject, data, found, before, units)
    if as_json:
        wall_s = time.monotonic() - began
        layout = {"world_size": plan.world_size, "layout": plan.layout.to_json(), "device": plan.device}
        warnings = [warning.text for warning in data.remarks.warnings]
        print_json("eval", {**facts, **layout, "warnings": warnings, "wall_s": wall_s}, indent=1)
    else:
        for text in _words(found, before, subject, units):
            tell(text)
    return ExitCode.OK


def _with_tokens_to_evaluate(subject: Subject) -> Subject:
    """A run that evaluates nothing while it trains (eval.tokens=0) is evaluated all the same."""
    if subject.job.eval.tokens:
        return subject
    if subject.gives("eval.tokens"):
        raise UsageError("eval.tokens=0 leaves nothing to evaluate", fix="give a number of tokens, or leave it out")
    return _with_tokens(subject, Eval().tokens)


def _with_tokens(subject: Subject, count: int) -> Subject:
    job = subject.job
    return replace(subject, job=job.model_copy(update={"eval": job.eval.model_copy(update={"tokens": count})}))


def _all_tokens(corpus: Corpus) -> int:
    """What eval.tokens must be for every source of a mixture to be read whole: they share it by their weights."""
    total = sum(corpus.weights)
    sizes = [component.splits["train"].num_tokens for component in corpus.components]
    return max(math.ceil((size + 1) * total / weight) for size, weight in zip(sizes, corpus.weights, strict=True))


def _data(subject: Subject, directory: Path) -> Evaluated:
    """What is evaluated: the run's own data, or what the command line names, prepared in `directory`."""
    given = subject.gives(*(f"data.{key}" for key in DATA_KEYS))
    own = subject.corpus()
    if own is not None and not given:
        verify_corpus(own)
        _require_held_out(own, "held_out")
        return Evaluated(own, "held_out", is_runs_own=True)
    if subject.folder is None and not subject.gives("data.source", "data.mixture"):
        raise UsageError("nothing says on what", where=subject.place, fix="add data.source=TEXT")
    job = _job_with_its_tokenizer(subject, own)
    is_other = bool(subject.gives("data.source", "data.mixture"))
    whole = is_other and not is_own_dataset(job.data.source) and not subject.gives("data.held_out_fraction")
    wanted = job.data.model_copy(update={"held_out_fraction": 0.0, "seq_len": 1} if whole else {})
    vocab_size = subject.plan.vocab_size if subject.plan is not None and subject.plan.vocab_size else None
    tokens = find_tokens(job)
    corpus = prepare_corpus(
        wanted, directory / "data", vocab_size=vocab_size, default_tokenizer=tokens.default or BYTES
    )
    _require_same_tokenizer(subject, corpus)
    split: Split = "train" if whole else "held_out"
    _require_held_out(corpus, split)
    return Evaluated(corpus, split, is_runs_own=False, remarks=tokens.remarks(corpus))


def _job_with_its_tokenizer(subject: Subject, own: Corpus | None) -> Job:
    """Other text goes through the tokenizer that the run's text went through, wherever the run has it."""
    job = subject.job
    if own is None or not own.is_text or subject.gives("data.tokenizer") or is_own_dataset(job.data.source):
        return job
    from phalanx.data.token_sources import find_kind

    sources = [part.source for part in job.data.mixture] or [job.data.source]
    if all(find_kind(source) is not None for source in sources):  # token ids know theirs
        return job
    files = tokenizer_files(own).files
    path = next((str(path.absolute()) for name, path in files.items() if name == "tokenizer.json"), None)
    return job.model_copy(update={"data": job.data.model_copy(update={"tokenizer": path})})


def _require_same_tokenizer(subject: Subject, corpus: Corpus) -> None:
    trained, given = subject.tokenizer_digest, corpus.tokenizer_digest
    if trained and given and trained != given:
        raise CheckpointError(
            f"it was trained on tokens of tokenizer {trained}, and the data is of {given}",
            where=subject.name,
            fix="give text, which goes through the run's own tokenizer, or shards that were built with it",
        )


def _require_held_out(corpus: Corpus, split: Split) -> None:
    count = corpus.user.num_held_out if corpus.user is not None else corpus.splits[split].num_tokens
    if count < (1 if corpus.user is not None else 2):
        raise DataError(
            "nothing is held out to evaluate" if split == "held_out" else "there is no token to predict",
            where=f"data.source {corpus.source}",
            fix="give data.source=TEXT, all of which is evaluated",
        )


def _show(path: Path, line: ProgressLine) -> None:
    try:
        told = read_json(path)
        line.update(told["done"], told["total"], instead=f"{told['done']:,}/{told['total']:,} batches of a rank")
    except (OSError, ValueError, KeyError, TypeError):
        line.update(0, 1, instead="starting")


def _recorded(subject: Subject, found: Mapping[str, Any]) -> float | None:
    """The loss that the run wrote down at this step, of as many targets; None if it did not evaluate then."""
    if subject.run_dir is None:
        return None
    same = [
        envelope.event.loss
        for envelope in recorded(subject.run_dir, EvalFinished)
        if isinstance(envelope.event, EvalFinished)
        and envelope.event.step == subject.step
        and envelope.event.num_targets == found["num_targets"]
    ]
    return same[-1] if same else None


def _facts(
    subject: Subject, data: Evaluated, found: Mapping[str, Any], before: float | None, units: Units
) -> dict[str, Any]:
    return {
        "checkpoint": subject.name,
        "step": subject.step,
        "run": str(subject.run_dir) if subject.run_dir is not None else None,
        "source": data.corpus.source,
        "split": "all" if data.split == "train" else "held_out",
        "loss": found["loss"],
        "unit": units.loss or None,
        "perplexity": _perplexity(found["loss"]) if units.loss else None,
        "num_targets": found["num_targets"],
        "loss_by_source": found["loss_by_source"] if len(found["loss_by_source"]) > 1 else {},
        "metrics": found["metrics"],
        "recorded_loss": before,
        "evaluated_s": found["evaluated_s"],
    }


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _data_in_words(data: Evaluated) -> str:
    corpus = data.corpus
    if corpus.user is not None:
        return f"{corpus.source}: {corpus.user.num_held_out:,} samples held out"
    facts = corpus.splits[data.split]
    what = "tokens held out" if data.split == "held_out" else "tokens, all of it"
    return f"{corpus.source}: {facts.num_tokens:,} {what}"


def _words(found: Mapping[str, Any], before: float | None, subject: Subject, units: Units) -> list[str]:
    perplexity = f", perplexity {_perplexity(found['loss']):.4g}" if units.loss else ""
    count, took = f"{found['num_targets']:,} {units.items}", format_seconds(found["evaluated_s"])
    lines = [f"loss    {found['loss']:.4f} {units.loss}".rstrip() + f"{perplexity}   ({count}, {took})"]
    if len(found["loss_by_source"]) > 1:
        lines += [f"        {name}  {loss:.4f}" for name, loss in found["loss_by_source"].items()]
    lines += [f"        {name}  {value:.4f}" for name, value in found["metrics"].items()]
    if before is not None:
        same = "the same" if before == found["loss"] else f"{found['loss'] - before:+.1e} from it here"
        lines.append(f"        the run recorded {before:.4f} at step {subject.step}: {same}")
    return lines
