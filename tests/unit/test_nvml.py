"""Energy and utilisation of a GPU, against a library of the same functions: no GPU is asked.

Reference for the signatures: nvml.h of CUDA 12.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from phalanx.core.nvml import GpuReading, open_gpu_meter
from phalanx.observe.bus import Bus
from phalanx.observe.events import GpuMeasured
from phalanx.observe.tail import read_recorded_events
from phalanx.report.prometheus.run_metrics import RunMetrics
from phalanx.train.gpu_record import GpuRecorder

LIBRARY = """
#include <string.h>
typedef int nvmlReturn_t;
typedef struct nvmlDevice_st *nvmlDevice_t;
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
static int is_open;
static char device;
static unsigned long long energy = 5000000000000ULL;  /* more than 32 bits have */
nvmlReturn_t nvmlInit_v2(void) { is_open = 1; return 0; }
nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *handle) {
    if (!is_open || strcmp(uuid, "GPU-known")) return 6;
    *handle = (nvmlDevice_t)&device;
    return 0;
}
nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t handle, unsigned long long *mj) {
    if ((char *)handle != &device) return 2;
    energy += 1500000;
    *mj = energy;
    return 0;
}
#ifndef OLD
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t handle, nvmlUtilization_t *rates) {
    if ((char *)handle != &device) return 2;
    rates->gpu = 75;
    rates->memory = 20;
    return 0;
}
#endif
"""


def build_library(folder: Path, *flags: str) -> str:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler is installed")
    (folder / "nvml.c").write_text(LIBRARY)
    path = folder / "libnvml.so"
    command = ["cc", "-shared", "-fPIC", *flags, "-o", str(path), str(folder / "nvml.c")]
    subprocess.run(command, check=True)
    return str(path)


def test_nothing_is_known_without_the_library_the_gpu_or_a_function(tmp_path: Path) -> None:
    assert open_gpu_meter("GPU-known", "libnvidia-ml-that-is-not-there.so") is None
    path = build_library(tmp_path, "-DOLD")
    assert open_gpu_meter("GPU-other", path) is None
    meter = open_gpu_meter("GPU-known", path)
    assert meter is not None
    assert meter.read() == GpuReading(5_000_001_500.0, None, None)
    recorder = GpuRecorder(torch.device("cpu"), Bus(rank=0))
    recorder.start()
    recorder.record_if_due(1, math.inf)


def test_energy_is_that_since_the_event_before_and_adds_up(tmp_path: Path) -> None:
    meter = open_gpu_meter("GPU-known", build_library(tmp_path))
    assert meter is not None
    assert meter.read().busy_share == 0.75
    bus = Bus(rank=3, run_dir=tmp_path)
    recorder = GpuRecorder(torch.device("cpu"), bus)
    recorder.start_with_meter(meter)
    start_s = recorder._started_s
    for step in range(1, 41):
        recorder.record_if_due(step, start_s + step)
    bus.close()
    metrics = RunMetrics("run", {})
    facts = []
    for envelope in read_recorded_events(tmp_path, GpuMeasured, rank=3):
        metrics.add_event(envelope)
        assert isinstance(envelope.event, GpuMeasured)
        facts.append((envelope.event.step, envelope.event.energy_j, envelope.event.busy_share))
    assert facts == [(step, 1500.0, 0.75) for step in (10, 20, 30, 40)]
    snapshot = metrics.build_snapshot()
    assert snapshot.find_value("phalanx_gpu_energy_joules_total", "3") == 6000.0
    assert snapshot.find_value("phalanx_gpu_busy_ratio", "3") == 0.75
