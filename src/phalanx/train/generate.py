"""Text from a causal model, so that a person can see what it has learned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from phalanx.mesh.tensor_group import VocabularyLogits
from phalanx.nn.objective import CausalOutput
from phalanx.parallel.model import ParallelModel


@torch.no_grad()
def generate(
    model: ParallelModel,
    prompt: list[int],
    *,
    num_tokens: int,
    context: int,
    seed: int,
    temperature: float = 0.8,
    told: Callable[[int], None] = lambda num_done: None,
) -> list[int]:
    """Continue `prompt` by sampling. Collective: every rank computes the same tokens (sharded models need all ranks).

    At most the last `context` tokens are read at each step. `told` is called before each token with the number of
    those that there are. Raises TypeError, on every rank, for models that are not causal.
    """
    others: list[str] = []

    def last_logits(outputs: Any) -> torch.Tensor:
        """Never raises for outputs of another kind: in a pipeline only the last stage sees that they are."""
        found = _last_logits(outputs)
        if found is None:
            others.append(type(outputs).__name__)
            return torch.empty(0, dtype=torch.float64)
        return found

    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    model.train(False)
    for num_done in range(num_tokens):
        told(num_done)
        window = torch.tensor([tokens[-context:]], device=model.mesh.device)
        logits = model.call_then({"inputs": window}, last_logits)
        if not logits.numel():
            raise TypeError(f"cannot sample from {others[0] if others else 'what the last stage returns'}")
        # A pipeline's are on the ranks' device; the generator, whose draws are the same everywhere, is the CPU's.
        choice = torch.multinomial((logits.cpu() / temperature).softmax(-1), 1, generator=generator)
        tokens.append(int(choice))
    model.train(True)
    return tokens[len(prompt) :]


def _last_logits(outputs: Any) -> torch.Tensor | None:
    """[vocab] fp64, on the CPU: logits after the last token. None of outputs that have none."""
    if isinstance(outputs, VocabularyLogits):
        outputs = outputs.gathered()
    if isinstance(outputs, torch.Tensor):
        return outputs[0, -1].double().cpu()
    if not isinstance(outputs, CausalOutput):
        return None
    if outputs.vocabulary is None:
        last = outputs.hidden_BTD[0, -1]
        return (outputs.head_VD.to(last.dtype) @ last).double().cpu()
    last = outputs.vocabulary.enter(outputs.hidden_BTD)[0, -1]
    return outputs.vocabulary.gather(outputs.head_VD.to(last.dtype) @ last).double().cpu()
