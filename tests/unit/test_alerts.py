"""Alerts: what of a run gives one, and that it arrives, by a real HTTP server and a real command."""

from __future__ import annotations

import io
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commands import wait_until
from phalanx.core.errors import EnvironmentProblem
from phalanx.job.load import load_job
from phalanx.observe import events
from phalanx.observe.alerts import targets
from phalanx.observe.alerts.alert import Alert
from phalanx.observe.alerts.detector import MIN_INTERVAL_S, AlertDetector
from phalanx.observe.alerts.sender import MAX_WAITING_ALERTS, AlertSender
from phalanx.observe.alerts.targets import CommandTarget, WebhookTarget
from phalanx.observe.events import Envelope, Event, StepFinished, wrap_event_in_envelope
from phalanx.run.observer.process import Observer
from phalanx.run.observer.requirements import require_observer_can_start, resolve_webhook
from phalanx.run.observer.settings import ObserverSettings
from webhook_receiver import PATIENCE_S, WebhookReceiver, receiving_webhooks

ALERT = Alert("restart", "rank 1 failed", 1.7e9, 2, 7)


def find(detector: AlertDetector, event: Event, now_s: float = 0.0, **where: int) -> Alert | None:
    place = {"rank": 0, "attempt": 0} | where
    return detector.find_alert(Envelope(event, place["rank"], place["attempt"], 1.7e9), now_s)


def step(number: int, loss: float) -> StepFinished:
    return StepFinished(number, loss, 64, 64, 1e-3, math.nan, 0.1, 640.0, {}, 0.1, 2**30)


FAILED = events.RankFailed(1, 7, "forward", "signal", "killed by SIGKILL", 0.01)


def test_a_failure_is_told_with_what_came_of_it() -> None:
    detector = AlertDetector()
    assert find(detector, FAILED, rank=-1) is None
    restart = find(detector, events.RestartScheduled(1, 3, 5), rank=-1)
    assert restart is not None
    assert (restart.kind, restart.severity, restart.step) == ("restart", "warning", 5)
    assert "rank 1 failed at step 7 in forward: signal" in restart.text
    assert "restart 1 of at most 3, from step 5" in restart.text
    assert find(detector, FAILED, rank=-1) is None
    end = find(detector, events.RunFinished("failed", 10, 5, 60.0), rank=-1)
    assert end is not None
    assert (end.kind, end.severity) == ("run_failed", "critical")
    assert "killed by SIGKILL" in end.text
    assert "exit code 10" in end.text


def test_ranks_that_another_launcher_starts_again_are_told_and_a_resume_is_not() -> None:
    detector = AlertDetector(attempt_from=1)
    start = events.RunStarted("r", "d", 2, 0, 10, "cpu", {})
    assert find(detector, start) is None
    again = find(detector, replace(start, step=4), attempt=1)
    assert again is not None
    assert (again.kind, again.step) == ("restart", 4)
    assert again.text.startswith("its launcher has started it again")
    assert find(detector, events.Note(events.RESUMED), attempt=2) is None
    assert find(detector, replace(start, step=6), attempt=2) is None


@pytest.mark.parametrize(
    "said",
    [
        events.RolledBack(5, "loss_spike", "loss 9 at step 5", 4, -1, -1),
        events.LayoutChanged(4, 2, 4, "dp2 -> dp4", "a checkpoint is there"),
    ],
)
def test_an_attempt_that_the_supervisor_began_is_no_start_by_a_launcher(said: events.Event) -> None:
    detector = AlertDetector()
    start = events.RunStarted("r", "d", 2, 0, 10, "cpu", {})
    assert find(detector, start) is None
    find(detector, said, rank=-1)
    assert find(detector, replace(start, step=4), attempt=1) is None


def test_a_hang_that_the_supervisor_found_is_told_with_its_ranks_and_without_stacks() -> None:
    hang = events.HangFound("frozen", [3, 5], 7, "backward", "all_reduce", "stacks", 9.0, 4.0)
    alert = find(AlertDetector(), hang, rank=-1)
    assert alert is not None
    assert (alert.kind, alert.severity, alert.step, alert.rank) == ("hang", "critical", 7, 3)
    assert "frozen, ranks 3, 5" in alert.text
    assert "report" not in alert.facts
    assert alert.facts["culprits"] == [3, 5]


def test_a_straggler_is_told_once_a_minute() -> None:
    slow = events.RankSlow(2, 50, 40, 1.8, 0.1, "backward", 3.0, 1.0, 1.0)
    detector = AlertDetector()
    alert = find(detector, slow, rank=-1)
    assert alert is not None
    assert (alert.kind, alert.severity, alert.rank) == ("rank_slow", "warning", 2)
    assert "rank 2 is slow since step 40: 1.80 times as long as the others" in alert.text
    assert find(detector, slow, 1.0, rank=-1) is None
    assert find(detector, events.RankSlowEnded(2, 60, 40, 3.0), 2.0, rank=-1) is None


