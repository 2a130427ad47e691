"""The run lock: one live job, no dead one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from commands import DEADLINE_S
from phalanx.checkpoint.ownership import run_lock as locks
from phalanx.checkpoint.ownership.fencing_token import TOKEN_FILE_NAME, read_fencing_token_number
from phalanx.checkpoint.ownership.run_lock import (
    LOCK_FILE_NAME,
    LockHolder,
    find_live_holder,
    holding_run_lock,
    look_for_holder_process,
    read_lock_holder,
    refuse_run_of_live_job,
)
from phalanx.checkpoint.ownership.store_owner import require_still_owner_of_run_and_store
from phalanx.checkpoint.stores import open_store_of_run
from phalanx.core import process_stat
from phalanx.core.errors import CheckpointError, ResourceError, RunLockedError

HOLD = """
import sys
from pathlib import Path
from phalanx.checkpoint.ownership.run_lock import holding_run_lock
with holding_run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""

RACE = """
import sys
from pathlib import Path
from phalanx.checkpoint.ownership.run_lock import holding_run_lock
from phalanx.core.errors import RunLockedError
sys.stdin.readline()
try:
    with holding_run_lock(Path(sys.argv[1])):
        print("won", flush=True)
        sys.stdin.read()
except RunLockedError:
    print("refused", flush=True)
"""


def start(program: str, run_dir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, str(run_dir)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=DEADLINE_S)


def written(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / LOCK_FILE_NAME).read_text())
    return found


def read_holder(run_dir: Path) -> LockHolder:
    holder = read_lock_holder(run_dir / LOCK_FILE_NAME)
    assert holder is not None
    return holder


def leave(run_dir: Path, **changes: Any) -> dict[str, Any]:
    """A lock as this process would have left it, with `changes`."""
    with holding_run_lock(run_dir):
        left = written(run_dir) | changes
    (run_dir / LOCK_FILE_NAME).write_text(json.dumps(left))
    return left


def test_held_and_released(tmp_path: Path) -> None:
    with holding_run_lock(tmp_path) as lock:
        assert lock.reclaimed_from is None
        holder = written(tmp_path)
        assert holder["pid"] == os.getpid()
        assert sorted(holder) == ["boot_id", "epoch", "host", "pid", "since_unix_s", "start_time"]
        assert abs(holder["since_unix_s"] - time.time()) < 60
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyError), holding_run_lock(tmp_path):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_live_job_is_named_at_once(tmp_path: Path) -> None:
    process = start(HOLD, tmp_path)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        before = (tmp_path / LOCK_FILE_NAME).read_bytes()
        started = time.monotonic()
        with pytest.raises(RunLockedError) as caught, holding_run_lock(tmp_path):
            pass
        # Who waits for a holder waits until that one ends.
        assert time.monotonic() - started < 10
        line = str(caught.value)
        assert f"process {process.pid} on {locks.socket.gethostname()} since 2" in line
        assert "\n" not in line
        assert caught.value.exit_code == 9
        assert (tmp_path / LOCK_FILE_NAME).read_bytes() == before
    finally:
        end(process)
    with holding_run_lock(tmp_path):
        pass


def test_a_look_refuses_what_taking_would_refuse_and_changes_nothing(tmp_path: Path) -> None:
    refuse_run_of_live_job(tmp_path / "nowhere")
    refuse_run_of_live_job(tmp_path)
    assert list(tmp_path.iterdir()) == []
    process = start(HOLD, tmp_path)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        before = (tmp_path / LOCK_FILE_NAME).read_bytes()
        with pytest.raises(RunLockedError, match=f"in use by process {process.pid} on "):
            refuse_run_of_live_job(tmp_path)
        assert (tmp_path / LOCK_FILE_NAME).read_bytes() == before
        process.kill()
    finally:
        end(process)
    refuse_run_of_live_job(tmp_path)  # a dead job's
    assert (tmp_path / LOCK_FILE_NAME).read_bytes() == before


def test_one_process_cannot_hold_it_twice(tmp_path: Path) -> None:
    with holding_run_lock(tmp_path):
        with pytest.raises(RunLockedError), holding_run_lock(tmp_path):
            pass
        assert (tmp_path / LOCK_FILE_NAME).exists()


