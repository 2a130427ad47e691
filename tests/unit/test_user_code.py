"""Ranks compare the source of the user's modules that they train with."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from phalanx.run.user_code import describe_code_differences, digest_user_modules


def test_a_module_keeps_the_digest_of_what_was_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "of_a_user_who_edits.py"
    file.write_text("A = 1\n")
    importlib.import_module("of_a_user_who_edits")
    before = digest_user_modules()
    assert "of_a_user_who_edits" in before
    assert not any(name.startswith(("phalanx.", "torch", "json", "pytest")) for name in before)
    file.write_text("A = 2\n")
    assert digest_user_modules() == before


def test_only_what_several_ranks_have_is_compared() -> None:
    """Rank 0 alone opens sinks."""
    of_rank_0 = {"model": "a", "sink": "b"}
    assert not describe_code_differences([of_rank_0, {"model": "a"}, {"model": "a"}])
    told = describe_code_differences([of_rank_0, {}, {"model": "c"}])
    assert told == "module model of rank 2 is not that of rank 0"


def test_comments_and_layout_are_no_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in (
        ("plainly", "A = 1\n"),
        ("commented", "# one\nA = (1)\n"),
        ("other", "A = 2\n"),
    ):
        (tmp_path / f"{name}_of_a_user.py").write_text(text)
        importlib.import_module(f"{name}_of_a_user")
    digests = digest_user_modules()
    assert digests["plainly_of_a_user"] == digests["commented_of_a_user"]
    assert digests["plainly_of_a_user"] != digests["other_of_a_user"]


def test_a_module_that_is_imported_at_its_first_use_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its library may be missing, which is for its user to find."""
    file = tmp_path / "lazy_of_a_user.py"
    file.write_text("raise ImportError('the library is not there')\n")
    spec = importlib.util.spec_from_file_location("lazy_of_a_user", file)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lazy_of_a_user", module)
    spec.loader.exec_module(module)
    digest_user_modules()
    with pytest.raises(ImportError, match="the library is not there"):
        module.__file__  # noqa: B018
