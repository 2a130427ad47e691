"""The folder is the registry: `kind = "x"` is the module `x` in a folder, `"pkg.mod:attr"` is
the user's."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from phalanx.core.errors import (
    EnvironmentProblem,
    LayoutError,
    UsageError,
    format_nearest_word_hint,
)

_thread_local = threading.local()


def list_modules_of_registry(package: str) -> list[str]:
    """Kinds that live in `package` (for example "phalanx.nn.models"), found without importing
    any."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, package
    modules = pkgutil.iter_modules(list(spec.submodule_search_locations or ()))
    return sorted(module.name for module in modules if not module.name.startswith("_"))


def read_module_constant(kind: str, package: str, name: str, default: Any) -> Any:
    """The literal that the module `kind` of `package` gives `name` at its top level, read without
    importing it.

    For rooms that must not import torch, of files that do. `default` where the module says nothing.
    """
    spec = importlib.util.find_spec(package)
    assert spec is not None, package
    for folder in spec.submodule_search_locations or ():
        path = Path(folder) / f"{kind}.py"
        if not path.is_file():
            continue
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Assign) and _is_assignment_to_name(statement, name):
                # Literals alone: nothing of the file runs.
                return ast.literal_eval(statement.value)
    return default


def _is_assignment_to_name(statement: ast.Assign, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in statement.targets)


def is_foreign(kind: str | None) -> bool:
    """True if `kind` reaches outside phalanx ("package.module:attribute")."""
    return kind is not None and ":" in kind


def import_user_module(name: str) -> ModuleType:
    """Import a module of the user's, in which nothing may call `refuse_during_user_import`."""
    before = getattr(_thread_local, "importing", "")
    _thread_local.importing = name
    try:
        return importlib.import_module(name)
    finally:
        _thread_local.importing = before


def refuse_during_user_import(verb: str) -> None:
    """Raise UsageError if this thread is importing a module of the user's.

    Each process that needs the module imports it: a script that trains as it is imported would
    start processes without end.
    """
    name = getattr(_thread_local, "importing", "")
    if name:
        raise UsageError(
            f"{verb} is called while phalanx imports {name!r} to reach what is in it",
            fix='put the call under `if __name__ == "__main__":`',
        )


def import_object_of_kind(kind: str, package: str, attribute: str) -> Any:
    """The object named by `kind`: `attribute` of our own module, or the user's own object.

    Raises LayoutError (exit 3) for a kind that does not exist; an exception inside the user's
    module passes through.
    """
    if not is_foreign(kind):
        if kind not in list_modules_of_registry(package):
            known = list_modules_of_registry(package)
            raise LayoutError(
                f"unknown kind {kind!r}",
                why=f"known: {', '.join(known)}",
                fix=format_nearest_word_hint(kind, known) or None,
            )
        return getattr(importlib.import_module(f"{package}.{kind}"), attribute)
    module_name, _, path = kind.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *path.split("."))):
        raise LayoutError(f"{kind!r} is not package.module:name")
    try:
        target: Any = import_user_module(module_name)
    except ModuleNotFoundError as error:
        # A module that the user's own imports, and does not find, is another error.
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise LayoutError(
                f"module {module_name!r} cannot be found",
                fix="put its folder on PYTHONPATH or run beside it",
            ) from None
        raise
    for part in path.split("."):
        if not hasattr(target, part):
            known = [name for name in dir(target) if not name.startswith("_")]
            fix = format_nearest_word_hint(part, known) or None
            raise LayoutError(f"{module_name!r} has no {path!r}", fix=fix)
        target = getattr(target, part)
    return target


def import_optional_dependency(module: str, *, extra: str, needed_for: str) -> Any:
    """Import an optional dependency, or raise one line that names the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EnvironmentProblem(
            f"{needed_for} needs {module}", why=str(error), fix=f"pip install 'phalanx[{extra}]'"
        ) from None
