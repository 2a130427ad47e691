"""A source of text or token ids becomes two checked token files of the run, once, before the ranks start. Torch-free.

The run trains on these copies and never looks at the source again, so that a resumed run reads exactly the tokens of
the first one even if the source has changed since.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from phalanx.core.errors import DataError
from phalanx.core.files import fsync_directory, read_json, resource_error, write_json_atomic
from phalanx.data.sources import END_OF_DOCUMENT, where_of
from phalanx.data.token_file import TokenFile, TokenWriter
from phalanx.data.token_stream import Part, Tokens, checked, in_chunks, open_source

FORMAT = 1
MANIFEST = "corpus.json"

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")


@dataclass(frozen=True)
class Corpus:
    """What the token files of a run hold. `vocab_size` is what the data needs; a model may have more."""

    directory: Path
    source: str
    held_out_fraction: float
    tokenizer: Literal["bytes", "none"]
    vocab_size: int
    dtype: str  # numpy's name, little-endian: "<u2" or "<u4"
    splits: dict[Split, TokenFile]
    source_bytes: int
    num_skipped_files: int

    def to_json(self) -> dict[str, Any]:
        """Everything but `directory`: the same tokens give the same JSON wherever the run lies."""
        fields = {name: value for name, value in vars(self).items() if name not in ("directory", "splits")}
        return {"format": FORMAT, **fields, "splits": {name: asdict(part) for name, part in self.splits.items()}}

    @classmethod
    def from_json(cls, value: Any, directory: Path) -> Corpus:
        """Raises DataError if `value` is not what `to_json` gives."""
        try:
            fields = dict(value)
            if fields.pop("format") != FORMAT or fields["dtype"] not in ("<u2", "<u4"):
                raise ValueError(f"{MANIFEST} was written by another release")
            fields["splits"] = {name: TokenFile(**fields["splits"][name]) for name in SPLITS}
            return cls(directory=directory, **fields)
        except (KeyError, TypeError, ValueError) as error:
            raise _unusable(directory, f"{type(error).__name__}: {error}") from None

    def open_tokens(self, split: Split) -> Tokens:
        """The tokens of a split, 1-D [num_tokens], memory-mapped and read-only."""
        part = self.splits[split]
        if part.num_tokens == 0:  # an empty file cannot be mapped
            return np.zeros(0, self.dtype)
        return np.memmap(self.directory / part.file, self.dtype, "r", shape=(part.num_tokens,))

    def encode(self, text: str) -> list[int]:
        """One token per byte of UTF-8. DataError if the corpus was given as token ids."""
        self._check_has_text()
        return list(text.encode("utf-8", "surrogateescape"))

    def decode(self, ids: Sequence[int] | Tokens) -> str:
        """Text of byte tokens; the end of a document is a newline, what is not UTF-8 is U+FFFD."""
        self._check_has_text()
        line_end, no_utf8 = ord("\n"), 0xFF
        values = (int(token) for token in ids)
        return bytes(
            token if 0 <= token < 256 else line_end if token == END_OF_DOCUMENT else no_utf8 for token in values
        ).decode("utf-8", "replace")

    def _check_has_text(self) -> None:
        if self.tokenizer != "bytes":
            raise DataError("token ids have no text", where=where_of(self.source))


def prepare_corpus(
    source: str, held_out_fraction: float, out_dir: Path, *, seq_len: int, vocab_size: int | None
) -> Corpus:
    """Write `source` as train.tokens and held_out.tokens in `out_dir`, or take what is already there.

    A document is held out by the hash of its name; by position (the last part) where there is one document only, or
    where the hash would leave a side without a sequence. `vocab_size` is the model's, None if it follows the data.
    Memory does not grow with the source. On an error nothing of it stays in `out_dir`.

    Raises DataError (exit 4) for a source that is missing, unreadable, too short or does not fit the vocabulary, and
    ResourceError (exit 7) if `out_dir` cannot be written.
    """
    if os.path.exists(out_dir / MANIFEST):
        corpus = load_corpus(out_dir)
        _check_same_source(corpus, source, held_out_fraction)
        _check_fits(corpus, seq_len, vocab_size)
        return corpus
    return _build(source, held_out_fraction, out_dir, seq_len, vocab_size)


def load_corpus(out_dir: Path) -> Corpus:
    """The corpus that `prepare_corpus` left in `out_dir`. Raises DataError if it is missing or damaged."""
    try:
        corpus = Corpus.from_json(read_json(out_dir / MANIFEST), out_dir)
        for part in corpus.splits.values():
            found = (out_dir / part.file).stat().st_size
            expected = part.num_tokens * np.dtype(corpus.dtype).itemsize
            if found != expected:
                raise _unusable(out_dir, f"{part.file} has {found} bytes instead of {expected}")
    except OSError as error:
        raise _unusable(out_dir, f"{Path(error.filename or MANIFEST).name}: {error.strerror}") from None
    except ValueError as error:
        raise _unusable(out_dir, f"{MANIFEST} is not JSON: {error}") from None
    return corpus


def _unusable(out_dir: Path, why: str) -> DataError:
    return DataError(
        "the prepared tokens cannot be used",
        where=str(out_dir),
        why=why,
        fix="start a new run, or remove that folder to prepare them again",
    )


def _check_same_source(corpus: Corpus, source: str, held_out_fraction: float) -> None:
    if (corpus.source, corpus.held_out_fraction) != (source, held_out_fraction):
        raise DataError(
            "the run directory holds the tokens of another source",
            where=str(corpus.directory),
            why=f"it has {corpus.source!r} with held_out_fraction {corpus.held_out_fraction}, "
            f"the job wants {source!r} with {held_out_fraction}",
            fix="use another run.dir",
        )


def _check_fits(corpus: Corpus, seq_len: int, vocab_size: int | None) -> None:
    """A new corpus may be too short; one that was there before may also not fit the model that is here now."""
    num_tokens = corpus.splits["train"].num_tokens
    if num_tokens < seq_len + 1:
        raise _too_short(corpus.source, num_tokens, seq_len)
    if vocab_size is not None and corpus.vocab_size > vocab_size:
        for split in SPLITS:
            path = corpus.directory / corpus.splits[split].file
            for _ in checked(in_chunks(corpus.open_tokens(split)), vocab_size, str(path), "token"):
                pass


def _too_short(source: str, num_tokens: int, seq_len: int) -> DataError:
    longest = f"lower data.seq_len to at most {num_tokens - 1} or give" if num_tokens > 1 else "give"
    return DataError(
        f"not enough tokens for one sequence: {num_tokens} to train on, {seq_len + 1} needed",
        where=where_of(source),
        why="a sequence is seq_len + 1 tokens: inputs and the targets one later",
        fix=f"{longest} more data",
    )


def _build(source: str, fraction: float, out_dir: Path, seq_len: int, vocab_size: int | None) -> Corpus:
    stream = open_source(source, fraction, seq_len, vocab_size)
    dtype = "<u2" if stream.vocab_size <= 2**16 else "<u4"
    try:
        with _nothing_left_on_error(out_dir):
            files = _write(stream.parts, out_dir, dtype)
            corpus = Corpus(
                directory=out_dir,
                source=source,
                held_out_fraction=fraction,
                tokenizer=stream.tokenizer,
                vocab_size=stream.vocab_size,
                dtype=dtype,
                splits=files,
                source_bytes=stream.source_bytes,
                num_skipped_files=stream.num_skipped_files,
            )
            _check_fits(corpus, seq_len, vocab_size)
            write_json_atomic(out_dir / MANIFEST, corpus.to_json())
    except OSError as error:  # reading raises DataError, so this was writing
        raise resource_error(error, "writing the token files", out_dir) from None
    return corpus


def _write(parts: Iterable[Part], out_dir: Path, dtype: str) -> dict[Split, TokenFile]:
    """Stream all parts into the two files: under temporary names, then renamed, then durable."""
    with contextlib.ExitStack() as stack:
        train, held_out = (stack.enter_context(TokenWriter(out_dir / f"{split}.tokens", dtype)) for split in SPLITS)
        for part in parts:
            left = part.num_train
            train.begin_document()
            held_out.begin_document()
            for chunk in part.chunks:
                train.write(chunk[:left])
                held_out.write(chunk[left:])
                left -= min(left, chunk.size)
        files: dict[Split, TokenFile] = {"train": train.commit(), "held_out": held_out.commit()}
    fsync_directory(out_dir)
    return files


@contextlib.contextmanager
def _nothing_left_on_error(out_dir: Path) -> Iterator[None]:
    """Create `out_dir`; if the block fails, remove the token files again, and the folder if it is new."""
    existed = out_dir.exists()
    out_dir.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for split in SPLITS:
                (out_dir / f"{split}.tokens").unlink(missing_ok=True)
            if not existed:
                out_dir.rmdir()
        raise
