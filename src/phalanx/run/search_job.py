"""The search for a layout of a job, as `phalanx plan` makes it, and the files that it leaves.

Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.core.batch import BYTE_VOCAB_SIZE
from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.errors import LayoutError, UsageError
from phalanx.core.files import write_bytes_atomically, write_json_atomically
from phalanx.job.copies import apply_job_keys
from phalanx.job.hugging_face import is_hugging_face
from phalanx.job.model import find_vocab_size_of
from phalanx.job.schema import Data, Job
from phalanx.job.toml import format_toml_value
from phalanx.job.user_dataset import is_given_unknown_samples
from phalanx.plan.cluster import Cluster
from phalanx.plan.described_cluster import choose_cluster_of_job
from phalanx.plan.leaf_tree import require_layouts_may_be_searched
from phalanx.plan.search.result import SearchResult
from phalanx.plan.search.search import search_layouts
from phalanx.plan.search.task import SearchTask, build_search_task

if TYPE_CHECKING:
    from phalanx.job.module_probe import TellProgress


@dataclass(frozen=True)
class JobSearch:
    """A job, the search that was made for it, and what it found."""

    job: Job
    task: SearchTask
    result: SearchResult

    @property
    def job_text(self) -> str:
        """The job file that trains with the winner; "" where nothing fits."""
        if self.result.winner is None:
            return ""
        return format_job_file(apply_job_keys(self.job, self.result.winner.job_keys))


def can_predict_step_times(job: Job) -> bool:
    """True where step times can be predicted: for a described cluster, or GPUs of the table."""
    return choose_cluster_of_job(job).accelerator is not None


def prepare_layout_search(
    job: Job, cluster: Cluster | None = None, tell: TellProgress | None = None
) -> SearchTask:
    """The search for a job, with the vocabulary of its model or of its data. `tell` hears how far
    the measuring of a module is.

    Raises LayoutError (exit 3), DataError (exit 4) for data that a run would refuse.
    """
    require_layouts_may_be_searched(job)
    vocab_size = _find_vocab_size_before_training(job)
    sample_form = None
    if is_given_unknown_samples(job):
        # Here: a job on text has no use for it.
        from phalanx.run.sample_form import read_sample_form

        sample_form = read_sample_form(job)
    task = build_search_task(
        job, cluster=cluster, vocab_size=vocab_size, sample_form=sample_form, tell=tell
    )
    if task.shape.activations is None:
        fix = "without --gpu or --instance the plan is of its weights alone"
        if sample_form is None and not is_hugging_face(job.model.kind):
            fix = (
                "it was given token ids [sequences, tokens]; samples of another kind are those of"
                f" data.source=package.module:factory, a dataset of your own; {fix}"
            )
        raise LayoutError(
            f"whether the job fits is not known: model {job.model.kind!r} cannot be traced",
            why=getattr(task.shape, "why_untraced", None) or None,
            fix=fix,
        )
    return task


def search_layouts_of_job(
    job: Job, cluster: Cluster | None = None, tell: TellProgress | None = None
) -> JobSearch:
    """The best layouts of a job; where nothing fits, what would. `tell` hears how far the measuring
    of a module is.

    Raises LayoutError where no layout can be had, with the keys that contradict each other.
    """
    task = prepare_layout_search(job, cluster, tell)
    try:
        result = search_layouts(task)
    except LayoutError as error:
        # Here and below: most jobs have a layout that fits.
        from phalanx.plan.search.contradiction import explain_contradiction

        raise explain_contradiction(task, error) from None
    if result.winner is None:
        from phalanx.plan.search.nearest import find_nearest_fits

        result = replace(result, nearest=find_nearest_fits(task))
    return JobSearch(job, task, result)


def _find_vocab_size_before_training(job: Job) -> int | None:
    """The vocabulary that the model says, or that the data has; None for the default's bytes."""
    size = find_vocab_size_of(job.model)
    is_default = job.data.source == Data().source and not job.data.mixture
    if is_default and not _brings_tokenizer(job) and (size or BYTE_VOCAB_SIZE) >= BYTE_VOCAB_SIZE:
        return size  # the default's text, byte by byte
    # Only now: they read tokenizers and data, which most searches are made without.
    from phalanx.data.tokenizer import BYTE_TOKENIZER_KIND
    from phalanx.run.tokens import find_job_tokens

    tokens = find_job_tokens(job)
    if (
        size is not None
        or job.model.is_foreign
        or (is_default and tokens.default in ("", BYTE_TOKENIZER_KIND))
    ):
        return size
    from phalanx.data.look import summarize_data_sources

    return summarize_data_sources(
        job.data, vocab_size=None, default_tokenizer=tokens.default
    ).vocab_size


def _brings_tokenizer(job: Job) -> bool:
    """True if the job names a tokenizer, or a model that may come with one."""
    return (
        job.data.tokenizer is not None
        or job.model.init_from is not None
        or is_hugging_face(job.model.kind)
    )


def format_job_file(job: Job) -> str:
    """The keys that a job gives, as the text of a job file."""
    body: Mapping[str, Mapping[str, Any]] = json.loads(job.model_dump_json(exclude_unset=True))
    lines = []
    for section, keys in body.items():
        if not keys:
            continue
        lines.append(f"[{section}]")
        lines += [f"{key} = {format_toml_value(value)}" for key, value in keys.items()]
        lines.append("")
    return "\n".join(lines)


def write_search_files(
    searched: JobSearch, document: Mapping[str, Any], directory: Path, *, force: bool = False
) -> list[Path]:
    """Write job.toml (where something fits) and plan.json, which holds `document`, into
    `directory`; returns the files.

    Raises UsageError where one of them, or the page.html beside them, is there already,
    ResourceError where it cannot be written.
    """
    texts = {"plan.json": "", "page.html": ""}
    if searched.result.winner is not None:
        texts["job.toml"] = searched.job_text
    for name in texts:
        if (directory / name).exists() and not force:
            raise UsageError(
                "is there already",
                where=str(directory / name),
                fix="give another --out, or --force to replace it",
            )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_json_atomically(directory / "plan.json", document, durable=False)
        if texts.get("job.toml"):
            write_bytes_atomically(
                directory / "job.toml", texts["job.toml"].encode(), durable=False
            )
    except OSError as error:
        raise build_path_resource_error(
            error, "writing the plan", directory, place="--out"
        ) from None
    return [directory / name for name in sorted(texts)]
