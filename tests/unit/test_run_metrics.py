"""The metrics of a run: what events add up to, and that it is what Prometheus reads."""

from __future__ import annotations

import http.client
import json
import math
import random
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from commands import DEADLINE_S
from phalanx.cli._app import run_command_line
from phalanx.core.errors import EnvironmentProblem, ExitCode
from phalanx.job.load import load_job
from phalanx.launch import hang_kinds, rank_failure
from phalanx.observe import events
from phalanx.observe.events import Envelope, Event, StepFinished
from phalanx.observe.loss_spikes import MIN_STEPS, LossSpikeDetector
from phalanx.report import facts
from phalanx.report.prometheus import exposition
from phalanx.report.prometheus.dashboard import build_dashboard
from phalanx.report.prometheus.dashboard_panels import DASHBOARD_ROWS
from phalanx.report.prometheus.definitions import (
    HANG_KINDS,
    METRICS,
    RESTART_CAUSES,
    RUN_STATES,
)
from phalanx.report.prometheus.exposition import build_metrics_json, render_metrics
from phalanx.report.prometheus.http_server import MetricsServer, open_metrics_server
from phalanx.report.prometheus.run_metrics import RunMetrics
from phalanx.report.prometheus.values import MetricSnapshot
from phalanx.run.observer.follower import MetricsPublisher, RunFollower
from phalanx.train.invariants import RunInvariants

prometheus_parser = pytest.importorskip("prometheus_client.parser")
openmetrics_parser = pytest.importorskip("prometheus_client.openmetrics.parser")

GOLDEN = Path(__file__).parents[1] / "golden" / "2026-11-23" / "run"
STEP = StepFinished(
    1, 2.0, 64, 64, 1e-3, 0.5, 1.0, 64.0, {"forward": 0.5, "collective": 0.2}, 0.3, 2**30
)


class Story:
    """Events of a run, a second apart."""

    def __init__(self) -> None:
        self.metrics = RunMetrics("run", {"model": {"preset": "small"}})
        self.now_s = 1000.0
        self.attempt = 0

    def tell(self, *told: Event, rank: int = 0) -> None:
        for event in told:
            self.now_s += 1.0
            self.metrics.add_event(
                Envelope(event, rank, self.attempt, 1.7e9 + self.now_s, 0, self.now_s)
            )

    def start(self, step: int = 0, rank: int = 0) -> None:
        self.tell(events.RunStarted("r", "d", 2, step, 10, "cpu", {"tp": 2, "pp": 1}))

    def steps(self, first: int, last: int, **changes: Any) -> None:
        for number in range(first, last + 1):
            self.tell(replace(STEP, step=number, **changes))

    def value(self, name: str, *labels: str) -> float | None:
        return self.metrics.build_snapshot().find_value(name, *labels)


def test_names_follow_the_conventions_of_prometheus() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"phalanx_[a-z_]+", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        for unit in ("milliseconds", "_ms", "kilobytes", "_gib", "_mib", "percent", "_count"):
            assert unit not in metric.name
        assert metric.meaning.endswith(".")
        assert "step" not in metric.labels, "a series for each step would be without end"
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_steps_done_again_count_as_work_and_not_as_progress() -> None:
    story = Story()
    story.start()
    story.steps(1, 5)
    story.tell(events.RankFailed(1, 6, "forward", "signal", "killed by SIGKILL", 0.1), rank=-1)
    story.tell(events.RestartScheduled(1, 3, 3), rank=-1)
    assert story.value("phalanx_run_state", "restarting") == 1
    story.attempt = 1
    story.start(step=3)
    assert story.value("phalanx_step") == 3
    story.steps(4, 8)
    assert story.value("phalanx_steps_total") == 10
    assert story.value("phalanx_steps_redone_total") == 2
    assert story.value("phalanx_step") == 8
    assert story.value("phalanx_restarts_total", "signal") == 1
    assert story.value("phalanx_restarts_total", "launcher") == 0
    # 8 steps stand, of a second each.
    story.tell(events.RunFinished("finished", 0, 8, 13.0), rank=-1)
    lifetime_s = story.now_s - 1001.0
    assert story.value("phalanx_goodput_ratio") == pytest.approx(8 / lifetime_s)


