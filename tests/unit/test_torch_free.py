"""The contract of import-linter that keeps rooms torch-free (tools/torch_free.py), on small
graphs of imports."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from grimp import ImportGraph

TOOL = Path(__file__).parents[2] / "tools" / "torch_free.py"
LAZY = "phalanx.run.external -> phalanx.run.launched_rank"


def problems(*imports: str, allowed: tuple[str, ...] = (), lazy: tuple[str, ...] = ()) -> list[str]:
    """What the contract says of these imports ("a -> b"), for the rooms phalanx.core and
    phalanx.run."""
    spec = importlib.util.spec_from_file_location("torch_free", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    graph = ImportGraph()
    for name in ("phalanx.core", "phalanx.run", "torch"):
        graph.add_module(name)
    for line, text in enumerate(imports, start=1):
        importer, imported = text.split(" -> ")
        graph.add_import(
            importer=importer,
            imported=imported,
            line_number=line,
            line_contents=f"import {imported}",
        )
    options = {
        "rooms": ["phalanx.core", "phalanx.run"],
        "may_import_torch": list(allowed),
        "lazy_imports": list(lazy),
    }
    contract: Any = module.TorchFreeContract("torch-free", {"root_package": "phalanx"}, options)
    check = contract.check(graph, verbose=False)
    assert check.kept == (not check.metadata["problems"])
    return list(check.metadata["problems"])


def test_a_chain_to_torch_is_told_once_at_its_end() -> None:
    chain = (
        "phalanx.core.a -> phalanx.core.b",
        "phalanx.core.b -> phalanx.mesh.m",
        "phalanx.mesh.m -> torch",
    )
    assert problems(*chain) == [
        "phalanx.core.b must be torch-free: phalanx.core.b -> phalanx.mesh.m -> torch"
    ]
    assert problems("phalanx.core.a -> phalanx.core.b", "phalanx.mesh.m -> torch") == []


def test_a_listed_module_may_and_one_behind_it_may_not() -> None:
    chain = ("phalanx.run.rank -> torch", "phalanx.run.new -> phalanx.run.rank")
    allowed = ("phalanx.run.rank",)
    assert problems(*chain, allowed=allowed) == [
        "phalanx.run.new must be torch-free: phalanx.run.new -> phalanx.run.rank -> torch"
    ]
    assert problems(chain[0], allowed=allowed) == []


@pytest.mark.parametrize("stale", ["phalanx.run.gone", "phalanx.mesh.m", "phalanx.core.free"])
def test_an_entry_that_is_of_no_use_any_more_breaks_the_contract(stale: str) -> None:
    imports = ("phalanx.mesh.m -> torch", "phalanx.core.free -> phalanx.core.other")
    assert problems(*imports, allowed=(stale,)) == [
        f"{stale} does not reach torch, or is in no room: take it off the list"
    ]


def test_a_lazy_import_must_be_there_and_lead_to_torch() -> None:
    assert problems("phalanx.run.external -> phalanx.run.launched_rank", lazy=(LAZY,)) == [
        f"{LAZY}: there is no such import, or it does not lead to torch: take it off the list"
    ]


def test_a_lazy_import_that_stands_at_the_top_of_its_file_is_refused() -> None:
    """The graph says line 1 of the module's real source, which is no line of a function."""
    imports = (LAZY, "phalanx.run.launched_rank -> torch")
    assert problems(*imports, allowed=("phalanx.run.launched_rank",), lazy=(LAZY,)) == [
        f"{LAZY} must stand inside a function"
    ]
