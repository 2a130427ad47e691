"""The alert rules that ship with phalanx, for Prometheus."""

from __future__ import annotations

from pathlib import Path

ALERT_RULES_PATH = Path(__file__).parent / "alert_rules.yml"


def read_alert_rules() -> str:
    """The rules as YAML, as `rule_files` of Prometheus takes them."""
    return ALERT_RULES_PATH.read_text(encoding="utf-8")
