"""Dropout under tensor parallelism: masks by place are those of whole activations, so ranks must
not have parts there.

A layer's place in the module does not say what it drops, and F.dropout has no place: the first
forward in training shows it. Between a column and the row that it feeds, each rank has its
features; of a sequence that is cut, its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from phalanx.core.errors import LayoutError


class PartialTensorDropoutCheck:
    """Follows the first training forward, and refuses what drops parts in it."""

    def __init__(
        self,
        module: nn.Module,
        modules: Mapping[str, nn.Module],
        columns: Iterable[str],
        rows: Iterable[str],
        *,
        cuts_sequence: bool,
    ) -> None:
        self._cuts_sequence = cuts_sequence
        self._open: set[str] = set()
        self._is_watching = True
        self._hooks = [
            modules[name].register_forward_hook(self._make_region_opening_hook(name))
            for name in columns
        ]
        self._hooks += [
            modules[name].register_forward_pre_hook(self._make_region_closing_hook(name))
            for name in rows
        ]
        self._hooks.append(module.register_forward_hook(self._stop_watching))

    def refuse_active_dropout(self, name: str) -> None:
        if self._is_watching and (self._cuts_sequence or self._open):
            raise partial_dropout_error(name)

    def _make_region_opening_hook(self, name: str) -> Any:
        return lambda *_: self._open.add(name)

    def _make_region_closing_hook(self, name: str) -> Any:
        """A row takes in the columns that stand nearest to it."""

        def close(*_: object) -> None:
            shared = {
                column: _count_common_name_parts(column.split("."), name.split("."))
                for column in self._open
            }
            self._open -= {
                column for column, length in shared.items() if length == max(shared.values())
            }

        return close

    def _stop_watching(self, module: nn.Module, *_: object) -> None:
        if module.training:
            # A recomputed part of a forward stops midway and would not end its hooks.
            self._is_watching = False
            for hook in self._hooks:
                hook.remove()


def _count_common_name_parts(path: list[str], other: list[str]) -> int:
    """Number of leading parts that two dotted names share."""
    return next(
        (i for i, (a, b) in enumerate(zip(path, other, strict=False)) if a != b),
        min(len(path), len(other)),
    )


def partial_dropout_error(name: str) -> LayoutError:
    return LayoutError(
        f"dropout of {name} is where ranks of tp have parts of the activations",
        fix=(
            "set it to 0 by model.args, or parallel.tp=1; with parallel.sequence_parallel=false it"
            " can stay before the columns and behind the row, and where no rule cuts anything"
        ),
    )
