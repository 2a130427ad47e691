"""Clusters that a job describes: by a GPU, a machine, a file; and what training says of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.core.errors import EnvironmentProblem, LayoutError
from phalanx.job.load import load_job
from phalanx.plan.accelerators import find_accelerator_by_driver_name, list_accelerators
from phalanx.plan.cluster import Cluster
from phalanx.plan.described_cluster import (
    choose_cluster_of_job,
    describe_untimed_topologies,
    list_instance_types,
    require_cluster_is_this_machine,
    require_cluster_keys_have_effect,
    resize_cluster,
)
from phalanx.plan.layout import Layout
from phalanx.plan.search.describe import format_scaling_table
from phalanx.plan.search.remarks import list_remarks_of_task
from phalanx.plan.search.result import PeakMemory, RankedLayout
from phalanx.plan.search.scaling import DeviceCountResult
from phalanx.plan.search.task import build_search_task

GIB = 2**30


def describe(*overrides: str) -> Cluster:
    return choose_cluster_of_job(load_job(None, list(overrides)))


def test_a_gpu_by_name_is_a_node_of_them_wherever_the_plan_is_made():
    cluster = describe("cluster.gpu=H100-SXM", "cluster.nodes=4")
    assert (cluster.device, cluster.num_devices, cluster.num_nodes) == ("cuda", 32, 4)
    assert cluster.memory_bytes == 80 * GIB
    assert [level.num_devices for level in cluster.links] == [8, 32]


def test_one_node_has_no_network():
    assert [level.name for level in describe("cluster.gpu=a100-sxm").links] == ["node"]


def test_an_instance_has_its_own_network_and_price():
    cluster = describe("cluster.instance=p4d.24xlarge", "cluster.nodes=2")
    assert cluster.accelerator is not None
    assert cluster.accelerator.name == "a100-sxm-40"
    assert cluster.links[-1].gb_s == pytest.approx(400 / 8 / 8)  # 400 Gbit/s for eight GPUs
    assert cluster.price_per_hour == list_instance_types()["p4d.24xlarge"].on_demand_per_hour
    assert describe("cluster.instance=p4d.24xlarge", "cluster.price_per_hour=1").price_per_hour == 1


def test_a_spot_price_says_whose_it_is():
    note = describe("cluster.instance=gpu-h100-sxm_8gpu-128vcpu-1600gb").price_note
    assert "$23.60 and $10.00 on spot machines a machine and hour of an unrecorded day" in note
    said = ("cluster.instance=p4d.24xlarge", "cluster.spot_price_per_hour=9")
    note = describe(*said).price_note
    assert note.startswith("p4d.24xlarge $32.77 a machine and hour of an unrecorded day")
    assert note.endswith("; $9.00 on spot machines a machine and hour, as the job says")
    assert describe("cluster.gpu=t4", "cluster.spot_price_per_hour=9").price_note == (
        "$9.00 on spot machines a machine and hour, as the job says"
    )


def test_every_instance_names_a_gpu_of_the_table_and_where_its_price_is_from():
    for instance in list_instance_types().values():
        assert instance.gpu in list_accelerators(), instance.name
        assert instance.source, instance.name


def test_a_file_describes_levels_of_links(tmp_path: Path):
    file = tmp_path / "cluster.toml"
    file.write_text(
        'gpu = "a100-sxm"\nnodes = 4\n'
        '[[links]]\nname = "nvlink"\nnum_devices = 8\ngb_s = 250\n'
        '[[links]]\nname = "spine"\nnum_devices = 64\ngb_s = 12\noversubscription = 2\n'
    )
    cluster = describe(f"cluster.file={file}")
    assert [(link.name, link.gb_s, link.oversubscription) for link in cluster.links] == [
        ("nvlink", 250, 1),
        ("spine", 12, 2),
    ]
    # What the job says itself comes before the file.
    assert describe(f"cluster.file={file}", "cluster.nodes=2").num_devices == 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu = ", "is not TOML"),
        (
            'gpu = "a100-sxm"\n[[links]]\nname = "n"\nnum_devices = 8\ngb_s = 1e-320\n',
            "cluster.links: gb_s of 'n' is 9.99989e-321, which no machine has; give a number from",
        ),
        (
            'gpu = "a100-sxm"\n[[links]]\nname = "n"\nnum_devices = 8\ngb_s = 9\n'
            "latency_us = 1e308\n",
            "cluster.links: latency_us of 'n' is 1e.308, which no machine has",
        ),
        (f"nodes = {'9' * 5000}", "a number is too long, or the nesting too deep"),
        (f"gpu = {'[' * 5000}", "a number is too long, or the nesting too deep"),
        ('gpu = "a100-sxm"\nnoodles = 2\n', "noodles"),
        (
            'gpu = "a100-sxm"\nnode = 2\n[[links]]\nname = "n"\nnum_devices = 8\ngb = 9\n',
            r'links.0.gb_s: is missing; links.0.gb: no key of a cluster \(did you mean "gb_s"'
            r'\?\); node: no key of a cluster \(did you mean "nodes"\?\)',
        ),
        ('gpu = "a100-sxm"\nnodes = "two"\n', "nodes"),
        ("nodes = 2\n", "names no GPU"),
        (
            'gpu = "a100-sxm"\nnodes = 4\n[[links]]\nname = "n"\nnum_devices = 8\ngb_s = 9\n',
            "joins 8 of 32",
        ),
        (
            'gpu = "a100-sxm"\n[[links]]\nname = "a"\nnum_devices = 8\ngb_s = 9\n'
            '[[links]]\nname = "b"\nnum_devices = 8\ngb_s = 9\n',
            "innermost outwards",
        ),
    ],
)
def test_a_file_that_does_not_hold_is_refused_in_a_line(tmp_path: Path, text: str, message: str):
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    with pytest.raises(LayoutError, match=message):
        describe(f"cluster.file={file}")


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path):
    (tmp_path / "latin.toml").write_bytes(b'gpu = "\xe9"')
    with pytest.raises(LayoutError, match=r"is not UTF-8 text \(byte 7\); save it as UTF-8"):
        describe(f"cluster.file={tmp_path / 'latin.toml'}")
    with pytest.raises(LayoutError, match="cannot be read"):
        describe(f"cluster.file={tmp_path / 'none.toml'}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.gpu=h100"], 'one of "h100-sxm" (80 GB), "h100-pcie" (80 GB)'),
        (["cluster.instance=p5.48xlarg"], "p5.48xlarge"),
        (["cluster.instance=p5.48xlarge", "cluster.gpu=a100-sxm"], "has h100-sxm"),
        (["cluster.gpu=h100-sxm", "cluster.device=cpu"], "cluster.device is cpu"),
    ],
)
def test_what_does_not_agree_is_refused(overrides: list[str], message: str):
    with pytest.raises(LayoutError) as raised:
        describe(*overrides)
    assert message in str(raised.value)


def test_training_refuses_a_job_that_is_planned_for_gpus_which_are_not_here(monkeypatch):
    monkeypatch.setattr("phalanx.plan.described_cluster.list_visible_gpus", lambda: ())
    with pytest.raises(EnvironmentProblem, match="planned for h100-sxm, and this machine has no"):
        require_cluster_is_this_machine(load_job(None, ["cluster.gpu=h100-sxm"]))
    require_cluster_is_this_machine(load_job(None, []))


def find_here(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> None:
    monkeypatch.setattr("phalanx.plan.described_cluster.detect_cluster", lambda device: cluster)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["cluster.nodes=4"], r"this machine, and cluster\.nodes has no effect; add --gpu NAME"),
        (["cluster.price_per_hour=90"], r"cluster\.price_per_hour has"),
        (["cluster.watts=700", "cluster.host_memory_gib=64"], "watts and cluster.* have no effect"),
        (['cluster.links=[{name="a",num_devices=8,gb_s=50}]'], r"cluster\.links has no effect"),
    ],
)
def test_keys_of_a_cluster_without_its_gpus_are_refused(monkeypatch, keys: list[str], words: str):
    """`phalanx plan --nodes 4` planned for this CPU, without a word."""
    find_here(monkeypatch, Cluster("cpu", 2, 16 * GIB))
    with pytest.raises(LayoutError, match=words):
        require_cluster_keys_have_effect(load_job(None, keys))
    require_cluster_keys_have_effect(load_job(None, [*keys, "cluster.gpu=h100-sxm"]))
    require_cluster_keys_have_effect(load_job(None, ["cluster.memory_gib=2"]))


def test_gpus_found_here_have_the_prices_of_the_job_and_no_other_number_of_machines(monkeypatch):
    find_here(monkeypatch, replace(describe("cluster.gpu=h100-sxm"), is_described=False))
    keys = ["cluster.price_per_hour=90", "cluster.watts=500", "cluster.host_memory_gib=512"]
    require_cluster_keys_have_effect(load_job(None, keys))
    cluster = describe(*keys)
    assert (cluster.price_per_hour, cluster.watts) == (90, 500)
    assert cluster.host_memory_bytes == 512 * GIB
    assert cluster.price_note == "$90.00 a machine and hour, as the job says"
    with pytest.raises(LayoutError, match=r"cluster\.nodes has no effect"):
        require_cluster_keys_have_effect(load_job(None, [*keys, "cluster.nodes=2"]))
    with pytest.raises(LayoutError, match="which no machine has"):
        describe("cluster.price_per_hour=1e300")
    with pytest.raises(LayoutError, match=r"the cluster has 8 GPUs; ask for 8, or name the GPUs"):
        build_search_task(load_job(None, ["model.preset=gpt2", "parallel.ranks=16"]))


@pytest.mark.parametrize(
    ("driver_name", "gib", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 79.6, "h100-sxm"),
        ("NVIDIA H100 PCIe", 79.6, "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-sxm-40"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-sxm"),
        ("NVIDIA L4", 22.5, "l4"),
        ("NVIDIA L40S", 44.9, "l40s"),
    ],
)
def test_a_driver_s_name_is_matched_to_the_table(driver_name: str, gib: float, name: str):
    accelerator = find_accelerator_by_driver_name(driver_name, round(gib * GIB))
    assert accelerator is not None
    assert accelerator.name == name


def test_a_torus_is_timed_as_a_switch_and_a_remark_says_so(tmp_path: Path):
    file = tmp_path / "cluster.toml"
    levels = [("nvlink", 8, "switch"), ("rail", 16, "fat-tree"), ("ring", 32, "torus")]
    file.write_text(
        'gpu = "h100-sxm"\nnodes = 4\n'
        + "".join(
            f'[[links]]\nname = "{name}"\nnum_devices = {n}\ngb_s = 50\ntopology = "{topology}"\n'
            for name, n, topology in levels
        )
    )
    job = load_job(None, [f"cluster.file={file}", "model.preset=gpt2", "data.seq_len=1024"])
    cluster = choose_cluster_of_job(job)
    words = describe_untimed_topologies(cluster)
    assert words.startswith("cluster.links: 'ring' (torus) counts as a switch")
    assert f"remark  {words}" in list_remarks_of_task(build_search_task(job))
    ranked = RankedLayout(
        *("ddp", Layout(dp_replicate=32), 0, 1, 1, "", 1, "none", "none", {}),
        PeakMemory({"parameters": 2**30}, 2**36),
        None,
    )
    notes = format_scaling_table([DeviceCountResult(32, ranked)], job, cluster, unit="tokens")
    assert f"network: {words}" in notes
    assert describe_untimed_topologies(resize_cluster(cluster, 16)) == ""


def test_a_slice_of_a_gpu_and_an_unknown_one_are_not_matched():
    assert find_accelerator_by_driver_name("NVIDIA H100 80GB HBM3", 10 * GIB) is None
    assert find_accelerator_by_driver_name("Quadro P400", 2 * GIB) is None


def test_a_resized_cluster_reaches_all_its_devices_and_no_further():
    cluster = describe("cluster.gpu=h100-sxm", "cluster.nodes=4")
    assert [link.num_devices for link in resize_cluster(cluster, 8).links] == [8]
    assert [link.num_devices for link in resize_cluster(cluster, 64).links] == [8, 64]
    one = describe("cluster.gpu=h100-sxm")
    assert [link.num_devices for link in resize_cluster(one, 16).links] == [8, 16]
    rented = describe("cluster.instance=a2-highgpu-8g", "cluster.nodes=1")
    assert resize_cluster(rented, 16).links[-1].gb_s == 100 / 8 / 8  # Gbit/s of eight GPUs
