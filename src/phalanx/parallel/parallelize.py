"""Turn any nn.Module into this rank's part of it, by the plan, in one fixed order."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from phalanx.core.errors import LayoutError, PhalanxError
from phalanx.core.phases import Phases
from phalanx.core.registry import names
from phalanx.mesh.blocks import find_blocks
from phalanx.mesh.logical import full_name
from phalanx.mesh.mesh import Mesh
from phalanx.parallel.dropout.rng import DropoutRng
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.pipeline.shape_inference import raise_first_refusal
from phalanx.parallel.pipeline.staged import Staged
from phalanx.parallel.protocol import ParallelContext, Parallelism, Root
from phalanx.plan.plan import Plan


def transforms() -> list[Parallelism]:
    """Every transform of the folders beside this file, in the order they are applied."""
    package = __name__.rpartition(".")[0]
    collected: list[Parallelism] = []
    for folder in names(package):
        members = getattr(importlib.import_module(f"{package}.{folder}"), "__path__", None)
        for name in names(f"{package}.{folder}") if members else ():
            module = importlib.import_module(f"{package}.{folder}.{name}")
            if hasattr(module, "parallelism"):
                collected.append(module.parallelism)
    return sorted(collected, key=lambda transform: transform.order)


def parallelize(
    module: nn.Module,
    plan: Plan,
    mesh: Mesh,
    *,
    phases: Phases | None = None,
    seed: int | None = None,
    initialize: bool = True,
) -> ParallelModel:
    """Apply the plan's layout, recompute and compile choices to `module`.

    A module on the meta device is filled after sharding by its own `initialize(shards, seed)`, each
    rank its part. Without `initialize` it is zero instead: for whoever writes every tensor of
    `shards()` next, and calls `refresh()`, before which it does not train. Any other module must
    hold the same weights on every rank (build it from the same seed). It is changed in place.
    Raises LayoutError for a module that the plan cannot be applied to.
    """
    if plan.layout.world_size != mesh.world_size:
        raise LayoutError(
            f"the plan is for {plan.layout.world_size} ranks and the mesh has {mesh.world_size}"
        )
    lazy = [name for name, p in module.named_parameters() if is_lazy(p)]
    if lazy:
        raise LayoutError(
            f"the shape of {lazy[0]} is not known yet: {type(module).__name__} is lazy",
            fix="call it once with a sample in your factory, or use the layer that is not lazy",
        )
    on_meta = any(p.is_meta for p in module.parameters())
    if on_meta and not hasattr(module, "initialize"):
        raise LayoutError(
            f"{type(module).__name__} is on the meta device and cannot fill itself",
            fix="give it initialize(shards, seed) or build it with real weights",
        )
    root = Root(module)
    if not on_meta:
        mesh.require_agreement({"initial weights of your module": _fingerprint(module)})
        root.to(mesh.device)
    done = not on_meta

    def materialize() -> None:
        nonlocal done
        if done:
            return
        done = True
        _allocate(root, mesh.device, parameters_on_host=plan.data_parallel.parameters_on_host)
        shards, _ = context.shards()
        with torch.no_grad():
            if (
                not initialize
            ):  # a pipeline rehearses with them: what memory held before might be refused as NaN
                for shard in shards.values():
                    shard.tensor.zero_()
                return
            module.initialize(shards, plan.seed if seed is None else seed)  # type: ignore[operator]

    context = ParallelContext(
        root=root,
        plan=plan,
        mesh=mesh,
        phases=phases or Phases(),
        blocks=find_blocks(module),
        outer=root,
        materialize=materialize,
        names=frozenset(full_name(name) for name, _ in module.named_modules()),
        dropout_rng=DropoutRng(plan.seed if seed is None else seed),
    )
    context.block_numbers = tuple(range(len(context.blocks)))
    if not context.blocks and (plan.recompute != "none" or plan.compile):
        raise LayoutError(
            f"{type(module).__name__} shows no repeated blocks to recompute or compile",
            fix='keep them in an nn.ModuleList, or name them: block_pattern = "layers.*"',
        )
    for transform in transforms():
        if transform.wanted(plan):
            with _raise_in_all_stages(context):
                transform.apply(context)
    materialize()
    return ParallelModel(context, has_weights=initialize or not on_meta)


@contextmanager
def _raise_in_all_stages(context: ParallelContext) -> Iterator[None]:
    """Raise a refusal of one stage on all of them: they hold different parts of the module."""
    staged = context.axes.find(Staged)
    if staged is None:  # before the stages are cut ranks have the same module, and refuse alike
        yield
        return
    refusal: PhalanxError | None = None
    try:
        yield
    except PhalanxError as error:
        refusal = error
    raise_first_refusal(staged.stage_group, refusal)


def _allocate(root: nn.Module, device: torch.device, *, parameters_on_host: bool) -> None:
    """Give tensors on the meta device memory, without values.

    FSDP wants shards that it moves itself on the host.
    """
    if not parameters_on_host:
        root.to_empty(device=device)
        return
    root.to_empty(device="cpu")
    for part in root.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                part.register_parameter(
                    name, nn.Parameter(parameter.to(device), parameter.requires_grad)
                )
        for name, buffer in part.named_buffers(recurse=False):
            part.register_buffer(
                name, buffer.to(device), persistent=name not in part._non_persistent_buffers_set
            )


def _fingerprint(module: nn.Module) -> str:
    """XXH3 over names, shapes and bytes of every parameter and buffer."""
    hasher = xxhash.xxh3_64()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        hasher.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        hasher.update(tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().data)
    return hasher.hexdigest()
