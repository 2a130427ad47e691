"""ParametersOfRank: what this rank holds of a model, for optimizers and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from phalanx.mesh.logical import LogicalShard, full_name
from phalanx.parallel.protocol import ParallelContext


class ParametersOfRank:
    """Each view first frees weights that a forward without a backward has left gathered: FSDP
    shows whole parameters until then."""

    def __init__(self, context: ParallelContext) -> None:
        self._context, self._module = context, context.root.module

    def iterate_optimizer_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that an optimizer updates, under the module's raw names."""
        self._context.hooks.run_release_weights_hooks()
        return self._context.optimizer_params.iterate_optimizer_parameters(self._module)

    def collect_shards(self) -> tuple[dict[str, LogicalShard], dict[str, str]]:
        """Shards of parameters and persistent buffers by full-model name; names of tied tensors ->
        the name they are stored under."""
        self._context.hooks.run_release_weights_hooks()
        return self._context.shards()

    def collect_trained_shards(self) -> dict[str, LogicalShard]:
        """Shards of what `iterate_optimizer_parameters` gives, which may be less of each parameter
        than the rank holds."""
        shards, _ = self.collect_shards()
        for raw_name, part in self._context.optimizer_params.iterate_substitute_parameters(
            self._module
        ):
            name = full_name(raw_name)
            shards[name] = self._context.find_replica_position.shard(name, part)
        return shards
