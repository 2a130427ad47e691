"""One checkpoint and what it takes to run it: its model, its job, its data. For verbs that look at what was trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.checkpoint.choose import choose_checkpoint
from phalanx.checkpoint.exchange.importing import MODEL_TOML
from phalanx.checkpoint.folder import Folder
from phalanx.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from phalanx.checkpoint.origin import run_of
from phalanx.checkpoint.stores import is_url
from phalanx.core.errors import LayoutError, UsageError, did_you_mean
from phalanx.core.files import read_json
from phalanx.core.units import plural
from phalanx.data.corpus import MANIFEST as CORPUS
from phalanx.data.corpus import Corpus, load_corpus
from phalanx.data.tokenizer import TOKENIZER_FILE
from phalanx.job.foreign import foreign_shape
from phalanx.job.hugging_face import CONFIG, PREFIX
from phalanx.job.hugging_face import read_config as read_hugging_face
from phalanx.job.load import load_job, load_job_json
from phalanx.job.model import fixed_vocab_size
from phalanx.job.schema import Data, Job, Parallel
from phalanx.plan.cluster import detect_cluster
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan

KEPT_OF_LAYOUT = ("sync_batchnorm", "dropout")  # what another layout than the run's has all the same
LAYOUT_KEYS = tuple(f"parallel.{key}" for key in Parallel.model_fields if key not in KEPT_OF_LAYOUT)
DATA_KEYS = ("source", "mixture", "args", "tokenizer", "column", "held_out_fraction")  # that decide what is prepared


@dataclass(frozen=True)
class Subject:
    """What is looked at. `folder` is None for the weights of a Hugging Face directory, which its model reads itself.

    `run_dir` and `plan` are those of the run that wrote the checkpoint, where it is known. `overrides` came from the
    command line. `own_layout`: whether the command line says how ranks share the work.
    """

    place: str
    job: Job
    folder: Folder | None
    manifest: Manifest | None
    run_dir: Path | None
    plan: Plan | None
    overrides: tuple[str, ...]
    num_ranks: int | None
    why_ranks: str

    @property
    def name(self) -> str:
        return self.place if self.folder is None else self.folder.url

    @property
    def step(self) -> int | None:
        """The step of the checkpoint; None where nobody counted."""
        imported = self.manifest is not None and bool(self.manifest.facts.get("imported_from"))
        return None if self.folder is None or imported else self.folder.step

    @property
    def tokenizer_digest(self) -> str:
        """Digest of what made the tokens it was trained on; empty where nobody said."""
        return "" if self.manifest is None else str(self.manifest.facts.get("tokenizer") or "")

    def corpus(self) -> Corpus | None:
        """The data that the run prepared; None where there is none, or it lies elsewhere. Raises DataError."""
        if self.run_dir is None or not (self.run_dir / "data" / CORPUS).is_file():
            return None
        return load_corpus(self.run_dir / "data")

    def gives(self, *keys: str) -> list[str]:
        """Which of these keys ("data.source") the command line gives."""
        given = [override.partition("=")[0] for override in self.overrides]
        return [key for key in keys if any(name == key or name.startswith(f"{key}.") for name in given)]

    def make_plan(self, *, vocab_size: int | None) -> Plan:
        """How its ranks share the work on this machine. Raises LayoutError."""
        known = fixed_vocab_size(self.job.model) or (self.plan.vocab_size if self.plan else None) or vocab_size
        shape = self.plan.model_shape if self.plan and self.job.model.is_foreign else foreign_shape(self.job)
        cluster = detect_cluster(self.job.cluster.device)
        return make_plan(self.job, cluster=cluster, vocab_size=known, num_ranks=self.num_ranks, shape=shape)


def open_subject(
    place: str, job_file: str | None, overrides: Sequence[str], *, best: bool, sections: Sequence[str], alone: bool
) -> Subject:
    """The checkpoint at `place`: one, the newest (or with `best` the best) of a run, or a Hugging Face directory.

    Of its job the command line may change keys of `sections`. It runs as the run did where this machine can (`alone`:
    on one process), unless the command line says otherwise. Raises UsageError, CheckpointError or JobError.
    """
    _require_readable(overrides, sections)
    if (hf := _hugging_face_job(place, overrides)) is not None:
        _refuse_flags(place, job_file, best)
        return hf
    _require_place(place)
    folder = choose_checkpoint(place, best=best)
    manifest = read_manifest(folder)
    run_dir = run_of(place, folder) if job_file is None else None
    source = Path(job_file) if job_file is not None else _job_of(run_dir)
    if source is None:
        raise UsageError(
            "nothing says which model the checkpoint is of", where=folder.url, fix=f"add its job file: {place} job.toml"
        )
    plan = _plan_of(run_dir)
    job, num_ranks, why = _placed(source, plan, overrides, alone=alone)
    return Subject(place, job, folder, manifest, run_dir, plan, tuple(overrides), num_ranks, why)


def _placed(source: Path, plan: Plan | None, overrides: Sequence[str], *, alone: bool) -> tuple[Job, int | None, str]:
    """(the job with the layout that is used, how many ranks if that is decided, why in words)."""
    load: Any = load_job_json if source.suffix == ".json" else load_job
    asks = any(override.partition("=")[0] in LAYOUT_KEYS for override in overrides)
    if source.suffix != ".json":
        return load(source, overrides), None if asks or not alone else 1, ""
    if asks:
        return load(source, overrides, without=LAYOUT_KEYS), None, "as you asked"
    num_devices = detect_cluster("auto").num_devices
    if not alone and plan is not None and plan.world_size <= max(2, num_devices):
        return load(source, overrides), plan.world_size, "as the run trained"
    why = ""
    if not alone and plan is not None:
        why = f"the run's {plan.world_size} are more than the {num_devices} devices here"
    return load(source, overrides, without=LAYOUT_KEYS), 1, why


def _require_readable(overrides: Sequence[str], sections: Sequence[str]) -> None:
    for override in overrides:
        key = override.partition("=")[0]
        if not any(key == section or key.startswith(f"{section}.") for section in sections):
            near = did_you_mean(key, list(sections))
            fix = (
                near
                or f"what can be set here: {', '.join(f'{name}.*' if '.' not in name else name for name in sections)}"
            )
            raise UsageError(f"{key} has no part in this", why="the checkpoint's own job says it", fix=fix)


def _require_place(place: str) -> None:
    if is_url(place) or Path(place).is_dir():
        return
    if Path(place).exists():
        raise UsageError("this is a file", where=place, fix="give a run's directory, a checkpoint's, or a URL first")
    raise UsageError("no such directory", where=place, fix="give a run's directory, a checkpoint's, or a URL")


def _job_of(run_dir: Path | None) -> Path | None:
    """The job that a run resolved, or what an import wrote beside its checkpoint."""
    names = ("job.json", MODEL_TOML)
    return next((run_dir / name for name in names if run_dir is not None and (run_dir / name).is_file()), None)


def _plan_of(run_dir: Path | None) -> Plan | None:
    if run_dir is None:
        return None
    try:
        return Plan.from_json(read_json(run_dir / "plan.json"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _refuse_flags(place: str, job_file: str | None, best: bool) -> None:
    if job_file is not None or best:
        what = "--best" if best else repr(job_file)
        raise UsageError(f"{what}: a Hugging Face directory is one model, and says itself which", where=place)


def _hugging_face_job(place: str, overrides: Sequence[str]) -> Subject | None:
    """The directory that `save_pretrained` or `phalanx checkpoint export` wrote, as a job; None for any other."""
    path = Path(place)
    if is_url(place) or not (path / CONFIG).is_file() or (path / MANIFEST).is_file() or (path / "job.json").is_file():
        return None
    config = read_hugging_face(f"{PREFIX}{place}")
    base = [f"model.kind={PREFIX}{path.absolute()}"]
    if (path / TOKENIZER_FILE).is_file() and not any(text.startswith("data.tokenizer=") for text in overrides):
        base.append(f"data.tokenizer={path.absolute()}")
    positions = next((config[key] for key in ("max_position_embeddings", "n_positions") if key in config), None)
    if isinstance(positions, int) and 0 < positions < Data().seq_len:
        base.append(f"data.seq_len={positions}")
    job = load_job(None, [*base, *overrides])
    if not _has_weights(path):
        raise LayoutError("there are no weights in it", where=place, fix="give a directory with model.safetensors")
    asks = any(override.partition("=")[0] in LAYOUT_KEYS for override in overrides)
    return Subject(place, job, None, None, None, None, tuple(overrides), None if asks else 1, "")


def _has_weights(path: Path) -> bool:
    from phalanx.job.hugging_face import weights_directory

    return weights_directory(f"{PREFIX}{path}") is not None


def describe_ranks(subject: Subject, plan: Plan) -> str:
    """ "2 cpu ranks, ddp (dp_replicate=2), as the run trained"."""
    layout = f", {plan.chosen.name} ({plan.layout})" if plan.world_size > 1 else ""
    return f"{plural(plan.world_size, f'{plan.device} rank')}{layout}" + (
        f": {subject.why_ranks}" if subject.why_ranks else ""
    )
