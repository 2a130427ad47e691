"""From a job to a module and an objective, built-in or the user's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from phalanx.core.digest import stable_hash64
from phalanx.core.errors import LayoutError
from phalanx.core.registry import resolve_kind
from phalanx.job.costs import ModelCosts
from phalanx.job.hugging_face import is_hugging_face
from phalanx.job.model import find_model_kind
from phalanx.job.schema import Job, Model
from phalanx.nn.hugging_face.adapter import find_factory
from phalanx.nn.objective import Objective, causal_cross_entropy, logits_cross_entropy

MODELS = "phalanx.nn.models"


def build_model(job: Job, shape: ModelCosts) -> nn.Module:
    """A built-in model on the meta device (`parallelize` fills it), or the user's module with
    its own weights."""
    if job.model.is_foreign:
        return build_foreign(job.model, job.run.seed)
    build = resolve_kind(shape.kind, MODELS, "build")
    with torch.device("meta"):
        module: nn.Module = build(shape)
    return module


def build_foreign(model: Model, seed: int) -> nn.Module:
    """Call the user's factory from the same random state on every rank."""
    assert model.kind is not None
    factory = find_factory(model.kind)
    torch.manual_seed(stable_hash64("foreign init", seed) % 2**63)
    module: Any = factory(**model.args)
    if not isinstance(module, nn.Module):
        raise LayoutError(f"{model.kind} returned {type(module).__name__}, not an nn.Module")
    return module


def build_objective(job: Job) -> Objective:
    """The user's objective, or the one of the model: of a user's own, chunked cross-entropy over
    tokens."""
    objective: Objective
    if job.model.objective is not None:
        objective = resolve_kind(job.model.objective, MODELS, "objective")
    elif is_hugging_face(job.model.kind):
        objective = logits_cross_entropy(job.train.loss_chunk_tokens)
    elif job.model.is_foreign:
        objective = causal_cross_entropy(job.train.loss_chunk_tokens)
    else:
        objective = resolve_kind(find_model_kind(job.model), MODELS, "default_objective")(
            job.train.loss_chunk_tokens
        )
    return objective
