"""A job that describes GPUs is verified with the axes that it states, and refused as any other."""

from __future__ import annotations

import pytest

from phalanx.core.errors import ExitCode, JobError, LayoutError
from phalanx.job.load import load_job
from phalanx.verify.choose import Selection, select_layout_cases

H100 = "cluster.gpu=h100-sxm"


def select(*overrides: str) -> Selection:
    job = load_job(None, overrides)
    return select_layout_cases(job, "asked", ranks=None, steps=1, shrink=True, types="float64")


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.ranks=4", "train.global_batch_size=6"),
        ("parallel.ranks=4", "train.global_batch_size=12", "train.micro_batch_size=2"),
        ("parallel.ranks=4", "parallel.dp_replicate=1", "parallel.dp_shard=2"),
        ("parallel.dp_replicate=2", "parallel.dp_shard=2", "train.global_batch_size=6"),
    ],
)
def test_a_wrong_batch_is_refused_as_without_described_gpus(overrides: tuple[str, ...]) -> None:
    with pytest.raises(JobError) as plain:
        load_job(None, overrides)
    with pytest.raises(LayoutError) as caught:
        select(*overrides, H100)
    assert caught.value.exit_code == ExitCode.JOB
    # Beside the key that it stands at, of which a loaded job knows the place.
    problem = str(plain.value).partition("override: ")[2].partition(": ")[2].partition(";")[0]
    assert problem in str(caught.value)
    assert "a plan may choose others for its GPUs" in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.ranks=4", "train.global_batch_size=8"),
        # Two data-parallel ranks share six.
        ("parallel.ranks=4", "parallel.tp=2", "train.global_batch_size=6"),
        ("parallel.ranks=4", "parallel.dp_replicate=2", "parallel.dp_shard=2"),
    ],
)
def test_a_batch_that_the_stated_axes_share_is_judged(overrides: tuple[str, ...]) -> None:
    (case,) = select(*overrides, H100).cases
    assert case.plan is not None
    assert case.plan.world_size == 4


@pytest.mark.parametrize(
    ("overrides", "is_said"),
    [
        ((H100, "parallel.ranks=1"), True),
        (("cluster.device=cuda",), True),
        (("cluster.device=cpu",), False),
    ],
)
def test_of_a_job_for_gpus_ranks_on_cpus_do_not_judge_what_gpus_do(
    overrides: tuple[str, ...], is_said: bool
) -> None:
    line = "what GPUs compute and send otherwise than CPUs do"
    assert (line in "".join(select(*overrides).not_judged)) == is_said
