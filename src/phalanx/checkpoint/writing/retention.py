"""Which checkpoints stay: the last few, milestones, the best, and always the newest that verifies.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from phalanx.checkpoint.folder import Folder
from phalanx.checkpoint.os_errors import unreadable
from phalanx.checkpoint.ownership.fencing_token import Epoch
from phalanx.checkpoint.ownership.store_owner import require_claim
from phalanx.checkpoint.reading.verify import Progress, verify_checkpoint
from phalanx.checkpoint.stores.protocol import Store


@dataclass(frozen=True)
class Retention:
    """Keep the last `last` (None: all), the steps in `kept`, and of each `every` steps the first
    that was saved: the multiple itself, unless saves come by the clock or had to wait."""

    last: int | None = None
    every: int | None = None
    kept: frozenset[int] = frozenset()

    def superfluous(self, steps: Iterable[int]) -> list[int]:
        """The steps that need not be kept, oldest first. Never the newest."""
        ordered = sorted(steps)
        if self.last is None:
            return []
        staying = {*ordered[-max(1, self.last) :], *self.kept, *self._milestones(ordered)}
        return [step for step in ordered if step not in staying]

    def _milestones(self, ordered: list[int]) -> Iterator[int]:
        last_number = 0
        for step in ordered if self.every else ():
            number = step // self.every if self.every else 0
            if number > last_number:
                last_number = number
                yield step


def prune(
    store: Store,
    retention: Retention,
    *,
    dry_run: bool = False,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda num_bytes: None,
    epoch: Epoch | None = None,
) -> list[Folder]:
    """Remove what `retention` does not keep; what went, oldest first.

    `progress` hears of verified bytes, and of each removal before it; it may raise. A `dry_run`
    says and returns the same, and removes nothing.

    Nothing is removed before the newest that verifies, byte for byte, is known: where that one
    would go because newer ones are damaged, nothing does. Raises CheckpointError if one cannot be
    removed, or if the run is no longer that of `epoch` or the store no longer the run's: whoever
    has it now may be reading the one that would go.
    """
    require_claim(epoch, store)
    by_step = {folder.step: folder for folder in store.folders()}
    going = [by_step[step] for step in retention.superfluous(by_step)]
    if not going:
        return []
    newest_first = (by_step[step] for step in sorted(by_step, reverse=True))
    safe = next((folder for folder in newest_first if _verifies(folder, say, progress)), None)
    if safe is None or safe in going:
        why = (
            "no checkpoint verifies"
            if safe is None
            else f"the newest that verifies is {safe.name}, which would go"
        )
        say(f"{why}: nothing is removed")
        return []
    for folder in () if dry_run else going:
        require_claim(epoch, store)  # reading the safe one took a while
        progress(0)
        try:
            store.remove(folder)
        except OSError as error:
            raise unreadable(error, "it cannot be removed", folder.url) from None
    return going


def _verifies(folder: Folder, say: Callable[[str], None], progress: Progress) -> bool:
    problems = verify_checkpoint(folder, progress)
    if problems:
        say(f"{folder.name} does not verify: {problems[0]}")
    return not problems
