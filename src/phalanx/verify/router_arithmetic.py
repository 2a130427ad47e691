"""Compares what phalanx's routers compute in a narrow type with their definition, from the same
inputs: what rounds there does so in the reference and in every layout alike, within their
bands."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from phalanx.job.schema import Job
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.plan.plan import Plan
from phalanx.verify.number_types import is_narrow_dtype
from phalanx.verify.plain.experts import compute_router_scores, weigh_chosen_experts
from phalanx.verify.plain.settings import PlainSettings
from phalanx.verify.plain_settings import make_plain_decoder_settings
from phalanx.verify.routes import find_routers
from phalanx.verify.trace_facts import TOLERANCE_OF_DTYPE, ArithmeticFault

TOLERANCE = TOLERANCE_OF_DTYPE["float32"]


class RouterArithmetic:
    """Looks at the first forward of each router of `module`."""

    def __init__(self, module: nn.Module, job: Job, plan: Plan, dtype: str) -> None:
        self._errors: dict[str, float] | None = None
        shape = plan.model_shape
        if job.model.is_foreign or not is_narrow_dtype(dtype):
            return
        if not isinstance(shape, DecoderShape) or shape.kind != "decoder":
            return
        self._errors = {}
        settings = make_plain_decoder_settings(shape)
        for name, router in find_routers(module).items():
            router.register_forward_hook(functools.partial(self._compare, settings, name))

    @property
    def faults(self) -> tuple[ArithmeticFault, ...] | None:
        """The routers whose scores have fewer digits than float32; None where none was looked
        at."""
        if not self._errors:
            return None
        return tuple(
            ArithmeticFault(f"{name}.weight", error)
            for name, error in self._errors.items()
            # Not `>`: NaN is above any.
            if not error <= TOLERANCE
        )

    def _compare(
        self, settings: PlainSettings, name: str, router: Any, args: Any, routing: Any
    ) -> None:
        assert self._errors is not None
        if name in self._errors:
            return
        (x_BTD,) = args
        with torch.no_grad(), torch.autocast(x_BTD.device.type, enabled=False):
            scores_BTE = compute_router_scores(settings, router.weight, x_BTD)
            expected_BTK = weigh_chosen_experts(settings, scores_BTE, routing.experts_BTK)
            distance = (routing.weights_BTK.double() - expected_BTK).norm()
            self._errors[name] = float(distance / expected_BTK.double().norm())
