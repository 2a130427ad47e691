"""The folder is the registry, and a name with a colon is the user's."""

from __future__ import annotations

import json
import os.path
import sys
from pathlib import Path

import pytest

from phalanx.core.errors import EnvironmentProblem, ExitCode, LayoutError, UsageError
from phalanx.core.registry import (
    import_object_of_kind,
    import_optional_dependency,
    is_foreign,
    list_modules_of_registry,
    read_module_constant,
    refuse_during_user_import,
)

PACKAGE = "some_plugins"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with two kinds, a private module, and one that cannot be imported."""
    package = tmp_path / PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "alpha.py").write_text("def build(): return 'alpha'\n")
    (package / "beta.py").write_text("import absent_dependency\n")
    (package / "_hidden.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package
    for module in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[module]


def test_names_are_the_folders_modules_found_without_importing_them(folder: Path) -> None:
    assert list_modules_of_registry(PACKAGE) == ["alpha", "beta"]
    assert f"{PACKAGE}.beta" not in sys.modules


def test_what_a_file_says_of_itself_is_read_without_importing_it(folder: Path) -> None:
    """The file cannot be imported here, as one that needs torch cannot where there is none."""
    (folder / "beta.py").write_text(
        "import absent_dependency\nKEEPS = True\ndef build():\n    OTHER = 1\n"
    )
    assert read_module_constant("beta", PACKAGE, "KEEPS", False) is True
    assert read_module_constant("beta", PACKAGE, "OTHER", 0) == 0
    assert read_module_constant("alpha", PACKAGE, "KEEPS", False) is False
    assert read_module_constant("nothing", PACKAGE, "KEEPS", False) is False


def test_a_new_file_is_a_new_kind(folder: Path) -> None:
    (folder / "gamma.py").write_text("build = 3\n")
    assert import_object_of_kind("gamma", PACKAGE, "build") == 3


def test_our_own_and_the_users(folder: Path) -> None:
    assert import_object_of_kind("alpha", PACKAGE, "build")() == "alpha"
    assert import_object_of_kind("json:dumps", PACKAGE, "build") is json.dumps
    assert import_object_of_kind("os:path.join", PACKAGE, "build") is os.path.join
    assert (is_foreign("a:b"), is_foreign("a")) == (True, False)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("alpah", 'did you mean "alpha"'),
        ("_hidden", "unknown kind"),
        ("zzz", "known: alpha, beta"),
        ("no_such_module:x", "'no_such_module' cannot be found"),
        ("json.no_such:x", "'json.no_such' cannot be found"),
        ("json:no_such", "no 'no_such'"),
        ("json:", "package.module:name"),
        (":x", "package.module:name"),
        (".json:x", "package.module:name"),
        ("a b:x", "package.module:name"),
    ],
)
def test_a_kind_that_does_not_exist_is_refused(folder: Path, kind: str, words: str) -> None:
    with pytest.raises(LayoutError) as caught:
        import_object_of_kind(kind, PACKAGE, "build")
    assert words in str(caught.value)
    assert caught.value.exit_code == ExitCode.JOB


def test_an_error_inside_the_users_module_passes_through(folder: Path) -> None:
    """It is theirs: its traceback must reach them, not a guess that the module cannot be found."""
    with pytest.raises(ModuleNotFoundError, match="absent_dependency"):
        import_object_of_kind(f"{PACKAGE}.beta:x", PACKAGE, "build")


def test_an_absent_extra_is_named() -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        import_optional_dependency("absent_dependency", extra="hf", needed_for="import")
    assert "pip install 'phalanx[hf]'" in str(caught.value)
    assert import_optional_dependency("json", extra="hf", needed_for="import") is json


def test_a_module_that_trains_as_it_is_imported_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process that imports it would start the next one."""
    calls = {
        "train_job": "phalanx.train_job(phalanx.Job())",
        "resume_job": "phalanx.resume_job('nowhere')",
        "verify_job": "phalanx.verify_job(phalanx.Job())",
    }
    monkeypatch.syspath_prepend(str(tmp_path))
    for verb, call in calls.items():
        (tmp_path / f"calls_{verb}.py").write_text(f"import phalanx\n{call}\n")
        with pytest.raises(UsageError, match=rf"{verb} is called while phalanx imports") as refused:
            import_object_of_kind(f"calls_{verb}:build", "phalanx.nn.models", "build")
        assert "__main__" in (refused.value.fix or "")
    refuse_during_user_import("train_job")
