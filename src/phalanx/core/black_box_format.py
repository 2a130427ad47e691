"""Layout of a black box: the fixed-size file in which a rank leaves where it is.

    header | 2 position slots | 32 groups | 64 collectives

Every slot begins and ends with the number of its write. A writer that is killed inside a write
leaves two different numbers, and a reader then knows that the slot is torn. A position is written
to the two slots in turn, so the one before a torn one is still there. Numbers are little-endian,
texts are UTF-8 that is cut and filled with zeros.
"""

from __future__ import annotations

import struct

MAGIC = b"PHXBOX\r\n"
# Readers of version N read every file whose version is N; the sizes in the header are checked.
VERSION = 2

# magic | version, total bytes, position slots, groups, collectives | pid, rank, world size,
# incarnation | start of the process (clock ticks since boot) | opened: wall seconds, monotonic
# seconds | device, host, boot id
HEADER = struct.Struct("<8sIIHHH2xiiiiQdd16s64s40s")
HEADER_BYTES = 256
# In the header's last bytes, written anew as the rank goes on: when its interpreter last ran a
# thread beside training (monotonic seconds), how many steps it has begun, when a part of a long
# work was done last (monotonic seconds), and whether code is being compiled. Zeros in boxes of
# earlier releases.
VITAL_SIGNS = struct.Struct("<dQdB")
VITAL_SIGNS_AT = 184
PULSE = struct.Struct("<d")
NUM_STEPS_BEGUN = struct.Struct("<Q")
NUM_STEPS_BEGUN_AT = VITAL_SIGNS_AT + PULSE.size
WORK = struct.Struct("<d")
WORK_AT = NUM_STEPS_BEGUN_AT + NUM_STEPS_BEGUN.size
IS_COMPILING = struct.Struct("<B")
IS_COMPILING_AT = WORK_AT + WORK.size
# number | step, monotonic seconds, writes so far | microbatch, line | phase, collective, file
POSITION = struct.Struct("<QqdQii32s80s120sQ")
# The same bytes for a writer that has phase, collective and file in one piece: a step comes by the
# same places again and again.
POSITION_AT_PLACE = struct.Struct("<QqdQii232sQ")
PLACE = struct.Struct("<32s80s120s")
# number | collectives posted | size | key, label, ranks
GROUP = struct.Struct("<QQi4x16s32s80sQ")
# number | sequence | posted, wait began, ended (monotonic seconds) | bytes | state, dims,
# foreground, tensors | peer, tag | group, line | step, microbatch | shape (6 sizes) |
# op, dtype, phase, file
COLLECTIVE = struct.Struct("<QQdddqBBBxHxxiiiiqi4x6q24s16s16s120sQ")
# The same bytes for a writer that has shape, op and dtype in one piece: a step makes the same calls
# again and again.
COLLECTIVE_OF_KIND = struct.Struct("<QQdddqBBBxHxxiiiiqi4x88s16s120sQ")
KIND = struct.Struct("<6q24s16s")

NUM_POSITIONS = 2
NUM_GROUPS = 32
NUM_COLLECTIVES = 64
MAX_DIMS = 6

POSITIONS_AT = HEADER_BYTES
GROUPS_AT = POSITIONS_AT + NUM_POSITIONS * POSITION.size
COLLECTIVES_AT = GROUPS_AT + NUM_GROUPS * GROUP.size
TOTAL_BYTES = COLLECTIVES_AT + NUM_COLLECTIVES * COLLECTIVE.size

# Fields that are written alone, after their slot.
GROUP_NUM_POSTED = struct.Struct("<Q")
GROUP_NUM_POSTED_AT = 8
TIME = struct.Struct("<d")
WAIT_BEGAN_AT, ENDED_AT = 24, 32
STATE = struct.Struct("<B")
STATE_AT = 48

POSTED, WAITING, FINISHED, FAILED, QUEUED = 1, 2, 3, 4, 5
STATE_NAMES = {
    POSTED: "posted",
    WAITING: "waiting",
    FINISHED: "finished",
    FAILED: "failed",
    QUEUED: "queued",
}

# The layout before version 2 had no header: step | monotonic seconds | phase, collective.
FIRST_LAYOUT = struct.Struct("<qd32s80s")


def encode_text(text: str, num_bytes: int) -> bytes:
    """UTF-8 of the beginning of `text`, cut to `num_bytes`."""
    return text.encode(errors="replace")[:num_bytes]


def encode_tail(text: str, num_bytes: int) -> bytes:
    """UTF-8 of the end of `text`, cut to `num_bytes`: of a path the end says more."""
    return text.encode(errors="replace")[-num_bytes:]


def decode_text(raw: bytes) -> str:
    # A cut may lie inside a character.
    return raw.rstrip(b"\0").decode(errors="replace")