def test_without_the_events_of_rank_0_nothing_is_said_that_it_alone_tells() -> None:
    story = Story()
    story.tell(replace(STEP, step=1), rank=1)
    story.tell(events.RunFinished("finished", 0, 1, 2.0), rank=-1)
    snapshot = story.metrics.build_snapshot()
    for name in ("phalanx_steps_total", "phalanx_tokens_total", "phalanx_goodput_ratio"):
        assert snapshot.find_value(name) is None, name
    assert snapshot.find_value("phalanx_checkpoints_total", "saved") is None
    assert "phalanx_step_seconds_count" not in render_metrics(snapshot)
    by_name = {metric["name"]: metric for metric in build_metrics_json(snapshot)["metrics"]}
    assert by_name["phalanx_step_seconds"]["samples"] == []
    assert snapshot.find_value("phalanx_self_seconds_total", "1") == pytest.approx(0.8)
    assert snapshot.find_value("phalanx_run_state", "finished") == 1


def test_ranks_that_do_steps_train_though_rank_0_has_not_said_so() -> None:
    story = Story()
    story.tell(events.RanksStarted([1, 2], 0.5), rank=-1)
    assert story.value("phalanx_run_state", "starting") == 1
    story.tell(replace(STEP, step=1), rank=1)
    assert story.value("phalanx_run_state", "training") == 1
    story.attempt = 1
    story.tell(events.RanksStarted([1, 3], 0.5), rank=-1)
    story.attempt = 0
    story.tell(replace(STEP, step=2), rank=1)  # A file of before that is read late.
    assert story.value("phalanx_run_state", "starting") == 1


def test_a_count_that_lacks_an_attempt_of_rank_0_is_not_told() -> None:
    story = Story()
    story.tell(replace(STEP, step=1), rank=1)
    story.attempt = 1
    story.start(step=1)
    story.steps(2, 3)
    assert story.value("phalanx_steps_total") is None
    story.attempt = 0
    story.start()  # A file that comes late.
    story.steps(1, 1)
    assert story.value("phalanx_steps_total") == 3


def test_goodput_leaves_out_what_is_no_training() -> None:
    story = Story()
    story.start()
    story.steps(1, 4, phases_s={"forward": 0.25, "data": 0.5, "ckpt_stage": 0.25})
    story.tell(events.RunFinished("finished", 0, 4, 5.0), rank=-1)
    assert story.value("phalanx_goodput_ratio") == pytest.approx(4 * 0.25 / 5.0)


def test_goodput_leaves_out_steps_that_were_not_applied() -> None:
    story = Story()
    story.start()
    for number in range(1, 5):
        if number > 1:
            story.tell(events.StepSkipped(number, "nonfinite_gradients", 1.0, 0, 1))
        story.steps(number, number)
    story.tell(events.RunFinished("finished", 0, 4, 5.0), rank=-1)
    lifetime_s = story.now_s - 1001.0
    assert story.value("phalanx_goodput_ratio") == pytest.approx(1 / lifetime_s)


def test_ranks_that_another_launcher_starts_again_are_a_restart_and_a_resume_is_none() -> None:
    story = Story()
    story.start()
    story.steps(1, 2)
    story.attempt = 1
    story.start(step=2)
    assert story.value("phalanx_restarts_total", "launcher") == 1
    story.tell(events.RunFinished("preempted", 75, 2, 9.0), rank=-1)
    assert story.value("phalanx_run_state", "preempted") == 1
    assert not story.metrics.is_live
    story.attempt = 2
    story.tell(events.Note(events.RESUMED), rank=-1)
    assert story.metrics.is_live
    story.start(step=2)
    assert story.value("phalanx_restarts_total", "launcher") == 1
    assert story.value("phalanx_resumes_total") == 1
    assert sum(story.value("phalanx_run_state", state) or 0 for state in RUN_STATES) == 1


def test_going_back_is_no_restart_by_a_launcher() -> None:
    story = Story()
    story.start()
    story.steps(1, 5)
    story.tell(events.RolledBack(5, "loss_spike", "loss 9 at step 5", 4, -1, -1), rank=-1)
    story.attempt = 1
    story.start(step=4)
    assert story.value("phalanx_restarts_total", "launcher") == 0
    assert story.value("phalanx_run_state", "training") == 1


