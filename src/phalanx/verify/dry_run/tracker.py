"""StorageTracker: follows the memory and the collectives of a program, operation by operation.

It works on fake tensors and on real ones alike, so that a dry run can be compared with what ranks
really do.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.mesh.logical import get_local_tensor
from phalanx.verify.dry_run.callers import CallerFinder
from phalanx.verify.dry_run.collectives import CollectiveLog
from phalanx.verify.dry_run.moments import FORWARD
from phalanx.verify.dry_run.numbers import FakeOperationCaller
from phalanx.verify.dry_run.storage_log import PARAMETERS, StorageLog, StorageRecord

_aten = torch.ops.aten
_COLLECTIVES = ("c10d", "_c10d_functional")
# Whoever calls these says more about a collective than they do.
_WRAPPERS = (
    "phalanx/mesh/gloo_collectives.py",
    "phalanx/mesh/mesh.py",
    "phalanx/mesh/tensor_group.py",
    "phalanx/parallel/context/group.py",
    "phalanx/parallel/pipeline/p2p.py",
    "phalanx/parallel/wire.py",
)
_DEVICE = torch.ops.prim.device.default


def _call_function(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


class StorageTracker(TorchDispatchMode):
    """Notes in `log` each storage that an operation makes, and in `collectives` what is said to
    other ranks.

    `is_dry`: tensors are fake, and what is read of them is answered (numbers.py).
    """

    def __init__(
        self, log: StorageLog, collectives: CollectiveLog | None = None, *, is_dry: bool = False
    ) -> None:
        super().__init__()
        self.log, self.collectives = log, collectives
        self.num_operations = 0
        self.purpose = ""
        """What the collective is for that is under way, in the words of its phase."""
        self._records: dict[int, StorageRecord] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._finder = CallerFinder()
        self._call_function = FakeOperationCaller(self._finder).call if is_dry else _call_function

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch wraps each call otherwise, for compilers that no tracker meets.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            # Asked for several times in each operation: the long way takes most of a dry run.
            return args[0].fake_device
        # DTensor's own dispatch goes first: its local operations come here again.
        for kind in types:
            if issubclass(kind, DTensor):
                return NotImplemented
        self.num_operations += 1
        output = self._call_function(func, args, kwargs or {})
        if isinstance(output, torch.Tensor):
            self._record_new_storage(output, func, args)
        elif isinstance(output, tuple | list):
            for value in output:
                if isinstance(value, torch.Tensor):
                    self._record_new_storage(value, func, args)
        if func.namespace in _COLLECTIVES and self.collectives is not None:
            self.collectives.note(
                func,
                args,
                output,
                phase=self.log.moments.current.phase,
                purpose=self.purpose,
                caller=self._finder.find(skips=_WRAPPERS),
            )
        return output

    def _record_new_storage(self, tensor: torch.Tensor, func: Any, args: Any) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._records:
            return
        record = StorageRecord(storage.nbytes(), self.log.moments.index, self._finder.find(depth=3))
        if func is _aten._to_copy.default and self.log.moments.current.phase == FORWARD:
            source = self._records.get(args[0].untyped_storage()._cdata)
            record.is_cast = source is not None and source.category == PARAMETERS
        self._track_storage(storage, record)

    def _track_storage(self, storage: torch.UntypedStorage, record: StorageRecord) -> None:
        key = storage._cdata
        self._records[key] = record
        self._references[key] = weakref.ref(storage, lambda _: self._record_freed_storage(key))
        self.log.add(record, record.num_bytes)

    def _record_freed_storage(self, key: int) -> None:
        record = self._records.pop(key)
        del self._references[key]
        record.died = self.log.moments.index
        self.log.add(record, -record.num_bytes)

    @contextmanager
    def ignoring_collectives(self) -> Iterator[None]:
        """Inside, what is said to other ranks is not noted."""
        collectives, self.collectives = self.collectives, None
        try:
            yield
        finally:
            self.collectives = collectives

    def count_storages_by_size(self) -> Counter[int]:
        """Number of storages that are alive, by their size in bytes."""
        return Counter(record.num_bytes for record in self._records.values())

    def enter_part(self, name: str) -> None:
        """From here on the part `name` of the model computes, in the phase that is under way."""
        self.log.moments.enter(replace(self.log.moments.current, part=name))

    def mark(
        self, tensors: Iterable[torch.Tensor | None], category: str, *, overrides: bool = False
    ) -> None:
        """The storages of `tensors` belong to `category`; unless somebody said another one, or,
        with `overrides`, whatever was said."""
        for tensor in tensors:
            if tensor is None:
                continue
            storage = get_local_tensor(tensor.detach()).untyped_storage()
            record = self._records.get(storage._cdata)
            if record is None:
                # It was there before the tracker.
                record = StorageRecord(
                    storage.nbytes(), self.log.moments.index, self._finder.find()
                )
                self._track_storage(storage, record)
            if overrides or not record.category:
                record.category = category

    @contextmanager
    def tracking_storage_resizes(self) -> Iterator[None]:
        """Inside, storages that are given another size count with it: FSDP frees what it gathered
        in this way, and no operation shows it."""
        plain = torch.UntypedStorage.resize_
        tracker = self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            before = storage.nbytes()
            result = plain(storage, size)
            tracker._record_storage_resize(storage, before)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        try:
            yield
        finally:
            del torch.UntypedStorage.resize_

    def _record_storage_resize(self, storage: torch.UntypedStorage, before: int) -> None:
        record = self._records.get(storage._cdata)
        if record is None:
            return
        self.log.add(record, storage.nbytes() - before)
        record.num_bytes = storage.nbytes()
