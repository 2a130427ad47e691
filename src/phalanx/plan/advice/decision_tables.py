"""The decision tables of the field, as labelled heuristics beside the computed plan: what each says
for this model and cluster, and whether the plan agrees."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from phalanx.plan.advice.facts import PlanFacts

STATE_BYTES_PER_PARAM = 16  # mixed precision with Adam, as the guides count


@dataclass(frozen=True)
class TableRow:
    """One row of a decision table. `params` and `devices` are [from, to), 0 standing for no end."""

    says: str
    uses: tuple[frozenset[str], ...]
    params: tuple[float, float] = (0, 0)
    devices: tuple[float, float] = (0, 0)
    fits: str = ""
    experts: bool = False

    def matches(self, facts: PlanFacts) -> bool:
        """True if the row is about such a model on such a cluster."""
        if self.experts and not facts.model.num_experts:
            return False
        if not _is_in_range(facts.model.num_params / 1e9, self.params):
            return False
        if not _is_in_range(facts.hardware.num_devices, self.devices):
            return False
        return self.fits == "" or _has_room_for_states(facts, self.fits)


@dataclass(frozen=True)
class DecisionTable:
    name: str
    rows: tuple[TableRow, ...]
    note: str


@dataclass(frozen=True)
class TableAnswer:
    """The answer of one table. `agrees` is None where no row is about this job."""

    table: str
    says: str
    agrees: bool | None
    differences: str
    note: str

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@cache
def load_decision_tables() -> tuple[DecisionTable, ...]:
    """The tables, as the file beside this one has them."""
    text = files("phalanx.plan.advice").joinpath("decision_tables.toml").read_text("utf-8")
    tables = []
    for entry in tomllib.loads(text)["tables"]:
        rows = tuple(_parse_table_row(row) for row in entry["rows"])
        tables.append(DecisionTable(entry["name"], rows, entry["note"]))
    return tuple(tables)


def _parse_table_row(entry: dict[str, Any]) -> TableRow:
    values = dict(entry)
    values["uses"] = tuple(frozenset(names) for names in entry["uses"])
    for key in ("params", "devices"):
        if key in values:
            values[key] = (float(values[key][0]), float(values[key][1]))
    return TableRow(**values)


def look_up_decision_tables(facts: PlanFacts) -> list[TableAnswer]:
    """The answers of all tables for this model and cluster, beside what the plan uses."""
    used = list_plan_mechanisms(facts)
    answers = []
    for table in load_decision_tables():
        row = next((row for row in table.rows if row.matches(facts)), None)
        if row is None:
            answers.append(TableAnswer(table.name, "nothing for this job", None, "", table.note))
            continue
        difference = min((_describe_mechanism_difference(used, uses) for uses in row.uses), key=len)
        answers.append(TableAnswer(table.name, row.says, not difference, difference, table.note))
    return answers


def list_plan_mechanisms(facts: PlanFacts) -> frozenset[str]:
    """The mechanisms of a plan, in the words of the tables."""
    names = {axis for axis in ("tp", "pp", "ep") if getattr(facts.layout, axis) > 1}
    if facts.zero_stage:
        names.add(f"zero{facts.zero_stage}")
    if not names:
        names.add("ddp")
    return frozenset(names)


def _describe_mechanism_difference(used: frozenset[str], uses: frozenset[str]) -> str:
    """'it has tp, the plan zero2'; "" where they are the same.

    A table that says nothing of ZeRO leaves it open: stage 1 goes with anything.
    """
    only_table = sorted(uses - used)
    only_plan = sorted(used - uses - {"zero1"})
    if not only_table and not only_plan:
        return ""
    parts = []
    if only_table:
        parts.append(f"the table has {', '.join(only_table)}")
    if only_plan:
        parts.append(f"the plan has {', '.join(only_plan)}")
    return "; ".join(parts)


def _is_in_range(value: float, bounds: tuple[float, float]) -> bool:
    low, high = bounds
    return value >= low and (high == 0 or value < high)


def _has_room_for_states(facts: PlanFacts, where: str) -> bool:
    memory_bytes = facts.hardware.memory_bytes
    if where == "node":
        memory_bytes *= facts.hardware.devices_per_node
    return facts.model.num_params * STATE_BYTES_PER_PARAM <= memory_bytes
