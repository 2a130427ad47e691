"""precision.compute = "auto": bf16 on GPUs that multiply it, fp32 elsewhere, and a run keeps
what it began with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commands import DEADLINE_S
from models import CPU
from phalanx.core.errors import LayoutError
from phalanx.core.files import read_json, write_json_atomically
from phalanx.job.load import load_job, load_job_json
from phalanx.job.schema import Job
from phalanx.plan.cluster import Cluster
from phalanx.plan.explain import describe_plan
from phalanx.plan.nvidia import Gpu
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.run.prepare import PreparedRun, prepare_run
from phalanx.run.resume import load_resumed_job
from phalanx.verify.verified_job import list_settings_not_judged

GIB = 2**30
TINY = (
    "model.num_layers=1",
    "model.dim=32",
    "model.num_heads=2",
    "data.seq_len=32",
    "observe.sinks=[]",
)


def gpus(*capability: int) -> Cluster:
    return Cluster(
        "cuda", 8, 80 * GIB, "a GPU", (capability[0], capability[1]) if capability else None
    )


def planned(cluster: Cluster, *overrides: str) -> Plan:
    return make_plan(load_job(None, list(overrides)), cluster=cluster)


@pytest.mark.parametrize(
    ("cluster", "precision", "why"),
    [
        (gpus(8, 0), "bf16", "bf16: GPUs of compute capability 8.0 multiply it"),
        (gpus(9, 0), "bf16", "bf16: GPUs of compute capability 9.0 multiply it"),
        (gpus(12, 1), "bf16", "bf16: GPUs of compute capability 12.1 multiply it"),
        (
            gpus(7, 5),
            "fp32",
            (
                "fp32: GPUs of compute capability 7.5 have no bf16 to multiply with;"
                " precision.compute=fp16"
            ),
        ),
        (gpus(6, 1), "fp32", "fp32: GPUs of compute capability 6.1 have no bf16 to multiply with"),
        (gpus(), "fp32", "fp32: nobody says which compute capability"),
    ],
)
def test_gpus_compute_in_bf16_where_they_have_it(
    cluster: Cluster, precision: str, why: str
) -> None:
    plan = planned(cluster)
    assert (plan.precision, plan.precision_is_auto) == (precision, True)
    assert f", {precision} on 8 cuda ranks" in describe_plan(plan)[0]
    assert [reason for reason in plan.reasons if reason.startswith(why)]
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert ("fp16" in " ".join(plan.reasons)) is (cluster.capability == (7, 5)), (
        "tensor cores began with 7.0"
    )


def test_memory_is_predicted_for_the_type_that_is_chosen() -> None:
    auto, bf16, fp32 = (
        planned(gpus(9, 0), *more)
        for more in ((), ["precision.compute=bf16"], ["precision.compute=fp32"])
    )
    assert auto.chosen.predicted_bytes == bf16.chosen.predicted_bytes
    assert auto.chosen.predicted_bytes["activations"] < fp32.chosen.predicted_bytes["activations"]


@pytest.mark.parametrize(
    ("cluster", "compute"),
    [(gpus(7, 0), "bf16"), (gpus(7, 5), "bf16"), (gpus(8, 0), "fp8"), (gpus(7, 0), "fp8")],
)
def test_a_type_that_the_gpus_do_not_multiply_is_refused(cluster: Cluster, compute: str) -> None:
    with pytest.raises(LayoutError, match=f"precision.compute={compute} needs GPUs of compute"):
        planned(replace(cluster, is_described=True), f"precision.compute={compute}")
    assert planned(gpus(9, 0), "precision.compute=bf16").precision == "bf16"


def test_what_the_job_names_is_not_touched() -> None:
    plan = planned(gpus(9, 0), "precision.compute=fp32")
    assert (plan.precision, plan.precision_is_auto) == ("fp32", False)
    assert not [reason for reason in plan.reasons if "capability" in reason]


def test_on_cpus_a_plan_is_what_fp32_is() -> None:
    auto, fp32 = planned(CPU), planned(CPU, "precision.compute=fp32")
    said = replace(auto, precision_is_auto=False, value_reasons=fp32.value_reasons)
    assert said == fp32, "with its reasons and its digest"


@pytest.mark.parametrize(("lines", "precision"), [(["9.0"], "bf16"), (["9.0", "7.5"], "fp32")])
def test_the_command_line_asks_the_gpus_that_are_there(
    tmp_path: Path, lines: list[str], precision: str
) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU, which would be found")
    script = tmp_path / "nvidia-smi"
    said = "\n".join(
        f"echo 'NVIDIA, 81559, GPU-{index}, {version}, Disabled'"
        for index, version in enumerate(lines)
    )
    script.write_text(f"#!/bin/sh\n{said}\n")
    script.chmod(0o755)
    (tmp_path / "pynvml.py").write_text("raise ImportError('not installed')")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environ = os.environ | {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": path}
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, "-m", "phalanx", "plan", "--explain", "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    (value,) = (one for one in facts["values"] if one["key"] == "precision.compute")
    assert (value["value"], value["origin"]) == (precision, "derived")
    assert f"compute capability {lines[-1]}" in value["why"]
    assert (facts["plan"]["precision"], facts["plan"]["device"]) == (precision, "cuda")


def test_explain_says_it_of_cpus(capsys: pytest.CaptureFixture[str]) -> None:
    from phalanx.run.explain import explain_job_values

    explained, _ = explain_job_values(
        load_job(None, ["cluster.device=cpu"]), None, ["cluster.device=cpu"]
    )
    (value,) = (one for one in explained if one.key == "precision.compute")
    assert (value.value, value.why) == ("fp32", "CPUs compute in it unless told otherwise")


# A run keeps what it began with.

H100 = (Gpu("H100", 80 * GIB, "GPU-0", (9, 0)),)
T4 = (Gpu("T4", 16 * GIB, "GPU-0", (7, 5)),)


class Machine:
    """One that a run begins or goes on on: what `phalanx` would find there, and what it would
    do."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.run, self._patch = folder / "run", patch
        (folder / "text").mkdir()
        (folder / "text" / "a.txt").write_text("to be or not to be " * 200)
        self.job = load_job(None, [*TINY, f"data.source={folder / 'text'}", "parallel.ranks=1"])

    def has(self, found: tuple[Gpu, ...]) -> None:
        self._patch.setattr("phalanx.plan.cluster.list_visible_gpus", lambda: found)

    def prepare(self, job: Job, *, resume: bool) -> PreparedRun:
        with prepare_run(job, self.run, resume=resume, num_ranks=None) as prepared:
            pass
        self._keep(prepared)
        return prepared

    def _keep(self, prepared: PreparedRun) -> None:
        """What does not train is as if it had never been; here it is as if it had."""
        write_json_atomically(self.run / "job.json", prepared.job.to_json())
        write_json_atomically(self.run / "plan.json", prepared.plan.to_json())

    def resume(self, *overrides: str) -> PreparedRun:
        return self.prepare(load_resumed_job(str(self.run), list(overrides)).job, resume=True)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("began", "compute", "goes_on", "here"),
    [
        ((), "fp32", H100, "bf16"),
        (H100, "bf16", (), "fp32"),
        (H100, "bf16", T4, "fp32"),
        (T4, "fp32", H100, "bf16"),
    ],
)
def test_a_run_keeps_its_numbers_on_another_machine(
    machine: Machine, began: Any, compute: str, goes_on: Any, here: str
) -> None:
    machine.has(began)
    first = machine.prepare(machine.job, resume=False)
    assert first.plan.precision == compute
    assert first.job.precision.compute == compute, "what job.json says, and what a run is known by"
    assert read_json(machine.run / "job.json")["precision"]["compute"] == compute
    assert not any("as the run began" in reason for reason in machine.resume().plan.reasons), (
        "where it began"
    )
    machine.has(goes_on)
    assert machine.resume().plan.job_digest == first.plan.job_digest
    for found in (
        machine.resume(),
        machine.prepare(machine.job, resume=True),
    ):  # by --resume; by the job file again
        assert found.plan.precision == found.job.precision.compute == compute
        (said,) = (reason for reason in found.plan.reasons if "as the run began" in reason)
        assert said.startswith(
            f"{compute}, as the run began: precision.compute=auto is {here} on this machine"
        )
        assert f"why     {said}" in describe_plan(found.plan)
    changed = machine.resume(f"precision.compute={here}")
    assert changed.plan.precision == here
    assert not [reason for reason in changed.plan.reasons if "as the run began" in reason]


