"""What a trace says of a module, held to what the real module keeps and computes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from phalanx.cli._plan_advice import print_term_formula
from phalanx.core.errors import LayoutError, UsageError
from phalanx.job.load import load_job
from phalanx.job.module_probe import (
    _build_module_from_answer,
    build_trace_request,
    probe_foreign_shape,
)
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.job.shapes.measured import MeasuredModule
from phalanx.job.shapes.stored import parse_stored_shape
from phalanx.nn.hugging_face.adapter import resolve_model_factory
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.module_trace import (
    TracedBatch,
    TracedBatchTensors,
    UntraceableModuleError,
    trace_module,
)
from phalanx.nn.objective import CausalOutput, build_logits_cross_entropy, causal_cross_entropy
from phalanx.nn.probe import describe_module_for_planner
from phalanx.parallel.saved_tensors import SavedBytesCounter
from phalanx.plan.memory import activation_bytes, count_segment_bytes
from phalanx.plan.planner import make_plan
from phalanx.plan.search.describe import format_scaling_table
from phalanx.plan.search.scaling import search_per_device_count
from phalanx.plan.search.search import search_layouts
from phalanx.plan.search.task import build_search_task
from phalanx.plan.workload import Workload
from phalanx.run.plan_advice import advise_on_search
from phalanx.run.search_job import JobSearch, search_layouts_of_job

OWN = """
import torch
import torch.nn.functional as F
from torch import nn

class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.out(scores.masked_fill(mask, -1e9).softmax(-1) @ v)
        return x + self.down(F.gelu(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self, dim=32, vocab=90, layers=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocab)

    def forward(self, inputs):
        x = self.embed(inputs)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

class Towers(Model):
    # A stem before the blocks; a decoder behind them, for as many tokens and for half.

    def __init__(self, dim=32):
        super().__init__(dim)
        self.stem = nn.Sequential(nn.Linear(dim, 5 * dim), nn.Linear(5 * dim, dim))
        self.decoder = nn.Sequential(*(Block(dim) for _ in range(2)))
        self.pooler = nn.Linear(dim, 40)

    def forward(self, inputs):
        x = self.stem(self.embed(inputs))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.decoder(x) + self.pooler(x[:, ::2]).mean())

class Crossing(nn.Module):
    # A block that attends twice.

    def __init__(self, dim):
        super().__init__()
        self.up = nn.Linear(dim, dim)

    def forward(self, x):
        heads = self.up(x).unflatten(-1, (4, -1)).transpose(1, 2)
        few = heads[:, :, ::2]
        x = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True) + heads
        return F.scaled_dot_product_attention(x, few, few).transpose(1, 2).flatten(2)

class TwoAttentions(Model):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Crossing(32) for _ in range(2))

class Recurrent(Model):
    def __init__(self):
        super().__init__()
        self.memory = nn.LSTM(32, 32, batch_first=True)

    def forward(self, inputs):
        return super().forward(inputs) + self.memory(self.embed(inputs))[0].mean()

class Flat(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(90, 32), nn.Linear(32, 90))

class Merging(Model):
    def __init__(self):
        super().__init__()
        self.merge = nn.Linear(32, 32)

    def forward(self, inputs):
        x = self.embed(inputs)
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 0:
                x = torch.relu(self.merge(x))
        return self.head(x)

class ByNumbers(Model):
    def forward(self, inputs):
        if super().forward(inputs).sum() > 0:
            return super().forward(inputs)
        return super().forward(inputs) * 2

class Needy(Model):
    def forward(self, inputs, weather):
        return super().forward(inputs)
