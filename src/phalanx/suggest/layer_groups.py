"""Groups of layers that can be cut together: columns, and the one row that they feed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.mesh.logical import full_name
from phalanx.suggest.observed import ObservedModule


@dataclass(frozen=True)
class LayerGroup:
    """Linear layers whose outputs feed one other layer, the row, and nothing else.

    `home` is the innermost module that holds them all; "" for the whole module.
    """

    columns: tuple[str, ...]
    row: str
    home: str

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all its layers, the row last."""
        return (*self.columns, self.row)

    def name_within_home(self, name: str) -> str:
        """The name of a module in `home`, without the name of `home`."""
        if not self.home:
            return name
        return name[len(self.home) + 1 :]

    def find_parameter_owner(self, parameter: str) -> str:
        """The full name of the module that holds a parameter, which is named within `home`."""
        return full_name(".".join(filter(None, (self.home, parameter.rpartition(".")[0]))))


def find_layer_groups(observed: ObservedModule) -> list[LayerGroup]:
    """The groups of a module, in the order of its forward. A layer is in one group at most."""
    flow = observed.flow
    feeders = {
        name: flow.find_feeding_layers(layer_input) for name, layer_input in flow.inputs.items()
    }
    result_feeders = flow.find_layers_feeding_result()
    grouped: set[str] = set()
    groups = []
    for row, row_feeders in feeders.items():
        columns = tuple(name for name in flow.outputs if name in row_feeders)
        is_free = row not in grouped and not grouped & row_feeders
        # A column without an input here is an embedding, or is called more than once.
        if not columns or not is_free or any(name not in feeders for name in columns):
            continue
        feeders_elsewhere = set(result_feeders)
        for other_row, other_feeders in feeders.items():
            if other_row != row:
                feeders_elsewhere |= other_feeders
        # What also goes elsewhere must stay whole; a tied weight is used at two places.
        if feeders_elsewhere & row_feeders or observed.has_tied_parameter((*columns, row)):
            continue
        grouped |= {row, *columns}
        groups.append(LayerGroup(columns, row, _find_common_parent([*columns, row])))
    return groups


def _find_common_parent(names: Sequence[str]) -> str:
    """The innermost module that holds all of `names`."""
    paths = [name.split(".")[:-1] for name in names]
    # Not strict: beyond the shortest path nothing is shared.
    levels = zip(*paths, strict=False)
    shared = itertools.takewhile(lambda steps: len(set(steps)) == 1, levels)
    return ".".join(steps[0] for steps in shared)
