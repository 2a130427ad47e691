"""Plants of the exam in ranks that are forked from a process that has imported phalanx already."""

from __future__ import annotations

import importlib
import inspect
import types
from typing import Any

import torch.distributed as dist
from exam.plant import edit_sources, load_plant


def plant_bug(name: str) -> None:
    """Put the bug of tests/exam/plants/NAME.py into the functions of this process, in place:
    whoever has imported them has the bug, too."""
    plant = load_plant(name)
    for module_name, source in edit_sources(plant).items():
        module = importlib.import_module(module_name)
        vars(module)["__planted__"] = _acts
        edited = types.ModuleType(module_name)
        edited.__file__ = module.__file__
        exec(compile(source, str(module.__file__), "exec"), vars(edited))
        for edit in plant.edits:
            if edit.module == module_name:
                _find(module, edit.symbol).__code__ = _find(edited, edit.symbol).__code__


def _find(module: types.ModuleType, symbol: str) -> Any:
    found: Any = module
    for name in symbol.split("."):
        found = getattr(found, name)
    return inspect.unwrap(found)


def _acts(condition: Any = True, *, rank: int | None = None) -> bool:
    own_rank = dist.get_rank() if dist.is_initialized() else -1
    return bool(condition) and rank in (None, own_rank)
