"""`train` on the files and code of a stranger: nothing of them moves the cursor of whoever looks
on."""

from __future__ import annotations

import json
import os
import pty
import re
import select
from pathlib import Path

import pytest

from commands import DEADLINE_S, TINY, environment, run, start, write_text
from hostile import EVIL, EVIL_NAME, moves_a_cursor

CODE = f"""
import sys, warnings
from torch import nn

EVIL = {EVIL!r}


class Hostile(nn.Module):
    def __init__(self, vocab_size=257, dim=16, fails=True):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, dim), nn.Linear(dim, vocab_size)
        self.calls, self.fails = 0, fails

    def forward(self, tokens):
        self.calls += 1
        print(EVIL)
        print(EVIL, file=sys.stderr)
        warnings.warn(EVIL)
        if self.fails and self.calls == 3:
            raise ValueError(EVIL)
        return self.head(self.embed(tokens))
"""
RICHS_OWN = re.compile(
    r"\x1b\[[0-9;?]*[A-Za-z]"
)  # colours, lines up, lines cleared, the cursor hidden


def words(text: Path, *more: str) -> list[str]:
    own = [
        "model.kind=hostile_model:Hostile",
        "parallel.ranks=1",
        "resilience.max_restarts=1",
        "train.steps=5",
    ]
    return [
        *(word for word in TINY if not word.startswith("model.")),
        *own,
        f"data.source={text}",
        *more,
    ]


@pytest.mark.long
def test_a_hostile_exception_and_hostile_names(tmp_path: Path) -> None:
    (tmp_path / "hostile_model.py").write_text(CODE)
    text = write_text(tmp_path / EVIL_NAME[:-1])
    done = run("train", *words(text, "run.dir=run"), cwd=tmp_path)
    assert done.code == 10, done.err
    assert "ValueError" in done.err
    for shown in (done.out, done.err):
        assert moves_a_cursor(shown) == []
    assert moves_a_cursor((tmp_path / "run" / "report.html").read_text(encoding="utf-8")) == []
    again = run("train", *words(text, "run.dir=json"), "--json", cwd=tmp_path)
    assert moves_a_cursor(again.out + again.err) == []
    assert json.loads(again.out)["schema"] == "phalanx.run/1"


@pytest.mark.long
def test_on_a_terminal(tmp_path: Path) -> None:
    """The bar moves the cursor, and nothing else does."""
    (tmp_path / "hostile_model.py").write_text(CODE)
    text = write_text(tmp_path / EVIL_NAME[:-1])
    ours, theirs = pty.openpty()
    process = start(
        "train",
        *words(text, "run.dir=run"),
        cwd=tmp_path,
        env=environment(TERM="xterm"),
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    while True:
        assert select.select([ours], [], [], DEADLINE_S)[0], shown
        try:
            shown += os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
    assert process.wait(DEADLINE_S) == 10
    os.close(ours)
    left = RICHS_OWN.sub("", shown.decode().replace("\r\n", "\n").replace("\r", ""))
    assert "ValueError" in left
    assert b"\x1b[2J" not in shown
    assert b"\x1b]" not in shown
    assert moves_a_cursor(left) == []
