"""Disks that refuse while a job trains: full to the last byte, without inodes. One line, exit 7, no restart."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import TINY, environment, events, start, watching, write_text
from phalanx.core.files import fix_of
from phalanx.core.logs import RedactedStream
from phalanx.core.phases import BlackBox
from phalanx.core.secrets import Redactor
from phalanx.observe.bus import Bus
from phalanx.observe.events import Envelope, Note, RestartScheduled
from phalanx.observe.tail import EventTail

JOB = (*TINY, "data.source=text", "parallel.ranks=2", "train.steps=60", "checkpoint.every_steps=1000")


@contextlib.contextmanager
def mounted(place: Path, options: str) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_events_that_a_full_disk_refuses_are_kept_shown_and_written_later(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=1m") as disk:
        shown: list[Envelope] = []
        bus = Bus(rank=0, run_dir=disk / "run", on_unwritten=shown.append)
        bus.emit(Note("first"))
        fill(disk / "filler")
        for number in range(20):  # the page that the file has already is filled, too
            bus.emit(Note(f"n{number}", {"text": "x" * 1000}))
        assert bus.num_unwritten == len(shown) > 10
        assert "events_unwritten" in [e.event.code for e in shown if isinstance(e.event, Note)]
        (disk / "filler").unlink()
        bus.emit(Note("last"))
        assert bus.num_unwritten == 0
        bus.close()
        tail = EventTail(disk / "run")
        codes = [e.event.code for e in tail.poll() if isinstance(e.event, Note)]
        assert [code for code in codes if code != "events_unwritten"] == [
            "first",
            *(f"n{n}" for n in range(20)),
            "last",
        ]
        assert tail.num_unreadable == 0


def test_a_log_and_a_black_box_on_a_full_disk_stop_nothing(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=256k") as disk, open(disk / "log", "wb") as log:
        fill(disk / "filler")
        stream = RedactedStream(log.fileno(), Redactor({}))
        for _ in range(100):
            print("x" * 1000, file=stream)
        stream.flush()
        assert stream.num_lost > 0
        BlackBox(disk / "blackbox" / "rank-0000").write(3, "forward")  # SIGBUS, if the file only was made longer


def test_what_to_do_about_each_refusal(tmp_path: Path) -> None:
    def fix(code: int, path: Path = tmp_path) -> str:
        return fix_of(OSError(code, os.strerror(code)), path) or ""

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


@pytest.mark.parametrize("how", ["full", "no inodes"])
def test_a_disk_that_refuses_the_last_save_ends_the_run_with_its_cause_and_no_restart(how: str, tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    with mounted(tmp_path / "disk", "size=8m,nr_inodes=60" if how == "no inodes" else "size=8m") as disk:
        process = start("train", *JOB, f"run.dir={disk / 'run'}", cwd=tmp_path, env=environment(TMPDIR=None))
        with watching(process) as watched:
            watched.wait_for("step 10/")
            if how == "full":
                fill(disk / "filler")
            else:
                with contextlib.suppress(OSError):
                    for number in range(99):
                        (disk / f"filler-{number}").touch()
            done = watched.finish()
        assert done.code == 7, done.err
        assert len(done.err.splitlines()) == 1, done.err
        assert "No space left on device" in done.err
        assert "starting again" not in done.out
        if how == "no inodes":
            assert "no inodes left" in done.err
            assert events(disk / "run", RestartScheduled) == []
