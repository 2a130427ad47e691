"""Parameters that somebody puts in the place of FSDP's own, in one process."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize

from phalanx.mesh.compat import list_fsdp_parameters
from phalanx.parallel.data_parallel.replaced_parameters import ReplacedParameters


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class _Elsewhere(nn.Linear):
    """Keeps what is set after it was built out of the table of parameters."""

    is_built = False

    def __setattr__(self, name: str, value: Any) -> None:
        if self.is_built and isinstance(value, nn.Parameter):
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)


class _Counts(nn.Linear):
    """Sets attributes in a way of its own, and where others do."""

    num_set = 0

    def __setattr__(self, name: str, value: Any) -> None:
        type(self).num_set += 1
        super().__setattr__(name, value)


class _Table(UserDict[str, Any]):
    def get(self, *_: Any) -> Any:
        raise RuntimeError("no such method")


class _Fails(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nobody asked for the weight")


def _build_root() -> nn.Sequential:
    """The last layer is tied to the first, and the second is frozen."""
    root = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), _Elsewhere(3, 3), _Counts(3, 3))
    root.append(nn.Linear(3, 3, bias=False))
    root[4].weight = root[0].weight
    root[1].requires_grad_(False)
    root[2].is_built = True
    return root


def _replace(part: nn.Module, *, is_trained: bool = True) -> None:
    part.weight = nn.Parameter(torch.eye(3), requires_grad=is_trained)


CASES: dict[str, tuple[Callable[[nn.Sequential], None], list[str]]] = {
    "nothing": (lambda root: None, []),
    "replaced": (lambda root: _replace(root[0]), ["0.weight"]),
    "tied place": (lambda root: _replace(root[4]), ["4.weight"]),
    "own way to set": (lambda root: _replace(root[3]), ["3.weight"]),
    "kept elsewhere": (lambda root: _replace(root[2]), ["2.weight"]),
    "frozen by another": (lambda root: _replace(root[1], is_trained=False), []),
    "frozen by a trained one": (lambda root: _replace(root[1]), ["1.weight"]),
}


@pytest.mark.parametrize("when", ["before a forward", "in a forward"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_put_in_the_place_of_a_parameter(case: str, when: str) -> None:
    replace, names = CASES[case]
    root = _build_root()
    fully_shard(root)
    replaced = ReplacedParameters(root, root)
    replaced.start()
    for _ in range(2):
        root(torch.ones(1, 3)).sum().backward()
    assert replaced.take_names() == []
    if when == "before a forward":
        replace(root)
        assert replaced.list_names() == names
    else:
        root[1].register_forward_hook(lambda *_: replace(root))
    root(torch.ones(1, 3)).sum().backward()
    assert replaced.list_names() == names
    assert replaced.take_names() == names
    assert replaced.take_names() == []
    for parameter in list_fsdp_parameters(root):
        info = parameter._module_info
        assert getattr(info.module, info.param_name) is parameter.sharded_param


def test_a_property_is_not_computed() -> None:
    root = _build_root()
    fully_shard(root)
    replaced = ReplacedParameters(root, root)
    replaced.start()
    root(torch.ones(1, 3)).sum().backward()
    # FSDP's own is no longer in the table, and the attribute is a property that raises.
    parametrize.register_parametrization(root[0], "weight", _Fails(), unsafe=True)
    assert replaced.list_names() == ["0.weight"]
    root.unshard()
    root.reshard()
    assert replaced.take_names() == ["0.weight"]


@pytest.mark.parametrize("when", ["before the start", "after it"])
def test_a_table_that_cannot_be_read_ends_nothing(when: str) -> None:
    """As those of torch.jit."""
    root = _build_root()
    fully_shard(root)
    replaced = ReplacedParameters(root, root)
    if when == "after it":
        replaced.start()
    root[3].__dict__["_parameters"] = _Table(root[3]._parameters)
    if when == "before the start":
        replaced.start()
    for _ in range(2):
        root(torch.ones(1, 3)).sum().backward()
    assert replaced.list_names() == []
    _replace(root[0])
    root(torch.ones(1, 3)).sum().backward()
    assert replaced.take_names() == (["0.weight"] if when == "before the start" else [])
