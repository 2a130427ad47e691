"""Rules made from a `tp_plan` are right for whatever architecture transformers knows: on two
ranks, beside one."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_zoo import WIDTHS, write_config
from phalanx.core.errors import PhalanxError
from phalanx.core.phases import PhaseTimer
from phalanx.mesh.linear import collect_shard_rules_of_module
from phalanx.mesh.tensor_group import TensorParallelGroup
from phalanx.nn.hugging_face.adapter import build
from phalanx.nn.hugging_face.experts import use_batched_expert_products
from phalanx.nn.objective import build_logits_cross_entropy
from phalanx.parallel.tensor.sharder import ModuleSharder
from phalanx.plan.rules import parse_sharding_rules
from ranks import run_ranks

pytest.importorskip("transformers")
LARGE = 30_000_000  # parameters, of models whose config has other names for its widths
EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
EXPERTS |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
DROPOUTS = (
    "attention_dropout",
    "hidden_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "dropout",
)
NO_DROPOUT = dict.fromkeys((*DROPOUTS, "residual_dropout"), 0.0)
HEADS = {"head_dim": 8, "sliding_window": 8}
LATENT = {
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
}
SETTINGS = (HEADS, LATENT | {"num_key_value_heads": 4})
TOLERANCE = 1e-5


def judge(rank: int, kind: str, dtype: torch.dtype = torch.float32) -> str | float:
    """The largest relative difference of the loss and of any gradient; or why there is none."""
    torch.manual_seed(0)
    try:
        module: Any = build(kind)
    except PhalanxError as error:
        return f"refused: {error}"
    with torch.no_grad():
        for (
            parameter
        ) in module.parameters():  # norms that begin at one, and biases at zero, hide mistakes
            parameter.add_(torch.randn_like(parameter) * 0.05)
    if dtype == torch.float64:
        use_batched_expert_products(module.double())
    whole, objective = copy.deepcopy(module), build_logits_cross_entropy(64)
    tokens, targets = torch.randint(96, (2, 16)), torch.randint(96, (2, 16))
    positions = torch.arange(16).repeat(2, 1)
    try:
        wanted = objective(whole(tokens, positions), {"targets": targets})[0]
        wanted.backward()
    except Exception as error:  # settings that do not go together
        return f"alone: {error!r}"
    group = TensorParallelGroup(dist.group.WORLD.group_name, rank, 2, PhaseTimer())  # type: ignore[union-attr]
    sharder = ModuleSharder(
        module, group, parse_sharding_rules(collect_shard_rules_of_module(module))
    )
    sharder.shard()
    found = objective(module(tokens, positions), {"targets": targets})[0]
    found.backward()
    for _, parameter in sharder.list_parameters_with_partial_gradients():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
    worst = abs(found.item() - wanted.item()) / abs(wanted.item())
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    for name, parameter in module.named_parameters():
        mine, theirs = parameter.grad, gradients[name]
        assert (mine is None) == (theirs is None), name
        if mine is None or theirs is None:
            continue
        boxes = sharder.cuts[name].boxes if name in sharder.cuts else ()
        pairs = [(mine, theirs)] if not boxes else []
        for box in boxes:
            there, here = (
                tuple(
                    slice(start, start + size) for start, size in zip(offset, box.size, strict=True)
                )
                for offset in (box.global_offset, box.local_offset)
            )
            pairs.append((mine[here], theirs[there]))
        for a, b in pairs:
            worst = max(worst, ((a - b).norm() / (theirs.norm() + 1e-3)).item())
    return worst


@pytest.mark.long
def test_rules_from_plans_of_every_architecture_compute_what_one_process_computes(
    tmp_path: Path,
) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    verdicts: dict[str, str | float] = {}
    for name in KNOWN:
        for more in SETTINGS:
            values = {"model_type": name, **WIDTHS, **EXPERTS, **NO_DROPOUT, **more}
            (tmp_path / "config.json").write_text(json.dumps(values))
            try:
                with torch.device("meta"):
                    module = build(f"hf:{tmp_path}")
            except PhalanxError as error:
                verdicts[name] = f"refused: {error}"
                continue
            if sum(p.numel() for p in module.parameters()) > LARGE:
                verdicts[name] = "large"
            elif not any(
                text.startswith(("row", "experts"))
                for text in collect_shard_rules_of_module(module).values()
            ):
                verdicts[name] = "whole"
            else:
                verdicts[name] = found = run_ranks(2, judge, f"hf:{tmp_path}")[0]
                if (
                    isinstance(found, float) and found >= TOLERANCE
                ):  # gates whose float32 has few digits left
                    verdicts[name] = run_ranks(2, judge, f"hf:{tmp_path}", torch.float64)[0]
            if isinstance(verdicts[name], float):
                break
    print(json.dumps(verdicts, indent=1))
    judged = {name: verdict for name, verdict in verdicts.items() if isinstance(verdict, float)}
    assert {name: verdict for name, verdict in judged.items() if not verdict < TOLERANCE} == {}
    assert len(judged) >= 70


def loss_with_head_cut(rank: int, kind: str, rule: str) -> float | str:
    torch.manual_seed(0)
    module: Any = build(kind)
    tokens = torch.randint(96, (2, 16))
    group = TensorParallelGroup(dist.group.WORLD.group_name, rank, 2, PhaseTimer())  # type: ignore[union-attr]
    ModuleSharder(
        module,
        group,
        parse_sharding_rules(collect_shard_rules_of_module(module) | {"lm_head": rule}),
    ).shard()
    try:
        return build_logits_cross_entropy(64)(module(tokens), {"targets": tokens})[0].item()
    except PhalanxError as error:
        return str(error)


@pytest.mark.long
def test_a_head_that_the_objective_multiplies_by_is_cut_by_tokens_or_refused(
    tmp_path: Path,
) -> None:
    kind = f"hf:{write_config(tmp_path, 'llama')}"
    whole, by_tokens, otherwise = (
        run_ranks(2, loss_with_head_cut, kind, rule)
        for rule in ("replicate", "vocab", "column gather")
    )
    assert whole == pytest.approx(by_tokens, rel=1e-5)
    assert all("the head of LlamaForCausalLM is not cut by tokens" in said for said in otherwise)
