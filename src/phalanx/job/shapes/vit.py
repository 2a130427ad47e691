"""`VitShape`: a vision transformer, the blocks of a decoder on the patches of an image."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Literal

from phalanx.job.costs import Flops, ModelFlops
from phalanx.job.shapes import tensors, work
from phalanx.job.shapes.transformer import TransformerShape
from phalanx.job.shapes.vit_activations import VitActivations
from phalanx.job.work import Matmul, ModelWork

Pooling = Literal["class_token", "mean"]


def count_patches(image_size: int, patch_size: int) -> int:
    """Patches of one image; 0 where it is not cut into any."""
    if patch_size:
        return (image_size // patch_size) ** 2
    return 0


@dataclass(frozen=True)
class VitShape(TransformerShape):
    """The numbers of a vision transformer."""

    _: KW_ONLY
    kind: str = "vit"
    image_size: int = 0
    patch_size: int = 0
    num_channels: int = 0
    num_classes: int = 0
    pooling: Pooling = "class_token"

    # A sample is an image

    vocab_size = 0
    longest_sequence = 0
    reads_images = True
    is_causal = False
    has_token_table = False

    @property
    def is_per_token_outside_regions(self) -> bool:
        return False  # it pools all tokens

    @property
    def why_samples_stay_whole(self) -> str:
        return f"a {self.kind} reads images"

    @property
    def num_patches(self) -> int:
        """Patches of one image."""
        return count_patches(self.image_size, self.patch_size)

    @property
    def patch_elements(self) -> int:
        """Elements of one patch."""
        return self.num_channels * self.patch_size**2

    def count_sample_tokens(self, seq_len: int) -> int:
        """Tokens of one image: its patches and the class token."""
        return self.num_patches + (self.pooling == "class_token")

    def get_sample_noun(self, *, of_own_data: bool) -> str:
        return "images"

    def count_targets(self, num_tokens: int) -> int:
        return 1

    def choose_vocab_size(self, data_size: int | None) -> int:
        return 0

    # Parameters

    @property
    def embedding_params(self) -> int:
        class_token = 0
        if self.pooling == "class_token":
            class_token = 1
        # The patches' matrix and bias, the class token, and a position for each token.
        return self.dim * (self.patch_elements + 1 + class_token + self.count_sample_tokens(0))

    @property
    def head_params(self) -> int:
        return (self.dim + 1) * self.num_classes

    # What computing costs

    def count_attended_pairs(self, tokens: int, layer: int) -> int:
        return tokens**2

    def flops(self, seq_len: int) -> ModelFlops:
        """FLOPs of each part for one image, of which the head sees one token."""
        embedding = Flops(2 * self.dim * self.num_patches * self.patch_elements)
        head = Flops(2 * self.dim * self.num_classes)
        return ModelFlops(embedding, self._flops_of_blocks(seq_len), head)

    def work(self, seq_len: int) -> ModelWork:
        num_tokens = self.count_sample_tokens(seq_len)
        return ModelWork(
            num_tokens=num_tokens,
            dim=self.dim,
            blocks=work.build_work_of_blocks(self, num_tokens),
            head=Matmul("head", self.dim, self.num_classes),
            num_head_tokens=1,
            embedding=Matmul("patch", self.patch_elements, self.dim),
            num_embedding_tokens=self.num_patches,
            num_embedding_params=self.embedding_params,
            num_head_params=self.head_params + self.norm_params,
        )

    @cached_property
    def activations(self) -> VitActivations:
        return VitActivations(self)

    # Tensors

    def list_outer_tensors(self) -> dict[str, tensors.Size]:
        side = self.patch_size
        sizes: dict[str, tensors.Size] = {
            "patch.weight": (self.dim, self.num_channels, side, side),
            "patch.bias": (self.dim,),
        }
        if self.pooling == "class_token":
            sizes["embed_class"] = (self.dim,)
        sizes["embed_positions"] = (self.count_sample_tokens(0), self.dim)
        sizes |= tensors.list_linear_tensors("head", self.num_classes, self.dim, True)
        return sizes | tensors.list_norm_tensors("norm", self)
