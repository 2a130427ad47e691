"""`SearchTask`: the job, the model and the cluster of one search for a layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.core.errors import LayoutError
from phalanx.core.units import plural
from phalanx.job.costs import ModelCosts
from phalanx.job.model import measure_or_build_model_shape
from phalanx.job.schema import Job
from phalanx.plan.cluster import Cluster
from phalanx.plan.degree_checks import (
    check_context_parallel,
    check_gradient_compression,
    check_tensor_parallel,
)
from phalanx.plan.degrees import choose_num_ranks
from phalanx.plan.described_cluster import choose_cluster_of_job, resize_cluster
from phalanx.plan.precision import require_gpus_multiply, resolve_precision
from phalanx.plan.search.space import OpenKeys, list_open_keys
from phalanx.plan.workload import require_trained_parameters

if TYPE_CHECKING:
    from phalanx.job.module_probe import SampleForm, TellProgress


@dataclass(frozen=True)
class SearchTask:
    """One search: a job whose precision is decided, its model, and the cluster with its ranks."""

    job: Job
    shape: ModelCosts
    cluster: Cluster
    num_ranks: int
    vocab_size: int | None = None
    offloads: bool = False
    """Host memory may be used, and tp may leave the innermost links."""
    num_unused_devices: int = 0
    """GPUs of the cluster that the job asks for no rank on."""
    precision_reason: str = ""
    """Why the job computes in its type of numbers; "" where it names the type itself."""

    @property
    def open_keys(self) -> OpenKeys:
        return list_open_keys(
            self.job, self.shape, self.cluster, self.num_ranks, offloads=self.offloads
        )


def build_search_task(
    job: Job,
    *,
    cluster: Cluster | None = None,
    shape: ModelCosts | None = None,
    vocab_size: int | None = None,
    sample_form: SampleForm | None = None,
    tell: TellProgress | None = None,
) -> SearchTask:
    """The search for a job, on all devices of the cluster that it describes (or of this machine),
    or on the ranks that it names. `sample_form`: of a user's own dataset for a module of theirs.
    `tell` hears how far the measuring of a module is."""
    cluster = cluster or choose_cluster_of_job(job)
    job, why_precision = resolve_precision(job, cluster)
    require_gpus_multiply(job, cluster)
    if shape is None:
        shape = measure_or_build_model_shape(job, vocab_size, sample_form=sample_form, tell=tell)
    require_trained_parameters(shape)
    num_ranks = job.parallel.ranks or _multiply_fixed_degrees(job) or cluster.num_devices
    if cluster.device != "cuda" and job.parallel.ranks is None:
        num_ranks = choose_num_ranks(job, cluster, None).value
    if cluster.device == "cuda" and num_ranks > cluster.num_devices:
        fix = f"set cluster.nodes={resize_cluster(cluster, num_ranks).num_nodes}"
        if not cluster.is_described:
            fix = f"ask for {cluster.num_devices}, or name the GPUs of a larger one (--gpu NAME)"
        raise LayoutError(
            f"{plural(num_ranks, 'rank')} were asked for and the cluster has"
            f" {plural(cluster.num_devices, 'GPU')}",
            fix=fix,
        )
    num_unused = 0
    if cluster.device == "cuda" and num_ranks < cluster.num_devices:
        num_unused = cluster.num_devices - num_ranks
        cluster = resize_cluster(cluster, num_ranks)
    return SearchTask(
        job,
        shape,
        cluster,
        num_ranks,
        vocab_size,
        num_unused_devices=num_unused,
        precision_reason=why_precision,
    )


def _multiply_fixed_degrees(job: Job) -> int | None:
    """The ranks that the job's degrees make, where it gives both data-parallel ones."""
    parallel = job.parallel
    if not (parallel.dp_replicate and parallel.dp_shard):
        return None
    shares = parallel.dp_replicate * parallel.dp_shard
    return shares * parallel.degrees.model_parallel_size


def require_possible_degrees(task: SearchTask) -> None:
    """Raises LayoutError for degrees of the job that its model, or other keys, forbid on any number
    of ranks."""
    check_tensor_parallel(task.job, task.shape)
    check_context_parallel(task.job, task.shape)
    check_gradient_compression(task.job, task.num_ranks)
