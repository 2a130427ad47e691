"""The last lines of a finished run, from its own events."""

from __future__ import annotations

from pathlib import Path

from phalanx.core.units import format_bytes
from phalanx.observe.console import printable
from phalanx.observe.events import BaselineMeasured, CheckpointSaved, EvalFinished, MemoryMeasured, TextGenerated
from phalanx.observe.tail import EventTail


def summary_lines(run_dir: Path) -> list[str]:
    """Held-out loss beside its baselines, memory predicted | measured, a sample, and the last checkpoint."""
    events = [envelope.event for envelope in EventTail(run_dir).poll()]
    evaluation = next((e for e in reversed(events) if isinstance(e, EvalFinished)), None)
    baselines = {e.name: e for e in events if isinstance(e, BaselineMeasured)}
    memory = next((e for e in reversed(events) if isinstance(e, MemoryMeasured)), None)
    sample = next((e for e in reversed(events) if isinstance(e, TextGenerated)), None)
    saved = next((e for e in reversed(events) if isinstance(e, CheckpointSaved)), None)
    lines: list[str] = []
    if evaluation is not None:
        parts = [f"model {evaluation.loss:.3f}"] + [f"{name} {b.loss:.3f}" for name, b in baselines.items()]
        lines.append(f"loss    held out, nats per token: {'  '.join(parts)}   ({evaluation.num_targets:,} tokens)")
        trigram = next((b for name, b in baselines.items() if "trigram" in name), None)
        if trigram is not None:
            ahead = trigram.loss - evaluation.loss
            verdict = "better" if ahead > 0 else "worse"
            lines.append(f"        the model is {abs(ahead):.3f} nats {verdict} than the trigram")
    if memory is not None:
        lines += _memory_lines(memory)
    if sample is not None:
        text = (sample.prompt + sample.text).expandtabs(4).split("\n")
        lines.append("sample  " + "\n        ".join(printable(line) for line in text))
    if saved is not None:
        lines.append(f"saved   {run_dir / saved.path} ({format_bytes(saved.num_bytes)})")
    return lines


def _memory_lines(memory: MemoryMeasured) -> list[str]:
    predicted, measured = memory.predicted_bytes.get("peak", 0), memory.measured_bytes.get("peak", 0)
    if not predicted or not measured:
        return []
    error = (predicted - measured) / measured
    return [
        f"memory  peak of rank 0: {format_bytes(predicted)} predicted, {format_bytes(measured)} measured "
        f"({error:+.0%}), on top of {format_bytes(memory.runtime_bytes)} for interpreter and torch"
    ]
