"""Disks that refuse while a job trains: full to the last byte, without inodes.

One line, exit 7, no restart.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commands import (
    COLD,
    TINY,
    Done,
    environment,
    events,
    run,
    start,
    wait_until,
    watching,
    write_text,
)
from holds import GO_ON, holding
from phalanx.core.black_box import BlackBox
from phalanx.core.disk_errors import suggest_fix_for_path_error
from phalanx.core.logs import RedactedStream
from phalanx.core.secrets import Redactor
from phalanx.observe.bus import Bus
from phalanx.observe.events import Envelope, Note, RestartScheduled
from phalanx.observe.tail import EventTail
from phalanx.resilience.strikes import read_strikes

JOB = (*TINY, "data.source=text", "parallel.ranks=2", "train.steps=120")
EXT4_IOC_SHUTDOWN = 0x8004587D


@contextlib.contextmanager
def mounted(place: Path, options: str) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    with _mounted("-t", "tmpfs", "-o", options, "tmpfs", place):
        yield place


@contextlib.contextmanager
def _mounted(*arguments: str | Path) -> Iterator[None]:
    """The arguments of mount; the last one is the place."""
    place = Path(arguments[-1])
    place.mkdir()
    done = subprocess.run(["mount", *arguments], capture_output=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError), open(disk / "filler", "ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_events_that_a_full_disk_refuses_are_kept_shown_and_written_later(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=1m") as disk:
        shown: list[Envelope] = []
        bus = Bus(rank=0, run_dir=disk / "run", on_unwritten=shown.append)
        bus.emit(Note("first"))
        fill(disk)
        for number in range(20):  # the page that the file has already is filled, too
            bus.emit(Note(f"n{number}", {"text": "x" * 1000}))
        assert bus.num_unwritten == len(shown) > 10
        assert "events_unwritten" in [e.event.code for e in shown if isinstance(e.event, Note)]
        (disk / "filler").unlink()
        bus.emit(Note("last"))
        assert bus.num_unwritten == 0
        bus.close()
        tail = EventTail(disk / "run")
        codes = [e.event.code for e in tail.read_new_events() if isinstance(e.event, Note)]
        assert [code for code in codes if code != "events_unwritten"] == [
            "first",
            *(f"n{n}" for n in range(20)),
            "last",
        ]
        assert tail.num_unreadable == 0


def test_a_log_and_a_black_box_on_a_full_disk_stop_nothing(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=256k") as disk, open(disk / "log", "wb") as log:
        fill(disk)
        stream = RedactedStream(log.fileno(), Redactor({}))
        for _ in range(100):
            print("x" * 1000, file=stream)
        stream.flush()
        assert stream.num_lost > 0
        BlackBox(disk / "blackbox" / "rank-0000").write(
            3, "forward"
        )  # SIGBUS, if the file only was made longer


def test_what_to_do_about_each_refusal(tmp_path: Path) -> None:
    def fix(code: int, path: Path = tmp_path) -> str:
        return suggest_fix_for_path_error(OSError(code, os.strerror(code)), path) or ""

    assert (fix(errno.ENOSPC), fix(errno.EDQUOT)) == ("free space there",) * 2
    assert "ulimit -f" in fix(errno.EFBIG)
    assert "make it writable" in fix(errno.EROFS)
    assert "look at the disk" in fix(errno.EIO)
    assert fix(errno.ENOENT) == ""
    with mounted(tmp_path / "disk", "size=1m,nr_inodes=3") as disk:
        with contextlib.suppress(OSError):
            for number in range(9):
                (disk / str(number)).touch()
        assert "no inodes left" in fix(errno.ENOSPC, disk / "run" / "file")


def remount_read_only(disk: Path) -> None:
    """As the kernel does it to a file system that has found an error: at once, whatever is open."""
    subprocess.run(["mount", "-o", "remount,abort", disk], check=True, capture_output=True)


def cut_off(disk: Path) -> None:
    """Every access of an ext4 from now on: EIO."""
    fd = os.open(disk, os.O_RDONLY)
    fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, struct.pack("I", 2))
    os.close(fd)


@contextlib.contextmanager
def ext4(place: Path) -> Iterator[Path]:
    image = place.with_suffix(".image")
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("a disk that fails needs root and mkfs.ext4")
    with open(image, "wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    with _mounted("-o", "loop,errors=remount-ro", image, place):
        yield place


@pytest.mark.parametrize("how", ["full", pytest.param("no inodes", marks=pytest.mark.long)])
def test_a_disk_that_refuses_the_last_save_ends_the_run_with_its_cause_and_no_restart(
    how: str, tmp_path: Path
) -> None:
    write_text(tmp_path / "text")
    with mounted(
        tmp_path / "disk", "size=8m,nr_inodes=60" if how == "no inodes" else "size=8m"
    ) as disk:
        done = train_until_struck(tmp_path, disk, fill if how == "full" else use_up_inodes)
        assert "No space left on device" in done.err
        if how == "no inodes":
            assert "no inodes left" in done.err
            assert events(disk / "run", RestartScheduled) == []
        else:
            require_told(done, "No space left on device")


@pytest.mark.long
@pytest.mark.parametrize(
    ("strike", "causes"),
    [
        (
            remount_read_only,
            ("Read-only file system", "Input/output error"),
        ),  # EIO: of a write that is on its way
        (cut_off, ("Input/output error",)),
    ],
)
def test_a_disk_that_fails_while_it_trains(
    strike: Callable[[Path], None], causes: tuple[str, ...], tmp_path: Path
) -> None:
    write_text(tmp_path / "text")
    with ext4(tmp_path / "disk") as disk:
        done = train_until_struck(tmp_path, disk, strike)
        assert any(cause in done.err for cause in causes)
        require_told(done, *causes)


@pytest.mark.long
def test_a_file_that_may_not_grow_any_more(tmp_path: Path) -> None:
    """EFBIG, which a process gets where ulimit -f is reached: the events', and no checkpoint is
    as large."""
    write_text(tmp_path / "text")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (120 << 10, 120 << 10))

    done = run("train", *JOB, "run.dir=run", cwd=tmp_path, command=COLD, preexec_fn=limit)
    assert done.code == 7, done.err
    assert "File too large" in done.err
    assert "ulimit -f" in done.err
    assert len(done.err.splitlines()) == 1
    assert "starting again" not in done.out


def use_up_inodes(disk: Path) -> None:
    with contextlib.suppress(OSError):
        for number in range(99):
            (disk / f"filler-{number}").touch()


def train_until_struck(folder: Path, disk: Path, strike: Callable[[Path], None]) -> Done:
    process = start(
        "train",
        *JOB,
        *holding(folder, "until_told", 11),
        "checkpoint.every_steps=15",
        "checkpoint.asynchronous=false",
        "observe.log_every=10",
        f"run.dir={disk / 'run'}",
        cwd=folder,
        env=environment(TMPDIR=None),
    )
    with watching(process) as watched:
        watched.wait_for("step 10/")
        # All saves come after the strike, and the fault has left its own record before it.
        wait_until(lambda: read_strikes(disk / "run"))
        strike(disk)
        (folder / GO_ON).touch()
        if (
            strike is fill
            # a save that was on its way gives back what it had written, and events would fit in
            # there
        ):
            watched.wait_for("a checkpoint (rank ")  # of either rank: one may have written its part
            fill(disk)
        done = watched.finish()
    assert done.code == 7, done.err
    assert len(done.err.splitlines()) == 1, done.err
    assert "starting again" not in done.out
    return done


def require_told(done: Done, *causes: str) -> None:
    """What whoever watches sees although no event is in a file: each thing once, the same again
    in few words."""
    assert 1 <= done.out.count("events cannot be written") <= len(causes), done.out
    assert "step 120/120" in done.out
    failed = [line for line in done.out.splitlines() if line.startswith("checkpoint of step")]
    assert len(failed) >= 4
    told = [line for line in failed if "failed for the same reason" not in line]
    assert 1 <= len(told) <= len(causes) + 1, (
        failed
    )  # one more: the save that was on its way was in another phase
    assert [line for line in told if not any(cause in line for cause in causes)] == []
    assert failed[0].endswith("training goes on, and tries again later")
    assert "training goes on" not in failed[-1]
    assert "the event file of rank 0 did not take them" in done.out
    assert "the event file of rank 1 did not take them" in done.out
