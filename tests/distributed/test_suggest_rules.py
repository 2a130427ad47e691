"""`phalanx plan --suggest-rules`: what it proposes equals the plain loop, and what it cannot
tell stays whole."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from test_tensor_parallel_zoo import SHAPE, Wanted, require_equal

import tp_zoo
from commands import run
from models import CPU
from phalanx.job.schema import Job
from phalanx.plan.planner import make_plan
from phalanx.plan.rules import CUTTING_KINDS
from phalanx.suggest.search import suggest_rules
from phalanx.verify.batches import make_global_microbatches
from phalanx.verify.verified_job import SHRUNK_VOCAB_SIZE
from ranks import run_ranks

ZOO = (
    "mixer",
    "gqa",
    "fused_gqa",
    "interleaved_groups",
    "interleaved_heads",
    "conv1d",
    "fused_gate",
    "normed_inside",
)
HARD = {  # a module of which something can be cut -> a rule that must be there
    "flat": ("layers.*", "replicate divide=n_head"),
    "experts": ("layers.*.inner.experts.*.0", "column"),
    "gated_output": ("layers.*.inner.fc1", "column"),
    "number": ("layers.*.inner", "region"),
    "chain": ("layers.*.inner.three", "replicate"),
    "encoder": ("layers.*.linear1", "column"),
    "by_settings": ("layers.*.inner", "region divide=settings.num_heads,settings.num_kv_heads"),
    "dropped_around": ("layers.*.inner", "region"),
    "windowed": ("layers.*.inner", "region divide=num_heads"),
}
WHOLE = {  # a module whose blocks stay whole -> a part of the reason
    "position_bias": "its forward fails with a part of them",
    "head_temperature": "its forward fails with a part of them",
    "talking_heads": "depends on all features",
    "gamma": "its forward fails with a part of them",
    "layer_norm": "depends on all features",
    "batch_norm": "its forward fails with a part of them",
    "twice": "called more than once",
    "peeks": "no pair of layers",
    "by_weight": "never calls it",
    "dropping": "drops at random between its matrices",
}
Rules = dict[str, tuple[str, str]]


def job_of(kind: str, **parallel: Any) -> Job:
    model = {"kind": kind}
    return Job.model_validate(
        {"model": model, "data": {"seq_len": tp_zoo.SEQ_LEN}, "parallel": parallel}
    )


def suggestions(rank: int, kinds: list[str]) -> dict[str, tuple[Rules, dict[str, str]]]:
    found = {}
    for kind in kinds:
        job = job_of(kind, ranks=1)
        plan = dataclasses.replace(
            make_plan(job, cluster=CPU, shape=SHAPE), vocab_size=SHRUNK_VOCAB_SIZE
        )
        said = suggest_rules(
            job, plan, make_global_microbatches(job, plan, None, num_steps=1)[0][0]
        )
        found[kind] = (said.rules, said.whole)
    return found


def test_the_rules_that_a_person_wrote_are_found() -> None:
    found = run_ranks(1, suggestions, [f"tp_zoo:{name}" for name in ZOO])[0]
    for name in ZOO:
        rules = {pattern: text for pattern, (text, _) in found[f"tp_zoo:{name}"][0].items()}
        written = getattr(tp_zoo, name)().shard_rules
        for pattern, text in written.items():
            if text.split()[0] in CUTTING_KINDS or text.startswith("replicate"):
                assert rules[pattern] == text, (name, pattern)
        assert set(rules) - set(written) <= {
            "embed",
            "head",
            "layers.*.tokens",
            "layers.*.channels",
        }


@pytest.mark.long
def test_what_is_proposed_for_hard_ones_equals_the_plain_loop() -> None:
    kinds = [f"tp_zoo_hard:{name}" for name in (*HARD, *WHOLE)]
    found = run_ranks(1, suggestions, kinds)[0]
    for name, why in WHOLE.items():
        rules, whole = found[f"tp_zoo_hard:{name}"]
        assert set(rules) == {"embed", "head"}, name
        assert any(why in reason for pattern, reason in whole.items() if "inner" in pattern), (
            name,
            whole,
        )
    wanted: Wanted = {}
    for name, (pattern, text) in HARD.items():
        rules, _ = found[f"tp_zoo_hard:{name}"]
        assert rules[pattern][0] == text
        assert all(why for _, why in rules.values())
        chosen = {pattern: text for pattern, (text, _) in rules.items()}
        wanted[name] = (job_of(f"tp_zoo_hard:{name}", rules=chosen), ("tp4", "ddp-tp2"))
    require_equal(wanted)


@pytest.mark.long
def test_from_a_module_to_a_job_that_is_equal(tmp_path: Path) -> None:
    """As a person does it: look, paste, verify; a bare module is refused before, and says what
    to do."""
    (tmp_path / "tp_zoo.py").write_text(Path(tp_zoo.__file__).read_text())
    job = 'model.kind = "tp_zoo:without_rules"\ndata.seq_len = 8\n'
    (tmp_path / "job.toml").write_text(job)
    refused = run("verify", "job.toml", "parallel.tp=2", "--ranks", "2", cwd=tmp_path)
    assert refused.code == 3
    assert "--suggest-rules" in refused.out
    said = run("plan", "--suggest-rules", "job.toml", cwd=tmp_path)
    assert said.code == 0, said.err
    assert said.out.startswith("[parallel.rules]\n")
    assert '"layers.*.inner.fc1" = "column"' in said.out
    (tmp_path / "job.toml").write_text(job + said.out)
    done = run("verify", "job.toml", "parallel.tp=2", "--ranks", "2", "--json", cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    assert [json.loads(line)["ok"] for line in done.out.splitlines()] == [True, True]
