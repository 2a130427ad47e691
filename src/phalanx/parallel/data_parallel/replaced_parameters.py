"""Trained parameters in whose place somebody has put others, which FSDP takes out again: it sets
its own before and after each use, so whoever looks at the module between steps sees no other."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from phalanx.mesh.compat import list_fsdp_places_of_others, watch_fsdp_places_of_parameters
from phalanx.mesh.logical import full_name


class ReplacedParameters:
    """The trained parameters below `root` that FSDP found replaced since they were asked for.

    `module`: the model in it, by which they are named.
    """

    def __init__(self, root: nn.Module, module: nn.Module) -> None:
        self._root, self._module = root, module
        self._places: set[tuple[nn.Module, str]] = set()

    def start(self) -> None:
        """Notice what is replaced from now on."""
        watch_fsdp_places_of_parameters(
            self._root, lambda part, name: self._places.add((part, name))
        )

    def take_names(self) -> list[str]:
        """Full names of the places, of a tied parameter of each that was replaced; once."""
        places, self._places = self._places, set()
        return self._name_places(places)

    def list_names(self) -> list[str]:
        """What `take_names` would give, and the places in which others are now."""
        return self._name_places({*self._places, *list_fsdp_places_of_others(self._root)})

    def _name_places(self, places: Collection[tuple[nn.Module, str]]) -> list[str]:
        if not places:
            return []
        return [
            full_name(f"{part_name}.{name}".removeprefix("."))
            for part_name, part in self._module.named_modules()
            for name in sorted(name for holder, name in places if holder is part)
        ]
