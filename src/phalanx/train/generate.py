"""Generates tokens from a causal model, so that a person can see what it has learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.core.errors import NumericsError
from phalanx.mesh.tensor_group import ShardedVocabularyLogits
from phalanx.nn.objective import CausalOutput
from phalanx.parallel.model import ParallelModel


@dataclass(frozen=True)
class SamplingRule:
    """The rule by which a token is chosen.

    `temperature` 0 takes the likeliest; `top_k` and `top_p` leave out unlikely ones before that.

    `num_choices`: ids from it on are never chosen, as rows of an embedding that no token has; None
    for all.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    num_choices: int | None = None


@torch.no_grad()
def generate_tokens(
    model: ParallelModel,
    prompt: list[int],
    *,
    num_tokens: int,
    context: int,
    seed: int,
    sampling: SamplingRule | None = None,
    end: int | None = None,
    on_token: Callable[[int], None] = lambda token: None,
    on_progress: Callable[[int], None] = lambda num_done: None,
) -> list[int]:
    """Continue `prompt` by sampling.

    Collective: every rank computes the same tokens (sharded models need all ranks).

    At most the last `context` tokens are read at each step, all of them anew: there is no key-value
    cache. Stops after the token `end`, if it is given. `on_progress` is called before each token
    with the number of tokens so far, `on_token` with each when it is chosen. Raises TypeError, on
    every rank, for models that are not causal, and NumericsError for logits that are not finite.
    """
    wrong_types: list[str] = []
    sampling = sampling or SamplingRule()

    def compute_last_logits(outputs: Any) -> torch.Tensor:
        """The last logits, or an empty tensor for outputs of another type.

        Never raises for those: in a pipeline only the last stage sees their type.
        """
        logits = _extract_last_token_logits(outputs)
        if logits is None:
            wrong_types.append(type(outputs).__name__)
            return torch.empty(0, dtype=torch.float64)
        return logits

    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    model.train(False)
    for num_done in range(num_tokens):
        on_progress(num_done)
        window = torch.tensor([tokens[-context:]], device=model.mesh.device)
        logits = model.call_then({"inputs": window}, compute_last_logits)
        if not logits.numel():
            source = "what the last stage returns"
            if wrong_types:
                source = wrong_types[0]
            raise TypeError(f"cannot sample from {source}")
        # A pipeline's are on the ranks' device; the generator, whose draws are the same everywhere,
        # is the CPU's.
        tokens.append(_draw_next_token(logits.cpu(), sampling, generator))
        on_token(tokens[-1])
        if tokens[-1] == end:
            break
    model.train(True)
    return tokens[len(prompt) :]


def _draw_next_token(
    logits: torch.Tensor, sampling: SamplingRule, generator: torch.Generator
) -> int:
    """One token id by `sampling`. `logits`: [vocab] fp64."""
    # Some of -inf are no fault: a model may rule tokens out. NaN is, and nothing but -inf.
    if not bool(logits.isfinite().any()) or bool(logits.isnan().any()):
        raise NumericsError(
            "the model's logits are not finite", fix="take a checkpoint from before it diverged"
        )
    if sampling.num_choices is not None and sampling.num_choices < len(logits):
        logits = logits[: sampling.num_choices]
    # Its limit as the temperature falls: nothing is divided by 0.
    if sampling.temperature == 0:
        return int(logits.argmax())
    if sampling.top_k is not None and sampling.top_k < len(logits):
        least = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = (logits / sampling.temperature).softmax(-1)
    if sampling.top_p is not None and sampling.top_p < 1:
        # Stable: of equal probabilities the same ones stay on every rank.
        ordered, ids = probabilities.sort(descending=True, stable=True)
        # The token that crosses top_p stays: what counts is the sum before each.
        left_out = ordered.cumsum(0) - ordered >= sampling.top_p
        # With top_p 0, too, there is one to choose.
        left_out[0] = False
        probabilities = probabilities.index_fill(0, ids[left_out], 0.0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _extract_last_token_logits(outputs: Any) -> torch.Tensor | None:
    """Logits after the last token: [vocab] fp64, on the CPU. None for outputs without logits."""
    if isinstance(outputs, ShardedVocabularyLogits):
        outputs = outputs.gather_logits()
    if isinstance(outputs, torch.Tensor):
        if outputs.ndim != 3 or not outputs.is_floating_point():
            return None
        return outputs[0, -1].double().cpu()
    if not isinstance(outputs, CausalOutput):
        return None
    if outputs.vocabulary is None:
        last = outputs.hidden_BTD[0, -1]
        return (outputs.head_VD.to(last.dtype) @ last).double().cpu()
    last = outputs.vocabulary.enter(outputs.hidden_BTD)[0, -1]
    return outputs.vocabulary.gather(outputs.head_VD.to(last.dtype) @ last).double().cpu()
