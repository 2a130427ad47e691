"""docs/verified.md has a row for all that is judged, and a short version of its table comes out equal here."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from commands import PHALANX, nursery
from hf_zoo import write_config

DOCS = Path(__file__).resolve().parents[2] / "docs"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("verify_table", DOCS / "verify_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    return module


TABLE = load()


def test_the_page_has_a_row_for_all_that_is_judged_and_none_differs() -> None:
    above, sections = TABLE._read(DOCS / "verified.md")
    wanted: dict[str, list[tuple[str, str]]] = {}
    for judged in TABLE.JUDGED:
        rows = [(name, str(judged.ranks)) for name in judged.layouts.split(",")]
        wanted.setdefault(TABLE._title(judged.what), []).extend(rows)
    found = {
        what: [tuple(cell.strip() for cell in row.split("|")[1:3]) for row in rows] for what, rows in sections.items()
    }
    assert found == wanted
    counts = TABLE._counts(row for rows in sections.values() for row in rows)
    assert counts["differ"] == 0
    assert f"{counts['equal']} rows are equal, 0 differ, {counts['refused']} are refused." in above


@pytest.mark.parametrize("judged", TABLE.SHORT, ids=lambda judged: judged.what)
def test_a_short_version_of_the_table_is_equal(judged: object, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in nursery().variables().items():
        monkeypatch.setitem(os.environ, name, value)
    if "Hugging Face" in judged.what:  # type: ignore[attr-defined]
        pytest.importorskip("transformers")
        name = judged.arguments[-1].removeprefix("hf:")  # type: ignore[attr-defined]
        write_config(TABLE.HF_CONFIGS / name, name)
    rows = TABLE.judge(judged, PHALANX)
    assert {row["layout"] for row in rows} == set(judged.layouts.split(","))  # type: ignore[attr-defined]
    assert {row["dtype"] for row in rows} == {"float64", "float32"}
    assert [row for row in rows if not row["ok"]] == []
