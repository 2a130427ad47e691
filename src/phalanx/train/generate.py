"""Text from a causal model, so that a person can see what it has learned."""

from __future__ import annotations

from typing import Any

import torch

from phalanx.mesh.tensor_group import VocabularyLogits
from phalanx.nn.objective import CausalOutput
from phalanx.parallel.model import ParallelModel


@torch.no_grad()
def generate(
    model: ParallelModel, prompt: list[int], *, num_tokens: int, context: int, seed: int, temperature: float = 0.8
) -> list[int]:
    """Continue `prompt` by sampling. Collective: every rank computes the same tokens (sharded models need all ranks).

    At most the last `context` tokens are read at each step. Raises TypeError for models that are not causal.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    model.train(False)
    for _ in range(num_tokens):
        window = torch.tensor([tokens[-context:]], device=model.mesh.device)
        logits = model.call_then({"inputs": window}, _last_logits)
        choice = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens.append(int(choice))
    model.train(True)
    return tokens[len(prompt) :]


def _last_logits(outputs: Any) -> torch.Tensor:
    """[vocab] fp64, on the CPU: logits after the last token."""
    if isinstance(outputs, VocabularyLogits):
        outputs = outputs.gathered()
    if isinstance(outputs, torch.Tensor):
        return outputs[0, -1].double().cpu()
    if not isinstance(outputs, CausalOutput):
        raise TypeError(f"cannot sample from {type(outputs).__name__}")
    if outputs.vocabulary is None:
        last = outputs.hidden_BTD[0, -1]
        return (outputs.head_VD.to(last.dtype) @ last).double().cpu()
    last = outputs.vocabulary.enter(outputs.hidden_BTD)[0, -1]
    return outputs.vocabulary.gather(outputs.head_VD.to(last.dtype) @ last).double().cpu()
