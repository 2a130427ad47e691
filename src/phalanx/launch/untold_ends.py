"""How long the ends of ranks' processes have not been told by the server that is their parent:
it tells at once, unless it is stopped or gets no processor."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from phalanx.launch.processor_lack import ProcessorLack


@dataclass(frozen=True)
class _FirstLook:
    """When a rank was first seen to have ended, and what the server had been without by then."""

    seen_s: float
    server_lack_s: float


class UntoldEnds:
    """Looks at the server with process `server_pid` while ranks have ended that it has not told
    of."""

    def __init__(self, server_pid: int) -> None:
        self._server_pid = server_pid
        self._first_looks: dict[int, _FirstLook] = {}
        self._lack: ProcessorLack | None = None

    def look(self, ended: Collection[int], now_s: float) -> dict[int, float]:
        """For each of the ranks `ended` the seconds since it was first seen so, without those in
        which the server wanted a processor and had none."""
        if not ended:
            self._first_looks, self._lack = {}, None
            return {}
        if self._lack is None:
            self._lack = ProcessorLack([self._server_pid], now_s)
        self._lack.look([self._server_pid], now_s)
        lack_s, untold_s = self._lack.total_s, {}
        for rank in ended:
            first = self._first_looks.setdefault(rank, _FirstLook(now_s, lack_s))
            untold_s[rank] = max(0.0, now_s - first.seen_s - (lack_s - first.server_lack_s))
        return untold_s
