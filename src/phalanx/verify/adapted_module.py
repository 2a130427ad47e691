"""Compares what phalanx makes of a Hugging Face model with that model's own class, called as a user
of transformers would: a mistake of the adapter is the same in the reference and in every layout."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.core.files import read_json, write_json_atomically
from phalanx.job.hugging_face import is_hugging_face, read_config_values
from phalanx.job.schema import Job
from phalanx.nn.objective import CausalOutput
from phalanx.plan.plan import Plan
from phalanx.run.one_process.original_module import build_original_module
from phalanx.verify.begin import randomize_constant_parameters
from phalanx.verify.compare import replace_nan_by_infinity
from phalanx.verify.float64_casts import NARROW_DTYPES, cast_to_float64
from phalanx.verify.trace_facts import TOLERANCE_OF_DTYPE, AdapterFacts

FACTS_FILE_NAME = "adapter.json"
NUM_ROWS, MAX_TOKENS = 2, 64
# transformers' name of an implementation that is written out, and has float64.
EAGER = "eager"
WHOLE_MODEL = "(the model)"

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Call:
    """One call: arguments of the adapted module, and what a user gives transformers'."""

    adapted: tuple[torch.Tensor, ...]
    original: Mapping[str, Any]


def compare_adapted_module_once(job: Job, plan: Plan, directory: Path) -> AdapterFacts | None:
    """The comparison of the job's Hugging Face model; None for any other.

    It is compared once, and kept in `directory`.
    """
    if not is_hugging_face(job.model.kind):
        return None
    file = directory / FACTS_FILE_NAME
    try:
        return AdapterFacts(**read_json(file))
    except (OSError, ValueError, TypeError):
        # It was not compared yet, or what was kept of it is damaged.
        pass
    module, _ = build_original_module(job, plan, "float64", materialize=True)
    randomize_constant_parameters(module)
    facts = compare_adapted_module(job, plan, module)
    write_json_atomically(file, asdict(facts), durable=False)
    return facts


def compare_adapted_module(job: Job, plan: Plan, module: nn.Module) -> AdapterFacts:
    """Compare which parts of `module` are in training mode, and their numbers, with those of
    transformers' class as it is built; then logits and gradients, in float64, with those of that
    class with the same weights, both in evaluation mode."""
    architecture = type(module).__name__
    try:
        original = _build_own_model(job, architecture)
        name = _find_other_shape(module, original)
        if name:
            return AdapterFacts(architecture, what="shape", name=name, error=1.0)
        original.load_state_dict(module.state_dict())
        evaluating = _list_parts_that_should_train(module, original)
        if evaluating:
            name = evaluating[0] or WHOLE_MODEL
            return AdapterFacts(architecture, what="mode", name=name, error=len(evaluating))
        number = _find_other_number(module, original)
        if number is not None:
            return AdapterFacts(architecture, what="number", name=number[0], error=number[1])
        original.eval()
        calls = list(_list_calls(plan, original))
        with cast_to_float64() as casts:
            original_outputs = [original(**call.original).logits for call in calls]
            original_gradients = _compute_gradients(original, original_outputs)
    # Of transformers, for a model that cannot be had or called so.
    except Exception as refusal:
        words = " ".join(str(refusal).split())
        return AdapterFacts(architecture, unjudged=f"{type(refusal).__name__}: {words}")
    is_narrow = casts.is_narrowed or any(p.dtype in NARROW_DTYPES for p in original.parameters())
    with cast_to_float64() as casts:
        outputs = [_make_logits(module.eval()(*call.adapted)) for call in calls]
        gradients = _compute_gradients(module, outputs)
    is_narrow = is_narrow or casts.is_narrowed
    tolerance = TOLERANCE_OF_DTYPE["float32" if is_narrow else "float64"]
    error = max(map(_compute_relative_error, outputs, original_outputs))
    if not error <= tolerance:
        return AdapterFacts(architecture, error=error, what="output")
    name, error = _find_worst_gradient(gradients, original_gradients)
    if not error <= tolerance:
        return AdapterFacts(architecture, error=error, what="gradient", name=name)
    return AdapterFacts(architecture)


def _list_parts_that_should_train(module: nn.Module, original: nn.Module) -> tuple[str, ...]:
    """The names of the parts of `module` ("" for itself) that are in evaluation mode, and in
    training mode in `original`."""
    evaluating = {name for name, part in module.named_modules() if not part.training}
    return tuple(
        name for name, part in original.named_modules() if part.training and name in evaluating
    )


