"""Reads a file of rows: one JSON object a line, and what cannot be used counted by reason."""

from __future__ import annotations

import difflib
import json
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from phalanx.core.errors import PhalanxError, UsageError
from phalanx.core.files import read_whole_regular_file
from phalanx.plan.validation.row_values import UnusableRow
from phalanx.plan.validation.run import MeasuredRun, build_measured_run

MAX_FILE_BYTES = 2**30
ROW_KEYS = (
    *("id", "source", "model", "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "mlp"),
    *("moe", "sliding_window", "seq_len", "gpu", "gpu_mem_gb", "n_gpus", "gpus_per_node"),
    *("intra_net", "inter_net", "nvlink_domain", "tp", "pp", "vpp", "cp", "ep", "dp", "dp_mode"),
    *("zero_stage", "pp_schedule", "micro_batch", "global_batch", "n_microbatches", "precision"),
    *("attention_precision", "head_precision", "activation_checkpointing", "attention_kernel"),
    *("compile", "framework", "sequence_parallel", "async_tp", "moe_dispatcher", "ep_overlap"),
    *("ep_beside_microbatch", "cuda_graph", "fused_experts", "last_stage_blocks", "note"),
    *("measured", "derived"),
)
"""The keys of a row that are read. Others are notes of whoever wrote it."""
MISSPELT_LIKENESS = 0.8
"""Of difflib's ratio: a key as near to one that is read, and no note, was meant to be it."""


@dataclass(frozen=True)
class UsableRows:
    """The usable rows of a file, and how many others there were, by reason."""

    runs: tuple[MeasuredRun, ...]
    unusable: Mapping[str, int]
    misspelt: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """How many rows have a key that is nearly one that is read, by (the key, the one that is)."""

    @property
    def num_rows(self) -> int:
        return len(self.runs) + sum(self.unusable.values())


def load_row_file(path: Path) -> UsableRows:
    """The runs of a JSONL file; a bad line is counted and never an error. Raises UsageError for a
    file that cannot be read."""
    try:
        content = read_whole_regular_file(path, MAX_FILE_BYTES)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read", why=error.strerror or str(error), fix="name a JSONL file"
        ) from error
    return parse_row_lines(content)


def parse_row_lines(content: bytes) -> UsableRows:
    """The runs of the lines of `content`."""
    runs: list[MeasuredRun] = []
    unusable: Counter[str] = Counter()
    misspelt: Counter[tuple[str, str]] = Counter()
    distinct_lines: set[bytes] = set()
    for line in content.removeprefix(BOM_UTF8).splitlines():
        line = line.strip()
        if not line:
            continue
        if line in distinct_lines:
            unusable["the same line again"] += 1
            continue
        distinct_lines.add(line)
        try:
            row = _parse_json_object(line)
            misspelt.update(_list_misspelt_keys(frozenset(row)))
            runs.append(build_measured_run(row))
        except UnusableRow as reason:
            unusable[str(reason)] += 1
        except (PhalanxError, ArithmeticError, AssertionError, TypeError, ValueError, KeyError):
            # Whatever somebody wrote into a row, the other rows are scored.
            unusable["values that fit no model"] += 1
    return UsableRows(tuple(runs), dict(unusable.most_common()), dict(misspelt.most_common()))


@lru_cache(maxsize=1024)
def _list_misspelt_keys(keys: frozenset[str]) -> tuple[tuple[str, str], ...]:
    """(a key of a row that is read by no name, the one that it is nearly and that is missing)."""
    missing = [known for known in ROW_KEYS if known not in keys]
    found = []
    for key in sorted(keys.difference(ROW_KEYS)):
        for known in difflib.get_close_matches(key, missing, n=1, cutoff=MISSPELT_LIKENESS):
            found.append((key, known))
    return tuple(found)


def _parse_json_object(line: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise UnusableRow("not JSON") from None
    if not isinstance(row, dict):
        raise UnusableRow("not a JSON object")
    return row
