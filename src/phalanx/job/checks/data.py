"""Questions about the [data] section that one key cannot answer: what a source can have, and
which keys count."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.core.errors import LayoutError
from phalanx.job.findings import Finding
from phalanx.job.model import build_model_shape, find_vocab_size_of
from phalanx.job.schema import Data, Job
from phalanx.job.user_dataset import is_own_dataset

Question = Callable[[Job], list[Finding]]

MIN_SOURCE_SHARE = 1 / 2**16  # of a mixture's samples: what its table can tell


def check_mixture_excludes_source(job: Job) -> list[Finding]:
    if not job.data.mixture or job.data.source == Data().source:
        return []
    problem = f"there is a mixture, and data.source is {job.data.source!r} besides"
    return [_make_data_finding("source", problem, "make it one of the [[data.mixture]] tables")]


def check_mixture_is_of_tokens(job: Job) -> list[Finding]:
    problem, fix = (
        "your own dataset cannot be a part of a mixture",
        "mix inside your dataset: it gets every index",
    )
    return [
        Finding(("data", "mixture", number, "source"), problem, fix)
        for number, part in enumerate(job.data.mixture)
        if is_own_dataset(part.source)
    ]


def check_mixture_weights_are_not_tiny(job: Job) -> list[Finding]:
    total = sum(part.weight for part in job.data.mixture)
    return [
        Finding(
            ("data", "mixture", number, "weight"),
            f"a share of {part.weight / total:.2g} is below one sample in"
            f" {round(1 / MIN_SOURCE_SHARE)}",
            "leave the source out, or raise its weight",
        )
        for number, part in enumerate(job.data.mixture)
        if part.weight / total < MIN_SOURCE_SHARE
    ]


def check_data_args_have_own_dataset(job: Job) -> list[Finding]:
    if not job.data.args or is_own_dataset(job.data.source):
        return []
    problem = f"is for your own dataset, and data.source is {job.data.source!r}"
    return [
        _make_data_finding(
            "args", problem, 'set data.source = "package.module:factory", or remove data.args'
        )
    ]


def check_own_dataset_reads_key(key: str, job: Job) -> list[Finding]:
    """A finding if `key` was changed for a dataset of the user's own, which phalanx neither
    tokenizes nor packs."""
    if not is_own_dataset(job.data.source) or job.data.mixture:
        return []
    if getattr(job.data, key) == getattr(Data(), key):
        return []
    return [
        _make_data_finding(
            key, f"{key} is not read where data.source is your own dataset", "do it in the dataset"
        )
    ]


def check_own_dataset_has_vocabulary(job: Job) -> list[Finding]:
    if (
        job.model.is_foreign
        or not is_own_dataset(job.data.source)
        or job.data.mixture
        or _does_model_read_images(job)
    ):
        return []
    try:
        known = find_vocab_size_of(job.model)
    except LayoutError:
        return []
    if known is not None:
        return []
    problem = (
        "model.vocab_size must be given where data.source is your own dataset: nothing else says"
        " how many ids there are"
    )
    return [Finding(("model", "vocab_size"), problem)]


def check_images_have_own_dataset(job: Job) -> list[Finding]:
    if not _does_model_read_images(job) or (
        is_own_dataset(job.data.source) and not job.data.mixture
    ):
        return []
    problem = f"the model reads images, and data.source {job.data.source!r} holds tokens"
    return [
        _make_data_finding(
            "source", problem, 'give your own dataset: data.source = "package.module:factory"'
        )
    ]


def _does_model_read_images(job: Job) -> bool:
    if job.model.is_foreign:
        return False
    try:
        # Any vocabulary does: what a sample is does not depend on it.
        return build_model_shape(job, vocab_size=1).reads_images
    except (LayoutError, ValueError, ArithmeticError, TypeError):
        # Other questions say what is wrong with it.
        return False


def _make_data_finding(key: str, problem: str, fix: str = "") -> Finding:
    return Finding(("data", key), problem, fix)


def _make_check_of_key(key: str) -> Question:
    def question(job: Job) -> list[Finding]:
        return check_own_dataset_reads_key(key, job)

    return question


# Each question with the keys that it is about: it is asked if the user gave one of them.
DATA_CHECKS: tuple[tuple[Question, tuple[str, ...]], ...] = (
    (check_mixture_excludes_source, ("data.mixture", "data.source")),
    (check_mixture_is_of_tokens, ("data.mixture",)),
    (check_mixture_weights_are_not_tiny, ("data.mixture",)),
    (check_data_args_have_own_dataset, ("data.args", "data.source")),
    *(
        (_make_check_of_key(key), ("data.source", f"data.{key}"))
        for key in ("tokenizer", "column", "document_masks")
    ),
    (
        check_own_dataset_has_vocabulary,
        ("data.source", "model.vocab_size", "model.preset", "model.kind"),
    ),
    # Not by the model's keys alone: a shape can be planned before there is data.
    (check_images_have_own_dataset, ("data.source", "data.mixture")),
)
