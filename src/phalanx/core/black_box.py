"""The black box of a rank: a memory-mapped file that says where the rank is, without a system call.

Another process reads it (`core.black_box_reader`) while the rank runs, and after it was stopped or
killed. The layout is that of `core.black_box_format`.
"""

from __future__ import annotations

import itertools
import mmap
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from phalanx.core import black_box_format as layout
from phalanx.core.black_box_format import encode_tail, encode_text
from phalanx.core.call_site import CallSite, CallSiteFinder
from phalanx.core.files import open_regular_file_for_append
from phalanx.core.forked_copy import ForkedCopyGuard
from phalanx.core.process_stat import read_start_ticks

# The name of a box that no disk has room for.
BOX_IN_MEMORY = "phalanx-black-box"


@dataclass(frozen=True)
class RankIdentity:
    """The rank whose black box a file is; -1 where it is not known.

    `incarnation`: the number of the attempt, which a restart raises.
    """

    rank: int = -1
    world_size: int = -1
    incarnation: int = -1
    device: str = ""


class PostedCollective(NamedTuple):
    """A collective, a send or a receive, at the moment at which it is posted.

    `sequence` counts the collectives of its group from 1, those between two ranks apart, by
    direction, peer and tag. `peer` is the other rank of a send or a receive, the root of a
    broadcast, and -1 otherwise. `num_tensors` may be more than one: shape and dtype are those of
    the first, `num_bytes` is of all. `is_foreground` is False for a thread beside training.
    """

    op: str
    group: int
    sequence: int
    dtype: str
    shape: Sequence[int]
    num_tensors: int
    num_bytes: int
    peer: int
    tag: int
    site: CallSite
    state: int
    is_foreground: bool


class CollectiveObserver(Protocol):
    """Told of each collective of a rank, by the number of its record, also from other threads."""

    def post_collective(self, number: int, call: PostedCollective) -> None: ...

    def begin_wait(self, number: int) -> None: ...

    def end_collective(self, number: int, end_seen: str) -> None:
        """`end_seen`: see CollectiveSpan in phalanx.observe.trace_rows; the first end counts."""
        ...


_MAX_ENCODED_TEXTS = 1024
_POSITION_PACK_INTO = layout.POSITION_AT_PLACE.pack_into
_COLLECTIVE_PACK_INTO = layout.COLLECTIVE_OF_KIND.pack_into
_POSITION_OFFSETS = tuple(
    layout.POSITIONS_AT + slot * layout.POSITION.size for slot in range(layout.NUM_POSITIONS)
)


