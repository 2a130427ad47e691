"""transformers' tensor parallelism does not sum the gradient of Apertus' learnable activation.

torchrun --nproc-per-node 2 examples/found/apertus_activation.py
"""

import torch
from outcome import Outcome, report
from transformers import ApertusConfig, ApertusForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.utils import initialize_distributed_mesh

RANKS = 2
SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}


def alpha_gradient(model: ApertusForCausalLM) -> torch.Tensor:
    """d loss / d alpha_p of the first block, for one sequence."""
    model(torch.arange(8)[None]).logits.square().mean().backward()
    return model.model.layers[0].mlp.act_fn.alpha_p.grad


# [reproduction]
def reproduce() -> Outcome:
    torch.manual_seed(0)
    model = ApertusForCausalLM._from_config(ApertusConfig(**SMALL)).float()
    expected = alpha_gradient(model).clone()
    model.zero_grad()
    config = DistributedConfig(tp_size=2)
    _, mesh = initialize_distributed_mesh(config)
    return Outcome(alpha_gradient(model.maybe_distribute_model(model, config, mesh)), expected)


# [/reproduction]


if __name__ == "__main__":
    report(reproduce)
