"""The tokenizer of a run as the files that transformers' AutoTokenizer opens. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.data.corpus import Corpus
from phalanx.data.model_tokenizer import ModelTokenizer
from phalanx.data.tokenizer import (
    BYTE_END_OF_DOCUMENT_ID,
    BYTE_TOKENIZER_KIND,
    CONFIG_FILE,
    SPECIAL_FILE,
    TOKENIZER_FILE,
    load_tokenizer,
    tokenizer_path,
)

# What the end of a document is called where a run has no word for it.
DEFAULT_END_OF_DOCUMENT_TOKEN = "<|endoftext|>"
_COMPANION_FILES = (CONFIG_FILE, SPECIAL_FILE, "chat_template.jinja")
# What goes with a model and not with a tokenizer: how images are made ready, how it generates.
_FILES_WITHOUT_TOKENIZER = (
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    "generation_config.json",
)


@dataclass(frozen=True)
class TokenizerFiles:
    """`files` are copied, `texts` written as JSON; `settings` belong into config.json. `note`: why
    there is none.

    With `is_models` they are what the model brought, which says itself where texts begin and end.
    """

    files: Mapping[str, Path] = field(default_factory=dict)
    texts: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    is_models: bool = False


def collect_tokenizer_files(
    corpus: Corpus, brought: ModelTokenizer | None = None, file_names: Sequence[str] = ()
) -> TokenizerFiles:
    """The tokenizer files of the run's text. If the model's own tokenizer made its tokens, all of
    its files that `file_names` names.

    Raises DataError if the tokenizer is not where it was, or is another one by now.
    """
    if brought is not None and _is_tokenizer_of_model(corpus, brought):
        return _collect_tokenizer_files_of_model(corpus, brought, file_names)
    tokenizer = corpus.tokenizer()
    if tokenizer is None:
        files = {}
        if brought is not None:
            files = _select_existing_files(brought.directory, _FILES_WITHOUT_TOKENIZER)
        note = "the run's data had no text, so there is no tokenizer"
        return TokenizerFiles(files, note=note, is_models=True)
    # Without them transformers takes tokens of its own, of another vocabulary.
    settings: dict[str, Any] = {"bos_token_id": None, "pad_token_id": None}
    if tokenizer.end_of_document is not None:
        settings["eos_token_id"] = tokenizer.end_of_document
    if tokenizer.kind == BYTE_TOKENIZER_KIND:
        return TokenizerFiles(
            texts={
                TOKENIZER_FILE: build_byte_tokenizer_json(),
                CONFIG_FILE: _build_tokenizer_config(DEFAULT_END_OF_DOCUMENT_TOKEN),
            },
            settings=settings,
        )
    first = corpus.components[0]
    path = tokenizer_path(first.tokenizer_path or str(corpus.path_of_component(first)))
    files = {TOKENIZER_FILE: path, **_select_existing_files(path.parent, _COMPANION_FILES)}
    texts = {}
    if CONFIG_FILE not in files:
        texts[CONFIG_FILE] = _build_tokenizer_config(tokenizer.end_name)
    return TokenizerFiles(files, texts, settings)


def _collect_tokenizer_files_of_model(
    corpus: Corpus, brought: ModelTokenizer, file_names: Sequence[str]
) -> TokenizerFiles:
    files = _select_existing_files(brought.directory, file_names)
    texts = {}
    # The file that tells AutoTokenizer which class it is, and which token ends a text.
    if CONFIG_FILE not in files:
        texts[CONFIG_FILE] = _build_tokenizer_config(load_tokenizer(str(brought.name)).end_name)
    note = ""
    if not corpus.is_text:
        note = f"the run's data had no text: the tokenizer is the one of {brought.owner}"
    return TokenizerFiles(files, texts, note=note, is_models=True)


def _select_existing_files(directory: Path, names: Sequence[str]) -> dict[str, Path]:
    """The paths of those of `names` that are files in `directory`."""
    return {name: directory / name for name in names if (directory / name).is_file()}


def _build_tokenizer_config(end: str | None) -> dict[str, Any]:
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if end:
        config["eos_token"] = end
    return config


def _is_tokenizer_of_model(corpus: Corpus, brought: ModelTokenizer) -> bool:
    """True if the tokens are, or may be for all that is known, those of the model's
    tokenizer.json."""
    if brought.facts is None or brought.facts.kind == BYTE_TOKENIZER_KIND:
        return False
    return not corpus.is_text or corpus.components[0].tokenizer == brought.facts


def build_byte_tokenizer_json() -> dict[str, Any]:
    """A tokenizer.json of phalanx's bytes: the id of a byte is the byte, without merges, and 256
    ends a document.
    """
    letters = _map_bytes_to_letters()
    end = {"id": BYTE_END_OF_DOCUMENT_ID, "content": DEFAULT_END_OF_DOCUMENT_TOKEN, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, **flags}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "vocab": {
                **{letter: byte for byte, letter in enumerate(letters)},
                DEFAULT_END_OF_DOCUMENT_TOKEN: BYTE_END_OF_DOCUMENT_ID,
            },
            "merges": [],
        },
    }


def _map_bytes_to_letters() -> list[str]:
    """The letter that byte-level tokenizers write for each byte: printable ones stand for
    themselves (GPT-2).
    """
    # 0xAD, the soft hyphen, is invisible.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters = []
    num_unprintable = 0
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(256 + num_unprintable))
            num_unprintable += 1
    return letters
