"""What a loss is measured in and what is counted: nats per token for models of text, plain
numbers for a user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MetricUnits:
    """`loss`: "nats/token", or "" where only the objective's author knows.

    `items`: what targets are called.
    """

    loss: str = "nats/token"
    items: str = "tokens"

    @property
    def format_loss_with_unit(self) -> str:
        if self.loss:
            return "nats per token"
        return "loss"

    @property
    def rate_unit(self) -> str:
        return f"{self.items}/s"

    @property
    def short_rate_unit(self) -> str:
        """The rate's unit for a line that is read over and over."""
        if self.items == "tokens":
            return "tok/s"
        return self.rate_unit


TEXT_METRIC_UNITS = MetricUnits()
OWN_MODEL_METRIC_UNITS = MetricUnits(loss="", items="targets")


def choose_metric_units_of_job(job: Mapping[str, Any]) -> MetricUnits:
    """The units of a job (as JSON, perhaps damaged): those of text, unless objective or samples
    are the user's own."""
    model, data = _get_job_section(job, "model"), _get_job_section(job, "data")
    is_image = model.get("kind") == "vit" or "vit" in str(model.get("preset"))
    if model.get("objective") or is_image or _is_factory_reference(data.get("source")):
        return OWN_MODEL_METRIC_UNITS
    return TEXT_METRIC_UNITS


def _get_job_section(job: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = job.get(name)
    if isinstance(table, Mapping):
        return table
    return {}


def _is_factory_reference(source: Any) -> bool:
    """True for "package.module:factory"; a path may hold a colon, too, but not between two
    dotted names."""
    module, colon, name = source.partition(":") if isinstance(source, str) else ("", "", "")
    return bool(colon) and all(
        part.isidentifier() for part in (*module.split("."), *name.split("."))
    )
