"""What is said when a signal asks a run to stop, and of how it ended."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from phalanx.checkpoint.folder import CheckpointFolder
from phalanx.checkpoint.stores import open_store_of_run
from phalanx.checkpoint.stores.local import LocalStore
from phalanx.launch.outcome import RunOutcome
from phalanx.launch.stop_request import describe_stop_on_signal
from phalanx.observe.bus import Bus
from phalanx.observe.events import RunFinished, StepFinished, wrap_event_in_envelope
from phalanx.observe.tail import read_recorded_events
from phalanx.observe.words import describe_event
from phalanx.run.conclude import emit_end_of_run, find_last_done_step


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGINT, "press Ctrl-C again"),
        (signal.SIGTERM, "SIGTERM: stopping after this step and saving, within 30 s"),
        (signal.SIGHUP, "SIGHUP (the terminal was closed): stopping"),
    ],
)
def test_a_stop_names_its_signal(number: signal.Signals, words: str) -> None:
    # As they come from the pipe of signals: numbers.
    assert words in describe_stop_on_signal(int(number), 30.0)


def test_a_stop_of_a_run_that_is_done_speaks_of_no_step() -> None:
    said = describe_stop_on_signal(int(signal.SIGTERM), 30.0, is_work_done=True)
    assert said == (
        "SIGTERM: all work is done; waiting for the processes of ranks to end, within 30 s"
    )


def test_the_last_step_of_a_run_is_the_last_one_done_and_not_the_last_one_saved(
    tmp_path: Path,
) -> None:
    store = open_store_of_run(tmp_path, None)
    assert find_last_done_step(tmp_path, store) == 0
    for attempt in range(2):
        bus = Bus(rank=0, attempt=attempt, run_dir=tmp_path)
        for step in range(11, 17 - attempt):
            bus.emit(StepFinished(step, 2.5, 32, 32 * step, 1e-3, 0.8, 0.1, 320.0, {}, 0.0, 0))
        bus.close()
    assert find_last_done_step(tmp_path, store) == 15


@pytest.mark.parametrize(
    ("status", "step", "words"),
    [
        ("finished", 30, "finished at step 30, in 9.0 s"),
        ("failed", 16, "failed after step 16, in 9.0 s"),
        ("failed", 0, "failed before the first step was done, in 9.0 s"),
    ],
)
def test_an_end_says_which_step_was_the_last(status: str, step: int, words: str) -> None:
    event = RunFinished(status, 0, step, 9.0)
    assert describe_event(wrap_event_in_envelope(event, rank=-1, attempt=0)) == words


class SlowStore(LocalStore):
    """Keeps when it had said last which checkpoints there are."""

    answered_s = 0.0

    def folders(self) -> list[CheckpointFolder]:
        time.sleep(0.1)
        found = super().folders()
        self.answered_s = time.monotonic()
        return found


def test_what_the_store_takes_to_say_the_last_step_belongs_to_the_run(tmp_path: Path) -> None:
    """The ledger charges a rank up to the moment of the event: a wall that ended before it made
    seconds look counted twice."""
    bus = Bus(rank=-1, attempt=0, run_dir=tmp_path)
    began_s = time.monotonic()
    store = SlowStore(tmp_path)
    emit_end_of_run(tmp_path, store, RunOutcome(0, "finished", "", 1), bus, began_s)
    bus.close()
    (end,) = read_recorded_events(tmp_path, RunFinished, rank=-1)
    assert isinstance(end.event, RunFinished)
    # An event has its seconds in round numbers.
    assert began_s < store.answered_s < began_s + end.event.wall_s + 0.05
