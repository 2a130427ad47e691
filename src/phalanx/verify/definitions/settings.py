"""What a job's keys come to: defaults, the keys of [model], how the loss is scaled, each beside
what docs say. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.core.errors import LayoutError
from phalanx.job.model import build_model_shape, find_preset_of_model
from phalanx.job.schema import Job, Model
from phalanx.job.shapes.stored import BuiltInShape
from phalanx.plan.plan import LossScaling
from phalanx.plan.planner import choose_loss_scaling
from phalanx.plan.precision import replace_precision
from phalanx.verify.definitions.check import make_difference
from phalanx.verify.plain.documented import DEFAULT_OF_KEY, DEFAULT_OF_SHAPE_KEY
from phalanx.verify.row import Difference

DEFAULTS_JUDGED = "defaults of the job's keys that decide numbers, beside those that docs say"
SHAPE_JUDGED = "the numbers of the model: the job's key, else its preset's, else the documented one"
LOSS_SCALING_JUDGED = "the job's own rule of loss scaling, in fp16"

# None of a model's vocabularies: it is as large as the data needs where nothing says it.
VOCAB_SIZE = 251


def find_wrong_defaults(job: Job) -> Iterator[Difference]:
    """The keys whose default is another one than docs say."""
    empty = Job()
    for key, documented in DEFAULT_OF_KEY.items():
        section, _, name = key.partition(".")
        value = getattr(getattr(empty, section), name)
        if value != documented:
            cause = f"the default of {key} is {value!r}, and docs say {documented!r}"
            yield make_difference("default of", key, _compute_distance(value, documented), cause)


def find_wrong_shape_keys(job: Job) -> Iterator[Difference]:
    """The numbers of the job's model that are others than the job, its preset or docs say; with
    each key of truth values set to both of them, too. None of a user's own module."""
    if job.model.is_foreign:
        return
    yield from _compare_shape_keys(job.model, build_model_shape(job, VOCAB_SIZE))
    for key, default in DEFAULT_OF_SHAPE_KEY.items():
        for value in (False, True) if isinstance(default, bool) else ():
            model = job.model.model_copy(update={key: value})
            try:
                shape = build_model_shape(job.model_copy(update={"model": model}), VOCAB_SIZE)
            except LayoutError:
                continue
            yield from _compare_shape_keys(model, shape)


def _compare_shape_keys(model: Model, shape: BuiltInShape) -> Iterator[Difference]:
    preset: Mapping[str, Any] = find_preset_of_model(model).values
    for key, default in DEFAULT_OF_SHAPE_KEY.items():
        if not hasattr(shape, key):
            continue
        requested = getattr(model, key, None)
        expected, origin = preset.get(key, default), "its preset"
        if key not in preset:
            origin = "docs/models.md"
        if requested is not None:
            expected, origin = requested, "the job"
        # What is asked of images is fixed: they have no embedding to share.
        if shape.reads_images and key == "tie_embeddings":
            continue
        value = getattr(shape, key)
        if value != expected:
            cause = f"model.{key} is {value!r} in the shape, and {origin} says {expected!r}"
            error = _compute_distance(value, expected)
            yield make_difference("number of the model", f"model.{key}", error, cause)


def find_wrong_loss_scaling(job: Job) -> Iterator[Difference]:
    """How the job scales its loss in its own type and in fp16, where it is another way than
    [precision] says."""
    for judged in (job, replace_precision(job, "fp16")):
        precision, expected = judged.precision, None
        if precision.compute == "fp16":
            scale, growth_steps = precision.loss_scale, 0
            if scale == "dynamic":
                scale = precision.loss_scale_initial
                growth_steps = precision.loss_scale_growth_steps
            expected = LossScaling(scale, growth_steps)
        scaling = choose_loss_scaling(judged)
        if scaling != expected:
            cause = (
                f"with precision.compute={precision.compute} the loss is scaled by {scaling}, and"
                f" [precision] says {expected}"
            )
            yield make_difference("loss scaling", "", 1.0, cause)


def _compute_distance(value: object, expected: object) -> float:
    """The relative distance of two numbers; 1 of anything else."""
    numbers = (int, float)
    if not isinstance(value, numbers) or not isinstance(expected, numbers):
        return 1.0
    return abs(value - expected) / max(abs(value), abs(expected), 1e-300)
