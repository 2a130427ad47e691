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
from phalanx.core.phases import PhaseTimer
from phalanx.core.registry import list_modules_of_registry
from phalanx.mesh.blocks import find_repeated_blocks
from phalanx.mesh.dtensors import (
    describe_dtensor,
    explain_rows_lost_by_gather,
    find_dtensors_by_name,
)
from phalanx.mesh.fake_tensors import has_fake_parameters
from phalanx.mesh.logical import full_name
from phalanx.mesh.mesh import Mesh
from phalanx.mesh.recorded_init import get_initial_values_of_module
from phalanx.parallel.block_norms import name_model_blocks
from phalanx.parallel.dropout.rng import DropoutRng
from phalanx.parallel.gradients import require_dense_gradients
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.pipeline.shape_inference import raise_first_refusal_on_all_ranks
from phalanx.parallel.pipeline.staged import PipelineOfRank
from phalanx.parallel.protocol import ModuleTransform, ModuleWithObjective, ParallelContext
from phalanx.plan.plan import Plan

_INITIAL_WEIGHTS_DIFFERENCE_SUBJECT = "initial weights of your module"


def discover_transforms() -> list[ModuleTransform]:
    """Every transform of the folders beside this file, in the order they are applied."""
    package = __name__.rpartition(".")[0]
    collected: list[ModuleTransform] = []
    for folder in list_modules_of_registry(package):
        members = getattr(importlib.import_module(f"{package}.{folder}"), "__path__", None)
        for name in list_modules_of_registry(f"{package}.{folder}") if members else ():
            module = importlib.import_module(f"{package}.{folder}.{name}")
            if hasattr(module, "parallelism"):
                collected.append(module.parallelism)
    return sorted(collected, key=lambda transform: transform.order)


def parallelize(
    module: nn.Module,
    plan: Plan,
    mesh: Mesh,
    *,
    phases: PhaseTimer | None = None,
    seed: int | None = None,
    initialize: bool = True,
) -> ParallelModel:
    """Apply the plan's layout, recompute and compile choices to `module`.

    A module on the meta device is filled after sharding, each rank its part: by what was recorded
    as it was built (`mesh/recorded_init.py`), else by its own `initialize(shards, seed)`. Without
    `initialize` it is zero instead: for whoever writes every tensor of `shards()` next, and calls
    `refresh()`, before which it does not train. Any other module must hold the same weights on
    every rank (build it from the same seed). It is changed in place.
    Raises LayoutError for a module that the plan cannot be applied to.
    """
    _require_parallelizable_module(module, plan, mesh)
    on_meta = any(p.is_meta for p in module.parameters())
    root = ModuleWithObjective(module)
    # A dry run (verify/dry_run) has no weights to compare, nor to move.
    if not has_fake_parameters(module):
        _require_same_initial_weights(module, mesh, on_meta=on_meta)
        if not on_meta:
            root.to(mesh.device)
    seed = plan.seed if seed is None else seed
    blocks = find_repeated_blocks(module)
    context = ParallelContext(
        root=root,
        plan=plan,
        mesh=mesh,
        phases=phases or PhaseTimer(),
        blocks=blocks,
        outer=root,
        names=frozenset(full_name(name) for name, _ in module.named_modules()),
        block_of=name_model_blocks(module, blocks),
        dropout_rng=DropoutRng(seed),
    )
    if on_meta:
        context.materialize = _MetaModuleMaterializer(context, seed if initialize else None).run
    if not context.blocks and (plan.activations.recompute != "none" or plan.compile):
        raise LayoutError(
            f"{type(module).__name__} shows no repeated blocks to recompute or compile",
            fix='keep them in an nn.ModuleList, or name them: block_pattern = "layers.*"',
        )
    for transform in discover_transforms():
        if transform.is_needed(plan):
            with _raise_refusal_in_all_stages(context):
                transform.apply(context)
    context.materialize()
    for place_weights in context.when_materialized:
        place_weights()
    return ParallelModel(context, has_weights=initialize or not on_meta)


def _require_same_initial_weights(module: nn.Module, mesh: Mesh, *, on_meta: bool) -> None:
    """Raise where ranks begin with other weights: they would never agree again, and no loss would
    show it. Collective."""
    if not on_meta:
        digest = _hash_module_weights(module)
    elif (recorded := get_initial_values_of_module(module)) is not None:
        digest = recorded.digest
    else:
        return
    mesh.require_agreement({_INITIAL_WEIGHTS_DIFFERENCE_SUBJECT: digest})