def test_hangs_stragglers_and_going_back_are_counted() -> None:
    story = Story()
    story.start()
    assert story.value("phalanx_hangs_total", "frozen") == 0
    assert story.value("phalanx_roll_backs_total", "corruption") == 0
    assert story.value("phalanx_rank_slow", "1") is None
    hang = events.HangFound("frozen", [1], 7, "backward", "all_reduce", "stacks", 9.0, 4.0)
    story.tell(hang, rank=-1)
    story.tell(events.RankSlow(1, 50, 40, 1.8, 0.1, "backward", 3.0, 1.0, 1.0), rank=-1)
    assert story.value("phalanx_rank_slow", "1") == 1
    story.tell(events.RankSlowEnded(1, 60, 40, 3.0), rank=-1)
    story.tell(events.RolledBack(5, "loss_spike", "loss 9 at step 5", 4, -1, -1), rank=-1)
    assert story.value("phalanx_rank_slow", "1") == 0
    assert story.value("phalanx_hangs_total", "frozen") == 1
    assert story.value("phalanx_roll_backs_total", "loss_spike") == 1


def test_the_kinds_of_hangs_are_those_that_the_supervisor_finds() -> None:
    assert HANG_KINDS == hang_kinds.HANG_KINDS


def test_each_cause_of_a_restart_and_reason_of_a_skip_is_there_from_the_start() -> None:
    """Prometheus sees no increase from nothing to one."""
    assert {rank_failure.OUT_OF_MEMORY, rank_failure.LOST_CONNECTION} <= {*RESTART_CAUSES}
    story = Story()
    for cause in RESTART_CAUSES:
        assert story.value("phalanx_restarts_total", cause) == 0
    # `describe_skipped_steps` has words for each reason.
    for reason in facts._TEXT_OF_SKIP_REASON:
        assert story.value("phalanx_skipped_steps_total", reason) == 0


def test_a_rank_that_is_gone_has_no_gauges_and_keeps_its_counters() -> None:
    """A straggler that the run went on without would else be one for ever."""
    story = Story()
    story.start()
    story.tell(STEP)
    story.tell(replace(STEP, step_s=9.0), rank=1)
    assert story.value("phalanx_step_self_seconds", "1") == pytest.approx(8.8)
    story.tell(events.LayoutChanged(1, 2, 1, "one rank", "rank 1 is gone"), rank=-1)
    story.attempt = 1
    story.tell(events.RunStarted("r", "d", 1, 1, 10, "cpu", {}))
    # Files are read one after another: a last word of before may come late.
    story.attempt = 0
    story.tell(replace(STEP, step_s=9.0), rank=1)
    assert story.value("phalanx_step_self_seconds", "1") is None
    assert story.value("phalanx_last_progress_timestamp_seconds", "1") is None
    assert story.value("phalanx_step_self_seconds", "0") is not None
    assert story.value("phalanx_self_seconds_total", "1") == pytest.approx(2 * 8.8)


def test_seconds_of_ranks_are_told_apart() -> None:
    story = Story()
    story.start()
    story.tell(STEP)
    story.tell(replace(STEP, phases_s={"forward": 0.1, "pipeline": 0.6}, cpu_s=0.75), rank=1)
    assert story.value("phalanx_wait_seconds_total", "0") == pytest.approx(0.2)
    assert story.value("phalanx_self_seconds_total", "0") == pytest.approx(0.8)
    assert story.value("phalanx_wait_seconds_total", "1") == pytest.approx(0.6)
    assert story.value("phalanx_cpu_seconds_total", "1") == 0.75
    assert story.value("phalanx_cpu_seconds_total", "0") is None, "nobody counted"
    assert story.value("phalanx_steps_total") == 1, "a step is one, however many ranks do it"


