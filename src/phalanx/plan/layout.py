"""Degrees along the axes of parallelism, which rank stands where, and the options of data
parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from phalanx.core.errors import LayoutError
from phalanx.job.nearest import nearest_degrees
from phalanx.job.schema import Parallel

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Layout:
    """Degrees along `AXES`, outermost first: rank = ((((pp)·dp_replicate + r)·dp_shard + s)·cp +
    c)·tp + t.

    `ep` folds over dp_shard × cp and adds no ranks.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in fields(self):
            degree = getattr(self, axis.name)
            if not isinstance(degree, int) or degree < 1:
                raise LayoutError(
                    f"{axis.name} is {degree!r}; a degree is a whole number of at least 1"
                )
        if (self.dp_shard * self.cp) % self.ep:
            raise LayoutError(
                f"ep {self.ep} does not divide dp_shard x cp = {self.dp_shard * self.cp}"
            )

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def reduced(self) -> Layout:
        """The layout of the ranks that reduce gradients together: ranks of cp have other tokens,
        and count as more of dp_shard."""
        return replace(self, dp_shard=self.dp_shard * self.cp, cp=1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of `rank` on each axis. Raises LayoutError for a rank outside the
        layout."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside the {self.world_size} ranks of {self}")
        coordinates: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, coordinates[axis] = divmod(rank, getattr(self, axis))
        return {axis: coordinates[axis] for axis in AXES}

    def data_parallel_rank(self, rank: int) -> int:
        """The index of the share of the global batch that `rank` reads; equal for ranks that differ
        only in pp, cp or tp."""
        coordinates = self.coordinates(rank)
        return coordinates["dp_replicate"] * self.dp_shard + coordinates["dp_shard"]

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, int]) -> Layout:
        return cls(**value)

    def __str__(self) -> str:
        parts = [f"{name}={degree}" for name, degree in asdict(self).items() if degree > 1]
        return " x ".join(parts) or "one rank"


def fill_layout(
    num_ranks: int,
    *,
    pp: int = 1,
    dp_replicate: int | None = None,
    dp_shard: int | None = None,
    cp: int = 1,
    tp: int = 1,
) -> Layout:
    """The layout of `num_ranks` with these degrees; a data-parallel degree that is left open takes
    what remains.

    Where both are open it is dp_replicate. Raises LayoutError for a product that does not divide
    the ranks (or, with nothing open, is not their number), with the nearest degrees that do.
    """
    degrees = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
    fixed = {axis: degree for axis, degree in degrees.items() if degree is not None}
    product = Layout(**fixed).world_size
    open_axis = next((axis for axis in ("dp_replicate", "dp_shard") if degrees[axis] is None), None)
    if open_axis is not None and num_ranks % product == 0:
        return Layout(**fixed, **{open_axis: num_ranks // product})
    if product == num_ranks:
        return Layout(**fixed)
    named = {axis: degree for axis, degree in fixed.items() if degree > 1}
    if not named:
        raise LayoutError(
            f"all degrees are 1, and there are {num_ranks} ranks",
            fix="leave parallel.dp_replicate open",
        )
    nearest = nearest_degrees(num_ranks, named, must_fill=open_axis is None)
    together = f" = {product}" if len(named) > 1 else ""
    raise LayoutError(
        f"{' x '.join(f'{axis} {degree}' for axis, degree in named.items())}{together} "
        f"{'is not' if open_axis is None else 'does not divide'} the {num_ranks} ranks",
        fix=f"nearest: {' x '.join(f'{axis}={degree}' for axis, degree in nearest.items())}",
    )


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
