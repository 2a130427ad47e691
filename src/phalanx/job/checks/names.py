"""Names in a job that stand for code: a file in a folder of ours, or something of the user's
own."""

from __future__ import annotations

import importlib.util
import os

from phalanx.core import registry
from phalanx.core.errors import LayoutError, format_nearest_word_hint
from phalanx.job.checks.check import declare_check, make_finding
from phalanx.job.findings import Finding, shorten_to_one_line
from phalanx.job.hugging_face import CONFIG_FILE_NAME, is_hugging_face, read_model_config
from phalanx.job.presets import list_preset_names
from phalanx.job.schema import Job

MODELS, SINKS = "phalanx.nn.models", "phalanx.observe.sinks"
MAIN_MODULE_PREFIX = "__main__:"
OPTIMIZERS, COMPRESSION_HOOKS_PACKAGE = "phalanx.optim.optimizers", "phalanx.parallel.hooks"


@declare_check("model.kind")
def check_model_exists(job: Job) -> list[Finding]:
    if job.model.kind is None:
        return []
    if is_hugging_face(job.model.kind):
        try:
            read_model_config(job.model.kind, job.model.args)
        except LayoutError as error:
            return [
                make_finding(
                    "model.kind", error.what, "; ".join(filter(None, (error.why, error.fix)))
                )
            ]
        return []
    return _find_unknown_kind(
        "model.kind",
        job.model.kind,
        MODELS,
        "model",
        "package.module:factory",
        _suggest_preset(job.model.kind),
    )


def _suggest_preset(kind: str) -> str:
    """The presets that begin with a name that other trainers give a family or a shape ("llama",
    "gpt2"), as a fix."""
    if os.path.isfile(os.path.join(os.path.expanduser(kind), CONFIG_FILE_NAME)):
        return f'did you mean "model.kind=hf:{kind}"?'
    name = kind.lower().removesuffix("forcausallm").removesuffix("lmheadmodel")
    presets = []
    if name:  # every preset begins with nothing
        presets = [preset for preset in list_preset_names() if preset.startswith(name)]
    if not presets:
        suggestion = format_nearest_word_hint(name, list_preset_names())
        presets = [preset for preset in list_preset_names() if preset in suggestion]
    # The name of one preset, said as kind: the others that begin so are not meant.
    if name in presets:
        presets = [name]
    if not presets:
        return ""
    shown = " or ".join(f'"model.preset={preset}"' for preset in presets[:2])
    advice = f"did you mean {shown}?"
    if len(presets) > 2:
        advice += f" ({len(presets)} presets begin so: phalanx plan --models)"
    return advice


@declare_check("model.kind", "model.args")
def check_model_args_have_factory(job: Job) -> list[Finding]:
    if job.model.is_foreign or not job.model.args:
        return []
    problem = f'is for your own factory, and model.kind is "{job.model.kind or "decoder"}"'
    return [
        make_finding(
            "model.args", problem, 'set model.kind = "package.module:factory", or remove model.args'
        )
    ]


@declare_check("model.objective")
def check_objective_is_a_name(job: Job) -> list[Finding]:
    if job.model.objective is None or is_user_object_name(job.model.objective):
        return []
    return [
        make_finding("model.objective", f"{job.model.objective!r} is not package.module:function")
    ]


@declare_check("optim.kind")
def check_optimizer_exists(job: Job) -> list[Finding]:
    return _find_unknown_kind(
        "optim.kind", job.optim.kind, OPTIMIZERS, "optimizer", "package.module:build"
    )


@declare_check("observe.sinks")
def check_sinks_exist(job: Job) -> list[Finding]:
    findings = []
    for index, sink in enumerate(job.observe.sinks or ()):
        # Others call it so, and here it is no sink: it has the facts of all ranks.
        instead = "set observe.metrics_port" if sink == "prometheus" else ""
        findings += _find_unknown_kind(
            f"observe.sinks.{index}", sink, SINKS, "sink", "package.module:Class", instead
        )
    return findings


@declare_check("parallel.compress")
def check_compression_exists(job: Job) -> list[Finding]:
    kind, known = job.parallel.compress, ["none", *list_kinds_of_package(COMPRESSION_HOOKS_PACKAGE)]
    # "none" alone: this installation lacks the folder, and no name can be checked.
    if kind in known or len(known) == 1:
        return []
    problem = f"unknown compression {shorten_to_one_line(kind)!r}"
    return [
        make_finding(
            "parallel.compress",
            problem,
            format_nearest_word_hint(kind, known) or f"one of {', '.join(known)}",
        )
    ]


@declare_check(
    "model.kind",
    "model.objective",
    "data.source",
    "data.mixture",
    "optim.kind",
    "observe.sinks",
    "resilience.inject",
)
def check_names_reach_ranks(job: Job) -> list[Finding]:
    """A finding for each name that a notebook's cell or the script itself defines: ranks are
    other processes and cannot import it."""
    names = {
        "model.kind": job.model.kind,
        "model.objective": job.model.objective,
        "data.source": job.data.source,
        "optim.kind": job.optim.kind,
    }
    for number, part in enumerate(job.data.mixture):
        names[f"data.mixture.{number}.source"] = part.source
    for number, sink in enumerate(job.observe.sinks or ()):
        names[f"observe.sinks.{number}"] = sink
    for number, fault in enumerate(job.resilience.inject):
        names[f"resilience.inject.{number}"] = fault
    return [
        _make_main_module_finding(key, name)
        for key, name in names.items()
        if name and name.startswith(MAIN_MODULE_PREFIX)
    ]


def _make_main_module_finding(key: str, name: str) -> Finding:
    attribute = name.removeprefix(MAIN_MODULE_PREFIX)
    problem = (
        f"{name!r} is in a notebook's cell or the script itself, and ranks are other processes:"
        " they cannot import it"
    )
    return make_finding(
        key,
        problem,
        f'put it into a file beside it, say my_code.py, and write {key}="my_code:{attribute}"',
    )


CHECKS = (
    check_names_reach_ranks,
    check_model_exists,
    check_model_args_have_factory,
    check_objective_is_a_name,
    check_optimizer_exists,
    check_sinks_exist,
    check_compression_exists,
)


def _find_unknown_kind(
    key: str, kind: str, package: str, noun: str, foreign: str, instead: str = ""
) -> list[Finding]:
    """A finding unless `kind` is a module of `package` or a well-formed name of the user's own.

    `instead`: advice for it.
    """
    if registry.is_foreign(kind):
        if is_user_object_name(kind):
            return []
        return [make_finding(key, f"{kind!r} is not {foreign}")]
    known = list_kinds_of_package(package)
    if not known or kind in known:
        return []
    fix = (
        format_nearest_word_hint(kind, known)
        or instead
        or f"{noun}s are {', '.join(known)}, or {foreign} for your own"
    )
    return [make_finding(key, f"unknown {noun} {kind!r}", fix)]


def list_kinds_of_package(package: str) -> list[str]:
    """The kinds in a folder of phalanx; none if this installation lacks it, and then names
    cannot be checked."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # not even the room that the folder would be in
        return []
    if spec is None:
        return []
    return registry.list_modules_of_registry(package)


def is_user_object_name(name: str) -> bool:
    """True for "package.module:name" of identifiers."""
    module, _, attribute = name.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))
