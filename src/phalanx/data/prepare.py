"""Building, or finding, what a job's [data] names, before the ranks start. Torch-free."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.errors import DataError
from phalanx.core.files import write_json_atomically
from phalanx.data.build import build_dataset
from phalanx.data.corpus import CORPUS_FILE_NAME, Corpus, CorpusComponent, SplitCounts, load_corpus
from phalanx.data.dataset import TokenizerFacts
from phalanx.data.token_sources import (
    CHANGED,
    SourceDescription,
    collect_source_facts,
    find_token_source_kind,
    id_out_of_range_error,
    map_token_arrays,
    require_token_ids_below,
)
from phalanx.data.tokenizer import BYTE_TOKENIZER_KIND, load_tokenizer
from phalanx.data.tokens import SPLITS, choose_split, split_into_train_and_held_out
from phalanx.data.workers import probe_user_dataset
from phalanx.job.schema import Data
from phalanx.job.user_dataset import is_own_dataset


def prepare_corpus(
    data: Data,
    out_dir: Path,
    *,
    vocab_size: int | None,
    default_tokenizer: str = BYTE_TOKENIZER_KIND,
    trained_on: str = "",
) -> Corpus:
    """Build, or find, what `data` names, and write the fact sheet to `out_dir`; or take the one
    that is there.

    `vocab_size` is the model's, None if it follows the data. `default_tokenizer` is for text where
    `data` names none. `trained_on`: the `content_digest` of what the run has read so far; empty if
    it has read nothing, or nobody knows. On an error nothing new stays in `out_dir`.

    Raises DataError (exit 4) for a source that is missing, unreadable, damaged, too short, that
    does not fit the vocabulary or has changed since, and ResourceError (exit 7) if `out_dir` cannot
    be written.
    """
    if os.path.exists(out_dir / CORPUS_FILE_NAME):
        corpus = load_corpus(out_dir)
        _require_same_preparation_keys(corpus, data)
        _require_data_of_run(corpus, trained_on)
        # An error of the tokenizer is raised now, not when the first text is asked for.
        corpus.tokenizer()
        _require_corpus_fits_model(corpus, data, vocab_size)
        return corpus
    with _remove_new_files_on_error(out_dir):
        corpus = _prepare_sources(data, out_dir, vocab_size, default_tokenizer)
        # Before the fact sheet is written: with it the data counts as prepared.
        _require_data_of_run(corpus, trained_on)
        _require_corpus_fits_model(corpus, data, vocab_size)
        try:
            write_json_atomically(out_dir / CORPUS_FILE_NAME, corpus.to_json())
        except OSError as error:
            raise build_path_resource_error(error, "writing what the data is", out_dir) from None
    return corpus


def _prepare_sources(data: Data, out_dir: Path, vocab_size: int | None, default: str) -> Corpus:
    request = _select_preparation_keys(data)
    if is_own_dataset(data.source) and not data.mixture:
        return Corpus(
            out_dir, request, (), probe_user_dataset(data.source, data.args, data.worker_timeout_s)
        )
    sources = [(part.source, part.weight) for part in data.mixture] or [(data.source, 1.0)]
    components = []
    for number, (source, weight) in enumerate(sources):
        own_dir = out_dir / f"source-{number}"
        components.append(_prepare_component(source, weight, data, own_dir, vocab_size, default))
    _require_one_tokenizer(components)
    return Corpus(out_dir, request, tuple(components))


def _select_preparation_keys(data: Data) -> dict[str, Any]:
    """The keys of [data] that decide what is prepared and how it is split."""
    keys = ("source", "args", "tokenizer", "column", "held_out_fraction")
    request: dict[str, Any] = {name: getattr(data, name) for name in keys}
    request["mixture"] = list(map(vars, data.mixture))
    return request


def _prepare_component(
    source: str, weight: float, data: Data, own_dir: Path, vocab_size: int | None, default: str
) -> CorpusComponent:
    """`own_dir` is where text is built."""
    described, path = _describe_and_locate_source(source, data, own_dir, vocab_size, default)
    if data.document_masks and described.kind == "npy":
        fix = "build shards from text, or use a Megatron dataset, which know theirs"
        raise DataError(
            "data.document_masks needs documents, and a .npy has none", where=source, fix=fix
        )
    tokenizer, tokenizer_path, needed_size = described.tokenizer, "", described.vocab_size
    # Text went through data.tokenizer when it was built.
    if data.tokenizer is not None and path != own_dir.name:
        tokenizer, tokenizer_path, needed_size = load_named_tokenizer_facts(
            data.tokenizer, described, source
        )
    opened = map_token_arrays(described.kind, described.path)
    split_by, held_out_keys = choose_split(opened.arrays, data.held_out_fraction, data.seq_len)
    splits = split_into_train_and_held_out(
        opened.arrays, data.held_out_fraction, split_by, held_out_keys
    )
    split_facts = {}
    for split in SPLITS:
        split_facts[split] = SplitCounts(splits[split].num_tokens, splits[split].num_documents)
    return CorpusComponent(
        source=source,
        weight=weight,
        kind=described.kind,
        path=path,
        files=described.files,
        tokenizer=tokenizer,
        tokenizer_path=tokenizer_path,
        vocab_size=needed_size,
        end_of_document=described.end_of_document,
        split_by=split_by,
        held_out_keys=held_out_keys,
        splits=split_facts,
        source_bytes=described.source_bytes,
        num_skipped_files=described.num_skipped_files,
    )


def _describe_and_locate_source(
    source: str, data: Data, own_dir: Path, vocab_size: int | None, default: str
) -> tuple[SourceDescription, str]:
    """The description of a source, and the path that the fact sheet gives for it. Text is built
    first."""
    if is_own_dataset(source):
        fix = "a mixture takes text and token ids; mix them inside your dataset"
        raise DataError("your own dataset cannot be a part of a mixture", where=source, fix=fix)
    kind = find_token_source_kind(source)
    if kind is not None:
        return collect_source_facts(*kind), str(kind[1])
    tokenizer = data.tokenizer or default
    require_end_token_fits(tokenizer, vocab_size, source)
    # A run that cannot begin leaves nothing behind, not even finished shards.
    build_dataset([source], own_dir, tokenizer=tokenizer, column=data.column, keep_unfinished=False)
    return collect_source_facts("dataset", own_dir), own_dir.name


def require_end_token_fits(tokenizer: str, vocab_size: int | None, source: str) -> None:
    """Every document ends with this token: without a row for it nothing needs to be built."""
    end = load_tokenizer(tokenizer).end_of_document
    if vocab_size is not None and end is not None and end >= vocab_size:
        error = id_out_of_range_error(end, vocab_size, f"data.source {source}")
        raise DataError(
            error.what, where=error.where, why="it is the end of a document", fix=error.fix
        )


def load_named_tokenizer_facts(
    name: str, described: SourceDescription, source: str
) -> tuple[TokenizerFacts, str, int]:
    """The tokenizer that the job gives for token ids, its path and its vocabulary.

    DataError if it does not fit.
    """
    tokenizer, of_shards = load_tokenizer(name), described.tokenizer
    if of_shards.kind == "none":
        if described.vocab_size > tokenizer.vocab_size:
            summary = f"token {described.vocab_size - 1} does not fit data.tokenizer {name}"
            raise DataError(summary, where=source, why=f"its vocabulary has {tokenizer.vocab_size}")
        path = name
        if tokenizer.kind != "bytes":
            # A resumed run may be started from another folder.
            path = str(Path(name).expanduser().resolve())
        return TokenizerFacts(tokenizer.kind, tokenizer.digest), path, tokenizer.vocab_size
    if tokenizer.digest != of_shards.digest:
        why = (
            f"its digest is {tokenizer.digest}, they were made with {of_shards.kind}"
            f" {of_shards.digest}"
        )
        fix = "leave data.tokenizer out: shards know theirs"
        raise DataError(
            f"data.tokenizer {name} is not the one of the shards", where=source, why=why, fix=fix
        )
    return of_shards, "", described.vocab_size


def _require_one_tokenizer(components: Sequence[CorpusComponent]) -> None:
    first = components[0]
    for other in components[1:]:
        if other.tokenizer != first.tokenizer:
            raise other_tokenizer_error(
                first.source, first.tokenizer, other.source, other.tokenizer
            )


def other_tokenizer_error(
    first: str, first_facts: TokenizerFacts, other: str, other_facts: TokenizerFacts
) -> DataError:
    """The refusal of a mixture whose sources went through two tokenizers."""
    # Token ids have no digest of a tokenizer.
    first_name = f"{first_facts.kind} {first_facts.digest}".strip()
    other_name = f"{other_facts.kind} {other_facts.digest}".strip()
    return DataError(
        "the sources of a mixture need one tokenizer",
        where=other,
        why=f"it has {other_name}, and {first} has {first_name}",
        fix="build both with the same tokenizer",
    )


def _require_same_preparation_keys(corpus: Corpus, data: Data) -> None:
    differences = []
    for key, value in _select_preparation_keys(data).items():
        earlier = corpus.data_settings.get(key)
        if value != earlier:
            differences.append(f"data.{key} {earlier!r}, the job wants {value!r}")
    if differences:
        raise DataError(
            "the run directory holds the data of another job",
            where=str(corpus.directory),
            why=f"it has {', '.join(differences)}",
            fix="use another run.dir",
        )


def _require_data_of_run(corpus: Corpus, trained_on: str) -> None:
    """Raise DataError if a run that has trained would go on with other samples: what it read was
    in a folder that is gone, or was exchanged."""
    if trained_on and trained_on != corpus.content_digest:
        raise DataError(
            CHANGED,
            where=f"data.source {corpus.source}",
            why=(
                f"its checkpoints were trained on data {trained_on}, and this is"
                f" {corpus.content_digest}"
            ),
            fix=f"put {corpus.directory} or the source back as it was, or start a new run",
        )


def _require_corpus_fits_model(corpus: Corpus, data: Data, vocab_size: int | None) -> None:
    """There is a sequence to train on, and every id has a row in the model."""
    for component in corpus.components:
        num_tokens = component.splits["train"].num_tokens
        if num_tokens < data.seq_len + 1:
            raise too_few_tokens_error(component.source, num_tokens, data.seq_len)
        opened, _ = corpus.open_component(component)
        if vocab_size is not None and component.vocab_size > vocab_size:
            require_token_ids_below(opened, vocab_size)


def too_few_tokens_error(source: str, num_tokens: int, seq_len: int) -> DataError:
    fix = "give more data"
    if num_tokens > 1:
        fix = f"lower data.seq_len to at most {num_tokens - 1} or give more data"
    return DataError(
        f"not enough tokens for one sequence: {num_tokens} to train on, {seq_len + 1} needed",
        where=f"data.source {source}",
        why="a sequence is seq_len + 1 tokens: inputs and the targets one later",
        fix=fix,
    )


@contextlib.contextmanager
def _remove_new_files_on_error(out_dir: Path) -> Iterator[None]:
    """Create `out_dir`; if the block fails, what is new in it goes again."""
    existed = out_dir.exists()
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise build_path_resource_error(error, "preparing the data", out_dir) from None
    try:
        yield
    except BaseException:
        # Without corpus.json nothing here belongs to a run yet.
        for built in out_dir.glob("source-*"):
            shutil.rmtree(built, ignore_errors=True)
        if not existed:
            with contextlib.suppress(OSError):
                out_dir.rmdir()
        raise