class BlackBox:
    """Writes where a rank is.

    `on_progress`, if set, is called before each position is written. `observer`, if set, is told of
    collectives: a trace is being recorded. `groups` are (key, label, ranks) by number. A process
    that is forked off this one, and would train on in its place, ends where it would write.
    """

    def __init__(self, path: Path, identity: RankIdentity | None = None) -> None:
        self.on_progress: Callable[[], None] | None = None
        self.observer: CollectiveObserver | None = None
        self.groups: list[tuple[str, str, str]] = []
        self.sites = CallSiteFinder()
        # Texts as they are written: a step writes the same ones again and again.
        self._encoded_places: dict[tuple[str, str, str], bytes] = {}
        self._encoded_files: dict[str, bytes] = {}
        self._encoded_kinds: dict[tuple[str, str, tuple[int, ...]], bytes] = {}
        self._guard = ForkedCopyGuard((identity or RankIdentity()).rank)
        self._map = _map_new_file(path, layout.TOTAL_BYTES)
        self._num_positions = self._num_steps_begun = 0
        # `next` of a counter is one step for all threads.
        self._collective_numbers = itertools.count(1)
        self._newest_collective = 0
        self._num_groups = 0
        self._step, self._microbatch, self._place = 0, -1, b""
        self._write_header(identity or RankIdentity())

    @property
    def step(self) -> int:
        """The step of the position that was written last."""
        return self._step

    def write(
        self,
        step: int,
        phase: str,
        collective: str = "",
        microbatch: int = -1,
        site: CallSite | None = None,
    ) -> CallSite:
        """Write the position: the phase that has begun, and the collective that it stands for.
        Returns the line of it: `site`, or that of the caller."""
        if self._guard.is_copy:
            self._guard.end_copy()
        if self.on_progress is not None:
            self.on_progress()
        if site is None:
            site = self.sites.find(2)
        number = self._num_positions = self._num_positions + 1
        if step != self._step:
            self._num_steps_begun += 1
            layout.NUM_STEPS_BEGUN.pack_into(
                self._map, layout.NUM_STEPS_BEGUN_AT, self._num_steps_begun
            )
        texts = phase, collective, site.file
        encoded_place = self._encoded_places.get(texts) or self._encode_place(*texts)
        self._step, self._microbatch, self._place = step, microbatch, encoded_place
        _POSITION_PACK_INTO(
            self._map,
            _POSITION_OFFSETS[number % layout.NUM_POSITIONS],
            number,
            step,
            time.monotonic(),
            self._newest_collective,
            microbatch,
            site.line,
            encoded_place,
            number,
        )
        return site

    def _encode_place(self, phase: str, collective: str, file: str) -> bytes:
        """The texts of a position as they are written, kept for the next time."""
        if len(self._encoded_places) >= _MAX_ENCODED_TEXTS:
            self._encoded_places.clear()
        # The format cuts them to their length, and fills up with zeros.
        encoded = layout.PLACE.pack(
            encode_text(phase, 32), encode_text(collective, 80), encode_tail(file, 120)
        )
        self._encoded_places[phase, collective, file] = encoded
        return encoded

    def _encode_file(self, file: str) -> bytes:
        """The end of a file's name as it is written, kept for the next time."""
        if len(self._encoded_files) >= _MAX_ENCODED_TEXTS:
            self._encoded_files.clear()
        encoded = self._encoded_files[file] = encode_tail(file, 120)
        return encoded

    def _encode_kind(self, op: str, dtype: str, shape: tuple[int, ...]) -> bytes:
        """What calls of a kind have in common as it is written, kept for the next time."""
        if len(self._encoded_kinds) >= _MAX_ENCODED_TEXTS:
            self._encoded_kinds.clear()
        sizes = shape[: layout.MAX_DIMS]
        padding = (0,) * (layout.MAX_DIMS - len(sizes))
        kind = layout.KIND.pack(*sizes, *padding, op.encode(), dtype.encode())
        self._encoded_kinds[op, dtype, shape] = kind
        return kind

    def add_group(self, key: str, label: str, size: int, ranks: str) -> int:
        """Number of a new group in this box; -1 where the box has no room for more.

        `key` is the same on all ranks of the group and differs from that of every other group.
        `ranks` are global ranks in words of `format_ranks`.
        """
        number = self._num_groups
        if number >= layout.NUM_GROUPS:
            return -1
        self._num_groups += 1
        self.groups.append((key, label, ranks))
        layout.GROUP.pack_into(
            self._map,
            layout.GROUPS_AT + number * layout.GROUP.size,
            number + 1,
            0,
            size,
            encode_text(key, 16),
            encode_text(label, 32),
            encode_text(ranks, 80),
            number + 1,
        )
        return number

    def post_collective(self, call: PostedCollective) -> int:
        """Write that `call` is posted; returns its number, by which its state can be changed."""
        if self._guard.is_copy:
            self._guard.end_copy()
        number = next(self._collective_numbers)
        # Taken apart once: each read of a field by its name costs as much as packing it.
        (
            op,
            group,
            sequence,
            dtype,
            shape,
            num_tensors,
            num_bytes,
            peer,
            tag,
            site,
            state,
            is_foreground,
        ) = call
        kind = op, dtype, tuple(shape)
        _COLLECTIVE_PACK_INTO(
            self._map,
            self._collective_offset(number),
            number,
            sequence,
            time.monotonic(),
            0.0,
            0.0,
            num_bytes,
            state,
            min(len(shape), 255),
            is_foreground,
            min(num_tensors, 65535),
            peer,
            tag,
            group,
            site.line,
            self._step,
            self._microbatch,
            self._encoded_kinds.get(kind) or self._encode_kind(*kind),
            # The format cuts it to the phase alone, and that to its length.
            self._place,
            self._encoded_files.get(site.file) or self._encode_file(site.file),
            number,
        )
        self._newest_collective = number
        if group >= 0 and tag < 0:
            at = layout.GROUPS_AT + group * layout.GROUP.size + layout.GROUP_NUM_POSTED_AT
            layout.GROUP_NUM_POSTED.pack_into(self._map, at, sequence)
        if self.observer is not None:
            self.observer.post_collective(number, call)
        return number

    def begin_wait(self, number: int) -> None:
        """Write that the rank now waits for collective `number`."""
        self._write_state(number, layout.WAITING, layout.WAIT_BEGAN_AT)
        if self.observer is not None:
            self.observer.begin_wait(number)

    def end_collective(
        self, number: int, *, has_failed: bool = False, end_seen: str = "noticed"
    ) -> None:
        """Write that collective `number` has ended on this rank; `end_seen` is how that was
        learned."""
        state = layout.FINISHED
        if has_failed:
            state = layout.FAILED
            end_seen = "failed"
        if self.observer is not None:
            self.observer.end_collective(number, end_seen)
        self._write_state(number, state, layout.ENDED_AT)

    def write_pulse(self) -> None:
        """Write that the interpreter runs threads now."""
        layout.PULSE.pack_into(self._map, layout.VITAL_SIGNS_AT, time.monotonic())

    def end_pulse(self) -> None:
        """Write that no pulse is written from now on, so that nobody misses it."""
        layout.PULSE.pack_into(self._map, layout.VITAL_SIGNS_AT, 0.0)

    def note_work(self) -> None:
        """Write that a part of a long work is done, such as one of an upload."""
        layout.WORK.pack_into(self._map, layout.WORK_AT, time.monotonic())

    def note_compilation(self, is_compiling: bool) -> None:
        """Write whether code is being compiled from now on."""
        layout.IS_COMPILING.pack_into(self._map, layout.IS_COMPILING_AT, is_compiling)

    def close(self) -> None:
        self._map.close()

    def _write_state(self, number: int, state: int, time_at: int) -> None:
        if number <= self._newest_collective - layout.NUM_COLLECTIVES:
            # The ring has come round: its slot is another one's.
            return
        offset = self._collective_offset(number)
        # The time first: a state whose time is not there yet is a state without a time.
        layout.TIME.pack_into(self._map, offset + time_at, time.monotonic())
        layout.STATE.pack_into(self._map, offset + layout.STATE_AT, state)

    @staticmethod
    def _collective_offset(number: int) -> int:
        slot = (number - 1) % layout.NUM_COLLECTIVES
        return layout.COLLECTIVES_AT + slot * layout.COLLECTIVE.size

    def _write_header(self, identity: RankIdentity) -> None:
        fields = (
            layout.VERSION,
            layout.TOTAL_BYTES,
            layout.NUM_POSITIONS,
            layout.NUM_GROUPS,
            layout.NUM_COLLECTIVES,
            os.getpid(),
            identity.rank,
            identity.world_size,
            identity.incarnation,
            read_start_ticks(os.getpid()) or 0,
            time.time(),
            time.monotonic(),
            encode_text(identity.device, 16),
            encode_text(socket.gethostname(), 64),
            encode_text(read_boot_id(), 40),
        )
        # The magic last: whoever sees it sees the rest.
        layout.HEADER.pack_into(self._map, 0, b"", *fields)
        self._map[: len(layout.MAGIC)] = layout.MAGIC


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks in few characters: "0-3", "0,2,4,6", "0-62:2"; empty where they do not fit."""
    if len(ranks) > 2:
        stride = ranks[1] - ranks[0]
        if stride > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, stride)):
            if stride == 1:
                return f"{ranks[0]}-{ranks[-1]}"
            return f"{ranks[0]}-{ranks[-1]}:{stride}"
    text = ",".join(map(str, ranks))
    if len(text) > 80:
        return ""
    return text


def read_boot_id() -> str:
    """A text that is this machine's until it is started again; empty where it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _map_new_file(path: Path, num_bytes: int) -> mmap.mmap:
    """Map `num_bytes` zeros of a new file; memory without a file where the disk refuses them.

    The zeros are written: a page of a file that only was made longer has no room on a full disk,
    and the first write to its mapping would kill the process (SIGBUS).
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A new file: to shorten one that another process still has mapped would kill that one.
        path.unlink(missing_ok=True)
        with open_regular_file_for_append(path) as file:
            file.write(bytes(num_bytes))
            file.flush()
            return mmap.mmap(file.fileno(), num_bytes)
    except OSError:
        return _map_memory(num_bytes)


def _map_memory(num_bytes: int) -> mmap.mmap:
    """Map memory that whoever looks for BOX_IN_MEMORY finds among what this process has open, where
    the system has such."""
    try:
        descriptor = os.memfd_create(BOX_IN_MEMORY)
    except (OSError, AttributeError):
        return mmap.mmap(-1, num_bytes)
    try:
        os.ftruncate(descriptor, num_bytes)
        # The map has a descriptor of its own.
        return mmap.mmap(descriptor, num_bytes)
    except OSError:
        return mmap.mmap(-1, num_bytes)
    finally:
        os.close(descriptor)
