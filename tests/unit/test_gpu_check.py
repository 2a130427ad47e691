"""The GPU check without a GPU: its processes, deadlines, tables and verdicts, and what its
references can see."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from gpu_check import (
    gpu,
    table,
    training,
)
from gpu_check.carried import fits, unpack
from gpu_check.cases import (
    BARE,
    CEILING,
    FP8,
    FULL,
    PHALANX,
    SYSTEMS,
    TINY,
    Case,
    System,
)
from gpu_check.children import Row, read_row, run_system
from gpu_check.parity import compare
from gpu_check.run import NO_GPU, WRONG, case_of, main, parse
from gpu_check.systems import (
    grouped_matmul,
    ring_attention,
    same_results,
    save_and_resume,
    verified_rows,
)
from phalanx.core.errors import LayoutError
from phalanx.parallel.context.block_attention import OnlineSoftmaxOutput

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PRETENDERS = {
    "works": 'say({"tokens_per_s": 10.0, "losses": [2.0, 1.0]})',
    "hangs": "signal.pause()",
    "hangs_late": (
        'say({"tokens_per_s": 10.0, "pid": subprocess.Popen(["sleep", "600"]).pid}); signal.pause()'
    ),
    "raises": 'say({"tokens_per_s": 10.0}); raise ValueError("two lines\\nand the last")',
    "misses": "import nowhere_to_be_found",
    "lacks_a_part": "import phalanx.nowhere",
    "refuses": 'from phalanx.core.errors import LayoutError; raise LayoutError("no", fix="yes")',
    "dies": "os.kill(os.getpid(), signal.SIGSEGV)",
    "exits": 'print("why it went", flush=True); os._exit(3)',
}


@pytest.fixture
def pretenders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, System]:
    """Systems that do what tests need, without torch."""
    source = tmp_path / "source"
    source.mkdir()
    for name, body in PRETENDERS.items():
        lines = [
            "import os, signal, subprocess",
            "def measure(case, say):",
            *(f"    {part}" for part in body.split("; ")),
        ]
        (source / f"pretender_{name}.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(source))
    return {name: System(name, f"pretender_{name}", 60) for name in PRETENDERS}


def environ(tmp_path: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": f"{tmp_path / 'source'}:{BENCHMARKS.parent / 'src'}",
        "PATH": "/usr/bin:/bin",
    }


def outcome(system: System, tmp_path: Path, deadline_s: float = 60) -> Row:
    row, _ = run_system(
        system, TINY, deadline_s=deadline_s, folder=tmp_path, environ=environ(tmp_path)
    )
    return row


@pytest.mark.parametrize(
    ("name", "status", "why"),
    [
        ("works", "measured", ""),
        ("raises", "failed", "ValueError: and the last"),
        ("misses", "not installed", "nowhere_to_be_found"),
        ("lacks_a_part", "failed", "ModuleNotFoundError: No module named 'phalanx.nowhere'"),
        ("refuses", "refused", "no; yes"),
        ("dies", "failed", "killed by SIGSEGV; it said nothing"),
        ("exits", "failed", "exit status 3; why it went"),
    ],
)
def test_whatever_a_system_does_it_has_a_row(
    name: str, status: str, why: str, pretenders: dict[str, System], tmp_path: Path
) -> None:
    row = outcome(pretenders[name], tmp_path)
    assert (row["system"], row["status"], row["why"]) == (name, status, why)
    assert "end" not in row


@pytest.mark.long
def test_at_its_deadline_it_and_what_it_has_started_are_killed_and_what_it_found_stays(
    pretenders: dict[str, System], tmp_path: Path
) -> None:
    row = outcome(pretenders["hangs_late"], tmp_path, 15)
    assert (row["status"], row["why"], row["tokens_per_s"]) == ("measured in part", "15 s", 10.0)
    try:
        other = psutil.Process(row["pid"])
        other.wait(60)
    except psutil.NoSuchProcess:
        pass
    except psutil.TimeoutExpired:  # dead, where nobody collects orphans
        assert other.status() == psutil.STATUS_ZOMBIE


def test_half_a_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "facts").write_text('{"a": 1}\n{"a": 2, "b": 3}\n{"c": ')
    assert read_row(tmp_path / "facts") == {"a": 2, "b": 3}
    assert read_row(tmp_path / "none") == {}


# The command


def test_without_a_gpu_it_says_so_and_exits_6() -> None:
    """With nothing installed, not even torch: -S leaves site-packages out."""
    command = [sys.executable, "-S", "-E", str(BENCHMARKS / "gpu_check")]
    done = subprocess.run(
        command, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": ""}, timeout=60
    )
    assert done.returncode == NO_GPU == 6
    assert done.stdout == ""
    assert done.stderr.startswith("gpu-check: no GPU here (")
    assert done.stderr.count("\n") == 1


class Driver:
    """Stands for libcuda."""

    def __init__(self, code: int, count: int) -> None:
        self.code, self.count = code, count

    def cuInit(self, flags: int) -> int:
        return self.code

    def cuDeviceGetCount(self, into: Any) -> int:
        into._obj.value = self.count
        return 0


@pytest.mark.parametrize(
    ("code", "count", "why"),
    [(0, 1, None), (0, 0, "shows none"), (100, 0, "error 100"), (999, 1, "error 999")],
)
def test_the_driver_is_asked(
    code: int, count: int, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.ctypes, "CDLL", lambda name: Driver(code, count))
    found = gpu.why_not()
    assert found is None if why is None else found is not None and why in found


def run(systems: Sequence[System], out: Path, *more: str) -> tuple[int, dict[str, Any]]:
    code = main(
        ["--device", "cpu", "--tiny", "--wheels", str(out / "none"), "--out", str(out), *more],
        systems,
    )
    return code, json.loads((out / "gpu-check.json").read_text())


def test_rows_come_as_they_are_done_and_the_rest_is_written(
    pretenders: dict[str, System], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    systems = [
        replace(pretenders["works"], name=PHALANX),
        replace(pretenders["raises"], name=BARE),
    ]
    code, written = run(systems, tmp_path / "out")
    said = capsys.readouterr().out
    assert code == 0
    assert (
        said.index("phalanx: 10 tokens/s [")
        < said.index("failed: ValueError: and the last [")
        < said.index("÷ bare")
    )
    assert [row["system"] for row in written["rows"]] == [PHALANX, BARE]
    assert written["verdict"][0] == "at least 75% of the measured matmul ceiling: not measured"
    page = (tmp_path / "out" / "gpu-check.md").read_text()
    assert "| phalanx | 10 |" in page
    assert "its numbers say nothing of a GPU" in page
    assert "Traceback" in (tmp_path / "out" / "gpu-check.log").read_text()


def test_out_of_time_the_table_is_partial(
    pretenders: dict[str, System], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_s = iter([0.0, 0.0, 96.0])  # at the start, before the first system, before the second
    monkeypatch.setattr("gpu_check.run.time", SimpleNamespace(monotonic=times_s.__next__))
    hanging = replace(pretenders["hangs"], deadline_s=1)
    code, written = run([hanging, pretenders["works"]], tmp_path / "out", "--total-s", "100")
    assert [row["status"] for row in written["rows"]] == ["over its deadline", "no time left"]
    assert code == WRONG  # phalanx was not among them
    assert "no time left: of 100 s" in (tmp_path / "out" / "gpu-check.md").read_text()


def test_options_change_the_case() -> None:
    case = case_of(parse(["--preset", "llama3.2-1b", "--seq-len", "4096", "--batch-size", "2"]))
    assert (case.model, case.seq_len, case.batch_size) == (("model.preset=llama3.2-1b",), 4096, 2)
    assert Case.from_json(case.to_json()) == case
    assert case_of(parse([])) == FULL
    assert case_of(parse(["--device", "cpu", "--tiny"])) == TINY


def test_every_system_is_a_file_with_time_for_all_of_them() -> None:
    files = {path.stem for path in (BENCHMARKS / "gpu_check" / "systems").glob("*.py")} - {
        "__init__"
    }
    assert {system.file for system in SYSTEMS} == files
    assert {CEILING, PHALANX, BARE, FP8} <= {system.name for system in SYSTEMS}


# Tables


CEILING_ROW = {
    "square_flops_per_s": 8e14,
    "square": 8192,
    "flops_per_token": 8e9,
    "device": "H100",
    "torch": "2.11",
}


def rows(**tokens_per_s: float) -> list[Row]:
    names = {"phalanx": PHALANX, "bare": BARE, "hf": "HF Trainer"}
    head = {"system": CEILING, "status": "measured", "why": "", "wall_s": 1.0, **CEILING_ROW}
    return [head] + [
        {"system": names[key], "status": "measured", "why": "", "wall_s": 1.0, "tokens_per_s": value,
         "losses": [10.0, 9.0], "peak_bytes": 2**30, "planned_bytes": 2**31}
        for key, value in tokens_per_s.items()
    ]  # fmt: skip


def test_a_verdict_follows_the_numbers() -> None:
    good = table.verdict(rows(phalanx=80_000.0, bare=79_000.0))
    assert good[:2] == [
        "at least 75% of the measured matmul ceiling: reached: 80.0%",
        "ahead of bare torch loop: reached: 1.013 of it",
    ]
    bad = table.verdict(rows(phalanx=70_000.0, hf=70_001.0))
    assert bad[0] == "at least 75% of the measured matmul ceiling: NOT reached: 70.0%"
    assert bad[1:3] == [
        "ahead of bare torch loop: not measured",
        "ahead of HF Trainer: NOT reached: 1.000 of it",
    ]


def test_a_row_has_its_share_its_ratio_and_both_memories() -> None:
    found = table.speed_table(rows(phalanx=80_000.0, bare=40_000.0))
    assert found[1] == ["phalanx", "80,000", "", "80.0%", "2.000", "1.0", "2.0", "", ""]
    assert "80,000 tokens/s, 80.0% of the ceiling, peak 1.0 GiB (planned 2.0)" in table.line(
        rows(phalanx=80_000.0), rows(phalanx=80_000.0)[1]
    )


def test_a_trainer_that_trains_something_else_is_said() -> None:
    both = rows(phalanx=1.0, bare=2.0)
    assert "to 2%" in table.verdict(both)[-1]
    both[2]["losses"] = [10.0, 9.5]
    assert table.verdict(both)[-1].startswith(
        "losses DIFFER from phalanx's 10.0000 to 9.0000: bare torch loop 10.0000 to 9.5"
    )


def test_a_kernel_that_differs_is_wrong() -> None:
    some = rows(phalanx=1.0)
    assert table.is_right(some)
    found = {"agrees": False, "worst": "grad k", "error": 1.0, "limit": 0.1}
    some.append({"system": "ring attention", "status": "measured", "why": "", "wall_s": 1.0, "agrees": False,
                 "parity": {"bf16": found}})  # fmt: skip
    assert not table.is_right(some)
    assert "ring attention: DIFFERS from its reference" in table.verdict(some)
    assert table.parity_table(some)[1] == [
        "ring attention: bf16",
        "grad k",
        "1.00e+00",
        "1.00e-01",
        "DIFFERS",
    ]
    assert "wrong: bf16" in table.line(some, some[-1])


# What is carried


@pytest.mark.parametrize(
    ("name", "is_fitting"),
    [
        ("rich-15.0.0-py3-none-any.whl", True),
        ("six-1.17.0-py2.py3-none-any.whl", True),
        ("old-1.0-py2-none-any.whl", False),
        (
            "xxhash-4.1.0-cp312-cp312-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
            sys.version_info[:2] == (3, 12),
        ),
        ("psutil-7.2.2-cp36-abi3-manylinux2010_x86_64.whl", sys.platform == "linux"),
        ("new-1.0-cp399-abi3-manylinux2014_x86_64.whl", False),
        ("arm-1.0-cp36-abi3-manylinux2014_aarch64.whl", False),
    ],
)
def test_a_wheel_fits_by_its_tags(name: str, is_fitting: bool, tmp_path: Path) -> None:
    assert fits(name) is is_fitting
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("carried.py", "")
    assert unpack(tmp_path, tmp_path / "site") == ([name.split("-")[0]] if is_fitting else [])
    assert (tmp_path / "site" / "carried.py").exists() is is_fitting


def test_what_phalanx_imports_is_on_the_list_of_wheels() -> None:
    listed = {
        line.split("==")[0]
        for line in (BENCHMARKS / "gpu_check" / "wheels.txt").read_text().splitlines()
    }
    project = (
        (BENCHMARKS.parent / "pyproject.toml")
        .read_text()
        .split("dependencies = [")[1]
        .split("]")[0]
    )
    wanted = {line.strip(' ",').split(">=")[0] for line in project.splitlines() if line.strip()} - {
        "torch",
        "numpy",
    }
    assert wanted <= listed


# What the references see


def test_errors_are_measured_against_torchs_own() -> None:
    exact = {"x": torch.ones(4, dtype=torch.float64)}
    near, far, nan = (
        torch.full((4,), 1.01),
        torch.full((4,), 1.05),
        torch.tensor([1.0, 1.0, 1.0, torch.nan]),
    )
    assert compare({"x": near}, {"x": near}, exact)["agrees"]
    assert not compare({"x": far}, {"x": near}, exact)["agrees"]
    assert not compare({"x": nan}, {"x": near}, exact)["agrees"]


def measured(system: Any) -> bool:
    found: dict[str, Any] = {}
    system.measure(replace(TINY, ring_tokens=32), found.update)
    return bool(found["agrees"])


def test_ring_attention_in_one_process_is_the_reference_and_a_missing_rescale_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert measured(ring_attention)

    def without_rescale(
        self: OnlineSoftmaxOutput, rows: slice, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        self.out[:, :, rows] += out
        self.lse[:, :, rows] = torch.logaddexp(self.lse[:, :, rows], lse)

    monkeypatch.setattr(OnlineSoftmaxOutput, "merge_block", without_rescale)
    assert not measured(ring_attention)


def test_grouped_products_are_the_loop_and_experts_off_by_one_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert measured(grouped_matmul)
    monkeypatch.setattr(
        "phalanx.mesh.grouped._compute_group_end_rows",
        lambda counts: (counts.cumsum(0) - 1).clamp(min=0).to(torch.int32),
    )
    assert not measured(grouped_matmul)


def test_each_grouped_case_is_repeated_in_dirty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's grouped kernel does not write the gradients of experts without rows on some GPUs:
    after NaN they show."""
    said: dict[str, Any] = {}
    grouped_matmul.measure(TINY, said.update)
    clean = [name for name in said["parity"] if not name.endswith(", in dirty memory")]
    assert len(clean) == 4
    assert set(said["parity"]) == {*clean, *(f"{name}, in dirty memory" for name in clean)}
    by_groups, dirty = grouped_matmul._by_groups, []
    monkeypatch.setattr(grouped_matmul, "dirty_memory", dirty.append)

    def leaves_unwritten(*given: Any) -> dict[str, torch.Tensor]:
        found = by_groups(*given)
        if len(dirty) and 0 in given[3]:
            found["grad matrices"][given[3].index(0)] = torch.nan
        return found

    monkeypatch.setattr(grouped_matmul, "_by_groups", leaves_unwritten)
    grouped_matmul.measure(TINY, said.update)
    assert not said["agrees"]