def test_the_lock_of_a_killed_job_is_reclaimed(tmp_path: Path) -> None:
    process = start(HOLD, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    process.kill()
    end(process)
    assert (tmp_path / LOCK_FILE_NAME).exists()
    with holding_run_lock(tmp_path) as lock:
        assert lock.reclaimed_from is not None
        assert lock.reclaimed_from.pid == process.pid
        assert written(tmp_path)["pid"] == os.getpid()


@pytest.mark.parametrize(
    "changes", [{"start_time": 1.0}, {"boot_id": "another"}, {"pid": 2**22 + 1}]
)
def test_a_reused_pid_or_another_boot_is_stale(tmp_path: Path, changes: dict[str, Any]) -> None:
    left = leave(tmp_path, **changes)
    with holding_run_lock(tmp_path) as lock:
        assert lock.reclaimed_from is not None
        assert lock.reclaimed_from.pid == left["pid"]


def test_a_torn_lock_is_stale(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE_NAME).write_text('{"host": "a", "pi')
    with holding_run_lock(tmp_path) as lock:
        assert lock.reclaimed_from is None


@pytest.mark.parametrize(
    "changes",
    [
        *({"since_unix_s": value} for value in ("abc", 1e300, float("nan"), None, [1], True)),
        *({"pid": value} for value in ("1", 1.5, None, 10**300, -1)),
        *({"host": value} for value in (None, 7, ["a"], "far\n\x1b[2Jaway")),
        *({name: {}} for name in ("boot_id", "start_time", "epoch")),
    ],
)
def test_a_lock_that_no_job_writes_is_stale(tmp_path: Path, changes: dict[str, Any]) -> None:
    """It is not compared with, and not shown: either would end in a traceback, or in the
    terminal of whoever reads."""
    leave(tmp_path, **({"host": "far-away", "boot_id": "another"} | changes))
    with holding_run_lock(tmp_path) as lock:
        assert lock.reclaimed_from is None


def test_without_flock_a_live_process_still_counts(tmp_path: Path) -> None:
    leave(tmp_path)  # names this very process, and nobody has the flock
    with pytest.raises(RunLockedError, match=f"process {os.getpid()}"), holding_run_lock(tmp_path):
        pass


def test_another_host_is_refused_and_the_way_out_is_named(tmp_path: Path) -> None:
    leave(tmp_path, host="far-away", boot_id="another")
    with pytest.raises(RunLockedError) as caught, holding_run_lock(tmp_path):
        pass
    assert "far-away" in str(caught.value)
    assert f"known to be gone, remove {tmp_path / LOCK_FILE_NAME}" in str(caught.value)
    assert (tmp_path / LOCK_FILE_NAME).exists()


def test_a_lock_that_somebody_else_took_meanwhile_is_left_alone(tmp_path: Path) -> None:
    with holding_run_lock(tmp_path):
        (tmp_path / LOCK_FILE_NAME).unlink()  # by hand, against all advice
        with holding_run_lock(tmp_path):
            theirs = written(tmp_path)
            (tmp_path / LOCK_FILE_NAME).rename(tmp_path / "kept")
            (tmp_path / LOCK_FILE_NAME).write_text("somebody else's")
    assert theirs["pid"] == os.getpid()
    assert (tmp_path / LOCK_FILE_NAME).read_text() == "somebody else's"


@pytest.mark.parametrize("left_behind", [False, True])
def test_of_many_racers_one_wins(tmp_path: Path, left_behind: bool) -> None:
    if left_behind:
        leave(tmp_path, start_time=1.0)
    racers = [start(RACE, tmp_path) for _ in range(6)]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    said = [racer.stdout.readline().strip() for racer in racers if racer.stdout is not None]
    for racer in racers:
        end(racer)
    assert sorted(said) == ["refused"] * 5 + ["won"]


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE_NAME).mkdir()
    with pytest.raises(ResourceError), holding_run_lock(tmp_path):
        pass


def test_each_attempt_takes_an_epoch_which_the_lock_shows(tmp_path: Path) -> None:
    with holding_run_lock(tmp_path) as lock:
        first = lock.acquire_token_for_attempt()
        first.require_newest_token()
        assert written(tmp_path)["epoch"] == first.number == 1
        second = lock.acquire_token_for_attempt()  # a restart
        assert (second.number, read_fencing_token_number(tmp_path)) == (2, 2)
        second.require_newest_token()
        with pytest.raises(CheckpointError, match="another job took this run"):
            first.require_newest_token()
        with (
            pytest.raises(RunLockedError, match=r"since .* \(epoch 2\)"),
            holding_run_lock(tmp_path),
        ):
            pass
    assert not (tmp_path / LOCK_FILE_NAME).exists()
    with holding_run_lock(tmp_path) as lock:
        assert lock.acquire_token_for_attempt().number == 3


