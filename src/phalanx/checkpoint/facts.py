"""Checks of types and bounds of a manifest's facts, before any code computes with them.

A manifest may be a stranger's, or another program's: its checksum only says that it is as it was
written. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Digest of the data that was trained on, since checkpoints say it.
DATA_FACT = "data"
# Of steps, tokens, bytes: what 64 bits hold.
MAX_FACT_INTEGER = 2**63 - 1
# Of steps, samples, tokens: 9 quadrillion, which a float counts exactly, too.
MAX_PROGRESS_INTEGER = 2**53
# Characters of a name, a kind, a digest.
MAX_FACT_TEXT_CHARS = 4096
# Of facts that only their reader knows.
MAX_FACT_NESTING_DEPTH = 32
# Far from the largest float, 2^1024, as a scale doubles.
_MAX_LOSS_SCALE = 2.0**1000


def require_non_negative_int64(number: Any) -> int:
    """`number` if it is a whole number from 0 to what 64 bits hold; ValueError if not."""
    # A bool is an int, too: `type`, not isinstance.
    if type(number) is not int or not 0 <= number <= MAX_FACT_INTEGER:
        raise ValueError(f"{format_fact_for_message(number)} is no count")
    return number


def require_bounded_text(value: Any) -> str:
    """`value` if it is a string of at most MAX_FACT_TEXT_CHARS characters; ValueError if not."""
    if not isinstance(value, str) or len(value) > MAX_FACT_TEXT_CHARS:
        raise ValueError(f"{format_fact_for_message(value)} is no short text")
    return value


def require_json_object(value: Any) -> dict[str, Any]:
    """`value` if it is an object; ValueError if not."""
    if not isinstance(value, dict):
        raise ValueError(f"{format_fact_for_message(value)} is no object")
    return value


def require_axis_degree(value: Any) -> int:
    """`value` if it can be the degree of an axis; ValueError if not."""
    if not 1 <= require_non_negative_int64(value) <= 2**31:
        raise ValueError(f"{format_fact_for_message(value)} is no degree")
    return int(value)


def require_valid_facts(facts: Any) -> dict[str, Any]:
    """`facts` if each has its type and bounds. ValueError that names the one that has not."""
    for name, value in require_json_object(facts).items():
        try:
            _VALIDATOR_OF_FACT.get(name, _require_bounded_nesting)(value)
        except ValueError as error:
            raise ValueError(
                f"facts.{format_fact_for_message(name, quoted=False)}: {error}"
            ) from None
    return dict(facts)


def format_fact_for_message(value: Any, *, quoted: bool = True) -> str:
    """`value` in a message, cut where it is long."""
    if isinstance(value, dict | list):
        return f"a {type(value).__name__} of {len(value)}"
    if not quoted:
        shown = str(value)
    elif isinstance(value, str):
        shown = repr(value[:60])
    else:
        shown = repr(value)
    if len(shown) > 64:
        return f"{shown[:60]}..."
    return shown


def require_plausible_progress_count(value: Any) -> int:
    """`value` if training can have come so far; ValueError if not.

    Counts that go on from there must not leave 64 bits.
    """
    if require_non_negative_int64(value) > MAX_PROGRESS_INTEGER:
        raise ValueError(f"{format_fact_for_message(value)} is more than any run trains")
    return int(value)


def _require_valid_optimizer_facts(value: Any) -> None:
    optimizer = require_json_object(value)
    require_bounded_text(optimizer.get("kind"))
    for path, number in require_json_object(optimizer.get("numbers", {})).items():
        try:
            _require_number_within_64_bits(number)
        except ValueError as error:
            raise ValueError(
                f"numbers.{format_fact_for_message(path, quoted=False)}: {error}"
            ) from None


def _require_valid_loss_scale(value: Any) -> None:
    scale = require_json_object(value).get("scale")
    if (
        isinstance(scale, bool)
        or not isinstance(scale, int | float)
        or not 0 < scale < _MAX_LOSS_SCALE
    ):
        raise ValueError(f"the scale is {format_fact_for_message(scale)}")
    require_non_negative_int64(value.get("good_steps"))


def _require_number_within_64_bits(value: Any) -> None:
    """State of an optimizer: what fits into 64 bits, or lists of such."""
    _require_bounded_nesting(value)
    # From the least of int64 to the largest of uint64.
    if type(value) is int and not -MAX_FACT_INTEGER - 1 <= value <= 2 * MAX_FACT_INTEGER + 1:
        raise ValueError(f"{format_fact_for_message(value)} does not fit into 64 bits")
    for item in _list_direct_values(value):
        _require_number_within_64_bits(item)


def _require_bounded_nesting(value: Any, depth: int = 0) -> None:
    """Checks facts that only their reader knows: they must not be nested too deeply."""
    if depth > MAX_FACT_NESTING_DEPTH:
        raise ValueError("it is nested too deeply")
    for item in _list_direct_values(value):
        _require_bounded_nesting(item, depth + 1)


def _list_direct_values(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list):
        return value
    return ()


_VALIDATOR_OF_FACT: Mapping[str, Callable[[Any], object]] = {
    "step": require_plausible_progress_count,
    "tokens_seen": require_plausible_progress_count,
    "samples_seen": require_plausible_progress_count,
    "seed": require_non_negative_int64,
    "tokenizer": require_bounded_text,
    DATA_FACT: require_bounded_text,
    "cpu_kind": require_bounded_text,
    "imported_from": require_bounded_text,
    "optimizer": _require_valid_optimizer_facts,
    "loss_scale": _require_valid_loss_scale,
    # Tensors that came without a config.json have no model_shape.
    "model_shape": lambda value: value is None or require_json_object(value),
    "hugging_face": lambda value: value is None or require_json_object(value),
}
