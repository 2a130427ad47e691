"""Parameter counts against published models; FLOPs against counting by hand; foreign models against a real process."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from phalanx.core.errors import ExitCode, LayoutError
from phalanx.job.foreign import probe_foreign_shape
from phalanx.job.load import load_job
from phalanx.job.shape import ModelShape, default_ffn_dim, shape_of

# The counts that the models' own checkpoints sum to (Hugging Face safetensors metadata).
PUBLISHED = {
    "llama-2-7b": (ModelShape(32, 4096, 32, 32, 128, 11008, 32000, False), 6_738_415_616),
    "llama-3-8b": (ModelShape(32, 4096, 32, 8, 128, 14336, 128256, False), 8_030_261_248),
    "tinyllama-1.1b": (ModelShape(22, 2048, 32, 4, 64, 5632, 32000, False), 1_100_048_384),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name):
    shape, count = PUBLISHED[name]
    assert shape.num_params == count
    groups = shape.params_by_group()
    assert list(groups) == ["embedding", "attention", "ffn", "norms", "head"]
    assert sum(groups.values()) == count
    outside = groups["embedding"] + groups["head"] + shape.norm_params
    assert shape.num_layers * shape.block_params + outside == count


def test_gpt2_like_variants():
    """Two matrices and LayerNorm: GPT-2 small has 124,439,808; less biases of linears and learned positions."""
    shape = ModelShape(12, 768, 12, 12, 64, 3072, 50257, True, gated_ffn=False, norm="layernorm")
    biases = 12 * (3 * 768 + 768 + 3072 + 768)
    assert shape.num_params + biases + 1024 * 768 == 124_439_808


def test_shape_of_job():
    job = load_job(None, ["model.dim=256", "model.num_heads=8", "model.num_layers=3"])
    shape = shape_of(job, 1000)
    assert shape == ModelShape(3, 256, 8, 8, 32, 704, 1000, True)
    assert shape.params_by_group()["head"] == 0
    given = shape_of(load_job(None, ["model.num_kv_heads=2", "model.ffn_dim=100", "model.tie_embeddings=false"]), 10)
    assert (given.num_kv_heads, given.ffn_dim, given.params_by_group()["head"]) == (2, 100, 1280)


def test_default_ffn_dim_is_the_next_multiple_of_32():
    for dim in range(1, 3000):
        ffn = default_ffn_dim(dim)
        assert ffn % 32 == 0
        assert ffn - 32 < 8 * dim / 3 <= ffn


def test_flops_by_hand():
    shape = ModelShape(2, 8, 2, 1, 4, 16, 10, True)
    flops = shape.flops_per_token(5)
    weights = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8 + 3 * 8 * 16  # q, k, v, o and SwiGLU
    assert flops["matmul"] == 2 * (2 * weights + 10 * 8)
    # Two matmuls (scores, values) of 2 heads x 4 wide over 1, 2, 3, 4 and 5 keys: 3 on average.
    assert flops["attention"] == 2 * (2 * 2 * 2 * 4 * sum(range(1, 6)) // 5)
    assert flops["training"] == 3 * (flops["matmul"] + flops["attention"])


def test_flops_do_not_depend_on_tying():
    tied, untied = (ModelShape(2, 8, 2, 1, 4, 16, 10, tie).flops_per_token(64) for tie in (True, False))
    assert tied == untied


def test_six_flops_per_parameter():
    """The usual 6 N D, for a model whose embedding and attention are small beside the rest."""
    shape = PUBLISHED["llama-2-7b"][0]
    assert shape.flops_per_token(1)["training"] == pytest.approx(6 * shape.num_params, rel=0.03)


def test_json_round_trip():
    shape = PUBLISHED["llama-3-8b"][0]
    assert ModelShape.from_json(json.loads(json.dumps(shape.to_json()))) == shape


# Foreign models: a real process runs tmp_path/a_probe.py in place of the real probe


ANSWER = {
    "num_params": 100,
    "num_trainable_params": 90,
    "tensors": [["a.w", [2, 3], "float32"], ["a.s", [], "float32"], ["ab.w", [50], "float32"], ["b.w", [4, 4], "x"]],
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
    assert not shape.is_known
    assert (shape.kind, shape.num_layers, shape.num_params, shape.block_params) == ("my_model:build", 2, 100, 16)
    assert shape.params_by_group() == {"blocks": 23, "other": 77}
    assert ModelShape.from_json(json.loads(json.dumps(shape.to_json()))) == shape


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


def test_foreign_cache_that_cannot_be_written(probe, tmp_path):
    probe()
    (tmp_path / "file").write_text("")
    assert probe_foreign_shape("my_model:build", {}, tmp_path / "file", probe_module="a_probe").num_params == 100


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("raise ValueError('width is missing')", "ValueError: width is missing"),
        ("sys.exit(3)", "the process ended with 3"),
        ("print('hello')", "the probe printed 'hello' instead of its answer"),
        ("print('{}')", "the probe printed '{}' instead of its answer"),
        ("print('[]')", "the probe printed '[]' instead of its answer"),
        ("pass", "the probe printed '' instead of its answer"),
    ],
)
def test_foreign_failure(probe, body, why):
    probe(body)
    with pytest.raises(LayoutError) as caught:
        probe_foreign_shape("my_model:build", {}, probe_module="a_probe")
    assert caught.value.exit_code == ExitCode.JOB
    assert str(caught.value) == f"model 'my_model:build' cannot be built ({why}); check model.kind and model.args"


def test_foreign_timeout_ends_what_the_model_started(probe):
    probe(f"import subprocess\nsubprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(60)']).wait()")
    began = time.monotonic()
    with pytest.raises(LayoutError, match="it took longer than 1 s"):
        probe_foreign_shape("my_model:build", {}, probe_module="a_probe", timeout_s=1)
    assert time.monotonic() - began < 20
