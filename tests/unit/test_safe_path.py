"""A path is safe if only this user and root could put something else there."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

import pytest

from phalanx.mesh.compiled.safe_path import find_why_unsafe, make_private_parents
from phalanx.mesh.compiled.store import CodeStore, StoreUnusableError

is_root = os.geteuid() == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "above" / "cache"
    folder.mkdir(parents=True, mode=0o755)
    (tmp_path / "above").chmod(0o755)
    return folder


def test_a_folder_that_only_its_user_writes_is_safe(folder: Path) -> None:
    assert find_why_unsafe(folder) == ""


@pytest.mark.parametrize("mode", [0o777, 0o757])
def test_a_folder_above_that_all_may_write_is_not(folder: Path, mode: int) -> None:
    folder.parent.chmod(mode)
    assert str(folder.parent) in find_why_unsafe(folder)
    # Nobody renames what is another's.
    folder.parent.chmod(mode | stat.S_ISVTX)
    assert find_why_unsafe(folder) == ""


def test_a_link_is_followed_and_what_lies_on_its_way_counts(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("above/cache")
    assert find_why_unsafe(tmp_path / "link") == ""
    folder.parent.chmod(0o777)
    assert str(folder.parent) in find_why_unsafe(tmp_path / "link")
    assert str(folder.parent) in find_why_unsafe(tmp_path / "link" / ".." / "cache")


def test_a_circle_of_links_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="links"):
        find_why_unsafe(tmp_path / "a")


def test_the_group_may_write_if_it_is_this_users_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.chmod(0o770)
    name = pwd.getpwuid(os.geteuid()).pw_name
    group_id = folder.stat().st_gid

    def give(group: str, members: list[str]) -> None:
        entry = grp.struct_group((group, "x", group_id, members))
        monkeypatch.setattr(grp, "getgrgid", lambda number: entry)

    give(name, [])
    assert find_why_unsafe(folder) == ""
    give(name, [name, "another"])
    assert "others may write" in find_why_unsafe(folder)
    give("users", [])
    assert "others may write" in find_why_unsafe(folder)


@pytest.mark.skipif(not is_root, reason="only root gives files to others")
def test_a_folder_above_of_another_user_is_not_safe(folder: Path) -> None:
    os.chown(folder.parent, 12345, -1)
    assert "another user" in find_why_unsafe(folder)


def test_parents_are_made_for_this_user_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    before = os.umask(0)
    try:
        make_private_parents(tmp_path / "cache" / "phalanx" / "compiled")
        CodeStore.open(tmp_path / "other" / "phalanx" / "compiled")
    finally:
        os.umask(before)
    made = ["cache", "cache/phalanx", "other", "other/phalanx", "other/phalanx/compiled"]
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in made} == {0o700}
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_code_is_not_kept_where_others_could_put_theirs(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(StoreUnusableError, match="others may write in"):
        CodeStore.open(shared / "compiled")
