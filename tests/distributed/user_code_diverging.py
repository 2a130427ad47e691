"""An objective in which rank 1 adds up something that rank 0 does not, in its third call."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from user_code import squared_tensor_error

_calls = itertools.count(1)


def objective(outputs: Any, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    if next(_calls) == 3 and dist.get_rank() == 1:
        dist.all_reduce(torch.ones(5))
    return squared_tensor_error(outputs, batch)