"""
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 90,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MIXTRAL: dict[str, Any] = LLAMA | {
    "model_type": "mixtral",
    "intermediate_size": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
VIT: dict[str, Any] = {
    "model_type": "vit",
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
}
LENGTH = 48


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "traced_model.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "traced_model"


def measure(kind: str, precisions: tuple[str, ...] = ("fp32",)) -> MeasuredModule:
    request = {"seq_len": LENGTH, "precisions": list(precisions), "loss_chunk_tokens": 1024}
    return _build_module_from_answer(kind, describe_module_for_planner(kind, {}, request))


def write_config(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return f"hf:{folder / 'config.json'}"


def count_saved_bytes(kind: str, batch: int, length: int, precision: str) -> int:
    """Bytes that autograd saves of a real forward and loss, without weights."""
    module: nn.Module = resolve_model_factory(kind)()
    tokens = torch.randint(0, 90, (batch, length))
    make = build_logits_cross_entropy if kind.startswith("hf:") else causal_cross_entropy
    saved = SavedBytesCounter()
    with (
        saved.counting_saved_tensors(),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
    ):
        make(1024)(module(tokens), {"targets": tokens})
    return saved.num_bytes


def predict(shape: MeasuredModule, batch: int, length: int, precision: str = "fp32") -> int:
    return activation_bytes(shape, Workload(batch, length, precision, "none", 1024))


# Mixtral's blocks are Llama's with experts in them.
@pytest.mark.parametrize(
    "config",
    [MIXTRAL, *(pytest.param(config, marks=pytest.mark.long) for config in (LLAMA, GPT2))],
    ids=lambda config: config["model_type"],
)
def test_activations_are_those_that_autograd_saves(config: dict[str, Any], tmp_path: Path) -> None:
    kind = write_config(tmp_path, config)
    shape = measure(kind, ("fp32", "bf16"))
    assert not shape.why_untraced
    for batch, length, precision in ((3, LENGTH, "fp32"), (5, 24, "fp32"), (3, LENGTH, "bf16")):
        saved = count_saved_bytes(kind, batch, length, precision)
        hidden = batch * length * config.get("hidden_size", config.get("n_embd")) * 4
        # The loss saves gradients of hidden states and head, which the plan counts as the loss.
        loss = shape.activations.count_loss_bytes(
            Workload(batch, length, precision, "none", 1024)
        ).waiting  # type: ignore[union-attr]
        wide = shape.list_wide_products(2 if precision == "bf16" else 4)
        assert bool(wide) is (precision == "bf16" and config is MIXTRAL)
        assert saved - loss == pytest.approx(
            predict(shape, batch, length, precision), abs=0.03 * saved + hidden
        )


def test_experts_of_transformers_are_counted_as_experts(tmp_path: Path) -> None:
    kind = write_config(tmp_path, MIXTRAL)
    shape, module = measure(kind, ("bf16",)), resolve_model_factory(kind)()
    assert not shape.why_untraced
    assert shape.num_params == sum(parameter.numel() for parameter in module.parameters())
    work = shape.work(LENGTH)
    assert work is not None
    block = work.blocks[0]
    assert (block.num_experts, block.experts_per_token, block.routed_dim) == (8, 2, 32)
    assert block.num_routed_params == 8 * 3 * 32 * 64
    experts = [matmul for matmul in block.matmuls if matmul.num_experts > 1]
    # Gate and up in one; a token visits two of eight.
    assert [(m.inputs, m.outputs, m.num_experts, m.visited) for m in experts] == [
        (32, 128, 8, 2),
        (64, 32, 8, 2),
    ]
    assert sum(matmul.num_params for matmul in experts) == block.num_routed_params
    idle = len(work.blocks) * 6 * 3 * 32 * 64
    assert shape.num_active_params == shape.num_params - idle
    # Autocast does not reach them, and ZeRO 3 casts their weights: a plan says what it counts.
    assert shape.list_wide_products(2) == ("mlp.experts",)
    keys = [f"model.kind={kind}", "cluster.gpu=h100-sxm", f"data.seq_len={LENGTH}"]
    job = load_job(None, [*keys, "parallel.ranks=2", "parallel.zero_stage=3"])
    plan = make_plan(job, shape=shape)
    assert any("mlp.experts are counted in fp32" in reason for reason in plan.reasons)
    result = search_layouts(build_search_task(job, shape=shape))
    assert any("mlp.experts are counted in fp32" in remark for remark in result.remarks)


def test_attention_that_is_written_out_grows_with_pairs(own_model: str) -> None:
    shape = measure(f"{own_model}:Model")
    for batch, length in ((4, LENGTH), (4, 16), (2, 96)):
        saved = count_saved_bytes(f"{own_model}:Model", batch, length, "fp32")
        work = Workload(batch, length, "fp32", "none", 1024)
        assert shape.activations is not None
        kept = predict(shape, batch, length) + shape.activations.count_loss_bytes(work).waiting
        assert saved == pytest.approx(kept, rel=0.02)


@pytest.mark.parametrize("name", ["Model", "Towers", "Merging"])
def test_flops_are_those_that_torch_counts(own_model: str, name: str) -> None:
    shape = measure(f"{own_model}:{name}")
    module = resolve_model_factory(f"{own_model}:{name}")()
    with FlopCounterMode(display=False) as counter:
        module(torch.zeros(1, LENGTH, dtype=torch.int64))
    flops = shape.flops(LENGTH)
    assert flops is not None
    parts = (flops.embedding, *flops.blocks, flops.head)
    assert sum(part.forward for part in parts) == counter.get_total_flops()
    work = shape.work(LENGTH)
    assert work is not None
    assert work.matmul_flops + work.attention_flops == counter.get_total_flops()
    assert len(work.block_kinds) == 1
    # Of what lies around the blocks: as many products a block as theirs have.
    around = (work.before_blocks, work.after_blocks)
    assert tuple(map(len, around)) == {"Model": (0, 0), "Towers": (1, 3), "Merging": (0, 1)}[name]


def test_all_attention_of_a_block_is_part_of_its_work(own_model: str) -> None:
    """Of a decoder's block only the first was: to itself, and none to the encoder."""
    shape = measure(f"{own_model}:TwoAttentions")
    work = shape.work(LENGTH)
    assert work is not None
    causal, crossing = LENGTH * (LENGTH + 1) // 2, LENGTH * LENGTH // 2
    assert work.attention_flops == 2 * 2 * 32 * 2 * (causal + crossing)


