"""A run that continues on a CPU of another kind says that its steps may round otherwise.

The kind is that of real kernels: torch and oneDNN are told to use those of an older instruction
set.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import TINY, environment, events, run, write_text
from phalanx.checkpoint.manifest import list_checkpoint_paths_of_run, read_manifest
from phalanx.observe.events import Note


@pytest.mark.long
def test_the_run_says_once_that_the_checkpoint_is_of_another_kind_of_cpu(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    job = (*TINY, "data.source=text", "run.dir=run", "parallel.ranks=1", "checkpoint.every_steps=5")
    assert run("train", *job, "train.steps=5", cwd=tmp_path).code == 0
    same = run("train", "--resume", "run", "train.steps=10", cwd=tmp_path)
    assert (same.code, "another cpu" in same.out) == (0, False)

    [_, before] = [
        read_manifest(path).facts["cpu_kind"]
        for path in list_checkpoint_paths_of_run(tmp_path / "run")
    ]
    older = environment(ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41")
    done = run("train", "--resume", "run", "train.steps=15", cwd=tmp_path, env=older)
    assert done.code == 0, done.err
    after = read_manifest(list_checkpoint_paths_of_run(tmp_path / "run")[-1]).facts["cpu_kind"]
    assert after != before
    [line] = [line for line in done.out.splitlines() if "another cpu" in line]
    assert before in line
    assert after in line
    notes = [
        e.event
        for e in events(tmp_path / "run", Note)
        if isinstance(e.event, Note) and e.event.code == "another_cpu"
    ]
    assert len(notes) == 1
