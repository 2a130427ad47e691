"""The text that a finished run writes with its model."""

from __future__ import annotations

from phalanx.data.corpus import Corpus
from phalanx.job.schema import Job
from phalanx.mesh.mesh import Mesh
from phalanx.observe.events import Note, TextGenerated
from phalanx.observe.progress import ProgressEmitter
from phalanx.plan.plan import Plan
from phalanx.run.data import build_sample_prompt_tokens
from phalanx.train.generate import generate_tokens
from phalanx.train.memory import MemoryMeter
from phalanx.train.trainer import Trainer


def emit_sample_text(
    job: Job, plan: Plan, mesh: Mesh, corpus: Corpus, trainer: Trainer, meter: MemoryMeter
) -> bool:
    """Sample text, once the last step is done and saved. False where that failed.

    A failure is noted, and the run is finished all the same. The other ranks may then be anywhere,
    and this one must not wait for them.
    """
    step = trainer.state.step
    tokenizer = corpus.tokenizer()
    if not job.train.sample_tokens or tokenizer is None or job.model.objective is not None:
        return True
    meter.begin_phase(step, "sample")
    num_tokens = job.train.sample_tokens
    progress = ProgressEmitter(trainer.bus.emit, step, "sample", num_tokens)
    box = trainer.state.model.phases.black_box

    def report_progress(num_done: int) -> None:
        if box is not None:
            # A model that samples may enter no phase and no collective for hours.
            box.note_work()
        if mesh.rank == 0:
            progress.report_progress(num_done)

    try:
        prompt = build_sample_prompt_tokens(corpus, tokenizer, plan.seq_len)
        tokens = generate_tokens(
            trainer.state.model,
            prompt,
            num_tokens=num_tokens,
            context=plan.seq_len,
            seed=job.run.seed,
            on_progress=report_progress,
        )
        event = TextGenerated(step, tokenizer.decode(prompt), tokenizer.decode(tokens))
    except (Exception, SystemExit) as error:
        # A model that returns no logits says so itself, in the same words on every rank.
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, TypeError):
            why = str(error)
        trainer.bus.emit(Note("no_sample", {"why": why.partition("\n")[0]}))
        return False
    if mesh.rank == 0:
        trainer.bus.emit(event)
    return True
