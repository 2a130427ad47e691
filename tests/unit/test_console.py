"""What a person sees: plain lines away from a terminal, a live bar on one."""

from __future__ import annotations

import io
import math
import re
import subprocess
import sys
from dataclasses import fields
from typing import TextIO, cast

import pytest

from hostile import EVIL, moves_a_cursor
from phalanx.core.printable import printable
from phalanx.core.terminal import FilteredTextStream
from phalanx.job.schema import Job
from phalanx.observe import events
from phalanx.observe.console import Console, open_console
from phalanx.observe.events import EVENT_CLASS_OF_KIND, Envelope, Event, StepFinished
from phalanx.observe.units import choose_metric_units_of_job
from phalanx.observe.words import describe_event

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def step(
    number: int, *, rank: int = 0, attempt: int = 0, step_s: float = 0.1, loss: float = 2.5
) -> Envelope:
    event = StepFinished(
        number,
        loss,
        4096,
        number * 4096,
        2.9e-3,
        0.81,
        step_s,
        4096 / step_s,
        {"forward": 0.05},
        0.01,
        2**29,
    )
    return Envelope(event, rank, attempt, 100.0 + number)


def tell(event: Event, rank: int = 0) -> Envelope:
    return Envelope(event, rank, 0, 1.0)


def plain(total_steps: int = 100, log_every: int = 10) -> tuple[io.StringIO, Console]:
    stream = io.StringIO()
    return stream, open_console(stream, total_steps=total_steps, log_every=log_every)


def test_letters_of_any_script_stay_and_what_moves_a_cursor_goes() -> None:
    kept = "\u0646\u06cc\u0645\u200c\u0641 \U0001f468\u200d\U0001f467 \u5168\u89d2\u3000a\u00a0b"
    assert printable(kept) == kept
    assert printable("a\x1b[31mb\tc\u202ed\u2066e\x9bf") == "a [31mb c d e f"


def test_a_bar_behind_the_filter_of_standard_output_moves_and_what_it_tells_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What every verb does: standard output is filtered before a console is opened on it."""
    monkeypatch.setenv("A_TOKEN", "s3cr3t-s3cr3t")
    stream = io.StringIO()
    filtered = cast(TextIO, FilteredTextStream(stream))
    console = open_console(filtered, total_steps=10, log_every=1, is_terminal=True)
    console.say(f"a rank says {EVIL} and s3cr3t-s3cr3t")
    console.write(step(3))
    console.close()
    shown = stream.getvalue()
    said, _, bar = shown.partition("\x1b[?25l")
    assert "a rank says" in said
    assert moves_a_cursor(said) == []
    assert "3/10" in bar[: bar.index("\x1b[?25h")]
    assert "s3cr3t" not in shown


def test_one_line_each_log_every_steps_and_at_both_ends() -> None:
    stream, console = plain(total_steps=25)
    for number in range(1, 26):
        console.write(step(number))
        console.tick()
    console.close()
    shown = [line.split()[1] for line in stream.getvalue().splitlines()]
    assert shown == ["1/25", "10/25", "20/25", "25/25"]


def test_the_numbers_of_a_line_are_those_of_the_step() -> None:
    stream, console = plain()
    for number in (8, 9, 10):  # the first two of an attempt do not count for its pace
        console.write(step(number, loss=2.43124, step_s=0.1 if number == 10 else 5.0))
    wanted = (
        "step 10/100  loss 2.4312  lr 2.9e-03  norm 0.81  41.0k tok/s  100 ms/step  eta 9.0 s  mem"
        " 512 MiB\n"
    )
    assert stream.getvalue().splitlines(keepends=True)[-1] == wanted


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_run_of_which_nobody_knows_how_long_it_is_has_no_eta_until_it_says_so(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever watches it may find neither its job nor how it began."""
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    console = open_console(stream, total_steps=0, log_every=1, is_terminal=is_terminal)
    for number in range(1, 6):
        console.write(step(number, step_s=0.5))
    console.close()
    assert re.search(r"step 5\b", stream.getvalue())
    assert "eta not known" in stream.getvalue()
    assert "/0" not in stream.getvalue()
    stream, console = plain(total_steps=0, log_every=1)
    console.write(tell(events.RunStarted("train", "d", 1, 0, 7, "cpu", {})))
    console.write(step(1))
    assert "step 1/7" in stream.getvalue()


def test_before_there_is_a_pace_a_line_says_so_and_a_restart_begins_anew() -> None:
    stream, console = plain(total_steps=5, log_every=1)
    for number in (1, 2, 3):
        console.write(step(number, step_s=9.0 if number < 3 else 0.5))
    for number in (3, 4, 5):
        console.write(step(number, attempt=1, step_s=7.0 if number < 5 else 0.25))
    first, second, steady, again, still, last = stream.getvalue().splitlines()
    for line in (first, second, again, still):
        assert "s for this step, warming up  eta not known yet" in line
        assert "tok/s" not in line
    assert "500 ms/step  eta 1.0 s" in steady
    assert "250 ms/step  eta 0 s" in last


