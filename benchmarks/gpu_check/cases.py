"""What is measured: the model, its batch, and the systems in the order they run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Case:
    """All systems train the same model on the same batch.

    Sizes in elements, `batch_size` in sequences.
    """

    device: str
    model: tuple[str, ...]  # overrides of a job
    seq_len: int
    batch_size: int
    compile: bool
    warmup_steps: int
    window_steps: int  # timed together; the GPU is waited for between windows
    num_windows: int
    square: int  # width of the square matrices of the ceiling
    rate_s: float  # how long one product is repeated
    ring_tokens: int
    expert_width: int

    @property
    def steps(self) -> int:
        return self.warmup_steps + self.window_steps * self.num_windows

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        body = json.loads(text)
        return cls(**{**body, "model": tuple(body["model"])})


FULL = Case(
    device="cuda",
    model=(
        "model.preset=tinyllama-1.1b",
    ),  # the vocabulary of 32,000 leaves most of a step to blocks
    seq_len=2048,
    batch_size=8,
    compile=True,
    warmup_steps=5,
    window_steps=4,
    num_windows=5,
    square=8192,
    rate_s=0.3,
    ring_tokens=4096,
    expert_width=1024,
)

TINY = Case(
    device="cpu",
    model=(
        "model.num_layers=2",
        "model.dim=64",
        "model.num_heads=4",
        "model.num_kv_heads=2",
        "model.vocab_size=256",
    ),
    seq_len=32,
    batch_size=2,
    compile=False,
    warmup_steps=1,
    window_steps=2,
    num_windows=2,
    square=128,
    rate_s=0.01,
    ring_tokens=64,
    expert_width=32,
)


@dataclass(frozen=True)
class System:
    """`module` has `measure(case, say)`, and is killed after `deadline_s`."""

    name: str
    module: str
    deadline_s: float
    is_trainer: bool = True

    @property
    def file(self) -> str:
        return self.module.rpartition(".")[2]


CEILING, PHALANX, BARE, FP8 = "matmul ceiling", "phalanx", "bare torch loop", "phalanx, fp8"

SYSTEMS = (
    System(CEILING, "gpu_check.systems.ceiling", 60, is_trainer=False),
    System(PHALANX, "gpu_check.systems.phalanx_bf16", 150),
    System(BARE, "gpu_check.systems.bare_loop", 120),
    System("HF Trainer", "gpu_check.systems.hf_trainer", 120),
    System("Lightning Fabric", "gpu_check.systems.fabric", 120),
    System("ring attention", "gpu_check.systems.ring_attention", 60, is_trainer=False),
    System("grouped matmul", "gpu_check.systems.grouped_matmul", 60, is_trainer=False),
    System("same results", "gpu_check.systems.same_results", 60, is_trainer=False),
    System("save and resume", "gpu_check.systems.save_and_resume", 90, is_trainer=False),
    System("verify", "gpu_check.systems.verified_rows", 60, is_trainer=False),
    System(FP8, "gpu_check.systems.phalanx_fp8", 120),
)
