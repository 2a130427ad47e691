"""An objective that leaves its rank in the way LEAVE says, at a step of training or in
evaluation."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from user_code import squared_tensor_error

calls = 0


def objective(
    outputs: torch.Tensor, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The squared error; LEAVE="ranks,call,how" with call counted from 1, or "eval"."""
    global calls
    ranks, when, how = os.environ["LEAVE"].split(",")
    calls += torch.is_grad_enabled()
    if os.environ["RANK"] in ranks and when == (str(calls) if torch.is_grad_enabled() else "eval"):
        leave(how)
    return squared_tensor_error(outputs, batch)


def leave(how: str) -> None:
    kind, _, code = how.partition(" ")
    match kind:
        case "os._exit":
            os._exit(int(code))
        case "sys.exit":
            sys.exit(int(code))
        case "C":
            ctypes.CDLL(None).exit(int(code))
        case "interrupt":
            raise KeyboardInterrupt
        case (
            "blocked"
        ):  # an error, after which the groups cannot be destroyed: the other ranks do not come
            dist.destroy_process_group = lambda *group: time.sleep(1000)
            raise ValueError("boom")
