"""A script that uses the library and is refused: one line from one rank and its exit code; other
errors as ever."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commands import environment
from phalanx.core import uncaught

OWN_LOOP = Path(__file__).parents[2] / "examples" / "own_loop.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
DEADLINE_S = 300


def run_python(*arguments: str, cwd: Path, **variables: str) -> tuple[int, list[str], str]:
    """(exit code, lines of phalanx on standard error, all of standard error)."""
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return (
        done.returncode,
        [line for line in done.stderr.splitlines() if line.startswith("phalanx: ")],
        done.stderr,
    )


@pytest.mark.long
def test_torchrun_shows_one_line_of_one_rank(tmp_path: Path) -> None:
    """Before the ranks know each other (the plan refuses), which is what most refusals are."""
    arguments = (str(OWN_LOOP), "parallel.dp_shard=3")
    code, lines, everything = run_python(*TORCHRUN, *arguments, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert code != 0
    assert len(lines) == 1, everything
    assert "own_loop.py:" in lines[0]
    assert f'File "{OWN_LOOP}"' not in everything, "no rank prints a traceback"
    assert "exitcode  : 3" in everything
    assert everything.count("dp_shard") >= 2, "torchrun's own summary has the line, too"


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        (
            "phalanx.load_job(None, ['train.stepz=3', 'optim.lrr=1'])",
            3,
            ["train.stepz", "optim.lrr"],
        ),
        (
            "with phalanx.open_mesh(phalanx.Layout(dp_replicate=2), device='cpu'): pass",
            6,
            ["needs 2 ranks"],
        ),
        pytest.param(
            "import torch\nplan = phalanx.make_plan(phalanx.load_job(None,"
            " ['parallel.ranks=1']))\nwith phalanx.open_mesh(plan.layout, device='cpu') as mesh:\n "
            "   model = phalanx.parallelize(torch.nn.Linear(2, 2), plan, mesh)\n   "
            " model.forward_backward([{'x': torch.ones(1, 2)}], lambda o, b: (o.sum(),"
            " torch.tensor(1)))",
            3,
            ["names nothing of a batch with x"],
            marks=pytest.mark.long,
        ),
    ],
)
def test_alone_it_is_a_line_and_the_exit_code(
    tmp_path: Path, script: str, code: int, words: list[str]
) -> None:
    (tmp_path / "mine.py").write_text(f"import phalanx\n{script}\n")
    found, lines, everything = run_python("mine.py", cwd=tmp_path)
    assert found == code, everything
    assert [word for word in words if not any(word in line for line in lines)] == []
    assert len(lines) == len(everything.splitlines()), everything
    assert "(mine.py:" in lines[-1]


RAISED = "phalanx.load_job\nraise ValueError('mine')"
RAISED_FROM = """
try:
    phalanx.load_job(None, ['a=1'])
except phalanx.PhalanxError as error:
    raise OSError('x') from error
"""
HOOKED = """
import sys
sys.excepthook = lambda *error: print('hooked', file=sys.stderr)
phalanx.load_job(None, ['a=1'])
"""


@pytest.mark.parametrize(
    ("script", "words"),
    [(RAISED, "ValueError: mine"), (RAISED_FROM, "OSError: x"), (HOOKED, "hooked")],
)
def test_other_errors_and_other_hooks_are_left_alone(
    tmp_path: Path, script: str, words: str
) -> None:
    (tmp_path / "mine.py").write_text(f"import phalanx\n{script}\n")
    code, lines, everything = run_python("mine.py", cwd=tmp_path)
    assert (code, lines) == (1, [])
    assert words in everything


def test_a_traceback_is_there_for_whoever_asks(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import phalanx\nphalanx.load_job(None, ['a=1'])\n")
    code, _, everything = run_python("mine.py", cwd=tmp_path, PHALANX_TRACEBACK="1")
    assert (code, "Traceback" in everything) == (1, True)


def test_one_of_the_ranks_speaks_whatever_the_clock_on_the_wall_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(uncaught.ERROR_FILE_VARIABLE, str(tmp_path / "attempt" / "0" / "error.json"))
    (tmp_path / "attempt").mkdir()
    assert [uncaught._is_first_rank_to_report("no") for _ in range(2)] == [True, False]
    (marker,) = (tmp_path / "attempt").iterdir()
    os.utime(
        marker, (time.time() - 86_400,) * 2
    )  # the clock was set forward since: these are the same ranks
    assert not uncaught._is_first_rank_to_report("no")
    clock, said_s = marker.read_text().split()
    marker.write_text(f"{clock} {float(said_s) - 2 * uncaught.STALE_REPORT_MARKER_S}")
    os.utime(marker, (time.time() + 86_400,) * 2)  # and backward: those were ranks before these
    assert [uncaught._is_first_rank_to_report("no") for _ in range(2)] == [True, False]
    marker.write_text(f"another-boot {said_s}")
    assert uncaught._is_first_rank_to_report("no")
    assert list((tmp_path / "attempt").iterdir()) == [marker]
