"""Reads the black box of a rank, whether that rank runs, is stopped or is dead."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.core import black_box_format as layout
from phalanx.core.black_box_format import decode_text
from phalanx.core.files import read_whole_regular_file

_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class BoxHeader:
    """The process that wrote a box. Times are of its machine; empty and -1 where not known."""

    pid: int
    start_ticks: int
    rank: int
    world_size: int
    incarnation: int
    device: str
    host: str
    boot_id: str
    opened_wall_s: float
    opened_monotonic_s: float
    pulse_s: float = 0.0
    """Monotonic seconds when the interpreter last ran a thread beside training; 0: not known."""
    num_steps_begun: int = 0
    work_s: float = 0.0
    """Monotonic seconds when a part of a long work was done last; 0: never."""
    is_compiling: bool = False


@dataclass(frozen=True)
class BoxGroup:
    """A process group of a rank. `ranks`: in words of `format_ranks`, empty where not known."""

    key: str
    label: str
    size: int
    ranks: str
    num_posted: int


@dataclass(frozen=True)
class RecordedCollective:
    """A collective, send or receive that a rank has posted; times in monotonic seconds.

    `state`: "posted" (not known to have ended), "waiting" (the rank waits for it), "finished",
    "failed", or "queued" (on a device, whose end the box does not know). `group` is a number in the
    rank's own table, -1 where that was full. `wait_began_s`, `ended_s`: 0 where there is none.
    """

    number: int
    sequence: int
    op: str
    group: int
    dtype: str
    shape: tuple[int, ...]
    num_dims: int
    num_tensors: int
    num_bytes: int
    state: str
    posted_s: float
    wait_began_s: float
    ended_s: float
    step: int
    microbatch: int
    phase: str
    peer: int
    tag: int
    is_foreground: bool
    file: str
    line: int

    @property
    def is_p2p(self) -> bool:
        return self.tag >= 0

    @property
    def has_ended(self) -> bool:
        """True if it has done its work; one that failed never did."""
        return self.state == "finished"


class LastPosition(NamedTuple):
    """The content of a black box: the step and phase in which a rank was last seen, and when
    (monotonic seconds of that machine).

    `collective` is what the phase stands for. `file` and `line` called the phase. `header` is None
    for a box of before version 2, which has neither groups nor collectives. `num_torn` slots were
    being written when the box was read, or when the rank died. `num_writes` counts positions:
    progress, to whoever reads twice.
    """

    step: int
    monotonic_s: float
    phase: str
    collective: str = ""
    microbatch: int = -1
    file: str = ""
    line: int = 0
    num_writes: int = 0
    header: BoxHeader | None = None
    groups: tuple[BoxGroup, ...] = ()
    collectives: tuple[RecordedCollective, ...] = ()
    num_torn: int = 0

    @property
    def last_progress_s(self) -> float:
        """Monotonic seconds of the newest thing that the rank wrote."""
        newest = self.monotonic_s
        for each in self.collectives:
            if each.is_foreground:
                newest = max(newest, each.posted_s, each.wait_began_s, each.ended_s)
        return newest


class BlackBoxVersionError(ValueError):
    """A black box of a newer phalanx than this one."""


def read_last_position(path: Path) -> LastPosition | None:
    """The last position a rank wrote; None if it never wrote one, or the file is no black box.

    Raises BlackBoxVersionError for a box of a newer version.
    """
    try:
        raw = read_whole_regular_file(path, _MAX_FILE_BYTES)
    except OSError:
        return None
    if len(raw) == layout.FIRST_LAYOUT.size:
        return _read_first_layout(raw)
    if len(raw) < layout.HEADER_BYTES or not raw.startswith(layout.MAGIC):
        return None
    fields = layout.HEADER.unpack_from(raw)
    _, version, total_bytes, num_positions, num_groups, num_collectives = fields[:6]
    if version > layout.VERSION:
        raise BlackBoxVersionError(f"{path}: black box of version {version}, newer than this")
    sizes = layout.NUM_POSITIONS, layout.NUM_GROUPS, layout.NUM_COLLECTIVES
    if (num_positions, num_groups, num_collectives) != sizes or len(raw) < total_bytes:
        return None
    return _read_slots(
        raw, _read_header(fields, layout.VITAL_SIGNS.unpack_from(raw, layout.VITAL_SIGNS_AT))
    )


def _read_first_layout(raw: bytes) -> LastPosition | None:
    step, seconds, phase, collective = layout.FIRST_LAYOUT.unpack(raw)
    # Zeros, as the file was made: the rank has not begun.
    if not phase.strip(b"\0"):
        return None
    return LastPosition(step, seconds, decode_text(phase), decode_text(collective))


def _read_header(fields: tuple[Any, ...], vital_signs: tuple[Any, ...]) -> BoxHeader:
    pid, rank, world_size, incarnation, ticks, wall_s, monotonic_s, device, host, boot = fields[6:]
    return BoxHeader(
        pid=pid,
        start_ticks=ticks,
        rank=rank,
        world_size=world_size,
        incarnation=incarnation,
        device=decode_text(device),
        host=decode_text(host),
        boot_id=decode_text(boot),
        opened_wall_s=wall_s,
        opened_monotonic_s=monotonic_s,
        pulse_s=vital_signs[0],
        num_steps_begun=vital_signs[1],
        work_s=vital_signs[2],
        is_compiling=bool(vital_signs[3]),
    )


def _read_slots(raw: bytes, header: BoxHeader) -> LastPosition | None:
    positions, num_torn_positions = _read_valid_slots(
        raw, layout.POSITION, layout.POSITIONS_AT, layout.NUM_POSITIONS
    )
    if not positions:
        return None
    number, step, seconds, _, microbatch, line, phase, collective, file = max(positions)
    groups, _ = _read_valid_slots(raw, layout.GROUP, layout.GROUPS_AT, layout.NUM_GROUPS)
    calls, num_torn_calls = _read_valid_slots(
        raw, layout.COLLECTIVE, layout.COLLECTIVES_AT, layout.NUM_COLLECTIVES
    )
    return LastPosition(
        step=step,
        monotonic_s=seconds,
        phase=decode_text(phase),
        collective=decode_text(collective),
        microbatch=microbatch,
        file=decode_text(file),
        line=line,
        num_writes=number,
        header=header,
        groups=tuple(map(_read_group, sorted(groups))),
        collectives=tuple(map(_read_collective, sorted(calls))),
        num_torn=num_torn_positions + num_torn_calls,
    )


def _read_valid_slots(
    raw: bytes, slot: struct.Struct, start: int, count: int
) -> tuple[list[tuple[Any, ...]], int]:
    """The fields of slots that were written wholly, without the number at their end, and how many
    were torn."""
    valid, num_torn = [], 0
    for index in range(count):
        *fields, end = slot.unpack_from(raw, start + index * slot.size)
        if fields[0] != end:
            num_torn += 1
        elif end:
            valid.append(tuple(fields))
    return valid, num_torn


def _read_group(fields: tuple[Any, ...]) -> BoxGroup:
    _, num_posted, size, key, label, ranks = fields
    return BoxGroup(
        key=decode_text(key),
        label=decode_text(label),
        size=size,
        ranks=decode_text(ranks),
        num_posted=num_posted,
    )


def _read_collective(fields: tuple[Any, ...]) -> RecordedCollective:
    number, sequence, posted_s, wait_began_s, ended_s, num_bytes = fields[:6]
    state, num_dims, is_foreground, num_tensors, peer, tag, group, line = fields[6:14]
    step, microbatch, *sizes = fields[14 : 16 + layout.MAX_DIMS]
    op, dtype, phase, file = map(decode_text, fields[16 + layout.MAX_DIMS :])
    return RecordedCollective(
        number=number,
        sequence=sequence,
        op=op,
        group=group,
        dtype=dtype,
        shape=tuple(sizes[:num_dims]),
        num_dims=num_dims,
        num_tensors=num_tensors,
        num_bytes=num_bytes,
        state=layout.STATE_NAMES.get(state, "posted"),
        posted_s=posted_s,
        wait_began_s=wait_began_s,
        ended_s=ended_s,
        step=step,
        microbatch=microbatch,
        phase=phase,
        peer=peer,
        tag=tag,
        is_foreground=bool(is_foreground),
        file=file,
        line=line,
    )
