"""`phalanx plan --suggest-rules`: look at the module in another process, print rules to paste, perhaps judge them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.cli._arguments import override_model, split_arguments
from phalanx.cli._json import print_json
from phalanx.cli.verify import print_verification
from phalanx.core.errors import LayoutError, PhalanxError
from phalanx.core.files import read_json
from phalanx.data.prepare import prepare_corpus
from phalanx.job.foreign import foreign_shape
from phalanx.job.load import load_job
from phalanx.job.own_dataset import is_own_dataset
from phalanx.job.schema import Job
from phalanx.launch.paths import next_attempt
from phalanx.launch.supervisor import LaunchSpec, supervise
from phalanx.observe.bus import Bus
from phalanx.plan.cluster import detect_cluster
from phalanx.plan.planner import make_plan
from phalanx.run.scratch import scratch_directory
from phalanx.verify.cases import SMALL_VOCAB, judged_job

ANSWER = "suggested.json"


def suggest_rules(arguments: Sequence[str], model: str | None, *, verify_too: bool, as_json: bool) -> int:
    """The verb. Returns its exit code: that of verify, if it was asked for."""
    job_file, overrides = split_arguments(arguments)
    overrides = override_model(model, overrides)
    found = _look(load_job(job_file, overrides))
    rules: Mapping[str, Sequence[str]] = found["rules"]
    if as_json:
        print_json("suggested-rules", found)
    else:
        print("\n".join(_lines(found)))
    if not rules:
        return 0
    again = [*([job_file] if job_file else []), *overrides, f"parallel.rules={_inline(rules)}"]
    if not any(word.startswith("parallel.tp=") for word in overrides):
        again.append("parallel.tp=2")
    if verify_too:
        ranks = None if any(word.startswith("parallel.ranks=") for word in overrides) else 2
        return print_verification(again, ranks=ranks, as_json=as_json)
    return 0


def _look(job: Job) -> dict[str, Any]:
    body = judged_job(job, 1).to_json()
    body["parallel"] |= dict.fromkeys(("tp", "dp_replicate", "dp_shard", "zero_stage", "sequence_parallel"), None)
    job = Job.model_validate_json(json.dumps(body | {"parallel": body["parallel"] | {"ranks": 1, "rules": {}}}))
    plan = make_plan(job, cluster=detect_cluster("cpu"), vocab_size=SMALL_VOCAB, num_ranks=1, shape=foreign_shape(job))
    with scratch_directory("suggest") as scratch:
        run_dir, data_dir = scratch.directory, ""
        if is_own_dataset(job.data.source) and not job.data.mixture:
            data_dir = str(prepare_corpus(job.data, run_dir / "data", vocab_size=None).directory)
        spec = LaunchSpec(
            entry="phalanx.verify.suggest:main",
            payload={"job": job.to_json(), "plan": plan.to_json(), "run_dir": str(run_dir), "data_dir": data_dir},
            num_ranks=1,
            run_dir=run_dir,
            preload=("torch", "phalanx.verify.suggest"),
            stepless="looking at the module",
            grace_s=1.0,
        )
        bus = Bus(rank=-1, attempt=next_attempt(run_dir), run_dir=run_dir)
        try:
            outcome = supervise(spec, bus=bus, say=lambda line: None)
        finally:
            bus.close()
        if not (run_dir / ANSWER).exists():
            refusal = scratch.refusal_of(outcome)
            if refusal is not None and not isinstance(refusal, LayoutError):
                raise refusal
            message = scratch.message_of(outcome)
            if outcome.exit_code in (LayoutError.exit_code, 1):
                raise LayoutError("no rules can be suggested", why=message)
            raise PhalanxError(message)
        answer: dict[str, Any] = read_json(run_dir / ANSWER)
        return answer


def _lines(found: Mapping[str, Any]) -> list[str]:
    """A table of TOML with the reasons as comments."""
    rules, whole = found["rules"], found["whole"]
    lines = [f"# tried with made-up inputs: {found['fed_with']}"] if found["fed_with"] else []
    if not rules:
        why = f": {found['why_none']}" if found["why_none"] else ""
        lines += [f"# nothing of this module can be cut by a rule that was tried{why}"]
    else:
        width = max(len(_entry(pattern, text)) for pattern, (text, _) in rules.items())
        lines += ["[parallel.rules]"]
        lines += [f"{_entry(pattern, text):<{width}}  # {why}" for pattern, (text, why) in rules.items()]
    lines += [f"# whole on every rank: {pattern} ({why})" for pattern, why in whole.items()]
    if rules:
        lines.append("# phalanx verify JOB.toml parallel.tp=2 proves or refutes them, as does --verify here")
    return lines


def _entry(pattern: str, text: str) -> str:
    return f"{json.dumps(pattern)} = {json.dumps(text)}"


def _inline(rules: Mapping[str, Sequence[str]]) -> str:
    return "{" + ", ".join(_entry(pattern, rule[0]) for pattern, rule in rules.items()) + "}"
