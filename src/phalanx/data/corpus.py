"""What a run trains on: one source of tokens or several with weights, or a user's own dataset.
Torch-free.

Text lies in `RUN/data`, built there before the first start, so that a resumed run reads exactly the
tokens of the first one whatever became of the files. Sources of token ids (shards, .npy, Megatron
files) are used where they lie, with their sizes and checksums kept, and must not change while a run
lasts: one that would read something else when it is resumed is refused, by the file's name.
`RUN/data/corpus.json` is the fact sheet: what every rank, every loader worker and every later
attempt must find.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.core.digest import digest
from phalanx.core.errors import DataError
from phalanx.core.files import read_json
from phalanx.core.units import GIB, format_bytes
from phalanx.data.dataset import DATASET_FILE_NAME, TokenizerFacts, open_dataset
from phalanx.data.token_sources import (
    FileFacts,
    OpenTokenSource,
    TokenSourceKind,
    find_source_damage,
    map_token_arrays,
    require_source_unchanged,
    sum_token_source_bytes,
)
from phalanx.data.tokenizer import Tokenizer, load_tokenizer
from phalanx.data.tokens import (
    SPLITS,
    Split,
    SplitBy,
    TokenSequence,
    TrainHeldOutSplit,
    split_into_train_and_held_out,
)
from phalanx.data.unreadable import build_unreadable_data_error
from phalanx.data.user_dataset import UserDatasetFacts

CORPUS_FORMAT_VERSION = 3  # 2: other samples, and other documents held out, of the same tokens
CORPUS_FILE_NAME = "corpus.json"
UNUSABLE_CORPUS_MESSAGE = "the prepared data cannot be used"
UNUSABLE_CORPUS_FIX = "start a new run, or remove that folder to prepare it again"
MAX_VERIFIED_BYTES = 2 * GIB  # more than this is not read before every start


@dataclass(frozen=True)
class SplitCounts:
    """One side of a source. `num_documents` counts documents with at least one token in it."""

    num_tokens: int
    num_documents: int


@dataclass(frozen=True)
class CorpusComponent:
    """One source. `path` is relative to the corpus where the run has a copy of its own, else
    absolute.
    """

    source: str
    weight: float
    kind: TokenSourceKind
    path: str
    files: dict[str, FileFacts]
    tokenizer: TokenizerFacts
    tokenizer_path: str
    vocab_size: int
    end_of_document: int | None
    split_by: SplitBy
    held_out_keys: tuple[int, ...]  # of few documents
    splits: dict[Split, SplitCounts]
    source_bytes: int
    num_skipped_files: int

    @property
    def explain_held_out_choice(self) -> str:
        """Why the fraction of the documents does not decide what is held out; empty where it
        does."""
        if self.split_by == "document" or self.splits["held_out"].num_tokens == 0:
            return ""
        if self.split_by == "few_documents":
            return "by the fraction alone a side would have no sequence"
        return "there is one document, or none that training can spare"

    @classmethod
    def from_json(cls, value: Any) -> CorpusComponent:
        fields = dict(value)
        fields["files"] = {str(name): FileFacts(**facts) for name, facts in fields["files"].items()}
        fields["tokenizer"] = TokenizerFacts(**fields["tokenizer"])
        fields["held_out_keys"] = tuple(map(int, fields["held_out_keys"]))
        fields["splits"] = {split: SplitCounts(**fields["splits"][split]) for split in SPLITS}
        component = cls(**fields)
        component.require_values()
        return component

    def require_values(self) -> None:
        """Raise ValueError for a number or text that is none: the file that it was read from may
        be damaged."""
        texts = (self.source, self.path, self.tokenizer_path, self.tokenizer.digest)
        counts = [self.vocab_size, self.source_bytes, self.num_skipped_files]
        for split in self.splits.values():
            counts += (split.num_tokens, split.num_documents)
        for facts in self.files.values():
            counts.append(facts.num_bytes)
        if self.end_of_document is not None:
            counts.append(self.end_of_document)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"a text of {self.source!r:.60} is none")
        if not all(type(count) is int and 0 <= count < 2**63 for count in counts):
            raise ValueError(f"a number of {self.source!r:.60} is no count")
        if type(self.weight) not in (int, float) or not 0 <= self.weight < math.inf:
            raise ValueError(f"the weight of {self.source!r:.60} is {self.weight!r:.60}")


@dataclass(frozen=True)
class Corpus:
    """The fact sheet of a run's data. Either there are components, or `user` is the user's own
    dataset.
    """

    directory: Path
    data_settings: dict[str, Any]  # the keys of [data] that it was prepared for
    components: tuple[CorpusComponent, ...]
    user: UserDatasetFacts | None = None

    def to_json(self) -> dict[str, Any]:
        """Everything but `directory`: the same tokens give the same JSON wherever the run lies."""
        return {
            "format": CORPUS_FORMAT_VERSION,
            "wanted": self.data_settings,
            "components": list(map(asdict, self.components)),
            "user": self.user and asdict(self.user),
        }

    @classmethod
    def from_json(cls, value: Any, directory: Path) -> Corpus:
        """Raises DataError if `value` is not what `to_json` gives."""
        try:
            if value["format"] != CORPUS_FORMAT_VERSION:
                raise ValueError(f"{CORPUS_FILE_NAME} was written by another release")
            components = tuple(map(CorpusComponent.from_json, value["components"]))
            user = None
            if value["user"]:
                user = UserDatasetFacts(**value["user"])
            return cls(directory, dict(value["wanted"]), components, user)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise _unusable_corpus_error(directory, f"{type(error).__name__}: {error}") from None

    @property
    def source(self) -> str:
        """The sources that the job names, as text for people."""
        if self.user is not None:
            return self.user.source
        return ", ".join(component.source for component in self.components)

    @property
    def is_text(self) -> bool:
        return bool(self.components) and self.components[0].tokenizer.kind != "none"

    @property
    def tokenizer_digest(self) -> str:
        """Empty where token ids have no text."""
        if not self.components:
            return ""
        return self.components[0].tokenizer.digest

    @property
    def content_digest(self) -> str:
        """Digest of all that samples are made of: equal wherever and whenever the same data is
        prepared."""
        components = [
            {
                "kind": component.kind,
                "weight": component.weight,
                # Not dataset.json, which tells how the shards were built.
                "files": [
                    asdict(facts)
                    for name, facts in sorted(component.files.items())
                    if name != DATASET_FILE_NAME
                ],
                "tokenizer": component.tokenizer.digest,
                "split_by": component.split_by,
                "held_out_keys": component.held_out_keys,
                "splits": {split: asdict(component.splits[split]) for split in SPLITS},
            }
            for component in self.components
        ]
        user = None
        if self.user is not None:
            user = [self.user.num_train, self.user.num_held_out, self.user.some_samples]
        return digest({"format": CORPUS_FORMAT_VERSION, "components": components, "user": user})

    @property
    def vocab_size(self) -> int | None:
        """The vocabulary size that the data needs; a model may have more. None for a user's own
        dataset."""
        return max((component.vocab_size for component in self.components), default=None)

    @property
    def num_skipped_files(self) -> int:
        return sum(component.num_skipped_files for component in self.components)

    @property
    def source_bytes(self) -> int:
        return sum(component.source_bytes for component in self.components)

    @property
    def weights(self) -> list[float]:
        return [component.weight for component in self.components]

    @property
    def names(self) -> list[str]:
        """One name for each component, by which its losses are reported."""
        sources = [component.source for component in self.components]
        names = list(sources)
        for number, source in enumerate(sources):
            # A mixture may name one source twice, with two weights.
            if sources.count(source) > 1:
                names[number] = f"{source} #{number + 1}"
        return names

    @property
    def weight_of_name(self) -> dict[str, float]:
        """The weight of each component in the mixture, by its name."""
        return dict(zip(self.names, self.weights, strict=True))

    @property
    def splits(self) -> dict[Split, SplitCounts]:
        """Over all components."""
        splits = {}
        for split in SPLITS:
            facts = [component.splits[split] for component in self.components]
            splits[split] = SplitCounts(
                sum(side.num_tokens for side in facts), sum(side.num_documents for side in facts)
            )
        return splits

    def path_of_component(self, component: CorpusComponent) -> Path:
        # An absolute one stays what it is.
        return self.directory / component.path

    def open_component(
        self, component: CorpusComponent
    ) -> tuple[OpenTokenSource, TrainHeldOutSplit]:
        """Map the tokens of a source and tell its sides apart.

        DataError if it is not what it was.
        """
        path = self.path_of_component(component)
        # Before it is mapped: reading behind the end of a file that is shorter by now would kill
        # the process (SIGBUS).
        require_source_unchanged(component.kind, path, component.files)
        opened = map_token_arrays(component.kind, path)
        fraction, keys = self.data_settings["held_out_fraction"], component.held_out_keys
        return opened, split_into_train_and_held_out(
            opened.arrays, fraction, component.split_by, keys
        )

    def sequences(self, split: Split) -> list[TokenSequence]:
        """The tokens of a split, for each component."""
        return [self.open_component(component)[1][split] for component in self.components]

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that encoded the text; None without text.

        DataError if it has changed since.
        """
        if not self.is_text:
            return None
        # All components have the same one: others are refused when they are prepared.
        first = self.components[0]
        if first.tokenizer_path:
            return _load_unchanged_tokenizer(first.tokenizer_path, first.tokenizer.digest)
        return open_dataset(self.path_of_component(first)).load_tokenizer()


