"""A module whose building was recorded gets, parameter by parameter, the numbers of one that was
built plainly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hf_zoo import ZOO, write_config
from phalanx.core.block_sizes import BlockSizes, use_block_sizes
from phalanx.core.errors import LayoutError
from phalanx.job.load import load_job
from phalanx.job.schema import Model
from phalanx.job.shapes.measured import MeasuredModule
from phalanx.mesh import recorded_operations
from phalanx.mesh.logical import Box, LogicalShard, collect_module_shards
from phalanx.mesh.recorded_init import (
    NotRecordableError,
    build_module_and_record,
    get_initial_values_of_module,
)
from phalanx.nn.build import build_own_module
from phalanx.nn.probe import describe_module_for_planner
from phalanx.plan.cluster import Cluster
from phalanx.plan.planner import make_plan
from ranks import run_ranks

SEED = 5


class Drawn(nn.Module):
    """Draws in many ways, reads numbers, and overwrites what it has drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16, padding_idx=0)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32) for _ in range(3))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("rates", 1 / 10 ** (torch.arange(8) / 8), persistent=False)
        self.register_buffer("noise", torch.rand(3))
        self.scale = torch.rand(3)
        self.nested = [torch.ones(2) * 3, {"more": torch.randn(2)}]
        self.drop_rates = [rate.item() for rate in torch.linspace(0, 0.3, 3)]
        self.norm = float(self.layers[0].linear1.weight.detach().norm())
        nn.init.trunc_normal_(self.embed.weight, std=0.02)
        nn.init.orthogonal_(self.layers[0].linear1.weight)
        for name, parameter in self.named_parameters():
            if name.endswith("linear2.weight"):
                parameter.data.mul_(0.5)
                parameter.data[0] = 0
            if name.endswith("norm1.weight"):
                parameter.data = torch.randn(16)


class WithTable(nn.Module):
    """Has a buffer that no random number is in, and one that is drawn before the last layer."""

    def __init__(self, *, has_noise: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        if has_noise:
            self.register_buffer("noise", torch.rand(3))
        self.last = nn.Linear(4, 4)
        self.register_buffer("rates", 1 / 10 ** (torch.arange(4) / 4))


class FromArrays(nn.Module):
    """Has parameters that numpy and other parameters give it."""

    def __init__(self) -> None:
        super().__init__()
        self.given = nn.Parameter(torch.from_numpy(np.random.RandomState(0).randn(4, 4)))
        self.conv, self.norm, self.recurrent = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LSTM(3, 4)
        self.copied = nn.Parameter(self.conv.weight.data.clone())
        self.permuted = nn.Parameter(torch.randperm(5).float())
        self.transposed = nn.Parameter(torch.randn(3, 5).t())
        self.frozen = nn.Parameter(torch.tensor([1.0, 2.0]), requires_grad=False)


def build_seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(SEED)
    return build()


def record_seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(SEED)
    return build_module_and_record(build)


def fill(module: nn.Module) -> None:
    """Give a recorded module memory, and fill all of it."""
    recorded = get_initial_values_of_module(module)
    assert recorded is not None
    assert all(parameter.is_meta for parameter in module.parameters())
    first_places: dict[int, tuple[nn.Module, str]] = {}
    again: list[tuple[nn.Module, str, int]] = []
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if id(parameter) in first_places:
                again.append((part, name, id(parameter)))
            first_places.setdefault(id(parameter), (part, name))
    module._apply(
        lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor
    )
    # torch makes a new parameter at each place of a tied one.
    for part, name, key in again:
        first, first_name = first_places[key]
        setattr(part, name, getattr(first, first_name))
    shards, _ = collect_module_shards(module)
    recorded.fill_parameter_shards(shards)


def require_same_tensors(found: nn.Module, expected: nn.Module) -> None:
    for kind in ("named_parameters", "named_buffers"):
        tensors, references = (
            dict(getattr(module, kind)(remove_duplicate=False)) for module in (found, expected)
        )
        assert tensors.keys() == references.keys()
        assert [n for n in tensors if not torch.equal(tensors[n], references[n])] == []
        assert [n for n in tensors if tensors[n].stride() != references[n].stride()] == []
        grads = [n for n in tensors if tensors[n].requires_grad != references[n].requires_grad]
        assert grads == []


@pytest.mark.parametrize("build", [Drawn, FromArrays])
def test_recorded_numbers_are_those_of_a_plain_build(build: Callable[[], nn.Module]) -> None:
    expected, found = build_seeded(build), record_seeded(build)
    if isinstance(found, Drawn):
        assert found.head.weight is found.embed.weight
    fill(found)
    require_same_tensors(found, expected)
    if isinstance(expected, Drawn):
        assert isinstance(found, Drawn)
        assert torch.equal(found.scale, expected.scale)
        assert torch.equal(found.nested[0], expected.nested[0])
        assert torch.equal(found.nested[1]["more"], expected.nested[1]["more"])
        assert (found.drop_rates, found.norm) == (expected.drop_rates, expected.norm)


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", *(pytest.param(name, marks=pytest.mark.long) for name in ZOO)]
)
def test_models_of_transformers_are_recorded(name: str, tmp_path: Path) -> None:
    if name in ("bert", "t5"):
        pytest.skip("it is no causal language model")
    pytest.importorskip("transformers")
    model = Model.model_validate({"kind": f"hf:{write_config(tmp_path, name)}"})
    expected = build_own_module(model, 3)
    found = build_own_module(model, 3, is_recorded=True)
    fill(found)
    require_same_tensors(found, expected)


