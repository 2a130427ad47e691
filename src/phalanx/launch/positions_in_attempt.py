"""Where the ranks of one attempt are, as each wrote last into its black box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.core.black_box_reader import BlackBoxVersionError, LastPosition
from phalanx.launch.open_boxes import read_position_of_rank
from phalanx.launch.paths import black_box_path


class PositionsInAttempt:
    """The last position of each rank that has written one in `attempt`. One that an earlier
    attempt wrote does not count. `pids`: the ranks' processes."""

    def __init__(self, run_dir: Path, pids: Sequence[int] = (), attempt: int = 0) -> None:
        self._run_dir, self._pids, self._attempt = run_dir, tuple(pids), attempt
        self._by_rank: dict[int, LastPosition] = {}

    @property
    def by_rank(self) -> Mapping[int, LastPosition]:
        """The newest position that was read of each rank; changes as more is read."""
        return self._by_rank

    @property
    def newest_progress_s(self) -> float:
        """Monotonic seconds at which a rank wrote something last; 0 if none has."""
        return max((position.last_progress_s for position in self._by_rank.values()), default=0.0)

    def read_all(self) -> None:
        """Read the position of each rank anew."""
        for rank in range(len(self._pids)):
            self._read_rank(rank)

    def read_step(self, rank: int) -> int:
        """Read all positions anew. Returns the step of `rank`, 0 before its first."""
        self.read_all()
        position = self._by_rank.get(rank)
        return 0 if position is None else max(position.step, 0)

    def check_all_in_steps(self) -> bool:
        """True if there are ranks, and all of them train.

        Positions are as old as the last read. A rank that was not known to train is read anew: it
        may be slow from its first steps on.
        """
        for rank in range(len(self._pids)):
            if not self._is_in_steps(rank):
                self._read_rank(rank)
                if not self._is_in_steps(rank):
                    return False
        return bool(self._pids)

    def _is_in_steps(self, rank: int) -> bool:
        position = self._by_rank.get(rank)
        return position is not None and position.step > 0

    def _read_rank(self, rank: int) -> None:
        path = black_box_path(self._run_dir, rank)
        try:
            position = read_position_of_rank(path, self._pids[rank], self._attempt)
        except BlackBoxVersionError:
            return
        if position is not None:
            self._by_rank[rank] = position
