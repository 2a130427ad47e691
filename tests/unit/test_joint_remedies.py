"""What is advised where nothing fits helps: keys alone, and keys that only help together."""

from __future__ import annotations

import pytest

from phalanx.job.load import load_job
from phalanx.plan.candidates import NoFitError
from phalanx.plan.cluster import Cluster
from phalanx.plan.planner import make_plan
from phalanx.plan.search.nearest import find_nearest_fits
from phalanx.plan.search.search import search_layouts
from phalanx.plan.search.task import build_search_task

GIB = 2**30
KEYS = (
    *("model.preset=llama3-8b", "cluster.gpu=a100-sxm-40", "train.global_batch_size=64"),
    *("parallel.zero_stage=3", "parallel.tp=1", "parallel.pp=1", "train.recompute=none"),
)
CUT_SEQUENCES = ("parallel.cp=1", "train.micro_batch_size=1")


@pytest.mark.parametrize(
    ("overrides", "pair"),
    [
        (CUT_SEQUENCES, "recompute + cp"),
        (CUT_SEQUENCES, "recompute + offload"),
        (CUT_SEQUENCES, "more ranks + recompute"),
        (("train.micro_batch_size=8",), "recompute + micro-batch"),
    ],
)
def test_keys_that_only_help_together_are_named_together(
    overrides: tuple[str, ...], pair: str
) -> None:
    keys = [*KEYS, *overrides, "data.seq_len=40960"]
    fits = {fit.axis: fit for fit in find_nearest_fits(build_search_task(load_job(None, keys)))}
    # Added to the command they give what is promised; the first of the pair is not enough.
    assert not set(pair.split(" + ")) & fits.keys()
    fit = fits[pair]
    promised = search_layouts(build_search_task(load_job(None, [*keys, *fit.change.split()])))
    assert promised.winner is not None
    assert promised.winner.memory.total_bytes == fit.ranked.memory.total_bytes
    assert promised.winner.step_s == fit.ranked.step_s
    assert fit.slowdown is not None


def test_where_one_key_is_enough_no_pair_with_it_is_named() -> None:
    keys = [*KEYS, *CUT_SEQUENCES, "data.seq_len=8192"]
    fits = find_nearest_fits(build_search_task(load_job(None, keys)))
    alone = {fit.axis for fit in fits if "+" not in fit.axis}
    assert {"tp", "recompute", "cp"} <= alone
    for fit in fits:
        assert fit.axis in alone or not alone & set(fit.axis.split(" + "))


SMALL = ("model.dim=256", "train.global_batch_size=64", "data.seq_len=4096")


@pytest.mark.parametrize(
    ("memory_gib", "overrides", "advice"),
    [
        (8, ("train.micro_batch_size=64", "model.num_layers=4"), "train.micro_batch_size=16"),
        (
            3,
            ("train.micro_batch_size=64", "model.num_layers=40"),
            "train.micro_batch_size=1 train.recompute=full",
        ),
        (
            3,
            ("train.micro_batch_size=1", "model.vocab_size=300000", "model.num_layers=1"),
            "train.loss_chunk_tokens=",
        ),
    ],
)
def test_the_keys_that_a_refused_plan_names_make_it_fit(
    memory_gib: int, overrides: tuple[str, ...], advice: str
) -> None:
    cluster = Cluster("cuda", 1, memory_gib * GIB)
    with pytest.raises(NoFitError) as caught:
        make_plan(load_job(None, [*SMALL, *overrides]), cluster=cluster)
    assert caught.value.fix is not None
    word, _, keys = caught.value.fix.partition(" ")
    assert word == "set"
    assert keys.startswith(advice)
    merged = dict(key.split("=") for key in (*overrides, *keys.split()))
    mended = [f"{key}={value}" for key, value in merged.items()]
    assert make_plan(load_job(None, [*SMALL, *mended]), cluster=cluster).chosen.fits


def test_a_plan_that_no_key_makes_fit_names_none() -> None:
    with pytest.raises(NoFitError, match="a smaller model or ranks with more memory") as caught:
        make_plan(
            load_job(None, ["model.dim=1024", "model.num_layers=40", "data.seq_len=131072"]),
            cluster=Cluster("cuda", 1, 3 * GIB),
        )
    assert "recompute" not in str(caught.value)