@pytest.mark.parametrize(
    ("name", "is_stored", "options"),
    [
        ("llama", True, {}),
        ("gpt2", True, {"max_shard_size": "20KB"}),
        # transformers keeps the matrices of experts together, and files have each alone.
        ("qwen3_moe", False, {}),
    ],
)
def test_weights_of_a_directory_are_read_by_blocks(
    name: str, is_stored: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(write_config(tmp_path / "config", name))
    torch.manual_seed(1)
    saved = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    saved.save_pretrained(tmp_path / "model", **options)
    model = Model.model_validate({"kind": f"hf:{tmp_path / 'model'}"})
    expected = build_own_module(model, 3)
    found = build_own_module(model, 3, is_recorded=True)
    initial = get_initial_values_of_module(found)
    assert (initial is not None) == is_stored
    if initial is None:
        return
    digest = initial.digest
    fill(found)
    require_same_tensors(found, expected)
    again = get_initial_values_of_module(build_own_module(model, 4, is_recorded=True))
    assert again is not None
    assert again.digest == digest
    with torch.no_grad():
        saved.lm_head.weight[-1, -1] += 1.0
    saved.save_pretrained(tmp_path / "model", **options)
    other = get_initial_values_of_module(build_own_module(model, 3, is_recorded=True))
    assert other is not None
    assert other.digest != digest


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(
    is_recorded: bool, tmp_path: Path
) -> None:
    """Of a large model and of a small one: transformers leaves the two apart."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    path = write_config(tmp_path / "config", "llama", tie_word_embeddings=True)
    config = transformers.AutoConfig.from_pretrained(path)
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    stored = load_file(file)
    head = stored["model.embed_tokens.weight"].clone()
    model = Model.model_validate({"kind": f"hf:{tmp_path / 'model'}"})
    save_file({**stored, "lm_head.weight": head}, file, {"format": "pt"})
    tied: Any = build_own_module(model, 3, is_recorded=is_recorded)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert (get_initial_values_of_module(tied) is not None) == is_recorded
    # In the middle, where no sample is taken.
    head[len(head) // 2, 0] += 1.0
    save_file({**stored, "lm_head.weight": head}, file, {"format": "pt"})
    with pytest.raises(LayoutError, match=r"lm_head\.weight is not model\.embed") as caught:
        build_own_module(model, 3, is_recorded=is_recorded)
    assert caught.value.fix == "set model.args = { tie_word_embeddings = false }"
    mended = Model.model_validate(
        {"kind": f"hf:{tmp_path / 'model'}", "args": {"tie_word_embeddings": False}}
    )
    found: Any = build_own_module(mended, 3, is_recorded=is_recorded)
    if is_recorded:
        fill(found)
    assert torch.equal(found.lm_head.weight, head)


def test_a_rank_gets_its_own_blocks() -> None:
    expected, found = build_seeded(FromArrays), record_seeded(FromArrays)
    recorded = get_initial_values_of_module(found)
    assert recorded is not None
    whole = expected.conv.weight.detach()
    boxes = (
        Box((0, 0, 0, 0), (0, 0, 0, 0), (1, 3, 3, 3)),
        Box((3, 0, 0, 0), (1, 0, 0, 0), (1, 3, 3, 3)),
    )
    shard = LogicalShard("conv.weight", (4, 3, 3, 3), "float32", boxes, torch.zeros(2, 3, 3, 3))
    doubled = replace(shard, tensor=torch.zeros(2, 3, 3, 3, dtype=torch.float64))
    for each in (shard, doubled):
        recorded.fill_parameter_shards({"conv.weight": each})
        assert torch.equal(each.tensor, whole[[0, 3]].to(each.tensor.dtype))


KEPT: list[Any] = []


class Reseeding(nn.Linear):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(2, 2)


class OwnGenerator(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        nn.init.normal_(self.weight, generator=torch.Generator().manual_seed(0))


class Hiding(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        KEPT.append(self.weight)


class SharingMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(4, 2)
        self.first, self.second = nn.Parameter(both[:2]), nn.Parameter(both[2:])


class Before(nn.Module):
    weight = nn.Parameter(torch.ones(2))

    def __init__(self) -> None:
        super().__init__()
        self.own = Before.weight


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (Reseeding, r"it calls torch\.manual_seed"),
        (OwnGenerator, "generator of its own"),
        (Hiding, "where they are not found"),
        (SharingMemory, "shares its memory"),
        (Before, "that were there before"),
    ],
)
def test_what_cannot_be_recorded_is_told(build: Callable[[], nn.Module], why: str) -> None:
    try:
        with pytest.raises(NotRecordableError, match=why):
            record_seeded(build)
    finally:
        KEPT.clear()


def test_such_a_module_is_built_plainly() -> None:
    found = build_own_module(
        Model.model_validate({"kind": f"{__name__}:Reseeding"}), 0, is_recorded=True
    )
    assert get_initial_values_of_module(found) is None
    assert not any(parameter.is_meta for parameter in found.parameters())
    # What refuses while it records is gone.
    torch.manual_seed(0)


def test_a_plan_counts_the_start_of_what_is_built_whole() -> None:
    with use_block_sizes(replace(BlockSizes(), recorded_init_bytes=1)):
        described = {
            name: describe_module_for_planner(f"{__name__}:{name}", {})["is_built_whole"]
            for name in ("Reseeding", "Drawn")
        }
    assert described == {"Reseeding": True, "Drawn": False}
    keys = ["model.kind=own:module", "parallel.ranks=4", "parallel.zero_stage=3"]
    job = load_job(None, [*keys, "cluster.memory_gib=16", "cluster.device=cpu"])
    shape = MeasuredModule("own:module", 0, 2**28, 2**28, 2**28, 0)
    plans = [
        make_plan(job, shape=replace(shape, is_built_whole=whole), cluster=Cluster("cpu", 4, 2**34))
        for whole in (False, True)
    ]
    (line,) = set(plans[1].reasons) - set(plans[0].reasons)
    assert line.startswith("start: ")
    assert "1.0 GiB of host memory beside the 1.0 GiB" in line
    assert plans[1].model_shape.is_built_whole
    with pytest.raises(LayoutError, match=r"needs 2\.0 GiB of a machine's 1\.0 GiB"):
        make_plan(job, shape=replace(shape, is_built_whole=True), cluster=Cluster("cpu", 4, 2**30))


@pytest.mark.parametrize(("has_noise", "num_drawn"), [(False, 0), (True, 2)])
def test_nothing_is_drawn_after_the_last_random_number_that_is_needed(
    has_noise: bool, num_drawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of billions of parameters takes minutes to draw."""
    drawn = []
    monkeypatch.setattr(recorded_operations, "_draw_and_discard", drawn.append)
    module = record_seeded(lambda: WithTable(has_noise=has_noise))
    assert torch.equal(module.get_buffer("rates"), WithTable().get_buffer("rates"))
    assert len(drawn) == num_drawn
    drawn.clear()
    recorded = get_initial_values_of_module(module)
    assert recorded is not None
    box = Box((0, 0), (0, 0), (4, 4))
    shard = LogicalShard("first.weight", (4, 4), "float32", (box,), torch.zeros(4, 4))
    recorded.fill_parameter_shards({"first.weight": shard})
    assert drawn == []
    assert torch.equal(shard.tensor, build_seeded(WithTable).get_parameter("first.weight"))


def test_digests_tell_other_numbers_apart() -> None:
    def make(width: int) -> Callable[[], nn.Module]:
        return lambda: nn.Linear(4, width)

    digests = []
    for build, seed in ((make(3), 0), (make(3), 0), (make(3), 1), (make(5), 0)):
        torch.manual_seed(seed)
        recorded = get_initial_values_of_module(build_module_and_record(build))
        assert recorded is not None
        digests.append(recorded.digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def _measure_peak(rank: int) -> tuple[float, float]:
    """MiB of the parameters, and what filling an eighth of each took beyond that eighth."""
    module = build_module_and_record(
        lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24)))
    )
    recorded = get_initial_values_of_module(module)
    assert recorded is not None
    shards = {}
    for name, parameter in module.named_parameters():
        shape = tuple(parameter.shape)
        size = (shape[0] // 8, *shape[1:])
        start = (0,) * len(shape)
        box = Box(start, start, size)
        shards[name] = LogicalShard(name, shape, "float32", (box,), torch.zeros(size))
    Path("/proc/self/clear_refs").write_text("5")
    before = _read_status("VmRSS")
    recorded.fill_parameter_shards(shards)
    return sum(p.numel() for p in module.parameters()) / 2**18, _read_status("VmHWM") - before


def _read_status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def test_filling_takes_memory_for_a_few_tensors_and_not_for_the_module() -> None:
    (found,) = run_ranks(1, _measure_peak)
    whole_mib, peak_mib = found
    assert whole_mib > 96
    assert peak_mib < whole_mib / 3
