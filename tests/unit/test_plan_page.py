"""The page of a plan: complete in itself, with the numbers of the JSON, and sliders over what the planner
computed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from phalanx.job.load import load_job
from phalanx.job.schema import Job
from phalanx.plan.advice import what_if
from phalanx.plan.advice.advise import PlanAdvice, advise_on_plan
from phalanx.plan.cluster import Cluster
from phalanx.plan.described_cluster import choose_cluster_of_job
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.search.result import PeakMemory, RankedLayout, SearchResult
from phalanx.plan.search.step_times import build_machine_rates, estimate_planned_step
from phalanx.report.plan_collect import collect_page_facts, collect_unfit_facts
from phalanx.report.plan_page import render_plan_page

EVIL = "<script>alert('x')</script>"
KEYS = [
    "model.preset=llama3-8b",
    "cluster.gpu=h100-sxm",
    "cluster.nodes=2",
    "data.seq_len=4096",
    "train.global_batch_size=64",
    "train.micro_batch_size=1",
    "parallel.tp=2",
    "parallel.pp=2",
    "parallel.zero_stage=1",
]
VOID = {"meta", "link", "br", "input"}


class Collector(HTMLParser):
    """Element counts, texts, and whether every element that is opened is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def planned() -> tuple[Job, Plan, Cluster, PlanAdvice]:
    job = load_job(None, KEYS)
    cluster = choose_cluster_of_job(job)
    plan = make_plan(job, cluster=cluster)
    return job, plan, cluster, advise_on_plan(job, plan, cluster, goodput=0.95)


@pytest.fixture(scope="module")
def grid(planned: Any) -> what_if.WhatIfGrid:
    job, plan, cluster, _ = planned
    with pytest.MonkeyPatch.context() as patch:
        # 12 plans are enough to see that each stands where it belongs.
        patch.setattr(what_if, "SEQ_LEN_AND_DEVICE_FACTORS", (1, 2))
        patch.setattr(what_if, "MICRO_BATCH_FACTORS", (1,))
        computed = what_if.compute_what_if(job, plan, cluster)
    assert computed is not None
    return computed


@pytest.fixture(scope="module")
def page(planned: Any, grid: Any) -> str:
    return render_plan_page(collect_page_facts(*planned, grid, None, "[model]\n"))


def test_the_page_is_well_formed_complete_and_small(page: str) -> None:
    collector = Collector(page)
    assert collector.open == []
    assert len(page.encode()) <= 400_000
    for name, value in collector.attributes:
        if name in ("src", "href"):
            assert value is not None
            assert value.startswith(("#", "data:"))
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)[^\s<\"]*\.(js|css|png)", page)
    assert "default-src 'none'" in page
    for section in ("ranking", "time", "memory", "pipeline", "what-if", "rules", "tables", "job"):
        assert f'<section id="{section}"' in page or f'id="{section}"' in page


def test_the_page_has_the_numbers_of_the_json(page: str, planned: Any) -> None:
    _, plan, _, advice = planned
    text = Collector(page).text
    body = json.loads(json.dumps(advice.to_json()))
    for rule in body["rules"]:
        assert rule["title"] in text
        assert rule["comparison"] in text
    for answer in body["decision_tables"]:
        assert answer["says"] in text
    for term, seconds in body["time"]["terms"].items():
        if seconds >= 1e-3:
            shown = f"{1e3 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"
            assert shown in text, term
    for size in plan.chosen.predicted_bytes.values():
        if size > 2**30:
            assert f"{size / 2**30:.1f} GiB" in page


def test_the_page_says_why_idle_time_and_bubble_are_two_numbers(page: str, planned: Any) -> None:
    _, plan, _, advice = planned
    assert plan.pipeline is not None
    idle, shares = float(plan.pipeline.timeline().bubble), advice.time.terms
    bubble = shares["bubble"] / sum(shares.values())
    assert f"{idle:.3f}" != f"{bubble:.3f}"
    text = Collector(page).text
    assert f"So it is {100 * idle:.1f} % here" in text
    assert f"the pipeline bubble under Time is {100 * bubble:.1f} %" in text


