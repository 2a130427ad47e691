"""From the shape of a job's decoder to the settings of the plain implementation. Torch-free."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from phalanx.job.shapes.decoder import DecoderShape
from phalanx.verify.plain.settings import PlainSettings


def make_plain_settings(shape: DecoderShape) -> PlainSettings:
    """The numbers of `shape` that settings have, each under the same name."""
    values: dict[str, Any] = {
        field.name: getattr(shape, field.name) for field in fields(PlainSettings)
    }
    return PlainSettings(**values)
