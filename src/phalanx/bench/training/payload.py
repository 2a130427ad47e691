"""What a rank of a contender is told, and what it answers: lines of JSON on a socket.

Torch-free.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.bench.training.contenders import Contender
from phalanx.core.typed_json import JsonRecord
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan

# Keys of messages. To a rank: a turn, the word to begin it, the end. Of a rank: its model is built,
# it has the turn's batches, what the turn took, and why it ends.
TURN, GO, END = "turn", "go", "end"
BUILT, PREPARED, DONE, REFUSAL, FAILURE = "built", "prepared", "done", "refusal", "failure"


@dataclass(frozen=True)
class RankSetting:
    """What one rank trains, and among whom. `port`: of the store of this contender's ranks, on the
    loopback interface. `run_dir`: where phalanx leaves its events."""

    contender: Contender
    job: Job
    plan: Plan
    rank: int
    num_ranks: int
    port: int
    run_dir: Path

    def to_json(self) -> dict[str, Any]:
        return {
            "contender": self.contender.to_json(),
            "job": self.job.to_json(),
            "plan": self.plan.to_json(),
            "rank": self.rank,
            "num_ranks": self.num_ranks,
            "port": self.port,
            "run_dir": str(self.run_dir),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> RankSetting:
        return cls(
            Contender.from_json(body["contender"]),
            Job.model_validate_json(json.dumps(body["job"])),
            Plan.from_json(body["plan"]),
            body["rank"],
            body["num_ranks"],
            body["port"],
            Path(body["run_dir"]),
        )


@dataclass(frozen=True)
class Turn(JsonRecord):
    """Steps that a contender takes in a row, counted from 1. The first `num_warm` of them only
    warm up what the others' turns have cooled."""

    first_step: int
    num_steps: int
    num_warm: int


@dataclass(frozen=True)
class RankTurn(JsonRecord):
    """A turn as one rank had it: seconds and loss of each step, processor seconds in it and while
    it waited before it, and the most memory since the first turn (shared pages by their share; 0
    where the kernel does not say)."""

    step_s: tuple[float, ...]
    losses: tuple[float, ...]
    cpu_s: float
    idle_cpu_s: float
    peak_bytes: int


class MessageLines:
    """Messages over a socket, each a line of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._pending = b""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send `message`. Raises OSError where the other end is gone."""
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """The next message, once it is there; None where the other end is gone."""
        while b"\n" not in self._pending:
            try:
                chunk = self.connection.recv(1 << 16)
            except ConnectionError:
                chunk = b""
            if not chunk:
                return None
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return dict(json.loads(line))
