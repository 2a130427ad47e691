"""A profile of a machine that does not exist, with round numbers."""

from __future__ import annotations

from phalanx.plan.profiles import PROCESSOR, FittedRate, MachineProfile, ProfileSection

MATMUL = {"rows_half": 4.0, "cols_half": 4.0, "inner_half": 4.0, "overhead_s": 2e-6}
FLOPS_PER_S = {"fp32": 1e11, "bf16": 4e11}
KERNELS = ("add", "rms_norm", "gated_activation", "rotary")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def make_fit(kind: str, mode: str, dtype: str, num_ranks: int, **values: float) -> FittedRate:
    return FittedRate(kind, mode, dtype, num_ranks, 1, values, 0.05, 0.1, 8)


def list_fits(num_ranks: int) -> list[FittedRate]:
    fits = []
    for dtype in ("fp32", "bf16"):
        fits.append(
            make_fit("matmul", "", dtype, num_ranks, **MATMUL, flops_per_s=FLOPS_PER_S[dtype])
        )
        for mode in ("forward", "training"):
            for kind in KERNELS:
                fits.append(make_fit(kind, mode, dtype, num_ranks, overhead_s=3e-6, per_s=1e10))
            fits.append(make_fit("attention", mode, dtype, num_ranks, overhead_s=1e-5, per_s=5e10))
        for kind in ("cross_entropy", "embedding"):
            fits.append(make_fit(kind, "training", dtype, num_ranks, overhead_s=1e-5, per_s=8e9))
    fits.append(make_fit("copy", "", "fp32", num_ranks, overhead_s=1e-6, per_s=2e10))
    fits.append(make_fit("adamw", "", "fp32", num_ranks, overhead_s=1e-5, per_s=1e10))
    return fits


def make_profile(
    *, num_devices: int = 2, comm_per_s: float = 2e9, hidden_share: float = 0.25
) -> MachineProfile:
    """Every rank computes at the same rates; messages are of `comm_per_s` and 100 us, and products
    beside an all-reduce hide `hidden_share` of it."""
    comm = []
    for num_ranks in (2, 4):
        for kind in COLLECTIVES:
            for mode in ("", PROCESSOR):
                comm.append(
                    make_fit(kind, mode, "fp32", num_ranks, overhead_s=1e-4, per_s=comm_per_s)
                )
        comm.append(make_fit("overlap", "", "fp32", num_ranks, hidden_share=hidden_share))
    date = "2026-11-24T18:00:00+00:00"
    return MachineProfile(
        "cpu",
        "A CPU",
        num_devices,
        "2.13.0",
        {
            "gemm": ProfileSection(date, 0.0, False, 0, "wall", tuple(list_fits(2)), ()),
            "comm": ProfileSection(date, 0.0, False, 0, "wall", tuple(comm), ()),
        },
    )
