"""From a job to a module and an objective, built-in or the user's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from phalanx.core.digest import stable_hash64
from phalanx.core.errors import LayoutError
from phalanx.core.registry import is_foreign, resolve
from phalanx.job.schema import Job, Model
from phalanx.job.shape import ModelShape
from phalanx.nn.objective import Objective, causal_cross_entropy

MODELS = "phalanx.nn.models"


def build_model(job: Job, shape: ModelShape) -> nn.Module:
    """A built-in model on the meta device (`parallelize` fills it), or the user's module with its own weights."""
    if is_foreign(job.model.kind):
        return build_foreign(job.model, job.run.seed)
    build = resolve(job.model.kind, MODELS, "build")
    with torch.device("meta"):
        module: nn.Module = build(shape, rope_theta=job.model.rope_theta, norm_eps=job.model.norm_eps)
    return module


def build_foreign(model: Model, seed: int) -> nn.Module:
    """Call the user's factory from the same random state on every rank."""
    factory = resolve(model.kind, MODELS, "build")
    torch.manual_seed(stable_hash64("foreign init", seed) % 2**63)
    module: Any = factory(**model.args)
    if not isinstance(module, nn.Module):
        raise LayoutError(f"{model.kind} returned {type(module).__name__}, not an nn.Module")
    return module


def build_objective(job: Job) -> Objective:
    """The user's objective, or chunked cross-entropy over tokens."""
    if job.model.objective is None:
        return causal_cross_entropy(job.train.loss_chunk_tokens)
    objective: Objective = resolve(job.model.objective, MODELS, "objective")
    return objective
