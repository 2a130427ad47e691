"""The link by which a rank tells the process that started it about its end, before its own process
ends."""

from __future__ import annotations

from typing import Protocol


class RankLink(Protocol):
    """Given to the entry that each rank calls."""

    def report_error(self, error: BaseException) -> None:
        """Tell why this rank fails, before anything that may wait for other ranks.

        The first call counts.
        """

    def report_work_done(self) -> None:
        """Tell that this rank's work is done, whatever comes of what follows, such as a sample
        of text."""

    def forward_refused_event(self, line: str) -> None:
        """Hand on the line of an event that the disk did not take, so that a person sees it."""


class SilentRankLink:
    """The link of a rank whose launcher reads nothing but exit codes."""

    def report_error(self, error: BaseException) -> None:
        pass

    def report_work_done(self) -> None:
        pass

    def forward_refused_event(self, line: str) -> None:
        pass