def test_a_pipeline_of_a_module_is_said_to_be_untried(own_model: str) -> None:
    """A decoder that looks at what comes before the blocks was planned in stages, and refused."""
    keys = [f"model.kind={own_model}:Towers", "cluster.gpu=h100-sxm", "cluster.nodes=1"]
    shape = measure(f"{own_model}:Towers", ("bf16",))
    job = load_job(None, [*keys, "parallel.ranks=2", "parallel.pp=2"])
    result = search_layouts(build_search_task(job, shape=shape))
    assert "only a run of it shows" in " ".join(result.remarks)
    job = load_job(None, [*keys, "parallel.ranks=2", "parallel.pp=1"])
    result = search_layouts(build_search_task(job, shape=shape))
    assert "only a run of it shows" not in " ".join(result.remarks)


def test_a_time_that_leaves_out_a_layer_says_so(own_model: str) -> None:
    job = load_job(None, ["cluster.gpu=h100-sxm", "cluster.nodes=1"])
    result = search_layouts(
        build_search_task(job, shape=measure(f"{own_model}:Recurrent", ("bf16",)))
    )
    assert "the time leaves out the LSTM memory: a step takes longer" in " ".join(result.remarks)


def test_a_module_without_blocks_is_told_why_it_has_no_time(own_model: str) -> None:
    job = load_job(None, ["cluster.gpu=h100-sxm", "cluster.nodes=1"])
    task = build_search_task(job, shape=measure(f"{own_model}:Flat", ("bf16",)))
    result = search_layouts(task)
    assert result.winner is not None
    assert result.winner.time is None
    assert "times are counted block by block, and the module shows none" in result.remarks[0]
    advised = advise_on_search(JobSearch(job, task, result))
    assert advised is not None
    with pytest.raises(UsageError, match="no time is predicted for model"):
        print_term_formula(advised, "step", as_json=False)
    table = format_scaling_table(
        list(search_per_device_count(task, [8])), job, task.cluster, unit="tokens"
    )
    assert table[1].split()[:3] == ["8", "ddp", "(dp_replicate=8)"]
    assert "unknown: why no time is predicted" in table[2]


@pytest.mark.parametrize(("name", "why"), [("ByNumbers", "reads numbers"), ("Needy", "weather")])
def test_what_cannot_be_traced_is_no_fit_without_a_word(
    own_model: str, name: str, why: str
) -> None:
    trace = {"seq_len": LENGTH, "precisions": ["fp32"], "loss_chunk_tokens": 1024}
    shape = probe_foreign_shape(f"{own_model}:{name}", {}, trace=trace)
    assert shape.activations is None
    assert why in shape.why_untraced
    job = load_job(None, [f"model.kind={own_model}:{name}", "parallel.ranks=1"])
    notes = " ".join(make_plan(job, shape=shape).reasons)
    assert why in notes
    assert "that it fits is not known" in notes


def test_a_search_for_what_cannot_be_traced_ends_with_the_reason(own_model: str) -> None:
    job = load_job(None, [f"model.kind={own_model}:ByNumbers", "cluster.gpu=h100-sxm"])
    with pytest.raises(LayoutError, match="whether the job fits is not known") as caught:
        search_layouts_of_job(job)
    assert "reads numbers" in str(caught.value)
    assert "given token ids" in str(caught.value)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("changes", [{}, {"activation": "gelu", "ffn_dim": 320}], ids=str)
