"""A rank 0 of another launcher that is asked to stop again while it says how the run ended."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.checkpoint.ownership.fence import RunOwnershipClaim
from phalanx.core.errors import CheckpointError, ExitCode, PhalanxError
from phalanx.core.stop_signals import STOP_SIGNALS
from phalanx.run import external
from phalanx.run.conclude import RunEnd
from phalanx.run.stop_signals import StoppedBySignalError, raising_on_stop_signals
from phalanx.train.stop import StopSignalFlags


@pytest.fixture(autouse=True)
def _same_handlers_afterwards() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _run_rank(code: ExitCode | PhalanxError) -> ExitCode:
    if isinstance(code, PhalanxError):
        # Before the rank has handlers of its own.
        raise code
    StopSignalFlags().request_stop_on_signals()
    return code


def _end_as_rank_zero(
    code: ExitCode | PhalanxError, monkeypatch: pytest.MonkeyPatch, run_dir: Path
) -> RunEnd:
    """The end of a rank 0 that left with `code`, and gets SIGTERM while it reports that."""

    def report(run: Any, outcome: Any, *_: Any, **__: Any) -> RunEnd:
        os.kill(os.getpid(), signal.SIGTERM)
        return RunEnd(run_dir, outcome.status, outcome.exit_code, "", None)

    fence = SimpleNamespace(is_lost=lambda *, now: False)
    monkeypatch.setattr(external.RunOwnershipWatch, "for_rank", lambda *_: fence)
    monkeypatch.setattr(external, "observing_run", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(
        external, "open_supervisor_event_bus", lambda *_: SimpleNamespace(close=lambda: None)
    )
    monkeypatch.setattr(external, "require_run_still_owned", lambda _: None)
    monkeypatch.setattr(external, "emit_ngram_baselines", lambda *_: None)
    monkeypatch.setattr(external, "record_and_report_end_of_run", report)
    run: Any = SimpleNamespace(
        job=None, run_dir=run_dir, attempt=0, claim=RunOwnershipClaim(1), started_s=0.0
    )
    store: Any = SimpleNamespace(run_rank=lambda *_, **__: _run_rank(code))
    output: Any = SimpleNamespace(
        open_console=lambda _: SimpleNamespace(write=None, say=None), say=None
    )
    prepared: Any = None
    with raising_on_stop_signals():
        return external._train_and_conclude_as_rank_zero(prepared, run, store, None, output)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ExitCode.PREEMPTED, "preempted"),
        (ExitCode.INTERRUPTED, "interrupted"),
        (ExitCode.INTERNAL, "failed"),
    ],
)
def test_a_launcher_that_ends_the_ranks_of_a_run_that_has_ended_changes_nothing(
    code: ExitCode, status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torchrun sends SIGTERM to all ranks once one of them has left with a code that is not 0."""
    end = _end_as_rank_zero(code, monkeypatch, tmp_path)
    assert (end.status, end.exit_code) == (status, code)


def test_an_error_of_rank_zero_is_what_it_says_where_its_launcher_ends_it_for_another_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="no such module"):
        _end_as_rank_zero(CheckpointError("no such module"), monkeypatch, tmp_path)


def test_a_stop_while_a_finished_run_is_concluded_ends_that(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(StoppedBySignalError):
        _end_as_rank_zero(ExitCode.OK, monkeypatch, tmp_path)
