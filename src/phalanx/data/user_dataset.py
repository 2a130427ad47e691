"""A user's own map-style dataset: `factory(split, **args)` gives `len()` and `[i]` -> dict.
Torch-free itself.

Samples are drawn in an order that is a keyed permutation of the dataset for each epoch. Before each
of them the global random states (random, numpy, torch) are set from (seed, global sample number),
so that augmentation repeats whichever process does it, and put back afterwards, so that training
never notices.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from phalanx.core.batch import flatten_batch
from phalanx.core.digest import hash_to_stable_64_bits
from phalanx.core.errors import DataError, DataSourceError, PhalanxError
from phalanx.core.outages import find_outage
from phalanx.core.printable import describe_foreign_error
from phalanx.core.registry import import_object_of_kind
from phalanx.core.uncaught import find_innermost_user_code_line
from phalanx.data.order import ShuffledSampleOrder
from phalanx.data.tokens import Split

Arrays = dict[str, NDArray[Any]]

_PACKAGE_DIR = str(Path(__file__).parents[1])
# Samples that are compared between processes: several, because processes that shuffle for
# themselves may agree on one of them by chance.
NUM_COMPARED_SAMPLES = 16
# numpy's kinds of types that a tensor can have, and the most bytes of a number of each.
_TENSOR_ITEMSIZES = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}


@dataclass(frozen=True)
class UserDatasetFacts:
    """Facts of a user's dataset that are known before the ranks start."""

    source: str
    args: dict[str, Any] = field(default_factory=dict)
    num_train: int = 0
    num_held_out: int = 0
    some_samples: str = ""  # see digest_of_some
    first_shapes: dict[str, list[int]] = field(default_factory=dict)
    """Of one training sample, by key."""


def open_user_dataset(source: str, args: Mapping[str, Any], split: Split) -> Any:
    """The result of the factory: a dataset with at least one sample, or None for "held_out".

    Raises LayoutError (exit 3) if there is no such factory, DataSourceError for what it or its
    module raises, and DataError for what it returns.
    """
    where = f"data.source {source}"
    try:
        factory = import_object_of_kind(source, "phalanx.data", "dataset")
    except PhalanxError:
        raise
    except Exception as error:
        raise format_user_exception(error, f"{where}, import") from error
    where += f", split {split!r}"
    try:
        dataset = factory(split, **args)
    except Exception as error:
        raise format_user_exception(error, where) from error
    if dataset is None and split == "held_out":
        return None
    for name in ("__len__", "__getitem__"):
        if not hasattr(dataset, name):
            summary = f"{source} returned {type(dataset).__name__}, which has no {name}"
            raise DataError(
                summary, where="data.source", fix="return a map-style dataset: len() and [i]"
            )
    try:
        num_samples = len(dataset)
    except Exception as error:
        raise format_user_exception(error, f"{where}, len()") from error
    if num_samples == 0:
        raise DataError(
            "the dataset is empty",
            where=where,
            why="its len() is 0",
        )
    return dataset


