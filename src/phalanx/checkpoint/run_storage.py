"""The storage of one run as a process has it open: its directory, its store, and its fence.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint.ownership.fence import RunOwnershipWatch
from phalanx.checkpoint.ownership.fencing_token import FencingToken
from phalanx.checkpoint.stores import Store, open_store_of_run


@dataclass(frozen=True)
class RunStorage:
    """A run's directory and its store of checkpoints, opened once and handed to all that save.

    `fence` finds out if another job has taken the run; None where claims are not counted, as in a
    loop of your own.
    """

    run_dir: Path
    store: Store
    fence: RunOwnershipWatch | None = None

    @staticmethod
    def open(
        run_dir: str | Path,
        url: str | None = None,
        *,
        fence: RunOwnershipWatch | None = None,
        say: Callable[[str], None] = lambda line: None,
        on_work: Callable[[], None] = lambda: None,
    ) -> RunStorage:
        """The storage of the run in `run_dir`, with checkpoints in it or at `url` (a job's
        checkpoint.url).

        `say` gets a line each time a slow store is tried again; `on_work` is called for each
        request or part of an upload that such a store has done. Raises CheckpointError for a URL
        that cannot be used.
        """
        directory = Path(run_dir)
        store = open_store_of_run(directory, url, say=say, on_work=on_work)
        return RunStorage(directory, store, fence)

    @property
    def fencing_token(self) -> FencingToken | None:
        """This job's claim on the run, with which it may commit; None without one."""
        if self.fence is None:
            return None
        return self.fence.token

    def is_lost(self, *, now: bool = False) -> bool:
        """True once another job has taken the run. Looks at once if `now`."""
        return self.fence is not None and self.fence.is_lost(now=now)
