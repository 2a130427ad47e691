"""Names phases as NVTX ranges, which Nsight Systems shows beside kernels."""

from __future__ import annotations

from typing import Any

import torch

from phalanx.core.phases import PhaseTimer


class NvtxRanges:
    """Observes phases: each is a range of the thread that trains. It has not run on a GPU."""

    def __init__(self) -> None:
        self._depth = 0

    def begin_span(self, name: str, words: str, axis: str, mark: Any) -> None:
        self._depth += 1
        torch.cuda.nvtx.range_push(f"{name}: {words}" if words else name)

    def end_span(self, mark: Any) -> None:
        # A phase that was open before has pushed no range.
        if self._depth:
            self._depth -= 1
            torch.cuda.nvtx.range_pop()

    def observe_thread(self, phases: PhaseTimer) -> NvtxRanges:
        # Ranges are of the thread that pushes them.
        return NvtxRanges()