def test_what_no_phase_claims_is_the_sum_over_steps_though_one_has_less_than_nothing() -> None:
    """A phase that ends after the record of its step is charged before its seconds are."""
    story = Story()
    story.start()
    totals = []
    for number, unaccounted_s in enumerate((0.25, -0.5, 0.125, 0.5, math.nan), 1):
        story.tell(replace(STEP, step=number, unaccounted_s=unaccounted_s))
        totals.append(story.value("phalanx_phase_seconds_total", "0", "unaccounted"))
    assert totals == [0.25, 0.25, 0.25, 0.375, 0.375]


def test_sums_of_steps_count_as_their_steps() -> None:
    """What ranks of a large run write: the same counters, and means of a step."""
    story, one_by_one = Story(), Story()
    for each in (story, one_by_one):
        each.start()
    steps = [
        replace(STEP, step=number, communication_s={"tp: all_gather x": 0.2}) for number in (1, 2)
    ]
    one_by_one.tell(*steps, rank=1)
    story.tell(
        events.StepsSummed(
            *(1, 2, 2, 2.0, 1.0, 1),
            phases_s={"forward": 1.0, "collective": 0.4},
            communication_s={"tp: all_gather x": 0.4},
            unaccounted_s=0.6,
            cpu_s=0.0,
            rss_bytes=2**30,
            peak_bytes=0,
        ),
        rank=1,
    )
    summed, single = (each.metrics.build_snapshot().values for each in (story, one_by_one))
    assert summed.keys() == single.keys()
    for name in summed.keys() - {
        "phalanx_refresh_timestamp_seconds",
        "phalanx_last_progress_timestamp_seconds",
        "phalanx_checkpoint_age_seconds",
    }:
        assert summed[name] == pytest.approx(single[name]), name
    assert story.value("phalanx_step_self_seconds", "1") == pytest.approx(0.8)
    assert story.value("phalanx_communication_seconds_total", "1", "tp") == pytest.approx(0.4)
    story.tell(events.TimeBetweenSteps(2, "evaluate", 1.5), rank=1)
    assert story.value("phalanx_between_steps_seconds_total", "1", "evaluate") == 1.5


def test_the_mean_of_a_step_forgets_the_first_ones() -> None:
    story = Story()
    story.start()
    story.steps(1, 5, step_s=10.2)
    assert story.value("phalanx_step_self_seconds", "0") == pytest.approx(10.0)
    story.steps(6, 400)
    assert story.value("phalanx_step_self_seconds", "0") == pytest.approx(0.8, abs=0.01)


def test_an_overflow_of_fp16_is_ordinary_and_a_nan_is_not() -> None:
    story = Story()
    story.start()
    story.tell(events.StepSkipped(1, "overflow", math.inf, 0, 8))
    story.tell(replace(STEP, step=1, grad_norm=math.inf))
    assert story.value("phalanx_nonfinite_steps_total") == 0
    story.tell(events.StepSkipped(2, "no_targets", 0.0, 0, 8))
    story.tell(replace(STEP, step=2, loss=math.nan, num_targets=0))
    assert story.value("phalanx_nonfinite_steps_total") == 0
    story.tell(events.StepSkipped(3, "nonfinite_gradients", math.nan, 0, 8))
    story.tell(replace(STEP, step=3, loss=math.nan))
    assert story.value("phalanx_nonfinite_steps_total") == 1
    assert story.value("phalanx_skipped_steps_total", "nonfinite_gradients") == 1


def test_failed_checks_are_counted_once() -> None:
    """One that repeats itself is told once, and its number comes with the next thing that is."""
    story = Story()
    story.start()
    failed = events.InvariantChecked(4, "replicas_equal", False, num_failed=1)
    story.tell(failed, replace(failed, is_summary=True, num_failed=3))
    assert story.value("phalanx_replica_mismatch_total") == 3
    story.attempt = 1
    story.start(step=4)
    story.tell(replace(failed, num_failed=1))
    story.tell(events.InvariantChecked(5, "targets_counted", False, num_failed=1))
    assert story.value("phalanx_replica_mismatch_total") == 4
    assert story.value("phalanx_invariant_failures_total", "targets_counted") == 1


