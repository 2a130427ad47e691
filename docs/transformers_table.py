"""Writes docs/transformers-plans.md: transformers' own parallelism beside one process, for a small
model of each architecture, as it ran here.

python docs/transformers_table.py                            3 minutes on two cores
python docs/transformers_table.py llama apertus              prints these rows, and writes nothing
python docs/transformers_table.py --config '{"fsdp_size": 2}' llama

With `pip install accelerate` the ranks load the model as transformers does it, by
`from_pretrained`; without it they cut a model that they have loaded whole, so that what loading
does is not judged, and a plan that relies on it differs.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from phalanx.mesh.logical import LogicalShard, make_logical_shard
from phalanx.verify.compare_steps import (
    RankObservations,
    compute_block_dots,
    describe_held_part,
    hash_block_bits,
    list_shard_boxes,
)
from phalanx.verify.judged_layout import JudgedLayout
from phalanx.verify.trace_facts import (
    INITIAL_KIND,
    Trace,
    TraceStep,
    name_gradients_set,
    name_weights_set,
)
from phalanx.verify.verdict import LayoutComparator, LayoutVerdict

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))

TOLERANCE = 1e-10
DEADLINE_S = 60
MOST_PARAMETERS = 3_000_000
RAISES = "raises"  # begins what is said of a model that does not run with ranks
VOCABULARY, ROWS, LENGTH = 96, 4, 16
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "sliding_window": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "partial_rotary_factor": 0.5,
}


@dataclass(frozen=True)
class Row:
    """An architecture, and what came of it: a verdict, or why there is none."""

    architecture: str
    verdict: LayoutVerdict | None = None
    refused: str = ""


class Widen(TorchFunctionMode):
    """Computes in float64 what a module casts to float32, so that a difference is no rounding."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        named = {name: _widen(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widen, args), **named)


