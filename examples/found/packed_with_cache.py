"""transformers lets packed documents see each other while its cache is on, as it is by default.

torchrun --nproc-per-node 1 examples/found/packed_with_cache.py
"""

import torch
from outcome import Outcome, report
from transformers import LlamaConfig, LlamaForCausalLM

RANKS = 1
SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


# [reproduction]
def reproduce() -> Outcome:
    """The mean square of a document's logits behind another one in its row, and alone."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    tokens = torch.randint(32, (1, 16))
    positions = torch.arange(8).repeat(2)[None]
    packed = model(tokens, position_ids=positions).logits[:, 8:]
    alone = model(tokens[:, 8:]).logits
    return Outcome(packed.square().mean(), alone.square().mean())


# [/reproduction]


if __name__ == "__main__":
    report(reproduce)