def test_the_age_of_a_checkpoint_is_what_a_crash_would_cost() -> None:
    story = Story()
    story.now_s = 0.0
    story.metrics = RunMetrics("run", {})
    assert story.value("phalanx_checkpoint_age_seconds") is None
    story.start()
    before = story.value("phalanx_checkpoint_age_seconds")
    story.tell(events.CheckpointSaved(3, "checkpoints/step-3", 1000, 40.0, 1.5, 250))
    after = story.value("phalanx_checkpoint_age_seconds")
    assert before is not None
    assert after is not None
    # Saved a second later, and 40 s of training are not in it.
    assert after - before == pytest.approx(39.0, abs=1.0)
    assert story.value("phalanx_checkpoint_written_bytes_total") == 250
    assert story.value("phalanx_checkpoints_total", "saved") == 1
    story.tell(events.RunFinished("finished", 0, 3, 9.0), rank=-1)
    assert story.value("phalanx_checkpoint_age_seconds") is None, "nothing can be lost any more"


def test_steps_that_survived_in_memory_are_still_not_saved() -> None:
    story = Story()
    story.start()
    story.tell(events.CheckpointSaved(3, "checkpoints/step-3", 1000, 0.0, 0.0, 250))
    story.now_s += 500
    story.attempt = 1
    story.start(step=8)  # held by ranks that went on
    held = story.value("phalanx_checkpoint_age_seconds")
    story.attempt = 2
    story.start(step=3)  # from the checkpoint
    read = story.value("phalanx_checkpoint_age_seconds")
    assert held is not None
    assert read is not None
    assert held - read == pytest.approx(502.0, abs=1.0)


def test_spikes_are_found_and_noise_is_not() -> None:
    draw = random.Random(5)
    detector = LossSpikeDetector()
    falling = [2.0 + 6.0 * 0.99**step + draw.gauss(0, 0.05) for step in range(1000)]
    assert [step for step, loss in enumerate(falling) if detector.add_loss(loss)] == []
    assert detector.add_loss(3.0) == pytest.approx(2.0, abs=0.1), "the median of the steps before"
    assert detector.add_loss(math.nan) is None
    assert detector.add_loss(2.05) is None


def test_a_run_begins_without_spikes() -> None:
    detector = LossSpikeDetector()
    assert [detector.add_loss(1.0) for _ in range(MIN_STEPS - 1)] == [None] * (MIN_STEPS - 1)
    assert detector.add_loss(50.0) is None
    assert detector.add_loss(50.0) == 1.0


