"""How data parallelism goes about a layout: what a job may say of it beyond the degrees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.core.errors import LayoutError
from phalanx.job.schema import Parallel

ALL_BLOCKS = 0
KEYS = (
    "accumulate",
    "keep_whole_below",
    "prefetch",
    "offload",
    "static_graph",
    "unused_parameters",
)


def split_dim(shape: Sequence[int], num_ranks: int) -> int:
    """The dimension along which zero2 and zero3 split a parameter: the first.

    Of a stack of matrices, as experts are, another where that makes even parts: there may be fewer
    matrices than ranks, and most would hold nothing.
    """
    if len(shape) < 3 or shape[0] % num_ranks == 0:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % num_ranks == 0), 0)


@dataclass(frozen=True)
class DataParallel:
    """Each field is the job key `parallel.<its name>`. `blocks_per_unit`: 0 is the whole model."""

    accumulate: str = "unsharded"
    blocks_per_unit: int = 1
    keep_whole_below: int = 0
    prefetch: int | None = None
    offload: str = "none"
    static_graph: bool = False
    unused_parameters: str = "refuse"

    @classmethod
    def of(cls, parallel: Parallel) -> DataParallel:
        per_unit = ALL_BLOCKS if parallel.blocks_per_unit == "all" else parallel.blocks_per_unit
        return cls(blocks_per_unit=per_unit, **{key: getattr(parallel, key) for key in KEYS})

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> DataParallel:
        return cls(**body)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def state_on_host(self) -> bool:
        return self.offload != "none"

    @property
    def parameters_on_host(self) -> bool:
        return self.offload == "parameters"

    def can_run(self, zero_stage: int) -> bool:
        """Whole parameters have no shards that could wait on the host."""
        return zero_stage >= 2 or not self.parameters_on_host

    def require_runnable(self, name: str, zero_stage: int) -> None:
        """Raises LayoutError for a layout (`name`) that cannot do what is asked."""
        if not self.can_run(zero_stage):
            raise LayoutError(
                f"parallel.offload=parameters needs shards, and {name} holds every parameter whole",
                fix=(
                    "set parallel.zero_stage=2 or 3 over two ranks or more, or"
                    " parallel.offload=optimizer"
                ),
            )
