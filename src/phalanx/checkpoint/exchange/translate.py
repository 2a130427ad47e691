"""Translates tensors between phalanx's and Hugging Face's names and orientation, either way, one
tensor at a time.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial

import numpy as np

from phalanx.checkpoint.exchange.families import HuggingFaceFamily, TensorNameRule
from phalanx.checkpoint.exchange.tensor_readers import (
    ReaderOfUnstackedElements,
    StackElementReader,
    TensorReader,
    TensorShapeAndDtype,
    name_stack_element,
)
from phalanx.checkpoint.reading.full_tensors import Bits
from phalanx.core.errors import CheckpointError
from phalanx.job.shapes.tensors import Size


@dataclass(frozen=True)
class RenamedTensorBlock:
    """A tensor under its new name, or the block of it at `offset`.

    `load` returns its bits when its turn comes.
    """

    name: str
    info: TensorShapeAndDtype
    load: Callable[[], Bits]
    offset: tuple[int, ...] | None = None


def translate_to_hugging_face(
    family: HuggingFaceFamily, shapes: Mapping[str, Size], weights: StackElementReader
) -> list[RenamedTensorBlock]:
    """Every tensor of `shapes` under the name and in the orientation of transformers.

    `weights` must have them all in these shapes.
    """
    groups: dict[str, tuple[TensorNameRule, list[str]]] = {}
    reader = ReaderOfUnstackedElements(weights, list_expert_stack_names(shapes))
    for name in replace_stacks_by_elements(shapes):
        for rule in family.rules:
            if their_name := rule.translate_to_hugging_face_name(name):
                groups.setdefault(their_name, (rule, rule.translate_to_phalanx_names(their_name)))
                break
        else:
            raise AssertionError(f"{family.model_type} has no name for {name}")
    tensors = []
    for their_name, (rule, our_names) in groups.items():
        tensors.append(_merge_phalanx_tensors(their_name, rule, our_names, reader))
    return tensors


def _merge_phalanx_tensors(
    their_name: str, rule: TensorNameRule, our_names: list[str], reader: TensorReader
) -> RenamedTensorBlock:
    """Phalanx's tensors as the one of Hugging Face that holds them."""
    parts = [reader.tensors[name] for name in our_names]
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    info = TensorShapeAndDtype(_compute_hugging_face_shape(rule, shape), parts[0].dtype)

    def load() -> Bits:
        if len(our_names) == 1:
            merged = reader.load(our_names[0])
        else:
            merged = np.concatenate([reader.load(name) for name in our_names])
        if rule.transposed:
            # transformers' Conv1D keeps weights as [in, out], a Linear as [out, in].
            merged = merged.T
        return merged.reshape(info.shape)

    return RenamedTensorBlock(their_name, info, load)


def _compute_hugging_face_shape(rule: TensorNameRule, shape: Size) -> Size:
    if rule.transposed:
        shape = shape[::-1]
    return (1,) * rule.ones + tuple(shape)


def list_expert_stack_names(shapes: Mapping[str, Size]) -> list[str]:
    """The names of phalanx's tensors that hold one matrix of each expert."""
    return [name for name, shape in shapes.items() if len(shape) == 3]


def replace_stacks_by_elements(shapes: Mapping[str, Size]) -> dict[str, Size]:
    """`shapes` with each element in place of a stack: Hugging Face names elements."""
    unstacked: dict[str, Size] = {}
    for name, shape in shapes.items():
        if len(shape) == 3:
            for number in range(shape[0]):
                unstacked[name_stack_element(name, number)] = shape[1:]
        else:
            unstacked[name] = shape
    return unstacked


@dataclass(frozen=True)
class TensorsUnderPhalanxNames:
    """Tensors of a Hugging Face directory under phalanx's names, with stacks unstacked.

    `unknown` are those of Hugging Face's names that no rule knows, `tied_heads` heads beside an
    embedding that is the head, under Hugging Face's.
    """

    tensors: dict[str, RenamedTensorBlock]
    unknown: dict[str, TensorShapeAndDtype]
    tied_heads: tuple[RenamedTensorBlock, ...]


