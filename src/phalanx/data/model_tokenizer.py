"""The tokenizer that a job's model brings: beside its config.json, or of the run that its weights
are from. Torch-free.

Text becomes tokens by it unless the job names another one: embeddings mean the tokens that they
were trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.digest import digest
from phalanx.core.errors import DataError
from phalanx.core.files import MAX_TOKENIZER_FILE_BYTES, read_json
from phalanx.data.corpus import CORPUS_FILE_NAME, Corpus, load_corpus
from phalanx.data.dataset import TokenizerFacts, read_dataset_manifest
from phalanx.data.token_sources import NO_TOKENIZER_FACTS, find_token_source_kind
from phalanx.data.tokenizer import BYTE_TOKENIZER_KIND, TOKENIZER_FILE, load_tokenizer
from phalanx.job.schema import Data
from phalanx.job.user_dataset import is_own_dataset
from phalanx.plan.plan import EarlyWarning
from phalanx.plan.warnings import NO_EXTRA_REASONS_OR_WARNINGS, ExtraReasonsAndWarnings

# What tokenizers are stored as besides a tokenizer.json. None of them says all that a tokenizer
# does.
UNSUPPORTED_TOKENIZER_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)


@dataclass(frozen=True)
class ModelTokenizer:
    """`owner` is what of the job brings it: "model.kind=hf:DIR". `name` is what data.tokenizer
    would say for it, "bytes" or a path; None where there is none that can be read, and `why` then
    says why. `directory` holds its files.
    """

    owner: str
    name: str | None
    facts: TokenizerFacts | None
    directory: Path
    is_trained: bool
    why: str = ""
    is_missing: bool = False
    """There is nothing there that would be a tokenizer, in whatever form."""


def find_directory_tokenizer(directory: Path, owner: str, *, is_trained: bool) -> ModelTokenizer:
    """The tokenizer of a Hugging Face directory, or of an import that `phalanx checkpoint import`
    made of one."""
    path = directory / TOKENIZER_FILE
    if path.is_file():
        return ModelTokenizer(
            owner, str(path), _read_facts_of_tokenizer_file(path), directory, is_trained
        )
    other_forms = [name for name in UNSUPPORTED_TOKENIZER_FILES if (directory / name).is_file()]
    why = f"{directory} has none"
    if other_forms:
        why = f"{directory} has {' and '.join(other_forms)}, and no {TOKENIZER_FILE}"
    return ModelTokenizer(owner, None, None, directory, is_trained, why, is_missing=not other_forms)


def find_run_tokenizer(run_dir: Path, owner: str) -> ModelTokenizer:
    """The tokenizer of a run, or of an import: the one its weights were trained on."""
    if not (run_dir / "data" / CORPUS_FILE_NAME).is_file():
        return find_directory_tokenizer(run_dir, owner, is_trained=True)
    try:
        corpus = load_corpus(run_dir / "data")
        if not corpus.is_text:
            return ModelTokenizer(
                owner, None, None, run_dir, True, f"the data of {run_dir} had no text", True
            )
        first = corpus.components[0]
        name = first.tokenizer_path or str(corpus.path_of_component(first) / TOKENIZER_FILE)
        if first.tokenizer.kind == BYTE_TOKENIZER_KIND:
            name = BYTE_TOKENIZER_KIND
        # Raises unless it is there, and is the one of the run.
        corpus.tokenizer()
        return ModelTokenizer(owner, name, first.tokenizer, Path(name).parent, True)
    except DataError as error:
        return ModelTokenizer(owner, None, None, run_dir, True, str(error))


def _read_facts_of_tokenizer_file(path: Path) -> TokenizerFacts | None:
    """The facts of a tokenizer file; None if it is no tokenizer: loading it says what is wrong."""
    try:
        return TokenizerFacts("tokenizer.json", digest(read_json(path, MAX_TOKENIZER_FILE_BYTES)))
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class SourceTokenizer:
    """The tokenizer that makes, or made, the tokens of one source, by `name`. `is_default`: the job
    names none.
    """

    source: str
    facts: TokenizerFacts
    vocab_size: int
    name: str
    is_text: bool
    is_default: bool


def default_tokenizer(data: Data, brought: ModelTokenizer | None) -> str:
    """The tokenizer of text if data.tokenizer is not set: the model's tokenizer, or bytes.

    Raises DataError where the model has a tokenizer that is not read: bytes in its place would
    train something else.
    """
    if brought is None:
        return BYTE_TOKENIZER_KIND
    if brought.name is not None:
        return brought.name
    if data.tokenizer is None and not brought.is_missing:
        directory = brought.directory
        convert = (
            f"AutoTokenizer.from_pretrained({str(directory)!r}).save_pretrained({str(directory)!r})"
        )
        raise DataError(
            f"the tokenizer of {brought.owner} cannot be read",
            where="data.tokenizer",
            why=brought.why,
            fix=f"transformers writes a {TOKENIZER_FILE}: {convert}; or set data.tokenizer",
        )
    return BYTE_TOKENIZER_KIND


def find_source_tokenizers(data: Data, brought: ModelTokenizer | None) -> list[SourceTokenizer]:
    """The tokens of the sources of [data], as far as they are known without reading the sources.

    Raises DataError.
    """
    sources = [part.source for part in data.mixture] or [data.source]
    if is_own_dataset(data.source) and not data.mixture:
        return []
    tokens_by_source = []
    for source in sources:
        kind = find_token_source_kind(source)
        is_default = data.tokenizer is None
        if kind is None:
            name = data.tokenizer or default_tokenizer(data, brought)
            tokenizer = load_tokenizer(name)
            facts, size = TokenizerFacts(tokenizer.kind, tokenizer.digest), tokenizer.vocab_size
            tokens_by_source.append(SourceTokenizer(source, facts, size, name, True, is_default))
        elif kind[0] == "dataset":
            manifest, _ = read_dataset_manifest(kind[1])
            tokens_by_source.append(
                SourceTokenizer(
                    source, manifest.tokenizer, manifest.vocab_size, "", False, is_default
                )
            )
        else:
            tokens_by_source.append(
                SourceTokenizer(source, NO_TOKENIZER_FACTS, 0, "", False, is_default)
            )
    return tokens_by_source


def find_corpus_tokenizers(
    corpus: Corpus, tokens: Sequence[SourceTokenizer], data: Data
) -> list[SourceTokenizer]:
    """The tokens of the sources of a prepared corpus: a resumed run reads the data that it began
    with, whatever the sources are by now.
    """
    names = {source_tokens.source: source_tokens.name for source_tokens in tokens}
    corpus_tokens = []
    for component in corpus.components:
        corpus_tokens.append(
            SourceTokenizer(
                component.source,
                component.tokenizer,
                component.vocab_size,
                names.get(component.source, ""),
                # Text was built into the run; ids lie where they are.
                is_text=not Path(component.path).is_absolute(),
                is_default=data.tokenizer is None,
            )
        )
    return corpus_tokens


def require_tokenizer_fits_vocabulary(
    tokens: Sequence[SourceTokenizer], vocab_size: int | None
) -> None:
    """Raise DataError for text whose tokenizer has more tokens than the model has rows: before it
    is tokenized.

    Special tokens above the rows are no tokens of text (an added [PAD], say): a model is trained
    without them.
    """
    if vocab_size is None:
        return
    for source_tokens in tokens:
        if not source_tokens.is_text or source_tokens.vocab_size <= vocab_size:
            continue
        num_of_text = load_tokenizer(source_tokens.name).text_vocab_size
        if num_of_text > vocab_size:
            raise DataError(
                f"the tokenizer {source_tokens.name} has {num_of_text:,} tokens, and the model"
                f" {vocab_size:,} rows",
                where=f"data.source {source_tokens.source}",
                why="a token without a row cannot be learned",
                fix="give data.tokenizer the model's own, or a model with a row for each",
            )


def describe_tokenizers(
    brought: ModelTokenizer | None, tokens: Sequence[SourceTokenizer], vocab_size: int | None
) -> ExtraReasonsAndWarnings:
    """A plan's remarks and warnings about the tokenizers.

    Empty if the model brings no tokenizer and none is expected of it.
    """
    if brought is None:
        return NO_EXTRA_REASONS_OR_WARNINGS
    reasons, warnings = [], []
    for one in tokens:
        if one.facts.kind == "none":
            continue
        if brought.facts is None or brought.name is None:
            text = _describe_lack_of_tokenizer(brought, one)
            if not one.is_text or not one.is_default or one.facts.kind != BYTE_TOKENIZER_KIND:
                # A run that goes on: it was begun when there was one.
                continue
            if brought.is_trained:
                warnings.append(EarlyWarning("tokenizer_unknown", text))
            else:
                reasons.append(text)
        elif one.facts != brought.facts:
            text = _describe_other_tokenizer(brought, one, vocab_size)
            warnings.append(EarlyWarning("other_tokenizer", text))
        elif one.is_text and one.is_default and brought.facts.kind != BYTE_TOKENIZER_KIND:
            reasons.append(
                f"text becomes the {one.vocab_size:,} tokens of {brought.name}, which"
                f" {brought.owner} brings"
            )
    # Several sources may say the same.
    return ExtraReasonsAndWarnings(tuple(dict.fromkeys(reasons)), tuple(dict.fromkeys(warnings)))


def _describe_lack_of_tokenizer(brought: ModelTokenizer, one: SourceTokenizer) -> str:
    if not brought.is_trained:
        return f"text becomes bytes: {brought.owner} brings no tokenizer"
    return (
        f"text becomes bytes, and nothing says which tokens the weights of {brought.owner} were"
        f" trained on ({brought.why}): set data.tokenizer to theirs"
    )


def _describe_other_tokenizer(
    brought: ModelTokenizer, one: SourceTokenizer, vocab_size: int | None
) -> str:
    name = one.name or _format_tokenizer_digest(one.facts)
    size = f"{one.vocab_size:,}"
    if vocab_size:
        size += f" of the model's {vocab_size:,} rows"
    meaning = "it is another vocabulary"
    if brought.is_trained:
        meaning = "the model's rows were trained for other tokens"
    fix = f"build the shards with --tokenizer {brought.name}"
    if one.is_text:
        fix = "leave data.tokenizer out"
    return (
        f"{one.source}: its tokens are those of {name}, {size}, and {brought.owner} brings"
        f" {brought.name}: {meaning}; {fix} unless you mean it"
    )


def _format_tokenizer_digest(facts: TokenizerFacts) -> str:
    """A name for the tokenizer of shards, which know no path of it."""
    if facts.kind == BYTE_TOKENIZER_KIND:
        return BYTE_TOKENIZER_KIND
    return f"another {facts.kind} ({facts.digest})"