def _widen(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


def list_architectures() -> list[str]:
    """The language models whose configuration has a tensor-parallel plan."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [
        name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if name in CONFIG_MAPPING and getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None)
    ]


def make_config(architecture: str) -> Any:
    """The configuration of a small model: all keys of `SMALL` that the architecture has."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[architecture]
    known = set(inspect.signature(kind.__init__).parameters)
    known |= set(getattr(kind, "__dataclass_fields__", {}))
    # Latent attention has its own sizes of heads.
    if "kv_lora_rank" in known:
        known.discard("head_dim")
    return kind(**{key: value for key, value in SMALL.items() if key in known})


def save_model(architecture: str, directory: Path) -> None:
    """A model with random weights, norms and biases too, which begin constant otherwise."""
    from transformers import AutoModelForCausalLM

    config = make_config(architecture)
    with torch.device("meta"):
        num_parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    if num_parameters > MOST_PARAMETERS:
        raise ValueError(
            f"{num_parameters:,} parameters: the sizes of its parts are not known here"
        )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(directory)


def load_model(directory: Path, config: dict[str, int] | None) -> nn.Module:
    """The saved model; cut as `config` says, the arguments of transformers' DistributedConfig."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import initialize_distributed_mesh

    how = {"dtype": torch.float64, "attn_implementation": "eager"}
    how["experts_implementation"] = "eager"
    if config is None:
        return AutoModelForCausalLM.from_pretrained(directory, **how).eval()
    distributed = DistributedConfig(**config)
    if importlib.util.find_spec("accelerate"):
        how["distributed_config"] = distributed
        return AutoModelForCausalLM.from_pretrained(directory, **how).eval()
    model = AutoModelForCausalLM.from_pretrained(directory, **how).eval()
    _, mesh = initialize_distributed_mesh(distributed)
    return model.maybe_distribute_model(model, distributed, mesh)


def compute_gradients(model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of one batch, and every gradient, gathered; zeros where there is none."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randint(3, VOCABULARY, (2, ROWS, LENGTH), generator=generator)
    with Widen():
        logits = model(input_ids=inputs).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients[name] = gather(gradient)
    return loss.item(), gradients


def gather(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone().contiguous()


def total_norm(gradients: dict[str, torch.Tensor]) -> float:
    return sum(gradient.square().sum().item() for gradient in gradients.values()) ** 0.5


def trace_alone(directory: Path, traced: Path) -> Trace:
    """What one process computes, as `phalanx verify` keeps it."""
    model = load_model(directory, None)
    weights = {name: gather(parameter) for name, parameter in model.named_parameters()}
    loss, gradients = compute_gradients(model)
    again, _ = compute_gradients(load_model(directory, None))
    if loss != again:
        raise ValueError("its loss is another one each time")
    sizes: dict[str, dict[str, float]] = {name_weights_set(0): {}}
    for kind, tensors in ((INITIAL_KIND, weights), (name_gradients_set(0), gradients)):
        save_file(tensors, traced / f"{kind}.safetensors")
        sizes[kind] = {name: tensor.norm().item() for name, tensor in tensors.items()}
    step = TraceStep(loss, ROWS * LENGTH, total_norm(gradients), None)
    return Trace(traced, "float64", 0.0, (step,), tuple(weights), sizes)


def observe(rank: int, directory: Path, config: dict[str, int], trace: Trace) -> RankObservations:
    """What a rank of transformers' own parallelism computes, beside the trace."""
    model = load_model(directory, config)
    weights = {name: gather(parameter) for name, parameter in model.named_parameters()}
    loss, gradients = compute_gradients(model)
    held, kind = make_shards(weights, rank), name_gradients_set(0)
    shards = make_shards(gradients, rank)
    seen = RankObservations()
    seen.losses, seen.norms = [loss], [total_norm(gradients)]
    seen.num_targets, seen.local_means = [ROWS * LENGTH], [[]]
    seen.held, seen.boxes = (
        {name: describe_held_part(each) for name, each in held.items()},
        list_shard_boxes(held),
    )
    seen.unknown = sorted(set(held) - set(trace.sizes[INITIAL_KIND]))
    seen.absent = sorted(set(trace.sizes[INITIAL_KIND]) - set(held))
    seen.tensors = {INITIAL_KIND: compute_block_dots(trace, INITIAL_KIND, held)}
    seen.tensors |= {kind: compute_block_dots(trace, kind, shards), name_weights_set(0): {}}
    seen.digests = {kind: hash_block_bits(shards)}
    return seen


def make_shards(tensors: dict[str, torch.Tensor], rank: int) -> dict[str, LogicalShard]:
    """Whole tensors, of which every rank has a replica."""
    return {
        name: make_logical_shard(name, tensor, replica=rank, num_replicas=rank + 1)
        for name, tensor in tensors.items()
    }


def judge(architecture: str, config: dict[str, int]) -> Row:
    """The verdict on an architecture: one process beside as many ranks as `config` asks for."""
    from ranks import run_ranks

    num_ranks = 1
    for key in ("tp_size", "fsdp_size", "pp_size"):
        num_ranks *= config.get(key, 1)
    with tempfile.TemporaryDirectory() as folder:
        directory, traced = Path(folder) / "model", Path(folder) / "trace"
        traced.mkdir()
        try:
            save_model(architecture, directory)
            trace = trace_alone(directory, traced)
        except Exception as error:
            return Row(architecture, refused=f"not judged: {first_line(error)}")
        try:
            seen = run_ranks(num_ranks, observe, directory, config, trace, deadline_s=DEADLINE_S)
        except AssertionError as error:
            return Row(architecture, refused=f"{RAISES}: {first_line(error)}")
    layout = JudgedLayout(dp=config.get("fsdp_size", 1), tp=config.get("tp_size", 1))
    layout_seen = [each.to_json() for each in seen]
    return Row(
        architecture, LayoutComparator(trace, layout_seen, layout, tolerance=TOLERANCE).compare()
    )


def first_line(error: BaseException) -> str:
    """The error's own words, without a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    raised = [line for line in lines if "Error" in line.partition(":")[0]]
    return ((raised or lines or [type(error).__name__])[-1])[:160].replace("|", "/")


def describe(row: Row) -> str:
    """A row of the page's table."""
    if row.verdict is None:
        return f"| {row.architecture} | {row.refused} | | |"
    errors, first = row.verdict.errors, row.verdict.first
    loss, gradient = f"{errors['loss']:.0e}", f"{errors['gradient']:.0e}"
    words = "equal"
    if first is not None:
        ranks = ", ".join(map(str, first.ranks))
        words = f"**differs**: {first.what} `{first.name}` on rank {ranks}; perhaps {first.cause}"
    return f"| {row.architecture} | {words} | {loss} | {gradient} |"


HEAD = (
    "# transformers' own plans",
    "",
    "`tp_plan` of Hugging Face's transformers beside one process, judged as `phalanx verify` judges"
    " a layout ([verify.md](verify.md)): a small model of every language model that has one,"
    " the same batch, float64 (what a module casts to float32 stays float64, so that nothing is"
    " rounding), the loaded weights, loss and every gradient on every rank. Allowed is 1e-10.",
    "",
    "These are not phalanx's rules, which cut the same models in their own way"
    " ([hugging-face.md](hugging-face.md)). What differs has a reproduction in"
    " [found.md](found.md).",
)


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing of what transformers says while it loads is shown."""
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    logging.disable(logging.WARNING)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def write_page(rows: list[Row], config: dict[str, int], seconds: float) -> None:
    import transformers

    judged = [row.verdict for row in rows if row.verdict is not None]
    num_equal = sum(verdict.first is None for verdict in judged)
    num_raising = sum(row.refused.startswith(RAISES) for row in rows)
    num_unknown = len(rows) - len(judged) - num_raising
    way = "from_pretrained" if importlib.util.find_spec("accelerate") else "maybe_distribute_model"
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    lines = [
        *HEAD,
        "",
        f"Written by `python docs/transformers_table.py` in {seconds / 60:.1f} minutes: {versions},"
        f" `DistributedConfig(**{config})`, `{way}`, {time.strftime('%Y-%m-%d')}.",
        f"{num_equal} of the {len(judged)} architectures that could be judged are equal;"
        f" {num_raising} raise with ranks, and of {num_unknown} a small model does not run in one"
        " process.",
        "",
        "| architecture | judged | loss | gradients |",
        "|---|---|---:|---:|",
        *map(describe, rows),
    ]
    (HERE / "transformers-plans.md").write_text("\n".join(lines) + "\n")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("architectures", nargs="*")
    parser.add_argument("--config", type=json_object, default={"tp_size": 2})
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    began, rows = time.monotonic(), []
    with quiet():
        names = asked.architectures or list_architectures()
        for number, name in enumerate(names, start=1):
            rows.append(judge(name, asked.config))
            left = (time.monotonic() - began) / number * (len(names) - number)
            print(describe(rows[-1]), flush=True)
            print(f"{number} of {len(names)}, {left:.0f} s left", file=sys.stderr, flush=True)
    if not asked.architectures:
        write_page(rows, asked.config, time.monotonic() - began)
    differ = [row for row in rows if row.verdict is not None and row.verdict.first is not None]
    sys.exit(11 if differ else 0)


def json_object(text: str) -> dict[str, int]:
    import json

    value: dict[str, int] = json.loads(text)
    return value


if __name__ == "__main__":
    main(sys.argv[1:])
