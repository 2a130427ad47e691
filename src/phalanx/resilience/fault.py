"""Faults strike at a (rank, step, phase), never at a time, so that a drill can be repeated
exactly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.digest import digest
from phalanx.core.phases import PhaseListener
from phalanx.core.registry import import_object_of_kind

FAULTS_PACKAGE = "phalanx.resilience.faults"


@dataclass(frozen=True)
class Fault:
    """`name` in the faults folder (or package.module:function), and where it strikes; None
    strikes anywhere."""

    name: str
    rank: int
    step: int | None
    phase: str | None
    inject: Callable[[], None]

    def is_due_at(self, rank: int, step: int, phase: str) -> bool:
        return rank == self.rank and self.step in (None, step) and self.phase in (None, phase)


def parse_fault(text: str) -> Fault:
    """ "kill:rank=1,step=7,phase=backward" -> Fault.

    The grammar is checked when the job is loaded.
    """
    name, _, tail = text.rpartition(":")
    # "package.module:function" has a colon, too; a part with "=" is where a fault strikes.
    if "=" not in tail:
        name, tail = text, ""
    target = dict(part.split("=", 1) for part in tail.split(",") if part)
    step = None
    if "step" in target:
        step = int(target["step"])
    rank = int(target.get("rank", 0))
    return Fault(
        name, rank, step, target.get("phase"), import_object_of_kind(name, FAULTS_PACKAGE, "inject")
    )


def build_fault_listener(texts: Sequence[str], *, rank: int, run_dir: Path) -> PhaseListener:
    """A phase listener that injects each fault once per run: restarts must not meet it again.

    For several threads.
    """
    faults = [
        (_fault_marker_name(texts, index), parse_fault(text)) for index, text in enumerate(texts)
    ]
    # Phases of the background write begin in a thread of its own.
    taking = threading.Lock()

    def claim_once(fault: tuple[str, Fault]) -> bool:
        with taking:
            # Two threads may have found it at the same moment: the first to take it strikes.
            if fault in faults:
                faults.remove(fault)
                return True
            return False

    def listen(step: int, phase: str) -> None:
        # A copy: `claim_once` removes from the list while this goes over it.
        for name, fault in list(faults):
            if fault.is_due_at(rank, step, phase) and claim_once((name, fault)):
                # The mark first: a fault that kills this process must not strike the restarted one.
                mark = run_dir / "faults" / name
                mark.parent.mkdir(exist_ok=True)
                try:
                    mark.touch(exist_ok=False)
                except FileExistsError:
                    # It struck in an earlier attempt of this run.
                    continue
                fault.inject()

    return listen


def _fault_marker_name(texts: Sequence[str], index: int) -> str:
    """The name of a fault's mark: made from its text, not from its place in the list, since a run
    may be resumed with another list."""
    text = texts[index]
    nth = texts[:index].count(text)
    return f"{parse_fault(text).name.replace(':', '.')[:64]}-{digest([text, nth])}.injected"
