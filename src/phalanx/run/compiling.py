"""What a rank with train.compile says of compiling, and which runs share their code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from phalanx.core.phases import PhaseTimer
from phalanx.core.typed_json import JsonObject
from phalanx.core.units import format_seconds, plural
from phalanx.job.schema import Job
from phalanx.mesh.compilations import noting_compilations
from phalanx.mesh.compiled.reuse import CodeReuse, CompilationCounts, reusing_compiled_code
from phalanx.mesh.compiled.store import find_store_root
from phalanx.observe.bus import Bus
from phalanx.observe.events import Note
from phalanx.plan.plan import Plan
from phalanx.run.rank_run import RankRunInputs

# Of [train]: what no code depends on.
_KEYS_OF_NO_CODE = ("steps", "sample_tokens")


def describe_code_of_job(job: Job, plan: Plan) -> JsonObject:
    """The part of a job that the code of its blocks depends on: runs in which it is equal share it.

    What else it depends on (the source of a module, the shapes) torch compares by itself.
    """
    document = job.to_json()
    train = {key: value for key, value in document["train"].items() if key not in _KEYS_OF_NO_CODE}
    return {
        "model": document["model"],
        "precision": document["precision"],
        "parallel": document["parallel"],
        "train": train,
        "seq_len": job.data.seq_len,
        "layout": plan.layout.to_json(),
    }


@contextlib.contextmanager
def compiling_for_run(
    run: RankRunInputs, device: torch.device, phases: PhaseTimer, bus: Bus
) -> Iterator[None]:
    """Take code that earlier runs or other ranks have compiled, in the body. Each rank records what
    it compiled for its first step; rank 0 says it, and says before that it compiles for the first
    time."""
    facts = describe_code_of_job(run.job, run.plan)
    box = phases.black_box
    assert box is not None, "a rank has a black box"
    with (
        # Outside: while a rank waits for code of another one, its box says that code is compiled.
        noting_compilations(box),
        reusing_compiled_code(facts, run.run_dir, device) as reuse,
    ):
        before = phases.observers
        if run.rank == 0:
            _emit_first_compilation(reuse, bus)
        report = _FirstStepReport(reuse.counts, bus, _describe_source(reuse), run.rank == 0)
        phases.observers = (*before, report)
        try:
            yield
        finally:
            phases.observers = before


def _emit_first_compilation(reuse: CodeReuse, bus: Bus) -> None:
    if reuse.is_known:
        return
    why = f"blocks, for the first time; later runs of this job take them from {find_store_root()}"
    if reuse.counts.why_not_kept:
        why = f"blocks; they are not kept for later runs: {reuse.counts.why_not_kept}"
    bus.emit(Note("compiling", {"why": why}))


def _describe_source(reuse: CodeReuse) -> str:
    """Where code comes from that this rank will not have compiled."""
    if reuse.is_known:
        return f" taken from {find_store_root()}"
    if reuse.counts.why_not_kept:
        return " taken from torch's own cache"
    return " compiled by another rank"


class _FirstStepReport:
    """Records what was compiled once the forwards and backwards of the first step are done, and
    why it is not kept where that became known only then."""

    def __init__(self, counts: CompilationCounts, bus: Bus, source: str, is_said: bool) -> None:
        self._counts, self._bus, self._source, self._is_said = counts, bus, source, is_said
        self._was_kept = not counts.why_not_kept
        self._is_recorded = False

    def begin_span(self, name: str, words: str, axis: str, mark: Any) -> None:
        if name == "optimizer" and not self._is_recorded:
            self._is_recorded = True
            self._record()

    def end_span(self, mark: Any) -> None:
        pass

    def observe_thread(self, phases: PhaseTimer) -> None:
        return None

    def _record(self) -> None:
        counts = self._counts
        if not counts.num_graphs:
            return
        source = self._source if counts.num_taken == counts.num_graphs else ""
        facts: dict[str, object] = {
            "seconds": counts.seconds,
            "graphs": counts.num_graphs,
            "taken": counts.num_taken,
        }
        graphs = plural(counts.num_graphs, "graph")
        why = f"{graphs}{source} in {format_seconds(counts.seconds)}"
        is_said = self._is_said
        if counts.why_not_kept:
            facts["not_kept"] = counts.why_not_kept
        if counts.why_not_kept and self._was_kept:
            # Also by another rank than the first: it alone may have compiled.
            is_said = True
            why += f"; the code is not kept for later runs: {counts.why_not_kept}"
        if is_said:
            facts["why"] = why
        self._bus.emit(Note("compiled", facts))
