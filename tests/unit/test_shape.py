"""Parameter counts against published models; FLOPs against counting by hand; foreign models
against a real process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from commands import wait_until
from phalanx.core.errors import ExitCode, LayoutError
from phalanx.job.load import load_job
from phalanx.job.model import build_model_shape, explain_scaled_widths, find_vocab_size_of
from phalanx.job.module_probe import probe_foreign_shape, run_request_process
from phalanx.job.presets import list_presets
from phalanx.job.presets.table import replace_presets_table
from phalanx.job.shapes.decoder import DecoderShape, default_ffn_dim
from phalanx.job.shapes.stored import parse_stored_shape

# The counts that the models' own checkpoints sum to (Hugging Face safetensors metadata; GPT-2
# without its two buffers).
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "deepseek-moe-16b": 16_375_728_128,
    "vit-b16": 86_567_656,
    "vit-l16": 304_326_632,
    "vit-h14": 632_045_800,
}
ACTIVE = {
    "mixtral-8x7b": 12.9e9,
    "mixtral-8x22b": 39e9,
    "deepseek-moe-16b": 2.8e9,
    "deepseek-v3": 37e9,
}
SIZES = {"b": 1e9, "m": 1e6}


def preset_shape(name: str, *keys: str) -> DecoderShape:
    """Of a job with any dataset: nothing reads it."""
    return build_model_shape(
        load_job(None, [f"model.preset={name}", "data.source=my.data:set", *keys]), 1000
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name):
    assert preset_shape(name).num_params == PUBLISHED[name]


@pytest.mark.parametrize("preset", list_presets(), ids=lambda preset: preset.name)
def test_every_preset_counts_what_its_file_says(preset):
    keys = (
        () if preset.kind == "vit" or "vocab_size" in preset.values else ("model.vocab_size=1000",)
    )
    shape = preset_shape(preset.name, *keys)
    assert preset.num_params in (shape.num_params, None)
    assert (preset.num_params is None) == (preset.family == "phalanx")
    groups = shape.params_by_group()
    assert sum(groups.values()) == shape.num_params
    outside = groups["embedding"] + groups["head"] + shape.norm_params
    assert shape.blocks_params + outside == shape.num_params
    if shape.experts is None:
        assert shape.blocks_params == shape.num_layers * shape.block_params
        assert shape.num_active_params == shape.num_params
    assert preset.source


@pytest.mark.parametrize("preset", list_presets(), ids=lambda preset: preset.name)
def test_a_size_in_a_name_is_the_size(preset):
    """Names round; Gemma's leave the embedding out, and "8x7b" is a model with seven billion per
    expert."""
    found = re.fullmatch(r"[a-z-]*[\d.]*-(?:moe-)?([\d.]+)([bm])(?:-a([\d.]+)b)?", preset.name)
    if found is None:
        return
    embedding = (
        preset_shape(preset.name).params_by_group()["embedding"] if preset.family == "Gemma" else 0
    )
    size = float(found[1]) * SIZES[found[2]]
    low, high = sorted((preset.num_params - embedding, preset.num_params))
    assert 0.8 * low < size < 1.25 * high
    if found[3]:
        assert preset_shape(preset.name).num_active_params == pytest.approx(
            float(found[3]) * 1e9, rel=0.13
        )


@pytest.mark.parametrize("name", ACTIVE)
def test_published_active_parameters(name):
    assert preset_shape(name).num_active_params == pytest.approx(ACTIVE[name], rel=0.02)


def test_the_page_on_models_lists_the_presets_of_today():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert page == replace_presets_table(page), "run make docs"
    assert all(f"| `{preset.name}` |" in page for preset in list_presets())


def test_the_default_job_is_small():
    shape = build_model_shape(load_job(), 257)
    assert shape == DecoderShape(4, 128, 4, 4, 32, 352, 257, True)
    assert shape.num_params == 836_864


def test_keys_lie_on_top_of_the_preset_and_widths_follow():
    shape = build_model_shape(
        load_job(None, ["model.dim=256", "model.num_heads=8", "model.num_layers=3"]), 1000
    )
    assert shape == DecoderShape(3, 256, 8, 8, 32, 704, 1000, True)
    assert shape.params_by_group()["head"] == 0
    given = build_model_shape(
        load_job(None, ["model.num_kv_heads=2", "model.ffn_dim=100", "model.tie_embeddings=false"]),
        10,
    )
    assert (given.num_kv_heads, given.ffn_dim, given.params_by_group()["head"]) == (2, 100, 1280)
    plain = build_model_shape(load_job(None, ["model.activation=gelu"]), 10)
    assert plain.ffn_dim == 4 * 128


def test_widths_of_a_published_model_keep_its_proportions():
    half = preset_shape("llama3-8b", "model.dim=2048")
    assert (half.num_heads, half.num_kv_heads, half.head_dim, half.ffn_dim) == (32, 8, 64, 7168)
    fewer = preset_shape("llama3-8b", "model.num_heads=16")
    assert (fewer.num_kv_heads, fewer.head_dim, fewer.ffn_dim) == (4, 256, 14336)
    odd = preset_shape("llama3-8b", "model.num_heads=2", "model.head_dim=64")
    assert (odd.num_kv_heads, odd.head_dim) == (2, 64)
    own_width = preset_shape(
        "qwen3-0.6b", "model.dim=512"
    )  # its heads are 128 wide whatever dim is
    assert (own_width.head_dim, own_width.ffn_dim) == (128, 1536)
    same = preset_shape("llama3-8b", "model.activation=swiglu")
    assert same == preset_shape("llama3-8b")
    gated = preset_shape("llama3-8b", "model.activation=geglu")
    assert gated.ffn_dim == 14336
    assert preset_shape("llama3-8b", "model.activation=gelu").ffn_dim == 4 * 4096
    experts = preset_shape("mixtral-8x7b", "model.dim=2048")
    assert (experts.expert_ffn_dim, experts.head_dim) == (7168, 64)
    rotary = preset_shape("gpt2", "model.positions=rope")
    assert rotary.num_params == 124_439_808 - 1024 * 768


def test_what_follows_is_said():
    job = load_job(None, ["model.preset=llama3-8b", "model.dim=2048", "model.num_layers=2"])
    assert explain_scaled_widths(job.model) == [
        "head_dim 64 follows from model.dim (llama3-8b has 128)",
        "ffn_dim 7168 follows from model.dim (llama3-8b has 14336)",
    ]
    heads = load_job(None, ["model.preset=gpt2", "model.num_heads=6"])
    assert explain_scaled_widths(heads.model) == [
        "head_dim 128 follows from model.num_heads (gpt2 has 64)"
    ]
    assert explain_scaled_widths(load_job(None, ["model.dim=256"]).model) == []


def test_the_vocabulary_is_the_keys_then_the_presets_then_the_datas():
    assert find_vocab_size_of(load_job().model) is None
    assert find_vocab_size_of(load_job(None, ["model.preset=gpt2"]).model) == 50257
    assert (
        find_vocab_size_of(load_job(None, ["model.preset=gpt2", "model.vocab_size=50304"]).model)
        == 50304
    )
    assert preset_shape("gpt2").vocab_size == 50257
    assert build_model_shape(load_job(), 77).vocab_size == 77


def test_a_window_and_the_blocks_without_it():
    shape = preset_shape("gemma3-270m")
    assert [layer for layer in range(shape.num_layers) if not shape.is_local(layer)] == [5, 11, 17]
    assert preset_shape("mistral-7b").num_local_layers == 32
    assert preset_shape("llama2-7b").num_local_layers == 0


def test_default_ffn_dim_is_the_next_multiple_of_32():
    for dim in range(1, 3000):
        ffn = default_ffn_dim(dim)
        assert ffn % 32 == 0
        assert ffn - 32 < 8 * dim / 3 <= ffn


def test_flops_by_hand():
    shape = DecoderShape(2, 8, 2, 1, 4, 16, 10, True)
    flops = shape.flops_per_token(5)
    weights = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8 + 3 * 8 * 16  # q, k, v, o and SwiGLU
    assert flops["matmul"] == 2 * (2 * weights + 10 * 8)
    # Two matmuls (scores, values) of 2 heads x 4 wide over 1, 2, 3, 4 and 5 keys: 3 on average.
    assert flops["attention"] == 2 * (2 * 2 * 2 * 4 * sum(range(1, 6)) // 5)
    assert flops["training"] == 3 * (flops["matmul"] + flops["attention"])


def test_flops_of_a_window_by_hand():
    """Tokens attend to 1, 2, 3, 3 and 3 others in the two blocks with a window, and to 1 to 5 in
    the third."""
    shape = DecoderShape(3, 8, 2, 1, 4, 16, 10, True, sliding_window=3, global_every=3)
    pairs = 2 * (1 + 2 + 3 + 3 + 3) + (1 + 2 + 3 + 4 + 5)
    assert shape.flops_per_sample(5)["attention"] == 2 * 2 * 2 * 4 * pairs
    assert shape.flops_per_sample(2) == replace(shape, sliding_window=0).flops_per_sample(2)


def test_flops_of_experts_are_those_that_a_token_visits():
    sparse = preset_shape("mixtral-8x7b")
    dense = replace(sparse, num_experts=0, ffn_dim=2 * 14336)
    router = 32 * 4096 * 8
    assert sparse.flops_per_token(64)["matmul"] == dense.flops_per_token(64)["matmul"] + 2 * router
    assert sparse.flops_per_token(64)["attention"] == dense.flops_per_token(64)["attention"]


def test_flops_do_not_depend_on_tying():
    tied, untied = (
        DecoderShape(2, 8, 2, 1, 4, 16, 10, tie).flops_per_token(64) for tie in (True, False)
    )
    assert tied == untied


def test_six_flops_per_parameter():
    """The usual 6 N D, for a model whose embedding and attention are small beside the rest."""
    shape = preset_shape("llama2-7b")
    assert shape.flops_per_token(1)["training"] == pytest.approx(6 * shape.num_params, rel=0.03)


def test_json_round_trip():
    shape = preset_shape("llama3-8b")
    assert parse_stored_shape(json.loads(json.dumps(shape.to_json()))) == shape


# Foreign models: a real process runs tmp_path/a_probe.py in place of the real probe


ANSWER = {
    "num_params": 100,
    "num_trainable_params": 90,
    "tensors": [
        ["a.w", [2, 3], "float32"],
        ["a.s", [], "float32"],
        ["ab.w", [50], "float32"],
        ["b.w", [4, 4], "x"],
    ],
    "blocks": ["a", "b"],
}


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """Writes the probe's body; it also leaves a mark in tmp_path/runs each time it runs."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_model.py").write_text("print('a user module may print')\n")

    def write(body: str = f"print({json.dumps(json.dumps(ANSWER))})") -> None:
        runs = tmp_path / "runs"
        (tmp_path / "a_probe.py").write_text(
            f"import json, sys, time\nopen({str(runs)!r}, 'a').write(sys.argv[1] + '\\n')\n{body}\n"
        )

    return write