@pytest.mark.parametrize("total", [1, 2])
def test_a_run_that_never_warms_up_ends_all_the_same(total: int) -> None:
    stream, console = plain(total_steps=total)
    for number in range(1, total + 1):
        console.write(step(number))
    assert "100 ms for this step, warming up  eta 0 s" in stream.getvalue().splitlines()[-1]


def test_speed_forgets_the_slow_first_steps() -> None:
    stream, console = plain(log_every=40)
    for number in range(1, 41):
        console.write(step(number, step_s=5.0 if number <= 3 else 0.1))
    assert "100 ms/step" in stream.getvalue().splitlines()[-1]


def test_memory_is_that_of_the_largest_rank() -> None:
    stream, console = plain()
    fat = StepFinished(9, 2.5, 1, 1, 1e-3, 1.0, 0.1, 10.0, {}, 0.0, 3 * 2**30)
    console.write(Envelope(fat, 1, 0, 1.0))
    console.write(step(10))
    assert len(stream.getvalue().splitlines()) == 1
    assert "mem 3 GiB" in stream.getvalue()


def test_steps_done_again_after_a_restart_are_shown_as_they_come() -> None:
    stream, console = plain(log_every=10)
    for number in range(1, 16):
        console.write(step(number))
    console.write(tell(events.RankFailed(1, 15, "backward", "signal", "SIGKILL", 0.3), rank=-1))
    console.write(tell(events.RestartScheduled(1, 3, 10), rank=-1))
    for number in range(11, 21):
        console.write(step(number, attempt=1))
    lines = stream.getvalue().splitlines()
    assert not any("failed" in line for line in lines)  # the supervisor says why, in its own words
    assert [line.split()[1] for line in lines if line.startswith("step")] == [
        "1/100",
        "10/100",
        "11/100",
        "20/100",
    ]
    assert "eta 8.0 s" in lines[-1]


def test_not_a_number_is_shown_and_breaks_nothing() -> None:
    stream, console = plain()
    console.write(step(1, loss=math.nan, step_s=math.nan))
    console.write(tell(events.StepSkipped(1, "nonfinite_gradients", math.nan, 0, 32)))
    assert "loss nan" in stream.getvalue()
    assert "skipped step 1: nonfinite gradients (gradient norm not finite)" in stream.getvalue()


def evaluated(
    step: int, loss: float, best_step: int, best_loss: float, **sources: float
) -> Envelope:
    return tell(events.EvalFinished(step, loss, 5000, 0.5, sources, best_step, best_loss))


def test_an_evaluation_stands_beside_the_best_so_far() -> None:
    stream, console = plain()
    console.write(evaluated(300, 1.4, 300, 1.4))
    console.write(evaluated(400, 1.42, 300, 1.4, code=1.3, prose=1.7))
    console.write(tell(events.EvalFinished(500, math.nan, 0, 0.1)))
    assert stream.getvalue().splitlines() == [
        "held-out loss 1.4000 nats/token at step 300, the best so far (5.00K tokens, 500 ms)",
        (
            "held-out loss 1.4200 nats/token at step 400, best 1.4000 at step 300 (5.00K tokens,"
            " 500 ms): code 1.3000, prose 1.7000"
        ),
        "held-out loss nan nats/token at step 500 (0 tokens, 100 ms)",
    ]


def test_the_bar_shows_the_last_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    console = open_console(stream, total_steps=500, log_every=10, is_terminal=True)
    console.write(evaluated(400, 1.42, 300, 1.4))
    console.write(step(401))
    console.close()
    assert "eval 1.4200 (best 1.4000 at 300)" in stream.getvalue()


def test_what_a_user_measures_is_not_called_nats_or_tokens() -> None:
    stream = io.StringIO()
    console = open_console(
        stream,
        total_steps=100,
        log_every=1,
        units=choose_metric_units_of_job({"model": {"objective": "own:loss"}}),
    )
    for number in (1, 2, 3):
        console.write(step(number))
    console.write(evaluated(3, 0.25, 3, 0.25))
    assert "nats" not in stream.getvalue()
    assert "41.0k targets/s" in stream.getvalue()
    assert (
        "held-out loss 0.2500 at step 3, the best so far (5.00K targets, 500 ms)"
        in stream.getvalue()
    )


