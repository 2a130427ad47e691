"""The link by which a rank tells the process that started it about its end, before its own process
ends."""

from __future__ import annotations

from typing import Protocol

from phalanx.core.typed_json import JsonObject


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

    def wait_for_next_attempt(self, held_step: int) -> JsonObject | None:
        """Wait until the ranks are started again, as a rank that has failed because of another one
        alone and left its process groups.

        Returns the payload of the next attempt, whose number, port and log are this process's by
        then. None: whoever started this rank keeps no process. `held_step`: this rank holds the
        state after that step; -1: none.
        """


class SilentRankLink:
    """The link of a rank whose launcher reads nothing but exit codes."""

    def report_error(self, error: BaseException) -> None:
        pass

    def report_work_done(self) -> None:
        pass

    def forward_refused_event(self, line: str) -> None:
        pass

    def wait_for_next_attempt(self, held_step: int) -> JsonObject | None:
        return None
