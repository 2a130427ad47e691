"""Retention: the last few checkpoints stay, milestones, the best, and always the newest that
verifies.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from phalanx.checkpoint.folder import CheckpointFolder
from phalanx.checkpoint.os_errors import convert_os_error
from phalanx.checkpoint.ownership.fencing_token import FencingToken
from phalanx.checkpoint.ownership.store_owner import require_still_owner_of_run_and_store
from phalanx.checkpoint.reading.verify import Progress, find_checkpoint_problems
from phalanx.checkpoint.stores.protocol import Store


@dataclass(frozen=True)
class RetentionRule:
    """A rule of which checkpoints stay: the last `keep_last` (None: all), `protected_steps`, and of
    each `keep_every` steps the first that was saved.

    That is the multiple itself, unless saves come by the clock or had to wait.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    protected_steps: frozenset[int] = frozenset()

    def list_steps_to_remove(self, steps: Iterable[int]) -> list[int]:
        """The steps that need not be kept, oldest first. Never the newest."""
        ordered = sorted(steps)
        if self.keep_last is None:
            return []
        # Whatever the job says, the newest stays.
        newest = ordered[-max(1, self.keep_last) :]
        staying = {*newest, *self.protected_steps, *self._list_steps_kept_for_ever(ordered)}
        return [step for step in ordered if step not in staying]

    def _list_steps_kept_for_ever(self, ordered: list[int]) -> Iterator[int]:
        if not self.keep_every:
            return
        last_number = 0
        for step in ordered:
            number = step // self.keep_every
            # The first at or after a multiple: saves by the clock rarely meet it.
            if number > last_number:
                last_number = number
                yield step


def prune_checkpoints(
    store: Store,
    retention: RetentionRule,
    *,
    dry_run: bool = False,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda num_bytes: None,
    fencing_token: FencingToken | None = None,
) -> list[CheckpointFolder]:
    """Remove the checkpoints that `retention` does not keep; returns them, oldest first.

    `progress` is called with the number of verified bytes, and with 0 before each removal; it may
    raise. A `dry_run` says and returns the same, and removes nothing.

    Nothing is removed before the newest that verifies, byte for byte, is known: where that one
    would go because newer ones are damaged, nothing does. Raises CheckpointError if one cannot be
    removed, or if another job has the run of `fencing_token` or another run the store by now: that
    job may be reading the one that would go.
    """
    require_still_owner_of_run_and_store(fencing_token, store)
    by_step = {folder.step: folder for folder in store.folders()}
    superfluous = [by_step[step] for step in retention.list_steps_to_remove(by_step)]
    if not superfluous:
        return []
    # A generator: no more checkpoints are read than until one verifies.
    newest_first = (by_step[step] for step in sorted(by_step, reverse=True))
    safe = next(
        (folder for folder in newest_first if _is_checkpoint_intact(folder, say, progress)), None
    )
    if safe is None:
        say("no checkpoint verifies: nothing is removed")
        return []
    if safe in superfluous:
        say(f"the newest that verifies is {safe.name}, which would go: nothing is removed")
        return []
    if dry_run:
        return superfluous
    for folder in superfluous:
        # Again for each: reading the safe one took a while.
        require_still_owner_of_run_and_store(fencing_token, store)
        progress(0)
        try:
            store.remove(folder)
        except OSError as error:
            raise convert_os_error(error, "it cannot be removed", folder.url) from None
    return superfluous


def _is_checkpoint_intact(
    folder: CheckpointFolder, say: Callable[[str], None], progress: Progress
) -> bool:
    problems = find_checkpoint_problems(folder, progress)
    if problems:
        say(f"{folder.name} does not verify: {problems[0]}")
    return not problems
