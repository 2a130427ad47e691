"""One name, one meaning: no class and no public function of phalanx is named twice, but for reviewed reasons."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from pathlib import Path

import phalanx

PACKAGE = Path(phalanx.__file__).parent

# A registry asks each module of its folder for the same function, or a process begins in it.
BY_CONTRACT = {
    "main": "the entry of a process: `module:main` and `python -m module`",
    "command": "the function that each verb's file gives the command line",
    "build": "what each model's, optimizer's and hook's file gives",
    "open_sink": "what each sink's file gives the bus",
    "default_objective": "what each model's file gives the trainer",
    "example_batch": "what each model's file gives probes",
    "environment": "what a sink's file may give besides: variables of its process",
    "train_in_turns": "what each contender's file gives a rank of `phalanx bench train`",
    "inject": "what each fault's file gives the drills",
}
# The same word in two rooms, for a reason.
REVIEWED_FUNCTIONS: dict[str, str] = {}
REVIEWED_CLASSES = {
    "Cluster": "the section [cluster] of a job, and the machine that a plan is for, which it describes",
}


@functools.cache
def public_names() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """(classes, public functions) at the top level of modules: the files of each name."""
    classes: dict[str, set[str]] = defaultdict(set)
    functions: dict[str, set[str]] = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        place = str(path.relative_to(PACKAGE))
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].add(place)
            elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                functions[node.name].add(place)
    return classes, functions


def find_repeated(names: dict[str, set[str]]) -> dict[str, set[str]]:
    return {name: places for name, places in names.items() if len(places) > 1}


def test_no_class_is_named_twice() -> None:
    repeated = find_repeated(public_names()[0])
    assert {name: places for name, places in repeated.items() if name not in REVIEWED_CLASSES} == {}
    assert REVIEWED_CLASSES.keys() - repeated.keys() == set(), "no longer needed"


def test_no_public_function_is_named_twice() -> None:
    repeated = find_repeated(public_names()[1])
    reviewed = BY_CONTRACT.keys() | REVIEWED_FUNCTIONS.keys()
    assert {name: places for name, places in repeated.items() if name not in reviewed} == {}
    assert reviewed - repeated.keys() == set(), "no longer needed"


def test_test_files_have_names_of_their_own() -> None:
    """pytest collects none of two files of one name: `make test-all` would end before its first
    test."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in Path(__file__).parent.parent.rglob("test_*.py"):
        places[path.name].append(str(path))
    assert [found for found in places.values() if len(found) > 1] == []
