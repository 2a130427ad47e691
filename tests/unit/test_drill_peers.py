"""The lines by which the drill of peers times torchrun, as torchrun and its ranks wrote them."""

from __future__ import annotations

import math

import pytest

import drill_peers
from drill_torchft import FailureLines

# A freeze of rank 1, torch 2.13: seconds after the strike, and what was read then.
FROZEN = [
    (5.03, "[rank0]: Traceback (most recent call last):"),
    (5.03, "[rank0]: RuntimeError: [gloo/unbound_buffer.cc:78] Timed out waiting 5000ms for recv"),
    (7.92, "W1127 api.py:1028] Sending process 29019 closing signal SIGTERM"),
    (37.92, "W1127 api.py:1047] Unable to shutdown process 29019 via 15, forcefully exiting via 9"),
    (38.29, "E1127 api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 29018) of binary: python"),
]


def test_the_line_of_a_rank_is_told_from_that_of_its_launcher() -> None:
    lines = FailureLines()
    lines.read("Setting OMP_NUM_THREADS environment variable for each process to be 1", 0.0)
    assert math.isnan(lines.first_s)
    for at_s, line in FROZEN:
        lines.read(line, at_s)
    assert (lines.first_s, lines.acted_s) == (5.03, 7.92)


def test_both_are_columns_and_what_was_not_measured_is_a_dash(
    capsys: pytest.CaptureFixture[str],
) -> None:
    common = {"fault": "freeze", "named": 1, "trained_again_s": 9.0, "all_again_s": 9.0}
    common |= {"lost_steps": 0, "exit_code": 0}
    drill_peers.print_table(
        [
            common | {"side": "phalanx", "first_line_s": None, "acted_s": 4.4},
            common | {"side": "torchrun", "first_line_s": 5.03, "acted_s": 7.92},
        ]
    )
    head, _, phalanx, torchrun = capsys.readouterr().out.splitlines()
    names = [cell.strip() for cell in head.split("|")]
    column = names.index("first line after")
    assert names[column + 1] == "launcher acts after"
    assert phalanx.split("|")[column].strip() == "–"
    assert phalanx.split("|")[column + 1].strip().startswith("4.40 s")
    assert torchrun.split("|")[column].strip().startswith("5.03 s")
    assert torchrun.split("|")[column + 1].strip().startswith("7.92 s")
