"""A byte-level BPE trained on the user's own corpus by the `tokenizers` library. Torch-free."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.digest import hash_to_stable_64_bits
from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.errors import DataError, UsageError
from phalanx.core.files import write_bytes_atomically
from phalanx.core.registry import import_optional_dependency
from phalanx.data.columns import ReadingPosition
from phalanx.data.cuts import TokenSafeTextCutter
from phalanx.data.readers import plan_file_parts, read_text_pieces
from phalanx.data.sources import list_source_files
from phalanx.data.spans import ShardTask, SourceFileSpan, plan_shard_tasks
from phalanx.data.tokenizer import TOKENIZER_FILE

END_OF_DOCUMENT_TOKEN = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # every byte, and the end of a document
MAX_VOCAB_SIZE = 1 << 22  # memory for all of it is taken at once
_SAMPLE_CHARS = 1 << 18
_JOIN_TIMEOUT_S = 0.1


@dataclass(frozen=True)
class TrainingProgress:
    """The progress of a training: reading counts words, then `is_merging` makes tokens of them."""

    read_bytes: float
    total_bytes: int
    is_merging: bool
    elapsed_s: float


@dataclass(frozen=True)
class TrainedTokenizer:
    """The tokenizer that was trained. `vocab_size` is less than was asked for where the corpus has
    no more pairs to join.
    """

    path: Path
    vocab_size: int
    text_bytes: int
    num_tokens_per_byte: float  # on the last part of what it was trained on
    elapsed_s: float


def train_tokenizer(
    inputs: Sequence[str],
    out: Path,
    *,
    vocab_size: int,
    column: str = "text",
    max_text_bytes: int | None = None,
    progress: Callable[[TrainingProgress], None] | None = None,
) -> TrainedTokenizer:
    """Write a tokenizer.json to `out`: that file if its name ends with .json, else the folder's.

    The same inputs give the same file. Only distinct words are held in memory. With
    `max_text_bytes` it learns from about that much, spread over the inputs. Raises DataError (exit
    4), UsageError (exit 2), ResourceError (exit 7).
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise UsageError(
            f"a vocabulary of {vocab_size} is too small",
            fix=f"at least {MIN_VOCAB_SIZE}: the bytes, and one more",
        )
    if vocab_size > MAX_VOCAB_SIZE:
        raise UsageError(
            f"a vocabulary of {vocab_size:,} is too large", fix=f"at most {MAX_VOCAB_SIZE:,}"
        )
    path = out
    if path.suffix != ".json":
        path = out / TOKENIZER_FILE
    if path.exists():
        raise DataError(
            "a tokenizer is there already", where=str(path), fix="give another --out, or remove it"
        )
    library = import_optional_dependency(
        "tokenizers", extra="hf", needed_for="training a tokenizer"
    )
    corpus = _TokenizerCorpus(inputs, column, max_text_bytes)
    tokenizer, trainer = _build_tokenizer_and_trainer(library, vocab_size)
    _run_in_thread_with_progress(
        lambda: tokenizer.train_from_iterator(corpus.texts(), trainer), corpus, progress
    )
    if not corpus.text_bytes:
        raise DataError("there is no text in it", where=", ".join(inputs))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(path, tokenizer.to_str(pretty=True).encode())
    except OSError as error:
        raise build_path_resource_error(
            error, "writing the tokenizer", path, place="--out"
        ) from None
    return TrainedTokenizer(
        path=path,
        vocab_size=tokenizer.get_vocab_size(),
        text_bytes=corpus.text_bytes,
        num_tokens_per_byte=len(tokenizer.encode(corpus.last).ids)
        / max(1, len(corpus.last.encode())),
        elapsed_s=corpus.elapsed_s,
    )


def _build_tokenizer_and_trainer(library: Any, vocab_size: int) -> tuple[Any, Any]:
    """GPT-2's construction: any text goes in, and comes out of `decode` as it was."""
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT_TOKEN],
        # Every byte is a token from the start, so that no text is unknown.
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    return tokenizer, trainer


class _TokenizerCorpus:
    """The texts of the inputs in order, and how far they have been read."""

    def __init__(self, inputs: Sequence[str], column: str, max_text_bytes: int | None) -> None:
        files = [file for source in list_source_files(inputs, named="") for file in source.files]
        self.total_bytes = sum(file.num_bytes for file in files)
        self._column = column
        self._share = 1.0
        if max_text_bytes is not None:
            self._share = max_text_bytes / max(1, self.total_bytes)
        parts = [plan_file_parts(file, column, max(1, file.num_bytes), True) for file in files]
        self._tasks: list[ShardTask] = plan_shard_tasks(parts, max(1, self.total_bytes))
        self._reading = ReadingPosition()
        self._began = time.monotonic()
        self.text_bytes, self.last, self.is_read = 0, "", False

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def progress(self) -> TrainingProgress:
        return TrainingProgress(self._reading.read, self.total_bytes, self.is_read, self.elapsed_s)

    def texts(self) -> Iterator[str]:
        # A word more or less at the end of a piece does not matter.
        cutter = TokenSafeTextCutter(lambda before, after: True)
        for task in self._tasks:
            for span in task.spans:
                yield from self._iterate_texts_of_span(span, cutter)
        self.is_read = True

    def _iterate_texts_of_span(
        self, span: SourceFileSpan, cutter: TokenSafeTextCutter
    ) -> Iterator[str]:
        pieces = read_text_pieces(span, self._column, cutter, False, self._reading)
        for number, piece in enumerate(pieces):
            if piece.text and self._is_sampled(piece.key, number):
                self.text_bytes += piece.num_bytes
                self.last = str(piece.text)[:_SAMPLE_CHARS]
                yield str(piece.text)

    def _is_sampled(self, key: int, number: int) -> bool:
        # By a hash, so that the same inputs give the same tokenizer.
        return (
            self._share >= 1 or hash_to_stable_64_bits("sample", key, number) / 2**64 < self._share
        )


def _run_in_thread_with_progress(
    work: Callable[[], None],
    corpus: _TokenizerCorpus,
    progress: Callable[[TrainingProgress], None] | None,
) -> None:
    """Do the work beside this thread, so that Ctrl-C ends it although the library does not look for
    it.
    """
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # raised where somebody waits for it
            failed.append(error)

    # A daemon, for the interpreter waits for others when it ends.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        # With a limit: signals are handled between two waits.
        thread.join(_JOIN_TIMEOUT_S)
        if progress is not None:
            progress(corpus.progress())
    if failed:
        raise failed[0]
