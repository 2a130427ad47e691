"""One family's tensors in the other's names and orientation, either way, one tensor at a time.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

import numpy as np

from phalanx.checkpoint.exchange.families import Family, NameRule
from phalanx.checkpoint.exchange.tensor_readers import (
    StackedTensorReader,
    TensorInfo,
    TensorReader,
    UnstackedReader,
    element_name,
)
from phalanx.checkpoint.reading.full_tensors import Bits
from phalanx.core.errors import CheckpointError
from phalanx.job.tensors import Shape


@dataclass(frozen=True)
class RenamedTensor:
    """A tensor under its new name, or what of it begins at `offset`.

    `load` makes its bits when its turn comes.
    """

    name: str
    info: TensorInfo
    load: Callable[[], Bits]
    offset: tuple[int, ...] | None = None


def translate_to_hugging_face(
    family: Family, shapes: Mapping[str, Shape], weights: StackedTensorReader
) -> list[RenamedTensor]:
    """Every tensor of `shapes` as transformers keeps it.

    `weights` must hold them all in these shapes.
    """
    groups: dict[str, tuple[NameRule, list[str]]] = {}
    ours = UnstackedReader(weights, list_expert_stacks(shapes))
    for name in unstack_experts(shapes):
        for rule in family.rules:
            if theirs := rule.their_name(name):
                groups.setdefault(theirs, (rule, rule.our_names(theirs)))
                break
        else:
            raise AssertionError(f"{family.model_type} has no name for {name}")
    return [_stacked(theirs, rule, names, ours) for theirs, (rule, names) in groups.items()]


def _stacked(theirs: str, rule: NameRule, names: list[str], ours: TensorReader) -> RenamedTensor:
    parts = [ours.tensors[name] for name in names]
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    info = TensorInfo(_their_shape(rule, shape), parts[0].dtype)

    def load() -> Bits:
        whole = (
            ours.load(names[0])
            if len(names) == 1
            else np.concatenate([ours.load(name) for name in names])
        )
        return (whole.T if rule.transposed else whole).reshape(info.shape)

    return RenamedTensor(theirs, info, load)


def _their_shape(rule: NameRule, shape: Shape) -> Shape:
    turned = tuple(reversed(shape)) if rule.transposed else tuple(shape)
    return (1,) * rule.ones + turned


def list_expert_stacks(shapes: Mapping[str, Shape]) -> list[str]:
    """Of our tensors those that hold one matrix of each expert."""
    return [name for name, shape in shapes.items() if len(shape) == 3]


def unstack_experts(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Our tensors, of stacks each element: what names of theirs are about."""
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        if len(shape) == 3:
            found |= {element_name(name, number): shape[1:] for number in range(shape[0])}
        else:
            found[name] = shape
    return found


@dataclass(frozen=True)
class TranslatedTensors:
    """What a directory of theirs holds in our words, stacks taken `unstack_experts`.

    `unknown` are names of theirs that mean nothing to us.
    """

    tensors: dict[str, RenamedTensor]
    unknown: dict[str, TensorInfo]
    tied_heads: tuple[str, ...]


def stack_experts(
    shapes: Mapping[str, Shape], found: Mapping[str, RenamedTensor]
) -> list[RenamedTensor]:
    """Return all tensors of `shapes` from `found`, where stacks are unstacked.

    Each expert's matrix becomes a block of its stack with an offset, so that no stack is ever whole
    in memory. Raises CheckpointError if the experts of a stack differ in dtype.
    """
    made: list[RenamedTensor] = []
    for name, shape in shapes.items():
        if len(shape) != 3:
            made.append(found[name])
            continue
        for number in range(shape[0]):
            element = found[element_name(name, number)]
            if element.info.dtype != found[element_name(name, 0)].info.dtype:
                raise CheckpointError(f"experts of {name} are of more than one type of numbers")
            info = TensorInfo((1, *shape[1:]), element.info.dtype)
            made.append(RenamedTensor(name, info, element.load, (number, 0, 0)))
    return made


def translate_from_hugging_face(
    family: Family, shapes: Mapping[str, Shape], weights: StackedTensorReader
) -> TranslatedTensors:
    """Every tensor of theirs, cut and turned into ours.

    Whether they are those of `shapes` is for the caller to ask.

    Raises CheckpointError if two of theirs are the same of ours.
    """
    shapes = unstack_experts(shapes)
    theirs = UnstackedReader(
        weights,
        [name for name in weights.tensors if family.stacks(name, weights.tensors[name].shape)],
    )
    found: dict[str, RenamedTensor] = {}
    origins: dict[str, str] = {}
    unknown: dict[str, TensorInfo] = {}
    tied: list[str] = []
    for name, info in theirs.tensors.items():
        if is_ignored(family, name):
            continue
        rule, ours = _rule_for(family, name)
        if rule is None:
            unknown[name] = info
        elif ours == ["head.weight"] and "head.weight" not in shapes:
            tied.append(name)
        else:
            for made in _cut(name, rule, ours, shapes, theirs):
                if (other := origins.setdefault(made.name, name)) != name:
                    raise CheckpointError(
                        f"{other} and {name} are the same tensor of the model", where=theirs.where
                    )
                found[made.name] = made
    return TranslatedTensors(found, unknown, tuple(tied))


def _rule_for(family: Family, name: str) -> tuple[NameRule | None, list[str]]:
    """The rule about `name`, which may lack the prefix: bases without a head are saved so."""
    for candidate in (name, family.prefix + name):
        for rule in family.rules:
            if ours := rule.our_names(candidate):
                return rule, ours
    return None, []


def is_ignored(family: Family, name: str) -> bool:
    """Buffers that old releases saved."""
    inner = name.removeprefix(family.prefix)
    return inner.endswith(".rotary_emb.inv_freq") or any(
        fnmatchcase(inner, pattern) for pattern in family.ignored
    )


def _cut(
    name: str, rule: NameRule, ours: list[str], shapes: Mapping[str, Shape], theirs: TensorReader
) -> Iterable[RenamedTensor]:
    """The tensors of ours in one of theirs.

    Lengths are those of `shapes`; what does not add up keeps its own shape.
    """
    info = theirs.tensors[name]
    inner = info.shape[rule.ones :] if set(info.shape[: rule.ones]) <= {1} else info.shape
    whole = tuple(reversed(inner)) if rule.transposed else inner
    lengths = [shapes[our][0] if our in shapes else 0 for our in ours]
    fits = len(ours) > 1 and bool(whole) and sum(lengths) == whole[0]
    start = 0
    for our, length in zip(ours, lengths, strict=True):
        shape = (length, *whole[1:]) if fits else whole
        rows = slice(start, start + length) if fits else slice(None)
        yield RenamedTensor(
            our,
            TensorInfo(shape, info.dtype),
            partial(_turned, theirs, name, rule, whole, rows),
        )
        start += length


def _turned(theirs: TensorReader, name: str, rule: NameRule, whole: Shape, rows: slice) -> Bits:
    bits = theirs.load(name)
    turned = bits.reshape(whole[::-1]).T if rule.transposed else bits.reshape(whole)
    return turned[rows] if whole else turned
