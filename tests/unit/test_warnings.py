"""Early warnings: each fires where it should, with its number and its remedy, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from models import CPU
from phalanx.job.load import load_job
from phalanx.job.module_probe import probe_foreign_shape
from phalanx.job.shapes.measured import MeasuredModule
from phalanx.plan.cluster import Cluster
from phalanx.plan.explain import describe_plan
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.warnings import WARNING_RULES, DataFacts, SourceFacts

GPU = Cluster("cuda", 1, 80 * 2**30)
OWN = ("model.kind=mine:build", "model.objective=mine:objective")
PIPELINE = ("parallel.ranks=4", "parallel.pp=4", "model.num_layers=12")


def tokens(num_train: int, num_held_out: int = 10**6) -> DataFacts:
    return DataFacts("tokens", num_train, num_held_out, (SourceFacts("text", 1.0, num_train),))


def samples(num_train: int, num_held_out: int = 1000) -> DataFacts:
    return DataFacts("samples", num_train, num_held_out)


PLENTY = tokens(10**9)


def warned(
    *overrides: str,
    data: DataFacts | None = PLENTY,
    cluster: Cluster = CPU,
    num_batchnorms: int = 0,
    num_dropouts: int = 0,
    num_idle_layers: int = 0,
    num_narrow_params: int = 0,
    num_params: int = 1000,
) -> dict[str, str]:
    """Code -> text. The module is the user's where the overrides say so."""
    job = load_job(None, list(overrides))
    shape = None
    if "model.kind=mine:build" in overrides:
        shape = MeasuredModule(
            *("mine:build", 0, *(num_params,) * 4),
            num_batchnorms=num_batchnorms,
            num_dropouts=num_dropouts,
            num_idle_layers=num_idle_layers,
            num_narrow_params=num_narrow_params,
        )
    plan = make_plan(job, cluster=cluster, shape=shape, data=data)
    return {warning.code: warning.text for warning in plan.warnings}


def test_the_default_job_gets_none() -> None:
    """On the corpus that it has: some ten million tokens of the standard library."""
    assert warned(data=tokens(8_000_000, 400_000)) == {}
    assert warned(data=None) == {}


