"""The folder of compiled code: entries are whole or absent, this user's or not taken, and bounded."""

from __future__ import annotations

import errno
import os
import pwd
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.mesh.compiled.bundle import pack_folder, unpack_into_folder
from phalanx.mesh.compiled.store import CodeStore, StoreUnusableError, find_store_root, hash_file
from phalanx.mesh.compiled.work_folders import identify_host

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
    with store.work_folders.making() as living:
        (living / "code").write_text("")
        dead = store.root / f"work-{identify_host()}-dead"
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


def test_a_turn_that_has_ended_is_not_held_by_a_child_forked_meanwhile(store: CodeStore) -> None:
    turn = store.try_turn("t")
    assert turn is not None
    # What it inherits is the same lock, as in a child that only forks.
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[turn._descriptor],
    )
    assert child.stdout is not None
    child.stdout.readline()
    turn.end()
    assert store.try_turn("t") is not None
    child.communicate()


def test_a_turn_is_waited_for_no_longer_than_told(store: CodeStore) -> None:
    held = store.try_turn("t")
    assert held is not None
    assert store.await_turn("t", 0.05) is None
    held.end()
    turn = store.await_turn("t", 0.05)
    assert turn is not None
    turn.end()


def test_only_one_process_merges_at_a_time(store: CodeStore) -> None:
    program = (
        "import sys; from pathlib import Path; from phalanx.mesh.compiled.store import CodeStore;"
        "store = CodeStore(Path(sys.argv[1]))\n"
        "for _ in range(50):\n"
        "  with store.merging():\n"
        "    store.write('a', (store.read('a') or b'') + b'x')"
    )
    mergers = [subprocess.Popen([sys.executable, "-c", program, str(store.root)]) for _ in range(3)]
    assert [merger.wait() for merger in mergers] == [0, 0, 0]
    assert store.read("a") == b"x" * 150


def test_a_disk_that_has_no_room_for_compilers_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fail where they find none, and the run with them."""
    real = os.statvfs(tmp_path)
    for num_blocks, is_used in ((300 << 20 >> 12, True), (200 << 20 >> 12, False)):
        fields = (4096, 4096, *real[2:4], num_blocks, *real[5:])
        status = os.statvfs_result(fields)
        monkeypatch.setattr(os, "statvfs", lambda path, status=status: status)
        if is_used:
            CodeStore.open(tmp_path / "compiled")
            continue
        with pytest.raises(StoreUnusableError, match="less than 256 MiB free"):
            CodeStore.open(tmp_path / "compiled")


def test_without_a_home_directory_there_is_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def find_no_entry(user: int) -> object:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", find_no_entry)
    with pytest.raises(StoreUnusableError, match="no home directory"):
        CodeStore.open(find_store_root())
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_copied_where_it_cannot_be_linked(
    store: CodeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "large").write_bytes(b"header" * 1000)
    checksum = store.keep_file("large", tmp_path / "large")
    assert store.link_file("large", tmp_path / "given", 6000, checksum)
    assert (tmp_path / "given").read_bytes() == b"header" * 1000
    assert (tmp_path / "given").stat().st_ino != (tmp_path / "large").stat().st_ino
    assert [path.name for path in store.root.iterdir()] == ["code-large"]


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
    with store.work_folders.making() as folder:
        (folder / "large").write_bytes(b"header" * 1000)
        checksum = store.keep_file("large", folder / "large")
        assert checksum == hash_file(folder / "large")
    with store.work_folders.making() as folder:
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