class UserSamples:
    """Samples by global number. `shuffled=False` takes them as they lie (for evaluation).

    `on_sample` is told the place of each sample before the user's code is asked for it, and None
    when all have come.
    """

    def __init__(self, dataset: Any, source: str, seed: int, *, shuffled: bool = True) -> None:
        self._dataset, self._source, self._seed = dataset, source, seed
        self.on_sample: Callable[[int | None], None] = lambda _index: None
        self._order = ShuffledSampleOrder(len(dataset), seed) if shuffled else None

    def take(self, indices: NDArray[np.integer]) -> Arrays:
        """Each entry of the samples' dicts, stacked: [n, ...]. Raises DataSourceError for what the
        dataset raises, and DataError for what cannot be a batch.
        """
        places = np.asarray(indices)
        if self._order is not None:
            places = self._order.shuffled_positions(indices)
        numbers, positions = indices.ravel().tolist(), places.ravel().tolist()
        samples = []
        with _restoring_random_states():
            for index, position in zip(numbers, positions, strict=True):
                samples.append(self._read_user_sample(index, position))
        self.on_sample(None)
        return collate_samples(samples, positions, self._source)

    def _read_user_sample(self, index: int, index_in_source: int) -> Mapping[str, Any]:
        # By the number in the run, not the place in the dataset: each epoch augments anew.
        _seed_all_generators(hash_to_stable_64_bits("sample", self._seed, index))
        self.on_sample(index_in_source)
        try:
            sample: Any = self._dataset[index_in_source]
        except Exception as error:
            raise format_user_exception(
                error, f"sample {index_in_source} of {self._source}"
            ) from error
        if not isinstance(sample, Mapping) or not sample:
            raise DataError(
                "a sample must be a dict of arrays, tensors or numbers",
                where=f"sample {index_in_source} of {self._source}",
                why=f"it is {type(sample).__name__}",
                fix='return {"inputs": ..., "targets": ...}',
            )
        return sample


def collate_samples(
    samples: Sequence[Mapping[str, Any]], places: Sequence[int], source: str
) -> Arrays:
    """Stack the samples' entries. Whole numbers become int64, and so do arrays of uint16, uint32
    and uint64; other numbers become float32, and so do numpy's arrays of float64, which is its
    default and rarely meant. Tensors keep their type, but for unsigned ones. Entries of nested
    samples have joined names.
    """
    samples = [
        _flatten_sample(sample, f"sample {index} of {source}")
        for index, sample in zip(places, samples, strict=True)
    ]
    keys = list(samples[0])
    for index, sample in zip(places, samples, strict=True):
        if set(sample) != set(keys):
            why = f"sample {places[0]} has {sorted(keys)}, sample {index} has {sorted(sample)}"
            raise DataError("samples must have the same keys", where=source, why=why)
    arrays: Arrays = {}
    for key in keys:
        arrays[key] = _stack_entries(key, [sample[key] for sample in samples], places, source)
    return arrays


def _flatten_sample(sample: Mapping[str, Any], where: str) -> dict[str, Any]:
    try:
        return flatten_batch(sample)
    except DataError as error:
        raise DataError(error.what, where=where, fix=error.fix) from None
    except RecursionError:
        raise DataError("it is nested too deeply, or holds itself", where=where) from None


def _stack_entries(
    key: str, values: Sequence[Any], places: Sequence[int], source: str
) -> NDArray[Any]:
    arrays = []
    for index, value in zip(places, values, strict=True):
        arrays.append(_convert_entry_to_array(key, value, f"sample {index} of {source}"))
    for index, array in zip(places, arrays, strict=True):
        for noun, own_value, first, fix in (
            ("shape", array.shape, arrays[0].shape, "pad or crop them to one shape"),
            ("type", array.dtype, arrays[0].dtype, "convert them to one type"),
        ):
            if own_value != first:
                raise DataError(
                    f"samples of one batch have {key!r} of different {noun}s",
                    where=source,
                    why=f"{first} in sample {places[0]}, {own_value} in sample {index}",
                    fix=fix,
                )
    return np.stack(arrays)


