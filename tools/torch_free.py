"""A contract of import-linter: in its rooms a module reaches torch by no chain of imports, but for
a list.

A new module is under the contract from its first line. An entry of the list that is of no use any
more breaks the contract as well, so that the list cannot rot.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output

TORCH = "torch"


class TorchFreeContract(Contract):
    """Modules of `rooms` (packages or modules) reach torch only if they are in `may_import_torch`.

    `lazy_imports` ("a -> b") stand inside functions: `a` is torch-free until it calls them.
    """

    rooms: Any = fields.ListField(subfield=fields.ModuleField())
    may_import_torch: Any = fields.ListField(subfield=fields.ModuleField())
    lazy_imports: Any = fields.ListField(subfield=fields.ImportExpressionField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        problems = list(_take_out_lazy_imports(graph, self.lazy_imports or ()))
        reaching = graph.find_downstream_modules(TORCH)
        allowed = {module.name for module in self.may_import_torch}
        rooms = [room.name for room in self.rooms]
        in_rooms = {module for room in rooms for module in _modules_of(graph, room)}
        problems += (
            f"{room}: there is no such room" for room in rooms if room not in graph.modules
        )
        problems += _chains_to_torch(graph, (reaching & in_rooms) - allowed)
        for module in sorted(allowed - (reaching & in_rooms)):
            problems.append(
                f"{module} does not reach torch, or is in no room: take it off the list"
            )
        return ContractCheck(kept=not problems, metadata={"problems": problems})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for problem in check.metadata["problems"]:
            output.print_error(problem)
            output.new_line()


def _modules_of(graph: ImportGraph, room: str) -> set[str]:
    return ({room} if room in graph.modules else set()) | set(graph.find_descendants(room))


def _chains_to_torch(graph: ImportGraph, modules: set[str]) -> Iterator[str]:
    """A chain of imports for each of `modules`, but for those that reach torch through another
    one of them."""
    for module in sorted(modules):
        chain: Sequence[str] = graph.find_shortest_chain(module, TORCH) or ()
        if not modules & set(chain[1:]):
            yield f"{module} must be torch-free: {' -> '.join(chain)}"


def _take_out_lazy_imports(graph: ImportGraph, expressions: Sequence[Any]) -> Iterator[str]:
    """Remove the imports from the graph; says which do not stand inside functions, or lead
    nowhere near torch."""
    reaching = graph.find_downstream_modules(TORCH) | {TORCH}
    for expression in expressions:
        importer, imported = expression.importer.expression, expression.imported.expression
        details = graph.get_import_details(importer=importer, imported=imported)
        if not details or imported not in reaching:
            yield (
                f"{expression}: there is no such import, or it does not lead to torch: take it off"
                " the list"
            )
            continue
        if not all(_is_indented(importer, detail["line_number"]) for detail in details):
            yield f"{expression} must stand inside a function"
        graph.remove_import(importer=importer, imported=imported)


def _is_indented(module: str, line_number: int) -> bool:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    line = Path(spec.origin).read_text(encoding="utf-8").splitlines()[line_number - 1]
    return line.startswith(" ")
