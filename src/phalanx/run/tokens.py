"""The tokens that a job's model reads: the tokenizer that it brings, and remarks about the data's.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint.stores import (
    find_run_directory,
    is_location_of_one_checkpoint,
    is_store_url,
)
from phalanx.core.places import expand_home
from phalanx.core.store_urls import parse_file_url_directory
from phalanx.data.corpus import Corpus
from phalanx.data.model_tokenizer import (
    ModelTokenizer,
    SourceTokenizer,
    default_tokenizer,
    describe_tokenizers,
    find_corpus_tokenizers,
    find_directory_tokenizer,
    find_run_tokenizer,
    find_source_tokenizers,
    require_tokenizer_fits_vocabulary,
)
from phalanx.job.hugging_face import find_config_file, find_weights_directory, is_hugging_face
from phalanx.job.model import find_vocab_size_of
from phalanx.job.schema import Job, Model
from phalanx.plan.warnings import ExtraReasonsAndWarnings


@dataclass(frozen=True)
class JobTokens:
    """Tokens of a job's sources.

    `default`: the tokenizer of text where data.tokenizer names none.
    """

    job: Job
    brought: ModelTokenizer | None
    sources: tuple[SourceTokenizer, ...]
    default: str
    vocab_size: int | None

    def list_corpus_remarks(self, corpus: Corpus | None = None) -> ExtraReasonsAndWarnings:
        """Remarks about the corpus once it is there, else about what it will be."""
        sources: Sequence[SourceTokenizer] = self.sources
        if corpus is not None:
            sources = find_corpus_tokenizers(corpus, self.sources, self.job.data)
        return describe_tokenizers(self.brought, sources, self.vocab_size)


def find_job_tokens(job: Job, *, is_prepared: bool = False) -> JobTokens:
    """Find how the sources of a job become tokens. With `is_prepared` they are tokens already.

    Raises DataError for a tokenizer that cannot be read, or that has more tokens than the model has
    rows.
    """
    brought, vocab_size = find_tokenizer_beside_weights(job.model), find_vocab_size_of(job.model)
    if is_prepared:
        return JobTokens(job, brought, (), "", vocab_size)
    sources = find_source_tokenizers(job.data, brought)
    require_tokenizer_fits_vocabulary(sources, vocab_size)
    default = ""
    # Token ids need no tokenizer.
    if any(source.is_text for source in sources):
        default = default_tokenizer(job.data, brought)
    return JobTokens(job, brought, tuple(sources), default, vocab_size)


def find_tokenizer_beside_weights(model: Model) -> ModelTokenizer | None:
    """The tokenizer of the weights that a model begins with, else of its directory.

    None for any other model.

    Raises LayoutError for a `hf:PATH` that is none.
    """
    directory_tokenizer = None
    if is_hugging_face(model.kind):
        assert model.kind is not None
        is_trained = find_weights_directory(model.kind) is not None
        directory_tokenizer = find_directory_tokenizer(
            find_config_file(model.kind).parent, f"model.kind={model.kind}", is_trained=is_trained
        )
    if model.init_from is None:
        return directory_tokenizer
    owner = f"model.init_from={model.init_from}"
    run_dir = _find_enclosing_run_or_import(model.init_from)
    of_weights = None
    if run_dir is not None:
        of_weights = find_run_tokenizer(run_dir, owner)
    if of_weights is not None and (
        of_weights.name is not None or not of_weights.is_missing or directory_tokenizer is None
    ):
        return of_weights
    if directory_tokenizer is not None:
        return directory_tokenizer
    return ModelTokenizer(
        owner, None, None, Path(), True, f"{model.init_from} holds no tokenizer", is_missing=True
    )


def _find_enclosing_run_or_import(location: str) -> Path | None:
    """The run or import that `place` is, or lies in; None for a store elsewhere."""
    directory = parse_file_url_directory(location)
    if directory is None and is_store_url(location):
        return None
    path = Path(find_run_directory(expand_home(directory or location)))
    if is_location_of_one_checkpoint(path):
        if path.absolute().parent.name != "checkpoints":
            return None
        return path.absolute().parents[1]
    return path