def test_gradients_on_their_way_are_those_of_a_trace(
    changes: dict[str, Any], precision: str
) -> None:
    """So many tokens that activations outweigh a weight's own gradient. The trace holds on to what
    the model returned, and to its gradient, which a step lets go."""
    shape = replace(DecoderShape(2, 64, 4, 4, 16, 160, 97, False), **changes)
    with torch.device("meta"):
        module = Decoder(shape)
    with FakeTensorMode(allow_non_fake_inputs=True):
        module.to_empty(device="cpu")
        batch = TracedBatch(1, 8192, precision)
        trace = trace_module(module, batch, causal_cross_entropy(1024))
    block = shape.activations.block(0, Workload(1, 8192, precision, "none", 1024))
    held = 2 * block.entering
    passing = max(kind["passing"] for kind in trace["kinds"]) - held
    assert passing == pytest.approx(block.passing, rel=0.02)


def test_a_stored_shape_keeps_its_trace(own_model: str) -> None:
    shape = measure(f"{own_model}:Model")
    assert parse_stored_shape(json.loads(json.dumps(shape.to_json()))) == shape


def test_tensor_parallelism_divides_what_comes_from_cut_layers(own_model: str) -> None:
    shape = measure(f"{own_model}:Model")
    work = Workload(2, LENGTH, "fp32", "none", 1024, tp=2)

    def cut(holder: Any) -> Any:
        if not holder.name.endswith(("qkv", "up")):
            return holder
        return replace(holder, num_outputs=holder.num_outputs // 2)

    whole, half = shape.activations, shape.shard(2, cut).activations
    assert whole is not None
    assert half is not None
    block = whole.block(0, work)
    # q, k, v, scores, weights, masks, their sum, up and its activation; norms and inputs stay.
    per_token = 4 * 32 * 4
    assert half.block(0, work).entering == block.entering
    assert block.saved - 2 * per_token < 2 * half.block(0, work).saved < 2 * block.saved
    assert half.block(0, work).saved < 0.75 * block.saved


def test_blocks_that_do_the_same_and_are_cut_otherwise_are_counted_apart(own_model: str) -> None:
    shape = measure(f"{own_model}:Model")
    assert len(set(shape.traces[0].points[0].blocks)) == 1
    work = Workload(2, LENGTH, "fp32", "none", 1024, tp=2)

    def cut_only(holder: Any, block: str) -> Any:
        if not holder.name.startswith(block) or not holder.name.endswith(("qkv", "up")):
            return holder
        return replace(holder, num_outputs=holder.num_outputs // 2)

    everywhere = shape.shard(2, lambda holder: cut_only(holder, "")).activations
    nowhere = shape.shard(2, lambda holder: holder).activations
    # A rule names the first block alone: of these two a block may be asked for in any order.
    first, again = (shape.shard(2, lambda holder: cut_only(holder, "layers.0.")) for _ in "12")
    assert everywhere is not None
    assert nowhere is not None
    assert first.activations is not None
    assert again.activations is not None
    expected = [everywhere.block(0, work), nowhere.block(1, work), nowhere.block(2, work)]
    assert expected[0].saved < expected[1].saved
    assert [first.activations.block(layer, work) for layer in (0, 1, 2)] == expected
    assert [again.activations.block(layer, work) for layer in (2, 1, 0)] == expected[::-1]
    kinds = first.activations.list_block_kinds(work)
    assert kinds[0] != kinds[1] == kinds[2]
    assert count_segment_bytes(first, work)[0] == [block.saved for block in expected]


def test_a_batch_without_what_its_loss_reads_says_so() -> None:
    """It was a KeyError: 'targets', and nothing else."""
    batch = TracedBatchTensors({"labels": 1, "image": {"mask": 2}})
    # Joined names are found, as in training.
    assert batch["image.mask"] == 2
    with pytest.raises(
        UntraceableModuleError, match="reads 'targets', and a batch has labels, image: return it"
    ):
        batch["targets"]


def test_a_dataset_of_ones_own_is_not_traced() -> None:
    job = load_job(None, ["model.kind=traced_model:Model", "data.source=my.data:build"])
    assert build_trace_request(job) is None
    shape = MeasuredModule("traced_model:Model", 3, 1_000_000, 900_000, 200_000, 600_000)
    reasons = " ".join(make_plan(job, shape=shape, num_ranks=1).reasons)
    assert "what a sample is only the dataset says; phalanx plan --dry-run reads one" in reasons


@pytest.mark.parametrize("config", [LLAMA, VIT], ids=["tokens", "images"])
def test_a_model_of_hugging_face_is_traced_whatever_its_samples_come_from(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    kind = write_config(tmp_path, config)
    keys = [f"model.kind={kind}", "parallel.ranks=1", f"data.seq_len={LENGTH}"]
    own = load_job(None, [*keys, "data.source=my.data:build"])
    request = build_trace_request(own)
    assert request == build_trace_request(load_job(None, keys))
    shape = measure(kind)
    assert shape.activations is not None
    plan = make_plan(own, shape=shape)
    assert plan.chosen.predicted_bytes["activations"] > 0
    assert not any("not known" in reason for reason in plan.reasons)


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 512},
    "gemma3_text": {"head_dim": 8, "sliding_window": 512},
    "phi": {},
    "phi3": {},
    "olmo2": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": None},
    "gpt_neox": {},
    "granite": {},
    "cohere": {},
}


@pytest.mark.long
@pytest.mark.parametrize("family", [*ARCHITECTURES, "gpt2"])
def test_parameters_and_flops_are_those_of_the_real_module(family: str, tmp_path: Path) -> None:
    """FLOPs as torch's counter has them: attention over all pairs of tokens."""
    config = GPT2 if family == "gpt2" else {**LLAMA, "model_type": family, **ARCHITECTURES[family]}
    kind = write_config(tmp_path, {**config, "pad_token_id": None})
    shape, module = measure(kind), resolve_model_factory(kind)()
    assert not shape.why_untraced
    assert shape.num_params == sum(parameter.numel() for parameter in module.parameters())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        outputs = module(torch.ones(1, LENGTH, dtype=torch.int64))
    flops = shape.flops(LENGTH)
    assert flops is not None
    parts = (flops.embedding, *flops.blocks, flops.head)
    attention = sum(part.attention for part in parts)
    pairs, causal_pairs = LENGTH**2, LENGTH * (LENGTH + 1) // 2
    head = 0
    if isinstance(outputs, CausalOutput):
        # The objective multiplies by it, outside of the forward that is counted.
        head = 2 * LENGTH * outputs.head_VD.numel()
    matmul = sum(part.matmul for part in parts) - head
    # torch counts all pairs; its counter knows no formula of the CPU's flash kernel. Attention that
    # is written out (Gemma 2) computes all pairs.
    counted = counter.get_total_flops()
    fused = matmul + attention * pairs // causal_pairs
    assert counted in (matmul, fused, matmul + attention)
    assert attention > 0


def test_products_of_images_are_counted_once(tmp_path: Path) -> None:
    """A trace's image has the length 1 and many patches: its products' rows are all of them."""
    kind = write_config(tmp_path, VIT)
    module = resolve_model_factory(kind)()
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        module(torch.zeros(1, 3, 16, 16))
    shape = measure(kind)
    work, flops = shape.work(LENGTH), shape.flops_per_token(LENGTH)
    assert work is not None
    assert flops is not None
    assert work.num_tokens == 17
    # torch counts no attention here, and what is in modules once more for the whole.
    counts = counter.get_flop_counts()["ViTForImageClassification"]
    assert work.matmul_flops == sum(counts.values())
    assert work.embedding is not None
    assert (work.embedding.inputs, work.embedding.outputs) == (48, 32)
    assert work.num_embedding_tokens == 16
    assert flops["matmul"] * work.num_tokens == pytest.approx(work.matmul_flops, rel=0.01)
    assert work.blocks[0].residual_features < 10 * work.dim


class Dropping(nn.Module):
    """A module around another one, as `from_pretrained` leaves that."""

    def __init__(self, *, is_loaded: bool, is_frozen: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Dropout(0.0))
        self.inner.train(not is_loaded)
        self.inner[0].weight.requires_grad_(not is_frozen)
        self.dropout = nn.Dropout(0.1)
        self.narrow = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(
            torch.zeros(5, dtype=torch.bfloat16), requires_grad=not is_frozen
        )


@pytest.mark.parametrize(
    ("is_loaded", "is_frozen", "number"), [(True, False, 1), (False, False, 0), (True, True, 0)]
)
def test_what_trains_otherwise_than_meant_is_counted(
    is_loaded: bool, is_frozen: bool, number: int
) -> None:
    args: dict[str, object] = {"is_loaded": is_loaded, "is_frozen": is_frozen}
    kind = "test_module_trace:Dropping"
    module = _build_module_from_answer(kind, describe_module_for_planner(kind, args))
    assert module.num_idle_layers == number
    assert module.num_narrow_params == (3 if is_frozen else 8)