def parse_text(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    samples = {}
    for family in prometheus_parser.text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return samples


def golden_snapshot(run_dir: Path = GOLDEN) -> MetricSnapshot:
    follower = RunFollower(run_dir)
    follower.read_all()
    return follower.build_snapshot()


def test_a_run_of_an_earlier_release_is_read() -> None:
    samples = parse_text(render_metrics(golden_snapshot()))
    run = ("run", "run")
    assert samples["phalanx_steps_total", (run,)] == 4
    assert samples["phalanx_step_seconds_count", (run,)] == 4
    assert samples["phalanx_step_seconds_bucket", (("le", "+Inf"), run)] == 4
    assert samples["phalanx_run_state", (run, ("state", "failed"))] == 1
    assert samples["phalanx_checkpoint_step", (run,)] == 3
    assert all(run in labels for _, labels in samples)
    (info,) = (dict(labels) for name, labels in samples if name == "phalanx_run_info")
    assert info["layout"] == "dp_shard=2"
    assert info["ranks"] == "2"


def test_a_run_whose_name_is_no_utf_8_has_metrics() -> None:
    snapshot = RunMetrics("r\udcff", {}).build_snapshot()
    assert 'run="r\\\\udcff"' in render_metrics(snapshot)


def test_metrics_are_a_function_of_the_run_directory(tmp_path: Path) -> None:
    """Whoever reads it in two parts gets what one gets who reads it at once."""
    shutil.copytree(GOLDEN, tmp_path / "run")
    paths = list((tmp_path / "run" / "events").iterdir())
    whole = {path: path.read_bytes() for path in paths}
    for path in paths:
        path.write_bytes(whole[path][: len(whole[path]) // 2])
    follower = RunFollower(tmp_path / "run")
    for _ in follower.iterate_past():
        pass
    for path in paths:
        path.write_bytes(whole[path])
    follower.read_news()
    in_parts, at_once = follower.build_snapshot().values, golden_snapshot().values
    moving = {"phalanx_refresh_timestamp_seconds"}
    assert in_parts.keys() == at_once.keys()
    for name in at_once.keys() - moving:
        assert in_parts[name] == pytest.approx(at_once[name]), name


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    opened = open_metrics_server("127.0.0.1", 0)
    opened.start()
    yield opened
    opened.close()


def ask(server: MetricsServer, method: str = "GET", path: str = "/metrics", **headers: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    answer.body = answer.read()  # type: ignore[attr-defined]
    connection.close()
    return answer


def test_the_endpoint_answers_a_scraper_and_nobody_else(server: MetricsServer) -> None:
    assert ask(server).status == 503, "counters that begin too low would look like a new start"
    server.publish(golden_snapshot())
    assert not server.wait_until_scraped(0.0)
    answer = ask(server)
    assert answer.status == 200
    assert answer.getheader("Content-Type").startswith("text/plain; version=0.0.4")
    assert parse_text(answer.body.decode())["phalanx_step", (("run", "run"),)] == 4
    assert server.wait_until_scraped(0.0)
    assert ask(server, "POST").status == 405
    assert ask(server, "HEAD").status == 405
    assert ask(server, path="/metrics/../etc/passwd").status == 404
    assert ask(server, path="/").body.count(b"/metrics") == 1
    assert ask(server, Host="evil.example").status == 421
    assert ask(server, Host=f"localhost:{server.port}").status == 200
    named = ask(server, path="/metrics?name[]=phalanx_step").body.decode()
    assert {name for name, _ in parse_text(named)} == {"phalanx_step"}


def test_the_endpoint_speaks_openmetrics_where_it_is_asked_to(server: MetricsServer) -> None:
    server.publish(golden_snapshot())
    answer = ask(server, Accept="application/openmetrics-text;version=1.0.0")
    assert answer.getheader("Content-Type").startswith("application/openmetrics-text")
    text = answer.body.decode()
    assert text.endswith("# EOF\n")
    names = {f.name for f in openmetrics_parser.text_string_to_metric_families(text)}
    assert {"phalanx_steps", "phalanx_run", "phalanx_step_seconds"} <= names


def test_an_error_of_the_exporter_is_a_failed_scrape_and_said(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> Any:
        raise KeyError("axis")

    server.publish(golden_snapshot())
    with monkeypatch.context() as patch:
        patch.setattr(exposition, "_build_family", fail)
        answer = ask(server)
    assert answer.status == 500
    assert b"KeyError: 'axis'" in answer.body
    assert capsys.readouterr().err == "phalanx: the metrics cannot be rendered: KeyError: 'axis'\n"
    assert not server.wait_until_scraped(0.0)
    assert ask(server).status == 200


def test_files_that_cannot_be_read_are_a_failed_scrape_and_no_run_without_facts(
    server: MetricsServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(GOLDEN, run_dir)
    file = run_dir / "events" / "rank-0000-attempt-00.jsonl"
    file.rename(tmp_path / "kept")
    # As on a disk that fails.
    file.symlink_to("/proc/self/mem")
    assert run_command_line(["metrics", str(run_dir), "--once"]) == ExitCode.RESOURCES
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"{file.name} cannot be read (Input/output error, and without it" in printed.err
    said: list[str] = []
    follower = RunFollower(run_dir)
    publisher = MetricsPublisher(server, follower, said.append)
    follower.read_all()
    for _ in range(2):
        follower.read_news()
        publisher.publish()
    answer = ask(server)
    assert answer.status == 500
    assert len(said) == 1
    assert said[0].encode() in answer.body
    file.unlink()
    (tmp_path / "kept").rename(file)
    follower.read_news()
    publisher.publish()
    assert parse_text(ask(server).body.decode())["phalanx_step", (("run", "run"),)] == 4
    # What it was is not what it is.
    shutil.rmtree(run_dir)
    follower.read_news()
    publisher.publish()
    assert ask(server).status == 500
    assert said[-1].endswith(
        "events cannot be read (No such file or directory, and without it"
        " the metrics would be wrong)"
    )


def test_an_error_of_a_snapshot_ends_no_observer(server: MetricsServer) -> None:
    class Broken(RunFollower):
        def build_snapshot(self) -> MetricSnapshot:
            raise ZeroDivisionError("mean")

    said: list[str] = []
    MetricsPublisher(server, Broken(GOLDEN), said.append).publish()
    assert said == ["the metrics have an error: ZeroDivisionError: mean"]
    assert ask(server).status == 500


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentProblem, match=f"127.0.0.1:{port}.*another port"):
            open_metrics_server("127.0.0.1", port)


def test_the_command_prints_what_it_serves(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["metrics", str(GOLDEN), "--once"]) == 0
    assert parse_text(capsys.readouterr().out)["phalanx_step", (("run", "run"),)] == 4
    assert run_command_line(["metrics", str(GOLDEN), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["schema"] == "phalanx.metrics/1"
    by_name = {metric["name"]: metric for metric in facts["metrics"]}
    assert by_name["phalanx_steps_total"]["samples"] == [{"labels": {}, "value": 4.0}]
    assert build_metrics_json(golden_snapshot())["run"] == "run"
    assert run_command_line(["metrics", "--rules"]) == 0
    assert capsys.readouterr().out.count("- alert:") > 10
    assert run_command_line(["metrics", "--dashboard"]) == 0
    assert json.loads(capsys.readouterr().out) == build_dashboard()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no run is named"),
        (["no-such-run", "--once"], "no run is there"),
        (["--rules", "--dashboard"], "stand alone"),
        ([str(GOLDEN), "--rules"], "stand alone"),
        ([str(GOLDEN), "--port", "99999"], "65535"),
    ],
)
def test_a_wrong_call_is_exit_2_and_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["metrics", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


# The counters of what the dashboard has as gauges, and what it has of evaluations and saves by other metrics.
NOT_ON_THE_DASHBOARD = {
    "phalanx_wait_seconds_total",
    "phalanx_evaluations_total",
    "phalanx_eval_seconds_total",
    "phalanx_checkpoint_step",
    "phalanx_checkpoint_timestamp_seconds",
    "phalanx_checkpoint_seconds_total",
    "phalanx_checkpoint_written_bytes_total",
}


def test_each_metric_is_on_the_dashboard_or_named_as_left_out() -> None:
    expressions = [
        query.expression
        for row in DASHBOARD_ROWS
        for panel in row.panels
        for query in panel.queries
    ]
    shown = set(re.findall(r"phalanx_[a-z_]+", " ".join(expressions)))
    names = {metric.name for metric in METRICS} - {"phalanx_run", "phalanx_step_seconds"}
    assert names - shown == NOT_ON_THE_DASHBOARD


def test_the_dashboard_is_whole() -> None:
    """Panels lie side by side on the grid, and ask for metrics that there are."""
    known = {metric.name for metric in METRICS} | {
        "phalanx_run_info",
        "phalanx_step_seconds_bucket",
    }
    panels = build_dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
    expressions = [
        query.expression
        for row in DASHBOARD_ROWS
        for panel in row.panels
        for query in panel.queries
    ]
    assert set(re.findall(r"phalanx_[a-z_]+", " ".join(expressions))) <= known


def test_each_failure_of_a_ranks_memory_is_counted() -> None:
    """A rank tells of each by itself, and no summary adds them up."""
    story = Story()
    story.start()
    bus: Any = SimpleNamespace(emit=lambda event: story.tell(event, rank=1))
    coordinates = dict.fromkeys(("pp", "cp", "tp"), 0)
    mesh = SimpleNamespace(rank=1, world_size=2, coordinates=coordinates)
    state: Any = SimpleNamespace(model=SimpleNamespace(module=nn.Linear(2, 2), mesh=mesh))
    objective: Any = None
    memory: Any = SimpleNamespace(find_changed_tensors=lambda: ["weight"], digested_step=4)
    invariants = RunInvariants(load_job(None, []), state, bus, objective)
    invariants._memory = memory
    assert invariants.build_corruption_flags()[-2:] == (1.0, 1.0)
    invariants.build_corruption_flags()
    assert story.value("phalanx_invariant_failures_total", "memory_unchanged") == 2
