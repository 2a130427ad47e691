"""The types of numbers that layouts are judged in: two whose rounding is known, and narrow ones
whose rounding is measured.

In float64 and float32 module and layout compute in that type. In the others parameters are float32
and a forward computes as `precision.compute` bf16, fp16 and fp8 do. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.core.errors import UsageError, format_nearest_word_hint

WIDE_DTYPES = ("float64", "float32")
FP8 = "float8_e4m3fn"
COMPUTE_OF_NARROW_DTYPE = {"bfloat16": "bf16", "float16": "fp16", FP8: "fp8"}
"""The narrow types, and their names in a job's precision.compute."""
_NARROW_DTYPE_OF_COMPUTE = {compute: dtype for dtype, compute in COMPUTE_OF_NARROW_DTYPE.items()}
NUMBER_TYPE_NAMES = (*WIDE_DTYPES, *_NARROW_DTYPE_OF_COMPUTE)

EPSILON_OF_DTYPE = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "bfloat16": 2.0**-7,
    "float16": 2.0**-10,
    FP8: 2.0**-3,
}
NEAR_TIE_ROUNDINGS = 8  # roundings of what a router reads, which several layers have rounded
# So that gradients are neither below what float16 has (6e-5, with all digits) nor above (65504).
# A layout's is of a loss per target of a rank, the reference's of the sum over targets.
LAYOUT_LOSS_SCALE, REFERENCE_LOSS_SCALE = 2.0**14, 2.0**6


def is_narrow_dtype(dtype: str) -> bool:
    """True for types whose rounding is measured: bfloat16, float16 and fp8."""
    return dtype in COMPUTE_OF_NARROW_DTYPE


def find_rounding_dtype(dtype: str, module_rounds_to: str) -> str:
    """The narrow type whose rounding a row of `dtype` shows: its own, or the one that the module
    rounds to by itself (or "float32", or ""), whichever has fewer digits; "" for none."""
    narrow = filter(is_narrow_dtype, (dtype, module_rounds_to))
    return max(narrow, key=lambda name: EPSILON_OF_DTYPE[name], default="")


def parameter_dtype_of_row(dtype: str) -> str:
    """The type of parameters, gradients and updates in a row of `dtype`."""
    if is_narrow_dtype(dtype):
        return "float32"
    return dtype


def activation_dtype_of_row(dtype: str) -> str:
    """The type of activations in a row of a narrow type: those of fp8 are bfloat16 between
    products."""
    if dtype == FP8:
        return "bfloat16"
    return dtype


def near_tie_tolerance(dtype: str, usual: float) -> float:
    """The distance that the scores of two experts may have, as a part of the largest, for rounding
    to turn them: `usual` in wide types."""
    if not is_narrow_dtype(dtype):
        return usual
    # Routers multiply in no fp8: what they read is rounded.
    return NEAR_TIE_ROUNDINGS * EPSILON_OF_DTYPE[activation_dtype_of_row(dtype)]


def resolve_dtype_names(types: str | Sequence[str], compute: str) -> tuple[str, ...]:
    """The types of rows that `types` names (one string with commas, or a sequence; torch's names,
    too), wide ones first; of "" float64, float32 and the job's own (`compute`, as in
    precision.compute).

    Raises UsageError for another name.
    """
    names = types.split(",") if isinstance(types, str) else list(types)
    names = [
        COMPUTE_OF_NARROW_DTYPE.get(name.strip(), name.strip()) for name in names if name.strip()
    ]
    if not names:
        names = [*WIDE_DTYPES, *({compute} & set(_NARROW_DTYPE_OF_COMPUTE))]
    for name in names:
        if name not in NUMBER_TYPE_NAMES:
            raise UsageError(
                f"--types: {name!r} is no type that layouts are judged in",
                fix=format_nearest_word_hint(name, NUMBER_TYPE_NAMES)
                or f"one or more of {', '.join(NUMBER_TYPE_NAMES)}",
            )
    return tuple(
        _NARROW_DTYPE_OF_COMPUTE.get(name, name) for name in NUMBER_TYPE_NAMES if name in names
    )
