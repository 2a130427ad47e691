"""A soak of real runs: each of many faults strikes and is answered, and what the run leaves is that of
one that nothing happened to.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import PHALANX, TINY, environment, survivors, write_text
from phalanx.drills.soak.drive import SoakProgress, SoakRequest, run_soak
from phalanx.drills.soak.mix import choose_mix

FAULTS = ("kill", "crash", "flip_gradient", "kill_in_save", "kill_two")


@pytest.fixture(autouse=True)
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


@pytest.mark.long
def test_a_soak_ends_as_the_undisturbed_run(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    keys = [key for key in TINY if not key.startswith("train.steps")]
    keys += [f"data.source={tmp_path / 'text'}", "parallel.ranks=2"]
    told: list[SoakProgress] = []
    result = run_soak(
        SoakRequest(
            None,
            tuple(keys),
            choose_mix(FAULTS, fault_every_s=4.0),
            minutes=0.4,
            fault_every_s=4.0,
            seed=1,
            out=tmp_path / "out",
            command=PHALANX,
        ),
        on_progress=told.append,
    )
    ok = {check.name: check.ok for check in result.checks}
    # Not of the seconds that a busy machine took: each of the others, and every class and rank.
    del ok["goodput"], ok["faults within bars"]
    assert all(ok.values()), result.checks
    assert {each.planned.fault for each in result.answered} == set(FAULTS)
    for each in result.answered:
        missed = {check.name for check in each.checks if not check.ok}
        assert missed <= {"detected after", "training again after"}, (each.planned, each.measured)
    assert result.goodput.ceiling is not None
    assert (result.run_dir / "report.html").exists()
    assert {each.activity for each in told} == {
        "probe",
        "undisturbed run",
        "disturbed run",
        "judging",
    }
    assert told[-1].num_done == told[-1].num_steps == 2 * result.plan.shape.num_steps
    assert max(each.num_struck for each in told) == len(result.answered)
    assert not survivors(tmp_path / "out")
