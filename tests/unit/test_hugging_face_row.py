"""The row "hugging-face" of verify: phalanx's modules beside those of transformers, by export and
import.

All of it runs in one forked process: transformers takes seconds to import.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models import CPU
from phalanx.checkpoint.exchange import families, translate
from phalanx.checkpoint.exchange.families import list_hugging_face_families
from phalanx.checkpoint.exchange.importing import WeightsToImport
from phalanx.core.errors import LayoutError
from phalanx.job.presets import list_preset_names
from phalanx.job.schema import Job
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.nn import norms, rotary
from phalanx.nn.routing import Router
from phalanx.plan.plan import Plan
from phalanx.verify import float64_casts, hugging_face_row
from phalanx.verify.batches import cast_steps_to_dtype, make_global_microbatches
from phalanx.verify.cases import plan_layout_cases
from phalanx.verify.float64_casts import cast_to_float64
from phalanx.verify.hugging_face_row import (
    FILES_NOT_JUDGED,
    compare_with_hugging_face,
    explain_no_hugging_face_row,
)
from phalanx.verify.row import Row
from phalanx.verify.verified_job import make_verified_job, shrink_job
from ranks import run_ranks

SEQ_LEN = 32
# Frequencies of heads of 8 features lie on both sides of it, and positions beyond it.
ORIGINAL_LEN = 16


@dataclass(frozen=True)
class Model:
    preset: str
    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    documents: bool = False

    @property
    def name(self) -> str:
        return " ".join((self.preset, *self.changes))


def scaled(kind: str) -> dict[str, Any]:
    return {"rope_scaling": kind, "rope_factor": 4.0, "rope_original_len": ORIGINAL_LEN}


MIXTRAL = Model("mixtral-8x7b", "mixtral", {"expert_capacity": 1.0, "balance_loss": 0.01})
MODELS = [
    Model("small", "llama"),
    Model("llama3.1-8b", "llama", scaled("llama3"), documents=True),
    Model("llama3.2-3b", "mistral"),
    Model("mistral-7b", "mistral", scaled("yarn"), documents=True),
    Model("qwen2.5-0.5b", "qwen2"),
    Model("qwen3-0.6b", "qwen3"),
    Model("gemma-2b", "gemma"),
    Model("gemma3-1b", "gemma3_text", documents=True),
    Model("gpt2", "gpt2", documents=True),
    MIXTRAL,
    Model("qwen3-30b-a3b", "qwen3_moe", {"router_normalize": False}),
    Model("small-latent", "deepseek_v3", scaled("yarn")),
    Model("small-deepseek", "dots1", {"qk_norm": True, "num_shared_experts": 2}),
    Model("small-deepseek", "glm4_moe"),
    Model("small-vit", "vit"),
]
# V2 without experts is written as V3, and the class of DeepSeek-MoE is not in transformers.
NEVER_WRITTEN = {"deepseek_v2", "deepseek"}


def make_plan(model: Model) -> tuple[Job, Plan]:
    data: dict[str, Any] = {"seq_len": SEQ_LEN, "document_masks": model.documents}
    if "vit" in model.preset:
        data["source"] = "my.data:images"
    body = {"model": {"preset": model.preset, **model.changes}, "data": data}
    job = make_verified_job(shrink_job(Job.model_validate(body))[0], 1)
    (case,) = plan_layout_cases(job, [("one", {})], num_ranks=1, cluster=CPU, shape=None)
    assert case.plan is not None, case.refused
    return job, case.plan


def judge(model: Model, place: Path) -> Row:
    job, plan = make_plan(model)
    steps = cast_steps_to_dtype(
        make_global_microbatches(job, plan, None, num_steps=2), torch.float64
    )
    return compare_with_hugging_face(job, plan, steps, place)


def judge_all(rank: int, models: Sequence[Model], place: Path) -> dict[str, Row]:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    return {model.name: judge(model, place) for model in models}


NARROWED = "with casts to float32"


def judge_narrowed(place: Path) -> Row:
    """transformers as it is: its casts are to float32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float64_casts, "_widen_float32_dtype", lambda value: value)
        return judge(MODELS[0], place)


