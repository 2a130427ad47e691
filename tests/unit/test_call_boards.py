"""Boards on which ranks of one machine see each other's calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.core import black_box
from phalanx.mesh import call_boards
from phalanx.mesh.call_boards import CallBoard, describe_board, hash_channel, open_described_board


def test_another_rank_reads_what_was_written(tmp_path: Path) -> None:
    board = CallBoard.create(tmp_path / "calls-0000")
    other = CallBoard.open(tmp_path / "calls-0000")
    channel = hash_channel("world")
    assert other.read(channel, 1) is None
    for sequence in range(1, 100):
        board.write(channel, sequence, 2**64 - sequence)
    assert other.read(channel, 99) == 2**64 - 99
    assert other.read(channel, 99 - 63) == 2**64 - (99 - 63)
    assert other.read(channel, 99 - 64) is None, "forgotten"
    assert other.read(channel, 100) is None, "not come yet"
    # Another channel that shares the place.
    assert other.read(channel + 256 * 64, 99) is None


def test_a_new_board_takes_nothing_of_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "calls-0000"
    first = CallBoard.create(path)
    first.write(7, 1, 5)
    second = CallBoard.create(path)
    assert second.read(7, 1) is None
    assert first.read(7, 1) == 5, "who has it mapped still reads it"


def test_a_board_of_another_machine_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "calls 0000"
    CallBoard.create(path).write(7, 1, 5)
    description = describe_board(path)
    found = open_described_board(description)
    assert found is not None
    assert found.read(7, 1) == 5
    monkeypatch.setattr(call_boards, "read_boot_id", lambda: "another")
    assert open_described_board(description) is None
    monkeypatch.setattr(call_boards, "read_boot_id", black_box.read_boot_id)
    path.unlink()
    assert open_described_board(description) is None
    assert open_described_board("") is None