def test_what_all_ranks_raised_is_of_none_of_them() -> None:
    detector = AlertDetector()
    failed = replace(FAILED, failed_rank=-1, cause="exception", is_of_all_ranks=True)
    assert find(detector, failed, rank=-1) is None
    end = find(detector, events.RunFinished("failed", 8, 7, 60.0), rank=-1)
    assert end is not None
    assert "each rank failed at step 7 in forward: exception" in end.text


def test_going_back_is_told() -> None:
    spike = events.RolledBack(5, "loss_spike", "loss 9 at step 5", 4, -1, -1)
    alert = find(AlertDetector(), spike, rank=-1)
    assert alert is not None
    assert (alert.kind, alert.severity, alert.rank) == ("rolled_back", "warning", None)
    assert "step 5: loss 9 at step 5; going back to a checkpoint not after step 4" in alert.text
    corrupt = events.RolledBack(5, "corruption", "replicas differ", 4, -1, 6)
    alert = find(AlertDetector(), corrupt, rank=-1)
    assert alert is not None
    assert alert.rank == 6


@pytest.mark.parametrize("status", ["finished", "preempted", "interrupted"])
def test_an_ordinary_end_alerts_nobody(status: str) -> None:
    assert find(AlertDetector(), events.RunFinished(status, 0, 5, 60.0), rank=-1) is None


def test_what_may_come_with_every_step_is_told_once_a_minute_and_counted() -> None:
    detector = AlertDetector()
    assert find(detector, events.StepSkipped(1, "overflow", math.inf, 0, 8)) is None
    skipped = events.StepSkipped(2, "nonfinite_gradients", math.nan, 0, 8)
    first = find(detector, skipped, 0.0)
    assert first is not None
    assert first.facts["grad_norm"] is None, "NaN is no JSON"
    for number in range(5):
        assert find(detector, skipped, 1.0 + number) is None
    later = find(detector, skipped, MIN_INTERVAL_S + 1)
    assert later is not None
    assert later.num_repeated == 5
    failed = events.CheckpointFailed(3, "checkpoints/step-3", "no space left", True)
    assert find(detector, failed, MIN_INTERVAL_S + 1) is not None, "another kind does not wait"


def test_what_was_held_back_is_told_when_its_minute_is_over_and_at_the_end() -> None:
    detector = AlertDetector()
    for number in range(4):
        skipped = events.StepSkipped(number, "nonfinite_gradients", math.nan, 0, 8)
        assert (find(detector, skipped, float(number)) is None) == (number > 0)
    assert detector.take_held_alerts(MIN_INTERVAL_S - 1) == []
    (late,) = detector.take_held_alerts(MIN_INTERVAL_S + 1)
    # The first was sent on its own, this one is the last of three.
    assert (late.kind, late.step, late.num_repeated) == ("step_skipped", 3, 2)
    assert detector.take_held_alerts(3 * MIN_INTERVAL_S) == []
    # It is a message like any other: the next one waits for its minute.
    again = events.StepSkipped(9, "nonfinite_gradients", math.nan, 0, 8)
    assert find(detector, again, MIN_INTERVAL_S + 2) is None
    (last,) = detector.take_held_alerts()
    assert (last.step, last.num_repeated) == (9, 0)


def test_another_check_or_another_rank_is_no_repetition() -> None:
    detector = AlertDetector()
    failed = events.InvariantChecked(4, "memory_unchanged", False, num_failed=1)
    other = replace(failed, name="replicas_equal")
    assert find(detector, failed) is not None
    assert find(detector, other) is not None
    on_rank_1 = find(detector, failed, rank=1)
    assert on_rank_1 is not None
    assert on_rank_1.rank == 1
    assert find(detector, failed, 1.0, rank=1) is None
    slow = events.RankSlow(2, 50, 40, 1.8, 0.1, "backward", 3.0, 1.0, 1.0)
    assert find(detector, slow, rank=-1) is not None
    assert find(detector, replace(slow, slow_rank=3), rank=-1) is not None


def test_attempts_of_before_alert_nobody_but_say_what_is_ordinary() -> None:
    detector = AlertDetector(attempt_from=1)
    assert find(detector, events.StepSkipped(1, "nonfinite_gradients", math.nan, 0, 8)) is None
    assert find(detector, events.RunFinished("failed", 10, 5, 60.0), rank=-1) is None
    for number in range(40):
        assert find(detector, step(number, 2.0 + number % 3 / 100)) is None
    spike = find(detector, step(41, 9.0), attempt=1)
    assert spike is not None
    assert (spike.kind, spike.step) == ("loss_spike", 41)
    assert spike.facts["median_loss"] == pytest.approx(2.01)
    json.dumps(dict(spike.facts), allow_nan=False)


