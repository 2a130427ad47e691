"""Linear layers of several experts in one module.

Shape suffixes: E experts, R rows, I width in, O width out.
"""

from __future__ import annotations

import torch
from torch import nn

from phalanx.mesh.grouped import multiply_rows_by_expert_weights


class GroupedLinear(nn.Module):
    """One linear layer without bias per expert: weight[e] is [out_features, in_features]."""

    def __init__(self, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))

    def forward(self, x_RI: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """x_RI: rows of expert 0, then of expert 1, ...; counts_E: of each how many, R in all.

        Returns [R, O].
        """
        return multiply_rows_by_expert_weights(x_RI, self.weight, counts_E)
