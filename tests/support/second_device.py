"""A second device that is not there: ordinary CPU tensors, of which some are said to lie on
"cuda:0".

Inside `second_device()` a tensor that was made for a CUDA device, or of tensors there, says that it
is there, while it is computed by the CPU's kernels. An operation on tensors of both places is an
AssertionError, as on a GPU. `Waits` counts what makes a host wait for a GPU: numbers that it reads,
shapes that depend on them, copies from or to memory that is not page-locked. Memory is page-locked
if it was asked to be. It has not been compared with a GPU.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.device("cuda", 0)
_DEVICE, _HOST = (
    torch.device("cpu", 1),
    torch.device("cpu", 2),
)  # how the dispatcher sees a choice of device
HOST, PINNED, DEVICE, EITHER = "host", "pinned", "device", "either"
SOURCES = tuple(str(Path(__file__).parents[2] / folder) for folder in ("src", "tests"))
aten = torch.ops.aten

READS = {
    aten._local_scalar_dense.default: "a number is read",
    aten.equal.default: "tensors are compared",
    aten.is_nonzero.default: "a number is read",
    aten.nonzero.default: "a shape depends on numbers: nonzero",
    aten.masked_select.default: "a shape depends on numbers: masked_select",
    aten._unique2.default: "a shape depends on numbers: unique",
    aten.unique_dim.default: "a shape depends on numbers: unique",
    aten.unique_consecutive.default: "a shape depends on numbers: unique",
    aten.bincount.default: "a shape depends on numbers: bincount",
}
INDEXED = {
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
}
COPIES = {aten._to_copy.default, aten.copy_.default}
ANY_PLACE = ("c10d::", "c10d_functional::", "_c10d_functional::", "fsdp::", "profiler::")


@dataclass
class Waits:
    """What made the host wait for the device, and how often: by what it was and the line of the
    project it was in."""

    counts: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.counts.total()

    def add(self, what: str) -> None:
        self.counts[f"{what} ({_where()})"] += 1

    def take(self) -> Counter[str]:
        taken, self.counts = self.counts, Counter()
        return taken


def _where() -> str:
    frames = [
        f
        for f in traceback.extract_stack()
        if f.filename.startswith(SOURCES) and f.filename != __file__
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "outside"


def _is_in_collective() -> bool:
    """gloo copies what it received when it is waited for; NCCL receives it where it belongs."""
    names = (frame.filename for frame in reversed(traceback.extract_stack()))
    skipped = (__file__, "_dynamo/eval_frame.py", "torch/_compile.py")
    return next(name for name in names if not name.endswith(skipped)).endswith(
        "distributed_c10d.py"
    )


class Places:
    """Where the memory of each tensor is said to lie."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[StorageWeakRef, str]] = {}

    def of(self, tensor: torch.Tensor) -> str:
        reference, place = self._of.get(tensor.untyped_storage()._cdata, (None, HOST))
        return HOST if reference is None or reference.expired() else place

    def put(self, tensor: torch.Tensor, place: str) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        self._of[reference.cdata] = (
            reference,
            place,
        )  # the address is not given away again while it is referred to
        if len(self._of) > 100_000:
            self._of = {key: entry for key, entry in self._of.items() if not entry[0].expired()}


PLACES = Places()  # tensors outlive a block of `second_device`, as weights do