def stack_expert_tensors(
    shapes: Mapping[str, Size], unstacked: Mapping[str, RenamedTensorBlock]
) -> list[RenamedTensorBlock]:
    """Return all tensors of `shapes` from `unstacked`, where each expert's matrix is a tensor.

    The matrix becomes a block of its stack with an offset, so that no stack is ever whole in
    memory. Raises CheckpointError if the experts of a stack differ in dtype.
    """
    tensors: list[RenamedTensorBlock] = []
    for name, shape in shapes.items():
        if len(shape) != 3:
            tensors.append(unstacked[name])
            continue
        dtype = unstacked[name_stack_element(name, 0)].info.dtype
        for number in range(shape[0]):
            element = unstacked[name_stack_element(name, number)]
            if element.info.dtype != dtype:
                raise CheckpointError(f"experts of {name} are of more than one type of numbers")
            info = TensorShapeAndDtype((1, *shape[1:]), dtype)
            tensors.append(RenamedTensorBlock(name, info, element.load, (number, 0, 0)))
    return tensors


def translate_from_hugging_face(
    family: HuggingFaceFamily, shapes: Mapping[str, Size], weights: StackElementReader
) -> TensorsUnderPhalanxNames:
    """Every tensor of a Hugging Face directory, split and transposed into phalanx's.

    The caller compares them with `shapes`. Raises CheckpointError if two of Hugging Face's are the
    same one of phalanx's.
    """
    shapes = replace_stacks_by_elements(shapes)
    stacks = [
        name
        for name, info in weights.tensors.items()
        if family.is_stack_of_expert_matrices(name, info.shape)
    ]
    reader = ReaderOfUnstackedElements(weights, stacks)
    tensors: dict[str, RenamedTensorBlock] = {}
    origins: dict[str, str] = {}
    unknown: dict[str, TensorShapeAndDtype] = {}
    tied: list[RenamedTensorBlock] = []
    for name, info in reader.tensors.items():
        if is_ignored_buffer(family, name):
            continue
        rule, our_names = _find_name_rule(family, name)
        if rule is None:
            unknown[name] = info
        elif our_names == ["head.weight"] and "head.weight" not in shapes:
            for head in _split_hugging_face_tensor(name, rule, our_names, shapes, reader):
                tied.append(replace(head, name=name))
        else:
            for tensor in _split_hugging_face_tensor(name, rule, our_names, shapes, reader):
                if (other := origins.setdefault(tensor.name, name)) != name:
                    raise CheckpointError(
                        f"{other} and {name} are the same tensor of the model", where=reader.where
                    )
                tensors[tensor.name] = tensor
    return TensorsUnderPhalanxNames(tensors, unknown, tuple(tied))


def _find_name_rule(
    family: HuggingFaceFamily, name: str
) -> tuple[TensorNameRule | None, list[str]]:
    """The rule about `name`, which may lack the prefix: bases without a head are saved so."""
    for candidate in (name, family.prefix + name):
        for rule in family.rules:
            if our_names := rule.translate_to_phalanx_names(candidate):
                return rule, our_names
    return None, []


def is_ignored_buffer(family: HuggingFaceFamily, name: str) -> bool:
    """True for buffers that old releases saved."""
    inner = name.removeprefix(family.prefix)
    if inner.endswith(".rotary_emb.inv_freq"):
        return True
    return any(fnmatchcase(inner, pattern) for pattern in family.ignored)


def _split_hugging_face_tensor(
    name: str,
    rule: TensorNameRule,
    our_names: list[str],
    shapes: Mapping[str, Size],
    reader: TensorReader,
) -> Iterable[RenamedTensorBlock]:
    """Yield phalanx's tensors in one of Hugging Face's.

    Lengths are those of `shapes`; a tensor that does not add up keeps its own shape.
    """
    info = reader.tensors[name]
    oriented = info.shape
    if set(info.shape[: rule.ones]) <= {1}:
        oriented = info.shape[rule.ones :]
    if rule.transposed:
        oriented = oriented[::-1]
    # 0 for a name that the model does not have: then the lengths do not add up.
    lengths = [shapes.get(our_name, (0,))[0] for our_name in our_names]
    fits = len(our_names) > 1 and bool(oriented) and sum(lengths) == oriented[0]
    start = 0
    for our_name, length in zip(our_names, lengths, strict=True):
        shape, rows = oriented, slice(None)
        if fits:
            shape, rows = (length, *oriented[1:]), slice(start, start + length)
        load = partial(_load_split_rows, reader, name, rule, oriented, rows)
        yield RenamedTensorBlock(our_name, TensorShapeAndDtype(shape, info.dtype), load)
        start += length


def _load_split_rows(
    reader: TensorReader, name: str, rule: TensorNameRule, oriented: Size, rows: slice
) -> Bits:
    bits = reader.load(name)
    if not oriented:
        return bits.reshape(oriented)
    if rule.transposed:
        return bits.reshape(oriented[::-1]).T[rows]
    return bits.reshape(oriented)[rows]
