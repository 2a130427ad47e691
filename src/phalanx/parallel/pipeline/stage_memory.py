"""PipelineSavedBytes: bytes that autograd keeps of the microbatches that a pipeline has in
flight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from phalanx.parallel.saved_tensors import SavedBytesCounter


class PipelineSavedBytes:
    """Counts what the first forward of each stage saves, and how much of it was there at once.

    `saved_bytes`: the most at one time, over all steps; None before the first, and where
    `can_count_saved_bytes` is False.
    """

    def __init__(self, *, can_count_saved_bytes: bool) -> None:
        self.saved_bytes: int | None = None
        self._is_counted = can_count_saved_bytes
        # By stage: bytes of one microbatch.
        self._bytes_of: dict[int, int] = {}

    @contextmanager
    def counting_saved_bytes_of_stage(self, stage: int) -> Iterator[None]:
        """Count what autograd saves in the first forward of each stage."""
        if not self._is_counted or stage in self._bytes_of:
            yield
            return
        saved = SavedBytesCounter()
        with saved.counting_saved_tensors():
            yield
        self._bytes_of[stage] = saved.num_bytes

    def record_stages_in_flight(self, stages: Iterable[int]) -> None:
        """Note the moment after a forward; `stages` has one entry for each microbatch in flight."""
        num_bytes = sum(self._bytes_of.get(stage, 0) for stage in stages)
        if num_bytes > (self.saved_bytes or 0):
            self.saved_bytes = num_bytes
