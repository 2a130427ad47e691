"""docs/verified.md has a row for all that is judged, and a short version of its table comes out
equal here."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from commands import PHALANX, nursery
from hf_zoo import write_config
from phalanx.verify import rank

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
        what: [tuple(cell.strip() for cell in row.split("|")[1:3]) for row in rows]
        for what, rows in sections.items()
    }
    assert found == wanted
    counts = TABLE._counts(row for rows in sections.values() for row in rows)
    assert counts["differ"] == 0
    assert TABLE.summary_of(counts) in above
    assert set(TABLE.HEAD) <= set(above)


# What a cell may say besides its numbers; see `cell_of`.
NUMBER = re.compile(r"(loss|norm|gradient|weight|update) (\d(?:\.\d)?e[+-]\d\d)")
ALLOWED = re.compile(r" \(allowed (\de[+-]\d\d)\)")
BY_COMPRESSION = {"fp16": "5e-03", "bf16": "4e-02"}


def test_no_number_of_the_page_exceeds_what_its_row_allows() -> None:
    """1e-10 in float64 and 1e-5 in float32, or what the cell says; which cells may say it is
    known here."""
    _, sections = TABLE._read(DOCS / "verified.md")
    num_lossy = 0
    for what, rows in sections.items():
        for row in rows:
            _, layout, _, *cells, _ = (part.strip() for part in row.split("|"))
            compress = layout.removeprefix("ddp-") if layout.startswith("ddp-") else ""
            for dtype, cell in zip(("float64", "float32"), cells, strict=True):
                usual = {"float64": 1e-10, "float32": 1e-5}[dtype]
                said = ALLOWED.search(cell)
                if cell.startswith("lossy: "):
                    num_lossy += 1
                    assert (said[1] if said else None) == BY_COMPRESSION.get(compress), row
                    assert compress in ("bf16", "fp16", "int8", "powersgd", "topk"), row
                elif said is not None:
                    assert (dtype, said[1], what.startswith("Hugging Face")) == (
                        "float64",
                        "1e-05",
                        True,
                    ), row
                found = {name: float(size) for name, size in NUMBER.findall(cell)}
                allowed = dict.fromkeys(found, float(said[1]) if said else usual)
                allowed |= {"update": usual}
                if "(gradient: allowed what rounding costs)" in cell:
                    assert dtype == "float32" or said is not None, row
                    allowed["gradient"] = float("inf")
                assert {"loss", "gradient"} <= set(found) or not cell, row
                assert {
                    name: size for name, size in found.items() if not size <= allowed[name]
                } == {}, row
    assert (
        num_lossy
        == 2 * sum(len(judged.layouts.split(",ddp-bf16")) - 1 for judged in TABLE.JUDGED) * 5
    )


def test_a_cell_says_what_is_allowed_where_the_head_does_not() -> None:
    row = {
        "ok": True,
        "compress": "none",
        "notes": [],
        "flips": [],
        "dtype": "float64",
        "tolerance": 1e-10,
    }
    row["errors"] = {
        "loss": 1e-16,
        "initial": 0.0,
        "gradient": 2e-15,
        "weight": 3e-16,
        "update": 4e-10,
    }
    numbers = "loss 1e-16, gradient 2e-15, weight 3e-16, update 4e-10"
    assert TABLE.cell_of(row) == numbers
    assert TABLE.cell_of(row | {"tolerance": 1e-5}) == f"{numbers} (allowed 1e-05)"
    assert TABLE.cell_of(row | {"flips": [{}, {}]}) == f"{numbers} (flipped: 2)"
    relaxed = row | {"dtype": "float32", "tolerance": 1e-5}
    note = f"{TABLE.EASED} in one process: blocks.0.k_norm.weight"
    assert (
        TABLE.cell_of(relaxed | {"notes": [note]})
        == f"{numbers} (gradient: allowed what rounding costs)"
    )
    assert f'"{TABLE.EASED} in one process: ' in Path(rank.__file__).read_text(encoding="utf-8")
    topk = row | {
        "compress": "topk",
        "errors": {"loss": 0.0, "gradient": 9e-16, "sent": 0.9, "weight": 9e-3},
    }
    assert TABLE.cell_of(topk) == "lossy: loss 0e+00, gradient 9e-16, weight 9e-03"
    cast = row | {
        "compress": "bf16",
        "tolerance": 0.2,
        "errors": {"loss": 4e-7, "gradient": 4e-3, "weight": 2e-4},
    }
    assert TABLE.cell_of(cast) == "lossy: loss 4e-07, gradient 4e-03, weight 2e-04 (allowed 2e-01)"
    of = [f"| a | 2 | {TABLE.cell_of(each)} | |" for each in (row, topk, cast)] + [
        "| b | 2 | refused: no | |"
    ]
    assert TABLE._counts(of) == {"equal": 1, "lossy": 2, "refused": 1, "differ": 0}


@pytest.mark.parametrize(
    "judged",
    TABLE.SHORT,
    ids=lambda judged: judged.what,
)
@pytest.mark.long
def test_a_short_version_of_the_table_is_equal(
    judged: object, monkeypatch: pytest.MonkeyPatch
) -> None:
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
