"""What a killed compiler leaves in the folder in which torch compiles."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import filelock
import pytest

from phalanx.mesh.compiled.cut_off_libraries import remove_cut_off_libraries


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A library and its object file, as g++ makes them."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    folder = tmp_path / "ab"
    folder.mkdir()
    source = folder / "cabc.main.cpp"
    source.write_text('extern "C" int one() { return 1; }\n')
    target = folder / "cabc.main.o"
    subprocess.run(["g++", "-fPIC", "-c", str(source), "-o", str(target)], check=True)
    library = folder / "cabc.main.so"
    subprocess.run(["g++", "-shared", str(target), "-o", str(library)], check=True)
    return library


def test_only_what_ends_too_early_is_removed(whole: Path, tmp_path: Path) -> None:
    assert remove_cut_off_libraries(tmp_path) == []
    content = whole.read_bytes()
    for num_bytes in (0, 10, 64, len(content) // 2, len(content) - 1):
        whole.write_bytes(content[:num_bytes])
        assert remove_cut_off_libraries(tmp_path) == [whole], num_bytes
        assert not whole.exists()
    target = whole.with_suffix(".o")
    target.write_bytes(target.read_bytes()[:100])
    assert remove_cut_off_libraries(tmp_path) == [target]
    assert whole.with_suffix(".cpp").exists()


def test_what_somebody_is_making_stays(whole: Path, tmp_path: Path) -> None:
    whole.write_bytes(b"")
    (tmp_path / "locks").mkdir()
    with filelock.FileLock(tmp_path / "locks" / "cabc.lock"):
        assert remove_cut_off_libraries(tmp_path) == []
    assert remove_cut_off_libraries(tmp_path) == [whole]


def test_a_folder_that_is_not_there_holds_none(tmp_path: Path) -> None:
    assert remove_cut_off_libraries(tmp_path / "none") == []
