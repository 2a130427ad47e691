"""What is kept of the C++ compiler: headers that are precompiled and whole, or none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from phalanx.mesh.compiled import inductor
from phalanx.mesh.compiled.store import CodeStore
from phalanx.mesh.compiled.toolchain import (
    Toolchain,
    compute_toolchain_key,
    describe_device_of_code,
)


class Compiler:
    """Stands for torch and its compiler: what it leaves in the folder of headers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: dict[str, str] = {}
        self.folder = Path()
        monkeypatch.setattr(inductor, "prepare_cpp_compiler", self.prepare)

    def prepare(self, when_checked: object) -> None:
        when_checked()  # type: ignore[operator]
        headers = self.folder / inductor.HEADERS_FOLDER
        headers.mkdir(exist_ok=True)
        for name, text in self.files.items():
            (headers / name).write_text(text)


@pytest.fixture
def store(tmp_path: Path) -> CodeStore:
    return CodeStore.open(tmp_path / "phalanx" / "compiled")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(monkeypatch)


def load(store: CodeStore, folder: Path, *, verify: bool = True) -> Toolchain:
    """What another process finds, with `folder` as its own."""
    folder.mkdir()
    toolchain = Toolchain(store, "key", folder)
    toolchain.load(verify=verify)
    return toolchain


def prepare(toolchain: Toolchain, compiler: Compiler, folder: Path, **files: str) -> None:
    compiler.folder, compiler.files = folder, {f"x.{end}": text for end, text in files.items()}
    compiler.files = {name.replace("_", "."): text for name, text in compiler.files.items()}
    toolchain.begin_preparing()
    toolchain.wait_until_kept()


def header_of(folder: Path) -> Path:
    return folder / inductor.HEADERS_FOLDER / "x.h.gch"


def test_a_precompiled_header_is_kept_for_later_processes(
    store: CodeStore, compiler: Compiler, tmp_path: Path
) -> None:
    first = load(store, tmp_path / "1")
    prepare(first, compiler, tmp_path / "1", h="source", h_gch="compiled")
    assert first.is_complete
    for verify in (True, False):
        folder = tmp_path / f"verify-{verify}"
        assert load(store, folder, verify=verify).is_complete
        assert header_of(folder).read_text() == "compiled"
        assert header_of(folder).with_suffix("").read_text() == "source"


def test_a_source_alone_is_no_precompiled_header(
    store: CodeStore, compiler: Compiler, tmp_path: Path
) -> None:
    """Else all later processes precompiled it, and none kept it."""
    sources = {"checks": {}, "headers": {"x.h": {"text": "source"}}}
    store.write("toolchain-key", json.dumps(sources).encode())
    second = load(store, tmp_path / "2")
    assert not second.is_complete
    prepare(second, compiler, tmp_path / "2", h="source")
    assert not second.is_complete
    third = load(store, tmp_path / "3")
    prepare(third, compiler, tmp_path / "3", h="source", h_gch="compiled")
    assert load(store, tmp_path / "4").is_complete


def test_one_that_precompiled_nothing_leaves_what_others_kept(
    store: CodeStore, compiler: Compiler, tmp_path: Path
) -> None:
    late = load(store, tmp_path / "late")
    prepare(load(store, tmp_path / "1"), compiler, tmp_path / "1", h="source", h_gch="compiled")
    prepare(late, compiler, tmp_path / "late", h="source")
    assert load(store, tmp_path / "2").is_complete


def test_a_damaged_header_is_dropped_before_the_compiler_runs(
    store: CodeStore, compiler: Compiler, tmp_path: Path
) -> None:
    prepare(load(store, tmp_path / "1"), compiler, tmp_path / "1", h="source", h_gch="compiled")
    [kept] = [path for path in store.root.iterdir() if path.read_bytes() == b"compiled"]
    kept.write_bytes(bytes(8))
    second = load(store, tmp_path / "2", verify=False)
    assert header_of(tmp_path / "2").exists()
    second.verify_headers()
    assert not header_of(tmp_path / "2").exists()
    assert not second.is_complete
    # The next process makes another one.
    third = load(store, tmp_path / "3", verify=False)
    assert not third.is_complete
    prepare(third, compiler, tmp_path / "3", h="source", h_gch="compiled")
    fourth = load(store, tmp_path / "4", verify=False)
    fourth.verify_headers()
    assert header_of(tmp_path / "4").read_text() == "compiled"
    assert fourth.is_complete


def test_headers_that_serve_nowhere_else_are_not_kept(
    store: CodeStore, compiler: Compiler, tmp_path: Path
) -> None:
    folder = tmp_path / "1"
    folder.mkdir()
    first = Toolchain(store, "key", folder, keeps_headers=False)
    first.checks["avx2"] = True
    prepare(first, compiler, folder, h="source", h_pch="compiled")
    assert first.is_complete
    assert [path.name for path in store.root.iterdir()] == ["code-toolchain-key"]
    second = Toolchain(store, "key", tmp_path / "2", keeps_headers=False)
    second.load(verify=False)
    assert second.is_complete
    assert second.checks == {"avx2": True}


def test_the_key_has_each_program_that_CXX_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("launcher", "compiler"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("CXX", f"{tmp_path / 'launcher'} {tmp_path / 'compiler'}")
    cpu = torch.device("cpu")
    keys = {compute_toolchain_key(cpu)}
    for number, name in enumerate(("launcher", "compiler"), start=2):
        (tmp_path / name).write_text("#!/bin/sh\n# another\n")
        keys.add(compute_toolchain_key(cpu))
        assert len(keys) == number, name


def test_each_gpu_of_a_host_has_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert describe_device_of_code(torch.device("cuda", 0)) == [0]
    assert describe_device_of_code(torch.device("cuda")) == [1]
    assert describe_device_of_code(torch.device("cpu")) == []
