"""Degrees along the axes of parallelism, and which rank stands where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

from phalanx.core.errors import LayoutError
from phalanx.job.nearest import find_nearest_degrees

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
    def gradient_reduction_layout(self) -> Layout:
        """The layout of the ranks that reduce gradients together: ranks of cp have other tokens,
        and count as more of dp_shard."""
        return replace(self, dp_shard=self.dp_shard * self.cp, cp=1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of `rank` on each axis. Raises LayoutError for a rank outside the
        layout."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside the {self.world_size} ranks of {self}")
        coordinates: dict[str, int] = {}
        # The innermost axis varies fastest: neighbouring ranks are of one tp group.
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


def complete_layout_degrees(
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
    open_axes = [axis for axis in ("dp_replicate", "dp_shard") if degrees[axis] is None]
    if open_axes and num_ranks % product == 0:
        # With both open the first, dp_replicate, takes the rest, and dp_shard stays 1.
        return Layout(**fixed, **{open_axes[0]: num_ranks // product})
    if product == num_ranks:
        return Layout(**fixed)
    named = {axis: degree for axis, degree in fixed.items() if degree > 1}
    if not named:
        raise LayoutError(
            f"all degrees are 1, and there are {num_ranks} ranks",
            fix="leave parallel.dp_replicate open",
        )
    nearest = find_nearest_degrees(num_ranks, named, must_fill=not open_axes)
    together = " x ".join(f"{axis} {degree}" for axis, degree in named.items())
    if len(named) > 1:
        together += f" = {product}"
    verb = "is not"
    if open_axes:
        verb = "does not divide"
    raise LayoutError(
        f"{together} {verb} the {num_ranks} ranks",
        fix=f"nearest: {' x '.join(f'{axis}={degree}' for axis, degree in nearest.items())}",
    )


def choose_zero_split_dim(shape: Sequence[int], num_ranks: int) -> int:
    """The dimension along which zero2 and zero3 split a parameter: the first.

    Of a stack of matrices, as experts are, another where that makes even parts: there may be fewer
    matrices than ranks, and most would hold nothing.
    """
    # The ranks shard by this function, too: what the plan counts is what they hold.
    if len(shape) < 3 or shape[0] % num_ranks == 0:
        return 0
    for dim, size in enumerate(shape):
        if size % num_ranks == 0:
            return dim
    return 0