def test_layouts_of_a_ranking_have_the_numbers_that_texts_name_them_by(planned: Any) -> None:
    ranked = RankedLayout(
        *("zero3", Layout(dp_shard=16), 3, 1, 1, "", 1, "none", "none", {}),
        PeakMemory({"parameters": 2**30}, 2**36),
        None,
    )
    others = (replace(ranked, family="tp + zero1"), replace(ranked, family="hsdp (zero2)"))
    result = SearchResult("m", 1, "h100-sxm", 16, 4096, 64, ranked, others)
    text = Collector(render_plan_page(collect_page_facts(*planned, None, result))).text
    for words in ("1 · zero3", "2 · tp + zero1", "3 · hsdp (zero2)"):
        assert words in text
    # These have no time: nothing was to be measured.
    ranking = text[text.index("1 · zero3") : text.index("no time of a step is predicted")]
    assert ranking.count("not predicted") == 3
    assert "not measured" not in ranking


def test_text_of_strangers_is_escaped(planned: Any) -> None:
    job, plan, cluster, advice = planned
    model = replace(advice.facts.model, name=EVIL)
    evil = replace(advice, facts=replace(advice.facts, model=model))
    strange = replace(cluster, name=EVIL)
    page = render_plan_page(collect_page_facts(job, plan, strange, evil, None, None, EVIL))
    assert EVIL not in page
    assert "&lt;script&gt;" in page
    assert Collector(page).names.count("script") == 1


def test_the_grid_is_what_the_planner_says_at_its_points(planned: Any, grid: Any) -> None:
    _job, plan, _, _ = planned
    by_name = {axis.name: axis for axis in grid.axes}
    assert [axis.name for axis in grid.axes] == [
        "seq_len",
        "micro",
        "devices",
        "network",
        "recompute",
    ]
    seq_lens, devices = by_name["seq_len"].values, by_name["devices"].values
    networks, recomputes = by_name["network"].values, by_name["recompute"].values
    checked = 0
    for i, seq_len in enumerate(seq_lens):
        for j, num_devices in enumerate(devices):
            keys = [
                *KEYS,
                f"data.seq_len={seq_len}",
                f"cluster.nodes={num_devices // 8}",
                "train.recompute=full",
            ]
            other_job = load_job(None, keys)
            other_cluster = choose_cluster_of_job(other_job)
            other = make_plan(other_job, cluster=other_cluster)
            machine = build_machine_rates(other_cluster)
            assert machine is not None
            time = estimate_planned_step(other_job, other, other.model_shape, machine)
            assert time is not None
            seconds = time.total_s
            row = ((i * 1) * len(devices) + j) * len(networks) + networks.index(50.0)
            row = row * len(recomputes) + recomputes.index("full")
            assert grid.step_s[row] == pytest.approx(seconds)
            assert grid.peak_gib[row] == pytest.approx(other.chosen.total_bytes / 2**30)
            tokens = seq_len * 64 / seconds / num_devices
            assert grid.tokens_per_s[row] == pytest.approx(tokens)
            checked += 1
    assert checked == 4
    own = grid.memory_axis.values[grid.memory_axis.start]
    assert own == 80
    assert grid.capacity_gib[grid.memory_axis.start] == pytest.approx(plan.capacity_bytes / 2**30)


def find_start(grid: what_if.WhatIfGrid) -> int:
    """The row at which all sliders start."""
    row = 0
    for axis in grid.axes:
        row = row * len(axis.values) + axis.start
    return row


def test_untouched_sliders_show_the_step_above_them(planned: Any, grid: Any) -> None:
    """With a pipeline they showed its closed form, beside a simulated bubble above."""
    advice = planned[3]
    assert advice.time.terms["bubble"] > 0
    assert grid.step_s[find_start(grid)] == pytest.approx(advice.time.total_s, rel=1e-12)


