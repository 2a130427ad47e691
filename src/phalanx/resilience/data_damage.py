"""What disks do to the data of a run while it trains on them."""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.core.errors import EnvironmentProblem
from phalanx.core.files import open_regular_file_descriptor
from phalanx.data.shards import CHUNK_BYTES, PAYLOAD_OFFSET

_DATA_FOLDER = "data"
_FLIPPED_BIT = 1 << 4


def list_own_shards(run_dir: Path) -> list[Path]:
    """The shards of tokens that the run has for itself.

    Raises EnvironmentProblem where it has none: what others may read is not damaged.
    """
    own_dir = run_dir.resolve()
    shards = [path.resolve() for path in sorted((own_dir / _DATA_FOLDER).rglob("*.tokens"))]
    own = [path for path in shards if path.is_relative_to(own_dir) and path.stat().st_nlink == 1]
    if not own:
        raise EnvironmentProblem(
            "this fault damages the data that a run has for itself, and this one reads others'",
            fix="drill it with a job whose data.source is text",
        )
    return own


def flip_bit_of_each_chunk(path: Path) -> None:
    """Flip one bit in each 64 KiB of a shard, behind its header, where it lies."""
    descriptor = open_regular_file_descriptor(path, os.O_RDWR)
    try:
        num_bytes = os.fstat(descriptor).st_size
        for at in range(PAYLOAD_OFFSET, num_bytes, CHUNK_BYTES):
            (byte,) = os.pread(descriptor, 1, at)
            os.pwrite(descriptor, bytes([byte ^ _FLIPPED_BIT]), at)
    finally:
        os.close(descriptor)


def cut_after_header(path: Path) -> None:
    """Take all but its header from a shard, where it lies: there is nothing to read behind that."""
    os.truncate(path, PAYLOAD_OFFSET)
