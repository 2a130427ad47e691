"""Messages between supervisor and server: orders go to the server, reports come from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, get_args

from phalanx.core.typed_json import JsonObject
from phalanx.launch.end_record import EndRecord
from phalanx.launch.reports import ErrorReport
from phalanx.launch.wire import MessageCodec

# --- orders of the supervisor ---


@dataclass(frozen=True)
class Prepare:
    """Take over the search path of modules, and import `preload`, so that ranks have them when
    they are forked."""

    run_dir: Path
    preload: tuple[str, ...]
    sys_path: tuple[str, ...]
    python_path: str | None


@dataclass(frozen=True)
class StartRanks:
    """Fork the ranks of an attempt; each calls `entry` with `payload`.

    `doing`: their work, as messages say it.
    """

    attempt: int
    num_ranks: int
    entry: str
    payload: JsonObject
    doing: str


@dataclass(frozen=True)
class SendSignal:
    """Send a signal to all ranks."""

    signal: int


@dataclass(frozen=True)
class ShowStacks:
    """Have these ranks write their stacks to their logs."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class KillRanks:
    """Kill the ranks that still run."""


# --- reports of the server ---


@dataclass(frozen=True)
class Ready:
    """All is imported; ranks can be forked."""

    import_s: float
    num_threads: int


@dataclass(frozen=True)
class PreloadFailed:
    """A module cannot be imported."""

    report: ErrorReport


@dataclass(frozen=True)
class PreloadBeginsCuda:
    """A module begins to use CUDA when it is imported; processes forked after that could not."""

    module: str


@dataclass(frozen=True)
class AttemptStarted:
    """The ranks are forked; `pids` by rank."""

    attempt: int
    pids: tuple[int, ...]


@dataclass(frozen=True)
class StartFailed:
    """The ranks cannot be forked, and none is left."""

    report: ErrorReport


@dataclass(frozen=True)
class EndRecorded:
    """A rank has said how it ended. Its process may go on for a while."""

    attempt: int
    rank: int
    record: EndRecord


@dataclass(frozen=True)
class EventRefused:
    """The disk did not take a rank's event; `line` is the event."""

    attempt: int
    line: str


@dataclass(frozen=True)
class RankExited:
    """A rank's process is gone, with an exit code or by a signal.

    `by_us`: it was killed while it was alive, because the attempt was over.
    """

    attempt: int
    rank: int
    code: int | None
    signal: int | None
    by_us: bool
    died_monotonic_s: float


@dataclass(frozen=True)
class StoreExited:
    """The process that holds the ranks' store is gone, and was not told to go."""

    attempt: int
    code: int


ServerOrder: TypeAlias = Prepare | StartRanks | SendSignal | ShowStacks | KillRanks
ServerReport: TypeAlias = (
    Ready
    | PreloadFailed
    | PreloadBeginsCuda
    | AttemptStarted
    | StartFailed
    | EndRecorded
    | EventRefused
    | RankExited
    | StoreExited
)
SERVER_ORDER_CODEC: MessageCodec[ServerOrder] = MessageCodec(get_args(ServerOrder))
SERVER_REPORT_CODEC: MessageCodec[ServerReport] = MessageCodec(get_args(ServerReport))
