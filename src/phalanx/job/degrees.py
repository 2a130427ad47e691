"""The degrees of parallelism that a job gives, with 1 for those it leaves out. Torch-free."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Degrees:
    """Degree along each axis, outermost first, as the job gives it; 1 where it gives none.

    For the data-parallel axes that is not yet the layout: the plan fills what is left open.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def model_parallel_size(self) -> int:
        """Ranks that work on the same samples: pp x cp x tp."""
        return self.pp * self.cp * self.tp

    @property
    def num_expert_shards(self) -> int:
        """The least dp_shard that lets ep fold over dp_shard x cp."""
        # ep divides dp_shard x cp exactly where ep / gcd(ep, cp) divides dp_shard.
        return self.ep // math.gcd(self.ep, self.cp)

    def degrees_above_one(self, *axes: str) -> dict[str, int]:
        """The degrees above 1, of these axes or of all, by axis from the outermost to the
        innermost."""
        return {
            axis: degree
            for axis, degree in asdict(self).items()
            if degree > 1 and (not axes or axis in axes)
        }
