"""Fits of `phalanx bench`: known constants come back from noisy points, and stay within bounds."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.bench.fits import ConstantRange, fit_constants
from phalanx.bench.items import CPU_MATMUL_SHAPES, list_bench_items, list_group_sizes
from phalanx.bench.sections import (
    choose_clock_basis,
    find_accelerator_by_device_name,
    fit_section,
)
from phalanx.core.errors import UsageError
from phalanx.plan.cluster import Cluster
from phalanx.plan.profiles import (
    FittedRate,
    MachineProfile,
    ProfileSection,
    TimedOperation,
    describe_calibration,
    evaluate_linear_fit,
    evaluate_matmul_fit,
    find_profile_of_cluster,
    get_profile_path,
    load_profile,
    save_profile,
)

CPU = Cluster("cpu", 2, 2**34)
SIZES = (8 * 2**10, 64 * 2**10, 512 * 2**10, 4 * 2**20, 32 * 2**20)


def measure(kind: str, seconds: float, **values: object) -> TimedOperation:
    row = TimedOperation(kind, "", "fp32", (), 2, 1, seconds, seconds, seconds, seconds, 0.0, 9)
    return replace(row, **values)


@pytest.mark.parametrize(("latency_s", "per_s"), [(50e-6, 2e9), (3e-3, 1e8), (2e-5, 1e10)])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_latency_and_bandwidth_come_back(latency_s: float, per_s: float, noise: float) -> None:
    """Of a collective whose points are off by a few per cent, one of them by far more."""
    generator = random.Random(7)
    truth = {"overhead_s": latency_s, "per_s": per_s}
    rows = []
    for size in SIZES * 3:
        seconds = evaluate_linear_fit(truth, size) * math.exp(generator.gauss(0, noise))
        rows.append(measure("all_reduce", seconds, size=(size,), num_bytes=float(size)))
    # Somebody else was computing.
    rows[1] = replace(rows[1], seconds=6 * rows[1].seconds)
    (fit,) = fit_section(rows, CPU)
    assert fit.values["overhead_s"] == pytest.approx(latency_s, rel=0.02 + 4 * noise)
    assert fit.values["per_s"] == pytest.approx(per_s, rel=0.02 + 4 * noise)
    assert fit.residual is not None
    assert fit.residual < 0.01 + 2 * noise
    assert fit.worst is not None
    assert fit.worst > 0.5, "the outlier is told, not forgotten"


def test_constants_of_products_come_back() -> None:
    truth = {
        "overhead_s": 4e-6,
        "flops_per_s": 9e10,
        "rows_half": 12.0,
        "cols_half": 20.0,
        "inner_half": 6.0,
    }
    generator = random.Random(3)
    rows = []
    for shape in CPU_MATMUL_SHAPES * 2:
        seconds = evaluate_matmul_fit(truth, *shape) * math.exp(generator.gauss(0, 0.02))
        rows.append(measure("matmul", seconds, size=shape, flops=2.0 * math.prod(shape)))
    (fit,) = fit_section(rows, CPU)
    assert fit.values["flops_per_s"] == pytest.approx(9e10, rel=0.05)
    assert fit.values["overhead_s"] == pytest.approx(4e-6, rel=0.3)
    for shape in ((192, 320, 448), (1024, 1024, 256)):
        assert evaluate_matmul_fit(fit.values, *shape) == pytest.approx(
            evaluate_matmul_fit(truth, *shape), rel=0.04
        )


def test_a_constant_stays_within_its_bounds_and_the_residual_says_so() -> None:
    """Times that no link can have: the bandwidth ends at its bound instead of explaining them."""
    bounds = {"overhead_s": ConstantRange(1e-6, 1e-3, 1e-5), "per_s": ConstantRange(1e6, 1e9, 1e8)}
    points = [((float(size),), 1e-5 + size / 1e11) for size in SIZES]
    result = fit_constants(
        lambda values, size: evaluate_linear_fit(values, size[0]), bounds, points
    )
    assert result.values["per_s"] == pytest.approx(1e9)
    assert result.residual > 0.5


def test_what_no_point_tells_stays_at_its_prior() -> None:
    """Messages so small that their bandwidth is nothing."""
    bounds = {"overhead_s": ConstantRange(1e-6, 1.0, 1e-4), "per_s": ConstantRange(1e6, 1e12, 3e9)}
    points = [((float(size),), 5e-3) for size in (8, 64, 512)]
    result = fit_constants(
        lambda values, size: evaluate_linear_fit(values, size[0]), bounds, points
    )
    assert result.values["overhead_s"] == pytest.approx(5e-3, rel=0.01)
    assert result.values["per_s"] == pytest.approx(3e9, rel=0.05)


def test_a_line_through_as_few_points_as_constants_has_no_residual() -> None:
    rows = [
        measure("send", 1e-3 + size / 1e9, size=(size,), num_bytes=float(size))
        for size in SIZES[:2]
    ]
    (fit,) = fit_section(rows, CPU)
    assert fit.residual is None
    assert fit_section(rows[:1], CPU) == ()


def test_what_is_hidden_of_a_message_beside_products() -> None:
    rows = []
    for size in SIZES:
        for mode, seconds in (("compute", 3e-3), ("all_reduce", 2e-3), ("together", 4e-3)):
            rows.append(measure("overlap", seconds, mode=mode, size=(size,)))
    (fit,) = fit_section(rows, CPU)
    assert fit.values["hidden_share"] == pytest.approx(0.5)


def test_ranks_at_once_are_compared_with_one_of_as_many_threads() -> None:
    rows = []
    for num_ranks, slower in ((1, 1.0), (2, 1.25)):
        for shape in CPU_MATMUL_SHAPES:
            flops = 2.0 * math.prod(shape)
            seconds = slower * flops / 8e10
            rows.append(measure("matmul", seconds, size=shape, flops=flops, num_ranks=num_ranks))
    crowds = [fit for fit in fit_section(rows, CPU) if fit.kind == "crowd"]
    assert [fit.values["slowdown"] for fit in crowds] == [pytest.approx(1.25, rel=0.01)]


def test_a_busy_cpu_is_measured_by_its_own_seconds() -> None:
    assert choose_clock_basis(CPU, 0.02) == "wall"
    assert choose_clock_basis(CPU, 0.5) == "processor"
    assert choose_clock_basis(Cluster("cuda", 8, 2**36), 0.5) == "wall"
    rows = []
    for size in (2**16, 2**20, 2**24):
        seconds = 1e-5 + size / 1e10
        rows.append(
            measure("copy", 10 * seconds, num_bytes=float(size), cpu_s=seconds, low_s=seconds)
        )
    (busy,), (wall,) = fit_section(rows, CPU, "processor"), fit_section(rows, CPU, "wall")
    assert busy.values["per_s"] == pytest.approx(1e10, rel=0.02)
    assert wall.values["per_s"] == pytest.approx(1e9, rel=0.02)


@pytest.mark.parametrize(
    ("name", "memory_gib", "accelerator"),
    [
        ("NVIDIA H100 80GB HBM3", 79.6, "h100-sxm"),
        ("NVIDIA H100 PCIe", 79.6, "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-sxm"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-sxm-40"),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA GeForce MX 150", 2.0, None),
        ("AMD EPYC", 24.0, None),
    ],
)
def test_a_gpu_is_found_by_what_its_driver_calls_it(
    name: str, memory_gib: float, accelerator: str | None
) -> None:
    found = find_accelerator_by_device_name(name, memory_gib)
    assert (found and found.name.startswith(accelerator or "?")) == (accelerator and True)


@pytest.mark.parametrize("cluster", [CPU, Cluster("cpu", 64, 2**38), Cluster("cuda", 8, 2**36)])
def test_every_operation_has_seconds_and_ranks_that_are_there(cluster: Cluster) -> None:
    sizes = list_group_sizes(cluster)
    assert sizes[-1] == (8 if cluster.num_devices >= 8 else 4)
    items = list_bench_items(cluster, ("gemm", "comm"), sizes)
    assert sum(item.budget_s for item in items) < 60
    assert {item.num_ranks for item in items if item.section == "comm"} == set(sizes)
    assert all(item.num_ranks <= sizes[-1] for item in items)
    assert (
        sum(item.budget_s for item in list_bench_items(cluster, ("gemm",), sizes, is_quick=True))
        < 6
    )


def make_profile() -> MachineProfile:
    def fit(num_ranks: int) -> FittedRate:
        values = {"overhead_s": 1e-4, "per_s": 1e9 / num_ranks}
        return FittedRate("all_reduce", "", "fp32", num_ranks, 1, values, 0.05, 0.1, 8)

    section = ProfileSection(
        "2026-11-24T18:00:00+00:00", 0.02, False, 0, "wall", (fit(2), fit(4)), ()
    )
    return MachineProfile("cpu", "A CPU", 2, "2.13.0", {"comm": section})


def test_a_profile_is_written_and_read_again(tmp_path: Path) -> None:
    profile, path = make_profile(), tmp_path / "deep" / "profile.json"
    save_profile(profile, path)
    assert load_profile(path) == profile


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "phalanx.profile/9"}', "[" * 100_000])
def test_a_file_that_is_no_profile_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="it is not a profile"):
        load_profile(path)


@pytest.mark.parametrize("rate", [0.0, -1e9, float("nan"), 1e308, 10**400])
def test_a_profile_with_a_rate_that_no_machine_has_is_no_profile(
    tmp_path: Path, rate: float
) -> None:
    """A plan divided by it, and ended in a ZeroDivisionError."""
    path = tmp_path / "profile.json"
    section = make_profile().sections["comm"]
    fit = replace(section.fits[0], values={"overhead_s": 0.0, "per_s": rate})
    save_profile(make_profile().with_sections({"comm": replace(section, fits=(fit,))}), path)
    with pytest.raises(UsageError, match="per_s"):
        load_profile(path)


def test_a_matmul_without_its_constants_is_no_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    section = make_profile().sections["comm"]
    fit = replace(section.fits[0], kind="matmul")
    save_profile(make_profile().with_sections({"gemm": replace(section, fits=(fit,))}), path)
    with pytest.raises(UsageError, match="rows_half"):
        load_profile(path)


def test_a_machine_finds_its_own_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under its name, and only there: another number of cores is another machine."""
    monkeypatch.setenv("HOME", str(tmp_path))
    from phalanx.plan.profiles import build_empty_profile

    assert find_profile_of_cluster(CPU) is None
    here = build_empty_profile(CPU)
    save_profile(replace(here, sections=make_profile().sections), get_profile_path(here))
    found = find_profile_of_cluster(CPU)
    assert found is not None
    assert describe_calibration(found) == "calibrated by bench of 2026-11-24"
    assert find_profile_of_cluster(replace(CPU, num_devices=3)) is None
    assert "uncalibrated" in describe_calibration(None)


def test_the_fit_of_the_nearest_number_of_ranks_is_taken() -> None:
    profile = make_profile()
    chosen = {}
    for num_ranks in (1, 2, 3, 4, 64):
        fit = profile.find_rate("all_reduce", dtype="fp32", num_ranks=num_ranks)
        assert fit is not None
        chosen[num_ranks] = fit.num_ranks
    assert chosen == {1: 2, 2: 2, 3: 4, 4: 4, 64: 4}
    assert profile.find_rate("all_to_all") is None
