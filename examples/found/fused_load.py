"""transformers loads other weights with tensor parallelism where a checkpoint's tensor is split.

HRM keeps one tensor for its gate, queries, keys and values: it is cut over ranks first and split
then. Needs `pip install accelerate`.

torchrun --nproc-per-node 2 examples/found/fused_load.py
"""

import tempfile

import torch
import torch.distributed as dist
from outcome import Outcome, report
from transformers import HrmTextConfig, HrmTextForCausalLM
from transformers.distributed import DistributedConfig

RANKS = 2
SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
}


# [reproduction]
def reproduce() -> Outcome:
    """The queries' weights of the first block, and what was saved."""
    directory = [tempfile.mkdtemp()]
    dist.broadcast_object_list(directory, src=0)
    torch.manual_seed(0)
    model = HrmTextForCausalLM(HrmTextConfig(**SMALL))
    if dist.get_rank() == 0:
        model.save_pretrained(directory[0])
    dist.barrier()
    config = DistributedConfig(tp_size=2)
    loaded = HrmTextForCausalLM.from_pretrained(directory[0], distributed_config=config)
    name = "model.L_module.layers.0.self_attn.q_proj.weight"
    return Outcome(
        loaded.get_parameter(name).full_tensor().detach(), model.get_parameter(name).detach()
    )


# [/reproduction]


if __name__ == "__main__":
    report(reproduce)
