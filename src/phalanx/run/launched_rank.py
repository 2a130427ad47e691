"""The torch side of a rank that another launcher started: the ranks' store, and the training
itself."""

from __future__ import annotations

import contextlib
import datetime
import json
import signal
import sys
from typing import Any

import torch.distributed as dist

from phalanx.core.black_box_reader import read_last_position
from phalanx.core.errors import EnvironmentProblem, ExitCode
from phalanx.job.schema import Job
from phalanx.launch.paths import black_box_path
from phalanx.launch.positions import describe_rank_position
from phalanx.launch.rank_env import RankEnv
from phalanx.launch.reports import build_error_report
from phalanx.mesh.rendezvous import RENDEZVOUS_TIMEOUT_S, open_rendezvous_store
from phalanx.run.decision import RankZeroDecision
from phalanx.run.rank import run_rank
from phalanx.run.rank_run import RankRunInputs

# In this time rank 0 plans, and builds shards of text.
PREPARE_WAIT_TIMEOUT_S = 600.0
STORE_READ_TIMEOUT_S = 20.0
_DECISION_STORE_KEY = "decision"


class DecisionStore:
    """The ranks' key-value store, through which rank 0 tells the others its decision, once."""

    def __init__(self, job: Job, ranks: RankEnv) -> None:
        self._ranks = ranks
        self._is_told = False
        # Of one rank alone there is none.
        self._store: Any = None
        if ranks.world_size > 1:
            self._store = open_rendezvous_store(
                rendezvous_s=job.resilience.rendezvous_s or RENDEZVOUS_TIMEOUT_S
            )

    def publish_decision(self, decision: RankZeroDecision) -> None:
        """Tell the other ranks, as rank 0; the first decision counts.

        Where ranks end here, wait until each has read why: this one may hold the store that they
        read from.
        """
        if self._is_told or self._store is None:
            return
        self._is_told = True
        self._store.set(_DECISION_STORE_KEY, json.dumps(decision.to_json()))
        if decision.exit_code is not None:
            keys = [f"read/{rank}" for rank in range(1, self._ranks.world_size)]
            with contextlib.suppress(dist.DistError):
                self._store.wait(keys, datetime.timedelta(seconds=STORE_READ_TIMEOUT_S))

    def wait_for_decision(self) -> RankZeroDecision:
        """Wait for rank 0's decision, as another rank.

        Raises EnvironmentProblem if rank 0 tells none.
        """
        # Longer than for the rendezvous: preparing data takes its time.
        self._store.set_timeout(datetime.timedelta(seconds=PREPARE_WAIT_TIMEOUT_S))
        try:
            decision = RankZeroDecision.from_json(json.loads(self._store.get(_DECISION_STORE_KEY)))
            # Rank 0 may wait for this before it ends, and its store with it.
            self._store.set(f"read/{self._ranks.rank}", "1")
        except dist.DistError as error:
            # torch's messages may go on with a stack of C++.
            reason = str(error).splitlines()[0]
            raise EnvironmentProblem(
                "rank 0 is gone, or prepares for too long", why=reason
            ) from None
        return decision

    def run_rank(self, run: RankRunInputs, **options: Any) -> ExitCode:
        """Train as `run` says, joining the other ranks through this store. Returns the exit code.

        User code that calls sys.exit, or raises KeyboardInterrupt, has failed: no stop of ours
        comes as an exception while a rank runs, and neither code would tell the launcher that the
        run is not done.
        """
        try:
            return ExitCode(run_rank(run, rendezvous=self._store, **options))
        except (SystemExit, KeyboardInterrupt) as error:
            is_stop = (
                isinstance(error, KeyboardInterrupt)
                # `raising_on_stop_signals` ignores SIGINT once it has raised: then it is ours.
                and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            )
            if is_stop:
                raise
            report = build_error_report(error, run.run_dir)
            where = describe_rank_position(
                read_last_position(black_box_path(run.run_dir, run.rank))
            )
            print(
                f"phalanx: rank {run.rank} failed {where}:\n{report.traceback.rstrip()}",
                file=sys.stderr,
            )
            return ExitCode(report.exit_code)
