"""What every hook of phalanx.parallel.hooks keeps, whichever it is: covered by being in the
folder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from phalanx.core.phases import PhaseTimer
from phalanx.core.registry import import_object_of_kind, list_modules_of_registry
from phalanx.job.json_schema import build_job_json_schema
from phalanx.job.load import load_job
from phalanx.mesh.compat import silence_torch_warnings
from phalanx.parallel.data_parallel.compression import (
    COMPRESSION_HOOKS_PACKAGE,
    GradientCompression,
)
from phalanx.parallel.hooks._protocol import CompressionOptions
from phalanx.parallel.traffic import GradientTraffic, count_ring_all_reduce_bytes
from phalanx.parallel.wire import Wire
from phalanx.plan.workload import has_error_feedback
from ranks import run_ranks

KINDS = list_modules_of_registry(COMPRESSION_HOOKS_PACKAGE)
SHAPES = {
    "bias": (1,),
    "vector": (300,),
    "matrix": (64, 33),
    "kernel": (6, 5, 3, 3),
    "small": (2, 3),
    "nothing": (0, 4),
}
SETTINGS = CompressionOptions(rank=2, fraction=0.05, seed=3)
TOLERANCE = {"bf16": 2e-2, "fp16": 2e-3}  # of casts, relative to the size of what is added up
EXACT_IN_ANY_ORDER = (
    "int8",
    "topk",
)  # each rank's part is sent to every other, which adds them up in the order of ranks


class Bench:
    """The parameters of one model on one rank, and gradients for them."""

    def __init__(self, kind: str) -> None:
        self.parameters = {
            name: nn.Parameter(torch.zeros(shape).double()) for name, shape in SHAPES.items()
        }
        self.traffic = GradientTraffic()
        hook = import_object_of_kind(kind, COMPRESSION_HOOKS_PACKAGE, "build")(SETTINGS)
        wire = Wire(dist.group.WORLD, self.traffic, PhaseTimer())  # type: ignore[arg-type]
        self.compression = GradientCompression(hook, self.parameters.items(), wire)

    def gradients(self, step: int) -> dict[str, torch.Tensor]:
        """Small ones, as a mean over many tokens is: some of their elements are below what fp16
        can hold."""
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        return {
            n: 1e-6 * torch.randn(s, generator=generator, dtype=torch.float64)
            for n, s in SHAPES.items()
        }

    def reduce(self, gradients: dict[str, torch.Tensor], buckets: list[list[str]]) -> None:
        for bucket in buckets:
            self.compression.average_gradients_over_ranks(
                [self.parameters[n] for n in bucket], [gradients[n] for n in bucket]
            )

    def errors(self) -> dict[str, torch.Tensor]:
        return {
            name: error.clone()
            for name, error in self.compression.error_feedback_gradients().items()
        }


def mean(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


WHOLE = [list(SHAPES)]
APART = [["kernel"], ["matrix", "nothing", "vector"], ["small", "bias"]]


def use_all(rank: int) -> dict[str, dict[str, Any]]:
    silence_torch_warnings()
    return {kind: use(kind) for kind in KINDS}


def use(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {"lost": {}, "unequal": [], "by bucket": {}}
    bench, other = Bench(kind), Bench(kind)
    for step in range(3):
        gradients, before = bench.gradients(step), bench.errors()
        wanted = {
            name: mean(g + before.get(name, torch.zeros_like(g))) for name, g in gradients.items()
        }
        sizes = {name: mean(g.abs()) for name, g in gradients.items()}
        bench.traffic.sent_bytes = 0.0
        bench.reduce(gradients, WHOLE)
        found["sent_bytes"] = round(bench.traffic.sent_bytes)
        after = bench.errors()
        for name, gradient in gradients.items():
            off = gradient + mean(after.get(name, torch.zeros_like(gradient))) - wanted[name]
            lost = (off.norm() / sizes[name].norm()).item() if off.numel() else 0.0
            found["lost"][name] = max(found["lost"].get(name, 0.0), lost)
            every = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
            dist.all_gather(every, gradient)
            found["unequal"] += [name for one in every if not torch.equal(one, every[0])]
        again = other.gradients(step)
        other.reduce(again, APART)
        for name, gradient in gradients.items():
            note_difference(found["by bucket"], name, again[name], gradient, sizes[name])
        for name, error in other.errors().items():
            note_difference(found["by bucket"], f"error of {name}", error, after[name], sizes[name])
    num_bytes = sum(p.nbytes for p in bench.parameters.values()) // 2  # as fp32 would be
    found["plain_bytes"] = count_ring_all_reduce_bytes(num_bytes, dist.get_world_size())
    found |= spoil(bench)
    return found


def note_difference(
    differences: dict[str, float],
    name: str,
    one: torch.Tensor,
    other: torch.Tensor,
    size: torch.Tensor,
) -> None:
    """Keep the largest difference of two tensors under `name`, relative to `size`.

    Equal bits leave no entry.
    """
    if not torch.equal(one, other):
        difference = ((one - other).norm() / size.norm()).item()
        differences[name] = max(differences.get(name, 0.0), difference)


def spoil(bench: Bench) -> dict[str, Any]:
    """One rank's gradient is not finite in one place."""
    found: dict[str, Any] = {}
    for value in (float("nan"), float("inf")):
        gradients = bench.gradients(9)
        if dist.get_rank() == 1:
            gradients["matrix"][40, 7] = value
        bench.reduce(gradients, WHOLE)
        found[f"{value} arrives"] = not gradients["matrix"].isfinite().all()
        found[f"{value} elsewhere"] = all(
            g.isfinite().all() for n, g in gradients.items() if n != "matrix"
        )
        found[f"{value} stays"] = not all(
            error.isfinite().all() for error in bench.errors().values()
        )
    zeros = {name: torch.zeros(shape).double() for name, shape in SHAPES.items()}
    bench.reduce(zeros, WHOLE)
    found["finite again"] = all(g.isfinite().all() for g in zeros.values())
    return found