def _require_parallelizable_module(module: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Raises LayoutError for a mesh of other ranks, and for a module without shapes or weights,
    with parameters of no elements or of complex numbers, with tensors that are cut already, or with
    sparse gradients."""
    name = type(module).__name__
    if plan.layout.world_size != mesh.world_size:
        raise LayoutError(
            f"the plan is for {plan.layout.world_size} ranks and the mesh has {mesh.world_size}"
        )
    for parameter_name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise LayoutError(
                f"the shape of {parameter_name} is not known yet: {name} is lazy",
                fix="call it once with a sample in your factory, or use the layer that is not lazy",
            )
        if mesh.world_size > 1 and parameter.requires_grad and not parameter.numel():
            shape = list(parameter.shape)
            raise LayoutError(
                f"{parameter_name} is a parameter without elements ({shape}): it has no gradient"
                " that ranks could reduce",
                fix="leave it out, or register None, or a buffer, in its place",
            )
        if parameter.requires_grad and parameter.is_complex():
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise LayoutError(
                f"{parameter_name} is a parameter of {dtype}, and gradients need a real norm",
                fix="keep torch.view_as_real of it as the parameter, and view_as_complex that",
            )
    _require_no_dtensors(module)
    require_dense_gradients(module)
    on_meta = any(parameter.is_meta for parameter in module.parameters())
    can_fill = hasattr(module, "initialize") or get_initial_values_of_module(module) is not None
    if on_meta and not can_fill:
        raise LayoutError(
            f"{name} is on the meta device and cannot fill itself",
            fix="give it initialize(shards, seed) or build it with real weights",
        )


def _require_no_dtensors(module: nn.Module) -> None:
    """Raises LayoutError for a module with DTensors, and says where torch gathers one wrongly."""
    dtensors = find_dtensors_by_name(module)
    if not dtensors:
        return
    # Of several, one that a gather would damage: the others need no more than what `fix` says.
    lossy = [(name, tensor) for name, tensor in dtensors if explain_rows_lost_by_gather(tensor)]
    name, tensor = (lossy or dtensors)[0]
    raise LayoutError(
        f"{name} is a DTensor already ({describe_dtensor(tensor)}), and phalanx cuts a module"
        " itself",
        why=explain_rows_lost_by_gather(tensor) or None,
        fix="give it the module with plain tensors, and say by shard_rules what tensor parallelism"
        " cuts (docs/your-own-module.md)",
    )


class _MetaModuleMaterializer:
    """Gives a module on the meta device memory and values, once: each transform that needs real
    tensors asks for it, and the last of all if none did. `seed` None: zeros."""

    def __init__(self, context: ParallelContext, seed: int | None) -> None:
        self._context, self._seed = context, seed
        self._is_done = False

    def run(self) -> None:
        if self._is_done:
            return
        self._is_done = True
        root, mesh = self._context.root, self._context.mesh
        on_host = self._context.plan.parallel.has_parameters_on_host
        _allocate_meta_tensors(root, mesh.device, parameters_on_host=on_host)
        shards, _ = self._context.shards()
        with torch.no_grad():
            if self._seed is not None:
                recorded = get_initial_values_of_module(root.module)
                if recorded is not None:
                    recorded.fill_parameter_shards(shards)
                else:
                    root.module.initialize(shards, self._seed)  # type: ignore[operator]
                return
            # Not what memory held before: a pipeline infers shapes with these, and might find a
            # NaN.
            for shard in shards.values():
                shard.tensor.zero_()


@contextmanager
def _raise_refusal_in_all_stages(context: ParallelContext) -> Iterator[None]:
    """Raise a refusal of one stage on all of them: they hold different parts of the module."""
    staged = context.axes.find(PipelineOfRank)
    # Before the stages are cut ranks have the same module, and refuse alike.
    if staged is None:
        yield
        return
    refusal: PhalanxError | None = None
    try:
        yield
    except PhalanxError as error:
        refusal = error
    raise_first_refusal_on_all_ranks(staged.stage_group, refusal)


def _allocate_meta_tensors(
    root: nn.Module, device: torch.device, *, parameters_on_host: bool
) -> None:
    """Give tensors on the meta device memory, without values.

    FSDP wants shards that it moves itself on the host.
    """
    target = torch.device("cpu") if parameters_on_host else device

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        # Buffers of a module whose building was recorded have values already.
        if tensor.is_meta:
            return torch.empty_like(tensor, device=target)
        return tensor.to(target)

    tied = _list_modules_of_tied_parameters(root)
    root._apply(allocate)
    # torch makes a new parameter at each place that has one.
    for (first, first_name), *further_parts in tied:
        for part, name in further_parts:
            setattr(part, name, getattr(first, first_name))
    if not parameters_on_host:
        return
    # FSDP moves its own shards, and nothing else: the rest goes to the device here.
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


def _list_modules_of_tied_parameters(root: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places (module, name) of each parameter that has several."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in root.modules():
        for name, parameter in part.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((part, name))
    return [each for each in places.values() if len(each) > 1]


def _hash_module_weights(module: nn.Module) -> str:
    """XXH3 over names, shapes and bytes of every parameter and buffer."""
    hasher = xxhash.xxh3_64()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        hasher.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        # As bytes, for numpy has no bfloat16; flat, for a tensor of no dimensions cannot be seen as
        # bytes.
        hasher.update(tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().data)
    return hasher.hexdigest()
