"""What was probably meant by a word of the command line that is none of ours.

Read when something is wrong, only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.cli._complete import list_job_keys
from phalanx.core.errors import UsageError, format_nearest_word_hint
from phalanx.job.key_aliases import KEYS_OF_ALIAS, OPTIONS_OF_ALIAS
from phalanx.job.key_suggestions import suggest_key

# Verbs of other tools, and words for what ours do.
VERB_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("fit", "run", "pretrain", "finetune", "start", "sft", "torchrun"), "train"),
    **dict.fromkeys(("resume", "continue"), "train --resume RUN"),
    **dict.fromkeys(("evaluate", "validate", "test", "perplexity", "score", "lm_eval"), "eval"),
    **dict.fromkeys(
        ("sample", "infer", "inference", "predict", "chat", "complete", "prompt"), "generate"
    ),
    **dict.fromkeys(("config", "create", "new", "template"), "init"),
    **dict.fromkeys(("estimate", "estimate-memory", "dry-run", "memory", "explain"), "plan"),
    **dict.fromkeys(("check", "compare", "parity"), "verify"),
    **dict.fromkeys(("ls", "prune", "export", "convert"), "checkpoint"),
    **dict.fromkeys(("tokenize", "tokenizer", "preprocess", "build", "prepare"), "data"),
    **dict.fromkeys(("show", "view", "plot", "page"), "report"),
    **dict.fromkeys(("live", "follow", "monitor", "dashboard", "serve"), "watch"),
    **dict.fromkeys(("log", "tail"), "logs"),
}
DATA_SOURCE_SUFFIXES = (
    *(".txt", ".md", ".npy", ".bin", ".idx", ".jsonl", ".ndjson", ".parquet", ".arrow"),
    *(".feather", ".csv", ".json.gz", ".jsonl.gz", ".jsonl.zst", ".gz", ".zst", ".py"),
    *(".text", ".html"),
)


def list_sections_by_key() -> dict[str, tuple[str, ...]]:
    """The sections that have a key, by its name; from the schema's file, which is quicker than
    the schema."""
    verbs: dict[str, tuple[str, ...]] = {}
    for section, _, key in (name.partition(".") for name in list_job_keys()):
        verbs[key] = (*verbs.get(key, ()), section)
    return verbs


def suggest_option(
    option: str, options: Sequence[str], arguments: Sequence[str], *, takes_keys: bool
) -> str:
    """An option of the verb, or a key of the job with its value, instead of `--steps 100`."""
    name = option.lstrip("-").replace("-", "_").lower()
    if instead := OPTIONS_OF_ALIAS.get(name):
        return f"did you mean {instead}?"
    suggestion = format_nearest_word_hint(
        option, [text for text in options if text.startswith("--")]
    )
    if not takes_keys:
        return suggestion
    is_exact = name.rpartition(".")[2] in {*list_sections_by_key(), *KEYS_OF_ALIAS}
    # The last letter is missing: --mode for --model.
    is_cut_off = any(text[:-1] == option for text in options)
    keys = suggest_key(
        option, list_sections_by_key(), _find_value_of_unknown_option(option, arguments)
    )
    # An exact key comes before an option that is only spelt like it.
    if keys and not is_cut_off and (is_exact or not suggestion):
        return keys
    return suggestion or keys


def _find_value_of_unknown_option(option: str, arguments: Sequence[str]) -> str:
    """The value that the command line gives an unknown option: `--steps 100` or `--steps=100`."""
    for index, word in enumerate(arguments):
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        if (
            word == option
            and index + 1 < len(arguments)
            # An option behind it is no value.
            and not arguments[index + 1].startswith("-")
        ):
            return arguments[index + 1]
    return ""


def suggest_verb(word: str) -> str:
    """'did you mean "train"?' for another tool's verb, or for what is an argument of ours."""
    if instead := VERB_ALIASES.get(word.lower()):
        return f'did you mean "{instead}"?'
    if "=" in word or word.endswith(".toml") or os.path.exists(word):
        return f"did you mean phalanx train {word}?"
    return ""


def refuse_non_job_file(word: str) -> None:
    """Raise UsageError for what stands where a job file is expected and is plainly something
    else: what to write."""
    path = Path(word)
    problem, fix = "", ""
    if path.is_dir():
        problem, fix = _describe_directory(path, word)
    elif path.is_file():
        if path.name.lower().endswith(DATA_SOURCE_SUFFIXES):
            problem, fix = "is data, not a job file", f"write data.source={word}"
    elif word.startswith("hf:") or (
        ":" in word and "/" not in word and word.replace(":", "").replace(".", "").isidentifier()
    ):
        problem, fix = "is a model, not a job file", f"write model.kind={word}"
    elif os.sep not in word:
        problem, fix = _describe_preset_or_key(word)
    if problem:
        raise UsageError(f"{word!r} {problem}", fix=fix)


def _describe_directory(path: Path, word: str) -> tuple[str, str]:
    if (path / "job.json").is_file():
        return "is a run, not a job file", f"phalanx train --resume {word} goes on with it"
    if (path / "config.json").is_file():
        return "is a model of Hugging Face, not a job file", f"write model.kind=hf:{word}"
    if (
        (path / "manifest.json").is_file()
        or (path / "model.toml").is_file()
        or path.parent.name == "checkpoints"
    ):
        job = next((str(path / name) for name in ("model.toml",) if (path / name).is_file()), "")
        return (
            "is a checkpoint, not a job file",
            f"give its job {job}" if job else f"write model.init_from={word}",
        )
    # The job that is in it is named.
    if any(path.glob("*.toml")):
        return "", ""
    return "is a folder, not a job file", f"write data.source={word} to train on what is in it"


def _describe_preset_or_key(word: str) -> tuple[str, str]:
    """A preset, or a key or another trainer's name of one, where a job file was expected."""
    from phalanx.job.presets import list_preset_names

    if word in list_preset_names():
        return "is a preset, not a job file", f"write model.preset={word}"
    if not Path(word).suffix and (keys := suggest_key(word, list_sections_by_key())):
        return "is neither a job file nor key=value", keys
    return "", ""