def test_the_end_of_a_run_tells_what_was_held_back(
    receiver: WebhookReceiver, tmp_path: Path
) -> None:
    """The observer's process, in this one: its input has ended."""
    events_dir = tmp_path / "events"
    events_dir.mkdir()
    said: list[Event] = [
        events.StepSkipped(number, "nonfinite_gradients", math.nan, 0, 8) for number in (1, 2, 3)
    ]
    said.append(events.RunFinished("finished", 0, 3, 60.0))
    with open(events_dir / "rank-0000-attempt-00.jsonl", "w") as file:
        for number, event in enumerate(said):
            envelope = wrap_event_in_envelope(event, rank=0, attempt=0, seq=number)
            file.write(envelope.to_line() + "\n")
    settings = ObserverSettings(tmp_path, 0, "127.0.0.1", None, receiver.url, (), 300.0)
    observer = Observer(settings, io.StringIO())
    read, write = os.pipe()
    os.close(write)
    observer.observe_until_end_of_input(read)
    observer.close()
    os.close(read)
    skipped = [body for body in receiver.bodies if body["kind"] == "step_skipped"]
    assert [(body["step"], body["num_repeated"]) for body in skipped] == [(1, 0), (3, 1)]


def test_a_failed_check_is_critical() -> None:
    failed = events.InvariantChecked(4, "replicas_equal", False, num_failed=1, ranks=[1])
    alert = find(AlertDetector(), failed)
    assert alert is not None
    assert (alert.kind, alert.severity) == ("invariant_failed", "critical")


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with receiving_webhooks() as opened:
        yield opened


def send(run_dir: Path, target: Any, *alerts: Alert, said: list[str], retry_s: float = 0.0) -> None:
    sender = AlertSender(run_dir, [target], said.append, [retry_s] * 3)
    sender.start()
    for alert in alerts:
        sender.queue_alert(alert)
    sender.close(PATIENCE_S)


def test_a_webhook_gets_the_message(receiver: WebhookReceiver, tmp_path: Path) -> None:
    said: list[str] = []
    send(tmp_path / "train-1", WebhookTarget(receiver.url), ALERT, said=said)
    (body,) = receiver.bodies
    assert body["schema"] == "phalanx.alert/1"
    assert body["text"] == "train-1: rank 1 failed"
    assert (body["kind"], body["run"], body["attempt"], body["step"]) == (
        "restart",
        "train-1",
        2,
        7,
    )
    assert body["host"]
    assert said == []


def test_a_webhook_that_fails_is_tried_again_a_few_times(
    receiver: WebhookReceiver, tmp_path: Path
) -> None:
    said: list[str] = []
    receiver.statuses = [503, 429, 500]
    send(tmp_path, WebhookTarget(receiver.url), ALERT, said=said)
    assert (len(receiver.bodies), said) == (4, [])
    receiver.statuses = [503] * 9
    send(tmp_path, WebhookTarget(receiver.url), ALERT, said=said)
    assert len(receiver.bodies) == 8
    assert said == ["the alert restart was not sent to webhook 127.0.0.1: it answers 503"]


@pytest.mark.parametrize("status", [302, 400, 404])
def test_a_webhook_that_refuses_is_not_asked_again(
    status: int, receiver: WebhookReceiver, tmp_path: Path
) -> None:
    said: list[str] = []
    receiver.statuses = [status] * 9
    send(tmp_path, WebhookTarget(receiver.url), ALERT, said=said)
    assert len(receiver.bodies) == 1
    assert said == [f"the alert restart was not sent to webhook 127.0.0.1: it answers {status}"]


def test_nobody_at_home_is_said_without_the_url(tmp_path: Path, receiver: WebhookReceiver) -> None:
    said: list[str] = []
    receiver.server.shutdown()
    receiver.server.server_close()
    send(tmp_path, WebhookTarget(receiver.url + "/T0/B0/secret"), ALERT, said=said)
    (line,) = said
    assert "webhook 127.0.0.1: no answer" in line
    assert "secret" not in line


def test_whoever_hands_over_an_alert_does_not_wait(
    receiver: WebhookReceiver, tmp_path: Path
) -> None:
    receiver.released.clear()
    said: list[str] = []
    sender = AlertSender(tmp_path, [WebhookTarget(receiver.url)], said.append)
    sender.start()
    began = time.monotonic()
    for _ in range(MAX_WAITING_ALERTS + 2):
        sender.queue_alert(ALERT)
    sender.close(0.2)
    assert time.monotonic() - began < PATIENCE_S / 2, "the receiver holds its answer longer"
    assert "left out" in said[0]
    assert "were not sent by the end of the run" in said[-1]


