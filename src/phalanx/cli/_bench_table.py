"""A profile as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phalanx.core.units import format_bytes, format_count, format_seconds, plural
from phalanx.plan.profiles import (
    GLOO_COMM_SECTION,
    MAX_QUIET_BUSY_SHARE,
    PROCESSOR,
    FittedRate,
    MachineProfile,
    ProfileSection,
)

LABEL_OF_STORAGE_KIND = {
    "write": "write",
    "sync": "make durable (fsync)",
    "read": "read",
    "small_write": "small file, durable",
    "small_read": "small file, read",
}


def describe_profile(profile: MachineProfile, wall_s: float) -> Iterator[str]:
    """Lines for each section: what was measured, and how far its fits are from it."""
    yield (
        f"machine {profile.name}, {profile.num_devices} x {profile.device}, torch {profile.torch}"
        f"   ({format_seconds(wall_s)})"
    )
    writers = {
        "gemm": _describe_compute_section,
        "comm": _describe_comm_section,
        GLOO_COMM_SECTION: _describe_comm_section,
        "storage": _describe_storage_section,
    }
    for name in ("gemm", "comm", GLOO_COMM_SECTION, "storage"):
        section = profile.sections.get(name)
        if section is None:
            continue
        yield from writers[name](section)
        yield from _describe_measuring_conditions(section)


def _describe_compute_section(section: ProfileSection) -> Iterator[str]:
    yield "products        ranks x threads   FLOP/s, long   overhead    off: median   worst"
    for fit in section.fits:
        if fit.kind == "matmul":
            rate = format_count(fit.values["flops_per_s"])
            yield (
                f"  {fit.dtype:<13} {_format_ranks_and_threads(fit)}   {rate:>12}"
                f"   {format_seconds(fit.values['overhead_s']):>8}   {_format_residual_errors(fit)}"
            )
    yield "kernels         ranks x threads           per s   overhead    off: median   worst"
    for fit in section.fits:
        if fit.kind != "matmul" and "per_s" in fit.values:
            name = " ".join(filter(None, (fit.kind, fit.mode, fit.dtype)))
            yield (
                f"  {name}\n  {'':<13} {_format_ranks_and_threads(fit)}   {_format_rate(fit):>12}"
                f"   {format_seconds(fit.values['overhead_s']):>8}   {_format_residual_errors(fit)}"
            )
    for fit in section.fits:
        if fit.kind == "launch":
            yield (
                f"  calling an operation ({fit.mode}, {fit.dtype}):"
                f" {_format_ranks_and_threads(fit).strip()}"
                f"   {format_seconds(fit.values['overhead_s'])}"
            )
    for fit in section.fits:
        if fit.kind == "block":
            yield (
                f"  whole blocks, {fit.dtype}: {_format_ranks_and_threads(fit).strip()}"
                f"   {fit.values['scale']:.2f} x the sum of their parts +"
                f" {format_seconds(fit.values['overhead_s'])}  "
                f" {_format_residual_errors(fit).strip()}"
            )
    yield from _describe_crowd_slowdowns(section.fits)


def _describe_crowd_slowdowns(fits: Sequence[FittedRate]) -> Iterator[str]:
    for fit in fits:
        if fit.kind == "crowd":
            yield (
                f"  {plural(fit.num_ranks, 'rank')} at once compute {fit.values['slowdown']:.2f} x"
                f" as slowly as one alone with as many threads ({fit.dtype})"
            )


def _describe_comm_section(section: ProfileSection) -> Iterator[str]:
    yield "collectives     ranks x threads     bytes per s    latency   off: median   worst"
    if section.collectives:
        yield f"  through {section.collectives}"
    for fit in section.fits:
        if "per_s" in fit.values and fit.mode != PROCESSOR:
            yield (
                f"  {fit.kind:<14}{_format_ranks_and_threads(fit)}   {_format_rate(fit):>12}"
                f"   {format_seconds(fit.values['overhead_s']):>8}   {_format_residual_errors(fit)}"
            )
    for fit in section.fits:
        if fit.kind == "overlap":
            yield (
                f"  overlap       {_format_ranks_and_threads(fit)}   products beside an all-reduce"
                " hide"
                f" {100 * fit.values['hidden_share']:.0f} % of the shorter one"
            )


def _describe_storage_section(section: ProfileSection) -> Iterator[str]:
    yield "storage"
    for row in section.rows:
        rate = format_bytes(row.num_bytes / row.seconds)
        yield (
            f"  {LABEL_OF_STORAGE_KIND[row.kind]:<24} {format_bytes(row.num_bytes):>10}"
            f"   {format_seconds(row.seconds):>8}   {rate:>10}/s"
            f"   ({format_seconds(row.low_s)} to {format_seconds(row.high_s)})"
        )


def _describe_measuring_conditions(section: ProfileSection) -> Iterator[str]:
    if section.num_skipped:
        yield (
            f"  left out: {plural(section.num_skipped, 'operation')}, as time was up; the others"
            " stand"
        )
    if section.busy_share > MAX_QUIET_BUSY_SHARE:
        yield (
            f"  busy: other programs used {100 * section.busy_share:.0f} % of the machine, which"
            " makes all of this less sure; run it again on a quiet one"
        )
    if section.basis == PROCESSOR:
        yield "  computing is fitted to processor seconds, collectives to their fastest tenth"


def _format_ranks_and_threads(fit: FittedRate) -> str:
    return f"{fit.num_ranks:>5} x {fit.num_threads:<7}"


def _format_rate(fit: FittedRate) -> str:
    if fit.kind == "attention":
        return f"{format_count(fit.values['per_s'])} FLOP"
    return format_bytes(fit.values["per_s"])


def _format_residual_errors(fit: FittedRate) -> str:
    if fit.residual is None or fit.worst is None:
        return "         –"
    return f"{100 * fit.residual:9.1f} % {100 * fit.worst:7.1f} %"
