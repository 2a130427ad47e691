"""Energy and utilisation of this rank's GPU as events, a few hundred of them in a run."""

from __future__ import annotations

import math
import time

import torch

from phalanx.core.nvml import GpuMeter, GpuReading, open_gpu_meter
from phalanx.observe.bus import Bus
from phalanx.observe.events import GpuMeasured

_MIN_INTERVAL_S = 10.0
# Of what has passed since the start: a run of days writes as many events as one of hours and a few
# more.
_INTERVAL_SHARE = 1 / 20


class GpuRecorder:
    """Emits `gpu_measured` on `bus` while `device` is a GPU that NVML knows; else nothing."""

    def __init__(self, device: torch.device, bus: Bus) -> None:
        self._device, self._bus = device, bus
        self._meter: GpuMeter | None = None
        self._started_s = self._last_s = 0.0
        self._last: GpuReading | None = None

    def start(self) -> None:
        """Count energy from here on."""
        if self._device.type == "cuda" and torch.cuda.is_available():
            uuid = getattr(torch.cuda.get_device_properties(self._device), "uuid", None)
            if uuid is not None:
                self.start_with_meter(open_gpu_meter(f"GPU-{uuid}"))

    def start_with_meter(self, meter: GpuMeter | None) -> None:
        """Count what `meter` says from here on."""
        self._meter = meter
        self._started_s = self._last_s = time.monotonic()
        self._last = meter.read() if meter is not None else None

    def record_if_due(self, step: int, now_s: float | None = None) -> None:
        """After a step, where the last event is long enough ago (`now_s`: monotonic seconds)."""
        if self._meter is None or self._last is None:
            return
        now_s = time.monotonic() if now_s is None else now_s
        interval_s = max(_MIN_INTERVAL_S, _INTERVAL_SHARE * (now_s - self._started_s))
        if now_s - self._last_s < interval_s:
            return
        reading, before = self._meter.read(), self._last
        energy_j = math.nan
        if reading.energy_j is not None and before.energy_j is not None:
            energy_j = reading.energy_j - before.energy_j
        self._bus.emit(
            GpuMeasured(
                step=step,
                seconds=round(now_s - self._last_s, 4),
                energy_j=energy_j,
                busy_share=_number_or_nan(reading.busy_share),
                memory_busy_share=_number_or_nan(reading.memory_busy_share),
            )
        )
        self._last, self._last_s = reading, now_s


def _number_or_nan(value: float | None) -> float:
    return math.nan if value is None else value
