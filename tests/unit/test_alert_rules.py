"""The alert rules that ship, by Prometheus' own tool: their syntax, and what fires for which series."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from phalanx.report.prometheus.definitions import METRICS
from phalanx.report.prometheus.rules import ALERT_RULES_PATH, read_alert_rules

PROMTOOL = shutil.which("promtool")
CASES = Path(__file__).parents[1] / "support" / "alert_rules_test.yml"
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian's package prometheus)"
)


def run_promtool(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(PROMTOOL), *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )


@needs_promtool
def test_promtool_finds_nothing_wrong_with_the_rules(tmp_path: Path) -> None:
    done = run_promtool("check", "rules", str(ALERT_RULES_PATH), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    num_rules = read_alert_rules().count("- alert:")
    assert f"{num_rules} rules found" in done.stdout


@needs_promtool
def test_rules_fire_for_what_is_wrong_and_for_nothing_else(tmp_path: Path) -> None:
    shutil.copy(ALERT_RULES_PATH, tmp_path)
    shutil.copy(CASES, tmp_path)
    done = run_promtool("test", "rules", CASES.name, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.long
@pytest.mark.parametrize(
    ("now", "later"),
    [
        ("> 300", "> 30000"),
        ('"hostname", "$1", "Hostname", "(.+)"', '"hostname", "$1", "hostname", "(.+)"'),
        ("< 200", "< 1e30"),
        ("> 0.1)", "> -1)"),
        ("(phalanx_step_drift_ratio) > 0.2", "(phalanx_step_drift_ratio) > 0.3"),
        ("> 0.1 * max", "> max"),
        ("(phalanx_rank_slow) == 1)", "(phalanx_rank_slow) >= 0)"),
    ],
)
def test_the_cases_notice_a_rule_that_is_changed(now: str, later: str, tmp_path: Path) -> None:
    shutil.copy(CASES, tmp_path)
    text = read_alert_rules()
    assert now in text
    (tmp_path / ALERT_RULES_PATH.name).write_text(text.replace(now, later))
    assert run_promtool("test", "rules", CASES.name, cwd=tmp_path).returncode != 0


def test_each_rule_has_a_case_that_fires() -> None:
    rules = set(re.findall(r"- alert: (\w+)", read_alert_rules()))
    assert rules == set(re.findall(r'alertname="(\w+)"', CASES.read_text()))


def test_rules_name_metrics_that_there_are() -> None:
    named = set(re.findall(r"\bphalanx_\w+", read_alert_rules()))
    assert named <= {metric.name for metric in METRICS}