def judge_models_and_mistakes(rank: int, place: Path) -> dict[str, Row]:
    rows = judge_all(rank, MODELS, place) | judge_mistakes(place)
    return rows | {NARROWED: judge_narrowed(place)}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    pytest.importorskip("transformers")
    place = tmp_path_factory.mktemp("rows")
    found = run_ranks(1, judge_models_and_mistakes, place)[0]
    assert list(place.iterdir()) == []
    return found  # type: ignore[no-any-return]


def test_every_family_that_is_exported_is_judged() -> None:
    judged = {model.model_type for model in MODELS}
    assert judged | NEVER_WRITTEN == {family.model_type for family in list_hugging_face_families()}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_families_are_equal(model: Model, rows: Mapping[str, Row]) -> None:
    row = rows[model.name]
    assert row.ok, row.first
    assert row.tolerance == 1e-10
    assert 0 < row.errors["gradient"] < 1e-13
    (family,) = [
        family for family in list_hugging_face_families() if family.model_type == model.model_type
    ]
    assert family.architecture in row.notes[0]


def test_what_is_left_out_is_said(rows: Mapping[str, Row]) -> None:
    assert rows["small"].not_judged == (FILES_NOT_JUDGED,)
    words = " ".join(rows[MIXTRAL.name].not_judged)
    assert "balance loss" in words
    assert "capacity" in words
    assert "biases" not in words
    assert "biases" in " ".join(rows["small-deepseek"].not_judged)


@pytest.mark.long
def test_every_preset_is_equal_or_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    models, refused = [], set()
    for name in list_preset_names():
        model = Model(name, "")
        if explain_no_hugging_face_row(*make_plan(model)):
            refused.add(name)
        else:
            models.append(model)
    assert refused == {"deepseek-moe-16b", "deepseek-v2-lite", "deepseek-v3"}
    rows = run_ranks(1, judge_all, models, tmp_path)[0]
    assert {name: row.first for name, row in rows.items() if not row.ok} == {}


# Mistakes


def reverse_ramp(patch: pytest.MonkeyPatch) -> None:
    share = rotary._compute_llama3_kept_share
    patch.setattr(rotary, "_compute_llama3_kept_share", lambda *args: 1 - share(*args))


