"""A batch is a `Mapping[str, Tensor]`: `inputs` and `targets` [B, T], `positions` [B, T], and what
a model names.

Samples may be nested: dicts, and lists or tuples of them. On its way from a dataset to a model a
batch is flat, with the names of the levels joined by dots ("image.pixels", "views.0"), so that what
shares, sends and splits batches knows one kind of them alone. Models and objectives see what the
dataset gave.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from phalanx.core.errors import DataError

# A target that counts for nothing. It is the default of torch's cross_entropy.
IGNORE_INDEX = -100
# What text needs: 256 byte values and the end of a document.
BYTE_VOCAB_SIZE = 257
# Between the names of a nested entry.
NESTED_KEY_SEPARATOR = "."

Value = TypeVar("Value")


def flatten_batch(batch: Mapping[str, Any], *, of_tensors: bool = False) -> dict[str, Any]:
    """`batch` with the entries of its levels by their joined names.

    A dict is a level; so is a list or tuple with a dict, or with arrays of several shapes, in it:
    another list is an array of its numbers. `of_tensors`: entries are tensors, and any list or
    tuple is a level.

    Raises DataError where two entries have one name, as of {"a.b": ..., "a": {"b": ...}}.
    """
    entries: dict[str, Any] = {}
    for outermost, outermost_value in batch.items():
        for name, value in _flatten_entries(str(outermost), outermost_value, of_tensors):
            if name in entries:
                raise DataError(f"two entries are both called {name!r}", fix="rename one of them")
            entries[name] = value
    return entries


def _flatten_entries(name: str, value: Any, of_tensors: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        levels: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple) and (of_tensors or _is_nested(value)):
        levels = enumerate(value)
    else:
        yield name, value
        return
    for key, inner in levels:
        yield from _flatten_entries(f"{name}{NESTED_KEY_SEPARATOR}{key}", inner, of_tensors)


def _is_nested(values: Sequence[Any]) -> bool:
    if any(isinstance(value, Mapping) for value in values):
        return True
    if any(isinstance(value, list | tuple) and _is_nested(value) for value in values):
        return True
    return len({tuple(value.shape) for value in values if hasattr(value, "shape")}) > 1


def unflatten_entry(batch: Mapping[str, Value], key: str) -> Any:
    """The entry `key` of a flat batch, as it was nested: dicts, and lists where the names are
    numbers from 0 on.

    Raises KeyError if there is none.
    """
    if key in batch:
        return batch[key]
    inside: dict[str, Value] = {}
    for name, value in batch.items():
        if name.startswith(f"{key}{NESTED_KEY_SEPARATOR}"):
            inside[name[len(key) + 1 :]] = value
    if not inside:
        raise KeyError(key)
    entries = {name: unflatten_entry(inside, name) for name in list_outermost_names(inside)}
    # Of a list, as far as the names tell: a dict with these keys comes back as one, too.
    if list(entries) == list(map(str, range(len(entries)))):
        return list(entries.values())
    return entries


def list_outermost_names(batch: Mapping[str, Any]) -> Sequence[str]:
    """The outermost names of a flat batch."""
    # A dict, not a set: names keep their order.
    return list(dict.fromkeys(name.partition(NESTED_KEY_SEPARATOR)[0] for name in batch))
