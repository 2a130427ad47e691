"""A planted bug: an edit of phalanx's own code, anchored on a symbol, and where it must show.

Edits touch what is judged, never `phalanx.verify`. They replace text inside one function, method or
class, found by its name and not by its line. The new text calls `__planted__(condition, rank=None)`,
which records that the edited line ran, and is True where the bug acts.
"""

from __future__ import annotations
import __future__

import ast
import hashlib
import importlib
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = Path(__file__).parents[2] / "src" / "phalanx"
PLANTS = Path(__file__).parent / "plants"
MARK = "__planted__("
JUDGE = "verify/"
AXES = (
    "data parallel",
    "tensor parallel",
    "context parallel",
    "pipeline",
    "experts",
    "recompute and offload",
    "dropout",
    "batchnorm",
    "compression",
    "optimizer",
    "model",
    "loss",
    "trainer",
    "checkpoint",
    "drift",
)
DEFAULT_JOB = ("--shrink",)


class StaleAnchorError(Exception):
    """The text or the symbol that an edit is anchored on is not in the code any more."""


@dataclass(frozen=True)
class Edit:
    """Replaces `old`, which stands once in `symbol` of `file` (below src/phalanx), by `new`."""

    file: str
    symbol: str
    old: str
    new: str

    @property
    def module(self) -> str:
        name = "phalanx." + self.file.removesuffix(".py").replace("/", ".")
        return name.removesuffix(".__init__")

    def apply(self, source: str) -> str:
        """The source of the module with the edit. Raises StaleAnchorError, and SyntaxError."""
        start, end = find_symbol(source, self.symbol, self.file)
        body = source[start:end]
        if body.count(self.old) != 1:
            raise StaleAnchorError(
                f"{self.file}: {self.old!r} stands {body.count(self.old)} times in {self.symbol}"
            )
        body = body.replace(self.old, self.new)
        ast.parse(textwrap.dedent(body))
        return source[:start] + body + source[end:]


@dataclass(frozen=True)
class Plant:
    """One bug. `shows` and `clean`: layouts of `num_ranks` ranks in which it must, or must not, show.

    `tensors`, `blamed` (ranks) and `cause` say what the right answer is: patterns of the tensor that
    is named ("" where a number and no tensor is off), the ranks that may be named (empty: any), and
    parts of the cause in lower case, one of which must be named. `mistake` says in words what the bug
    does, `source` where it was seen
    first, `axis` the part of the system that has it (one of AXES). `job`: what `phalanx verify` is
    given besides the layouts. `size`: the relative error that is planted, where that is one number.
    """

    axis: str
    source: str
    mistake: str
    edits: tuple[Edit, ...]
    shows: tuple[str, ...]
    cause: tuple[str, ...]
    tensors: tuple[str, ...] = ("*",)
    blamed: tuple[int, ...] = ()
    clean: tuple[str, ...] = ()
    job: tuple[str, ...] = DEFAULT_JOB
    num_ranks: int = 4
    size: float = 0.0
    name: str = ""

    @property
    def digest(self) -> str:
        """A hash of all that the plant says."""
        return hashlib.sha256(repr(sorted(asdict(self).items())).encode()).hexdigest()[:16]

    @property
    def asks_tensor(self) -> bool:
        """True if some tensor would be a wrong answer."""
        return "*" not in self.tensors

    @property
    def asks_rank(self) -> bool:
        """True if some rank would be a wrong answer: what is reduced is wrong on all of them."""
        return bool(self.blamed)

    def names_tensor(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.tensors)

    def names_rank(self, rank: int) -> bool:
        return not self.blamed or rank in self.blamed

    def names_cause(self, cause: str) -> bool:
        return any(part in cause.lower() for part in self.cause)


@cache
def _parse(source: str) -> ast.Module:
    return ast.parse(source)


def _find_node(source: str, symbol: str, file: str) -> ast.FunctionDef | ast.ClassDef:
    """The definition of the function, method or class `symbol`. Raises StaleAnchorError."""
    body: list[ast.stmt] = _parse(source).body
    node: ast.AST | None = None
    for name in symbol.split("."):
        node = next((child for child in body if getattr(child, "name", None) == name), None)
        if node is None:
            raise StaleAnchorError(f"{file} has no {symbol}")
        body = getattr(node, "body", [])
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    return node


