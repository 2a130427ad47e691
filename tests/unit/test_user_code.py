"""Ranks compare the source of the user's modules that they train with."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from phalanx.core.errors import RanksDifferError
from phalanx.run.user_code import digest_user_modules, require_same_user_code


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
    require_same_user_code([{"model": "a", "sink": "b"}, {"model": "a"}, {"model": "a"}])
    with pytest.raises(RanksDifferError, match=r"module model of rank 2 is not that of rank 0 \("):
        require_same_user_code([{"model": "a", "sink": "b"}, {}, {"model": "c"}])
