"""The shapes of published models, as data: one TOML file per family, in the words of the [model]
section.

`shared` holds what all models of a family have in common, `same_as` takes over another model's
values, `num_params` is the published count. What a row leaves out is the default of its shape
(phalanx.job.shapes), or follows from what is there (phalanx.job.model).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A named model. `values` are keys of its shape."""

    name: str
    family: str
    source: str
    num_params: int | None
    """As published; None for phalanx's own models."""
    values: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """The model of phalanx that builds it."""
        return str(self.values.get("kind", "decoder"))


def list_presets() -> list[Preset]:
    """All presets, family by family."""
    return [
        preset for family in _read_preset_texts() for preset in _load_preset_family(family).values()
    ]


def list_preset_names() -> list[str]:
    return [preset.name for preset in list_presets()]


def find_preset(name: str) -> Preset | None:
    """The preset of this name."""
    # Only files that hold it are parsed: all of them would take 40 ms of every command.
    families = (
        _load_preset_family(family) for family, text in _read_preset_texts().items() if name in text
    )
    return next((family[name] for family in families if name in family), None)


@cache
def _read_preset_texts() -> dict[str, str]:
    files = sorted(
        Path(__file__).parent.glob("*.toml"), key=lambda file: (file.stem != "phalanx", file.stem)
    )
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


@cache
def _load_preset_family(stem: str) -> dict[str, Preset]:
    table = tomllib.loads(_read_preset_texts()[stem])
    return {name: _build_preset(name, table) for name in table["models"]}


def _build_preset(name: str, family: Mapping[str, Any]) -> Preset:
    values = dict(family["models"][name])
    # The other may have one, too; what a model says itself wins.
    while "same_as" in values:
        other = values.pop("same_as")
        values = {**family["models"][other], **values}
    num_params = values.pop("num_params", None)
    return Preset(
        name, family["family"], family["source"], num_params, {**family.get("shared", {}), **values}
    )
