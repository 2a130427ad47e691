"""The black box of a rank: what is written is read, and what was torn is known to be."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from phalanx.core import black_box_format as layout
from phalanx.core.black_box import BlackBox, PostedCollective, RankIdentity, format_ranks
from phalanx.core.black_box_reader import (
    BlackBoxVersionError,
    LastPosition,
    read_last_position,
)
from phalanx.core.call_site import CallSite, CallSiteFinder
from phalanx.core.phases import PhaseTimer


def _read(path: Path) -> LastPosition:
    position = read_last_position(path)
    assert position is not None
    return position


def _call(
    sequence: int, *, group: int = 0, state: int = layout.POSTED, **changes
) -> PostedCollective:
    call = PostedCollective(
        op="all_reduce",
        group=group,
        sequence=sequence,
        dtype="float32",
        shape=(4096, 1024),
        num_tensors=1,
        num_bytes=16 << 20,
        peer=-1,
        tag=-1,
        site=CallSite("/home/me/model.py", 88),
        state=state,
        is_foreground=True,
    )
    return call._replace(**changes)


def _patch(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a_box_says_all_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "box"
    box = BlackBox(path, RankIdentity(rank=2, world_size=4, incarnation=3, device="cpu"))
    group = box.add_group("17", "dp", 4, "0-3")
    box.write(41, "backward", microbatch=1)
    number = box.post_collective(_call(118, group=group))
    box.begin_wait(number)
    position = _read(path)
    assert (position.step, position.phase, position.microbatch) == (41, "backward", 1)
    assert (position.file, position.line > 0) == (__file__[-120:], True)
    header = position.header
    assert header is not None
    assert (header.pid, header.rank, header.world_size, header.incarnation) == (
        os.getpid(),
        2,
        4,
        3,
    )
    (known_group,) = position.groups
    assert (known_group.label, known_group.ranks, known_group.num_posted) == ("dp", "0-3", 118)
    (waiting,) = position.collectives
    assert (waiting.op, waiting.sequence, waiting.shape) == ("all_reduce", 118, (4096, 1024))
    assert (waiting.dtype, waiting.num_bytes, waiting.state) == ("float32", 16 << 20, "waiting")
    assert (waiting.file, waiting.line) == ("/home/me/model.py", 88)
    assert (waiting.step, waiting.microbatch, waiting.phase) == (41, 1, "backward")
    assert 0 < waiting.posted_s <= waiting.wait_began_s <= position.last_progress_s
    box.end_collective(number)
    assert [each.state for each in _read(path).collectives] == ["finished"]


def test_the_ring_has_the_newest_and_an_end_that_comes_late_changes_none_of_them(
    tmp_path: Path,
) -> None:
    box = BlackBox(tmp_path / "box")
    group = box.add_group("0", "world", 2, "0,1")
    box.write(1, "forward")
    first = box.post_collective(_call(1, group=group))
    for sequence in range(2, layout.NUM_COLLECTIVES + 11):
        box.post_collective(_call(sequence, group=group))
    box.end_collective(first)
    position = _read(tmp_path / "box")
    assert [each.sequence for each in position.collectives] == list(range(11, 75))
    assert {each.state for each in position.collectives} == {"posted"}
    assert position.groups[0].num_posted == 74


def test_a_torn_position_leaves_the_one_before_it(tmp_path: Path) -> None:
    path = tmp_path / "box"
    box = BlackBox(path)
    box.write(1, "forward")
    box.write(2, "backward")
    box.close()
    # The second write went to slot 0: its number came, and the end did not.
    end = layout.POSITIONS_AT + layout.POSITION.size - 8
    _patch(path, end, struct.pack("<Q", 0))
    position = _read(path)
    assert (position.step, position.phase, position.num_torn) == (1, "forward", 1)


def test_a_torn_collective_is_counted_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "box"
    box = BlackBox(path)
    box.write(1, "forward")
    box.post_collective(_call(1))
    box.post_collective(_call(2))
    _patch(path, layout.COLLECTIVES_AT + layout.COLLECTIVE.size, struct.pack("<Q", 99))
    position = _read(path)
    assert [each.sequence for each in position.collectives] == [1]
    assert position.num_torn == 1


@pytest.mark.parametrize("num_bytes", [0, 7, 128, 200, layout.TOTAL_BYTES - 1])
def test_a_truncated_or_foreign_file_is_none(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "box"
    BlackBox(path).write(5, "forward")
    path.write_bytes(path.read_bytes()[:num_bytes].ljust(num_bytes, b"\0"))
    if num_bytes == 128:
        # As long as a box of before version 2, and not one.
        path.write_bytes(bytes(128))
    assert read_last_position(path) is None
    path.write_bytes(os.urandom(num_bytes * 3 + 40))
    assert read_last_position(path) is None


def test_a_box_without_a_position_is_none(tmp_path: Path) -> None:
    BlackBox(tmp_path / "box")
    assert read_last_position(tmp_path / "box") is None


def test_a_box_of_before_version_2_is_read(tmp_path: Path) -> None:
    raw = layout.FIRST_LAYOUT.pack(7, 12.5, b"collective", b"all_reduce gradients")
    (tmp_path / "box").write_bytes(raw)
    assert _read(tmp_path / "box") == LastPosition(7, 12.5, "collective", "all_reduce gradients")


def test_a_box_of_a_newer_version_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "box"
    BlackBox(path).write(5, "forward")
    _patch(path, len(layout.MAGIC), struct.pack("<I", layout.VERSION + 1))
    with pytest.raises(BlackBoxVersionError, match="newer than this"):
        read_last_position(path)


def test_a_second_box_leaves_the_memory_of_the_first_one_alone(tmp_path: Path) -> None:
    first = BlackBox(tmp_path / "box")
    BlackBox(tmp_path / "box").write(9, "forward")
    # Were the file shortened, this write would end the process (SIGBUS).
    first.write(1, "forward")
    assert _read(tmp_path / "box").step == 9


def test_a_full_table_of_groups_refuses_one_more_and_calls_are_still_written(
    tmp_path: Path,
) -> None:
    box = BlackBox(tmp_path / "box")
    box.write(1, "forward")
    numbers = [box.add_group(str(index), "g", 2, "0,1") for index in range(layout.NUM_GROUPS + 1)]
    assert numbers == [*range(layout.NUM_GROUPS), -1]
    box.post_collective(_call(1, group=-1))
    assert _read(tmp_path / "box").collectives[-1].group == -1


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([0, 1, 2, 3], "0-3"),
        ([0, 2, 4, 6], "0-6:2"),
        ([1, 3], "1,3"),
        ([0, 1, 4, 5], "0,1,4,5"),
        ([3, 2, 1], "3,2,1"),
        ([5], "5"),
        ([*list(range(0, 200, 2)), 1], ""),
    ],
)
def test_ranks_in_few_characters(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


def test_a_call_site_is_the_innermost_line_that_is_not_of_the_library() -> None:
    site = CallSiteFinder().find()
    assert site.file == __file__
    assert "CallSiteFinder().find()" in Path(__file__).read_text().splitlines()[site.line - 1]


def test_a_phase_that_ends_tells_the_line_that_began_it(tmp_path: Path) -> None:
    """A hook begins it and another one ends it: no line is nearer to where the rank is."""
    path = tmp_path / "box"
    phases = PhaseTimer(BlackBox(path))
    phases.enter("backward")
    phases.enter("collective", "all_reduce gradients")
    begun = _read(path)
    phases.leave("collective")
    ended = _read(path)
    assert (ended.phase, ended.collective) == ("backward", "")
    assert (ended.file, ended.line) == (begun.file, begun.line)
    assert ended.num_writes == begun.num_writes + 1


def test_a_process_forked_off_the_rank_does_not_train_on_in_its_place(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    box = BlackBox(tmp_path / "box", RankIdentity(rank=1, world_size=2))
    box.write(4, "forward")
    for write in (lambda: box.write(4, "backward"), lambda: box.post_collective(_call(1))):
        pid = os.fork()
        if pid == 0:
            write()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        said = capfd.readouterr().err
        assert f"process {pid}, which code of yours forked off rank 1, used" in said
    assert _read(tmp_path / "box").phase == "forward"
    assert not _read(tmp_path / "box").collectives
    # The rank itself goes on.
    box.write(4, "backward")
    assert _read(tmp_path / "box").phase == "backward"
