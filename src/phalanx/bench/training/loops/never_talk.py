"""Ranks that never talk: each trains a copy of its own on its own share. What is lost to
communication is measured from here."""

from __future__ import annotations

from phalanx.bench.training.loops.shared import (
    build_fused_adamw,
    build_module_with_loss,
    train_module_in_turns,
)
from phalanx.bench.training.payload import RankSetting
from phalanx.bench.training.rank import TrainingTurns


def train_in_turns(setting: RankSetting, turns: TrainingTurns) -> None:
    """Train one module without any process group."""
    module = build_module_with_loss(setting)
    train_module_in_turns(setting, turns, module, build_fused_adamw(setting, module))
