"""The kind of a CPU, as checkpoints say it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx.mesh.cpu_kind import describe_cpu_for_equal_bits

EPYC = """processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC
flags\t\t: fpu avx2 avx512f avx512_bf16

processor\t: 1
vendor_id\t: AuthenticAMD
flags\t\t: fpu avx2 amx_bf16
"""
GRAVITON = """processor\t: 0
Features\t: fp asimd sve bf16
CPU implementer\t: 0x41
"""


def describe(path: Path, text: str) -> str:
    path.write_text(text)
    describe_cpu_for_equal_bits.cache_clear()
    return describe_cpu_for_equal_bits(path)


def test_vendor_features_capability_and_torch_are_in_the_line(tmp_path: Path) -> None:
    line = describe(tmp_path / "cpuinfo", EPYC)
    capability = torch.backends.cpu.get_cpu_capability()
    assert f" AuthenticAMD {capability} avx512_bf16" in line, "of the first processor"
    assert "amx" not in line
    assert line.endswith(f"torch {torch.__version__.split('+')[0]}")
    assert f" 0x41 {capability} bf16 sve" in describe(tmp_path / "cpuinfo", GRAVITON)


def test_another_vendor_or_another_choice_of_kernels_is_another_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    amd = describe(tmp_path / "cpuinfo", EPYC)
    assert describe(tmp_path / "cpuinfo", EPYC) == amd
    assert describe(tmp_path / "cpuinfo", EPYC.replace("AuthenticAMD", "GenuineIntel")) != amd
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert describe(tmp_path / "cpuinfo", EPYC) != amd


def test_a_system_without_cpuinfo_still_has_a_kind(tmp_path: Path) -> None:
    describe_cpu_for_equal_bits.cache_clear()
    assert torch.backends.cpu.get_cpu_capability() in describe_cpu_for_equal_bits(
        tmp_path / "absent"
    )
