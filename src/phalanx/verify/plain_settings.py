"""From the shape of a job's model to the settings of the plain implementation. Torch-free."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from phalanx.job.shapes.decoder import DecoderShape
from phalanx.job.shapes.transformer import TransformerShape
from phalanx.job.shapes.vit import VitShape
from phalanx.verify.plain.settings import BlockSettings, PlainSettings, VisionSettings


def make_plain_decoder_settings(shape: DecoderShape) -> PlainSettings:
    """The numbers of a decoder that settings have, each under the same name."""
    return PlainSettings(**_copy_common_fields(shape, PlainSettings))


def make_plain_vision_settings(shape: VitShape) -> VisionSettings:
    """The numbers of a vision transformer that settings have, each under the same name."""
    return VisionSettings(**_copy_common_fields(shape, VisionSettings))


def _copy_common_fields(shape: TransformerShape, settings: type[BlockSettings]) -> dict[str, Any]:
    return {field.name: getattr(shape, field.name) for field in fields(settings)}