def test_auto_can_be_asked_for_anew(machine: Machine) -> None:
    machine.has(())
    machine.prepare(machine.job, resume=False)
    assert load_resumed_job(str(machine.run), ["precision.compute=auto"]).changes == ()
    machine.has(H100)
    resumed = load_resumed_job(str(machine.run), ["precision.compute=auto"])
    assert [change.describe_change() for change in resumed.changes] == [
        'precision.compute "fp32" -> "bf16": numbers are rounded so from step 1 on'
    ]
    assert machine.resume("precision.compute=auto").plan.precision == "bf16"


def test_a_run_that_named_its_numbers_has_nothing_to_say(machine: Machine) -> None:
    machine.has(())
    named = load_job(
        None, [*TINY, f"data.source={machine.job.data.source}", "precision.compute=bf16"]
    )
    machine.prepare(named, resume=False)
    assert not any("as the run began" in reason for reason in machine.resume().plan.reasons)


def test_a_run_of_a_version_without_auto_goes_on_in_fp32(tmp_path: Path) -> None:
    body = Job().to_json()
    del body["precision"]["compute"]
    write_json_atomically(tmp_path / "job.json", body)
    assert load_job_json(tmp_path / "job.json").precision.compute == "fp32"
    del body["precision"]
    write_json_atomically(tmp_path / "job.json", body)
    assert load_job_json(tmp_path / "job.json").precision.compute == "fp32"
    assert (
        load_job_json(tmp_path / "job.json", ["precision.compute=bf16"]).precision.compute == "bf16"
    )


def test_verify_says_what_it_does_not_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, said in (((), []), (T4, []), (H100, ["precision.compute=bf16"])):
        monkeypatch.setattr("phalanx.plan.cluster.list_visible_gpus", lambda found=found: found)
        assert [
            line.partition(": layouts")[0]
            for line in list_settings_not_judged(Job(), ["float64", "float32"])
        ] == said
