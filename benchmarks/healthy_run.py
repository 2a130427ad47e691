"""What was said of a run that nobody disturbed: `python benchmarks/healthy_run.py RUN > FILE.json`.

One JSON object: how long the run went on, its steps, how often it was started, each verdict that
was given (there should be none), what its checks found, and each time that a rank was called slow,
with what the kernel said. `slow_by_steps` are those that the kernel does not bear out.
"""

from __future__ import annotations

import argparse
import collections
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from phalanx.observe.events import (
    CheckpointFailed,
    CheckpointSaved,
    CheckpointUnusable,
    Envelope,
    Event,
    HangFound,
    InvariantChecked,
    NonFiniteFound,
    RankFailed,
    RankSlow,
    RanksStarted,
    RestartScheduled,
    RolledBack,
    RunStarted,
    StepFinished,
    StepSkipped,
    StoreLost,
)
from phalanx.observe.tail import read_recorded_events

Kind = TypeVar("Kind", bound=Event)

VERDICTS: tuple[type[Event], ...] = (
    *(HangFound, RankFailed, StoreLost, RestartScheduled, RolledBack, CheckpointUnusable),
    *(CheckpointFailed, NonFiniteFound, StepSkipped),
)
KINDS = (
    *VERDICTS,
    RunStarted,
    RanksStarted,
    RankSlow,
    InvariantChecked,
    CheckpointSaved,
    StepFinished,
)


@dataclass(frozen=True)
class RunRecord:
    """The events of KINDS of all ranks of a run and of its supervisor."""

    envelopes: Sequence[Envelope]

    @classmethod
    def read(cls, run_dir: Path) -> RunRecord:
        num_ranks = len({path.name[:9] for path in (run_dir / "events").glob("rank-*")})
        # -1: the supervisor.
        return cls(
            [
                envelope
                for rank in range(-1, num_ranks)
                for envelope in read_recorded_events(run_dir, *KINDS, rank=rank)
            ]
        )

    def select(self, kind: type[Kind]) -> list[Kind]:
        """The events of a kind, in order of ranks."""
        return [each.event for each in self.envelopes if isinstance(each.event, kind)]

    def list_steps(self) -> list[int]:
        """The steps that rank 0 has recorded, done again or not."""
        of_rank_0 = RunRecord([each for each in self.envelopes if each.rank == 0])
        return [event.step for event in of_rank_0.select(StepFinished)]


def describe_run(run_dir: Path) -> dict[str, Any]:
    """The facts of one run."""
    record = RunRecord.read(run_dir)
    steps, started = record.list_steps(), record.select(RunStarted)[0]
    times_s = [envelope.time_unix_s for envelope in record.envelopes]
    return {
        "run": run_dir.name,
        "layout": started.layout,
        "collectives": started.collectives,
        "seconds": round(max(times_s) - min(times_s)),
        "steps": max(steps),
        "steps_on_record_once": len(steps) == len(set(steps)) == max(steps),
        "starts": len(record.select(RanksStarted)),
        "verdicts": {kind.__name__: len(record.select(kind)) for kind in VERDICTS},
        **_describe_checks(record.select(InvariantChecked)),
        "checkpoints": len(record.select(CheckpointSaved)),
        **_describe_slow_ranks(record.select(RankSlow)),
    }


def _describe_checks(checks: Sequence[InvariantChecked]) -> dict[str, Any]:
    return {
        "checks": {
            check.name: {"checks": check.num_checks, "failed": check.num_failed}
            for check in checks
            if check.is_summary
        },
        "checks_failed": sum(not check.ok for check in checks),
    }


def _describe_slow_ranks(slow: Sequence[RankSlow]) -> dict[str, Any]:
    return {
        "slow": len(slow),
        "slow_by_steps": sum(not each.why for each in slow),
        "slow_by_share": sum(each.cpu_share < each.peers_cpu_share for each in slow),
        "slow_why": collections.Counter(each.why for each in slow),
        "slow_shares": [
            [each.slow_rank, each.step, round(each.cpu_share, 3), round(each.peers_cpu_share, 3)]
            for each in slow
        ],
    }


def main() -> None:
    """Print the facts of RUN."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN")
    print(json.dumps(describe_run(parser.parse_args().run)))


if __name__ == "__main__":
    main()
