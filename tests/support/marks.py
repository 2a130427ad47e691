"""Which tests assert bits, and which a deadline: read from their source, so that a new test is
marked on arrival.

A test has the mark `bits` if it, a fixture of its module or a helper that it calls compares
tensors, weights or loss curves for equality, and `deadline` if its module's code that it reaches
reads a clock, or allows `SLACK`.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

TESTS = Path(__file__).parents[1]
# Names whose use says it, wherever they are used.
COMPARES_BITS = {"equal", "array_equal", "weights", "loss_curve"}
READS_CLOCK = {"SLACK", "monotonic", "perf_counter", "wall_s", "detected_s"}


def marks_of_tests(path: Path) -> dict[str, set[str]]:
    """The marks of each test function of a file (`TestClass::test` is under "test")."""
    module = _read_module(path)
    names = {name for name in module.uses if name.startswith("test")}
    return {name: _marks(module, name) for name in names}


class _Module:
    """The names that each function or class of a file uses, and where it imports helpers of the
    tests from."""

    def __init__(self, tree: ast.Module) -> None:
        self.uses: dict[str, set[str]] = {}
        self.helpers: dict[str, Path] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.uses.setdefault(node.name, set()).update(_names_in(node))
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                self.uses.setdefault(node.name, set()).update(_names_in(node))
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self.uses.setdefault(target.id, set()).update(_names_in(node.value))
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and (TESTS / f"{node.module}.py").exists()
            ):
                self.helpers |= {
                    alias.asname or alias.name: TESTS / f"{node.module}.py" for alias in node.names
                }


@functools.cache
def _read_module(path: Path) -> _Module:
    return _Module(ast.parse(path.read_text(encoding="utf-8")))


def _names_in(node: ast.AST) -> set[str]:
    """Names and attributes in a piece of code.

    Arguments are names, too: that is how a test asks for a fixture.
    """
    names = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            names.add(part.id)
        elif isinstance(part, ast.Attribute):
            names.add(part.attr)
        elif isinstance(part, ast.arg):
            names.add(part.arg)
    return names


def _marks(module: _Module, test: str) -> set[str]:
    marks = set()
    if _reaches(module, test, COMPARES_BITS, follow_helpers=True):
        marks.add("bits")
    # Helpers read clocks to give up on what hangs. That is no deadline of the product.
    if _reaches(module, test, READS_CLOCK, follow_helpers=False):
        marks.add("deadline")
    return marks


def _reaches(module: _Module, start: str, words: set[str], *, follow_helpers: bool) -> bool:
    """True if `start`, or what it uses, uses one of `words`."""
    seen: set[tuple[int, str]] = set()
    left = [(module, start)]
    while left:
        where, name = left.pop()
        if (id(where), name) in seen:
            continue
        seen.add((id(where), name))
        uses = where.uses.get(name, set())
        if uses & words:
            return True
        left += [(where, used) for used in uses if used in where.uses]
        if follow_helpers:
            left += [
                (_read_module(where.helpers[used]), used) for used in uses if used in where.helpers
            ]
    return False