@pytest.fixture(scope="module", params=[2, 3], ids=["two ranks", "three ranks"])
def seen(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(request.param, use_all)


Seen = list[dict[str, dict[str, Any]]]


def test_the_folder_is_what_a_job_can_name() -> None:
    offered = build_job_json_schema()["properties"]["parallel"]["properties"]["compress"]["enum"]
    assert offered == ["none", *KINDS]
    for kind in KINDS:
        assert load_job(None, [f"parallel.compress={kind}"]).parallel.compress == kind


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_counts_the_bytes_of_what_it_keeps(kind: str) -> None:
    assert (
        has_error_feedback(kind)
        == import_object_of_kind(kind, COMPRESSION_HOOKS_PACKAGE, "build")(SETTINGS).keeps_error
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_and_what_is_kept_add_up_to_the_mean(seen: Seen, kind: str) -> None:
    for found in seen:
        assert {
            name: lost
            for name, lost in found[kind]["lost"].items()
            if lost > TOLERANCE.get(kind, 1e-12)
        } == {}


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_get_the_same_bits(seen: Seen, kind: str) -> None:
    assert seen[0][kind]["unequal"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_buckets_do_not_matter(seen: Seen, kind: str) -> None:
    """Torch cuts them otherwise in the first step of a process than later.

    Where more than two ranks add floating-point numbers on the way, the order depends on the place
    in the buffer, as it does without compression: then the sums are equal but for rounding.
    """
    allowed = 0.0 if len(seen) == 2 or kind in EXACT_IN_ANY_ORDER else TOLERANCE.get(kind, 1e-12)
    differences = seen[0][kind]["by bucket"]
    assert {
        name: difference for name, difference in differences.items() if difference > allowed
    } == {}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_on_one_rank_is_not_on_any_and_stays_in_no_error(
    seen: Seen, kind: str
) -> None:
    for found in seen:
        for value in ("nan", "inf"):
            assert found[kind][f"{value} arrives"]
            assert found[kind][f"{value} elsewhere"]
            assert not found[kind][f"{value} stays"]
        assert found[kind]["finite again"]


@pytest.mark.parametrize(("kind", "share"), [("bf16", 0.5), ("fp16", 0.51), ("int8", 0.27)])
def test_bytes(seen: Seen, kind: str, share: float) -> None:
    """Of fp32's; of fp16 with a limit for each parameter, of int8 with a scale for each block."""
    for found in seen:
        assert (
            share - 0.02 <= found[kind]["sent_bytes"] / found[kind]["plain_bytes"] <= share + 1e-3
        )


def test_bytes_of_what_sends_a_part(seen: Seen) -> None:
    """topk: value and place of each element, to each other rank. powersgd: two thin matrices,
    all that is no matrix."""
    ranks = len(seen)
    counts = [max(1, round(0.05 * n)) for n in (1, 300, 64 * 33, 6 * 45, 6)]
    assert seen[0]["topk"]["sent_bytes"] == (ranks - 1) * sum(counts) * (8 + 4)
    numbers = 2 * (64 + 33) + 2 * (6 + 45) + 1 + 300 + 6
    assert seen[0]["powersgd"]["sent_bytes"] == pytest.approx(
        count_ring_all_reduce_bytes(numbers * 8, ranks), abs=1
    )