@pytest.mark.parametrize(
    ("job", "is_text"),
    [
        ({}, True),
        (Job().to_json(), True),
        ({"model": None, "data": [1]}, True),
        ({"data": {"source": "texts/*.txt"}}, True),
        ({"data": {"source": "C:/texts"}}, True),
        ({"data": {"source": "own.data:factory"}}, False),
        ({"model": {"objective": "own:loss"}, "data": {"source": "texts"}}, False),
        ({"model": {"kind": "vit"}}, False),
        ({"model": {"preset": "small-vit"}}, False),
        ({"model": {"preset": "llama3-8b", "kind": "decoder"}}, True),
    ],
)
def test_units(job: dict[str, object], is_text: bool) -> None:
    assert (choose_metric_units_of_job(job).loss == "nats/token") == is_text


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            events.CheckpointSaved(8, "checkpoints/step-8", 3 * 2**20, 2.0, 0.1, 2**20),
            (
                "saved checkpoint of step 8: checkpoints/step-8 (3.0 MiB, 1.0 MiB of it new, 2.0 s,"
                " training stood still for 100 ms)"
            ),
        ),
        (
            events.CheckpointSaved(8, "checkpoints/step-8", 2**20, 2.0, 2.0, 2**20),
            "saved checkpoint of step 8: checkpoints/step-8 (1.0 MiB, 2.0 s)",
        ),
        (
            events.CheckpointPostponed(20, 15, 3.2),
            "checkpoint after step 20 waits: that of step 15 is still being written after 3.2 s",
        ),
        (
            events.CheckpointIntervalChosen(11, 600.0, 2.0, 9.0, 90000.0),
            (
                "a checkpoint each 10 m 00 s: a save stops training for 2.0 s and takes 9.0 s; a"
                " failure each 25 h 00 m, as the job says"
            ),
        ),
        (events.CheckpointsRemoved([5, 10]), "removed old checkpoints step-5, step-10"),
    ],
)
def test_what_is_said_of_saves(event: events.Event, line: str) -> None:
    assert describe_event(tell(event)) == line


@pytest.mark.parametrize(
    ("own", "peers", "compared"),
    [
        (0.5, 0.97, "; it runs 50% of the time that it wants to, the others 97%"),
        (0.001, 0.9, "; it runs 0% of the time that it wants to, the others 90%"),
        # All stand still: two equal numbers would compare nothing.
        (0.001, 0.004, "; it and the others run less than 2% of the time that they want to"),
        (0.009, 0.0149, "; it and the others run less than 2% of the time that they want to"),
        # It is not for want of a processor that it is slow.
        (0.968, 0.971, ""),
        (1.0, 0.97, ""),
    ],
)
def test_shares_of_a_processor_are_compared_only_where_they_differ(
    own: float, peers: float, compared: str
) -> None:
    slow = events.RankSlow(1, 9, 8, 2.0, 0.0, "", 0.0, own, peers, "the kernel says why")
    line = describe_event(tell(slow, rank=-1))
    assert line == f"rank 1 is slow since step 8: the kernel says why{compared}"


def test_ranks_that_start_again_without_any_state_say_so() -> None:
    event = events.RunStarted("run", "", 2, 0, 30, "cpu", {"dp_shard": 2}, startup_s=1.0)
    first, again = (describe_event(Envelope(event, 0, attempt, 1.0)) for attempt in (0, 1))
    assert first == "run: 2 ranks on cpu, dp_shard=2, started in 1.0 s"
    assert again == f"{first}, from the beginning"


def test_a_replaced_loader_worker_and_a_warning_are_told() -> None:
    stream, console = plain()
    console.write(tell(events.LoaderWorkerReplaced(7, "it was silent for 60 s"), rank=0))
    assert stream.getvalue() == "a loader worker was replaced at step 7: it was silent for 60 s\n"


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("kind", sorted(EVENT_CLASS_OF_KIND))
def test_no_event_can_move_the_cursor(kind: str, is_terminal: bool) -> None:
    """Text of a run is untrusted: it reaches the terminal without control characters, whatever
    the event."""
    evil = "\x1b[2J\r\x07[red]x\u009b1m\nnext"
    values = {
        "str": evil,
        "int": 1,
        "float": math.nan,
        "dict[str, int]": {evil: 2},
        "dict[str, float]": {evil: 1.0},
    }
    values |= {
        "dict[str, Any]": {"why": evil},
        "list[int]": [1],
        "list[str]": [evil],
        "bool": False,
    }
    values |= {"dict[str, list[int]]": {evil: [1]}}
    values |= {"list[list[float]]": [[1.0]], "list[list[list[Any]]]": [[[evil, 0.0, 1.0]]]}
    event = EVENT_CLASS_OF_KIND[kind](
        **{item.name: values[str(item.type)] for item in fields(EVENT_CLASS_OF_KIND[kind])}
    )
    line = describe_event(tell(event))
    assert line is None or not CONTROL.search(line)
    stream = io.StringIO()
    console = open_console(stream, total_steps=10, log_every=1, is_terminal=is_terminal)
    console.write(tell(event))
    console.say("a rank said " + evil)
    console.close()
    assert "\x1b[2J" not in stream.getvalue()
    assert "\x07" not in stream.getvalue()
    if not is_terminal:
        assert not CONTROL.search(stream.getvalue())


