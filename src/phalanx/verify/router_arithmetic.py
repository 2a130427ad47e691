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
        self._compared: set[str] = set()
        shape = plan.model_shape
        if job.model.is_foreign or not is_narrow_dtype(dtype):
            return
        if not isinstance(shape, DecoderShape) or shape.kind != "decoder":
            return
        self._errors = {}
        settings = make_plain_decoder_settings(shape)
        for name, router in find_routers(module).items():
            router.register_forward_pre_hook(functools.partial(self._watch_choice, settings, name))
            router.register_forward_hook(functools.partial(self._compare_weights, settings, name))

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

    def _watch_choice(
        self, settings: PlainSettings, name: str, router: Any, args: tuple[torch.Tensor]
    ) -> None:
        """Before the first forward: look at the scores by which experts are chosen, all of them
        and with their bias."""
        assert self._errors is not None
        if name in self._errors:
            return
        self._errors[name] = 0.0
        (x_BTD,) = args
        choose = router.choose

        def compare_and_choose(chosen_by_BTE: torch.Tensor, per_token: int) -> torch.Tensor:
            router.choose = choose
            expected_BTE = compute_router_scores(settings, router.weight, x_BTD)
            if router.bias is not None:
                expected_BTE = expected_BTE + router.bias
            self._note_error(name, chosen_by_BTE, expected_BTE)
            experts_BTK: torch.Tensor = choose(chosen_by_BTE, per_token)
            return experts_BTK

        router.choose = compare_and_choose

    def _compare_weights(
        self, settings: PlainSettings, name: str, router: Any, args: Any, routing: Any
    ) -> None:
        """After the first forward: the factors of the chosen experts' outputs."""
        if name in self._compared:
            return
        self._compared.add(name)
        (x_BTD,) = args
        with torch.no_grad(), torch.autocast(x_BTD.device.type, enabled=False):
            scores_BTE = compute_router_scores(settings, router.weight, x_BTD)
            expected_BTK = weigh_chosen_experts(settings, scores_BTE, routing.experts_BTK)
            self._note_error(name, routing.weights_BTK, expected_BTK)

    def _note_error(self, name: str, computed: torch.Tensor, expected: torch.Tensor) -> None:
        """Keep the largest error of a router; NaN is larger than any."""
        assert self._errors is not None
        with torch.no_grad():
            distance = (computed.double() - expected.double()).norm()
            error = float(distance / expected.double().norm())
        if not error <= self._errors[name]:
            self._errors[name] = error