FIRES = {
    "no_warmup": [
        (
            {"overrides": ("optim.warmup_steps=0",)},
            ["learning rate of 0.003", "optim.warmup_steps, 25 say"],
        ),
        (
            {
                "overrides": (
                    "optim.warmup_steps=0",
                    "optim.lr=1e-5",
                    "train.global_batch_size=4096",
                )
            },
            ["524,288 tokens", "optim.warmup_steps"],
        ),
        (
            {
                "overrides": (
                    "optim.warmup_steps=0",
                    "optim.lr=1e-5",
                    "train.global_batch_size=512",
                ),
                "data": samples(9999),
            },
            ["512 samples"],
        ),
    ],
    "lr_ignores_batch": [
        ({"overrides": ("optim.reference_batch_size=4",)}, ["16", "0.003", "4", "lr_scaling=auto"])
    ],
    "few_batchnorm_samples": [
        (
            {
                "overrides": (*OWN, "parallel.ranks=2", "train.micro_batch_size=2"),
                "num_batchnorms": 3,
            },
            ["3 BatchNorm", "over 4 of 16 samples", "train.micro_batch_size"],
        ),
        (
            {
                "overrides": (*OWN, "parallel.ranks=2", "parallel.sync_batchnorm=false"),
                "num_batchnorms": 3,
            },
            ["8 samples each, not the 16 of all 2 ranks", "parallel.sync_batchnorm"],
        ),
    ],
    "dropout_depends_on_layout": [
        (
            {"overrides": (*OWN, "parallel.ranks=2", "parallel.dropout=local"), "num_dropouts": 2},
            ["2 dropout layers", "2 ranks", "parallel.dropout=global"],
        ),
        (
            {
                "overrides": (
                    *OWN,
                    "parallel.ranks=2",
                    "train.compile=true",
                    "train.recompute=full",
                ),
                "num_dropouts": 1,
            },
            ["1 dropout layer ", "train.compile=false"],
        ),
    ],
    "trains_in_evaluation_mode": [
        (
            {"overrides": OWN, "num_dropouts": 3, "num_idle_layers": 2},
            ["2 dropout or BatchNorm layers of mine:build", "evaluation mode", ".train()"],
        ),
    ],
    "trains_narrow_parameters": [
        (
            {"overrides": OWN, "num_narrow_params": 900},
            ["900 of 1.00 K parameters of mine:build", "in 16 bits", ".float()"],
        ),
    ],
    "samples_of_other_length": [
        (
            {"data": DataFacts("samples", 10**9, 10**9, sample_tokens=2048)},
            ["have 2048 tokens", "for data.seq_len=128", "set data.seq_len=2048"],
        ),
    ],
    "dataset_below_batch": [
        ({"data": samples(10)}, ["10 samples", "batch of 16", "train.global_batch_size"]),
        ({"data": tokens(128 * 10 + 5)}, ["10 sequences"]),
    ],
    "many_epochs": [
        (
            {"data": tokens(100_000)},
            ["10.2 epochs over the 100,000 tokens of text", "train.steps=195"],
        ),
        (
            {
                "data": DataFacts(
                    "tokens",
                    10**9,
                    10**6,
                    (SourceFacts("a", 0.5, 10**9), SourceFacts("b", 0.5, 50_000)),
                )
            },
            ["10.2 epochs over the 50,000 tokens of b", "less weight"],
        ),
    ],
    "small_held_out": [
        ({"data": tokens(10**9, 400)}, ["400 held-out tokens", "0.10 nats", "hold out more"]),
        ({"data": samples(9984, 50)}, ["50 held-out samples", "uncertain by 7%"]),
        ({"overrides": ("eval.tokens=1000",)}, ["1,000 held-out tokens", "raise eval.tokens"]),
    ],
    "high_lr_of_trained_weights": [
        (
            {"overrides": ("model.init_from=old", "optim.lr=3e-3")},
            ["lr 0.003", "model.init_from=old", "trained already", "leave optim.lr out for 2e-05"],
        ),
        (
            {"overrides": ("model.init_from=old", "optim.lr=0.1", "optim.kind=sgd")},
            ["lr 0.1", "leave optim.lr out for 0.001"],
        ),
        (
            {"overrides": ("model.init_from=old", "optim.kind=mine:build")},
            ["lr 0.003", "what your optimizer needs"],
        ),
    ],
    "saved_at_the_end_only": [
        (
            {"overrides": ("train.steps=5000",)},
            ["only after the last of 5,000 steps", "checkpoint.every_minutes"],
        ),
        ({"overrides": ("train.steps=5000", "checkpoint.at_end=false")}, ["never in 5,000 steps"]),
    ],
    "evaluated_at_the_end_only": [
        (
            {"overrides": ("train.steps=60", "eval.every_steps=200")},
            ["eval.every_steps=200 never comes in 60 steps", "only the end is evaluated"],
        ),
    ],
    "saves_never_come": [
        (
            {"overrides": ("train.steps=60", "checkpoint.every_steps=200")},
            ["checkpoint.every_steps=200 never comes in 60 steps", "only the end is saved"],
        ),
        (
            {"overrides": ("train.steps=1", "checkpoint.every_steps=2", "checkpoint.at_end=false")},
            ["in 1 step:", "nothing is saved"],
        ),
        *(
            (
                {
                    "overrides": (
                        *(
                            "train.steps=60",
                            "checkpoint.every_steps=200",
                            "checkpoint.at_end=false",
                        ),
                        *keys,
                    )
                },
                [f"never comes in 60 steps: what saves is {key}"],
            )
            for key, *keys in (
                ("checkpoint.every_minutes=5", "checkpoint.every_minutes=5"),
                ("checkpoint.every=auto", "checkpoint.every=auto", "checkpoint.mtbf_hours=100"),
                ("eval.keep_best", "eval.keep_best=true", "eval.every_steps=10"),
            )
        ),
    ],
    "fp32_on_gpu": [
        (
            {
                "overrides": (*OWN, "precision.compute=fp32"),
                "cluster": GPU,
                "num_params": 50_000_000,
            },
            ["50.0 M parameters", "precision.compute=bf16"],
        )
    ],
    "pipeline_bubble": [
        (  # equal stages would wait 3 / (2 + 3)
            {"overrides": (*PIPELINE, "train.micro_batch_size=8")},
            [
                "wait 60% of each step",
                "2 microbatches on 4 ranks",
                "train.micro_batch_size=1 (16 microbatches: ",
            ],
        ),
        (
            {"overrides": (*PIPELINE, "train.global_batch_size=4", "train.micro_batch_size=1")},
            [
                "4 microbatches on 4 ranks",
                "train.global_batch_size=16 with train.micro_batch_size=1",
                "=interleaved (",
            ],
        ),
    ],
    "pipeline_compiled": [
        (
            {
                "overrides": (
                    *PIPELINE,
                    "train.compile=true",
                    "parallel.schedule=interleaved-zero-bubble",
                )
            },
            [
                "schedule interleaved-zero-bubble puts off gradients",
                "train.compile leaves nothing",
                "of each step",
            ],
        ),
    ],
}
FIRES_FLAT = [
    pytest.param(code, case, words, id=f"{code}-{i}")
    for code, cases in FIRES.items()
    for i, (case, words) in enumerate(cases)
]

