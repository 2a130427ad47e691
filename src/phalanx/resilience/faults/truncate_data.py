"""The data lose their end on the disk while the run trains on them: the kernel ends the process
that reads behind it."""

from __future__ import annotations

from phalanx.resilience.data_damage import cut_after_header, list_own_shards
from phalanx.resilience.expectation import Ending, Expectation
from phalanx.resilience.fault import FaultSite

EXPECTATION = Expectation(
    verdict="data damaged",
    ending=Ending.STOPS,
    # SIGBUS; the rank that is started again looks at the files.
    preceded_by=("signal",),
    detected_s=10.0,
    trained_again_s=None,
    names_rank=False,
    exit_code=4,
    says=r"shard-\d+\.tokens: the corpus has changed since the run began \(it has \d+ bytes",
)


def inject(site: FaultSite) -> None:
    """Cut the run's own shards of tokens behind their headers."""
    for path in list_own_shards(site.run_dir):
        cut_after_header(path)
