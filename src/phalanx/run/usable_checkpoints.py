"""Which checkpoints the next attempt of a run can begin at, as its supervisor knows them.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from phalanx.checkpoint.folder import CheckpointFolder
from phalanx.checkpoint.manifest import read_manifest
from phalanx.checkpoint.stores import Store
from phalanx.core.errors import CheckpointError
from phalanx.launch.launch_spec import describe_checkpoint_that_stands
from phalanx.observe.events import CheckpointSaved, CheckpointUnusable, Event
from phalanx.observe.tail import read_recorded_events


class UsableCheckpoints:
    """The checkpoints of `store`, without those that ranks of the run in `run_dir` could not use.

    Events keep it up: to read all of them anew at each restart took 3.6 s after 50,000 steps.
    """

    def __init__(self, run_dir: Path, store: Store) -> None:
        self._store = store
        # What was there when the store last answered, and what was saved since.
        self._seen_steps: set[int] = set()
        self._unusable_steps: set[int] = set()
        for envelope in read_recorded_events(run_dir, CheckpointSaved, CheckpointUnusable):
            self.note_event(envelope.event)

    def note_event(self, event: Event) -> None:
        """Take note of a checkpoint that was saved, or that ranks could not use."""
        match event:
            case CheckpointSaved(step=step):
                self._seen_steps.add(step)
                # Saved again since: it is a new one.
                self._unusable_steps.discard(step)
            case CheckpointUnusable(step=step):
                self._unusable_steps.add(step)

    def find_newest_step(self) -> int:
        """The step of the newest checkpoint that ranks could use, or that was written again since;
        0 without one.

        Of a store that does not answer now: of what was seen in it before.
        """
        with suppress(OSError, CheckpointError):
            self._seen_steps = {folder.step for folder in self._store.folders()}
        return max(self._seen_steps - self._unusable_steps, default=0)

    def find_data_cursor_before(self, step: int) -> tuple[int, int]:
        """The step of the newest usable checkpoint before `step`, and the samples that were read up
        to there: (0, 0) without one, -1 samples where none of those that are there can be read."""
        try:
            folders = [folder for folder in self._store.folders() if folder.step < step]
        except (OSError, CheckpointError):
            return 0, -1
        for folder in reversed(folders):
            if folder.step not in self._unusable_steps:
                with suppress(OSError, CheckpointError, KeyError):
                    manifest = read_manifest(folder)
                    return manifest.step, int(manifest.facts["samples_seen"])
        return (0, -1) if folders else (0, 0)

    def describe_newest(self) -> str:
        """The newest checkpoint whose manifest can be read, in words, except those that ranks could
        not use; or that none is there, can be used, or can be seen."""
        try:
            folders = self._store.folders()
        except (OSError, CheckpointError):
            return "checkpoints cannot be seen now"
        step = self._find_newest_readable(folders)
        if folders and not step:
            return "no checkpoint can be used"
        return describe_checkpoint_that_stands(step)

    def find_newest_readable_step(self) -> int:
        """The step of the newest checkpoint whose manifest can be read, except those that ranks
        could not use; 0 without one.

        Raises OSError or CheckpointError where the store does not answer.
        """
        return self._find_newest_readable(self._store.folders())

    def _find_newest_readable(self, folders: Sequence[CheckpointFolder]) -> int:
        for folder in reversed(folders):
            if folder.step not in self._unusable_steps:
                with suppress(OSError, CheckpointError):
                    return read_manifest(folder).step
        return 0
