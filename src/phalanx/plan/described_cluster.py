"""The cluster that a job describes: a GPU by name, a type of machine, a file; else this machine.

Torch-free.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from phalanx.core.errors import EnvironmentProblem, LayoutError, format_nearest_word_hint
from phalanx.core.files import read_whole_regular_file
from phalanx.core.units import plural
from phalanx.job.findings import explain_wrong_value
from phalanx.job.schema import Cluster as ClusterSection
from phalanx.job.schema import Job, Link
from phalanx.job.validate import replace_none_words
from phalanx.plan.accelerators import Accelerator, find_accelerator, find_accelerator_by_driver_name
from phalanx.plan.cluster import Cluster, LinkLevel, detect_cluster
from phalanx.plan.nvidia import list_visible_gpus

GIB = 2**30
# No cluster has as many GPUs.
MAX_DEVICES = 2**20
# Beyond these is a typo, or another unit.
POSSIBLE_FIGURES = {
    "memory_gib": (0.001, 1e6),
    "host_memory_gib": (0.001, 1e6),
    "price_per_hour": (1e-6, 1e6),
    "spot_price_per_hour": (1e-6, 1e6),
    "watts": (1, 1e5),
}
POSSIBLE_FIGURES_OF_LINKS = {
    "gb_s": (1e-6, 1e6),
    "latency_us": (1e-6, 1e7),
    "oversubscription": (1, 1e6),
}
# What [cluster] says of machines: how many and how joined, and figures of one.
KEYS_OF_SIZE = ("nodes", "gpus_per_node", "links")
KEYS_OF_COST = ("price_per_hour", "spot_price_per_hour", "watts")
KEYS_OF_MACHINES = (*KEYS_OF_SIZE, *KEYS_OF_COST, "host_memory_gib")
# Networks whose shape no formula of the time of a step reads: they count as a switch.
UNTIMED_TOPOLOGIES = ("torus", "dragonfly")
# Bytes a second of a network that is given in bits.
_GBYTES_PER_GBIT = 1 / 8


@dataclass(frozen=True)
class InstanceType:
    """A machine that a cloud rents out. Prices are samples: US dollars an hour at `as_of`."""

    name: str
    cloud: str
    gpu: str
    gpus_per_node: int
    source: str
    is_checked: bool
    as_of: str = ""
    network_gbit: float | None = None
    host_memory_gib: float | None = None
    on_demand_per_hour: float | None = None
    spot_per_hour: float | None = None
    note: str = ""


@cache
def list_instance_types() -> dict[str, InstanceType]:
    """Every machine of the table, by name."""
    text = files("phalanx.plan").joinpath("instances.toml").read_text(encoding="utf-8")
    return {name: InstanceType(name, **entry) for name, entry in tomllib.loads(text).items()}


def find_instance_type(name: str) -> InstanceType:
    """The machine called `name`. Raises LayoutError, with the nearest name, for another."""
    table = list_instance_types()
    instance = table.get(name)
    if instance is None:
        raise LayoutError(
            f"cluster.instance: no machine is called {name!r}",
            fix=format_nearest_word_hint(name, tuple(table)) or f"one of {', '.join(table)}",
        )
    return instance


def choose_cluster_of_job(job: Job) -> Cluster:
    """The cluster that a plan of the job is for: the one that it describes, else this machine, of
    whose GPUs the job may say prices, power and host memory.

    Raises LayoutError (exit 3) for a description that does not hold, EnvironmentProblem (exit 6)
    like `detect_cluster`.
    """
    if not job.cluster.has_described_machine:
        return _add_stated_figures(detect_cluster(job.cluster.device), job.cluster)
    return build_described_cluster(job.cluster, job.parallel.ranks)


def _add_stated_figures(cluster: Cluster, section: ClusterSection) -> Cluster:
    """`cluster`, which was found here, with the figures of its machine that the section gives; no
    plan for CPUs reads them."""
    if cluster.device != "cuda":
        return cluster
    _require_possible_figures(section)
    host_bytes = cluster.host_memory_bytes
    if section.host_memory_gib is not None:
        host_bytes = round(section.host_memory_gib * GIB)
    return replace(
        cluster,
        host_memory_bytes=host_bytes,
        price_per_hour=section.price_per_hour,
        spot_price_per_hour=section.spot_price_per_hour,
        watts=section.watts or cluster.watts,
        price_note=_describe_price_source(section, None),
    )


def list_cluster_keys_without_effect(job: Job) -> list[str]:
    """The keys of [cluster] that nothing reads which is for this machine, in a job that names no
    GPUs to plan for."""
    given = [key for key in KEYS_OF_MACHINES if getattr(job.cluster, key)]
    if job.cluster.has_described_machine or not given:
        return []
    cluster, read = detect_cluster(job.cluster.device), set()
    if cluster.device == "cuda":
        read.add("host_memory_gib")
    if cluster.accelerator is not None:
        read.update(KEYS_OF_COST)
    return [f"cluster.{key}" for key in given if key not in read]


def require_cluster_keys_have_effect(job: Job) -> None:
    """Raises LayoutError for the keys of `list_cluster_keys_without_effect`: a plan would answer
    another question."""
    unread = list_cluster_keys_without_effect(job)
    if unread:
        raise LayoutError(
            f"without the name of a GPU the plan is for this machine, and {' and '.join(unread)}"
            f" {'has' if len(unread) == 1 else 'have'} no effect",
            fix="add --gpu NAME, --instance TYPE or --cluster FILE, or leave"
            f" {'it' if len(unread) == 1 else 'them'} out",
        )


def build_described_cluster(section: ClusterSection, num_ranks: int | None = None) -> Cluster:
    """The cluster that [cluster] describes. What it leaves out is what its GPU or its machine is
    usually sold with; the number of machines is what `num_ranks` take."""
    if section.file is not None:
        section = _merge_cluster_file(section, section.file)
    if section.device == "cpu":
        raise LayoutError(
            "cluster.device is cpu, and the section names GPUs",
            fix="leave cluster.device out, or cluster.gpu, cluster.instance and cluster.file",
        )
    _require_possible_figures(section)
    instance = None
    if section.instance is not None:
        instance = find_instance_type(section.instance)
        if section.gpu is not None and section.gpu.lower() != instance.gpu:
            raise LayoutError(
                f"cluster.gpu is {section.gpu!r}, and {instance.name} has {instance.gpu}",
                fix="leave cluster.gpu out",
            )
    elif section.gpu is None:
        raise LayoutError("the cluster names no GPU", fix="set cluster.gpu or cluster.instance")
    accelerator = find_accelerator(section.gpu or (instance.gpu if instance else ""))
    return _build_cluster_from_section(section, instance, accelerator, num_ranks or 1)


def _require_possible_figures(section: ClusterSection) -> None:
    """Raises LayoutError for a figure that no machine has: a typo, or another unit."""
    for key, limits in POSSIBLE_FIGURES.items():
        _require_possible_figure(f"cluster.{key}", getattr(section, key), limits)
    for link in section.links:
        for key, limits in POSSIBLE_FIGURES_OF_LINKS.items():
            name = f"cluster.links: {key} of {link.name!r:.60}"
            _require_possible_figure(name, getattr(link, key), limits)


def _require_possible_figure(name: str, value: float | None, limits: tuple[float, float]) -> None:
    least, most = limits
    if value is not None and not least <= value <= most:
        raise LayoutError(
            f"{name} is {value:g}, which no machine has",
            fix=f"give a number from {least:g} to {most:g}",
        )


def _build_cluster_from_section(
    section: ClusterSection,
    instance: InstanceType | None,
    accelerator: Accelerator,
    num_ranks: int,
) -> Cluster:
    per_node = section.gpus_per_node or accelerator.gpus_per_node
    if instance is not None:
        per_node = section.gpus_per_node or instance.gpus_per_node
    num_devices = per_node * (section.nodes or -(-num_ranks // per_node))
    if num_devices > MAX_DEVICES:
        raise LayoutError(
            f"the cluster has {num_devices:,} GPUs, and a plan is for at most {MAX_DEVICES:,}",
            fix="name fewer machines or GPUs",
        )
    memory_gib = section.memory_gib or accelerator.memory_gib
    major, minor = accelerator.compute_capability.split(".")
    name = accelerator.name
    if instance is not None:
        name = f"{instance.name} ({accelerator.name})"
    host_gib, price, spot_price = section.host_memory_gib, None, None
    if instance is not None:
        host_gib = host_gib or instance.host_memory_gib
        price, spot_price = instance.on_demand_per_hour, instance.spot_per_hour
    return Cluster(
        "cuda",
        num_devices,
        round(memory_gib * GIB),
        name,
        (int(major), int(minor)),
        accelerator,
        per_node,
        _build_link_levels(section, instance, accelerator, per_node, num_devices),
        None if host_gib is None else round(host_gib * GIB),
        section.price_per_hour or price,
        section.spot_price_per_hour or spot_price,
        section.watts or accelerator.watts or None,
        _describe_price_source(section, instance),
        is_described=True,
        network_note=_describe_assumed_network(section, instance, accelerator),
        nic_gb_s=_find_nic_gb_s(instance),
    )


def _describe_assumed_network(
    section: ClusterSection, instance: InstanceType | None, accelerator: Accelerator
) -> str:
    """A line where the table does not know the network of a machine, and that which its GPUs are
    usually sold with stands in; "" elsewhere."""
    if instance is None or instance.network_gbit is not None or section.links:
        return ""
    return (
        f"the network of {instance.name} is not known: {accelerator.nic_gb_s:g} GB/s per GPU, which"
        f" {accelerator.name} are usually sold with, is assumed; say yours in cluster.links"
    )


def describe_untimed_topologies(cluster: Cluster) -> str:
    """A line where levels of links are of a topology that no time of a step knows; "" elsewhere."""
    levels = [level for level in cluster.links if level.topology in UNTIMED_TOPOLOGIES]
    if not levels:
        return ""
    names = " and ".join(f"{level.name!r:.60} ({level.topology})" for level in levels)
    return (
        f"cluster.links: {names} counts as a switch: that messages share links on their way is in"
        " no time; say in gb_s, or in oversubscription, what is left where all send"
    )


def _describe_price_source(section: ClusterSection, instance: InstanceType | None) -> str:
    """The prices of a machine and hour, their source, how old they are, and whether somebody
    compared them with it; "" where there are none."""
    of_job, of_table = [], []
    prices = (
        (section.price_per_hour, instance and instance.on_demand_per_hour, ""),
        (section.spot_price_per_hour, instance and instance.spot_per_hour, " on spot machines"),
    )
    for stated_price, listed_price, which in prices:
        if stated_price is not None:
            of_job.append(f"${stated_price:,.2f}{which}")
        elif listed_price is not None:
            of_table.append(f"${listed_price:,.2f}{which}")
    notes = []
    if of_table:
        assert instance is not None
        notes.append(
            f"{instance.name} {' and '.join(of_table)} a machine and hour"
            f" {_describe_price_age(instance)}"
        )
    if of_job:
        notes.append(f"{' and '.join(of_job)} a machine and hour, as the job says")
    return "; ".join(notes)


def _describe_price_age(instance: InstanceType) -> str:
    """How old the prices of a machine are, whether somebody compared them, and their source."""
    checked = "compared with its source" if instance.is_checked else "unchecked"
    age = f"as of {instance.as_of}" if instance.as_of else "of unknown date"
    if " to " in instance.as_of:
        age = f"of an unrecorded day in {instance.as_of}"
    return f"{age} ({checked}: {instance.source})"


def _build_link_levels(
    section: ClusterSection,
    instance: InstanceType | None,
    accelerator: Accelerator,
    per_node: int,
    num_devices: int,
) -> tuple[LinkLevel, ...]:
    """The levels of links: those of the section, else NVLink's domain and the network."""
    if section.links:
        return _validate_link_levels(section.links, num_devices)
    domain = per_node
    if accelerator.link_domain > accelerator.gpus_per_node:
        domain = accelerator.link_domain  # NVLink that joins the machines of a rack
    levels = [LinkLevel("node", domain, accelerator.link_gb_s)]
    if num_devices > domain:
        nic_gb_s = _find_nic_gb_s(instance) or accelerator.nic_gb_s
        levels.append(LinkLevel("network", num_devices, nic_gb_s))
    return tuple(levels)