def test_every_case_has_its_line_whatever_becomes_of_it() -> None:
    def breaks(case: Case) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access\nand more")

    def is_refused(case: Case) -> Any:
        raise LayoutError("not here")

    def differs(case: Case) -> Any:
        return same_results.Found(0.5, 0.1, "bits of masks")

    said: dict[str, Any] = {}
    cases = {
        "breaks": breaks,
        "refused": is_refused,
        "differs": differs,
        "masks": same_results.compare_masks,
    }
    same_results.run_cases(cases, TINY, said.update)
    assert not said["agrees"]
    rows = said["parity"]
    assert {name: row["agrees"] for name, row in rows.items()} == {
        "breaks": False, "refused": True, "differs": False, "masks": True,
    }  # fmt: skip
    assert rows["breaks"]["worst"] == "RuntimeError: CUDA error: an illegal memory access"
    row = {"system": "same results", "status": "measured", "why": "", "wall_s": 1.0, **said}
    assert "wrong: breaks, differs" in table.line([row], row)
    assert len(table.parity_table([row])) == 1 + len(cases)


@pytest.mark.long
def test_results_are_the_same_on_this_device_and_another_mask_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: dict[str, Any] = {}
    same_results.measure(TINY, said.update)
    assert said["agrees"], said
    assert set(said["parity"]) == set(same_results.CASES)
    keep_mask = same_results.make_dropout_keep_mask
    monkeypatch.setattr(
        same_results,
        "make_dropout_keep_mask",
        lambda *a, device, **k: keep_mask(*a, **k) ^ (device != "cpu"),
    )
    assert same_results.compare_masks(replace(TINY, device="meta")).error == 1.0


