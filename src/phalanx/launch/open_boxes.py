"""Finds the black box of a rank that runs, also where no file has its name: someone removed it, or
the disk had no room for it. The rank writes on in memory, and has it open."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from phalanx.core.black_box import BOX_IN_MEMORY
from phalanx.core.black_box_reader import LastPosition, read_last_position

_REMOVED = " (deleted)"


def read_position_of_rank(path: Path, pid: int, attempt: int) -> LastPosition | None:
    """What process `pid` wrote last in this attempt; None if it has written nothing. `path`: where
    its box should be.

    Raises BlackBoxVersionError as `read_last_position` does.
    """
    position = read_last_position(path)
    if _is_of(position, pid, attempt):
        return position
    for opened in _list_open_boxes(path, pid):
        position = read_last_position(opened)
        if _is_of(position, pid, attempt):
            return position
    return None


def _is_of(position: LastPosition | None, pid: int, attempt: int) -> bool:
    """False for the box of another process, and for that of an earlier attempt, which a rank that
    goes on has open until it makes its next one."""
    if position is None or position.header is None or position.header.pid != pid:
        return False
    return position.header.incarnation in (attempt, -1)


def _list_open_boxes(path: Path, pid: int) -> Iterator[Path]:
    names = {f"{os.path.realpath(path)}{_REMOVED}", f"/memfd:{BOX_IN_MEMORY}{_REMOVED}"}
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for descriptor in descriptors:
        opened = f"/proc/{pid}/fd/{descriptor}"
        try:
            is_box = os.readlink(opened) in names
        except OSError:
            continue
        if is_box:
            yield Path(opened)