def test_live_bar_shows_the_state_and_events_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = io.StringIO()
    console = open_console(stream, total_steps=100, log_every=10, is_terminal=True)
    console.write(step(40))
    console.write(tell(events.CheckpointSaved(40, "checkpoints/step-40", 2**20, 0.1)))
    console.write(tell(events.RestartScheduled(1, 3, 40), rank=-1))
    console.write(step(41, attempt=1))
    console.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "step  41/100" in text
    assert "restarts 1" in text
    assert "saved checkpoint of step 40: checkpoints/step-40 (1.0 MiB, 100 ms)" in text
    assert "\x1b[?25h" in stream.getvalue(), "the cursor is given back"


def test_live_bar_honours_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    console = open_console(stream, total_steps=100, log_every=10, is_terminal=True)
    console.write(step(40))
    console.write(tell(events.StepSkipped(41, "no_targets", 0.0, 0, 32)))
    console.close()
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m|\x1b\[[0-9;]*38;", stream.getvalue())


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = io.StringIO()
    console = open_console(stream, total_steps=10, log_every=1, is_terminal=True)
    console.write(step(1))
    console.close()
    assert stream.getvalue().startswith("step 1/10  loss")


class BrokenStream(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_broken_pipe_silences_the_console(is_terminal: bool) -> None:
    console = open_console(BrokenStream(), total_steps=10, log_every=1, is_terminal=is_terminal)
    for number in (1, 2):
        console.write(step(number))
        console.say("x")
        console.tick()
    console.close()
    console.close()


def test_an_ascii_stream_gets_question_marks() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    open_console(stream, total_steps=10, log_every=1).say("naïve")
    assert raw.getvalue() == b"na?ve\n"


def test_rich_is_imported_only_for_a_terminal() -> None:
    code = (
        "import io, sys; from phalanx.observe.console import open_console;"
        "open_console(io.StringIO(), total_steps=1, log_every=1);"
        "sys.exit('rich' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_save_that_fails_again_is_told_in_few_words() -> None:
    stream = io.StringIO()
    console = open_console(stream, total_steps=100, log_every=100, is_terminal=False)

    def fail(number: int, why: str, goes_on: bool = True) -> None:
        reason = f"/run/step-{number}: failed while writing (rank {number % 2}: {why})"
        console.write(tell(events.CheckpointFailed(number, f"/run/step-{number}", reason, goes_on)))

    fail(10, "No space left on device")
    fail(20, "No space left on device")
    fail(30, "Read-only file system")
    console.write(tell(events.CheckpointSaved(40, "checkpoints/step-40", 2**20, 0.1)))
    fail(50, "Read-only file system")
    fail(60, "Read-only file system", goes_on=False)
    goes_on = "; training goes on, and tries again later"
    assert [line for line in stream.getvalue().splitlines() if "failed" in line] == [
        (
            "checkpoint of step 10 failed: /run/step-10: failed while writing (rank 0: No space"
            f" left on device){goes_on}"
        ),
        f"checkpoint of step 20 failed for the same reason{goes_on}",
        (
            "checkpoint of step 30 failed: /run/step-30: failed while writing (rank 0: Read-only"
            f" file system){goes_on}"
        ),
        (
            "checkpoint of step 50 failed: /run/step-50: failed while writing (rank 0: Read-only"
            f" file system){goes_on}"
        ),
        "checkpoint of step 60 failed for the same reason",
    ]


def test_a_long_warning_is_shown_to_its_end() -> None:
    stream = io.StringIO()
    console = open_console(stream, total_steps=100, log_every=100, is_terminal=False)
    text = "a loss that compares samples, " * 20 + "and what to do"
    console.write(tell(events.Note("warning", {"why": text})))
    assert stream.getvalue() == f"warning: {text}\n"


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_no_fact_of_the_live_bar_is_cut_off(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = io.StringIO()
    console = open_console(stream, total_steps=100, log_every=10, is_terminal=True)
    console.write(evaluated(300, 1.4, 300, 1.4))
    console.write(step(40))
    console.write(tell(events.RestartScheduled(1, 3, 40), rank=-1))
    console.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text)]
    assert "…" not in text
    at = max(
        number for number, line in enumerate(lines) if line.startswith("step  40/100")
    )  # what stays on the screen
    assert max(map(len, lines[at:])) <= columns
    last = " ".join(lines[at:])
    for fact in ("loss ", "eval 1.4000", "lr ", "norm ", "mem ", "restarts 1"):
        assert fact in last, (fact, lines)
