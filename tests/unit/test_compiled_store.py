"""The folder of compiled code: entries are whole or absent, this user's or not taken, and bounded."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.mesh.compiled.bundle import pack_folder, unpack_into_folder
from phalanx.mesh.compiled.store import CodeStore, StoreUnusableError, find_store_root, hash_file

LONG_AGO_S = 2 * 3600
is_root = os.geteuid() == 0


@pytest.fixture
def store(tmp_path: Path) -> CodeStore:
    return CodeStore.open(tmp_path / "phalanx" / "compiled")


def file_of(store: CodeStore, name: str = "a") -> Path:
    return store.root / f"code-{name}"


def test_an_entry_is_what_was_written_and_another_content_another_version(store: CodeStore) -> None:
    assert store.read("a") is None
    assert store.find_version("a") == ""
    store.write("a", b"one")
    first = store.find_version("a")
    assert store.read("a") == b"one"
    store.write("a", b"two")
    assert store.read("a") == b"two"
    assert store.find_version("a") not in ("", first)
    store.write("a", b"one")
    assert store.find_version("a") == first


def damage_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut_it_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty_it(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [damage_a_bit, cut_it_off, empty_it])
def test_a_damaged_entry_is_none_and_is_written_anew(store: CodeStore, damage: object) -> None:
    store.write("a", b"code" * 1000)
    damage(file_of(store))  # type: ignore[operator]
    assert store.read("a") is None
    assert not file_of(store).exists()
    store.write("a", b"code")
    assert store.read("a") == b"code"


def test_a_file_that_others_may_write_is_not_taken(store: CodeStore) -> None:
    store.write("a", b"code")
    assert stat.S_IMODE(file_of(store).stat().st_mode) == 0o600
    file_of(store).chmod(0o620)
    assert store.read("a") is None


@pytest.mark.skipif(not is_root, reason="only root gives files to others")
def test_a_file_of_another_user_is_not_taken(store: CodeStore) -> None:
    store.write("a", b"code")
    os.chown(file_of(store), 12345, -1)
    assert store.read("a") is None


def test_links_pipes_and_directories_are_no_entries(store: CodeStore, tmp_path: Path) -> None:
    store.write("a", b"code")
    real = file_of(store).rename(tmp_path / "elsewhere")
    file_of(store).symlink_to(real)
    os.mkfifo(file_of(store, "pipe"))
    file_of(store, "folder").mkdir()
    assert [store.read(name) for name in ("a", "pipe", "folder")] == [None] * 3
    assert [store.find_version(name) for name in ("a", "pipe", "folder")] == [""] * 3


def test_the_folder_is_this_users_alone(tmp_path: Path) -> None:
    root = tmp_path / "compiled"
    before = os.umask(0)
    try:
        CodeStore.open(root)
    finally:
        os.umask(before)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    root.chmod(0o777)
    CodeStore.open(root)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_a_folder_that_is_a_link_or_a_file_or_of_another_user_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").write_text("")
    for name in ("link", "file", "file/below"):
        with pytest.raises(StoreUnusableError, match=name):
            CodeStore.open(tmp_path / name)
    if is_root:
        os.chown(tmp_path / "real", 12345, -1)
        with pytest.raises(StoreUnusableError, match="belongs to another user"):
            CodeStore.open(tmp_path / "real")


def test_the_entries_used_longest_ago_go_first(tmp_path: Path) -> None:
    store = CodeStore.open(tmp_path / "compiled", max_bytes=3500)
    for age, name in enumerate(("old", "older", "oldest")):
        store.write(name, bytes(1000))
        os.utime(file_of(store, name), (1000 - age, 1000 - age))
    store.read("oldest")  # used now
    store.write("new", bytes(1000))
    assert [store.read(name) is None for name in ("old", "older", "oldest", "new")] == [
        False,
        True,
        False,
        False,
    ]


def test_a_full_disk_leaves_the_entry_before_and_no_part(store: CodeStore) -> None:
    store.write("a", b"before")
    # A limit on the size of files is what a process can have of a full disk.
    program = (
        "import resource, signal, sys; from pathlib import Path;"
        "from phalanx.mesh.compiled.store import CodeStore;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000));"
        "store = CodeStore.open(Path(sys.argv[1]));"
        "\ntry: store.write('a', bytes(100_000))"
        "\nexcept OSError as error: print(error.strerror)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(store.root)], capture_output=True, text=True
    )
    assert done.stdout == "File too large\n", done.stderr
    assert store.read("a") == b"before"
    assert [path.name for path in store.root.iterdir()] == ["code-a"]


def test_what_killed_processes_left_goes_and_what_lives_stays(store: CodeStore) -> None:
    long_ago_s = time.time() - LONG_AGO_S
    with store.making_work_folder() as living:
        (living / "code").write_text("")
        dead = store.root / "work-dead"
        (dead / "sub").mkdir(parents=True)
        partial, just_begun = store.root / "new-partial", store.root / "new-just-begun"
        for path in (partial, just_begun):
            path.write_text("")
        os.utime(partial, (long_ago_s, long_ago_s))
        CodeStore.open(store.root)
        assert (dead.exists(), partial.exists()) == (False, False)
        assert just_begun.exists()
        assert (living / "code").exists()
    assert not living.exists()


def test_one_process_has_a_turn_until_it_dies(store: CodeStore) -> None:
    program = (
        "import sys, signal; from pathlib import Path;"
        "from phalanx.mesh.compiled.store import CodeStore;"
        "turn = CodeStore(Path(sys.argv[1])).try_turn('t');"
        "print(turn is not None, flush=True); signal.pause()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(store.root)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    assert store.try_turn("t") is None
    assert store.try_turn("another") is not None
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    turn = store.try_turn("t")
    assert turn is not None
    assert store.try_turn("t") is None
    turn.end()
    assert store.try_turn("t") is not None


def test_writers_at_once_leave_one_of_their_entries_whole(store: CodeStore) -> None:
    program = (
        "import sys; from pathlib import Path; from phalanx.mesh.compiled.store import CodeStore;"
        "store = CodeStore(Path(sys.argv[1])); mine = sys.argv[2].encode() * 100_000\n"
        "for _ in range(100): store.write('a', mine)"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", program, str(store.root), letter])
        for letter in "xy"
    ]
    store.write("a", b"z" * 100_000)
    while any(writer.poll() is None for writer in writers):
        assert store.read("a") in [letter * 100_000 for letter in (b"x", b"y", b"z")]
    assert [writer.returncode for writer in writers] == [0, 0]
    assert [path.name for path in store.root.iterdir()] == ["code-a"]


def test_a_kept_file_is_given_back_if_it_is_the_same(store: CodeStore, tmp_path: Path) -> None:
    with store.making_work_folder() as folder:
        (folder / "large").write_bytes(b"header" * 1000)
        checksum = store.keep_file("large", folder / "large")
        assert checksum == hash_file(folder / "large")
    with store.making_work_folder() as folder:
        given = folder / "given"
        assert store.link_file("large", given, 6000, checksum)
        assert given.read_bytes() == b"header" * 1000
        assert not store.link_file("large", folder / "other", 6001, None)
        damage_a_bit(file_of(store, "large"))
        assert store.link_file("large", folder / "unread", 6000, None)
        assert not store.link_file("large", folder / "read", 6000, checksum)
        assert not store.link_file("large", folder / "gone", 6000, checksum)


def test_the_folder_lies_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert find_store_root() == Path("/home/me/.cache/phalanx/compiled")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/cache")
    assert find_store_root() == Path("/scratch/cache/phalanx/compiled")
    # By its specification a relative one is ignored.
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert find_store_root() == Path("/home/me/.cache/phalanx/compiled")


def test_a_bundle_holds_the_files_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "code.so").write_bytes(b"\0\n\xff")
    (tmp_path / "a" / "empty").write_bytes(b"")
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "x").write_text("")
    (tmp_path / "link").symlink_to("a/empty")
    bundle = pack_folder(tmp_path, lambda name: not name.startswith("locks/"))
    there = tmp_path / "there"
    (there / "a").mkdir(parents=True)
    (there / "a" / "empty").write_bytes(b"mine")
    assert unpack_into_folder(bundle, there) == 2
    assert (there / "a" / "b" / "code.so").read_bytes() == b"\0\n\xff"
    # What is there has the same name for the same content, and may be in use.
    assert (there / "a" / "empty").read_bytes() == b"mine"
    assert sorted(path.name for path in there.rglob("*")) == ["a", "b", "code.so", "empty"]


@pytest.mark.parametrize(
    "bundle",
    [
        b"",
        b"{}\n",
        b'[["../out",1]]\nx',
        b'[["/out",1]]\nx',
        b'[["a",2]]\nx',
        b'[["a",-1]]\nx',
        b'[["",0]]\n',
        b"[1]\n",
    ],
)
def test_a_bundle_of_another_kind_is_refused(tmp_path: Path, bundle: bytes) -> None:
    there = tmp_path / "there"
    with pytest.raises((ValueError, TypeError)):
        unpack_into_folder(bundle, there)
    assert not (tmp_path / "out").exists()
    assert not there.exists()
