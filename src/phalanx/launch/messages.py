"""Messages between the supervisor and the processes that it starts: orders go to the template,
which forks servers, and to the server, which forks ranks; reports come from them.

What concerns the ranks carries the number of their attempt, and is ignored in another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, get_args

from phalanx.core.typed_json import JsonObject
from phalanx.launch.end_record import EndRecord
from phalanx.launch.reports import ErrorReport
from phalanx.launch.wire import JsonLineCodec

# --- orders to the template ---


@dataclass(frozen=True)
class ImportAhead:
    """Take over the search path of modules, and import some before the run is known. One that
    fails, or begins to use CUDA, is told of when it is preloaded."""

    modules: tuple[str, ...]
    sys_path: tuple[str, ...]
    python_path: str | None


@dataclass(frozen=True)
class PreloadModules:
    """Take over the search path of modules, and import `preload`, so that ranks have them when
    they are forked."""

    run_dir: Path
    preload: tuple[str, ...]
    sys_path: tuple[str, ...]
    python_path: str | None


@dataclass(frozen=True)
class ForkServer:
    """Fork a server. With the order come its end of a link, and the write end of a pipe that it and
    its ranks hold."""


# --- orders to the server ---


@dataclass(frozen=True)
class StartRanks:
    """Fork the ranks of an attempt; each calls `entry` with `payload`.

    `doing`: their work, as messages say it. `kept` ranks have the process of a rank of the attempt
    before, which waits for this one: of the rank in the same place of `kept_from`.
    """

    attempt: int
    num_ranks: int
    entry: str
    payload: JsonObject
    doing: str
    kept: tuple[int, ...] = ()
    kept_from: tuple[int, ...] = ()


@dataclass(frozen=True)
class SendSignalToRanks:
    """Send a signal to all ranks."""

    attempt: int
    signal: int


@dataclass(frozen=True)
class WriteStacksToLogs:
    """Have these ranks write their stacks to their logs."""

    attempt: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class KillRanks:
    """Kill the ranks that still run; with `ranks` these alone."""

    attempt: int
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class KillStore:
    """Kill the store of the attempt, whose ranks will not all meet: those that wait in it notice at
    once."""

    attempt: int


# --- reports of the template ---


@dataclass(frozen=True)
class PreloadFinished:
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
class ServerForked:
    """A server is there."""

    pid: int


@dataclass(frozen=True)
class ForkFailed:
    """The server cannot be forked."""

    report: ErrorReport


@dataclass(frozen=True)
class ServerExited:
    """A server is gone; `code` is negative for a signal."""

    pid: int
    code: int


# --- reports of the server ---


@dataclass(frozen=True)
class RanksForked:
    """The ranks are forked; `pids` by rank, `store_pid` of the process that holds their store."""

    attempt: int
    pids: tuple[int, ...]
    store_pid: int = 0


@dataclass(frozen=True)
class RanksNotForked:
    """The ranks cannot be forked; none of them is left."""

    attempt: int
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
class RankWaits:
    """A rank that lost another one has left its groups of `attempt`, by its own word, and waits for
    the next one; it holds the state after `held_step`, -1: none."""

    attempt: int
    rank: int
    held_step: int


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


TemplateOrder: TypeAlias = ImportAhead | PreloadModules | ForkServer
TemplateReport: TypeAlias = (
    PreloadFinished | PreloadFailed | PreloadBeginsCuda | ServerForked | ForkFailed | ServerExited
)
ServerOrder: TypeAlias = StartRanks | SendSignalToRanks | WriteStacksToLogs | KillRanks | KillStore
ServerReport: TypeAlias = (
    RanksForked | RanksNotForked | EndRecorded | EventRefused | RankWaits | RankExited | StoreExited
)
SUPERVISOR_TO_TEMPLATE_CODEC: JsonLineCodec[TemplateOrder] = JsonLineCodec(get_args(TemplateOrder))
TEMPLATE_TO_SUPERVISOR_CODEC: JsonLineCodec[TemplateReport] = JsonLineCodec(
    get_args(TemplateReport)
)
SUPERVISOR_TO_SERVER_CODEC: JsonLineCodec[ServerOrder] = JsonLineCodec(get_args(ServerOrder))
SERVER_TO_SUPERVISOR_CODEC: JsonLineCodec[ServerReport] = JsonLineCodec(get_args(ServerReport))