SILENT = [
    ("no_warmup", {"overrides": ("optim.warmup_steps=0", "optim.lr=5e-4")}),
    ("no_warmup", {"overrides": ("optim.warmup_steps=0", "optim.kind=sgd", "optim.lr=0.05")}),
    ("no_warmup", {"overrides": ("optim.warmup_steps=1", "train.global_batch_size=4096")}),
    ("lr_ignores_batch", {"overrides": ("optim.reference_batch_size=16",)}),
    ("lr_ignores_batch", {"overrides": ("optim.reference_batch_size=4", "optim.lr_scaling=sqrt")}),
    ("high_lr_of_trained_weights", {"overrides": ("model.init_from=old",)}),
    ("high_lr_of_trained_weights", {"overrides": ("model.init_from=old", "optim.lr=1e-4")}),
    ("high_lr_of_trained_weights", {"overrides": ("optim.lr=3e-3",)}),
    ("few_batchnorm_samples", {"overrides": (*OWN, "parallel.ranks=2"), "num_batchnorms": 3}),
    (
        "few_batchnorm_samples",
        {"overrides": (*OWN, "parallel.ranks=2", "train.micro_batch_size=2")},
    ),
    (
        "few_batchnorm_samples",
        {
            "overrides": (*OWN, "parallel.ranks=1", "parallel.sync_batchnorm=false"),
            "num_batchnorms": 3,
        },
    ),
    ("dropout_depends_on_layout", {"overrides": (*OWN, "parallel.ranks=2"), "num_dropouts": 2}),
    (
        "dropout_depends_on_layout",
        {"overrides": (*OWN, "parallel.ranks=1", "parallel.dropout=local"), "num_dropouts": 2},
    ),
    ("trains_in_evaluation_mode", {"overrides": OWN, "num_dropouts": 2}),
    ("trains_narrow_parameters", {"overrides": OWN}),
    ("samples_of_other_length", {"data": DataFacts("samples", 10**9, 10**9, sample_tokens=128)}),
    (
        "samples_of_other_length",
        {
            "overrides": (*OWN, "data.source=mine:data"),
            "data": DataFacts("samples", 10**9, 10**9, sample_tokens=2048),
        },
    ),
    ("dataset_below_batch", {"data": samples(16)}),
    ("many_epochs", {"data": tokens(256_000)}),
    ("many_epochs", {"data": samples(100)}),
    ("small_held_out", {"data": tokens(10**9, 0)}),
    ("small_held_out", {"data": tokens(10**9, 400), "overrides": ("eval.tokens=0",)}),
    ("small_held_out", {"data": samples(9984, 200)}),
    ("saved_at_the_end_only", {"overrides": ("train.steps=5000", "checkpoint.every_minutes=5.0")}),
    ("saved_at_the_end_only", {"overrides": ("train.steps=5000", "checkpoint.every_steps=500")}),
    (
        "saved_at_the_end_only",
        {"overrides": ("train.steps=5000", "checkpoint.every=auto", "checkpoint.mtbf_hours=9")},
    ),
    ("saved_at_the_end_only", {"overrides": ("train.steps=1500",)}),
    ("evaluated_at_the_end_only", {"overrides": ("train.steps=60", "eval.every_steps=60")}),
    ("saves_never_come", {"overrides": ("train.steps=60", "checkpoint.every_steps=60")}),
    (
        "fp32_on_gpu",
        {"overrides": (*OWN, "precision.compute=bf16"), "cluster": GPU, "num_params": 50_000_000},
    ),
    ("fp32_on_gpu", {"overrides": (*OWN, "precision.compute=fp32"), "num_params": 50_000_000}),
    ("fp32_on_gpu", {"overrides": (*OWN, "precision.compute=fp32"), "cluster": GPU}),
    (
        "fp32_on_gpu",
        {"overrides": OWN, "cluster": GPU, "num_params": 50_000_000},
    ),  # a reason of the plan says why
    ("pipeline_bubble", {"overrides": PIPELINE}),
    ("pipeline_compiled", {"overrides": (*PIPELINE, "train.compile=true")}),
    ("pipeline_compiled", {"overrides": (*PIPELINE, "parallel.schedule=interleaved-zero-bubble")}),
    ("pipeline_bubble", {"overrides": (*PIPELINE, "train.micro_batch_size=1")}),
    ("pipeline_bubble", {"overrides": ("parallel.ranks=4", "train.micro_batch_size=4")}),
]


