"""What a finished build of a dataset did: its size, its speed. Torch-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from phalanx.data.build import BuildProgress
from phalanx.data.dataset import Dataset


@dataclass(frozen=True)
class BuildSpeed:
    """The work and the rates of one call. Shards that an interrupted build left are not in the
    bytes and the rates.
    """

    elapsed_s: float
    num_workers: int
    num_shards_kept: int
    text_bytes: int
    text_bytes_per_s: float
    tokenizer_bytes_per_s_per_worker: float
    tokenizer_share_of_time: float


@dataclass(frozen=True)
class BuildSummary:
    """A dataset and what built it. `progress` is the build's last; None if the dataset was there
    already.
    """

    dataset: Dataset
    progress: BuildProgress | None

    @property
    def num_bytes(self) -> int:
        """The size of the shards."""
        return sum(shard.facts.num_bytes for shard in self.dataset.shards)

    @property
    def speed(self) -> BuildSpeed | None:
        if self.progress is None:
            return None
        return _compute_build_speed(self.progress)

    def to_json(self) -> dict[str, Any]:
        """Facts of `phalanx data build --json`."""
        dataset = self.dataset
        manifest = dataset.manifest.to_json()
        return {
            "directory": str(dataset.directory),
            "digest": dataset.digest,
            "num_documents": dataset.num_documents,
            "num_tokens": dataset.num_tokens,
            "num_bytes": self.num_bytes,
            **{key: value for key, value in manifest.items() if key not in ("format", "checksum")},
            "build": None if self.speed is None else asdict(self.speed),
        }


def _compute_build_speed(progress: BuildProgress) -> BuildSpeed:
    # Without the shards of an interrupted build, which took their time then.
    text_bytes = progress.counts.text_bytes - progress.kept_counts.text_bytes
    encode_s = progress.counts.encode_s - progress.kept_counts.encode_s
    return BuildSpeed(
        elapsed_s=progress.elapsed_s,
        num_workers=progress.num_workers,
        num_shards_kept=progress.num_shards_kept,
        text_bytes=text_bytes,
        text_bytes_per_s=text_bytes / progress.elapsed_s if progress.elapsed_s else 0.0,
        tokenizer_bytes_per_s_per_worker=text_bytes / encode_s if encode_s else 0.0,
        tokenizer_share_of_time=encode_s / (progress.elapsed_s * progress.num_workers),
    )