def find_symbol(source: str, symbol: str, file: str) -> tuple[int, int]:
    """The characters of `source` at which the function, method or class `symbol` begins and ends."""
    node = _find_node(source, symbol, file)
    lines = source.splitlines(keepends=True)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    start = sum(map(len, lines[: first - 1]))
    return start, start + sum(map(len, lines[first - 1 : node.end_lineno]))


@contextmanager
def editing_loaded_modules(plant: Plant, rank: int) -> Iterator[set[str]]:
    """Inside, functions and methods of the modules that this process has imported are as the
    plant's edits make them; the set says in which modules the bug acted.

    For a process that has forked: `sit` starts new ones. A function that other modules have
    imported by its name stays as it was there, and a class cannot be edited.
    """
    acted: set[str] = set()
    undos: list[tuple[Any, str, Any]] = []
    try:
        for module_name, source in edit_sources(plant).items():
            module = importlib.import_module(module_name)
            _set_mark(module, rank, acted)
            for edit in plant.edits:
                if edit.module == module_name:
                    undos.append(_replace_function(module, source, edit))
        yield acted
    finally:
        for owner, name, before in reversed(undos):
            setattr(owner, name, before)


def _set_mark(module: ModuleType, own_rank: int, acted: set[str]) -> None:
    """Give the module its `__planted__`, as the hook of new processes does."""

    def mark(condition: object = True, *, rank: int | None = None) -> bool:
        acts = bool(condition) and rank in (None, own_rank)
        if acts:
            acted.add(module.__name__)
        return acts

    vars(module)["__planted__"] = mark


def _replace_function(module: ModuleType, source: str, edit: Edit) -> tuple[Any, str, Any]:
    """Put the edited function in the place of the loaded one; (owner, name, what was there)."""
    node = _find_node(source, edit.symbol, edit.file)
    assert isinstance(node, ast.FunctionDef), f"{edit.symbol} is no function"
    code = compile(
        ast.Module([node], []),
        str(module.__file__),
        "exec",
        flags=__future__.annotations.compiler_flag,
        dont_inherit=True,
    )
    made: dict[str, Any] = {}
    exec(code, vars(module), made)
    owner: Any = module
    for name in edit.symbol.split(".")[:-1]:
        owner = vars(owner)[name]
    before = vars(owner)[node.name]
    setattr(owner, node.name, made[node.name])
    return owner, node.name, before


def list_plants() -> list[Plant]:
    """All plants of the folder, by name."""
    return [load_plant(path.stem) for path in sorted(PLANTS.glob("[!_]*.py"))]


def load_plant(name: str) -> Plant:
    """The plant of plants/NAME.py."""
    plant: Plant = importlib.import_module(f"exam.plants.{name}").PLANT
    return replace(plant, name=name)


def edit_sources(plant: Plant) -> dict[str, str]:
    """The edited source of each module that the plant touches. Raises StaleAnchorError, and
    SyntaxError."""
    texts: dict[str, str] = {}
    for edit in plant.edits:
        path = PACKAGE / edit.file
        if not path.exists():
            raise StaleAnchorError(f"there is no {edit.file}")
        source = texts.get(edit.module)
        texts[edit.module] = edit.apply(
            path.read_text(encoding="utf-8") if source is None else source
        )
    return texts


def find_stale(plant: Plant) -> Iterator[str]:
    """A line for each thing that is wrong with a plant: what no longer applies, and what it may not
    do."""
    if plant.axis not in AXES:
        yield f"{plant.name}: {plant.axis!r} is no axis"
    for edit in plant.edits:
        if edit.file.startswith(JUDGE):
            yield f"{plant.name}: edits the judge, {edit.file}"
        if MARK not in edit.new:
            yield f"{plant.name}: the new text of {edit.symbol} does not call {MARK})"
    try:
        edit_sources(plant)
    except (StaleAnchorError, SyntaxError) as error:
        yield f"{plant.name}: {error}"
