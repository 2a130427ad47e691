"""The base of every section, and the types that several sections use."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from phalanx.job.limits import MAX_LAYERS

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
LayerCount = Annotated[int, Field(ge=1, le=MAX_LAYERS)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
AboveOne = Annotated[float, Field(gt=1, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    # Texts under keys are for the JSON schema, which reads them itself: with
    # `use_attribute_docstrings` pydantic would parse its source at each start of a program.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
