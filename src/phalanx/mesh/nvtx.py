"""Names phases as NVTX ranges, which Nsight Systems shows beside kernels."""

from __future__ import annotations

from typing import Any

import torch

from phalanx.core.phases import PhaseTimer


class NvtxRanges:
    """Observes phases: each is a range, which may end in another thread than it began in: hooks run
    in autograd's. It has not run on a GPU."""

    def __init__(self) -> None:
        self._open: list[int] = []

    def begin_span(self, name: str, words: str, axis: str, mark: Any) -> None:
        self._open.append(torch.cuda.nvtx.range_start(f"{name}: {words}" if words else name))

    def end_span(self, mark: Any) -> None:
        # A phase that was open before has begun no range.
        if self._open:
            torch.cuda.nvtx.range_end(self._open.pop())

    def observe_thread(self, phases: PhaseTimer) -> NvtxRanges:
        # Phases of another thread are on a stack of their own.
        return NvtxRanges()