KEEP = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_bytes(sys.stdin.buffer.read())"


def test_a_command_gets_the_message_on_standard_input(tmp_path: Path) -> None:
    said: list[str] = []
    kept = tmp_path / "kept.json"
    target = CommandTarget([sys.executable, "-c", KEEP, str(kept)])
    send(tmp_path, target, ALERT, said=said)
    assert json.loads(kept.read_bytes())["kind"] == "restart"
    assert said == []


def test_a_child_that_a_command_leaves_behind_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And what the command prints is kept: descriptors 1 and 2 of an observer are its log."""
    monkeypatch.setattr(targets, "COMMAND_TIMEOUT_S", 5.0)
    said: list[str] = []
    command = ["sh", "-c", "sleep 8 & echo sent; echo warned >&2; exit 0"]
    send(tmp_path, CommandTarget(command), ALERT, said=said)
    assert said == []
    assert capfd.readouterr() == ("sent\n", "warned\n")


def test_a_command_that_fails_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    target = CommandTarget([sys.executable, "-c", "raise SystemExit(3)"])
    send(tmp_path, target, ALERT, said=said)
    (line,) = said
    assert line.startswith(
        f"the alert restart was not sent to {target.name}: it ended with exit code 3 "
    )
    send(tmp_path, CommandTarget(["/no/such/program"]), ALERT, said=said)
    assert said[1].endswith("program: cannot be run: No such file or directory")


def test_no_secret_of_the_environment_is_sent(
    receiver: WebhookReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "s3cret-of-the-user")
    alert = Alert("restart", "got s3cret-of-the-user", 1.7e9, facts={"x": ["s3cret-of-the-user"]})
    send(tmp_path, WebhookTarget(receiver.url), alert, said=[])
    assert "s3cret-of-the-user" not in json.dumps(receiver.bodies)
    assert receiver.bodies[0]["facts"] == {"x": ["***"]}


def test_one_target_that_hangs_does_not_keep_the_other_waiting_for_ever(
    receiver: WebhookReceiver, tmp_path: Path
) -> None:
    said: list[str] = []
    failing = CommandTarget([sys.executable, "-c", "raise SystemExit(1)"])
    sender = AlertSender(tmp_path, [failing, WebhookTarget(receiver.url)], said.append, [0.0])
    sender.start()
    sender.queue_alert(ALERT)
    wait_until(lambda: receiver.bodies)
    sender.close(PATIENCE_S)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("ftp://host/x", "is no http:// or https:// URL"),
        ("hooks.example/x", "is no http:// or https:// URL"),
        ("$not a name", "is no name of a variable"),
        ("https://hooks.example/services/T0/B0/abcdef0123456789abcdef", "has a token in its path"),
        (
            "https://chat.example/bot1102:abcdef0123456789abcdef/send?to=1",
            "has a token in its path",
        ),
        ("https://chat.example/bot1102%3Aabcdef0123456789abcdef", "has a token in its path"),
        ("https://user:correct-horse@hooks.example/", "password"),
    ],
    # Not the values: pytest puts them into the environment, whose secrets a job must not hold.
    ids=["scheme", "no scheme", "no variable", "token", "bot", "quoted", "password"],
)
def test_a_webhook_that_a_job_must_not_carry_is_refused(value: str, words: str) -> None:
    from phalanx.core.errors import JobError

    with pytest.raises(JobError) as caught:
        load_job(None, [f"observe.alert_webhook={json.dumps(value)}"])
    assert words in str(caught.value)
    assert "abcdef0123456789abcdef" not in str(caught.value)


def test_a_webhook_may_come_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "https://hooks.example/services/T0/B0/abcdef0123456789abcdef"
    assert resolve_webhook("$MY_WEBHOOK", {"MY_WEBHOOK": url}) == url
    monkeypatch.delenv("MY_WEBHOOK", raising=False)
    job = load_job(None, ['observe.alert_webhook="$MY_WEBHOOK"'])
    with pytest.raises(EnvironmentProblem, match="MY_WEBHOOK is not set"):
        require_observer_can_start(job)
    monkeypatch.setenv("MY_WEBHOOK", "abcdef0123456789abcdef")
    with pytest.raises(EnvironmentProblem, match="is no http") as caught:
        require_observer_can_start(job)
    assert "abcdef" not in str(caught.value)


def test_a_program_that_is_not_there_is_refused_before_anything_starts() -> None:
    job = load_job(None, ['observe.alert_command=["no-such-program-at-all"]'])
    with pytest.raises(EnvironmentProblem, match="no program 'no-such-program-at-all'"):
        require_observer_can_start(job)