def test_sliders_beyond_one_node_send_over_its_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """These points had NVLink between nodes, and no network to move."""
    monkeypatch.setattr(what_if, "SEQ_LEN_AND_DEVICE_FACTORS", (1, 2))
    monkeypatch.setattr(what_if, "MICRO_BATCH_FACTORS", (1,))
    keys = ["model.preset=gpt2", "train.global_batch_size=64", "data.seq_len=1024"]
    keys += ["train.micro_batch_size=1", "train.recompute=none", "parallel.zero_stage=none"]

    def plan_nodes(nodes: int) -> tuple[Job, Plan, Cluster]:
        where = ["cluster.instance=a2-highgpu-8g", f"cluster.nodes={nodes}"]
        job = load_job(None, [*keys, *where])
        cluster = choose_cluster_of_job(job)
        return job, make_plan(job, cluster=cluster), cluster

    grid = what_if.compute_what_if(*plan_nodes(1))
    assert grid is not None
    by_name = {axis.name: axis for axis in grid.axes}
    assert by_name["devices"].values == (8, 16)
    network = by_name["network"]
    assert network.values[network.start] == round(100 / 8 / 8, 3)  # Gbit/s of eight GPUs
    two = advise_on_plan(*plan_nodes(2))
    assert two.time is not None
    num_networks, num_recomputes = len(network.values), len(by_name["recompute"].values)
    one_more = find_start(grid) + num_networks * num_recomputes
    assert grid.step_s[one_more] == pytest.approx(two.time.total_s)
    # Twice the network is faster between nodes, and nothing within one.
    assert grid.step_s[one_more + num_recomputes] < grid.step_s[one_more]
    start = find_start(grid)
    assert grid.step_s[start + num_recomputes] == grid.step_s[start]


def test_the_slider_data_in_the_page_is_the_grid(page: str, grid: Any) -> None:
    match = re.search(r'<script type="application/json" class="grid">(.*?)</script>', page)
    assert match is not None
    assert json.loads(match.group(1)) == grid.to_json()
    points = [len(axis.values) for axis in grid.axes]
    product = 1
    for number in points:
        product *= number
    assert len(grid.step_s) == product
    # No formula of a model is in the page's script: it knows the grid's columns and no term.
    script = page.rpartition("<script>")[2]
    for word in ("flops", "bandwidth", "layers", "heads", "bytes"):
        assert word not in script.lower()


def test_a_page_of_images_counts_their_patches_and_has_no_length_to_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its tokens were those of sequences of data.seq_len, which the terminal did not say."""
    monkeypatch.setattr(what_if, "MICRO_BATCH_FACTORS", (1,))
    keys = ["model.preset=vit-b16", "cluster.gpu=h100-sxm", "train.global_batch_size=64"]
    job = load_job(None, [*keys, "parallel.ranks=8"])
    cluster = choose_cluster_of_job(job)
    plan = make_plan(job, cluster=cluster)
    advice = advise_on_plan(job, plan, cluster)
    assert advice.facts.batch.num_tokens == 64 * 197
    grid = what_if.compute_what_if(job, plan, cluster)
    assert grid is not None
    assert [len(axis.values) for axis in grid.axes if axis.name == "seq_len"] == [1]
    text = Collector(render_plan_page(collect_page_facts(job, plan, cluster, advice, grid))).text
    assert "64 images of 197 tokens a step" in text
    assert "Images of a micro-batch" in text


def test_a_page_without_time_says_so(planned: Any) -> None:
    job, plan, cluster, _ = planned
    unknown = replace(cluster, accelerator=None, links=())
    advice = advise_on_plan(job, plan, unknown)
    assert advice.time is None
    assert what_if.compute_what_if(job, plan, unknown) is None
    text = Collector(render_plan_page(collect_page_facts(job, plan, unknown, advice))).text
    assert "not predicted" in text
    assert "not judged" in text


def test_a_plan_for_this_machine_has_rules_and_a_page(planned: Any) -> None:
    job = load_job(None, ["parallel.ranks=2", "train.recompute=full"])
    cluster = Cluster("cpu", 2, 16 * 2**30)
    plan = make_plan(job, cluster=cluster)
    advice = advise_on_plan(job, plan, cluster)
    assert advice.facts.hardware.num_nodes == 1
    states = {verdict.name: verdict.state for verdict in advice.verdicts}
    assert states["recompute-where-needed"] == "fails"
    assert "not predicted" in render_plan_page(collect_page_facts(job, plan, cluster, advice))


def test_a_page_where_nothing_fits() -> None:
    result = SearchResult(
        "big", 10**12, "h100-sxm", 8, 8192, 64, None, smallest_bytes=2**40, capacity_bytes=2**36
    )
    text = Collector(render_plan_page(collect_unfit_facts(result))).text
    assert "does not fit" in text
    assert "1.0 TiB" in text