def test_initial_weights_are_drawn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_CHECK_WEIGHTS", str(tmp_path / "weights.pt"))
    first, _ = training.build(TINY)
    monkeypatch.setattr(training, "collect_module_shards", None)  # nobody asks again
    second, _ = training.build(TINY)
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.long
def test_save_and_resume_on_a_cpu() -> None:
    said: dict[str, Any] = {}
    save_and_resume.measure(TINY, said.update)
    assert said["agrees"], said


@pytest.mark.long
def test_all_of_it_on_a_cpu(tmp_path: Path) -> None:
    code, written = run(SYSTEMS, tmp_path)
    found = {row["system"]: row for row in written["rows"]}
    assert code == 0
    assert [found[name]["status"] for name in (CEILING, PHALANX, BARE)] == ["measured"] * 3
    assert found[PHALANX]["losses"] == pytest.approx(found[BARE]["losses"], rel=1e-3)
    assert (found[FP8]["status"], "this plan is for CPUs" in found[FP8]["why"]) == ("refused", True)
    assert "agree" in written["verdict"][-1]


def test_a_verified_row_agrees_only_if_it_is_equal() -> None:
    equal = {
        "ok": True,
        "errors": {"loss": 1e-16, "gradient": 2e-15},
        "tolerance": 1e-10,
        "refused": "",
        "crashed": "",
    }
    found = verified_rows.describe_row(equal)
    assert (found.note, found.error, found.to_row()["agrees"]) == ("gradient", 2e-15, True)
    for changes in ({"ok": False}, {"ok": None, "refused": "no"}, {"ok": False, "crashed": "died"}):
        row = verified_rows.describe_row({**equal, **changes}).to_row()
        assert not row["agrees"]
        assert row["worst"] == changes.get("refused", changes.get("crashed", "gradient"))
