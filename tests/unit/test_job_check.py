"""Combinations of keys that no cluster could run, each with its place and the nearest legal
value."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.core.errors import JobError
from phalanx.job.checks import faults as fault_checks
from phalanx.job.checks.run import CHECKS, run_checks
from phalanx.job.findings import list_keys_by_section
from phalanx.job.load import load_job, load_job_json
from phalanx.job.schema import Job

BASE = ("train.global_batch_size=32", "train.steps=1000")  # so that a default may change


def problems(*overrides: str, path: str | None = None) -> list[str]:
    overrides = overrides if path else (*BASE, *overrides)
    try:
        load_job(path, overrides)
    except JobError as error:
        return str(error).split("\n")
    return []


VIT = "model.kind=vit data.source=my.data:images"


def test_the_defaults_agree():
    every_key = {
        f"{section}.{key}" for section, keys in list_keys_by_section().items() for key in keys
    }
    assert run_checks(Job(), every_key, set()) == []


def test_checks_read_keys_that_exist():
    every_key = {
        f"{section}.{key}" for section, keys in list_keys_by_section().items() for key in keys
    }
    for one in CHECKS:
        assert set(one.asked_by) <= set(one.reads) <= every_key


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            "checkpoint.every=auto",
            'checkpoint.every: "auto" weighs what a save costs against how often the job fails',
        ),
        (
            "checkpoint.mtbf_hours=3",
            'checkpoint.mtbf_hours: is for checkpoint.every = "auto"; set every = "auto" as well',
        ),
        (
            "precision.loss_scale=512",
            'precision.loss_scale: is for fp16; set precision.compute = "fp16"',
        ),
        (
            "precision.compute=fp16 precision.loss_scale=512 precision.loss_scale_growth_steps=9",
            (
                "precision.loss_scale_growth_steps: is for the dynamic scale, and"
                " precision.loss_scale is a number"
            ),
        ),
        (
            "parallel.compress=topk parallel.compress_rank=2",
            'parallel.compress_rank: is for powersgd, and compress is "to',
        ),
        ("parallel.compress_fraction=0.5", "parallel.compress_fraction: is for topk"),
        (
            "parallel.compress=inte8",
            "parallel.compress: unknown compression 'inte8'; did you mean \"int8\"?",
        ),
        (
            "parallel.compress=zip",
            "parallel.compress: unknown compression 'zip'; one of none, bf16, fp16,",
        ),
        (
            "parallel.tp_chunks=4",
            "parallel.tp_chunks: is for tensor parallelism, and parallel.tp is 1; set parallel.tp",
        ),
        (
            "parallel.sequence_parallel=true",
            "parallel.sequence_parallel: is for tensor parallelism",
        ),
        (
            "parallel.ranks=1 parallel.compress=int8",
            "parallel.compress: gradients travel as int8 between ranks, and th",
        ),
        (
            "parallel.ranks=2 resilience.min_ranks=3",
            "resilience.min_ranks: wanted at most the 2 ranks of the job, was given 3; set it to 2"
            " or less, or parallel.ranks to 3 or more",
        ),
        (
            "checkpoint.keep_every=3",
            "checkpoint.keep_every: keeps some of what is removed, and without keep_last",
        ),
        (
            "model.dim=130",
            (
                "model.dim: dim 130 cannot be divided among 4 heads; nearest dim for 4 heads: 128"
                " or 136"
            ),
        ),
        (
            "model.num_heads=3",
            (
                "model.num_heads: dim 128 cannot be divided among 3 heads; nearest dim for 3"
                " heads: 126"
            ),
        ),
        (
            "model.dim=132 model.num_heads=4",
            "model.num_heads: dim 132 over 4 heads makes heads of 33, and rotary",
        ),
        (
            "model.num_kv_heads=3",
            "model.num_kv_heads: 3 key and value heads do not divide the 4 query heads",
        ),
        (
            "model.num_kv_heads=8",
            "model.num_kv_heads: 8 key and value heads do not divide the 4 query heads",
        ),
        ("model.head_dim=33", "model.head_dim: rotary positions need an even width; try 34"),
        (
            "model.preset=llama3-8",
            "model.preset: unknown preset 'llama3-8'; did you mean \"llama3-8b\"?",
        ),
        ("model.preset=zzz", "model.preset: unknown preset 'zzz'; docs/models.md"),
        (
            "model.kind=vit model.preset=gpt2",
            "model.preset: the preset gpt2 is a decoder, not a vit",
        ),
        (
            "model.preset=llama3-8b model.num_kv_heads=5",
            "model.num_kv_heads: 5 key and value heads do not divide the 32",
        ),
        ("model.image_size=32", "model.image_size: image_size is not read by a decoder"),
        (f"{VIT} model.rope_theta=3", "model.rope_theta: rope_theta is not read by a vit"),
        (
            f"{VIT} model.patch_size=5",
            "model.patch_size: patches of 5 pixels do not fill an image of 32; nearest: 4 or 8",
        ),
        (
            "model.kind=a.b:c model.dim=64",
            "model.dim: dim is not read by your own model; put it in model.args",
        ),
        (
            "model.kind=a.b:c model.preset=gpt2",
            "model.preset: preset is not read by your own model",
        ),
        (
            "model.rope_factor=4",
            "model.rope_factor: rope_factor has no effect; set model.rope_scaling",
        ),
        (
            "model.max_positions=512",
            "model.max_positions: max_positions has no effect; set model.positions=learned",
        ),
        (
            "model.preset=gpt2 model.rope_theta=9",
            "model.rope_theta: rope_theta has no effect; set model.positions=rope",
        ),
        (
            "model.global_every=2",
            "model.global_every: global_every has no effect; set model.sliding_window",
        ),
        (
            "model.expert_ffn_dim=9",
            "model.expert_ffn_dim: expert_ffn_dim has no effect; set model.num_experts",
        ),
        (
            "model.preset=mixtral-8x7b model.ffn_dim=9",
            "model.ffn_dim: ffn_dim has no effect; set model.expert_ffn_dim",
        ),
        (
            "model.preset=deepseek-v3 model.num_kv_heads=4",
            "model.num_kv_heads: num_kv_heads has no effect; leave it out",
        ),
        (
            "model.preset=deepseek-v3 model.head_dim=32",
            "model.head_dim: latent attention rotates an even part of its",
        ),
        (
            "model.kv_rank=16",
            (
                "model.kv_rank: latent attention rotates an even part of its heads of 32, and"
                " rope_head_d"
            ),
        ),
        (
            "model.rope_head_dim=8",
            "model.rope_head_dim: rope_head_dim has no effect; set model.kv_rank",
        ),
        (
            "model.preset=small-latent model.value_head_dim=64",
            "model.value_head_dim: values of 64 are wider than heads",
        ),
        (
            "model.preset=small-latent model.positions=learned",
            "model.positions: latent attention has rotary positions",
        ),
        (
            "model.rope_mscale=0.7",
            "model.rope_mscale: rope_mscale has no effect; set model.rope_scaling to yarn",
        ),
        (
            "model.rope_scaling=linear",
            "model.rope_scaling: linear scaling needs a factor above 1, and it is 1",
        ),
        (
            "model.rope_scaling=yarn model.rope_factor=4",
            "model.rope_factor: yarn scaling needs the length that the positions were made for",
        ),
        (
            "model.preset=gpt2 data.seq_len=2000",
            (
                "data.seq_len: sequences of 2000 tokens, and the model has 1024 learned positions;"
                " data.seq_len at most"
            ),
        ),
        (
            "model.num_experts=4 model.expert_ffn_dim=8 model.experts_per_token=5",
            "model.experts_per_token: a token visits 5 of 4 experts; 1 to 4",
        ),
        (
            "model.num_experts=4 model.experts_per_token=2",
            "model.experts_per_token: experts need a width",
        ),
        (
            "model.preset=deepseek-moe-16b model.num_layers=1",
            "model.num_layers: 1 of 1 blocks have no experts; at most 0",
        ),
        (
            "train.micro_batch_size=5",
            "train.micro_batch_size: micro-batches of 5 do not divide the global batch of 32",
        ),
        (
            "parallel.ranks=5",
            "parallel.ranks: a global batch of 32 sequences cannot be shared evenly by 5 ranks",
        ),
        (
            "train.micro_batch_size=8 parallel.ranks=8",
            (
                "parallel.ranks: a global batch of 32 sequences cannot be shared evenly by 8 ranks"
                " in micro-batches of 8; nearest global_batch_size: 64; or ranks: 4"
            ),
        ),
        (
            "parallel.dp_replicate=3 parallel.dp_shard=2",
            (
                "parallel.dp_shard: a global batch of 32 sequences cannot be shared evenly by 6"
                " ranks; nearest global_batch_size: 30 or 36; or ranks: 4 or 8"
            ),
        ),
        (
            "parallel.ranks=8 parallel.dp_replicate=2 parallel.dp_shard=2",
            (
                "parallel.dp_shard: dp_replicate 2 x dp_shard 2 makes 4 ranks, and parallel.ranks"
                " is 8; nearest: dp_replicate 2 x dp_shard 4, or ranks 4"
            ),
        ),
        (
            "parallel.ranks=3 parallel.tp=2",
            "parallel.tp: tp 2 does not divide the 3 ranks; nearest tp: 1 or 3",
        ),
        (
            "parallel.ranks=2 parallel.tp=2 parallel.dp_shard=2",
            "parallel.dp_shard: dp_shard 2 does not divide 1 rank, what tp 2 leaves of 2",
        ),
        (
            "parallel.ranks=6 parallel.pp=4",
            "parallel.pp: pp 4 does not divide the 6 ranks; nearest pp: 3 or 6",
        ),
        (
            "parallel.ranks=8 parallel.pp=3 parallel.tp=4",
            "parallel.tp: pp 3 x tp 4 = 12 does not divide the 8 ranks; nearest: pp=2 x tp=4",
        ),
        (
            "parallel.ranks=8 parallel.pp=2 parallel.dp_replicate=2 parallel.dp_shard=3",
            (
                "parallel.dp_shard: dp_replicate 2 x dp_shard 3 x pp 2 makes 12 ranks, and"
                " parallel.ranks is 8; nearest: dp_replicate 2 x dp_shard 2, or ranks 12"
            ),
        ),
        (
            "parallel.ranks=8 parallel.pp=2 parallel.tp=2 parallel.dp_shard=3",
            "parallel.dp_shard: dp_shard 3 does not divide 2 ranks, what pp 2 x tp 2 leaves of 8",
        ),
        (
            "parallel.ranks=12 parallel.pp=2",
            "parallel.pp: a global batch of 32 sequences cannot be shared evenly by 6 ranks",
        ),
        (
            (
                "parallel.pp=2 parallel.dp_replicate=2 parallel.dp_shard=1"
                " resilience.inject=['kill:rank=4']"
            ),
            (
                "resilience.inject[0]: 'kill:rank=4' strikes rank 4, which does not exist; ranks"
                " are 0 to 3"
            ),
        ),
        *(
            (
                f"parallel.{key}",
                (
                    f"parallel.{key.partition('=')[0]}: is for pipeline parallelism, and"
                    " parallel.pp is 1"
                ),
            )
            for key in (
                "schedule=gpipe",
                "schedule_file=a.csv",
                "stages_per_rank=2",
                "stage_blocks=[1,1]",
                "first_stage=['embed']",
                "last_stage=['norm']",
            )
        ),
        (
            "parallel.pp=2 parallel.schedule_file=a.csv parallel.schedule=gpipe",
            "parallel.schedule: is said by parallel.schedule_file already; remove one of them",
        ),
        (
            "parallel.pp=2 parallel.schedule_file=a.csv parallel.stages_per_rank=2",
            "parallel.stages_per_rank: is said by parallel.schedule_file already",
        ),
        ("parallel.pp=2 parallel.compress=bf16", "parallel.compress: not with parallel.pp: "),
        (
            "parallel.pp=2 parallel.zero_stage=3 parallel.accumulate=sharded",
            (
                "parallel.accumulate: not with parallel.pp: gradients stay whole until the last"
                " microbatch"
            ),
        ),
        (
            "parallel.pp=2 parallel.zero_stage=3 parallel.offload=parameters",
            (
                "parallel.offload: not with parallel.pp: the parameters of a stage are gathered"
                ' once for the whole step; set it to "optimizer" or "none", or parallel.pp=1'
            ),
        ),
        (
            "parallel.pp=2 train.offload_activations=true",
            "train.offload_activations: not with parallel.pp: microbatches are in flight together",
        ),
        (
            "parallel.schedule=gpip parallel.pp=2",
            'parallel.schedule: wanted one of "gpipe", "1f1b", "interleaved", ',
        ),
        (
            "parallel.rules.head=3",
            "parallel.rules.head: wanted a string, was given 3; put it in quotes",
        ),
        (
            "parallel.ranks=8 parallel.dp_shard=3",
            "parallel.dp_shard: dp_shard 3 does not divide the 8 ranks",
        ),
        (
            "train.steps=9 optim.warmup_steps=10",
            "optim.warmup_steps: a warm-up of 10 steps is longer than the 9 steps",
        ),
        (
            "train.steps=100 optim.schedule=wsd optim.warmup_steps=30 optim.decay_fraction=0.8",
            (
                "optim.decay_fraction: 30 steps of warm-up and 80 of decay are more than the 100"
                " steps of train.steps; decay_fraction at most 0.7, or warmup_steps at most 20"
            ),
        ),
        ("optim.betas=[1,0.9]", "optim.betas[0]: wanted a number below 1"),
        ("model.args.a=1", 'model.args: is for your own factory, and model.kind is "decoder"'),
        ("model.kind=a.b:", "model.kind: 'a.b:' is not package.module:factory"),
        ("model.kind=a:b:c", "model.kind: 'a:b:c' is not package.module:factory"),
        ("model.objective=a.b", "model.objective: 'a.b' is not package.module:function"),
    ],
)
def test_refused(overrides, line):
    found = problems(*overrides.split())
    assert len(found) == 1
    assert found[0].startswith(f"override: {line}")


@pytest.mark.parametrize(
    "overrides",
    [
        "parallel.ranks=4 parallel.dp_shard=2",
        "parallel.ranks=4 parallel.dp_replicate=2 parallel.dp_shard=2",
        "parallel.dp_shard=1 parallel.zero_stage=2",
        "parallel.zero_stage=2",
        "train.micro_batch_size=4 parallel.ranks=8",
        "optim.warmup_steps=10 train.steps=10",
        "train.steps=3",
        "train.steps=3 optim.schedule=wsd",
        "train.steps=60 eval.every_steps=200 checkpoint.every_steps=100",
        "optim.schedule=wsd optim.warmup_steps=200 optim.decay_fraction=0.8",
        "optim.decay_fraction=1 optim.schedule=cosine",
        "model.kind=a.b:c model.args.width=3 model.vocab_size=300",
        "model.preset=gpt2 model.dim=96 model.num_layers=2",
        "model.preset=gpt2 model.positions=rope model.rope_scaling=ntk model.rope_factor=2",
        "model.preset=qwen2.5-7b model.bias=none model.sliding_window=0 model.rope_scaling=none",
        "model.preset=mixtral-8x7b model.num_experts=4",
        "model.head_dim=24 model.num_heads=3",
        f"{VIT} model.pooling=mean model.num_classes=1000 model.qk_norm=true",
        "model.kind=a.b:Class.method model.objective=a:f",
        'resilience.inject=["kill:rank=1,step=7,phase=backward"] parallel.ranks=2',
    ],
)
def test_allowed(overrides, monkeypatch):
    monkeypatch.setattr(fault_checks, "FAULTS_PACKAGE", "phalanx.no_such_room.faults")
    assert problems(*overrides.split()) == []


def test_names_the_user_gave_not_the_defaults(tmp_path, monkeypatch):
    """Of the keys that disagree, the one told is an override, else one that stands in the file."""
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text("[train]\nglobal_batch_size = 30\n[model]\nnum_heads = 3\n")
    assert [line.split(": ")[:2] for line in problems("parallel.ranks=4", path="job.toml")] == [
        ["job.toml:4:13", "model.num_heads"],
        ["override", "parallel.ranks"],
    ]


def test_silent_about_what_was_refused_already():
    found = problems(
        "model.num_heads=x",
        "model.dim=130",
        "train.micro_batch_size=0",
        "train.global_batch_size=33",
    )
    assert [line.split(": ")[1] for line in found] == ["model.num_heads", "train.micro_batch_size"]


def test_a_short_run_can_be_resumed(tmp_path):
    """job.json holds the default warm-up as if it had been given."""
    import json

    path = tmp_path / "job.json"
    path.write_text(json.dumps(load_job(None, ["train.steps=3"]).to_json()))
    assert load_job_json(path).train.steps == 3
    with pytest.raises(JobError, match="longer than the 3 steps"):
        load_job_json(path, ["optim.warmup_steps=4"])


# Faults


@pytest.fixture
def faults(tmp_path, monkeypatch):
    """A folder of faults as phalanx.resilience will have one: kill and stall."""
    folder = tmp_path / "a_room" / "faults"
    folder.mkdir(parents=True)
    for file in (
        folder.parent / "__init__.py",
        folder / "__init__.py",
        folder / "kill.py",
        folder / "stall.py",
    ):
        file.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fault_checks, "FAULTS_PACKAGE", "a_room.faults")


@pytest.mark.usefixtures("faults")
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("kil:rank=1", ["unknown fault 'kil'; did you mean \"kill\"?"]),
        ("zzz:rank=1", ["unknown fault 'zzz'; faults are kill, stall"]),
        (":rank=1", ["':rank=1' is not fault:key=value,..."]),
        ("", ["'' is not fault:key=value,..."]),
        ("kill:", ["'kill:' is not fault:key=value,..."]),
        ("kill:rank", ["'kill:rank' is not fault:key=value,..."]),
        ("a.b::rank=1", ["'a.b:' is not package.module:function"]),
        ("kill:rank=1,,step=2", ["'' in 'kill:rank=1,,step=2' is not key=value"]),
        ("kill:rnk=1", ["unknown key 'rnk' in 'kill:rnk=1'; did you mean \"rank\"?"]),
        (
            "kill:rank=1, step=2",
            ["unknown key ' step' in 'kill:rank=1, step=2'; did you mean \"step\"?"],
        ),
        ("kill:rank=one", ["rank 'one' in 'kill:rank=one' is not a whole number"]),
        ("kill:step=-1", ["step '-1' in 'kill:step=-1' is not a whole number"]),
        ("kill:rank=1,rank=1", ["rank is given twice"]),
        ("kill:phase=forwrd", ["unknown phase 'forwrd'; did you mean \"forward\"?"]),
        ("kill:phase=zzz", ["unknown phase 'zzz'; phases are startup, data"]),
        ("kil:rnk=1,step=x", ["unknown fault", "unknown key", "step 'x'"]),
        ("kill:rank=2", ["'kill:rank=2' strikes rank 2, which does not exist; ranks are 0 to 1"]),
        ("kill:step=1001", ["'kill:step=1001' strikes at step 1001, and train.steps is 1000"]),
        ("kill", []),
        ("stall:rank=1,step=1000,phase=ckpt_write", []),
        ("my.faults:burn:rank=1", []),
        ("my.faults:burn", []),
    ],
)
def test_faults(fault, words, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(
        f'[train]\nsteps = 1000\n[parallel]\nranks = 2\n[resilience]\ninject = [\n "{fault}"]\n'
    )
    found = problems(path=str(path))
    assert len(found) == len(words)
    for line, word in zip(found, words, strict=True):
        assert line.startswith(f"{path}:7:2: resilience.inject[0]: ")
        assert word in line


@pytest.mark.parametrize("package", ["phalanx.no_such_room.faults", "phalanx.job.no_such_folder"])
def test_fault_names_are_not_judged_where_the_folder_is_absent(package, monkeypatch):
    monkeypatch.setattr(fault_checks, "FAULTS_PACKAGE", package)
    assert problems('resilience.inject=["anything:rank=0"]') == []
