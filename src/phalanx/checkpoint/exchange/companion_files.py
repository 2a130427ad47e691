"""Files beside a model's weights that transformers reads: those that an import and an export copy.
Torch-free.
"""

from __future__ import annotations

from pathlib import Path

from phalanx.core.errors import CheckpointError
from phalanx.core.files import MAX_TOKENIZER_FILE_BYTES, parse_json, read_whole_regular_file

# What AutoTokenizer and AutoProcessor look for, and generate(); modules that it brings are not.
COPIED_FILE_NAMES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "normalizer.json", "tekken.json", "tiktoken.model"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model"),
    *("spm.model", "spm_char.model", "source.spm", "target.spm", "bpe.codes", "dict.txt"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    "audio_tokenizer_config.json",
)


def find_companion_files(directory: Path) -> dict[str, Path]:
    """The files of `directory` to copy, by name.

    Raises CheckpointError for one that is empty, or whose JSON is cut short: transformers opens no
    tokenizer of it.
    """
    files = {}
    for name in COPIED_FILE_NAMES:
        path = directory / name
        if path.is_file():
            _require_whole(path)
            files[name] = path
    return files


def _require_whole(path: Path) -> None:
    problem, why = "", None
    try:
        content = read_whole_regular_file(path, MAX_TOKENIZER_FILE_BYTES)
        if not content.strip():
            problem = "it is empty"
        elif path.suffix == ".json" and not isinstance(parse_json(content), dict):
            problem = "it is not an object of JSON"
    except OSError as error:
        problem, why = "it cannot be read", error.strerror or str(error)
    except ValueError as error:
        problem, why = "it is no JSON, or cut short", str(error)
    if problem:
        fix = "put it back, or remove it to go on without it"
        raise CheckpointError(problem, where=str(path), why=why, fix=fix)
