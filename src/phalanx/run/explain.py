"""`--explain`: every value of a job as it will be, and where it comes from. Trains nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.core.units import GIB, format_bytes, format_count
from phalanx.data.tokenizer import BYTE_TOKENIZER_KIND
from phalanx.job.learning_rate import (
    MAX_DEFAULT_WARMUP_STEPS,
    count_warmup_steps,
    find_scaling_rule,
    resolve_peak_learning_rate,
)
from phalanx.job.load import ValueOrigin, find_key_origins
from phalanx.job.model import find_preset_of_model
from phalanx.job.schema import Job
from phalanx.job.toml import format_toml_value
from phalanx.job.user_dataset import count_loader_processes
from phalanx.observe.units import TEXT_METRIC_UNITS, MetricUnits, choose_metric_units_of_job
from phalanx.plan.choice import AUTO, REASON_DEFAULT
from phalanx.plan.cluster import Cluster
from phalanx.plan.described_cluster import choose_cluster_of_job
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.run.needs import list_sinks_of_job
from phalanx.run.tokens import JobTokens, find_job_tokens

EXPLAIN_SCHEMA_VERSION = "phalanx.explain/1"
_AUTO_VALUES = ("auto", None)


@dataclass(frozen=True)
class ExplainedValue:
    """One value.

    `origin`: default, file, run, override, preset or derived; `where`: "job.toml:12:1".
    """

    key: str
    value: Any
    origin: str
    where: str = ""
    why: str = ""


def explain_job_values(
    job: Job, job_file: str | Path | None, overrides: Sequence[str]
) -> tuple[list[ExplainedValue], Plan]:
    """Return every key of the job in order, then what the plan adds.

    Raises LayoutError like `make_plan`.
    """
    tokens = find_job_tokens(job)
    vocab_size, vocab_why = _predict_vocabulary(tokens)
    cluster = choose_cluster_of_job(job)
    plan = make_plan(job, cluster=cluster, vocab_size=vocab_size, more=tokens.list_corpus_remarks())
    derived = _explain_values_left_open(job, plan, cluster, vocab_why)
    if job.data.tokenizer is None and tokens.default:
        if tokens.brought and tokens.brought.name:
            why = f"{tokens.brought.owner} brings it"
        else:
            why = "the default of text"
        derived["data.tokenizer"] = ExplainedValue(
            "data.tokenizer", tokens.default, "derived", why=why
        )
    origins = find_key_origins(job_file, overrides)
    values = job.to_json()
    rows = []
    for key, origin in origins.items():
        section, _, name = key.partition(".")
        rows.append(_explain_key(key, values[section][name], origin, derived.get(key)))
    return rows + _explain_plan_rows(plan, choose_metric_units_of_job(values)), plan


def _explain_key(
    key: str, value: Any, origin: ValueOrigin, derived: ExplainedValue | None
) -> ExplainedValue:
    """The value that the user gave, unless that leaves it open or a rule changes it."""
    if derived is not None and (value in _AUTO_VALUES or derived.value != value):
        return derived
    if origin.shadowed_where:
        why = f"{origin.shadowed_where} says {format_toml_value(origin.shadowed)}"
    else:
        why = ""
    return ExplainedValue(key, value, origin.kind, origin.where, why)


def _explain_values_left_open(
    job: Job, plan: Plan, cluster: Cluster, vocab_why: str
) -> dict[str, ExplainedValue]:
    """The values that replace keys which the job leaves open, and the learning rate if it
    follows the batch."""
    rows = [
        *_explain_model_keys(job, plan, vocab_why),
        *_explain_parallel_keys(plan),
        *_explain_cluster_keys(job, plan, cluster),
    ]
    if job.run.dir is None:
        rows.append(
            ExplainedValue(
                "run.dir",
                f"runs/{job.run.name}-<time>",
                "derived",
                why="named by run.name and the clock",
            )
        )
    if job.train.micro_batch_size is None:
        why = plan.value_reasons["train.micro_batch_size"]
        rows.append(
            ExplainedValue("train.micro_batch_size", plan.micro_batch_size, "derived", why=why)
        )
    if job.data.workers is None:
        if count_loader_processes(job.data) == 0:
            why = "tokens are read ahead in a thread"
        else:
            why = "your own dataset is read ahead"
        rows.append(
            ExplainedValue("data.workers", count_loader_processes(job.data), "derived", why=why)
        )
    if job.optim.lr_scaling == "auto":
        why = f"the rule of {job.optim.kind}"
        rows.append(
            ExplainedValue(
                "optim.lr_scaling", find_scaling_rule(job.optim) or "none", "derived", why=why
            )
        )
    rate = resolve_peak_learning_rate(job)
    if rate.why or job.optim.lr == "auto":
        why = rate.why or "for random weights"
        rows.append(ExplainedValue("optim.lr", rate.lr, "derived", why=why))
    if job.optim.warmup_steps is None:
        why = f"a tenth of {job.train.steps} steps, and {MAX_DEFAULT_WARMUP_STEPS} at most"
        rows.append(
            ExplainedValue("optim.warmup_steps", count_warmup_steps(job), "derived", why=why)
        )
    if job.observe.sinks is None:
        sinks = list(list_sinks_of_job(job))
        why = "tensorboard is installed" if sinks else "tensorboard is not installed"
        rows.append(ExplainedValue("observe.sinks", sinks, "derived", why=why))
    return {explained.key: explained for explained in rows}


def _explain_model_keys(job: Job, plan: Plan, vocab_why: str) -> list[ExplainedValue]:
    """The keys of [model] that the job leaves open: of the preset, of the data, or following
    from others."""
    if job.model.is_foreign:
        return []
    preset = find_preset_of_model(job.model)
    shape = plan.model_shape.to_json()
    rows = []
    for key, value in job.model.model_dump(mode="json").items():
        if value is not None or (key not in shape and key != "preset"):
            continue
        if key == "preset":
            rows.append(
                ExplainedValue(
                    "model.preset", preset.name, "derived", why="the preset where none is given"
                )
            )
        elif key in preset.values and preset.values[key] == shape[key]:
            rows.append(
                ExplainedValue(f"model.{key}", shape[key], "preset", why=f"preset {preset.name}")
            )
        elif key == "vocab_size":
            rows.append(ExplainedValue("model.vocab_size", shape[key], "derived", why=vocab_why))
        elif key == "kind":
            rows.append(
                ExplainedValue("model.kind", shape[key], "preset", why=f"preset {preset.name}")
            )
        elif key in ("num_kv_heads", "head_dim", "ffn_dim", "max_positions"):
            rows.append(
                ExplainedValue(
                    f"model.{key}",
                    shape[key],
                    "derived",
                    why=_list_reasons_of_derived_widths(key, shape),
                )
            )
        else:
            rows.append(ExplainedValue(f"model.{key}", shape[key], "default"))
    return rows


def _list_reasons_of_derived_widths(key: str, shape: dict[str, Any]) -> str:
    return {
        "num_kv_heads": f"follows from num_heads {shape['num_heads']}",
        "head_dim": f"dim {shape['dim']} / num_heads {shape['num_heads']}",
        "ffn_dim": f"follows from dim {shape['dim']} and activation {shape.get('activation')}",
        "max_positions": f"positions are {shape.get('positions')}",
    }[key]


def _explain_parallel_keys(plan: Plan) -> list[ExplainedValue]:
    """The keys of [parallel] as the plan has them; what it leaves to the ranks, or has no use for,
    stays as the job has it."""
    rows = []
    for key, value in plan.parallel.to_json().items():
        why = plan.parallel.reasons.get(key)
        if why is None or value in (AUTO, "", []):
            continue
        if key == "zero_stage" and not value:
            value = None  # which is how a job says it
        if why == REASON_DEFAULT:
            rows.append(ExplainedValue(f"parallel.{key}", value, "default"))
        else:
            rows.append(ExplainedValue(f"parallel.{key}", value, "derived", why=why))
    return rows


def _explain_cluster_keys(job: Job, plan: Plan, cluster: Cluster) -> list[ExplainedValue]:
    rows = []
    if job.precision.compute == "auto":
        why = plan.value_reasons["precision.compute"]
        rows.append(ExplainedValue("precision.compute", plan.precision, "derived", why=why))
    if job.cluster.device == "auto":
        why = plan.value_reasons["cluster.device"]
        rows.append(ExplainedValue("cluster.device", plan.device, "derived", why=why))
    if job.cluster.memory_gib is None:
        memory_gib = cluster.memory_per_rank(plan.world_size) / GIB
        why = plan.value_reasons["cluster.memory_gib"]
        rows.append(ExplainedValue("cluster.memory_gib", round(memory_gib, 2), "derived", why=why))
    return rows


def _explain_plan_rows(plan: Plan, units: MetricUnits) -> list[ExplainedValue]:
    """The rows of the plan that no key of the job says."""
    memory, tokens = plan.chosen.total_bytes, plan.model_shape.count_sample_tokens(plan.seq_len)
    noun = "sequences" if units == TEXT_METRIC_UNITS else "samples"
    rows: list[tuple[str, Any, str]] = [
        ("layout", plan.chosen.name, f"{plan.layout}: {plan.chosen.why}"),
        (
            "num_microbatches",
            plan.num_microbatches,
            f"of {plan.micro_batch_size} {noun}, per rank and step",
        ),
        ("num_params", plan.num_params, f"{format_count(plan.num_params)} parameters"),
        (
            "memory_bytes",
            memory,
            f"{format_bytes(memory)} per rank predicted, beyond interpreter and torch",
        ),
    ]
    if units == TEXT_METRIC_UNITS:
        batch = f"{plan.global_batch_size} sequences x {tokens} over all ranks"
        rows.insert(2, ("tokens_per_step", plan.global_batch_size * tokens, batch))
    return [ExplainedValue(f"plan.{key}", value, "derived", why=why) for key, value, why in rows]


def _predict_vocabulary(tokens: JobTokens) -> tuple[int | None, str]:
    """Size of the vocabulary, as far as it is known without reading the data, and why."""
    sources = tokens.sources
    if sources and all(source.facts.kind != "none" for source in sources):
        largest = max(sources, key=lambda source: source.vocab_size)
        if not any(source.is_text for source in sources):
            return (
                largest.vocab_size,
                f"the token shards in {' and '.join(one.source for one in sources)} have it",
            )
        if largest.name != BYTE_TOKENIZER_KIND:
            return largest.vocab_size, f"the tokenizer {largest.name} has it"
    return None, "bytes and the end of a document; train counts what the data needs"


def build_explained_json(
    explained: Sequence[ExplainedValue], plan: Plan, job_file: str | Path | None
) -> dict[str, Any]:
    return {
        "schema": EXPLAIN_SCHEMA_VERSION,
        "job_file": str(job_file) if job_file is not None else None,
        "values": [asdict(one) for one in explained],
        "plan": plan.to_json(),
    }