def halve_the_gradient(patch: pytest.MonkeyPatch) -> None:
    forward = rotary.rotate

    def half(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        y = forward(x, table)
        return y / 2 + y.detach() / 2

    patch.setattr("phalanx.nn.attention.rotate", half)


def enlarge_eps(patch: pytest.MonkeyPatch) -> None:
    build = norms.build_norm

    def with_more(*args: Any) -> Any:
        norm = build(*args)
        norm.eps *= 1.5
        return norm

    patch.setattr("phalanx.nn.block.build_norm", with_more)


def enlarge_weights(patch: pytest.MonkeyPatch) -> None:
    forward = Router.forward

    def more(self: Router, x_BTD: torch.Tensor) -> Any:
        routing = forward(self, x_BTD)
        return routing._replace(weights_BTK=routing.weights_BTK * 1.01)

    patch.setattr(Router, "forward", more)


def swap_gate_and_up(patch: pytest.MonkeyPatch) -> None:
    parse = families._parse_name_rule

    def parse_other(their_pattern: str, entry: Any) -> Any:
        for name, other in ((".gate_proj.", ".up_proj."), (".up_proj.", ".gate_proj.")):
            if name in their_pattern:
                return parse(their_pattern.replace(name, other), entry)
        return parse(their_pattern, entry)

    patch.setattr(families, "_parse_name_rule", parse_other)


def swap_gate_and_up_of_imports(patch: pytest.MonkeyPatch) -> None:
    read = hugging_face_row.read_hugging_face_directory

    def read_other(directory: Path) -> WeightsToImport:
        weights = read(directory)
        swapped = {".ffn.gate.": ".ffn.up.", ".ffn.up.": ".ffn.gate."}
        tensors = []
        for tensor in weights.tensors:
            for name, other in swapped.items():
                if name in tensor.name:
                    tensor = replace(tensor, name=tensor.name.replace(name, other))
                    break
            tensors.append(tensor)
        return replace(weights, tensors=tuple(tensors))

    patch.setattr(hugging_face_row, "read_hugging_face_directory", read_other)


def misname_exports(patch: pytest.MonkeyPatch) -> None:
    merge = translate._merge_phalanx_tensors

    def misname(their_name: str, *args: Any) -> Any:
        if their_name.endswith("layers.1.mlp.up_proj.weight"):
            their_name = their_name.replace("up_proj", "upward")
        return merge(their_name, *args)

    patch.setattr(translate, "_merge_phalanx_tensors", misname)


def read_another_base(patch: pytest.MonkeyPatch) -> None:
    read = hugging_face_row.read_hugging_face_directory

    def read_other(directory: Path) -> WeightsToImport:
        weights = read(directory)
        assert isinstance(weights.shape, DecoderShape)
        return replace(weights, shape=replace(weights.shape, rope_theta=11.0))

    patch.setattr(hugging_face_row, "read_hugging_face_directory", read_other)


@dataclass(frozen=True)
class Mistake:
    """`what` differs first, of one of the tensors `names`; the cause says `cause`."""

    plant: Callable[[pytest.MonkeyPatch], None]
    model: Model = MODELS[0]
    what: str = "loss"
    names: tuple[str, ...] = ("",)
    cause: str = "the reference itself may be wrong"


Q_OR_K = ("blocks.1.attention.q.weight", "blocks.1.attention.k.weight")
MISTAKES = {
    "frequencies": Mistake(reverse_ramp, MODELS[1]),
    "gradient": Mistake(halve_the_gradient, what="gradient", names=Q_OR_K),
    "eps": Mistake(enlarge_eps),
    "weights of experts": Mistake(enlarge_weights, MIXTRAL),
    "exported names": Mistake(swap_gate_and_up, cause="what is exported is another model"),
    "imported names": Mistake(
        swap_gate_and_up_of_imports,
        what="gradient",
        names=("blocks.1.ffn.up.weight",),
        cause="is imported under another name",
    ),
    "a name that transformers does not know": Mistake(
        misname_exports,
        what="exported weight",
        names=("blocks.1.ffn.up.weight",),
        cause="missing keys: model.layers.1.mlp.up_proj.weight",
    ),
    "imported settings": Mistake(
        read_another_base, what="imported config.json", cause="its rope_theta is 11.0"
    ),
}


def judge_mistakes(place: Path) -> dict[str, Row]:
    rows = {}
    for name, mistake in MISTAKES.items():
        with pytest.MonkeyPatch.context() as patch:
            mistake.plant(patch)
            families._load_family_from_toml.cache_clear()
            rows[name] = judge(mistake.model, place)
    families._load_family_from_toml.cache_clear()
    return rows


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_found(case: str, rows: Mapping[str, Row]) -> None:
    """Of phalanx.nn, and of the names of exports and imports."""
    row, mistake = rows[case], MISTAKES[case]
    assert not row.ok
    assert row.first is not None
    assert (row.first.what, row.first.step) == (mistake.what, 0)
    assert row.first.name in mistake.names
    assert mistake.cause in row.first.cause


# What cannot be judged


@pytest.mark.parametrize(
    ("preset", "words"),
    [("deepseek-v3", "kv_rank"), ("deepseek-moe-16b", "transformers has no DeepseekForCausalLM")],
)
def test_a_model_that_transformers_has_not_is_refused(
    preset: str, words: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(LayoutError, match=words):
        judge(Model(preset, ""), tmp_path)


def test_without_transformers_the_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def find_others(name: str, package: str | None = None) -> Any:
        return None if name == "transformers" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_others)
    assert "not installed" in explain_no_hugging_face_row(*make_plan(MODELS[0]))


def test_what_narrows_all_the_same_is_judged_by_float32(rows: Mapping[str, Row]) -> None:
    row = rows[NARROWED]
    assert row.ok
    assert row.tolerance == 1e-5
    assert 1e-10 < row.errors["gradient"] < 1e-5
    assert "fewer digits" in row.notes[1]


def test_casts_to_float32_are_to_float64() -> None:
    x = torch.full((3,), 1 / 3, dtype=torch.float64)
    with cast_to_float64() as casts:
        results = [
            x.to(torch.float32),
            x.float(),
            x.type(torch.float32),
            torch.softmax(x, -1, dtype=torch.float32),
            torch.arange(3, dtype=torch.float32),
            torch.zeros(3),
        ]
        assert {result.dtype for result in results} == {torch.float64}
        assert torch.equal(results[0], x)
        assert not casts.is_narrowed
        assert x.bfloat16().dtype is torch.bfloat16
        assert casts.is_narrowed
    assert x.float().dtype is torch.float32
    assert torch.get_default_dtype() is torch.float32
