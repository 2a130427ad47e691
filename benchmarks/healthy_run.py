"""What was said of a run that nobody disturbed: `python benchmarks/healthy_run.py RUN > FILE.json`.

One JSON object: how long the run went on, its steps, how often it was started, each verdict that
was given (there should be none), what its checks found, and each time that a rank was called slow,
with what the kernel said. `slow_by_steps` are those that the kernel does not bear out.
"""

from __future__ import annotations

import argparse
import collections
import json
from pathlib import Path
from typing import Any

from phalanx.observe.events import (
    CheckpointFailed,
    CheckpointSaved,
    CheckpointUnusable,
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


def describe_run(run_dir: Path) -> dict[str, Any]:
    """The facts of one run."""
    num_ranks = len({path.name[:9] for path in (run_dir / "events").glob("rank-*")})
    # -1: the supervisor.
    events = [
        envelope
        for rank in range(-1, num_ranks)
        for envelope in read_recorded_events(run_dir, *KINDS, rank=rank)
    ]
    steps = [e.event.step for e in events if isinstance(e.event, StepFinished) and e.rank == 0]
    times_s = [envelope.time_unix_s for envelope in events]
    checks = [e.event for e in events if isinstance(e.event, InvariantChecked)]
    started = next(e.event for e in events if isinstance(e.event, RunStarted))
    slow = [e.event for e in events if isinstance(e.event, RankSlow)]
    return {
        "run": run_dir.name,
        "layout": started.layout,
        "collectives": started.collectives,
        "seconds": round(max(times_s) - min(times_s)),
        "steps": max(steps),
        "steps_on_record_once": len(steps) == len(set(steps)) == max(steps),
        "starts": sum(isinstance(e.event, RanksStarted) for e in events),
        "verdicts": {
            kind.__name__: sum(isinstance(e.event, kind) for e in events) for kind in VERDICTS
        },
        "checks": {
            check.name: {"checks": check.num_checks, "failed": check.num_failed}
            for check in checks
            if check.is_summary
        },
        "checks_failed": sum(not check.ok for check in checks),
        "checkpoints": sum(isinstance(e.event, CheckpointSaved) for e in events),
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