def load_corpus(out_dir: Path) -> Corpus:
    """The corpus that `prepare_corpus` left in `out_dir`. Raises DataError if it is missing or
    damaged.
    """
    try:
        return Corpus.from_json(read_json(out_dir / CORPUS_FILE_NAME), out_dir)
    except OSError as error:
        why = f"{Path(error.filename or CORPUS_FILE_NAME).name}: {error.strerror}"
        raise build_unreadable_data_error(
            error, out_dir, UNUSABLE_CORPUS_MESSAGE, why=why, fix=UNUSABLE_CORPUS_FIX
        ) from None
    except ValueError as error:
        raise _unusable_corpus_error(out_dir, f"{CORPUS_FILE_NAME} is not JSON: {error}") from None


def verify_corpus_checksums(corpus: Corpus, *, is_new: bool = False) -> list[str]:
    """Read all tokens and compare checksums, unless there are too many. Returns what was not
    verified, in words.

    With `is_new`, what was read or written a moment ago is not read again.

    Raises DataError for the first thing that is wrong, and says how many there are.
    """
    unread = [part for part in corpus.components if not (is_new and _was_component_just_read(part))]
    num_bytes = sum(sum_token_source_bytes(component.files) for component in unread)
    if num_bytes > MAX_VERIFIED_BYTES:
        note = f"{format_bytes(num_bytes)} of tokens were not compared with their checksums"
        for component in unread:
            if component.kind == "dataset":
                note += (
                    f"; phalanx data verify {corpus.path_of_component(component)} reads it whole"
                )
        return [note]
    for component in unread:
        wrong = list(
            find_source_damage(component.kind, corpus.path_of_component(component), component.files)
        )
        if wrong:
            first, summary = wrong[0], wrong[0].what
            if len(wrong) > 1:
                summary += f" and {len(wrong) - 1} more like it"
            # Of its own type, which has the exit code: a disk may have failed.
            raise type(first)(summary, where=first.where, why=first.why, fix=first.fix)
    return []


def _was_component_just_read(component: CorpusComponent) -> bool:
    """True if preparing the source read or wrote all of it: not so for shards that lie elsewhere,
    whose headers say what is in them."""
    return component.kind != "dataset" or not _is_written_elsewhere(component)


def _is_written_elsewhere(component: CorpusComponent) -> bool:
    """True if the file was written elsewhere, by another program."""
    return os.path.isabs(component.path)


def _load_unchanged_tokenizer(name: str, digest: str) -> Tokenizer:
    tokenizer = load_tokenizer(name)
    if tokenizer.digest != digest:
        fix = "put it back as it was, or start a new run"
        raise DataError("the tokenizer has changed since the run began", where=name, fix=fix)
    return tokenizer


def _unusable_corpus_error(out_dir: Path, why: str) -> DataError:
    return DataError(UNUSABLE_CORPUS_MESSAGE, where=str(out_dir), why=why, fix=UNUSABLE_CORPUS_FIX)
