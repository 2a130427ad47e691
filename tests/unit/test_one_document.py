"""`--json` prints one document, and nothing else, however a command ends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phalanx.cli._app import run_command_line
from phalanx.cli._json import print_errors_as_json
from phalanx.cli._launched import print_ended_ranks
from phalanx.core.errors import UsageError
from phalanx.run.trained.launch import RanksEndedEarlyError


def test_an_error_that_leaves_two_verbs_is_one_document(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(UsageError), print_errors_as_json(True), print_errors_as_json(True):
        raise UsageError("no")
    assert json.loads(capsys.readouterr().out)["what"] == "no"


def test_ranks_that_ended_early_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    error = RanksEndedEarlyError(1, "Traceback\nValueError: 3")
    assert print_ended_ranks(error, as_json=False) == 1
    assert capsys.readouterr().out == ""
    assert print_ended_ranks(error, as_json=True) == 1
    out, err = capsys.readouterr()
    body = json.loads(out)
    assert (body["schema"], body["exit_code"]) == ("phalanx.error/1", 1)
    assert body["why"] == err.rstrip("\n") == "Traceback\nValueError: 3"


def test_words_of_a_stop_are_on_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("phalanx.data.train_tokenizer.train_tokenizer", stop)
    words = ["data", "tokenizer", "x.txt", "--vocab-size=300", "--out=x.json", "--json"]
    assert run_command_line(words) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert "stopped: no tokenizer was written" in err