def runs(tmp_path: Path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "runs").read_text().splitlines()]


def test_foreign_shape(probe, tmp_path):
    probe(f"import my_model\nprint({json.dumps(json.dumps(ANSWER))})")
    shape = probe_foreign_shape("my_model:build", {"width": 3}, probe_module="a_probe")
    assert runs(tmp_path) == [{"kind": "my_model:build", "args": {"width": 3}}]
    assert shape.activations is None
    assert (shape.kind, shape.num_layers, shape.num_params, shape.block_params) == (
        "my_model:build",
        2,
        100,
        16,
    )
    assert shape.params_by_group() == {"blocks": 23, "other": 77}
    assert parse_stored_shape(json.loads(json.dumps(shape.to_json()))) == shape


def test_the_answer_is_found_behind_half_a_line_of_the_module(probe):
    """`print(".", end="")` while it builds its layers, say."""
    probe(
        "from phalanx.job.module_probe import print_answer\n"
        f"print('...', end='')\nprint_answer({ANSWER!r})\nprint('bye', end='')"
    )
    shape = probe_foreign_shape("my_model:build", {}, probe_module="a_probe")
    assert shape.num_params == 100


def test_foreign_without_blocks_is_one_block(probe):
    probe(f"print({json.dumps(json.dumps(ANSWER | {'blocks': []}))})")
    shape = probe_foreign_shape("my_model:build", {}, probe_module="a_probe")
    assert (shape.num_layers, shape.block_params) == (0, 100)


