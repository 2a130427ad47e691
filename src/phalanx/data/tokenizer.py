"""How text becomes token ids: bytes, or any Hugging Face tokenizer.json. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.core.batch import BYTE_VOCAB_SIZE
from phalanx.core.digest import digest
from phalanx.core.errors import DataError
from phalanx.core.files import MAX_TOKENIZER_FILE_BYTES, read_json, read_whole_regular_file
from phalanx.core.places import expand_home
from phalanx.core.registry import import_optional_dependency
from phalanx.data.unreadable import build_unreadable_data_error

TokenizerKind = Literal["bytes", "tokenizer.json"]
BYTE_TOKENIZER_KIND = "bytes"  # what data.tokenizer calls them
BYTE_END_OF_DOCUMENT_ID = 256  # of the bytes tokenizer
TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
SPECIAL_FILE, MODEL_FILE = "special_tokens_map.json", "config.json"

# What tokenizers call the token after a text, where no tokenizer_config.json beside them says so.
_USUAL_END_OF_DOCUMENT_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<|end_of_document|>",
)


class Tokenizer(Protocol):
    """Text to ids and back. Ids are in [0, vocab_size); encoding adds no special token.

    Text that spells a special token is text: its letters get tokens, as far as the tokenizer can
    tell the two apart.
    """

    kind: TokenizerKind
    digest: str
    vocab_size: int
    text_vocab_size: int
    """One more than the largest id of a token that is not special: text has none above it."""
    end_of_document: int | None
    end_name: str | None
    """What the token that ends a document is called; None where there is none, or no word for
    it."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str: ...


class ByteTokenizer:
    """One token per byte of UTF-8, and one that ends a document.

    Surrogate escapes become the bytes they stand for.
    """

    kind: TokenizerKind = "bytes"
    digest = digest({"tokenizer": "bytes", "end_of_document": BYTE_END_OF_DOCUMENT_ID})
    vocab_size = BYTE_VOCAB_SIZE
    text_vocab_size = BYTE_END_OF_DOCUMENT_ID
    end_of_document: int | None = BYTE_END_OF_DOCUMENT_ID
    end_name: str | None = None

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        return [np.frombuffer(encode_utf8(text), np.uint8).astype(np.uint16) for text in texts]

    def encode(self, text: str) -> list[int]:
        return list(encode_utf8(text))

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """The end of a document is a newline; what is not UTF-8 is U+FFFD."""
        text = bytearray()
        for token in map(int, ids):
            if 0 <= token < BYTE_END_OF_DOCUMENT_ID:
                text.append(token)
            elif token == BYTE_END_OF_DOCUMENT_ID:
                text.append(ord("\n"))
            else:
                # No byte of UTF-8 is 0xFF, so that it becomes U+FFFD below.
                text.append(0xFF)
        return text.decode("utf-8", "replace")


