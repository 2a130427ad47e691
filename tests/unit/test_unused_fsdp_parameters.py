"""Parameters of FSDP2 without a gradient, in one process: zeros are reduced for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from phalanx.mesh.compat import make_fsdp_reduce_unused_parameters


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class _Unit(nn.Module):
    """`frozen` and `never` are used in no forward, `at_last` in those that say so."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.at_last, self.never, self.frozen = (nn.Linear(2, 2) for _ in range(4))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, *, is_last: bool) -> torch.Tensor:
        x = self.always(x)
        return self.at_last(x) if is_last else x


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_zeros_are_reduced_beside_gradients_of_several_microbatches(
    num_microbatches: int, compute: torch.dtype
) -> None:
    torch.manual_seed(0)
    unit, plain = _Unit(), _Unit()
    plain.load_state_dict(unit.state_dict())
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    fully_shard(unit, mp_policy=policy)
    make_fsdp_reduce_unused_parameters(unit)
    for index in range(num_microbatches):
        is_last = index == num_microbatches - 1
        unit.set_requires_gradient_sync(is_last)
        for module in (unit, plain):
            module(torch.ones(1, 2), is_last=is_last).float().sum().backward()
    expected = dict(plain.named_parameters())
    for name, parameter in unit.named_parameters():
        wanted = expected[name].grad
        if name.startswith("never."):
            wanted = torch.zeros_like(expected[name])
        if wanted is None:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        digits = 1e-6 if compute is torch.float32 else 3e-2
        assert parameter.grad.dtype is torch.float32
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted, rtol=digits, atol=digits)
