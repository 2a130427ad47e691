"""The head of a Hugging Face model, where logits are nothing but what it makes of hidden states:
shown, not assumed.

Some models cap or scale their logits, some heads have a bias. So the model is run once, with
tensors that have no numbers and a stand-in for its head: what that returns must come back as the
logits, the very tensor, and unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from phalanx.nn.hf_experts import batched_products
from phalanx.nn.objective import HeadOutput


class StandIn(nn.Module):
    """Stands for a head: keeps what it is given, and computes nothing."""

    def __init__(self, num_outputs: int = 0) -> None:
        super().__init__()
        self._num_outputs = num_outputs
        self.taken: list[torch.Tensor] = []
        self.made: list[torch.Tensor] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.taken.append(hidden)
        self.made.append(hidden.new_empty((*hidden.shape[:-1], self._num_outputs)))
        return self.made[-1]


@contextmanager
def in_place_of(module: nn.Module, name: str, other: nn.Module) -> Iterator[nn.Module]:
    """`other` instead of the part `name` of `module`, whose hooks are not called either; yields
    the part."""
    owner, _, leaf = name.rpartition(".")
    parts = module.get_submodule(owner)._modules
    own = parts[leaf]
    assert own is not None
    parts[leaf] = other
    try:
        yield own
    finally:
        parts[leaf] = own


def plain_head(module: Any) -> str:
    """The name of the linear layer without a bias that makes the logits, and after which nothing
    comes; "" if there is none, or if it cannot be shown.

    The module is as it was.
    """
    head = module.get_output_embeddings()
    names = [name for name, part in module.named_modules(remove_duplicate=False) if part is head]
    if type(head) is not nn.Linear or head.bias is not None or len(names) != 1:
        return ""
    modes = [(part, part.training) for part in module.modules()]
    try:
        with batched_products(module):
            return (
                names[0]
                if all(_returns_its_output(module.train(mode), names[0]) for mode in (True, False))
                else ""
            )
    except Exception:  # of transformers, for something that needs numbers
        return ""
    finally:
        for part, is_training in modes:
            part.training = is_training


def _returns_its_output(module: Any, name: str) -> bool:
    """In float32, where a model's own `logits.float()` is no change."""
    stand_in = StandIn(num_outputs=module.get_submodule(name).out_features)
    with (
        in_place_of(module, name, stand_in),
        torch.no_grad(),
        torch.device("cpu"),
        FakeTensorMode(),
    ):
        held = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        found: dict[int, torch.Tensor] = {}
        tensors = {
            key: found.setdefault(id(t), torch.empty(t.shape, dtype=t.dtype)) for key, t in held
        }
        asked = {
            "input_ids": torch.zeros(1, 3, dtype=torch.int64),
            "use_cache": False,
            "return_dict": True,
        }
        logits = functional_call(module, tensors, (), asked).logits
    if len(stand_in.made) != 1:
        return False
    hidden, made = stand_in.taken[0], stand_in.made[0]
    return logits is made and made._version == 0 and hidden.shape[:2] == (1, 3)


def head_output(head: nn.Module, stand_in: StandIn) -> HeadOutput:
    """What the objective needs, of a forward in which `stand_in` stood for `head`."""
    (hidden,) = stand_in.taken
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # as the layer itself would
        hidden = hidden.to(torch.get_autocast_dtype(device))
    return HeadOutput(hidden, head.weight)  # type: ignore[arg-type]
