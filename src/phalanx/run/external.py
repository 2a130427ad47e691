"""Train as one rank of somebody else's launcher (torchrun, srun, ...): the ranks exist, nothing is forked.

Rank 0 prepares the run directory and tells the others what it decided, or why it could not, through the ranks' store.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phalanx.checkpoint.fence import Fence
from phalanx.core.clocks import process_began_s
from phalanx.core.errors import EnvironmentProblem, ExitCode, PhalanxError
from phalanx.core.phases import read_black_box
from phalanx.job.schema import Job
from phalanx.launch.external import ExternalRanks
from phalanx.launch.paths import black_box, next_attempt
from phalanx.launch.rank_env import RankEnv
from phalanx.launch.reports import describe
from phalanx.launch.supervisor import Outcome
from phalanx.launch.verdict import place_in_words
from phalanx.mesh.rendezvous import RENDEZVOUS_S, open_store
from phalanx.observe.bus import Bus
from phalanx.observe.events import RESUMED, Note
from phalanx.plan.plan import Plan
from phalanx.plan.precision import with_precision
from phalanx.run.prepare import Prepared, announce, finish_run, prepared_run, score_baselines
from phalanx.run.rank import RankRun, run_rank
from phalanx.run.resume import Resumed
from phalanx.run.supervised import console_of, is_finished, require_ours

PREPARE_TIMEOUT_S = 600.0
READ_TIMEOUT_S = 20.0
STATUS = {ExitCode.OK: "finished", ExitCode.PREEMPTED: "preempted", ExitCode.INTERRUPTED: "interrupted"}


def train_as_rank(job: Job, run_dir: Path, launched: ExternalRanks, resumed: Resumed | None) -> int:
    """Returns this rank's exit code. Rank 0 speaks for all.

    A launcher that starts failed ranks again (torchrun --max-restarts) continues the run in `run.dir`.
    """
    began_s, ranks = process_began_s(), launched.mine  # each of them imports torch by itself
    store = open_store(rendezvous_s=job.resilience.rendezvous_s or RENDEZVOUS_S) if ranks.world_size > 1 else None
    if ranks.rank != 0:
        return _follow(job, ranks, store, began_s)
    resume = resumed is not None or (ranks.attempt > 0 and (run_dir / "job.json").exists())
    decision = _Decision(store, ranks.world_size)
    try:
        with prepared_run(job, run_dir, resume=resume, num_ranks=ranks.world_size) as prepared:
            announce(prepared, ranks=launched.words, resumed=resumed)
            if resume and is_finished(run_dir, job):
                print(f"run     {run_dir}: step {job.train.steps} is done and saved; nothing to do")
                decision.tell({"error": "finished", "exit_code": int(ExitCode.OK)})
                return ExitCode.OK
            attempt, epoch = next_attempt(run_dir), prepared.lock.take_epoch().number
            told = {"run_dir": str(run_dir), "plan": prepared.plan.to_json(), "attempt": attempt, "epoch": epoch}
            decision.tell(told)
            holder = asdict(prepared.lock.holder)
            run = RankRun(prepared.job, prepared.plan, run_dir, 0, attempt, began_s, epoch, holder)
            return _lead(prepared, run, store, resumed)
    except PhalanxError as error:
        decision.tell({"error": str(error), "exit_code": int(error.exit_code)})
        raise
    except BaseException as error:
        decision.tell({"error": repr(error), "exit_code": int(ExitCode.INTERNAL)})
        raise


class _Decision:
    """What rank 0 decided, told once."""

    def __init__(self, store: Any, world_size: int) -> None:
        self._store, self._world_size = store, world_size
        self._told = store is None

    def tell(self, decision: dict[str, Any]) -> None:
        """Where ranks end here, wait until each has read why: rank 0 may hold the store they read from."""
        if self._told:
            return
        self._told = True
        self._store.set("decision", json.dumps(decision))
        if "error" in decision:
            keys = [f"read/{rank}" for rank in range(1, self._world_size)]
            with contextlib.suppress(dist.DistError):
                self._store.wait(keys, datetime.timedelta(seconds=READ_TIMEOUT_S))


def _run_rank(run: RankRun, **more: Any) -> ExitCode:
    """`run_rank`, except that user code which calls sys.exit, or raises KeyboardInterrupt, has failed: no stop of ours
    comes as an exception while a rank runs, and neither code would tell the launcher that the run is not done.
    """
    try:
        return ExitCode(run_rank(run, **more))
    except (SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a stop
            raise
        report = describe(error, run.run_dir)
        where = place_in_words(read_black_box(black_box(run.run_dir, run.rank)))
        print(f"phalanx: rank {run.rank} failed {where}:\n{report.traceback.rstrip()}", file=sys.stderr)
        return ExitCode(report.exit_code)


def _lead(prepared: Prepared, run: RankRun, store: Any, resumed: Resumed | None) -> int:
    """Train as rank 0, then say what came out, also when it failed."""
    console = console_of(run.job)
    fence = Fence.of_rank(run.run_dir, run.epoch, run.holder)
    bus = Bus(
        rank=-1,
        attempt=run.attempt,
        run_dir=run.run_dir,
        on_unwritten=console.write,
        may_write=lambda: not fence.is_lost(),
    )
    with contextlib.ExitStack() as opened:
        opened.callback(bus.close)
        if resumed is not None:
            bus.emit(Note(RESUMED, resumed.facts()))
        code = ExitCode.INTERNAL
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            code = _run_rank(run, sinks=[("console", lambda: console)], store=store)
            for number, handler in before.items():
                signal.signal(number, handler)
            require_ours(fence)
            if code == ExitCode.OK:
                score_baselines(prepared, bus)
        except PhalanxError as error:
            code = error.exit_code
            raise
        except BaseException:
            code = ExitCode.INTERNAL
            raise
        finally:
            if not fence.is_lost(now=True):
                outcome = Outcome(code, STATUS.get(code, "failed"), "", 1)
                finish_run(prepared, outcome, bus, opened, elapsed_s=time.monotonic() - run.started_s)
    return code


def _follow(job: Job, ranks: RankEnv, store: Any, began_s: float) -> int:
    store.set_timeout(datetime.timedelta(seconds=PREPARE_TIMEOUT_S))
    try:
        decision = json.loads(store.get("decision"))
        store.set(f"read/{ranks.rank}", "1")
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise EnvironmentProblem("rank 0 is gone, or prepares for too long", why=reason) from None
    if "error" in decision:  # rank 0 has said it
        return int(decision["exit_code"])
    plan, run_dir = Plan.from_json(decision["plan"]), Path(decision["run_dir"])
    job = with_precision(job, plan.precision)  # what it leaves open, rank 0 has decided for all
    attempt, epoch = int(decision["attempt"]), int(decision["epoch"])
    try:
        return _run_rank(RankRun(job, plan, run_dir, ranks.rank, attempt, began_s, epoch), store=store)
    except PhalanxError as error:
        if ranks.local_rank == 0:  # another node: rank 0's words are not on this terminal
            print(f"phalanx: rank {ranks.rank}: {error}", file=sys.stderr)
        return error.exit_code
