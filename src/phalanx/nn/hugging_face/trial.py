"""A Hugging Face model is tried before it is trained: its forward runs, and no token sees those
after it.

Some settings go together for transformers and not for the forward, and some models are listed as
causal that are so only by a setting, or not at all: their loss would fall for tokens that have seen
their targets.
"""

from __future__ import annotations

from typing import Any

import torch

from phalanx.core.errors import LayoutError

MAX_TRIAL_TOKENS = 16


def require_causal_and_trainable_by_trial(
    kind: str, module: Any, facts: dict[str, int], *, reads_images: bool
) -> None:
    """Raises LayoutError.

    One forward of a few tokens; weights, modes and random numbers are as they were.
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        # Of no GPUs: the model is on the CPU, and nothing is drawn on them.
        with torch.random.fork_rng(devices=[]):
            sees_later = False
            if reads_images:
                size = (1, facts["num_channels"], facts["image_size"], facts["image_size"])
                with torch.no_grad():
                    module(torch.zeros(size))
            else:
                length = min(MAX_TRIAL_TOKENS, facts["max_positions"] or MAX_TRIAL_TOKENS)
                sees_later = _do_outputs_depend_on_later_tokens(module, length, facts["vocab_size"])
    except Exception as error:
        raise LayoutError(
            f"the forward of {kind} fails",
            why=f"{type(error).__name__}: {' '.join(str(error).split())}",
        ) from None
    finally:
        for part, is_training in modes:
            part.training = is_training
    if sees_later:
        fix = None
        if hasattr(module.config, "is_decoder"):
            fix = "set model.args = { is_decoder = true }"
        raise LayoutError(
            f"{kind} is no causal language model: its tokens see those after them, and so their"
            " targets",
            fix=fix,
        )


def _do_outputs_depend_on_later_tokens(module: Any, length: int, vocab_size: int) -> bool:
    """True if what is made of tokens before the last has a gradient by its embedding: exactly
    zero if not."""
    looked_up: list[torch.Tensor] = []

    def replace_by_leaf_tensor(part: Any, args: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or output.ndim != 3 or output.shape[1] < length:
            return output
        # Some models put tokens of their own before a sequence.
        looked_up.append(output.detach().requires_grad_())
        # A copy, for some write into it.
        return looked_up[-1].clone()

    # From 1 on, for 0 may stand for padding.
    tokens = 1 + torch.arange(length)[None] % max(1, (vocab_size or length) - 1)
    hook = module.get_input_embeddings().register_forward_hook(replace_by_leaf_tensor)
    with torch.enable_grad():
        try:
            outputs = module(tokens, torch.arange(length)[None])
        finally:
            hook.remove()
        result = getattr(outputs, "hidden_BTD", outputs)
        if not looked_up or result.shape[:2] != (1, length):
            return False
        before = (result[:, :-1] * torch.randn(result.shape[-1])).sum()
        gradients = torch.autograd.grad(before, looked_up, allow_unused=True)
    for gradient in gradients:
        if gradient is not None and gradient[:, -1].nan_to_num().any():
            return True
    return False