def test_foreign_cache(probe, tmp_path):
    probe()
    cache = tmp_path / "cache"

    def measure(**args):
        return probe_foreign_shape("my_model:build", args, cache, probe_module="a_probe")

    first = measure(width=3)
    assert measure(width=3) == first
    assert len(runs(tmp_path)) == 1
    measure(width=4)
    assert len(runs(tmp_path)) == 2
    (tmp_path / "my_model.py").write_text("# changed\n")
    measure(width=3)
    assert len(runs(tmp_path)) == 3
    for file in cache.iterdir():
        file.write_text("[]")
    assert measure(width=3) == first
    assert len(runs(tmp_path)) == 4
    for file in cache.iterdir():
        # Those of other arguments are still what they were made above.
        body = json.loads(file.read_text()) or {}
        file.write_text(json.dumps(body | {"num_layers": None}))
    assert measure(width=3) == first
    assert len(runs(tmp_path)) == 5


def test_foreign_cache_that_cannot_be_written(probe, tmp_path):
    probe()
    (tmp_path / "file").write_text("")
    assert (
        probe_foreign_shape(
            "my_model:build", {}, tmp_path / "file", probe_module="a_probe"
        ).num_params
        == 100
    )


ENDED = (
    "the process ended before the model was built: by C's exit, an exec or the like in your code"
)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("raise ValueError('width is missing')", "ValueError: width is missing"),
        ("sys.exit(3)", "the process ended with 3"),
        ("print('hello')", f"{ENDED}; its last words: 'hello'"),
        ("print('{}')", f"{ENDED}; its last words: '{{}}'"),
        ("print('[]')", f"{ENDED}; its last words: '[]'"),
        ("pass", ENDED),
    ],
)
def test_foreign_failure(probe, body, why):
    probe(body)
    with pytest.raises(LayoutError) as caught:
        probe_foreign_shape("my_model:build", {}, probe_module="a_probe")
    assert caught.value.exit_code == ExitCode.JOB
    assert (
        str(caught.value)
        == f"model 'my_model:build' cannot be built ({why}); check model.kind and model.args"
    )


def test_the_time_that_others_have_the_processor_is_not_the_models(probe):
    """A fifth of one processor: 0.4 s of work take 2 s. By itself the process has room for a slow
    disk."""
    cpu = min(os.sched_getaffinity(0))
    pinned = f"import os, time; os.sched_setaffinity(0, {{{cpu}}})"
    probe(f"{pinned}\nwhile time.process_time() < 0.4: pass\nprint('done')")
    spins = [sys.executable, "-c", f"{pinned}\nwhile True: pass"]
    others = [subprocess.Popen(spins) for _ in range(4)]
    try:
        wait_until(lambda: all(os.sched_getaffinity(other.pid) == {cpu} for other in others))
        assert run_request_process("a_probe", {}, timeout_s=1.4).strip() == "done"
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_foreign_timeout_ends_what_the_model_started(probe):
    probe(
        f"import subprocess\nsubprocess.Popen([{sys.executable!r}, '-c', 'import time;"
        " time.sleep(60)']).wait()"
    )
    began = time.monotonic()
    with pytest.raises(LayoutError, match="it took longer than 1 s"):
        probe_foreign_shape("my_model:build", {}, probe_module="a_probe", timeout_s=1)
    assert time.monotonic() - began < 20
