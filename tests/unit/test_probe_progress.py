"""How far the measuring of a user's module is: said by its process, shown on standard error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from phalanx.cli import _progress
from phalanx.job.module_probe import run_request_process
from phalanx.nn.probe import describe_module_for_planner

PROCESS = """
import json, sys, time
from phalanx.job.module_probe import make_progress_writer

request = json.loads(sys.argv[1])
tell = make_progress_writer(request)
tell(1, 4, "traces")
time.sleep(request["seconds"])
print("an answer")
"""
TRACE: dict[str, Any] = {
    "seq_len": 8,
    "precisions": ["fp32"],
    "objective": None,
    "loss_chunk_tokens": 0,
    "document_masks": False,
}


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 4), nn.Linear(4, 16)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.embed(tokens))


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, str]]:
    (tmp_path / "slow_process.py").write_text(PROCESS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return []


def test_a_process_says_how_far_it_is(heard: list[tuple[int, int, str]]) -> None:
    def tell(*progress: Any) -> None:
        heard.append(progress)

    assert run_request_process("slow_process", {"seconds": 1.5}, tell=tell) == "an answer\n"
    assert heard[0] in [(0, 1, "starts"), (1, 4, "traces")]
    assert heard[-1] == (1, 4, "traces")
    # Nobody asks: it writes nowhere.
    assert run_request_process("slow_process", {"seconds": 0}) == "an answer\n"


def test_a_process_that_says_how_far_it_is_may_not_take_longer_either(
    heard: list[tuple[int, int, str]],
) -> None:
    with pytest.raises(ChildProcessError, match=r"longer than 0\.7 s"):
        run_request_process("slow_process", {"seconds": 60}, 0.7, tell=lambda *_: None)


def test_each_traced_microbatch_is_told() -> None:
    heard = []
    kind = f"{__name__}:Tokens"
    describe_module_for_planner(kind, {}, TRACE, lambda *progress: heard.append(progress))
    assert heard == [
        (0, 5, "builds the module without weights"),
        (2, 5, "traces 1 sequence of 8 tokens in fp32"),
        (3, 5, "traces 2 sequences of 8 tokens in fp32"),
        (4, 5, "traces 1 sequence of 4 tokens in fp32"),
    ]


def test_a_pipe_gets_a_line_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(_progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with _progress.show_progress_of_module() as tell:
        for _ in range(11):
            tell(2, 5, "traces 1 sequence of 8 tokens in fp32")
    line = "model  40 %  traces 1 sequence of 8 tokens in fp32\n"
    assert capsys.readouterr().err == line * 2
