"""The docs say what the code says, and point at what exists."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def test_reference_is_what_the_code_says() -> None:
    generated = runpy.run_path(str(ROOT / "docs" / "generate.py"))["reference"]()
    assert (ROOT / "docs" / "reference.md").read_text(encoding="utf-8") == generated, (
        "run make docs"
    )


def test_code_on_the_page_about_own_code_is_that_of_the_examples() -> None:
    """Which tests run. Every block that names a file is the file's, or a region of it."""
    page = (ROOT / "docs" / "own-code.md").read_text(encoding="utf-8")
    with_examples = runpy.run_path(str(ROOT / "docs" / "generate.py"))["with_examples"]
    assert page.count("<!-- from examples/") >= 5
    assert with_examples(page) == page, "run make docs"


def test_the_table_of_crossed_layouts_is_what_the_tests_cross() -> None:
    page = (ROOT / "docs" / "checkpoint-format.md").read_text(encoding="utf-8")
    with_counts = runpy.run_path(str(ROOT / "docs" / "layout_counts.py"))["with_counts"]
    assert page.count("\n| a decoder's state |") == 1
    assert with_counts(page) == page, "run make docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_nothing_is_left_to_be_filled_in(page: Path) -> None:
    assert not re.findall(r"@@\w*@@|\bTODO\b|\bTBD\b|\bXXX\b", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_point_at_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


def test_annotated_tree_of_the_readme_is_the_tree() -> None:
    tree = (
        (ROOT / "README.md")
        .read_text(encoding="utf-8")
        .split("src/phalanx/\n")[1]
        .split("\ntests/")[0]
    )
    named = {word.rstrip("/") for word in re.findall(r"\b[a-z]+/", tree)}
    rooms = {p.name for p in (ROOT / "src" / "phalanx").iterdir() if (p / "__init__.py").exists()}
    assert named == rooms


def test_pages_named_in_the_readme_are_the_pages() -> None:
    listed = (
        (ROOT / "README.md")
        .read_text(encoding="utf-8")
        .split("\ndocs/ ")[1]
        .split("\nexamples/")[0]
    )
    assert set(re.findall(r"[\w-]+\.md", listed)) == {
        page.name for page in (ROOT / "docs").glob("*.md")
    }


def test_make_targets_named_in_the_docs_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"`make ([a-z-]+)`", page.read_text(encoding="utf-8")))
        assert named <= targets, page.name


def test_every_pinned_dependency_of_the_project_is_in_the_constraints() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(d for group in project["optional-dependencies"].values() for d in group),
    ]
    names = {
        re.split(r"[\[<>=~! ]", d, maxsplit=1)[0].lower().replace("_", "-") for d in wanted
    } - {"phalanx"}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    assert names <= pinned


def test_tests_that_the_docs_name_exist() -> None:
    missing = []
    for page in PAGES:
        named = re.findall(
            r"(tests/[\w/]+\.py)(?:::\w+)*::(test_\w+)", page.read_text(encoding="utf-8")
        )
        for path, name in named:
            if f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8"):
                missing.append(f"{page.name}: {path}::{name}")
    assert not missing
