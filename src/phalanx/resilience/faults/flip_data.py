"""Bits of the data flip on the disk while the run trains on them: what is read next is not what was
written."""

from __future__ import annotations

from phalanx.resilience.data_damage import flip_bit_of_each_chunk, list_own_shards
from phalanx.resilience.expectation import Ending, Expectation
from phalanx.resilience.fault import FaultSite

EXPECTATION = Expectation(
    verdict="data damaged",
    ending=Ending.STOPS,
    detected_s=5.0,
    trained_again_s=None,
    # All ranks read the same files.
    names_rank=False,
    exit_code=4,
    says=r"shard-\d+\.tokens: bytes \d+ to \d+ are not what was written [^;]*; tokens \d+ to \d+"
    r"[^;]*; read for sample \d+",
)


def inject(site: FaultSite) -> None:
    """Flip one bit in each 64 KiB of the run's own shards of tokens."""
    for path in list_own_shards(site.run_dir):
        flip_bit_of_each_chunk(path)
