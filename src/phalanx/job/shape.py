"""The old name of a decoder's shape."""

from __future__ import annotations

from typing import Any

from phalanx.core.deprecated import warn_renamed


def __getattr__(name: str) -> Any:
    if name != "ModelShape":
        raise AttributeError(name)
    from phalanx.job.shapes.decoder import DecoderShape

    warn_renamed(
        "phalanx.job.shape.ModelShape", "phalanx.job.shapes.decoder.DecoderShape", stacklevel=2
    )
    return DecoderShape