def ask(case: dict[str, object]) -> dict[str, str]:
    return warned(
        *case.get("overrides", ()),
        **{key: value for key, value in case.items() if key != "overrides"},
    )  # type: ignore[misc,arg-type]


@pytest.mark.parametrize(("code", "case", "words"), FIRES_FLAT)
def test_it_fires_with_number_and_remedy(
    code: str, case: dict[str, object], words: list[str]
) -> None:
    found = ask(case)
    assert [word for word in words if word not in found.get(code, "")] == [], found


@pytest.mark.parametrize(("code", "case"), SILENT)
def test_it_is_silent(code: str, case: dict[str, object]) -> None:
    assert code not in ask(case)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            samples(100),
            (
                "100 samples make 6 batches of 16 and 4 over: nothing is dropped, the batch that"
                " ends an epoch "
            ),
        ),
        (samples(96), None),  # nothing is over
        (samples(10_000), None),  # no epoch ends
        (tokens(100_000), None),
    ],
)
def test_the_plan_says_what_becomes_of_samples_that_fill_no_batch(
    data: DataFacts, said: str | None
) -> None:
    reasons = make_plan(load_job(None), cluster=CPU, data=data).reasons
    assert [reason for reason in reasons if "nothing is dropped" in reason] == [
        reason for reason in reasons if said is not None and reason.startswith(said)
    ]
    assert any("nothing is dropped" in reason for reason in reasons) == (said is not None)


def test_every_rule_is_tried_both_ways() -> None:
    assert isinstance(WARNING_RULES, tuple), "nobody adds to it"
    assert {code for code, _ in WARNING_RULES} == set(FIRES) == {code for code, _ in SILENT}


def test_the_plan_says_and_keeps_them() -> None:
    plan = make_plan(load_job(None, ["optim.warmup_steps=0"]), cluster=CPU)
    assert [line for line in describe_plan(plan) if line.startswith("warn    no warm-up")]
    assert Plan.from_json(plan.to_json()).warnings == plan.warnings
    assert replace(plan, warnings=()).to_json()["warnings"] == []


MODULE = """
from torch import nn


def build():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.1), nn.Dropout2d(0.0), nn.LSTM(4, 4, 2, dropout=0.2),
        nn.MultiheadAttention(4, 1, dropout=0.1), nn.BatchNorm1d(4),
    )
"""


def test_layers_of_an_own_module_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "counted.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    measured = probe_foreign_shape("counted:build", {})
    assert (measured.num_batchnorms, measured.num_dropouts) == (2, 3)
