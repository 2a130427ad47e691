"""Ranks that are done and whose processes do not end: whoever waits for the command hears why."""

from __future__ import annotations

import math
from collections.abc import Sequence

from phalanx.core.units import format_seconds

# After the first rank left: what a rank does on its way out usually takes less.
SAY_AFTER_S = 8.0
# After all were done, where none has left: they may sample a text, which nobody cuts short.
SAY_NONE_LEFT_AFTER_S = 60.0


class LateExits:
    """Says once that ranks of a run that is done do not end, and then that they are killed."""

    def __init__(self) -> None:
        self._is_none_left_said = self._is_said = False
        self._done_s = math.inf

    def describe_none_left(self, num_ranks: int, now_s: float) -> str:
        """A sentence if all of `num_ranks` ranks have been done for long, and none has ended;
        empty if it is no time yet, or was said. They are waited for, as any program is."""
        self._done_s = min(self._done_s, now_s)
        if self._is_none_left_said or now_s < self._done_s + SAY_NONE_LEFT_AFTER_S:
            return ""
        self._is_none_left_said = True
        return (
            f"all work is done, but {_name_processes(range(num_ranks))} not ended after"
            f" {format_seconds(SAY_NONE_LEFT_AFTER_S)}: sampling text, a thread that is no daemon,"
            " an exit handler (atexit) or a sink takes so long; Ctrl-C ends it"
        )

    def describe(self, ranks: Sequence[int], waited_s: float, kill_in_s: float) -> str:
        """A sentence on `ranks`, which are done and have not ended `waited_s` after the first
        one; empty if it is no time yet, or was said."""
        if self._is_said or not ranks or waited_s < SAY_AFTER_S or math.isinf(kill_in_s):
            return ""
        self._is_said = True
        return (
            f"all work is done, but {_name_processes(ranks)} not ended: a thread that is no daemon,"
            " an exit handler (atexit) or a sink may keep it from that; killed in"
            f" {format_seconds(max(kill_in_s, 0.0))}"
        )

    def describe_kill(self, ranks: Sequence[int]) -> str:
        """A sentence on `ranks`, which are killed now; empty where nobody was told to wait."""
        if not self._is_said or not ranks:
            return ""
        return f"{_name_processes(ranks)} still not ended: killed; what the run saved stands"


def _name_processes(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    if len(ranks) == 1:
        return f"the process of rank {numbers} has"
    return f"the processes of ranks {numbers} have"
