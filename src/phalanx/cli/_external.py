"""Train as one rank of somebody else's launcher (torchrun, srun, ...): the ranks exist, nothing is forked.

Rank 0 prepares the run directory and tells the others what it decided, or why it could not, through the ranks' store.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

from phalanx.checkpoint.manifest import newest_step
from phalanx.cli._prepare import announce, conclude, prepared_run, score_baselines
from phalanx.cli._rank import RankRun, run_rank
from phalanx.core.errors import ExitCode, PhalanxError
from phalanx.job.schema import Job
from phalanx.launch.paths import next_attempt
from phalanx.launch.rank_env import RankEnv
from phalanx.launch.supervisor import Outcome
from phalanx.mesh.mesh import open_store
from phalanx.observe.bus import Bus
from phalanx.observe.console import open_console
from phalanx.observe.events import RunFinished
from phalanx.plan.planner import Plan

PREPARE_TIMEOUT_S = 600.0
STATUS = {ExitCode.OK: "finished", ExitCode.PREEMPTED: "preempted", ExitCode.INTERRUPTED: "interrupted"}


def train_as_rank(job: Job, run_dir: Path, ranks: RankEnv, *, resume: bool) -> int:
    """Returns this rank's exit code. Rank 0 speaks for all."""
    began_unix_s = time.time()
    store = open_store() if ranks.world_size > 1 else None
    if ranks.rank == 0:
        return _lead(job, run_dir, ranks, store, began_unix_s, resume=resume)
    return _follow(job, ranks, store, began_unix_s)


def _lead(job: Job, run_dir: Path, ranks: RankEnv, store: Any, began_unix_s: float, *, resume: bool) -> int:
    told = False

    def tell_others(decision: dict[str, Any]) -> None:
        nonlocal told
        if store is not None and not told:
            store.set("decision", json.dumps(decision))
        told = True

    try:
        with prepared_run(job, run_dir, resume=resume, num_ranks=ranks.world_size) as prepared:
            attempt = next_attempt(run_dir)
            announce(prepared)
            decision = {"run_dir": str(run_dir), "plan": prepared.plan.to_json(), "attempt": attempt}
            if newest_step(run_dir) >= job.train.steps:
                tell_others({"error": "finished", "exit_code": 0})
                print(f"run     {run_dir}: step {job.train.steps} is done and saved; nothing to do")
                return ExitCode.OK
            tell_others(decision)
            console = open_console(sys.stdout, total_steps=job.train.steps, log_every=job.observe.log_every)
            run = RankRun(job, prepared.plan, run_dir, 0, attempt, began_unix_s)
            code = ExitCode(run_rank(run, sinks=[("console", console)], store=store))
            bus = Bus(rank=-1, attempt=attempt, run_dir=run_dir)
            if code == ExitCode.OK:
                score_baselines(prepared, bus)
            status = STATUS.get(code, "failed")
            bus.emit(RunFinished(status, code, newest_step(run_dir), time.time() - began_unix_s))
            bus.close()
            return conclude(prepared, Outcome(code, status, "", 1))
    except PhalanxError as error:
        tell_others({"error": str(error), "exit_code": int(error.exit_code)})
        raise
    except BaseException as error:
        tell_others({"error": repr(error), "exit_code": int(ExitCode.INTERNAL)})
        raise


def _follow(job: Job, ranks: RankEnv, store: Any, began_unix_s: float) -> int:
    store.set_timeout(datetime.timedelta(seconds=PREPARE_TIMEOUT_S))
    decision = json.loads(store.get("decision"))
    if "error" in decision:  # rank 0 has said it
        return int(decision["exit_code"])
    plan, run_dir = Plan.from_json(decision["plan"]), Path(decision["run_dir"])
    try:
        return run_rank(RankRun(job, plan, run_dir, ranks.rank, int(decision["attempt"]), began_unix_s), store=store)
    except PhalanxError as error:
        print(f"rank {ranks.rank}: {error}", file=sys.stderr) if ranks.local_rank == 0 else None
        return error.exit_code
