"""A rank whose memory is refused: the run ends with exit 7 and says what would need less, or goes
on with less."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commands import TINY, events, loss_curve, run_all, survivors, write_text
from phalanx.observe.events import Note, RankFailed, RunStarted


def test_stop_or_recompute(tmp_path: Path) -> None:
    """Reference: a run that nothing happens to."""
    write_text(tmp_path / "text")
    job = (
        *TINY,
        "data.source=text",
        "parallel.ranks=2",
        "parallel.dp_replicate=2",
        "checkpoint.every_steps=5",
        "train.micro_batch_size=4",
    )
    fault = 'resilience.inject=["oom:rank=1,step=8,phase=forward"]'
    straight, stopped, went_on = run_all(
        [
            ["train", *job, "run.dir=straight"],
            ["train", *job, "run.dir=stopped", fault],
            ["train", *job, "run.dir=went on", fault, "resilience.on_oom=recompute"],
        ],
        tmp_path,
    )
    assert straight.code == 0, straight.err
    assert stopped.code == 7
    # A tensor under a limit of the kernel's, the words of torch's allocator, the plan beside it.
    assert re.search(
        r"rank 1 is out of memory at step 8 in forward \(asked for 1\.0 GiB by"
        r" torch\.ones\(TENSOR_BYTES // 4\) at oom\.py:\d+ in inject; [\d.]+ [KM]iB planned,"
        r" [\d.]+ MiB measured at the peak so far\)",
        stopped.err,
    ), stopped.err
    assert "less     train.micro_batch_size=2" in stopped.err
    (failed,) = [e.event for e in events(tmp_path / "stopped", RankFailed)]
    assert (failed.failed_rank, failed.cause) == (1, "out of memory")
    assert went_on.code == 0, went_on.err
    assert "train.recompute=full from here on" in went_on.out
    notes = [e.event.code for e in events(tmp_path / "went on", Note)]
    assert "memory_lessened" in notes
    assert [e.event.step for e in events(tmp_path / "went on", RunStarted)] == [0, 7]
    expected = loss_curve(tmp_path / "straight")
    assert loss_curve(tmp_path / "went on") == pytest.approx(expected, rel=1e-5)
    for name in ("stopped", "went on"):
        assert not survivors(tmp_path / name)