def is_plain(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def place_of(tensor: torch.Tensor) -> str:
    local = getattr(tensor, "_local_tensor", tensor)
    return PLACES.of(local)


@contextlib.contextmanager
def second_device() -> Iterator[Waits]:
    """Tensors may be on CUDA; what waits for it is counted."""
    waits = Waits()
    with contextlib.ExitStack() as stack:
        for target, name, value in (*_stand_ins(waits), *_functions(waits)):
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(_Dispatch(waits))
        yield waits


def to_device(module: torch.nn.Module) -> torch.nn.Module:
    """All that `module` has lies on the device from now on."""
    for tensor in (*module.parameters(), *module.buffers()):
        PLACES.put(tensor, DEVICE)
    return module


class _Dispatch(TorchDispatchMode):
    """Follows places through every operation."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(
            isinstance(t, FakeTensor) or t.is_meta for t in tensors
        ):  # shapes alone, on no device
            args, kwargs = pytree.tree_map_only(torch.device, _without_mark, (args, kwargs))
            return func(*args, **kwargs)
        if not all(is_plain(t) for t in tensors):
            return (
                NotImplemented  # a DTensor's own operations come here again, with its local tensors
            )
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # asked for below autograd, where torch does not take it apart before
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        if func.namespace in ("c10d", "fsdp", "profiler") or str(func).startswith(ANY_PLACE):
            return self._elsewhere(func, args, kwargs, tensors)
        asked = kwargs.get("device")
        places = {id(t): PLACES.of(t) for t in tensors}
        if func in COPIES:
            return self._copy(func, args, kwargs, asked)
        here = self._agreed(func, args, kwargs, tensors, places)
        if here == DEVICE:
            self._count_reads(func, args, kwargs)
        if asked is not None and asked.index is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
            here = DEVICE if asked == _DEVICE else HOST
        elif not tensors and asked is not None:
            here = EITHER  # made by torch's own C++, for a tensor that it does not show
        if kwargs.get("pin_memory"):
            kwargs, here = {**kwargs, "pin_memory": False}, PINNED
        made = func(*args, **kwargs)
        self._place(made, here, tensors)
        return made

    def _elsewhere(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """Collectives, and the copies around them."""
        asked = kwargs.get("device")
        args, kwargs = pytree.tree_map_only(
            torch.device, lambda _: torch.device("cpu"), (args, kwargs)
        )
        made = func(*args, **kwargs)
        on_device = any(PLACES.of(t) == DEVICE for t in tensors) or asked == _DEVICE
        self._place(made, DEVICE if on_device else HOST, tensors)
        return made

    def _place(self, made: Any, place: str, given: list[torch.Tensor]) -> None:
        known = {t.untyped_storage()._cdata for t in given}
        for tensor in pytree.tree_leaves(made):
            if is_plain(tensor) and tensor.untyped_storage()._cdata not in known:
                PLACES.put(tensor, place)

    def _copy(self, func: Any, args: Any, kwargs: Any, asked: torch.device | None) -> Any:
        source = args[1] if func is aten.copy_.default else args[0]
        waits_not = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        before = PLACES.of(source)
        if func is aten.copy_.default:
            after = PLACES.of(args[0])
        else:
            asked_place = {_DEVICE: DEVICE, _HOST: HOST}.get(asked) if asked is not None else None
            after = asked_place or (HOST if before == PINNED else before)
            kwargs = {**kwargs, "device": torch.device("cpu")} if asked is not None else kwargs
        if before == DEVICE and after in (HOST, PINNED) and not (waits_not and after == PINNED):
            self._waits.add("a copy to the host")
        is_upward = before in (HOST, PINNED) and after == DEVICE
        if is_upward and not (waits_not and before == PINNED) and not _is_in_collective():
            self._waits.add(
                "a copy from pageable memory" if before == HOST else "a copy that is waited for"
            )
        if kwargs.get("pin_memory"):
            kwargs, after = {**kwargs, "pin_memory": False}, PINNED
        made = func(*args, **kwargs)
        if func is not aten.copy_.default:
            PLACES.put(made, after)
        return made

    def _agreed(
        self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], places: dict[int, str]
    ) -> str:
        """Where all tensors lie.

        Numbers without dimensions are taken from the host; so are indices, by a copy.
        """
        found = {p for p in places.values() if p != EITHER}
        if DEVICE not in found:
            return next(iter(found), EITHER if tensors else HOST)
        for tensor in tensors:
            if places[id(tensor)] == EITHER:
                PLACES.put(tensor, DEVICE)
        strangers = [t for t in tensors if places[id(t)] in (HOST, PINNED) and t.ndim]
        if func in INDEXED and PLACES.of(args[0]) == DEVICE:
            if any(PLACES.of(t) != DEVICE for t in args[1] if t is not None):
                self._waits.add("indices are copied from the host")
            strangers = [t for t in strangers if not any(t is index for index in args[1])]
        if func is aten.record_stream.default or not strangers:
            return DEVICE
        shown = ", ".join(f"{places[id(t)]} {tuple(t.shape)}" for t in tensors)
        raise AssertionError(f"{func} mixes tensors of host and device: {shown}, in {_where()}")

    def _count_reads(self, func: Any, args: Any, kwargs: Any) -> None:
        if func in READS:
            self._waits.add(READS[func])
        elif func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self._waits.add("a shape depends on numbers: repeat_interleave")
        elif func in INDEXED and any(
            t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]
        ):
            self._waits.add("a shape depends on numbers: an index of booleans")


_MAKERS = (
    *("empty", "zeros", "ones", "full", "arange", "linspace", "eye", "empty_strided"),
    *("rand", "randn", "randint", "randperm", "tril_indices", "triu_indices"),
)
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided")


def _marked(value: Any) -> Any:
    """A choice of device, as the dispatcher is to see it."""
    if isinstance(value, str) and (value == "cpu" or value.startswith("cuda")):
        value = torch.device(value)
    if (
        not isinstance(value, torch.device)
        or value in (_DEVICE, _HOST)
        or value.type not in ("cpu", "cuda")
    ):
        return value
    return _DEVICE if value.type == "cuda" else _HOST


def _functions(waits: Waits) -> list[tuple[Any, str, Any]]:
    """What Python asks of torch: devices by name, and what never reaches the dispatcher of a
    CPU."""
    cls, plain = (
        torch.Tensor,
        {name: getattr(torch.Tensor, name) for name in (*_NEW, "to", "tolist", "cpu", "numpy")},
    )

    def with_device(function: Any, default: torch.device | None) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], torch.Tensor) and not is_plain(args[0]):
                return function(*args, **kwargs)
            if default is not None or kwargs.get("device") is not None:
                kwargs["device"] = _marked(kwargs.get("device") or default)
            return function(*args, **kwargs)

        return call

    def of_numbers(function: Any) -> Any:
        def call(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
            made = function(data, *args, **kwargs)
            if (
                device is not None
                and torch.device(device).type == "cuda"
                and place_of(made) != DEVICE
            ):
                waits.add("a copy from pageable memory")
                made = _put(made.clone(), DEVICE)
            return made

        return call

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_plain(self):
            return plain["to"](self, *args, **kwargs)
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        args, kwargs = pytree.tree_map(_marked, (tuple(args), kwargs))
        asked = next(
            (
                v
                for v in (*args, *kwargs.values())
                if v in (_DEVICE, _HOST) and isinstance(v, torch.device)
            ),
            None,
        )
        if asked is not None and (asked == _DEVICE) == (place_of(self) == DEVICE):  # it is there
            args = tuple(a for a in args if a is not asked)
            kwargs = {key: value for key, value in kwargs.items() if value is not asked}
            return (
                plain["to"](self, *args, **kwargs)
                if any(isinstance(a, torch.dtype) for a in args) or kwargs
                else self
            )
        return plain["to"](self, *args, **kwargs)

    def tolist(self: torch.Tensor) -> Any:
        if is_plain(self) and place_of(self) == DEVICE:
            waits.add("numbers are read")
        return plain["tolist"](self)

    def numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert not is_plain(self) or place_of(self) != DEVICE, (
            f"numpy() of a tensor on the device, in {_where()}"
        )
        return plain["numpy"](self, *args, **kwargs)

    own_device = torch._C.TensorBase.device

    def device(self: torch.Tensor) -> torch.device:
        known = own_device.__get__(self)
        return CUDA if known.type == "cpu" and place_of(self) == DEVICE else known

    return [
        *((torch, name, with_device(getattr(torch, name), _HOST)) for name in _MAKERS),
        *((torch, name, with_device(getattr(torch, name), None)) for name in _LIKE),
        *((cls, name, with_device(plain[name], None)) for name in _NEW),
        *((torch, name, of_numbers(getattr(torch, name))) for name in ("tensor", "as_tensor")),
        (cls, "to", to),
        (cls, "cpu", lambda self: self.to("cpu")),
        (cls, "tolist", tolist),
        (cls, "numpy", numpy),
        (cls, "device", property(device)),
        (cls, "is_cuda", property(lambda self: self.device.type == "cuda")),
        (cls, "is_cpu", property(lambda self: self.device.type == "cpu")),
        (cls, "is_pinned", lambda self, *device: place_of(self) == PINNED),
        (cls, "pin_memory", lambda self, *device: _put(self.clone(), PINNED)),
        (cls, "record_stream", lambda self, stream: None),
    ]


def _without_mark(device: torch.device) -> torch.device:
    return torch.device("cpu") if device in (_DEVICE, _HOST) else device


def _put(tensor: torch.Tensor, place: str) -> torch.Tensor:
    PLACES.put(tensor, place)
    return tensor


class _Stream:
    """A stream, on which everything is done at once. The host may wait for it, which is counted."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    def synchronize(self) -> None:
        self._waits.add("a stream is waited for")

    def query(self) -> bool:
        return True

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event(self._waits)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None: ...


class _Event(_Stream):
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def elapsed_time(self, end: Any) -> float:
        return 0.0


def _stand_ins(waits: Waits) -> list[tuple[Any, str, Any]]:
    autocast, is_enabled, dtype_of = (
        torch.autocast,
        torch.is_autocast_enabled,
        torch.get_autocast_dtype,
    )
    fork_rng = torch.random.fork_rng

    class Autocast(autocast):  # type: ignore[valid-type, misc]
        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    def named(function: Any) -> Any:
        return lambda *kind: function(*("cpu" if k == "cuda" else k for k in kind))

    cuda = torch.cuda
    return [
        (torch, "autocast", Autocast),
        (torch, "is_autocast_enabled", named(is_enabled)),
        (torch, "get_autocast_dtype", named(dtype_of)),
        (_fully_shard, "_get_device_from_mesh", lambda mesh: CUDA),
        (cuda, "Stream", lambda *a, **k: _Stream(waits)),
        (cuda, "Event", lambda *a, **k: _Event(waits)),
        (cuda, "current_stream", lambda *a, **k: _Stream(waits)),
        (cuda, "stream", lambda stream: stream or contextlib.nullcontext()),
        (cuda, "synchronize", lambda *a: waits.add("the device is waited for")),
        (cuda, "get_rng_state", lambda *a: torch.get_rng_state()),
        (cuda, "set_rng_state", lambda state, *a: torch.set_rng_state(state)),
        (cuda, "get_device_capability", lambda *a: (9, 0)),
        (cuda, "set_device", lambda *a: None),
        (torch.random, "fork_rng", lambda devices=(), **more: fork_rng(devices=[], **more)),
    ]
