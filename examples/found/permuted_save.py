"""transformers saves permuted experts of Inkling 2 with tensor parallelism.

The rows of gate and up stand interleaved in the file, and ranks take a part of them before they
are put apart: a rank's part is right, the whole that is gathered for saving is not. Needs
`pip install accelerate`.

torchrun --nproc-per-node 2 examples/found/permuted_save.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from outcome import Outcome, report
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Inkling2TextConfig
from transformers.distributed import DistributedConfig

RANKS = 2
SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
}


# [reproduction]
def reproduce() -> Outcome:
    """The first expert's weights after loading and saving again, and before."""
    directory = [tempfile.mkdtemp()]
    dist.broadcast_object_list(directory, src=0)
    first, second = Path(directory[0]) / "first", Path(directory[0]) / "second"
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(Inkling2TextConfig(**SMALL)).save_pretrained(first)
    dist.barrier()
    config = DistributedConfig(tp_size=2)
    model = AutoModelForCausalLM.from_pretrained(first, distributed_config=config)
    model.save_pretrained(second)
    name = "model.llm.layers.0.mlp.experts.w13_weight"
    saved, original = (load_file(path / "model.safetensors")[name][0] for path in (second, first))
    return Outcome(saved, original)


# [/reproduction]


if __name__ == "__main__":
    report(reproduce)
