"""One checkpoint and what it takes to run it: its model, its job, its data. `phalanx eval` and
`generate` open it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint.exchange.importing import MODEL_TOML_FILE_NAME
from phalanx.checkpoint.folder import CheckpointFolder
from phalanx.checkpoint.manifest import MANIFEST_FILE_NAME, Manifest, read_manifest
from phalanx.checkpoint.reading.choose import find_newest_or_best_checkpoint
from phalanx.checkpoint.reading.origin import find_run_directory_of_checkpoint
from phalanx.checkpoint.stores import is_store_url
from phalanx.core.errors import LayoutError, UsageError, format_nearest_word_hint
from phalanx.core.units import plural
from phalanx.data.corpus import CORPUS_FILE_NAME as CORPUS
from phalanx.data.corpus import Corpus, load_corpus
from phalanx.data.tokenizer import TOKENIZER_FILE
from phalanx.job.costs import ModelCosts
from phalanx.job.hugging_face import CONFIG_FILE_NAME, HUGGING_FACE_PREFIX, find_weights_directory
from phalanx.job.hugging_face import read_model_config as read_hugging_face
from phalanx.job.load import load_job, load_job_json
from phalanx.job.model import find_vocab_size_of
from phalanx.job.module_probe import measure_foreign_shape
from phalanx.job.schema import Data, Job, Parallel
from phalanx.plan.cluster import detect_cluster
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.stored_plan import read_stored_plan_or_none

# They stay when a model runs in another layout than it trained in.
KEYS_OF_ANY_LAYOUT = ("sync_batchnorm", "dropout")
LAYOUT_KEYS = tuple(
    f"parallel.{key}" for key in Parallel.model_fields if key not in KEYS_OF_ANY_LAYOUT
)
# The keys of data on which the prepared corpus depends.
DATA_KEYS = (
    "data.source",
    "data.mixture",
    "data.args",
    "data.tokenizer",
    "data.column",
    "data.held_out_fraction",
)


@dataclass(frozen=True)
class TrainedModel:
    """A checkpoint and its job. `folder` is None for a Hugging Face directory, whose weights the
    model reads itself.

    `location` is the directory or URL by which it was opened. `run_dir` and `plan` are those of the
    run that wrote the checkpoint, None if it is not known. `overrides` ("key=value") change the
    job. `num_ranks` is None where the planner decides; `why_ranks` says why there are so many.
    """

    location: str
    job: Job
    folder: CheckpointFolder | None
    manifest: Manifest | None
    run_dir: Path | None
    plan: Plan | None
    overrides: tuple[str, ...]
    num_ranks: int | None
    why_ranks: str

    @property
    def name(self) -> str:
        if self.folder is None:
            return self.location
        return self.folder.url

    @property
    def step(self) -> int | None:
        """The optimizer step of the checkpoint; None for imported weights, whose steps are not
        known.
        """
        if self.folder is None or self.is_imported:
            return None
        return self.folder.step

    @property
    def is_imported(self) -> bool:
        """True if `phalanx checkpoint import` wrote the checkpoint, from weights of another
        origin."""
        return self.manifest is not None and bool(self.manifest.facts.get("imported_from"))

    @property
    def tokenizer_digest(self) -> str:
        """Digest of the tokenizer of its training data; empty if the checkpoint does not record
        one.
        """
        if self.manifest is None:
            return ""
        return str(self.manifest.facts.get("tokenizer") or "")

    def corpus(self) -> Corpus | None:
        """The corpus that the run prepared in its directory; None if there is none. Raises
        DataError.
        """
        if self.run_dir is None or not (self.run_dir / "data" / CORPUS).is_file():
            return None
        return load_corpus(self.run_dir / "data")

    def overridden_keys(self, *keys: str) -> list[str]:
        """Keys among `keys` ("data.source") that the overrides set, or set a part of."""
        overridden = []
        for key in keys:
            if any(
                _is_key_in_section(_parse_override_key(override), key)
                for override in self.overrides
            ):
                overridden.append(key)
        return overridden

    def make_plan(self, *, vocab_size: int | None) -> Plan:
        """Plan how ranks of this machine share the work. Raises LayoutError.

        `vocab_size` is that of the tokenizer: it counts where neither the job nor the run's plan
        says one.
        """
        size_of_run: int | None = None
        shape: ModelCosts | None = None
        if self.plan is not None:
            size_of_run = self.plan.vocab_size
        if self.plan is not None and self.job.model.is_foreign:
            shape = self.plan.model_shape
        else:
            shape = measure_foreign_shape(self.job)
        return make_plan(
            self.job,
            cluster=detect_cluster(self.job.cluster.device),
            vocab_size=find_vocab_size_of(self.job.model) or size_of_run or vocab_size,
            num_ranks=self.num_ranks,
            shape=shape,
        )


def open_trained_model(
    location: str,
    job_file: str | None,
    overrides: Sequence[str],
    *,
    best: bool,
    allowed_keys: Sequence[str],
    on_one_rank: bool,
) -> TrainedModel:
    """Open the checkpoint at `location`: one, the newest (or with `best` the best) of a run, or a
    Hugging Face model.

    `overrides` may change keys of `allowed_keys` ("data", "train.compile") in the checkpoint's job.
    The model runs as the run trained where this machine can (with `on_one_rank` on one rank),
    unless the overrides give a layout. Raises UsageError, CheckpointError, LayoutError or JobError.
    """
    _require_allowed_overrides(overrides, allowed_keys)
    if _is_hugging_face_directory(location):
        _refuse_flags_of_hugging_face_directory(location, job_file, best)
        return _open_hugging_face_directory(location, overrides)
    _require_directory_or_url(location)
    folder = find_newest_or_best_checkpoint(location, best=best)
    manifest = read_manifest(folder)
    if job_file is None:
        run_dir = find_run_directory_of_checkpoint(location, folder)
        source = _find_job_file_of_checkpoint(run_dir)
    else:
        # The job says all, whatever lies beside the checkpoint.
        run_dir, source = None, Path(job_file)
    if source is None:
        fix = f"add its job file: {location} job.toml"
        raise UsageError("nothing says which model the checkpoint is of", where=folder.url, fix=fix)
    plan = _read_plan_or_none(run_dir)
    job, num_ranks, why = _load_job_with_layout(source, plan, overrides, on_one_rank=on_one_rank)
    return TrainedModel(
        location, job, folder, manifest, run_dir, plan, tuple(overrides), num_ranks, why
    )


def describe_ranks_of_model(model: TrainedModel, plan: Plan) -> str:
    """Describe how ranks run the model: "2 cpu ranks, ddp (dp_replicate=2): as the run trained"."""
    text = plural(plan.world_size, f"{plan.device} rank")
    if plan.world_size > 1:
        text += f", {plan.chosen.name} ({plan.layout})"
    if model.why_ranks:
        text += f": {model.why_ranks}"
    return text


def _load_job_with_layout(
    source: Path, plan: Plan | None, overrides: Sequence[str], *, on_one_rank: bool
) -> tuple[Job, int | None, str]:
    """(the job with the layout it is to run in, how many ranks if that is decided, why so many)."""
    has_layout = _do_overrides_set_layout(overrides)
    # A job file of the user's, whose layout is meant for this machine.
    if source.suffix != ".json":
        num_ranks = None
        if on_one_rank and not has_layout:
            num_ranks = 1
        return load_job(source, overrides), num_ranks, ""
    if has_layout:
        return load_job_json(source, overrides, without=LAYOUT_KEYS), None, "as you asked"
    why = ""
    if plan is not None and not on_one_rank:
        num_devices = detect_cluster("auto").num_devices
        if plan.world_size <= max(2, num_devices):
            return load_job_json(source, overrides), plan.world_size, "as the run trained"
        why = f"the run's {plan.world_size} are more than the {num_devices} devices here"
    return load_job_json(source, overrides, without=LAYOUT_KEYS), 1, why


def _do_overrides_set_layout(overrides: Sequence[str]) -> bool:
    return any(_parse_override_key(override) in LAYOUT_KEYS for override in overrides)


def _parse_override_key(override: str) -> str:
    return override.partition("=")[0]


def _is_key_in_section(key: str, section: str) -> bool:
    """True if `key` is `section` ("data", "data.args"), or a key in it."""
    return key == section or key.startswith(f"{section}.")


def _require_allowed_overrides(overrides: Sequence[str], allowed_keys: Sequence[str]) -> None:
    for override in overrides:
        key = _parse_override_key(override)
        if any(_is_key_in_section(key, allowed) for allowed in allowed_keys):
            continue
        names = []
        for allowed in allowed_keys:
            names.append(allowed if "." in allowed else f"{allowed}.*")
        fix = (
            format_nearest_word_hint(key, list(allowed_keys))
            or f"what can be set here: {', '.join(names)}"
        )
        raise UsageError(
            f"{key} has no part in this", why="the checkpoint's own job says it", fix=fix
        )


def _require_directory_or_url(location: str) -> None:
    if is_store_url(location) or Path(location).is_dir():
        return
    if Path(location).exists():
        fix = "give a run's directory, a checkpoint's, or a URL first"
        raise UsageError("this is a file", where=location, fix=fix)
    raise UsageError(
        "no such directory", where=location, fix="give a run's directory, a checkpoint's, or a URL"
    )


def _find_job_file_of_checkpoint(run_dir: Path | None) -> Path | None:
    """The file of the job that a run resolved, or that an import wrote beside its checkpoint."""
    if run_dir is None:
        return None
    for name in ("job.json", MODEL_TOML_FILE_NAME):
        if (run_dir / name).is_file():
            return run_dir / name
    return None


def _read_plan_or_none(run_dir: Path | None) -> Plan | None:
    if run_dir is None:
        return None
    return read_stored_plan_or_none(run_dir / "plan.json")


def _refuse_flags_of_hugging_face_directory(
    location: str, job_file: str | None, best: bool
) -> None:
    if job_file is not None or best:
        argument = repr(job_file)
        if best:
            argument = "--best"
        raise UsageError(
            f"{argument}: a Hugging Face directory is one model, and says itself which",
            where=location,
        )


def _is_hugging_face_directory(location: str) -> bool:
    """True if `save_pretrained` or `phalanx checkpoint export` wrote the directory."""
    path = Path(location)
    if is_store_url(location) or not (path / CONFIG_FILE_NAME).is_file():
        return False
    return not (path / MANIFEST_FILE_NAME).is_file() and not (path / "job.json").is_file()


def _open_hugging_face_directory(location: str, overrides: Sequence[str]) -> TrainedModel:
    path = Path(location)
    config = read_hugging_face(f"{HUGGING_FACE_PREFIX}{location}")
    settings = [f"model.kind={HUGGING_FACE_PREFIX}{path.absolute()}"]
    if (path / TOKENIZER_FILE).is_file() and not any(
        text.startswith("data.tokenizer=") for text in overrides
    ):
        settings.append(f"data.tokenizer={path.absolute()}")
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    if isinstance(positions, int) and 0 < positions < Data().seq_len:
        settings.append(f"data.seq_len={positions}")
    job = load_job(None, [*settings, *overrides])
    if find_weights_directory(f"{HUGGING_FACE_PREFIX}{path}") is None:
        raise LayoutError(
            "there are no weights in it",
            where=location,
            fix="give a directory with model.safetensors",
        )
    num_ranks: int | None = 1
    if _do_overrides_set_layout(overrides):
        num_ranks = None
    return TrainedModel(location, job, None, None, None, None, tuple(overrides), num_ranks, "")
