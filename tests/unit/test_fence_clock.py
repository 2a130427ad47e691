"""A fence looks again as soon as a machine that was suspended goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from phalanx.checkpoint.ownership import fence as fence_module
from phalanx.checkpoint.ownership.fence import RunOwnershipWatch
from phalanx.checkpoint.ownership.fencing_token import FencingToken


@pytest.mark.skipif(
    not hasattr(time, "CLOCK_BOOTTIME"), reason="the kernel has no clock that counts a suspension"
)
def test_time_in_which_the_machine_was_suspended_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Suspended:
        """The monotonic clock stands still while the other one goes on."""

        now = 0.0

        def monotonic(self) -> float:
            return 0.0

        def clock_gettime(self, clock: int) -> float:
            return self.now if clock == time.CLOCK_BOOTTIME else 0.0

    clock = Suspended()
    monkeypatch.setattr(fence_module, "time", clock)
    monkeypatch.setattr(fence_module, "read_fencing_token_number", lambda run_dir: 2)
    fence = RunOwnershipWatch(tmp_path, None, FencingToken(tmp_path, 1))
    assert not fence.is_lost()
    clock.now = 60.0
    assert fence.is_lost()