def encode_utf8(text: str) -> bytes:
    """UTF-8, whatever the text holds: escaped bytes come back, other lone surrogates become
    U+FFFD."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return replace_surrogates(text).encode("utf-8")


def replace_surrogates(text: str) -> str:
    """Pairs of surrogates become the letter they stand for, lone ones U+FFFD: what a tokenizer
    of text can take."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class HuggingFaceTokenizer:
    """A tokenizer.json.

    `decode` leaves special tokens out, but the end of a document is a newline.
    """

    kind: TokenizerKind = "tokenizer.json"

    def __init__(self, tokenizer: Any, digest: str, end_of_document: int | None) -> None:
        self._tokenizer = tokenizer
        self.digest = digest
        ids = tokenizer.get_vocab(with_added_tokens=True).values()  # they may have holes
        self.vocab_size = max(ids) + 1
        text_ids = set(ids)
        for token, added in tokenizer.get_added_tokens_decoder().items():
            if added.special:
                text_ids.discard(token)
        self.text_vocab_size = max(text_ids, default=-1) + 1
        self.end_of_document = end_of_document
        self.end_name = None
        if end_of_document is not None:
            self.end_name = tokenizer.id_to_token(end_of_document)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Ids of each text. Lone surrogates must have been replaced."""
        # "Fast" leaves out where in the text each token lies.
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(replace_surrogates(text), add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        # Documents apart: the library would drop the end of one as a special token.
        parts: list[list[int]] = [[]]
        for token in map(int, ids):
            if token == self.end_of_document:
                parts.append([])
            elif 0 <= token < self.vocab_size:
                parts[-1].append(token)
        return "\n".join(self._tokenizer.decode(part) for part in parts)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer "bytes", or that of a tokenizer.json, or of a folder that holds one.

    Raises DataError (exit 4) if it is not one, EnvironmentProblem (exit 6) without the package
    `tokenizers`.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = tokenizer_path(name)
    content = _read_tokenizer_file(path)
    tokenizers = import_optional_dependency(
        "tokenizers", extra="hf", needed_for=f"the tokenizer {name}"
    )
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # whatever the library raises: it says what it did not understand
        raise _not_a_tokenizer_error(path, str(error)) from None
    if not tokenizer.get_vocab_size():
        raise _not_a_tokenizer_error(path, "its vocabulary is empty")
    # Both may be saved in the file, and would cut or fill documents.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    end_id = None
    for name_of_end in _list_end_of_document_names(path, tokenizer):
        end_id = tokenizer.token_to_id(name_of_end)
        if end_id is not None:
            break
    _disable_special_tokens_in_text(tokenizers, tokenizer, end_id)
    return HuggingFaceTokenizer(tokenizer, digest(json.loads(content)), end_id)


def _disable_special_tokens_in_text(
    library: Any, tokenizer: Any, end_of_document: int | None
) -> None:
    """A corpus may write about "<|endoftext|>" and not end there.

    The end is special whatever the file says.
    """
    tokenizer.encode_special_tokens = True
    added = tokenizer.get_added_tokens_decoder().get(end_of_document)
    if added is not None and not added.special:
        tokenizer.add_special_tokens([library.AddedToken(added.content, special=True)])


def tokenizer_path(name: str) -> Path:
    """The tokenizer.json that `name` means. Raises DataError if there is none."""
    path = expand_home(name)
    if path.is_dir():
        path = path / TOKENIZER_FILE
    if not path.is_file():
        raise DataError(
            "no such tokenizer",
            where=name,
            fix='give "bytes", a tokenizer.json or a folder with one',
        )
    return path


def _read_tokenizer_file(path: Path) -> bytes:
    try:
        content = read_whole_regular_file(path, MAX_TOKENIZER_FILE_BYTES)
        if not isinstance(json.loads(content), dict):
            raise ValueError("it is JSON, but not an object")
    except OSError as error:
        raise build_unreadable_data_error(error, path, "the tokenizer cannot be read") from None
    except (ValueError, RecursionError) as error:
        raise _not_a_tokenizer_error(path, str(error)) from None
    return content


def _not_a_tokenizer_error(path: Path, why: str) -> DataError:
    return DataError(
        "not a Hugging Face tokenizer.json",
        where=str(path),
        why=why,
        fix="phalanx data tokenizer makes one",
    )


def _list_end_of_document_names(path: Path, tokenizer: Any) -> list[str]:
    """Names of the token that ends a document, best first: what the tokenizer's own files say, then
    the usual ones, then what the model beside it ends with (in models that converse that is the end
    of a turn).
    """
    names: list[Any] = []
    for file in (CONFIG_FILE, SPECIAL_FILE):
        name = _read_tokenizer_settings(path.parent / file).get("eos_token")
        # transformers writes a token as its text, or as an object with its flags.
        if isinstance(name, dict):
            name = name.get("content")
        names.append(name)
    names += _USUAL_END_OF_DOCUMENT_TOKENS
    ids = _read_tokenizer_settings(path.parent / MODEL_FILE).get("eos_token_id")
    # One number, or several for models that end in more than one way.
    if not isinstance(ids, list):
        ids = [ids]
    for token in ids:
        # The library takes no other numbers.
        if type(token) is int and 0 <= token < 2**32:
            names.append(tokenizer.id_to_token(token))
    return [replace_surrogates(name) for name in names if isinstance(name, str)]


def _read_tokenizer_settings(path: Path) -> dict[str, Any]:
    """The settings in a JSON file beside the tokenizer; empty if it cannot be read."""
    try:
        settings = read_json(path)
    except (OSError, ValueError):
        return {}
    if isinstance(settings, dict):
        return settings
    return {}
