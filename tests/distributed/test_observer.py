"""A real job with its observer: what a real Prometheus says of it, and who hears of its failures."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from commands import (
    TINY,
    Done,
    environment,
    events,
    finish,
    start,
    wait_until,
    watching,
    write_text,
)
from phalanx.core.black_box_reader import read_last_position
from phalanx.core.errors import UsageError
from phalanx.job.load import load_job
from phalanx.launch.paths import black_box_path
from phalanx.observe.bus import Bus
from phalanx.observe.events import CheckpointSaved, EvalFinished, Note, RankSlow, StepFinished
from phalanx.report.prometheus.dashboard_panels import DASHBOARD_ROWS
from phalanx.report.prometheus.rules import ALERT_RULES_PATH
from phalanx.run.observer.process import METRICS_TARGET_FILE
from phalanx.run.observer.start import observing_run
from prometheus_server import MISSING, PROGRAM, PrometheusServer, running_prometheus
from webhook_receiver import WebhookReceiver, receiving_webhooks

pytest.importorskip("prometheus_client")

HALT = "import os, signal\ndef stop():\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
HANG_ALERT_S = 2.5
KEEP = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + '\\n')"
NUM_STEPS, HALTED_AT, KILLED_AT, SAVED_EACH = 160, 20, 100, 80
# By panel, the legends of queries for what this run has not: experts, stages of a pipeline, fp16, metrics of its own, a
# failed check, a slow rank, a sink that lost events, as many steps in one attempt.
OF_OTHER_RUNS = {
    ("Experts", "{{run}} busiest / mean"),
    ("Experts", "{{run}} dropped"),
    ("Pipeline bubble", "{{run}} {{source}}"),
    ("Loss scale and own metrics", "{{run}} loss scale"),
    ("Loss scale and own metrics", "{{run}} {{metric}}"),
    ("Failed checks", "{{run}} {{invariant}}"),
    ("Ranks found slow", "{{run}} rank {{rank}}"),
    ("What observes", "{{run}} not in {{sink}}"),
    ("Steps get slower", "{{run}}"),
    ("Memory that grows", "{{run}} rank {{rank}}"),
}


@dataclass(frozen=True)
class ObservedRun:
    """A run of two ranks, one of which stood still for a while and was killed later."""

    run_dir: Path
    done: Done
    receiver: WebhookReceiver
    kept_by_command: list[dict[str, object]]
    prometheus: PrometheusServer | None

    @property
    def has_slow_rank(self) -> bool:
        """On a busy machine a rank may get less of a processor than the other."""
        return bool(events(self.run_dir, RankSlow))

    def steps(self, rank: int) -> list[StepFinished]:
        return [
            envelope.event
            for envelope in events(self.run_dir, StepFinished)
            if envelope.rank == rank and isinstance(envelope.event, StepFinished)
        ]


def has_scraped_twice(server: PrometheusServer) -> bool:
    training = server.samples('sum_over_time(phalanx_run_state{state="training"}[1h])')
    return any(count >= 2 for _, count in training)


def has_stored_the_end(server: PrometheusServer) -> bool:
    times = server.times('phalanx_run_state{state="finished"}')
    ended = server.samples('phalanx_run_state{state="finished"} == 1', times[-1])
    return bool(ended)


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObservedRun]:
    folder = tmp_path_factory.mktemp("observed")
    write_text(folder / "text")
    (folder / "halt.py").write_text(HALT)
    run_dir, kept = folder / "run", folder / "kept.jsonl"
    job = [
        *TINY,
        "data.source=text",
        "parallel.ranks=2",
        f"train.steps={NUM_STEPS}",
        f"checkpoint.every_steps={SAVED_EACH}",
        # Saved before the kill, however busy the disk is.
        "checkpoint.asynchronous=false",
        "eval.tokens=512",
        "eval.every_steps=40",
        "resilience.inject="
        f'["halt:stop:rank=1,step={HALTED_AT},phase=backward",'
        f' "kill:rank=1,step={KILLED_AT},phase=backward"]',
        # From the checkpoint: some steps are to be done again.
        "resilience.keep_ranks=false",
        # The observer, which has what others leave of a processor, is sooner than the watch.
        "resilience.hang_s=100",
        "run.dir=run",
        "observe.metrics_port=0",
        'observe.alert_webhook="$TEST_WEBHOOK"',
        f"observe.hang_alert_s={HANG_ALERT_S}",
        f"observe.alert_command={json.dumps([sys.executable, '-c', KEEP, str(kept)])}",
    ]
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(receiving_webhooks())
        prometheus = None
        if PROGRAM is not None:
            target = run_dir / METRICS_TARGET_FILE
            prometheus = stack.enter_context(
                running_prometheus(folder / "prometheus", target, ALERT_RULES_PATH)
            )
        env = environment(TEST_WEBHOOK=receiver.url)
        process = start("train", *job, cwd=folder, env=env)
        wait_until(lambda: any("SIGSTOP" in b["text"] for b in receiver.bodies))
        if prometheus is not None:
            # It finds its target late on a slow machine, where the other steps last less than a scrape's interval.
            wait_until(lambda: has_scraped_twice(prometheus))
        position = read_last_position(black_box_path(run_dir, 1))
        assert position is not None
        assert position.header is not None
        os.kill(position.header.pid, signal.SIGCONT)
        done = finish(process)
        assert done.code == 0, done.err
        if prometheus is not None:
            # The end was served before the run ended, and is stored a moment later.
            wait_until(lambda: has_stored_the_end(prometheus))
        lines = [json.loads(line) for line in kept.read_text().splitlines()]
        yield ObservedRun(run_dir, done, receiver, lines, prometheus)


@pytest.mark.skipif(PROGRAM is None, reason=MISSING)
def test_prometheus_has_what_the_ranks_recorded(observed: ObservedRun) -> None:
    server = observed.prometheus
    assert server is not None
    # The end of a run waits until it is scraped.
    at_s = server.times('phalanx_run_state{state="finished"}')[-1]

    def value(query: str) -> float:
        ((_, number),) = server.samples(query, at_s)
        return number

    assert value('phalanx_run_state{run="run",state="finished"}') == 1
    steps = observed.steps(rank=0)
    assert len(steps) > NUM_STEPS, "some were done again"
    assert value("phalanx_steps_total") == len(steps)
    assert value("phalanx_steps_redone_total") == len(steps) - NUM_STEPS
    assert value("phalanx_step") == NUM_STEPS
    assert value("phalanx_target_steps") == NUM_STEPS
    assert value("phalanx_tokens_total") == sum(step.num_targets for step in steps)
    assert value("phalanx_loss") == steps[-1].loss
    assert value('phalanx_restarts_total{cause="signal"}') == 1
    assert value("sum(phalanx_restarts_total)") == 1
    for rank in (0, 1):
        own = observed.steps(rank)
        waited_s = sum(step.waiting_s for step in own)
        assert waited_s > 0
        assert value(f'phalanx_wait_seconds_total{{rank="{rank}"}}') == pytest.approx(waited_s)
        forward_s = sum(step.phases_s["forward"] for step in own)
        series = f'phalanx_phase_seconds_total{{rank="{rank}",phase="forward"}}'
        assert value(series) == pytest.approx(forward_s)
    assert value("phalanx_step_seconds_count") == len(steps)
    assert value("phalanx_step_seconds_sum") == pytest.approx(sum(step.step_s for step in steps))
    saved = events(observed.run_dir, CheckpointSaved)
    assert value('phalanx_checkpoints_total{result="saved"}') == len(saved)
    evaluations = events(observed.run_dir, EvalFinished)
    assert value("phalanx_evaluations_total") == len(evaluations)
    assert 0 < value("phalanx_goodput_ratio") < 1
    # In seconds of the calendar, however long ago that was.
    assert value("time() - max(phalanx_last_progress_timestamp_seconds)") < 3600
    ((info, _),) = server.samples("phalanx_run_info", at_s)
    assert (info["ranks"], info["model"], info["layout"]) == ("2", "decoder", "dp_replicate=2")


@pytest.mark.skipif(PROGRAM is None, reason=MISSING)
def test_it_was_scraped_while_it_trained_and_over_the_restart(observed: ObservedRun) -> None:
    server = observed.prometheus
    assert server is not None
    times = server.times('phalanx_run_state{state="training"}')
    states = [server.samples("phalanx_run_state == 1", at_s)[0][0]["state"] for at_s in times]
    assert states.count("training") >= 2
    counts = [server.samples("phalanx_steps_total", at_s)[0][1] for at_s in times]
    assert counts == sorted(counts), "a counter never falls"


@pytest.mark.skipif(PROGRAM is None, reason=MISSING)
def test_every_panel_of_the_dashboard_has_data(observed: ObservedRun) -> None:
    server = observed.prometheus
    assert server is not None
    times = server.times('phalanx_run_state{state="training"}')
    empty = set()
    for row in DASHBOARD_ROWS:
        for panel in row.panels:
            for query in panel.queries:
                expression = query.expression.replace("$run", ".*")
                expression = expression.replace("$__rate_interval", "1m")
                found = [server.samples(expression, at_s) for at_s in times]
                has_data = any(math.isfinite(value) for samples in found for _, value in samples)
                if not has_data and not panel.needs_gpus:
                    empty.add((panel.title, query.legend))
    expected = set(OF_OTHER_RUNS)
    if observed.has_slow_rank:
        expected.remove(("Ranks found slow", "{{run}} rank {{rank}}"))
    assert empty == expected


@pytest.mark.skipif(PROGRAM is None, reason=MISSING)
def test_prometheus_evaluates_every_rule(observed: ObservedRun) -> None:
    server = observed.prometheus
    assert server is not None
    rules = [rule for group in server.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == ALERT_RULES_PATH.read_text().count("- alert:")
    assert {rule["health"] for rule in rules} == {"ok"}


def test_webhook_and_command_hear_of_the_restart(observed: ObservedRun) -> None:
    restarts = [body for body in observed.receiver.bodies if body["kind"] == "restart"]
    (body,) = restarts
    assert observed.kept_by_command == observed.receiver.bodies
    assert f"rank 1 failed at step {KILLED_AT} in backward: signal" in body["text"]
    assert body["facts"]["from_step"] == body["step"] == SAVED_EACH
    assert body["run_dir"] == str(observed.run_dir)
    expected = {"hang", "restart"}
    if observed.has_slow_rank:
        expected.add("rank_slow")
    assert set(observed.receiver.kinds()) == expected, "nothing else went wrong"


def test_a_rank_that_stands_still_is_alerted_with_its_collective(observed: ObservedRun) -> None:
    stopped = [body for body in observed.receiver.bodies if "SIGSTOP" in body["text"]]
    (body,) = stopped
    assert (body["kind"], body["severity"]) == ("hang", "critical")
    assert "rank 1 is stopped by a signal (such as SIGSTOP or SIGTSTP)" in body["text"]
    assert "all_reduce" in body["text"]


def test_a_webhook_of_a_variable_is_in_no_file_of_the_run(observed: ObservedRun) -> None:
    assert any(b"$TEST_WEBHOOK" in path.read_bytes() for path in observed.run_dir.glob("*.json"))
    for path in observed.run_dir.rglob("*"):
        if path.is_file():
            assert observed.receiver.url.encode() not in path.read_bytes(), path


def test_the_person_who_trains_is_told_where_the_metrics_are(observed: ObservedRun) -> None:
    assert "metrics for Prometheus at http://127.0.0.1:" in observed.done.out
    assert not (observed.run_dir / METRICS_TARGET_FILE).exists(), "nobody serves any more"


@pytest.fixture
def live_run(tmp_path: Path) -> Path:
    """A run directory that says nothing of an end."""
    golden = Path(__file__).parents[1] / "golden" / "2026-11-23" / "run"
    shutil.copytree(golden, tmp_path / "run")
    path = tmp_path / "run" / "events" / "supervisor.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "run_finished" not in line))
    return tmp_path / "run"


def test_a_run_that_is_killed_or_refused_is_told(
    live_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving_webhooks() as receiver:
        monkeypatch.setenv("TEST_WEBHOOK", receiver.url)
        job = load_job(None, ['observe.alert_webhook="$TEST_WEBHOOK"'])
        with contextlib.suppress(UsageError):
            with observing_run(job, live_run, 0, Bus(rank=-1), print):
                raise UsageError("the third reason")
        assert [body["kind"] for body in receiver.bodies][-1:] == ["run_failed"]
        assert "the third reason" in receiver.bodies[-1]["text"]
        receiver.bodies.clear()
        holder = os.fork()
        if holder == 0:
            with observing_run(job, live_run, 9, Bus(rank=-1), print):
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(holder, 0)
        wait_until(lambda: receiver.bodies)
        assert receiver.kinds() == ["run_failed"]
        assert "was killed while the run was training" in receiver.bodies[0]["text"]


def list_observers() -> list[psutil.Process]:
    """Observers that this process has started, and no helper of the tests."""
    children = psutil.Process().children()
    return [child for child in children if "phalanx.run.observer.process" in child.cmdline()]


def test_a_process_of_its_own_whose_death_is_said(live_run: Path) -> None:
    told: list[str] = []

    class Heard(Bus):
        def emit(self, event: object) -> None:  # type: ignore[override]
            assert isinstance(event, Note)
            told.append(event.facts["why"])

    job = load_job(None, ["observe.metrics_port=0"])
    with observing_run(job, live_run, 0, Heard(rank=-1), print):
        wait_until(lambda: told)
        (child,) = list_observers()
        assert child.nice() > 0
        (target,) = json.loads((live_run / METRICS_TARGET_FILE).read_text())[0]["targets"]
        assert told == [f"metrics for Prometheus at http://{target}/metrics"]
        child.kill()
        wait_until(lambda: len(told) == 2)
        assert "has ended (exit code -9), and with it metrics and alerts" in told[1]
    with observing_run(load_job(None, []), live_run, 0, Heard(rank=-1), print):
        assert list_observers() == []


def test_the_command_serves_any_run_until_it_is_interrupted() -> None:
    golden = Path(__file__).parents[1] / "golden" / "2026-11-23" / "run"
    with watching(start("metrics", str(golden), cwd=golden)) as served:
        url = served.wait_for("metrics of run at").split()[4].rstrip(";")
        server_address = url.removesuffix("/metrics")

        def answers() -> bool:
            # Also where it has not answered in time.
            with contextlib.suppress(OSError):
                with urllib.request.urlopen(url, timeout=5) as answer:
                    return b'phalanx_step{run="run"} 4.0' in answer.read()
            return False

        wait_until(answers)
        assert server_address.startswith("http://127.0.0.1:")
        served.process.send_signal(signal.SIGINT)
        assert served.finish().code == 0