def _convert_entry_to_array(key: str, value: Any, where: str) -> NDArray[Any]:
    is_tensor = hasattr(value, "detach")
    if _is_masked(value):
        raise DataError(
            f"{key!r} is a masked array, and a tensor has no mask",
            where=where,
            fix="give what it holds (.filled(NUMBER)), and its mask as another entry",
        )
    try:
        if isinstance(value, bool | int) and not isinstance(value, np.generic):
            return np.asarray(value, np.int64)
        # As torch.tensor takes it; numpy's own float64 numbers, too.
        if isinstance(value, float):
            return np.asarray(value, np.float32)
        array = np.asarray(value.detach().cpu().numpy() if is_tensor else value)
    # A ragged list, a type that numpy does not have, or a whole number of more than 64 bits.
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{key!r} cannot be made an array", where=where, why=str(error)) from None
    if array.dtype.itemsize > _TENSOR_ITEMSIZES.get(array.dtype.kind, 0):
        why = type(value).__name__
        if isinstance(value, np.ndarray | np.generic):
            why += f" of {array.dtype}"
        raise DataError(f"{key!r} is no number and no array of numbers", where=where, why=why)
    if array.dtype == np.float64 and not is_tensor:
        # numpy's default, and rarely meant; the type of a tensor is.
        return array.astype(np.float32)
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        # How tokens are stored, and what nearly no operation of torch takes.
        return _widen_to_int64(key, array, where)
    # A tensor has this machine's order of bytes, which a file of another kind may not.
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _is_masked(value: Any) -> bool:
    """True for numpy's masked arrays, and lists of them: np.asarray drops the mask in silence.
    Whatever the mask says: a sample whose mask hides nothing would pass, and a later one not."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], np.ndarray):
        return any(map(_is_masked, value))
    return isinstance(value, np.ma.MaskedArray)


def _widen_to_int64(key: str, array: NDArray[Any], where: str) -> NDArray[Any]:
    largest = int(array.max(initial=0))
    if largest > np.iinfo(np.int64).max:
        raise DataError(f"{key!r} holds {largest}, which is beyond int64", where=where)
    return array.astype(np.int64)


def format_user_exception(error: Exception, where: str) -> DataSourceError:
    """A user's exception in one line: what, and the place in their code that it comes from."""
    if line := _find_raising_line(error):
        where = f"{line}, {where}"
    return DataSourceError(describe_foreign_error(error), where=where, outage=find_outage(error))


def _find_raising_line(error: Exception) -> str:
    """The line of the user's own code that raised, else of a library's; "" if it was ours."""
    # A file that Python cannot read has run no line.
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    if line := find_innermost_user_code_line(error.__traceback__):
        return line
    not_theirs = ("<", _PACKAGE_DIR, importlib.__file__)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(not_theirs):
            return f"{frame.filename}:{frame.lineno}"
    return ""


@contextlib.contextmanager
def _restoring_random_states() -> Iterator[None]:
    # Only if it is imported already: a worker whose dataset needs no torch does without.
    torch = sys.modules.get("torch")
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), None
    if torch is not None:
        torch_state = torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if torch is not None and torch_state is not None:
            torch.set_rng_state(torch_state)


def _seed_all_generators(seed: int) -> None:
    random.seed(seed)
    # numpy refuses a seed of more than 32 bits.
    np.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        # Not torch.manual_seed, which seeds the generators of GPUs as well.
        torch.default_generator.manual_seed(seed % 2**63)


def first_shapes(
    dataset: Any, source: str, on_sample: Callable[[int | None], None]
) -> dict[str, list[int]]:
    """The shapes of the entries of the sample that `hash_sample_subset` takes first."""
    samples = UserSamples(dataset, source, seed=0)
    samples.on_sample = on_sample
    sample = samples.take(np.array([0]))
    return {key: list(array.shape[1:]) for key, array in sample.items()}


def hash_sample_subset(
    dataset: Any, source: str, on_sample: Callable[[int | None], None] = lambda _index: None
) -> str:
    """Digest of up to NUM_COMPARED_SAMPLES samples at places that a key chose, one by one: they
    need not have the same shape.
    """
    samples = UserSamples(dataset, source, seed=0)
    samples.on_sample = on_sample
    digests = [
        hash_sample(samples.take(np.array([number])))
        for number in range(min(NUM_COMPARED_SAMPLES, len(dataset)))
    ]
    return xxhash.xxh3_64_hexdigest(" ".join(digests).encode())


def hash_sample(arrays: Arrays) -> str:
    """Hex of XXH3-64 over names, types, shapes and bytes."""
    checksum = xxhash.xxh3_64()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        # Types and shapes, too: the same bytes may be other numbers.
        checksum.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
        checksum.update(array.reshape(-1).view(np.uint8).data)
    return checksum.hexdigest()
