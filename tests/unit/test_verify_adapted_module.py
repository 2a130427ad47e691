"""`verify` compares a Hugging Face model that phalanx has adapted with its own class."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_narrowing_modules import TRACE
from test_verify_judge import saw, traced

from hf_zoo import write_config
from models import CPU
from phalanx.job.hugging_face import read_model_config
from phalanx.job.load import load_job
from phalanx.job.module_probe import measure_foreign_shape
from phalanx.job.schema import Job
from phalanx.nn.hugging_face import adapter
from phalanx.plan.plan import Plan
from phalanx.verify import adapted_module
from phalanx.verify.adapted_module import compare_adapted_module_once
from phalanx.verify.cases import plan_layout_cases
from phalanx.verify.judged_layout import JudgedLayout
from phalanx.verify.scope import list_compared_quantities, list_quantities_not_compared
from phalanx.verify.trace_facts import AdapterFacts
from phalanx.verify.verdict import LayoutComparator
from phalanx.verify.verified_job import make_verified_job

pytest.importorskip("transformers")


def plan_of(directory: Path, name: str) -> tuple[Job, Plan]:
    overrides = [f"model.kind=hf:{write_config(directory, name)}", "data.seq_len=8"]
    job = make_verified_job(load_job(None, overrides), 1)
    shape = measure_foreign_shape(job)
    (case,) = plan_layout_cases(job, [("one", {})], num_ranks=1, cluster=CPU, shape=shape)
    assert case.plan is not None
    return job, case.plan


def compare(directory: Path, name: str) -> AdapterFacts:
    facts = compare_adapted_module_once(*plan_of(directory, name), directory)
    assert facts is not None
    return facts


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("llama", "LlamaForCausalLM"),
        ("gpt2", "GPT2LMHeadModel"),
        ("granitemoeshared", "GraniteMoeSharedForCausalLM"),
        ("vit", "ViTForImageClassification"),
    ],
)
def test_an_adapted_module_equals_its_own_class(
    tmp_path: Path, name: str, architecture: str
) -> None:
    assert compare(tmp_path, name) == AdapterFacts(architecture)


def change_arguments(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Have the adapter call its model with other arguments."""
    make = adapter._make_token_forward

    def make_changed(original_class: Any, head: str) -> Any:
        own_forward = original_class.forward

        def forward(self: Any, **arguments: Any) -> Any:
            return own_forward(self, **change(arguments))

        names = {"forward": forward, "__module__": __name__}
        forward.__signature__ = inspect.signature(own_forward)  # type: ignore[attr-defined]
        return make(type("Changed", (original_class,), names), head)

    monkeypatch.setattr(adapter, "_make_token_forward", make_changed)


def halve_positions(arguments: dict[str, Any]) -> dict[str, Any]:
    if arguments.get("position_ids") is None:
        return arguments
    return {**arguments, "position_ids": arguments["position_ids"] // 2}


def drop_positions(arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if key != "position_ids"}


@pytest.mark.parametrize("change", [halve_positions, drop_positions])
def test_positions_that_the_adapter_changes_or_drops_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    change_arguments(monkeypatch, change)
    facts = compare(tmp_path, "llama")
    assert facts.what == "output"
    assert facts.error > 1e-3


def test_gradients_that_are_off_name_the_parameter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = adapted_module.build_original_module

    def build_with_hook(*args: Any, **options: Any) -> Any:
        module, notes = build(*args, **options)
        weight = module.get_parameter("model.norm.weight")
        weight.register_hook(lambda gradient: 1.001 * gradient)
        return module, notes

    monkeypatch.setattr(adapted_module, "build_original_module", build_with_hook)
    facts = compare(tmp_path, "llama")
    assert (facts.what, facts.name) == ("gradient", "model.norm.weight")
    assert facts.error == pytest.approx(1e-3)


def test_it_is_compared_once_and_only_where_there_is_a_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, plan = plan_of(tmp_path, "llama")

    def refuse(*args: object) -> None:
        raise ValueError("no such\nclass")

    monkeypatch.setattr(adapted_module, "_build_own_model", refuse)
    facts = compare_adapted_module_once(job, plan, tmp_path)
    assert facts == AdapterFacts("LlamaForCausalLM", unjudged="ValueError: no such class")
    monkeypatch.undo()
    assert compare_adapted_module_once(job, plan, tmp_path) == facts
    assert compare_adapted_module_once(Job(), plan, tmp_path) is None


def test_rows_say_what_was_compared_and_differ_where_the_adapter_does(tmp_path: Path) -> None:
    _, plan = plan_of(tmp_path, "llama")
    compared = replace(TRACE, adapter=AdapterFacts("LlamaForCausalLM"))
    assert any("LlamaForCausalLM" in part for part in list_compared_quantities(plan, compared, ""))
    not_called = AdapterFacts("LlamaForCausalLM", unjudged="ValueError: no")
    unjudged = replace(TRACE, adapter=not_called)
    assert not any("Llama" in part for part in list_compared_quantities(plan, unjudged, ""))
    assert any("adapter" in part for part in list_quantities_not_compared(plan, unjudged))
    differs = AdapterFacts("LlamaForCausalLM", what="output", error=0.1)
    verdict = LayoutComparator(
        replace(traced(), adapter=differs), [saw(), saw()], JudgedLayout(2), tolerance=1e-10
    ).compare()
    assert verdict.first is not None
    assert str(verdict.first).startswith("output of the adapter is off by 1.0e-01")
    assert "LlamaForCausalLM" in verdict.first.cause


@pytest.mark.parametrize(
    ("stays", "named", "number"),
    [(None, "(the model)", 34), ("transformer.h.1.mlp", "transformer.h.1.mlp", 5)],
)
def test_modules_that_are_built_in_evaluation_mode_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays: str | None, named: str, number: int
) -> None:
    build = adapted_module.build_original_module

    def build_in_evaluation_mode(*args: Any, **options: Any) -> Any:
        module, notes = build(*args, **options)
        part = module if stays is None else module.get_submodule(stays)
        part.eval()
        return module, notes

    monkeypatch.setattr(adapted_module, "build_original_module", build_in_evaluation_mode)
    facts = compare(tmp_path, "gpt2")
    assert facts == AdapterFacts("GPT2LMHeadModel", what="mode", name=named, error=number)
    verdict = LayoutComparator(
        replace(traced(), adapter=facts), [saw(), saw()], JudgedLayout(2), tolerance=1e-10
    ).compare()
    assert verdict.first is not None
    assert str(verdict.first).startswith(f"mode {named} is off by {number:.1e}")
    assert "evaluation mode" in verdict.first.cause
    assert "dropout" in verdict.first.cause


def test_stored_weights_train_in_training_mode(tmp_path: Path) -> None:
    import transformers

    config = transformers.AutoConfig.for_model(
        **read_model_config(f"hf:{write_config(tmp_path, 'gpt2')}")
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    module = adapter.build(f"hf:{tmp_path}")
    assert all(part.training for part in module.modules())
