"""The section [checkpoint]."""

from __future__ import annotations

from typing import Literal

from phalanx.job.schema.base import Positive, PositiveFloat, Section


class Checkpoint(Section):
    """When the state is saved, and which checkpoints stay.

    Of several intervals the first that is due counts.
    """

    every_steps: Positive | None = None
    """Save each time this many steps are done."""
    every_minutes: PositiveFloat | None = None
    """Save each time this many minutes have passed (rank 0's clock decides for all)."""
    every: Literal["auto"] | None = None
    """auto: save as often as costs the least time, by what a save is measured to cost and
    mtbf_hours (Young/Daly)."""
    mtbf_hours: PositiveFloat | None = None
    """Hours between two failures of the whole job, on average (for every = "auto")."""
    at_end: bool = True
    """Save after the last step."""
    asynchronous: bool = True
    """Training goes on while a copy of the state in host memory is written.

    The saves at the end and at a stop are waited for, and need no copy.
    """
    keep_last: Positive | None = None
    """Remove all but the last so many checkpoints, in the background, once a newer one has been
    verified; the best one stays.

    Without it nothing is removed.
    """
    keep_every: Positive | None = None
    """Besides those of keep_last, keep the first checkpoint of each so many steps: that of the
    multiple itself, unless saves come by the clock or had to wait."""
    url: str | None = None
    """The place of checkpoints, if not in the run's own directory: an object store, as
    s3://bucket/run-7, or another directory, as file:///data/run-7.

    Credentials come from the environment, never from the job.
    """
    incremental: bool = True
    """Blocks that are as in the last checkpoint are linked to it (or copied by the store), not
    written again."""
    fallback: bool = False
    """Continue from the newest checkpoint that verifies, if newer ones are damaged; without it
    that is exit 5."""

    @property
    def has_interval(self) -> bool:
        """True where the state is saved on the way, and not at the end alone."""
        return (
            self.every_steps is not None or self.every_minutes is not None or self.every is not None
        )
