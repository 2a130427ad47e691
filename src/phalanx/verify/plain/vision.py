"""A vision transformer, and its cross-entropy: patches of an image as tokens, a class token or the
mean of all (arXiv 2010.11929, section 3.1), and pre-norm blocks without a mask.

Shape suffixes: B batch, C channels, T tokens, D model width, P weights of a patch, V classes.
"""

from __future__ import annotations

import torch

from phalanx.verify.plain.attention import attention_of_heads
from phalanx.verify.plain.layers import Tensors, apply_linear, feed_forward, residual_stream_norm
from phalanx.verify.plain.settings import VisionSettings

# A label that counts for nothing: the default of torch's cross_entropy.
NO_LABEL = -100


def compute_plain_vision_loss(
    settings: VisionSettings, parameters: Tensors, batch: Tensors
) -> tuple[torch.Tensor, int]:
    """The cross-entropy summed over the batch's labels, and their number.

    batch: inputs [B, C, height, width], targets [B].
    """
    x_BTD = _embed_patches(settings, parameters, batch["inputs"])
    num_tokens = x_BTD.shape[1]
    visible = torch.ones(1, num_tokens, num_tokens, dtype=torch.bool, device=x_BTD.device)
    for layer in range(settings.num_layers):
        block = f"blocks.{layer}"
        normed = residual_stream_norm(settings, parameters, f"{block}.attention_norm", x_BTD)
        added = attention_of_heads(settings, parameters, f"{block}.attention", normed, visible)
        if settings.post_norms:
            added = residual_stream_norm(
                settings, parameters, f"{block}.attention_post_norm", added
            )
        x_BTD = x_BTD + added
        normed = residual_stream_norm(settings, parameters, f"{block}.ffn_norm", x_BTD)
        added = feed_forward(settings, parameters, f"{block}.ffn", normed)
        if settings.post_norms:
            added = residual_stream_norm(settings, parameters, f"{block}.ffn_post_norm", added)
        x_BTD = x_BTD + added
    pooled_BD = x_BTD[:, 0]
    if settings.pooling == "mean":
        pooled_BD = x_BTD.sum(1) / num_tokens
    normed = residual_stream_norm(settings, parameters, "norm", pooled_BD)
    logits_BV = apply_linear(parameters, "head", normed, bias=True)
    wide = torch.promote_types(logits_BV.dtype, torch.float32)
    log_probs_BV = logits_BV.to(wide).log_softmax(-1)
    has_label = batch["targets"] != NO_LABEL
    losses = -log_probs_BV[has_label].gather(-1, batch["targets"][has_label][:, None])
    return losses.sum(), int(has_label.sum())


def _embed_patches(
    settings: VisionSettings, parameters: Tensors, images_BCHW: torch.Tensor
) -> torch.Tensor:
    """Patches row by row, each a product with one matrix, behind the class token; and positions."""
    side, weight = settings.patch_size, parameters["patch.weight"]
    rows = images_BCHW.unflatten(3, (-1, side)).unflatten(2, (-1, side))
    # [B, C, down, side, across, side]: all weights of a patch last, in the order of the matrix's.
    patches_BTP = rows.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    x_BTD = torch.einsum("btp,dp->btd", patches_BTP, weight.flatten(1)) + parameters["patch.bias"]
    if settings.pooling == "class_token":
        first_B1D = parameters["embed_class"].expand(len(x_BTD), 1, settings.dim)
        x_BTD = torch.cat((first_B1D, x_BTD), dim=1)
    return x_BTD + parameters["embed_positions"]
