"""Hugging Face models from a config.json: what is built is transformers' own; what cannot be, a
line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zoo import WIDTHS, ZOO, write_config
from phalanx.core.errors import JobError, LayoutError
from phalanx.core.phases import PhaseTimer
from phalanx.job.hugging_face import read_model_config
from phalanx.job.load import load_job
from phalanx.job.module_probe import probe_foreign_shape
from phalanx.job.schema import Job
from phalanx.mesh.blocks import find_repeated_blocks
from phalanx.mesh.linear import collect_shard_rules_of_module
from phalanx.mesh.tensor_group import TensorParallelGroup
from phalanx.nn.hugging_face import adapter
from phalanx.nn.hugging_face.adapter import build
from phalanx.nn.hugging_face.experts import use_batched_expert_products
from phalanx.nn.hugging_face.shard_rules import build_hugging_face_shard_rules
from phalanx.nn.objective import build_logits_cross_entropy
from phalanx.parallel.loss_forward import gather_logits
from phalanx.parallel.tensor.sharder import shard_module_by_rules
from phalanx.plan.cluster import Cluster
from phalanx.plan.planner import make_plan
from phalanx.plan.rule_checks import combine_and_check_rules, describe_unsharded_matrices
from phalanx.plan.workload import shard_shape

transformers = pytest.importorskip("transformers")
TEXT = [name for name in ZOO if name not in ("vit", "bert", "t5", "mamba", "bloom", "falcon")]
DBRX: dict[str, Any] = {
    "model_type": "dbrx",
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 64,
    "vocab_size": 96,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 5e5},
    "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
}


def model_of(directory: Path, name: str, **args: Any) -> Any:
    torch.manual_seed(3)
    return build(f"hf:{write_config(directory, name)}", **args).eval()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "phi", "mixtral"])
def test_logits_are_those_that_transformers_computes_of_the_same_weights(
    tmp_path: Path, name: str
) -> None:
    module = model_of(tmp_path, name)
    theirs = transformers.AutoModelForCausalLM.from_config(
        module.config, dtype=torch.float32
    ).eval()
    assert [n for n, _ in theirs.named_parameters()] == [n for n, _ in module.named_parameters()]
    theirs.load_state_dict(module.state_dict())
    tokens = torch.randint(96, (2, 12))
    with torch.no_grad():
        found = gather_logits(module(tokens, torch.arange(12).repeat(2, 1)))
        torch.testing.assert_close(found, theirs(tokens).logits)
        shifted = gather_logits(module(tokens, torch.arange(12).repeat(2, 1) * 3))
    assert not torch.allclose(found, shifted)  # positions are not dropped
    targets = torch.randint(96, (2, 12))
    loss_sum, count = build_logits_cross_entropy(1024)(found, {"targets": targets})
    wanted = torch.nn.functional.cross_entropy(found.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss_sum / count, wanted)


@pytest.mark.parametrize(("model_type", "name"), [("vit", "ViT"), ("deit", "DeiT")])
def test_images_are_classified_as_transformers_does(
    tmp_path: Path, model_type: str, name: str
) -> None:
    """Of DeiT's two classes the first, if config.json names none: transformers' own choice fails
    there."""
    torch.manual_seed(3)
    (tmp_path / "config.json").write_text(json.dumps(ZOO["vit"] | {"model_type": model_type}))
    module = build(f"hf:{tmp_path}").eval()
    assert module.config._attn_implementation == "sdpa"
    theirs = getattr(transformers, f"{name}ForImageClassification")(module.config).eval()
    theirs.load_state_dict(module.state_dict())
    images, labels = torch.randn(3, 1, 8, 8), torch.tensor([1, 9, 4])
    with torch.no_grad():
        found = module(images)
        torch.testing.assert_close(found, theirs(images).logits)
        loss = theirs(images, labels=labels).loss
    for key in ("labels", "targets"):
        loss_sum, count = build_logits_cross_entropy(1024)(found, {key: labels})
        torch.testing.assert_close(loss_sum / count, loss)


@pytest.mark.parametrize("name", TEXT)
def test_every_rule_names_layers_that_can_be_cut_and_blocks_are_found(
    tmp_path: Path, name: str
) -> None:
    with torch.device("meta"):
        module = build(f"hf:{write_config(tmp_path, name)}")
    blocks = find_repeated_blocks(module)
    assert len(blocks) == module.config.num_hidden_layers
    parts = dict(module.named_modules())
    for pattern, text in collect_shard_rules_of_module(module).items():
        part = parts[pattern.replace("*", "0")]
        wanted = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
        assert not text.startswith(("column", "row")) or isinstance(part, wanted), pattern


def test_what_is_not_known_to_stand_a_cut_is_whole(tmp_path: Path) -> None:
    """Norms of all heads at once, fused matrices of unknown order, what stands beside experts,
    scaled embeddings."""
    for name, whole in {
        "olmo2": "self_attn.q_proj",
        "phi3": "self_attn.qkv_proj",
        "qwen2_moe": "mlp.shared_expert.gate_proj",
        "gemma": "embed_tokens",
        # linear in every other block, which a rule for the rest would be for as well
        "minimax": "self_attn",
        "gpt_neox": "attention.query_key_value",
    }.items():
        with torch.device("meta"):
            rules = collect_shard_rules_of_module(build(f"hf:{write_config(tmp_path, name)}"))
        assert not any(pattern.endswith(whole) for pattern in rules), name
        assert any(text.startswith("row") for text in rules.values()) == (
            name not in ("phi3", "minimax")
        ), name


def test_experts_are_cut_as_their_plan_says_and_left_where_their_matrices_lie_otherwise(
    tmp_path: Path,
) -> None:
    name = "model.layers.*.mlp.experts"
    with torch.device("meta"):
        module = build(f"hf:{write_config(tmp_path, 'mixtral')}")
        assert collect_shard_rules_of_module(module)[name] == "experts parts=2"
        module.model.layers[1].mlp.experts.is_transposed = True
        assert name not in build_hugging_face_shard_rules(
            module, module.config, has_plain_head=True
        )


def test_experts_are_cut_in_the_parts_that_their_matrices_have(tmp_path: Path) -> None:
    """Halves of the two in one would fit each other, and compute something else."""
    shape = probe_foreign_shape(f"hf:{write_config(tmp_path, 'mixtral')}", {}, tmp_path / "cache")
    with pytest.raises(LayoutError, match=r"gate and up in one; write \"experts parts=2\""):
        combine_and_check_rules({"model.layers.*.mlp.experts": "experts"}, shape, 2)


def test_the_planner_measures_it_and_says_what_stays_whole(tmp_path: Path) -> None:
    kind = f"hf:{write_config(tmp_path, 'qwen2_moe')}"
    shape = probe_foreign_shape(kind, {"vocab_size": 100}, tmp_path / "cache")
    assert (shape.num_layers, shape.vocab_size, shape.max_positions) == (2, 100, 64)
    with torch.device("meta"):
        assert shape.num_params == sum(p.numel() for p in build(kind, vocab_size=100).parameters())
    line = describe_unsharded_matrices(combine_and_check_rules({}, shape, 2), shape)
    assert "no rule covers" in line
    assert "model.layers.*.mlp.shared_expert.gate_proj" in line
    assert "mlp.experts" not in line
    (tmp_path / "config.json").write_text("{}")  # a kept answer is of the file that was there
    with pytest.raises(LayoutError, match="names no model_type"):
        probe_foreign_shape(kind, {}, tmp_path / "cache")


def test_infinity_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    """As of Mamba 2 and its kin, whose time steps have no upper limit."""
    from transformers import Mamba2Config

    written = Mamba2Config(time_step_limit=(0.0, math.inf))
    written.save_pretrained(tmp_path)
    values = read_model_config(f"hf:{tmp_path}")
    assert values["time_step_limit"] == [0.0, math.inf]
    assert Mamba2Config.from_dict(values).time_step_limit == [0.0, math.inf]


def test_a_config_that_says_all_that_its_model_reads_is_built(tmp_path: Path) -> None:
    """Beside the next, which takes one setting out of it."""
    (tmp_path / "config.json").write_text(json.dumps(DBRX))
    assert len(find_repeated_blocks(build(f"hf:{tmp_path}"))) == 2


@pytest.mark.parametrize(
    ("values", "args", "said"),
    [
        ({"model_type": "lama"}, {}, 'no model_type .lama.; did you mean "llama"'),
        ({"hidden_size": 32}, {}, "names no model_type"),
        (ZOO["t5"] | {"model_type": "t5"}, {}, "t5, which is no causal language model"),
        (ZOO["bert"] | {"model_type": "bert"}, {}, "bert, which is no causal language model"),
        ({"model_type": "clip"}, {}, "a clip has no one image_size"),
        (ZOO["llama"] | {"model_type": "llama"}, {"hiden_size": 3}, 'did you mean "hidden_size"'),
        (
            ZOO["llama"] | {"model_type": "llama", "hidden_size": 33},
            {},
            "a llama, is refused by transformers",
        ),
        (
            ZOO["mixtral"] | {"model_type": "mixtral", "output_router_logits": True},
            {},
            "auxiliary loss",
        ),
        (ZOO["llama"] | {"model_type": "llama", "quantization_config": {}}, {}, "quantized"),
        (
            ZOO["llama"]
            | {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
            {},
            "is a Llama",
        ),
        (
            DBRX | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0}},
            {},
            "a dbrx .*; its config.json must say attn_config.rope_theta",
        ),
        (ZOO["llama"] | {"model_type": "llama", "rope_theta": math.nan}, {}, "rope_theta is nan"),
        (
            ZOO["llama"] | {"model_type": "llama", "rope_scaling": {"factor": math.inf}},
            {},
            "rope_scaling.factor is inf; give a finite number",
        ),
        ({"model_type": "resnet"}, {}, "no one image_size"),
        (ZOO["opt"] | {"model_type": "opt", "layerdrop": 0.1}, {}, "layers at random .layerdrop."),
    ],
)
def test_what_cannot_be_built_is_one_line(
    tmp_path: Path, values: dict[str, Any], args: dict[str, Any], said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(LayoutError, match=said) as caught, torch.device("meta"):
        build(f"hf:{tmp_path}", **args)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"hidden_size": None}, "hidden_size is null; give a whole number"),
        ({"hidden_size": [32, 32]}, "hidden_size is [32, 32]; give a whole number"),
        ({"tie_word_embeddings": "no"}, 'tie_word_embeddings is "no"; give true or false'),
        ({"hidden_act": "swishh"}, 'hidden_act is "swishh"; did you mean "swish"?'),
        ({"torch_dtype": "bfloat17"}, 'torch_dtype is "bfloat17"; did you mean "bfloat16"?'),
        (
            {"rope_scaling": {"type": "foo", "factor": 2.0}},
            'rope_scaling.type is "foo"; one of default, dynamic',
        ),
        ({"pad_token_id": 1000}, "pad_token_id is 1000 (vocab_size is 96)"),
        ({"initializer_range": -0.02}, "initializer_range is -0.02 (Value must be"),
    ],
)
def test_what_transformers_refuses_names_the_file_the_setting_and_what_is_wanted(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    """These were told in words of transformers and torch: a KeyError of 'foo'."""
    values = ZOO["llama"] | {"model_type": "llama"} | settings
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(LayoutError) as caught, torch.device("meta"):
        build(f"hf:{tmp_path}")
    assert str(caught.value).startswith(f"{tmp_path}/config.json: {said}")


def test_a_size_that_is_not_said_is_not_that_of_another_model(tmp_path: Path) -> None:
    """transformers has one for each: a tiny model was planned as one of a width of 4,096."""
    values = ZOO["llama"] | {"model_type": "llama"}
    del values["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with torch.device("meta"):
        with pytest.raises(LayoutError, match=r"config.json says no hidden_size .*4,096"):
            build(f"hf:{tmp_path}")
        assert build(f"hf:{tmp_path}", hidden_size=32)


def test_what_a_config_lacks_is_told_by_the_planner_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llamma"}')
    with pytest.raises(LayoutError) as caught:
        probe_foreign_shape(f"hf:{tmp_path}", {})
    assert str(caught.value) == (
        f"{tmp_path}/config.json: transformers knows no model_type 'llamma'; did you mean \"llama\"?"
    )


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("gptj", {"rotary_dim": 64}, "the forward of .* fails \\(RuntimeError"),
        ("bert-generation", {}, "see those after them.*is_decoder = true"),
        ("cpmant", {"dim_head": 8, "num_attention_heads": 4}, "see those after them"),
    ],
)
def test_what_runs_into_an_error_or_sees_its_targets_is_refused(
    tmp_path: Path, name: str, more: dict[str, Any], said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, **WIDTHS, **more}))
    with pytest.raises(LayoutError, match=said):
        build(f"hf:{tmp_path}")
    if name == "bert-generation":
        assert build(f"hf:{tmp_path}", is_decoder=True).training


def test_the_small_model_that_is_tried_is_narrow_unless_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawing two blocks of a large model at their full width takes seconds."""
    widths: list[int] = []

    def refuse_narrow(kind: str, module: Any, facts: Any, *, reads_images: bool) -> None:
        widths.append(module.config.intermediate_size)
        if fails and widths[-1] < 1000:
            raise LayoutError("no")

    config = ZOO["llama"] | {"model_type": "llama", "intermediate_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(adapter, "require_causal_and_trainable_by_trial", refuse_narrow)
    fails = False
    adapter.require_trainable_small_model(f"hf:{tmp_path}", {})
    assert widths == [256]
    fails = True
    adapter.require_trainable_small_model(f"hf:{tmp_path}", {})
    assert widths == [256, 256, 1000]


def test_a_vocabulary_beside_config_json_is_refused(tmp_path: Path) -> None:
    """Nothing would read it, and the data's tokens would not fit a model that was told to be
    larger."""
    (tmp_path / "config.json").write_text(json.dumps(ZOO["llama"] | {"model_type": "llama"}))
    with pytest.raises(JobError, match="vocab_size is not read by your own model"):
        load_job(None, [f"model.kind=hf:{tmp_path}", "model.vocab_size=300"])


def test_weights_of_a_directory_are_taken_whole_or_refused(tmp_path: Path) -> None:
    module = model_of(tmp_path / "bare", "llama")
    theirs = transformers.LlamaForCausalLM(module.config)
    theirs.save_pretrained(tmp_path / "full")
    torch.manual_seed(99)
    taken = build(f"hf:{tmp_path / 'full'}")
    for (name, found), (_, wanted) in zip(
        taken.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert torch.equal(found, wanted), name
    bare = build(f"hf:{tmp_path / 'full' / 'config.json'}")  # the file itself: random weights
    assert not torch.equal(bare.lm_head.weight, theirs.lm_head.weight)
    with pytest.raises(LayoutError, match=r"missing keys: model\.layers\.2"):
        build(f"hf:{tmp_path / 'full'}", num_hidden_layers=3)
    (tmp_path / "full" / "model.safetensors").rename(tmp_path / "full" / "pytorch_model.bin")
    with pytest.raises(LayoutError, match="pickled"):
        build(f"hf:{tmp_path / 'full'}")


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_by_batched_products_have_float64_and_say_what_grouped_ones_do(
    tmp_path: Path, name: str
) -> None:
    module = model_of(tmp_path, name)
    inputs = torch.arange(12).view(2, 6)
    grouped = gather_logits(module(inputs)).detach()
    with pytest.raises(RuntimeError):
        module.double()(inputs)
    assert use_batched_expert_products(module)
    batched = gather_logits(module(inputs)).detach()
    assert batched.dtype == torch.float64
    torch.testing.assert_close(batched.float(), grouped, rtol=1e-4, atol=1e-5)
    assert not use_batched_expert_products(module)  # it is done


def test_a_dense_model_has_no_experts_to_compute_otherwise(tmp_path: Path) -> None:
    assert not use_batched_expert_products(model_of(tmp_path, "llama"))


@pytest.mark.parametrize("name", ["qwen2", pytest.param("mixtral", marks=pytest.mark.long)])
def test_memory_of_a_rank_of_tp_is_what_its_rules_leave(tmp_path: Path, name: str) -> None:
    """Against a module that is really cut, and in stages: what no rule covers is whole on every
    rank."""
    kind = f"hf:{write_config(tmp_path, name, vocab_size=97)}"
    shape = probe_foreign_shape(kind, {}, tmp_path / "cache")
    rules = combine_and_check_rules({}, shape, 2)
    here = shard_shape(shape, 2, rules)
    with torch.device("meta"):
        modules = [build(kind) for _ in range(2)]
    for rank, module in enumerate(modules):
        shard_module_by_rules(module, TensorParallelGroup("tp", rank, 2, PhaseTimer()), rules)
    counted = [sum(p.numel() for p in module.parameters()) for module in modules]
    assert here.num_params == max(counted) < shape.num_params
    blocks = [sum(p.numel() for p in block.parameters()) for block in modules[0].model.layers]
    assert (here.block_params, here.blocks_params) == (blocks[0], sum(blocks))
    assert here.count_part_params().blocks == tuple(blocks)
    after = sum(
        p.numel() for part in (modules[1].model.norm, modules[1].lm_head) for p in part.parameters()
    )
    assert here.count_part_params().after == after


def test_documents_are_not_kept_apart_by_what_names_none_which_the_plan_says(
    tmp_path: Path,
) -> None:
    job = load_job(None, [f"model.kind=hf:{write_config(tmp_path, 'mixtral')}", "data.seq_len=8"])
    shape = probe_foreign_shape(str(job.model.kind), {}, tmp_path / "cache")
    assert make_plan(job, shape=shape).num_params == shape.num_params
    masked = job.model_copy(update={"data": job.data.model_copy(update={"document_masks": True})})
    with pytest.raises(
        LayoutError, match="cannot keep documents apart: its forward names no document_ids"
    ):
        make_plan(masked, shape=shape)


@pytest.mark.long
def test_a_plan_counts_the_state_that_tp_leaves_of_it(tmp_path: Path) -> None:
    """Eight billion parameters are 120 GiB of state, of which a rank of eight has an eighth."""
    widths = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    path = write_config(
        tmp_path,
        "llama",
        **widths,
        intermediate_size=14336,
        vocab_size=128256,
        max_position_embeddings=4096,
    )
    job = Job.model_validate(
        {
            "model": {"kind": f"hf:{path}"},
            "train": {"global_batch_size": 8},
            "parallel": {"ranks": 8, "tp": 8},
            "cluster": {"memory_gib": 24},
        }
    )
    plan = make_plan(job, cluster=Cluster("cpu", 8, 160 * 2**30))
    # The peak is in the forward, before gradients are there.
    assert plan.chosen.predicted_bytes["activations"] > plan.chosen.predicted_bytes["gradients"]
    state = max(
        sum(phase[kind] for kind in ("parameters", "gradients", "optimizer"))
        for phase in plan.chosen.phases.values()
    )
    assert abs(state / (plan.num_params * 16 / 8) - 1) < 0.001
    staged = make_plan(
        job.model_copy(update={"parallel": job.parallel.model_copy(update={"tp": 4, "pp": 2})}),
        cluster=Cluster("cpu", 8, 160 * 2**30),
    )
    assert staged.pipeline is not None
    assert max(staged.pipeline.predicted_rank_bytes) < 1.2 * plan.num_params * 16 / 8
