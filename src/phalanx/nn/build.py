"""From a job to a module and an objective, built-in or the user's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from phalanx.core.block_sizes import get_block_sizes
from phalanx.core.digest import hash_to_stable_64_bits
from phalanx.core.errors import LayoutError
from phalanx.core.host_lock import holding_host_lock
from phalanx.core.registry import import_object_of_kind
from phalanx.job.costs import ModelCosts
from phalanx.job.hugging_face import is_hugging_face
from phalanx.job.model import find_model_kind
from phalanx.job.schema import Job, Model
from phalanx.mesh.rebuilt_init import build_module_in_turn
from phalanx.mesh.recorded_init import build_module_and_record
from phalanx.nn.hugging_face.adapter import (
    build_module_without_memory,
    require_trainable_small_model,
    resolve_model_factory,
)
from phalanx.nn.hugging_face.refusals import SeparateWeightsError
from phalanx.nn.objective import Objective, build_logits_cross_entropy, causal_cross_entropy

MODELS_PACKAGE = "phalanx.nn.models"
_MAX_SHOWN_PARAMS = 5

BUILD_TIMEOUT_S = 1800.0
"""A rank that builds a module for longer keeps the others of its machine from it."""


def build_model(job: Job, shape: ModelCosts, *, is_recorded: bool = False) -> nn.Module:
    """A built-in model on the meta device (`parallelize` fills it), or the user's module with
    its own weights.

    With `is_recorded` a large module of the user's (`get_block_sizes` says what is large) is on
    meta, too, and only what building it does to its parameters is recorded; where that is not
    possible ranks of a machine build it one at a time.
    """
    if job.model.is_foreign:
        is_large = 4 * shape.num_params >= get_block_sizes().recorded_init_bytes
        if is_recorded and is_large:
            return build_large_module(job.model, job.run.seed)
        return build_own_module(job.model, job.run.seed)
    build = import_object_of_kind(shape.kind, MODELS_PACKAGE, "build")
    with torch.device("meta"):
        module: nn.Module = build(shape)
    return module


def build_own_module(model: Model, seed: int, *, is_recorded: bool = False) -> nn.Module:
    """Call the user's factory from the same random state on every rank."""
    assert model.kind is not None
    factory = resolve_model_factory(model.kind)
    if is_recorded:
        recorded = _build_module_without_memory(factory, model, seed)
        if recorded is not None:
            return recorded
    module = _call_factory_seeded(factory, model, seed)
    if not isinstance(module, nn.Module):
        raise LayoutError(f"{model.kind} returned {type(module).__name__}, not an nn.Module")
    return module


def build_large_module(model: Model, seed: int) -> nn.Module:
    """Call the user's factory without memory for parameters, or in turn with other ranks of this
    machine: what it returns has parameters on the meta device where they can be filled later."""
    assert model.kind is not None
    recorded = _build_module_without_memory(resolve_model_factory(model.kind), model, seed)
    if recorded is not None:
        return recorded
    return build_module_in_turn(
        functools.partial(build_own_module, model, seed),
        functools.partial(holding_host_lock, "build", BUILD_TIMEOUT_S),
    )


def can_build_without_memory(model: Model) -> bool:
    """True if ranks record what building the module does, and False if each builds it whole, in
    turn."""
    assert model.kind is not None
    return _build_module_without_memory(resolve_model_factory(model.kind), model, 0) is not None


def _call_factory_seeded(factory: Callable[..., Any], model: Model, seed: int) -> Any:
    torch.manual_seed(hash_to_stable_64_bits("foreign init", seed) % 2**63)
    return factory(**model.args)


def _build_module_without_memory(
    factory: Callable[..., Any], model: Model, seed: int
) -> nn.Module | None:
    """The module without memory for its parameters; None where the factory must be called
    plainly."""
    torch.manual_seed(hash_to_stable_64_bits("foreign init", seed) % 2**63)
    kind = str(model.kind)

    def build() -> nn.Module:
        module: nn.Module = factory(**model.args)
        return module

    try:
        module = (
            build_module_without_memory(kind, build)
            if is_hugging_face(kind)
            else build_module_and_record(build)
        )
    except SeparateWeightsError:
        raise
    # Of any kind: code that reads its weights' numbers fails in its own ways, and an error that is
    # not of fake tensors comes again when it is called plainly.
    except Exception:
        return None
    if is_hugging_face(kind):
        require_trainable_small_model(kind, model.args)
    return module


def build_objective(job: Job) -> Objective:
    """The user's objective, or the one of the model: of a user's own, chunked cross-entropy over
    tokens."""
    objective: Objective
    if job.model.objective is not None:
        objective = import_object_of_kind(job.model.objective, MODELS_PACKAGE, "objective")
        _require_nothing_to_train(objective, job.model.objective)
    elif is_hugging_face(job.model.kind):
        objective = build_logits_cross_entropy(job.train.loss_chunk_tokens)
    elif job.model.is_foreign:
        objective = causal_cross_entropy(job.train.loss_chunk_tokens)
    else:
        objective = import_object_of_kind(
            find_model_kind(job.model), MODELS_PACKAGE, "default_objective"
        )(job.train.loss_chunk_tokens)
    return objective


def _require_nothing_to_train(objective: Objective, name: str) -> None:
    """Raise LayoutError for an objective with parameters of its own: the optimizer has the model's,
    so that they would stay as they are and be in no checkpoint, without a word."""
    if not isinstance(objective, nn.Module):
        return
    names = [
        param_name for param_name, param in objective.named_parameters() if param.requires_grad
    ]
    if names:
        raise LayoutError(
            "the objective has parameters to train, and only the model's are trained",
            where=f"model.objective {name}",
            why=", ".join(names[:_MAX_SHOWN_PARAMS]),
            fix=(
                "make them a part of the model and return them with its outputs, or set"
                " requires_grad to False"
            ),
        )
