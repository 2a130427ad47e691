"""Builds a module without memory for its parameters, and fills shards of them later with the very
numbers that building it would have given.

While the module is built its tensors are fake: they have shapes, and no memory. Every operation on
them is recorded, and replayed for the parameters that are filled.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from phalanx.mesh.logical import LogicalShard, full_name
from phalanx.mesh.recorded_operations import (
    RecordedOperation,
    RecordedOperations,
    RecordedTensorView,
)

_aten = torch.ops.aten
# In-place operations after which nothing of the tensor's earlier values is left.
_OVERWRITING_OPERATORS = {
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.exponential_.default,
    _aten.log_normal_.default,
    _aten.cauchy_.default,
    _aten.geometric_.default,
    _aten.random_.default,
    _aten.random_.to,
    getattr(_aten.random_, "from"),
    _aten.bernoulli_.float,
    _aten.zero_.default,
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.copy_.default,
}
# Operations that give a tensor other memory, or another size of it.
_STORAGE_CHANGING_OPERATORS = ("aten::set_", "aten::resize_", "aten::resize_as_")
_RANDOM_STATE_FUNCTIONS = ("manual_seed", "seed", "get_rng_state", "set_rng_state", "fork_rng")


class NotRecordableError(Exception):
    """Building the module does what cannot be recorded; the message says what."""


class _OperationRecorderMode(TorchDispatchMode):
    """Records each operator that is called on fake tensors, which a mode below it makes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and skipping it would import it: 100 MB in each rank.
        return False

    def __init__(self) -> None:
        super().__init__()
        self.recording = RecordedOperations(torch.default_generator.get_state())
        self.fakes: list[weakref.ref[FakeTensor]] = []
        # Kept, so that no later memory has the address of an earlier one.
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options: dict[str, Any] = kwargs or {}
        if function is _aten._local_scalar_dense.default:
            return self._compute_scalar_value(args[0])
        if options.get("generator") is not None:
            raise NotRecordableError("it draws from a generator of its own")
        if function._schema.name in _STORAGE_CHANGING_OPERATORS:
            raise NotRecordableError(f"it calls {function._schema.name.removeprefix('aten::')}")
        num_known = len(self._storages)
        arguments = tree_map(self._replace_by_recorded_view, args)
        named = tree_map(self._replace_by_recorded_view, options)
        returned = function(*args, **options)
        outputs = tuple(
            self._replace_by_recorded_view(leaf)
            for leaf in tree_flatten(returned)[0]
            if isinstance(leaf, torch.Tensor)
        )
        created = frozenset(ref.storage for ref in outputs if ref.storage >= num_known)
        written = self._find_written_storages(function, args, options)
        # A view of what is known already, which memory alone tells.
        if created or written:
            refs = [leaf for leaf in tree_flatten((arguments, named))[0] if _is_recorded_view(leaf)]
            overwrites = function in _OVERWRITING_OPERATORS and refs[0].covers
            read_refs = refs[1:] if overwrites else refs
            read = frozenset(ref.storage for ref in read_refs)
            self.recording.operations.append(
                RecordedOperation(
                    function, arguments, named, outputs, created, written, read, overwrites
                )
            )
        return returned

    def record_view_of_tensor(self, tensor: torch.Tensor) -> RecordedTensorView:
        """The place of the tensor's values after all that was recorded."""
        view = self._replace_by_recorded_view(tensor)
        assert isinstance(view, RecordedTensorView)
        return view

    def _replace_by_recorded_view(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not isinstance(leaf, FakeTensor):
            # A constant of the code: what is done to it later is done to another tensor.
            with _disabling_dispatch_modes():
                return leaf.detach().clone()
        if leaf.is_conj() or leaf.is_neg() or leaf.layout != torch.strided:
            raise NotRecordableError("it has tensors that are not plain numbers in memory")
        if leaf.device.type != "cpu":
            raise NotRecordableError(f"it has tensors on {leaf.device.type}")
        self.fakes.append(weakref.ref(leaf))
        storage = leaf.untyped_storage()
        number, _ = self._storages.setdefault(storage._cdata, (len(self._storages), storage))
        size, stride = tuple(leaf.shape), tuple(leaf.stride())
        is_all = leaf.numel() * leaf.element_size() == storage.nbytes()
        covers = is_all and _is_dense_in_memory(size, stride)
        return RecordedTensorView(number, leaf.dtype, size, stride, leaf.storage_offset(), covers)

    def _find_written_storages(
        self, function: Any, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> frozenset[int]:
        written = set()
        for index, argument in enumerate(function._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[index] if index < len(args) else options.get(argument.name)
            for leaf in tree_flatten(value)[0]:
                if not isinstance(leaf, torch.Tensor):
                    continue
                if not isinstance(leaf, FakeTensor):
                    raise NotRecordableError("it changes a tensor that was there before")
                written.add(self.record_view_of_tensor(leaf).storage)
        return frozenset(written)

    def _compute_scalar_value(self, tensor: torch.Tensor) -> Any:
        """The number that the tensor would have by now."""
        values: list[Any] = []
        if not isinstance(tensor, FakeTensor):
            return tensor.detach().cpu().numpy().item()
        view_of_tensor = {"": self.record_view_of_tensor(tensor)}
        with _disabling_dispatch_modes():
            self.recording.compute_tensor_values(
                view_of_tensor, lambda _, value: values.append(value.item())
            )
        return values[0]


def _is_dense_in_memory(size: Sequence[int], stride: Sequence[int]) -> bool:
    """True if elements lie side by side in memory, in whatever order, each once."""
    expected = 1
    for step, length in sorted(zip(stride, size, strict=True)):
        if length == 1:
            continue
        if step != expected:
            return False
        expected *= length
    return True


def _is_recorded_view(leaf: Any) -> bool:
    return isinstance(leaf, RecordedTensorView)


@contextlib.contextmanager
def _disabling_dispatch_modes() -> Iterator[None]:
    with torch.utils._python_dispatch._disable_current_modes():
        yield


@contextlib.contextmanager
def _recording_random_state_calls() -> Iterator[list[str]]:
    """Notes calls that read or set the random generator's state, which fake tensors do not move."""
    called: list[str] = []

    def refuse(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            raise NotRecordableError(f"it calls torch.{name}")

        return call

    homes = (torch, torch.random)
    before = {
        (home, name): getattr(home, name)
        for home in homes
        for name in _RANDOM_STATE_FUNCTIONS
        if hasattr(home, name)
    }
    try:
        for home, name in before:
            setattr(home, name, refuse(name))
        yield called
    finally:
        for (home, name), function in before.items():
            setattr(home, name, function)


class InitialParameterValues(Protocol):
    """The source of the values of a module's parameters on the meta device. `digest` is the
    same where these are."""

    @property
    def digest(self) -> str: ...

    def fill_parameter_shards(self, shards: Mapping[str, LogicalShard]) -> None:
        """Fill those of `shards` that are parameters."""


@dataclass(frozen=True)
class RecordedInitialization:
    """The values that building the module gives."""

    recording: RecordedOperations
    refs: Mapping[str, RecordedTensorView]
    digest: str

    def fill_parameter_shards(self, shards: Mapping[str, LogicalShard]) -> None:
        """Fill those of `shards` that are parameters. Needs memory for about one whole tensor at
        a time, and as long as drawing all of them."""

        def receive(name: str, values: torch.Tensor) -> None:
            shard = shards[name]
            for box in shard.boxes:
                shard.tensor[box.slices_in_local_tensor].copy_(values[box.slices_in_full_tensor])

        view_of_tensor = {name: ref for name, ref in self.refs.items() if name in shards}
        self.recording.compute_tensor_values(view_of_tensor, receive)


_recorded_inits: weakref.WeakKeyDictionary[nn.Module, InitialParameterValues] = (
    weakref.WeakKeyDictionary()
)


def build_module_and_record(build: Callable[[], nn.Module]) -> nn.Module:
    """The module that `build` returns, with parameters on the meta device; buffers and other
    tensors are there. `get_initial_values_of_module` knows how to fill the parameters as `build`
    would have.

    Raises NotRecordableError where that is not possible, and whatever `build` raises of fake
    tensors; building the module plainly is the way then.
    """
    recorder = _OperationRecorderMode()
    with (
        _recording_random_state_calls() as reseeded,
        FakeTensorMode(allow_non_fake_inputs=True),
        recorder,
    ):
        module = build()
    if reseeded:
        raise NotRecordableError(f"it calls torch.{reseeded[0]}")
    if not isinstance(module, nn.Module):
        raise NotRecordableError("it returns no module")
    refs = _replace_fake_parameters_by_meta(module, recorder)
    _replace_fake_tensors_by_values(module, recorder)
    recording, fakes = recorder.recording, recorder.fakes
    del recorder
    gc.collect()
    if any(fake() is not None for fake in fakes):
        raise NotRecordableError("it keeps tensors in a place where they are not found")
    _recorded_inits[module] = RecordedInitialization(recording, refs, recording.digest())
    return module


def get_initial_values_of_module(module: nn.Module) -> InitialParameterValues | None:
    """The initial values of the parameters of a module that `build_module_and_record` has made;
    None for other modules."""
    return _recorded_inits.get(module)


def set_initial_values_of_module(module: nn.Module, values: InitialParameterValues) -> None:
    """Fill the parameters of a module, which are on the meta device, by these values."""
    _recorded_inits[module] = values


def _replace_fake_parameters_by_meta(
    module: nn.Module, recorder: _OperationRecorderMode
) -> dict[str, RecordedTensorView]:
    """Put parameters on meta in the place of fake ones; where the values of each are."""
    replaced: dict[int, nn.Parameter] = {}
    refs: dict[str, RecordedTensorView] = {}
    fake_attributes = _list_attributes_of_fake_parameters()
    for prefix, part in module.named_modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is None:
                continue
            if not isinstance(parameter, FakeTensor):
                raise NotRecordableError("it has parameters that were there before")
            if id(parameter) not in replaced:
                size, stride = parameter.shape, parameter.stride()
                empty = torch.empty_strided(size, stride, dtype=parameter.dtype, device="meta")
                new = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                for key, value in vars(parameter).items():
                    if key not in fake_attributes:
                        setattr(new, key, value)
                replaced[id(parameter)] = new
            full = full_name(f"{prefix}.{name}" if prefix else name)
            refs[full] = recorder.record_view_of_tensor(parameter)
            part._parameters[name] = replaced[id(parameter)]
    owners: dict[int, int] = {}
    for name, ref in refs.items():
        parameter = module.get_parameter(name)
        if owners.setdefault(ref.storage, id(parameter)) != id(parameter):
            raise NotRecordableError(f"{name} shares its memory with another parameter")
    return refs


def _list_attributes_of_fake_parameters() -> frozenset[str]:
    """The attributes that every fake parameter has in its __dict__."""
    with FakeTensorMode():
        return frozenset(vars(nn.Parameter(torch.empty(1))))


def _replace_fake_tensors_by_values(module: nn.Module, recorder: _OperationRecorderMode) -> None:
    """Put real values in the place of fake buffers and of fake tensors among attributes."""
    fakes: dict[str, FakeTensor] = {}

    def note(leaf: Any) -> Any:
        if isinstance(leaf, FakeTensor):
            fakes[str(id(leaf))] = leaf
        return leaf

    holders: list[dict[str, Any]] = []
    for part in module.modules():
        holders += [part._buffers, vars(part)]
    for holder in holders:
        for key, value in holder.items():
            if key not in ("_parameters", "_modules", "_buffers"):
                tree_map(note, value)
    values: dict[str, torch.Tensor] = {}
    view_of_tensor = {key: recorder.record_view_of_tensor(fake) for key, fake in fakes.items()}
    recorder.recording.compute_tensor_values(view_of_tensor, values.__setitem__)

    def replace(leaf: Any) -> Any:
        return values[str(id(leaf))] if isinstance(leaf, FakeTensor) else leaf

    for holder in holders:
        for key, value in list(holder.items()):
            if key in ("_parameters", "_modules", "_buffers"):
                continue
            is_fake: list[bool] = []
            tree_map(
                lambda leaf, is_fake=is_fake: is_fake.append(isinstance(leaf, FakeTensor)), value
            )
            if any(is_fake):
                holder[key] = tree_map(replace, value)
