"""Ranks that stay stopped while others leave are told from one that is stopped for a moment."""

from __future__ import annotations

import pytest

from phalanx.launch import stopped_ranks
from phalanx.launch.stopped_ranks import StoppedRanks


def test_ranks_that_stay_stopped_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = {10: "S", 11: "T", 12: "T"}
    monkeypatch.setattr(stopped_ranks, "read_state_letter", letters.__getitem__)
    pids = {rank: 10 + rank for rank in range(3)}
    ranks = StoppedRanks()
    assert ranks.find(pids, 100.0) == ()
    # Stopped for a moment, and later again.
    letters[12] = "R"
    assert ranks.find(pids, 100.5) == ()
    letters[12] = "T"
    assert ranks.find(pids, 100.9) == ()
    assert ranks.find(pids, 101.1) == (1,)
    del pids[1]
    assert ranks.find(pids, 102.0) == (2,)