def _find_nic_gb_s(instance: InstanceType | None) -> float | None:
    """GB a second of each GPU of a machine to others; None where the table does not know."""
    if instance is None or instance.network_gbit is None:
        return None
    return instance.network_gbit * _GBYTES_PER_GBIT / instance.gpus_per_node


def _validate_link_levels(links: tuple[Link, ...], num_devices: int) -> tuple[LinkLevel, ...]:
    """`links` as levels, of which the last joins all devices. Raises LayoutError for levels that
    do not grow or do not reach every device."""
    levels = []
    below = 0
    for link in links:
        if link.num_devices <= below:
            raise LayoutError(
                f"cluster.links: {link.name!r} joins {link.num_devices} devices, and the level"
                f" before it {below}",
                fix="list the levels from the innermost outwards",
            )
        below = link.num_devices
        levels.append(
            LinkLevel(
                link.name,
                link.num_devices,
                link.gb_s,
                link.latency_us,
                link.oversubscription,
                link.topology,
            )
        )
    if below < num_devices:
        raise LayoutError(
            f"cluster.links: the outermost level joins {below} of {num_devices} devices",
            fix=f"add a level with num_devices = {num_devices}",
        )
    return tuple(levels)


def _merge_cluster_file(section: ClusterSection, path: str) -> ClusterSection:
    """`section` on top of what the file at `path` says."""
    try:
        # utf-8-sig: editors of Windows put a byte order mark in front, which TOML does not know.
        body = tomllib.loads(read_whole_regular_file(Path(path)).decode("utf-8-sig"))
    except OSError as error:
        raise LayoutError(
            f"cluster.file: {path!r} cannot be read", why=str(error.strerror or error)
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise LayoutError(f"cluster.file: {path!r} is not TOML", why=str(error)) from None
    except UnicodeDecodeError as error:
        raise LayoutError(
            f"cluster.file: {path!r} is not UTF-8 text (byte {error.start})", fix="save it as UTF-8"
        ) from None
    except (ValueError, RecursionError):  # int() refuses more than 4,300 digits
        raise LayoutError(
            f"cluster.file: {path!r} is not TOML of a cluster",
            why="a number is too long, or the nesting too deep",
        ) from None
    section_values: dict[str, Any] = json.loads(section.model_dump_json(exclude_unset=True))
    section_values.pop("file", None)
    try:
        stored = replace_none_words({"cluster": body})["cluster"] | section_values
        merged = ClusterSection.model_validate_json(json.dumps(stored, default=str))
    except ValidationError as error:
        raise _describe_bad_cluster_file(path, error) from None
    if merged.file is not None:
        raise LayoutError(f"cluster.file: {path!r} names another file")
    return merged


def _describe_bad_cluster_file(path: str, error: ValidationError) -> LayoutError:
    """The error for the values of a cluster file that are none, or that have no such key."""
    problems = []
    for found in error.errors(include_url=False):
        *above, name = map(str, found["loc"])
        # As a job file is told: the section of a job has the same keys.
        problem = explain_wrong_value(("cluster", *found["loc"]), found["input"]).what
        if found["type"] == "missing":
            problem = "is missing"
        if found["type"] == "extra_forbidden":
            problem = "no key of a cluster"
            known = tuple((Link if above else ClusterSection).model_fields)
            fix = format_nearest_word_hint(name, known) or f"one of {', '.join(known)}"
            if name == "cluster":
                fix = "the keys stand at the top of the file, without [cluster]"
            problem += f" ({fix})"
        problems.append(f"{'.'.join((*above, name))}: {problem}")
    return LayoutError(f"cluster.file: {path!r}: {'; '.join(problems)}")


def require_cluster_is_this_machine(job: Job) -> None:
    """Raises EnvironmentProblem (exit 6) for a job that is planned for GPUs which this machine
    has not."""
    difference = describe_absent_gpus(job)
    if difference:
        raise EnvironmentProblem(
            difference,
            fix=(
                "leave cluster.gpu, cluster.instance and cluster.file out to train here; phalanx"
                " plan plans for them anywhere"
            ),
        )


def describe_absent_gpus(job: Job) -> str:
    """What the job is planned for and what this machine has, where these are other GPUs; ""
    elsewhere."""
    if not job.cluster.has_described_machine:
        return ""
    planned, gpus = build_described_cluster(job.cluster), list_visible_gpus()
    assert planned.accelerator is not None
    present = "no GPU"
    if gpus:
        present = plural(len(gpus), gpus[0].name)
        accelerator = find_accelerator_by_driver_name(
            gpus[0].name, min(gpu.memory_bytes for gpu in gpus)
        )
        if accelerator == planned.accelerator:
            return ""
    return f"the job is planned for {planned.name}, and this machine has {present}"


def resize_cluster(cluster: Cluster, num_devices: int) -> Cluster:
    """`cluster` with another number of devices, its outermost level of links joining them all."""
    links = list(cluster.links)
    while links and links[-1].num_devices >= num_devices and len(links) > 1:
        if links[-2].num_devices < num_devices:
            break
        links.pop()
    if links and links[-1].num_devices < num_devices:
        outermost = links[-1]
        if len(links) == 1 and cluster.accelerator is not None:
            nic_gb_s = cluster.nic_gb_s or cluster.accelerator.nic_gb_s
            links.append(LinkLevel("network", num_devices, nic_gb_s))
        else:
            links[-1] = replace(outermost, num_devices=num_devices)
    return replace(cluster, num_devices=num_devices, links=tuple(links))
