"""What a fixture of a module has to make: cases that nobody asks for cost as much as the others."""

from __future__ import annotations

from typing import Any

import pytest


def list_selected_params(request: pytest.FixtureRequest, *names: str) -> list[tuple[Any, ...]]:
    """The values of these parameters in those tests of the module that are run, each once and in
    order."""
    found: dict[tuple[Any, ...], None] = {}
    for item in request.session.items:
        params = getattr(item, "callspec", None) and item.callspec.params
        if item.path == request.path and params and params.keys() >= set(names):
            found[tuple(params[name] for name in names)] = None
    return list(found)
