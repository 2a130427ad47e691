"""The options of `phalanx plan` that are another spelling of keys of the job."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import LayoutError, UsageError

OPTION_OF_KEY: Mapping[str, str] = {
    "cluster.gpu": "--gpu",
    "cluster.instance": "--instance",
    "cluster.file": "--cluster",
    "cluster.nodes": "--nodes",
    "data.seq_len": "--seq-len",
    "train.global_batch_size": "--global-batch",
    "parallel.ranks": "--gpus",
}
"""The options that are another spelling of one key."""


@dataclass(frozen=True)
class KeyOptions:
    """The values of these options, None of each that is not given."""

    model: str | None = None
    gpu: str | None = None
    instance: str | None = None
    cluster: Path | None = None
    nodes: int | None = None
    gpus: str | None = None
    seq_len: int | None = None
    global_batch: int | None = None

    def list_values(self) -> dict[str, object]:
        """The value of each option, by its name on the command line."""
        return {f"--{field.replace('_', '-')}": value for field, value in vars(self).items()}

    def list_given_names(self) -> tuple[str, ...]:
        return tuple(name for name, value in self.list_values().items() if value is not None)

    def add_to(self, words: Sequence[str]) -> list[str]:
        """`words` (job files and KEY=VALUE) with the keys that the options stand for.

        Raises UsageError where an option and a key say different things.
        """
        model_override = None if self.model is None else build_model_override(self.model)
        values = self.list_values()
        check_options_against_keys(values, model_override, words)
        overrides = [
            f"{key}={values[option]}"
            for key, option in OPTION_OF_KEY.items()
            # A number of GPUs, or a range, is read by the search.
            if option != "--gpus" and values[option] is not None
        ]
        if model_override is not None:
            overrides.append(model_override)
        # Before the keys that were typed: a finding is told of the last one that it is about.
        num_files = next((at for at, word in enumerate(words) if "=" in word), len(words))
        return [*words[:num_files], *overrides, *words[num_files:]]


def build_model_override(model: str) -> str:
    """The key that names a model: a preset, package.module:factory, or a directory (or its
    config.json) of Hugging Face's, which need not be there.

    Raises LayoutError for the name of a model on a hub.
    """
    path = Path(model)
    if path.name == "config.json":
        path = path.parent
    if (path / "config.json").is_file():
        return f"model.kind=hf:{path}"
    if ":" in model:
        return f"model.kind={model}"
    # What can only be a path is looked for as one, so that the error names the file.
    has_folders = "/" in model
    if model.endswith(".json") or model[:1] in (".", "/", "~") or (has_folders and path.exists()):
        return f"model.kind=hf:{model}"
    if has_folders:
        raise LayoutError(
            f"--model {model}: there is no such directory here, and nothing is downloaded",
            fix="give a directory with config.json, a preset (--models lists them), or"
            " package.module:factory",
        )
    return f"model.preset={model}"


def check_options_against_keys(
    option_values: Mapping[str, object], model_override: str | None, words: Sequence[str]
) -> None:
    """Raises UsageError where an option and a KEY=VALUE beside it say different things.

    `option_values`: the values of the options, None where one is not given; `model_override`: the
    key that --model stands for, with its value.
    """
    value_of_key = dict(word.split("=", 1) for word in words if "=" in word)
    value_of_key = {key.strip(): value.strip().strip("\"'") for key, value in value_of_key.items()}
    option_of_key = {
        key: (option, str(option_values[option]))
        for key, option in OPTION_OF_KEY.items()
        if option_values.get(option) is not None
    }
    if model_override is not None:
        key, _, value = model_override.partition("=")
        option_of_key[key] = ("--model", value)
    for key, (option, value) in option_of_key.items():
        if key in value_of_key and value_of_key[key].replace("_", "") != value.replace("_", ""):
            raise UsageError(
                f"{option} says {value} and {key} says {value_of_key[key]}",
                fix=f"leave {option} or {key} out",
            )
    if option_values.get("--gpus") is not None and "cluster.nodes" in value_of_key:
        raise UsageError(
            "--gpus and cluster.nodes both say how large the cluster is",
            fix="leave one of them out",
        )


def spell_keys_as_options(text: str, given_options: Collection[str]) -> str:
    """`text` with its KEY=VALUE as OPTION VALUE where the command line has the option: the key
    would contradict it, and of an option given twice the last one counts."""
    if "--gpus" in given_options:
        # As many machines as the GPUs take.
        text = re.sub(r"cluster\.nodes=\d+ ?", "", text)
    for key, option in OPTION_OF_KEY.items():
        if option in given_options:
            text = re.sub(rf"(?<![\w.]){re.escape(key)}=", f"{option} ", text)
    return text