@pytest.mark.parametrize("text", ["", "x"])
def test_an_epoch_that_is_emptied_while_its_job_has_the_run_is_known_from_the_lock(
    tmp_path: Path, text: str
) -> None:
    store = open_store_of_run(tmp_path, None)
    with holding_run_lock(tmp_path) as lock:
        first = lock.acquire_token_for_attempt()
        second = lock.acquire_token_for_attempt()
        (tmp_path / TOKEN_FILE_NAME).write_text(text)
        require_still_owner_of_run_and_store(second, store)
        with pytest.raises(CheckpointError, match="another job took this run"):
            require_still_owner_of_run_and_store(first, store)
        assert lock.acquire_token_for_attempt().number == 3
        (tmp_path / TOKEN_FILE_NAME).write_text(text)
    assert read_fencing_token_number(tmp_path) == 3
    # Without a lock nobody knows it.
    (tmp_path / TOKEN_FILE_NAME).write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read"):
        require_still_owner_of_run_and_store(second, store)


@pytest.mark.parametrize("text", ["", '{"host": "a'])
def test_a_text_that_was_cut_takes_no_lock_from_its_holder(tmp_path: Path, text: str) -> None:
    with holding_run_lock(tmp_path) as lock:
        (tmp_path / LOCK_FILE_NAME).write_text(text)
        assert lock.acquire_token_for_attempt().number == 1
        assert read_holder(tmp_path).is_held_by_same_job(lock.holder)
    assert not (tmp_path / LOCK_FILE_NAME).exists()


def test_who_lost_the_lock_cannot_take_an_epoch(tmp_path: Path) -> None:
    with holding_run_lock(tmp_path) as ours:
        (tmp_path / LOCK_FILE_NAME).unlink()  # by hand, against all advice
        with holding_run_lock(tmp_path) as theirs:
            theirs.acquire_token_for_attempt()
            with pytest.raises(RunLockedError):
                ours.acquire_token_for_attempt()
            assert read_fencing_token_number(tmp_path) == 1


@pytest.mark.parametrize("text", ["", "x", "1 2", "1\n\n{"])
def test_a_damaged_epoch_is_said_with_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / TOKEN_FILE_NAME).write_text(text)
    with (
        holding_run_lock(tmp_path) as lock,
        pytest.raises(CheckpointError, match="number of restarts"),
    ):
        lock.acquire_token_for_attempt()


UNREADABLE = Path("/proc/sys/vm/compact_memory")
LOOK_AS_ANOTHER_USER = """
import os, pathlib, sys
from phalanx.checkpoint.ownership.run_lock import look_for_holder_process, read_lock_holder
run_dir = pathlib.Path(sys.argv[1])
holder = read_lock_holder(run_dir / "lock")
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
print(look_for_holder_process(holder))
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="needs a /proc to hide"
)
@pytest.mark.parametrize(("is_alive", "told"), [(True, "hidden"), (False, "gone")])
def test_a_job_that_proc_hides_is_not_called_gone(
    tmp_path: Path, is_alive: bool, told: str
) -> None:
    """Under hidepid=2, /proc says of another user's job that there is none."""
    pid = os.getpid() if is_alive else 2**22 + 1
    leave(tmp_path, pid=pid)
    command = [sys.executable, "-c", LOOK_AS_ANOTHER_USER, str(tmp_path)]
    hidden = 'mount -t proc -o hidepid=2 proc /proc || exit 77; exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", hidden, "sh", *command], capture_output=True, text=True
    )
    if done.returncode == 77:
        pytest.skip("no /proc can be mounted here")
    assert done.stdout.strip() == told, done.stderr


@pytest.mark.skipif(not UNREADABLE.exists(), reason="needs a file that nobody may read")
def test_a_job_that_proc_refuses_to_tell_of_counts_as_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SELinux does it: only the answer of /proc is made up, and it is that of a real file."""
    holder_file = leave(tmp_path)
    assert look_for_holder_process(read_holder(tmp_path)) == "alive"
    # Root may read every process's stat; this file nobody may read.
    monkeypatch.setattr(process_stat, "Path", lambda path: UNREADABLE)
    assert look_for_holder_process(read_holder(tmp_path)) == "unseen"
    holder = find_live_holder(tmp_path)
    assert holder is not None
    assert holder.pid == holder_file["pid"]
