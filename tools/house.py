#!/usr/bin/env python3
"""Counts what a reader of a Python package meets: sizes, names, density, comments.

`house.py PACKAGE [--list]`.

The counts are no limits: they point at rooms to read. Prints one JSON object; --list names the
offenders behind each count first.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def split_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


EVERYDAY = split_words(
    "found told made here there own said whole given kept held wanted others every mine begin asked"
    " place seen what some left taken ours theirs again beside near who"
)
PARTICIPLES = split_words(
    "told said made held kept found sent cut drawn written taken given seen known left built shown"
    " hidden met put done gone spread understood chosen"
)
PREPOSITIONS = split_words("of in as what how where without within beside from with before after")
NO_SUBJECT = re.compile(
    r"^(Of|What|Those|Whether|How|Where|None|Nothing|Who|Which|For|In|As|The one|That)\b"
)
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.comprehension)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
MAX_BRANCHES = 15
MAX_COLUMNS = 100

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Counts:
    """Sums over all files of a package. `offenders` are lines for --list."""

    file_sizes: list[int] = field(default_factory=list)
    function_sizes: list[int] = field(default_factory=list)
    classes: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    public_functions: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    num_code_lines: int = 0
    num_comment_lines: int = 0
    num_wide_lines: int = 0
    num_conditional_expressions: int = 0
    num_comprehensions: int = 0
    num_everyday: int = 0
    num_docstrings: int = 0
    num_without_subject: int = 0
    num_busy: int = 0
    num_odd_names: int = 0
    offenders: list[str] = field(default_factory=list)

    def count_file(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        self.file_sizes.append(len(lines))
        self.num_code_lines += sum(1 for line in lines if line.strip())
        self.num_comment_lines += sum(1 for line in lines if line.strip().startswith("#"))
        self.num_wide_lines += sum(1 for line in lines if len(line) > MAX_COLUMNS)
        tree = ast.parse(text)
        for node in ast.walk(tree):
            self._count_node(path, node)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                self.classes[node.name].add(str(path))
            if isinstance(node, Function) and not node.name.startswith("_"):
                self.public_functions[node.name].add(str(path))

    def _count_node(self, path: Path, node: ast.AST) -> None:
        self.num_conditional_expressions += isinstance(node, ast.IfExp)
        self.num_comprehensions += isinstance(node, COMPREHENSIONS)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in EVERYDAY:
            self.num_everyday += 1
            self.offenders.append(f"everyday {path}:{node.lineno} {node.id}")
        if isinstance(node, ast.arg) and node.arg in EVERYDAY:
            self.num_everyday += 1
            self.offenders.append(f"everyday {path}:{node.lineno} {node.arg}")
        if isinstance(node, ast.ClassDef | Function):
            self._count_docstring(path, node)
        if isinstance(node, Function):
            self._count_function(path, node)

    def _count_docstring(self, path: Path, node: ast.ClassDef | Function) -> None:
        docstring = ast.get_docstring(node)
        if not docstring:
            return
        self.num_docstrings += 1
        if NO_SUBJECT.match(docstring):
            self.num_without_subject += 1
            self.offenders.append(f"subject {path}:{node.lineno} {docstring.splitlines()[0][:90]}")

    def _count_function(self, path: Path, function: Function) -> None:
        assert function.end_lineno is not None
        self.function_sizes.append(function.end_lineno - function.lineno + 1)
        branches = num_branches(function)
        if branches > MAX_BRANCHES:
            self.num_busy += 1
            self.offenders.append(f"busy {path}:{function.lineno} {function.name} {branches}")
        if is_oddly_named(function):
            self.num_odd_names += 1
            self.offenders.append(f"odd {path}:{function.lineno} {function.name}")

    def to_json(self) -> dict[str, Any]:
        thousands = self.num_code_lines / 1000
        shared_classes = [
            name for name, paths in self.classes.items() if len(paths) > 1 and name[0] != "_"
        ]
        shared_functions = [name for name, paths in self.public_functions.items() if len(paths) > 1]
        return {
            "files": len(self.file_sizes),
            "lines": sum(self.file_sizes),
            "file_p50_p90_max": p50_p90_max(self.file_sizes),
            "function_p50_p90_max": p50_p90_max(self.function_sizes),
            "functions_over_15_branches": self.num_busy,
            "class_names_in_two_files": len(shared_classes),
            "public_functions_in_two_files": len(shared_functions),
            "functions_not_verbs_percent": percent(self.num_odd_names, len(self.function_sizes)),
            "everyday_variables": self.num_everyday,
            "docstrings_without_subject_percent": percent(
                self.num_without_subject, self.num_docstrings
            ),
            "comment_lines_percent": percent(self.num_comment_lines, self.num_code_lines),
            "conditional_expressions_per_kline": round(
                self.num_conditional_expressions / thousands, 1
            ),
            "comprehensions_per_kline": round(self.num_comprehensions / thousands, 1),
            "lines_over_100_percent": percent(self.num_wide_lines, self.num_code_lines),
        }

    def names_in_two_files(self) -> list[str]:
        return [
            f"twice {name} {' '.join(sorted(paths))}"
            for names in (self.classes, self.public_functions)
            for name, paths in names.items()
            if len(paths) > 1 and not name.startswith("_")
        ]


def num_branches(function: Function) -> int:
    """The number of branches of `function`, functions inside of it included; each `and` and `or`
    is one more."""
    count = 0
    for node in ast.walk(function):
        count += isinstance(node, BRANCHES)
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
    return count


def is_oddly_named(function: Function) -> bool:
    """True for a function named by a participle or a preposition.

    A property is a value and may be.
    """
    decorators = {getattr(decorator, "id", "") for decorator in function.decorator_list}
    if function.name.startswith("__") or decorators & {"property", "cached_property"}:
        return False
    words = function.name.strip("_").split("_")
    first, last = words[0], words[-1]
    is_participle = re.search(r"[a-z]{2,}ed$", first) or re.search(r"[a-z]{3,}ed$", last)
    return bool({first, last} & PARTICIPLES or first in PREPOSITIONS or is_participle)


def p50_p90_max(sizes: Sequence[int]) -> list[int]:
    ordered = sorted(sizes) or [0]
    return [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.9, 1.0)]


def percent(part: int, total: int) -> float:
    return round(100 * part / max(1, total), 1)


def main(root: str, show: bool) -> None:
    counts = Counts()
    for path in sorted(Path(root).rglob("*.py")):
        counts.count_file(path)
    if show:
        print(*counts.names_in_two_files(), *sorted(counts.offenders), sep="\n")
    print(json.dumps(counts.to_json()))


if __name__ == "__main__":
    main(sys.argv[1], "--list" in sys.argv)
