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

from phalanx.nn.hugging_face.experts import forcing_batched_expert_products
from phalanx.nn.objective import HeadOutput


class HeadInputRecorder(nn.Module):
    """Stands in for a head: records its inputs, and computes nothing."""

    def __init__(self, num_outputs: int = 0) -> None:
        super().__init__()
        self._num_outputs = num_outputs
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.inputs.append(hidden)
        self.outputs.append(hidden.new_empty((*hidden.shape[:-1], self._num_outputs)))
        return self.outputs[-1]


@contextmanager
def replacing_submodule(
    module: nn.Module, name: str, replacement: nn.Module
) -> Iterator[nn.Module]:
    """Put `replacement` in the place of the part `name` of `module` for the body, so that no hook
    of the part is called; yields the part."""
    owner, _, leaf = name.rpartition(".")
    parts = module.get_submodule(owner)._modules
    original = parts[leaf]
    assert original is not None
    parts[leaf] = replacement
    try:
        yield original
    finally:
        parts[leaf] = original


def find_plain_head(module: Any) -> str:
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
        with forcing_batched_expert_products(module):
            # What comes after a head may be there in one of the two modes only.
            for mode in (True, False):
                if not _is_head_output_returned_unchanged(module.train(mode), names[0]):
                    return ""
            return names[0]
    # Of transformers, for something that needs numbers: a head that is not shown to be plain.
    except Exception:
        return ""
    finally:
        for part, is_training in modes:
            part.training = is_training


def _is_head_output_returned_unchanged(module: Any, name: str) -> bool:
    """True if the model returns the output of its head unchanged.

    Tried in float32, where a model's own `logits.float()` is no change.
    """
    recorder = HeadInputRecorder(num_outputs=module.get_submodule(name).out_features)
    with (
        replacing_submodule(module, name, recorder),
        torch.no_grad(),
        torch.device("cpu"),
        FakeTensorMode(),
    ):
        tensors_by_name = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        # Tied parameters stay one tensor: the head's weight may be the embedding's.
        empty_by_id: dict[int, torch.Tensor] = {}
        tensors: dict[str, torch.Tensor] = {}
        for key, tensor in tensors_by_name:
            if id(tensor) not in empty_by_id:
                empty_by_id[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype)
            tensors[key] = empty_by_id[id(tensor)]
        arguments = {
            "input_ids": torch.zeros(1, 3, dtype=torch.int64),
            "use_cache": False,
            "return_dict": True,
        }
        logits = functional_call(module, tensors, (), arguments).logits
    if len(recorder.outputs) != 1:
        return False
    hidden, logits_of_head = recorder.inputs[0], recorder.outputs[0]
    # A change in place would count the version up.
    return logits is logits_of_head and logits_of_head._version == 0 and hidden.shape[:2] == (1, 3)


def build_head_output(head: nn.Module, recorder: HeadInputRecorder) -> HeadOutput:
    """The hidden states that `recorder` caught in the place of `head`, and the weight of `head`."""
    (hidden,) = recorder.inputs
    device = hidden.device.type
    # As the layer itself would, whose input autocast casts.
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    return HeadOutput(hidden, head.weight)  # type: ignore[arg-type]
