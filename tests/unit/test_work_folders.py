"""Folders in which processes compile: those of this host's dead go, those of other hosts stay.

Another host is another name: its lock on a directory of a network file system is not seen here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from phalanx.mesh.compiled.store import CodeStore
from phalanx.mesh.compiled.work_folders import OTHER_HOSTS_WORK_S, WorkFolders, identify_host

PROGRAM = (
    "import sys, signal; from pathlib import Path;"
    "from phalanx.mesh.compiled.work_folders import WorkFolders\n"
    "with WorkFolders(Path(sys.argv[1]), 'work-').making() as folder:\n"
    "  print(folder, flush=True); signal.pause()"
)


def start_holder(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    holder = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(parent)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    return holder, Path(holder.stdout.readline().strip())


def kill(holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert holder.stdout is not None
    holder.stdout.close()


def test_a_folder_stays_while_its_process_lives(tmp_path: Path) -> None:
    holder, folder = start_holder(tmp_path)
    folders = WorkFolders(tmp_path, "work-")
    folders.remove_abandoned()
    assert folder.is_dir()
    kill(holder)
    folders.remove_abandoned()
    assert not folder.exists()


def test_a_folder_of_another_host_is_not_removed_unlocked_as_it_is(tmp_path: Path) -> None:
    store = CodeStore.open(tmp_path / "phalanx" / "compiled")
    other = store.root / "work-0123456789ab-x"
    own = store.root / f"work-{identify_host()}-x"
    for folder in (other, own):
        (folder / "sub").mkdir(parents=True)
    CodeStore.open(store.root)
    assert (other.exists(), own.exists()) == (True, False)
    long_ago_s = time.time() - OTHER_HOSTS_WORK_S - 60
    os.utime(other, (long_ago_s, long_ago_s))
    CodeStore.open(store.root)
    assert not other.exists()


def test_an_old_folder_of_another_name_stays_while_it_is_locked(tmp_path: Path) -> None:
    long_ago_s = time.time() - OTHER_HOSTS_WORK_S - 60
    with WorkFolders(tmp_path, "work-", host="0123456789ab").making() as folder:
        os.utime(folder, (long_ago_s, long_ago_s))
        WorkFolders(tmp_path, "work-").remove_abandoned()
        assert folder.exists()


def test_links_and_files_of_that_name_are_left(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / f"work-{identify_host()}-link").symlink_to("real")
    (tmp_path / f"work-{identify_host()}-file").write_text("")
    WorkFolders(tmp_path, "work-").remove_abandoned()
    assert len(list(tmp_path.iterdir())) == 3