def _find_other_number(module: nn.Module, original: nn.Module) -> tuple[str, float] | None:
    """(name, relative error) of the first number, a probability of dropout say, that a part of
    `module` has otherwise than the same part of `original`; evaluation mode does not show it."""
    parts = dict(module.named_modules())
    for name, part in original.named_modules():
        numbers = vars(parts[name]) if name in parts else {}
        for key, expected in vars(part).items():
            value = numbers.get(key)
            if isinstance(expected, float) and isinstance(value, float) and value != expected:
                error = abs(value - expected) / max(abs(value), abs(expected))
                return f"{name}.{key}".removeprefix("."), replace_nan_by_infinity(error)
    return None


def _find_other_shape(module: nn.Module, original: nn.Module) -> str:
    """The first parameter of `module` that has another shape in `original`; "" for none."""
    shapes = {name: parameter.shape for name, parameter in original.named_parameters()}
    for name, parameter in module.named_parameters():
        if shapes.get(name, parameter.shape) != parameter.shape:
            return name
    return ""


def _build_own_model(job: Job, architecture: str) -> Any:
    """transformers' model of the job's config.json, in the mode in which its class builds it."""
    import transformers

    kind = job.model.kind
    assert kind is not None
    # Read here: what phalanx makes of the file is judged, too.
    path = Path(kind.partition(":")[2]).expanduser()
    stored = read_config_values(path / "config.json" if path.is_dir() else path)
    values = {**stored, **(job.model.args or {})}
    config = transformers.AutoConfig.for_model(**values)
    model = getattr(transformers, architecture)(config).to(torch.float64)
    if getattr(model.config, "_experts_implementation", None) is not None:
        model.set_experts_implementation(EAGER)
    return model


def _list_calls(plan: Plan, model: Any) -> Iterator[_Call]:
    generator = torch.Generator().manual_seed(0)
    if model.main_input_name == "pixel_values":
        shape = plan.model_shape
        size = NUM_ROWS, shape.num_channels, shape.image_size, shape.image_size
        pixels = torch.randn(size, generator=generator, dtype=torch.float64)
        yield _Call((pixels,), {"pixel_values": pixels})
        return
    length = min(plan.seq_len, MAX_TOKENS)
    tokens = torch.randint(plan.vocab_size, (NUM_ROWS, length), generator=generator)
    positions = torch.arange(length).repeat(NUM_ROWS, 1)
    known = inspect.signature(type(model).forward).parameters
    usual: dict[str, Any] = {"input_ids": tokens}
    # A cache is for generation. Where it is an option of the inner model, it is passed on.
    passes_on = any(option.kind is option.VAR_KEYWORD for option in known.values())
    usual |= {"use_cache": False} if "use_cache" in known or passes_on else {}
    mask = {"attention_mask": torch.ones_like(tokens)} if "attention_mask" in known else {}
    yield _Call((tokens, positions), {**usual, **mask})
    if "position_ids" in known:
        # As of two documents, the second of which begins in the middle.
        positions = torch.where(positions < length // 2, positions, positions - length // 2)
        yield _Call((tokens, positions), {**usual, "position_ids": positions})


def _make_logits(outputs: Any) -> torch.Tensor:
    if isinstance(outputs, CausalOutput):
        return nn.functional.linear(outputs.hidden_BTD, outputs.head_VD)
    logits: torch.Tensor = outputs
    return logits


def _compute_gradients(module: nn.Module, outputs: list[torch.Tensor]) -> Gradients:
    """The gradients of a sum of all outputs with random weights."""
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64)
    for logits in outputs:
        weights = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
        loss = loss + (logits * weights).sum()
    loss.backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def _compute_relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if actual.shape != expected.shape:
        return math.inf
    with torch.no_grad():
        error = float((actual - expected).norm() / expected.norm())
    return replace_nan_by_infinity(error)


def _find_worst_gradient(actual: Gradients, expected: Gradients) -> tuple[str, float]:
    """(name, relative error) of the gradient that is off most; one that only one of the two has is
    off by all of it. Small ones by a thousandth of a usual one, as in rows."""
    usual = math.sqrt(sum(float(g.norm()) ** 2 for g in expected.values()) / len(expected))
    worst, largest = "", 0.0
    for name in sorted({*actual, *expected}):
        gradient, reference = actual.get(name), expected.get(name)
        if gradient is None or reference is None:
            lone = gradient if reference is None else reference
            assert lone is not None
            error = math.inf if bool(lone.any()) else 0.0
        else:
            scale = max(float(reference.norm()), 1e-3 * usual)
            error = replace_nan_by_infinity(float((gradient - reference).norm()) / scale)
        if error > largest:
            worst, largest = name, error
    return worst, largest
