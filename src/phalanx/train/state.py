"""TrainState: exactly what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phalanx.checkpoint import store
from phalanx.checkpoint.manifest import Manifest
from phalanx.core.errors import CheckpointError
from phalanx.core.phases import Phases
from phalanx.mesh.logical import LogicalShard
from phalanx.optim.build import optimizer_shards
from phalanx.parallel.model import ParallelModel


@dataclass
class TrainState:
    """Steps done, tokens seen, and the tensors that training changes.

    The schedule and all randomness are functions of (seed, step), and the data cursor is `samples_seen`: one number
    each, at any layout.
    """

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    seed: int
    tokenizer: str = ""
    """Digest of what made the tokens; empty where there is none, or nobody said."""
    step: int = 0
    tokens_seen: int = 0
    samples_seen: int = 0

    def shards(self) -> dict[str, LogicalShard]:
        """Every tensor of the state by its full-model name."""
        model = self.model.shards()
        mesh = self.model.mesh
        named = self.model.named_parameters()
        return model | optimizer_shards(self.optimizer, named, model, rank=mesh.rank, world_size=mesh.world_size)

    def facts(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "samples_seen": self.samples_seen,
            "seed": self.seed,
            "tokenizer": self.tokenizer,
        }

    def save(
        self,
        run_dir: Path,
        *,
        job_digest: str,
        phases: Phases,
        before_commit: Callable[[], None] = lambda: None,
    ) -> tuple[Path, int]:
        """Write RUN/checkpoints/step-N; returns (directory, bytes). Collective; raises CheckpointError.

        `before_commit` is called when every rank's part is written, before there is a checkpoint.
        """
        return store.save(
            run_dir,
            self.step,
            self.shards(),
            aliases=self.model.aliases(),
            facts=self.facts(),
            job_digest=job_digest,
            mesh=self.model.mesh,
            phases=phases,
            before_commit=before_commit,
        )

    def restore(self, directory: Path, *, phases: Phases) -> None:
        """Continue from a checkpoint. Collective; raises CheckpointError with the state untouched."""

        def require(manifest: Manifest) -> None:
            missing = sorted(set(self.facts()) - set(manifest.facts) - {"tokenizer"})
            if missing:
                raise CheckpointError(f"it does not say {', '.join(missing)}", where=str(directory))
            seed = manifest.facts["seed"]
            if seed != self.seed:
                raise CheckpointError(f"it was written with run.seed {seed}, not {self.seed}", where=str(directory))
            tokenizer = manifest.facts.get("tokenizer", "")
            if tokenizer and self.tokenizer and tokenizer != self.tokenizer:
                raise CheckpointError(
                    f"it was trained on tokens of tokenizer {tokenizer}, and the data is of {self.tokenizer}",
                    where=str(directory),
                    fix="give it the data it was trained on, or start a new run",
                )

        shards = self.shards()
        facts = store.load(directory, shards, mesh=self.model.mesh, phases=phases, require=require).facts
        self.step, self.tokens_seen = int(facts["step"]), int(facts["tokens_seen"])
        self.samples_seen = int(facts["samples_seen"])
