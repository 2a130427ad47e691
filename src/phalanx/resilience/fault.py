"""Faults strike at a (rank, step, phase), never at a time, so that a drill can be repeated
exactly."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.core.digest import digest
from phalanx.core.phases import PhaseListener
from phalanx.core.registry import import_object_of_kind, is_foreign, read_module_constant
from phalanx.resilience.strikes import Strike, record_strike

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer

FAULTS_PACKAGE = "phalanx.resilience.faults"


@dataclass
class FaultSite:
    """The rank in which a fault strikes. `trainer`: None until there is one."""

    rank: int = 0
    run_dir: Path = Path()
    trainer: Trainer | None = None


@dataclass(frozen=True)
class Fault:
    """`name` in the faults folder (or package.module:function), and where it strikes; None
    strikes anywhere, and without an `attempt` in the first that comes there.

    `inject` is called without arguments, or with the FaultSite if it takes one. With
    `strikes_again` it strikes each time that its place is reached, in each attempt.
    """

    name: str
    rank: int
    step: int | None
    phase: str | None
    inject: Callable[..., None]
    strikes_again: bool = False
    attempt: int | None = None

    def strike(self, site: FaultSite) -> None:
        """Inject the fault."""
        if _takes_site(self.inject):
            self.inject(site)
        else:
            self.inject()

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
    step, attempt = (int(target[key]) if key in target else None for key in ("step", "attempt"))
    rank = int(target.get("rank", 0))
    inject = import_object_of_kind(name, FAULTS_PACKAGE, "inject")
    strikes_again = not is_foreign(name) and read_module_constant(
        name, FAULTS_PACKAGE, "STRIKES_AGAIN", False
    )
    return Fault(name, rank, step, target.get("phase"), inject, strikes_again, attempt)


def _takes_site(inject: Callable[..., Any]) -> bool:
    return bool(inspect.signature(inject).parameters)


def build_fault_listener(
    texts: Sequence[str],
    *,
    rank: int,
    run_dir: Path,
    attempt: int = 0,
    site: FaultSite | None = None,
) -> PhaseListener:
    """A phase listener that injects each fault once per run: restarts must not meet it again.

    A fault that strikes again meets each attempt once. For several threads.
    """
    fault_site = site or FaultSite(rank, run_dir)
    named = [
        (_fault_marker_name(texts, index), parse_fault(text)) for index, text in enumerate(texts)
    ]
    faults = [each for each in named if each[1].attempt in (None, attempt)]
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
                strike = Strike.now(fault.name, rank, step, phase)
                # The mark first: a fault that kills this process must not strike the restarted one.
                if record_strike(run_dir, name, strike, may_repeat=fault.strikes_again):
                    fault.strike(fault_site)

    return listen


def _fault_marker_name(texts: Sequence[str], index: int) -> str:
    """The name of a fault's mark: made from its text, not from its place in the list, since a run
    may be resumed with another list."""
    text = texts[index]
    nth = texts[:index].count(text)
    return f"{parse_fault(text).name.replace(':', '.')[:64]}-{digest([text, nth])}.injected"
