"""What a job's [data] names, as far as it can be known without building anything: for plans.

Torch-free.

Token ids and their tokenizers are read as `prepare_corpus` reads them, so a plan has the vocabulary
and the numbers of tokens that the run will have. Of text there are its files and its tokenizer; how
many tokens it is, building tells.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.errors import DataError
from phalanx.core.units import format_bytes, plural
from phalanx.data.dataset import TokenizerFacts
from phalanx.data.prepare import (
    load_named_tokenizer_facts,
    other_tokenizer_error,
    require_end_token_fits,
    too_few_tokens_error,
)
from phalanx.data.sources import list_source_files
from phalanx.data.token_sources import (
    collect_source_facts,
    find_token_source_kind,
    map_token_arrays,
    require_token_ids_below,
)
from phalanx.data.tokenizer import BYTE_TOKENIZER_KIND, load_tokenizer
from phalanx.data.tokens import SPLITS, choose_split, split_into_train_and_held_out
from phalanx.data.user_dataset import UserDatasetFacts
from phalanx.data.workers import probe_user_dataset
from phalanx.job.schema import Data
from phalanx.job.user_dataset import is_own_dataset


@dataclass(frozen=True)
class SourceSummary:
    """One source.

    The numbers of tokens are None of text, which nobody has counted. `words` are for people.
    """

    source: str
    weight: float
    tokenizer: TokenizerFacts
    vocab_size: int
    num_train: int | None
    num_held_out: int | None
    words: str


@dataclass(frozen=True)
class DataSummary:
    """All sources of a job, or the user's own dataset."""

    sources: tuple[SourceSummary, ...] = ()
    user: UserDatasetFacts | None = None

    @property
    def vocab_size(self) -> int | None:
        """The vocabulary size that the data needs; None if a user's own dataset does not say."""
        return max((source.vocab_size for source in self.sources), default=None)

    @property
    def is_counted(self) -> bool:
        """True if the number of tokens of every source is known."""
        return bool(self.sources) and all(source.num_train is not None for source in self.sources)


def summarize_data_sources(
    data: Data, *, vocab_size: int | None, default_tokenizer: str = BYTE_TOKENIZER_KIND
) -> DataSummary:
    """Read what `data` names as far as its kind says it by itself.

    `vocab_size`: the model's, None if data decides. `default_tokenizer` is for text where `data`
    names none.

    Raises what `prepare_corpus` would: DataError (exit 4) for a source that is missing, unreadable,
    too short or of other ids than the vocabulary has.
    """
    if is_own_dataset(data.source) and not data.mixture:
        return DataSummary(user=probe_user_dataset(data.source, data.args, data.worker_timeout_s))
    sources = [(part.source, part.weight) for part in data.mixture] or [(data.source, 1.0)]
    looked = []
    for source, weight in sources:
        looked.append(_summarize_source(source, weight, data, vocab_size, default_tokenizer))
    first = looked[0]
    for other in looked[1:]:
        if other.tokenizer != first.tokenizer:
            raise other_tokenizer_error(
                first.source, first.tokenizer, other.source, other.tokenizer
            )
    return DataSummary(tuple(looked))


def _summarize_source(
    source: str, weight: float, data: Data, vocab_size: int | None, default: str
) -> SourceSummary:
    if is_own_dataset(source):
        fix = "a mixture takes text and token ids; mix them inside your dataset"
        raise DataError("your own dataset cannot be a part of a mixture", where=source, fix=fix)
    if find_token_source_kind(source) is None:
        return _summarize_text_source(source, weight, data.tokenizer or default, vocab_size)
    return _summarize_token_id_source(source, weight, data, vocab_size)


def _summarize_text_source(
    source: str, weight: float, name: str, vocab_size: int | None
) -> SourceSummary:
    require_end_token_fits(name, vocab_size, source)
    tokenizer = load_tokenizer(name)
    (listing,) = list_source_files([source])
    size = format_bytes(sum(file.num_bytes for file in listing.files))
    words = (
        f"{plural(len(listing.files), 'file')} of text, {size}; vocabulary {tokenizer.vocab_size:,}"
        f" ({name})"
    )
    facts = TokenizerFacts(tokenizer.kind, tokenizer.digest)
    return SourceSummary(source, weight, facts, tokenizer.vocab_size, None, None, words)


def _summarize_token_id_source(
    source: str, weight: float, data: Data, vocab_size: int | None
) -> SourceSummary:
    kind_and_path = find_token_source_kind(source)
    assert kind_and_path is not None, "of token ids"
    # Without checksums: a plan keeps nothing that they could be compared with.
    described = collect_source_facts(*kind_and_path, with_checksums=False)
    if data.document_masks and described.kind == "npy":
        fix = "build shards from text, or use a Megatron dataset, which know theirs"
        raise DataError(
            "data.document_masks needs documents, and a .npy has none", where=source, fix=fix
        )
    tokenizer, needed = described.tokenizer, described.vocab_size
    if data.tokenizer is not None:
        tokenizer, _, needed = load_named_tokenizer_facts(data.tokenizer, described, source)
    opened = map_token_arrays(described.kind, described.path)
    # Raises, with the place of the first id that has no row in the model.
    if vocab_size is not None and needed > vocab_size:
        require_token_ids_below(opened, vocab_size)
    split_by, keys = choose_split(opened.arrays, data.held_out_fraction, data.seq_len)
    splits = split_into_train_and_held_out(opened.arrays, data.held_out_fraction, split_by, keys)
    train, held_out = (splits[split].num_tokens for split in SPLITS)
    if train < data.seq_len + 1:
        raise too_few_tokens_error(source, train, data.seq_len)
    words = f"{train:,} training tokens, {held_out:,} held out; vocabulary {needed:,}"
    return SourceSummary(source, weight, tokenizer, needed, train, held_out, words)
