"""What one rank takes and keeps, beside others: torch and its compiler stand in as counters and
files. The real ones: tests/distributed/test_compile_cache.py."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.codecache as codecache
import torch._inductor.config
from torch._dynamo.utils import counters

from phalanx.mesh.compiled import inductor, reuse
from phalanx.mesh.compiled.bundle import pack_folder
from phalanx.mesh.compiled.reuse import CodeReuse, reusing_compiled_code
from phalanx.mesh.compiled.store import CodeStore
from phalanx.mesh.compiled.toolchain import Toolchain
from phalanx.mesh.compiled.work_folders import WorkFolders, identify_host
from phalanx.observe.bus import Bus
from phalanx.observe.events import Note
from phalanx.run import compiling

CPU = torch.device("cpu")


@pytest.fixture
def store(tmp_path: Path) -> CodeStore:
    return CodeStore.open(tmp_path / "phalanx" / "compiled")


@pytest.fixture(autouse=True)
def _counters_as_before() -> Iterator[None]:
    before = {name: dict(counts) for name, counts in counters.items()}
    yield
    counters.clear()
    for name, counts in before.items():
        counters[name].update(counts)


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """XDG_CACHE_HOME of a process that torch has told nothing, and prepares no compiler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(inductor.CACHE_VARIABLE, raising=False)
    monkeypatch.setattr(inductor, "prepare_cpp_compiler", lambda when_checked: when_checked())
    return tmp_path / "cache"


def begin(store: CodeStore, folder: Path, wait_limit_s: float = 60.0) -> CodeReuse:
    folder.mkdir()
    toolchain = Toolchain(store, "key", folder)
    return CodeReuse(store, "code", "run", folder, toolchain, wait_limit_s)


def compile_with(rank: CodeReuse, counted: str, file: Path | None = None) -> None:
    """A graph for which torch counts `counted`, and leaves `file`."""

    def compile_graph() -> None:
        if counted:
            counters["inductor"][counted] += 1
        if file is not None:
            file.write_text("code")

    rank.wrap(compile_graph)()


def test_code_is_taken_only_where_torch_has_found_it(store: CodeStore, tmp_path: Path) -> None:
    rank = begin(store, tmp_path / "rank")
    taken = []
    for counted in ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass", ""):
        before = rank.counts.num_taken
        compile_with(rank, counted)
        taken.append(rank.counts.num_taken - before)
    assert taken == [1, 0, 0, 0]
    assert rank.counts.num_graphs == 4


def test_a_rank_waits_for_another_ones_code_no_longer_than_its_limit(
    store: CodeStore, tmp_path: Path
) -> None:
    others = [store.try_turn(f"run-{name}") for name in ("code", "prepare")]
    rank = begin(store, tmp_path / "rank", wait_limit_s=0.05)
    compile_with(rank, "fxgraph_cache_miss", tmp_path / "rank" / "graph")
    assert rank.counts.num_graphs == 1
    assert store.find_version("code") != ""
    assert None not in others


def test_ranks_that_compile_at_once_keep_the_code_of_each(
    store: CodeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)

    def pack_with_the_other(folder: Path, is_kept: Any) -> bytes:
        bundle = pack_folder(folder, is_kept)
        # Nobody else comes here before this one is done: it would not have this one's code.
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(timeout=0.3)
        return bundle

    monkeypatch.setattr(reuse, "pack_folder", pack_with_the_other)
    ranks = [begin(store, tmp_path / f"rank{number}", wait_limit_s=0.0) for number in range(2)]
    held = store.try_turn("run-code")
    threads = [
        threading.Thread(
            target=compile_with,
            args=(rank, "fxgraph_cache_miss", tmp_path / f"rank{number}" / f"graph{number}"),
        )
        for number, rank in enumerate(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert held is not None
    later = begin(store, tmp_path / "later")
    later.begin(prepares_cpp=False)
    assert {path.name for path in (tmp_path / "later").iterdir()} == {"graph0", "graph1"}


def test_without_a_store_torch_compiles_where_it_does_by_itself(
    cache_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    cache_home.write_text("no directory")
    with reusing_compiled_code({}, tmp_path, CPU) as rank:
        assert os.environ.get(inductor.CACHE_VARIABLE) is None
        assert "cache is not a directory" in rank.counts.why_not_kept
        assert list((tmp_path / "temporary").iterdir()) == []


def test_where_torch_keeps_nothing_no_rank_waits_for_another(
    cache_home: Path, tmp_path: Path
) -> None:
    for change in ({"force_disable_caches": True}, {"fx_graph_cache": False}):
        with torch._inductor.config.patch(change):
            with reusing_compiled_code({}, tmp_path, CPU) as rank:
                assert "off (TORCHINDUCTOR_" in rank.counts.why_not_kept
                compile_with(rank, "")
                assert (rank.counts.num_graphs, rank.counts.num_taken) == (1, 0)
    assert not cache_home.exists()


def test_where_programs_may_not_run_a_process_compiles_in_a_temporary_folder(
    cache_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    abandoned = temporary / f"phalanx-compiled-{identify_host()}-dead"
    abandoned.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    real = os.statvfs

    def refuse_programs(path: Any) -> Any:
        status = real(path)
        is_there = str(path).startswith(str(cache_home))
        return os.statvfs_result((*status[:8], os.ST_NOEXEC if is_there else 0, status[9]))

    monkeypatch.setattr(os, "statvfs", refuse_programs)
    with reusing_compiled_code({}, tmp_path, CPU) as rank:
        folder = Path(os.environ[inductor.CACHE_VARIABLE])
        assert folder.parent == temporary
        assert rank.counts.why_not_kept == ""
        # It lives.
        WorkFolders(temporary, "phalanx-compiled-").remove_abandoned()
        assert folder.is_dir()
        assert not abandoned.exists()
    assert list(temporary.iterdir()) == []


def test_torch_remembers_no_path_of_a_body(
    cache_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header's path that it remembers is that of a folder which is gone."""
    if not hasattr(codecache, "_precompile_header"):
        pytest.skip("this torch remembers no headers")
    by_torch = os.path.join(inductor.find_default_folder(), "triton", "0")
    for set_before in (None, by_torch, "/scratch/triton"):
        monkeypatch.delenv(inductor.TRITON_VARIABLE, raising=False)
        if set_before is not None:
            monkeypatch.setenv(inductor.TRITON_VARIABLE, set_before)
        outside = codecache._precompile_header, codecache.CppPythonBindingsCodeCache.cache
        inside = []
        for _ in range(2):
            with reusing_compiled_code({}, tmp_path, CPU):
                inside.append(codecache._precompile_header)
                assert codecache.CppPythonBindingsCodeCache.cache == {}
                measured_times = codecache.CacheBase.get_local_cache_path()
                assert str(measured_times).startswith(os.environ[inductor.CACHE_VARIABLE])
                codecache.CppPythonBindingsCodeCache.cache["kernel"] = lambda: None  # type: ignore[assignment,return-value]
                # The user's own choice is his.
                chosen = os.environ.get(inductor.TRITON_VARIABLE)
                assert chosen == (None if set_before == by_torch else set_before)
                os.environ[inductor.TRITON_VARIABLE] = "of the body"
            assert os.environ.get(inductor.TRITON_VARIABLE) == set_before
            assert outside[0] is codecache._precompile_header
            assert outside[1] is codecache.CppPythonBindingsCodeCache.cache
        assert len({outside[0], *inside}) == 3


def test_known_code_verifies_the_header_before_the_compiler_runs(
    store: CodeStore, tmp_path: Path
) -> None:
    if not inductor.CAN_WATCH_CPP_COMPILER:
        pytest.skip("this torch compiles unseen")

    class Builder:
        def __init__(self, target: Path) -> None:
            self.target = target

        def get_target_file_path(self) -> str:
            return str(self.target)

        def build(self) -> None:
            told.append("built")
            self.target.write_text("")

    told: list[str] = []
    builders = [Builder(tmp_path / "kernel.so")]
    with inductor.watching_cpp_compiler(lambda: told.append("before")):
        for _ in range(2):
            codecache._worker_compile_cpp(str(tmp_path / "lock"), builders)  # type: ignore[arg-type]
    assert told == ["before", "built"]


@pytest.mark.parametrize("is_first_rank", [True, False])
def test_code_that_could_not_be_kept_after_all_is_said(is_first_rank: bool) -> None:
    notes: list[dict[str, Any]] = []

    class Notes(Bus):
        def __init__(self) -> None:
            pass

        def emit(self, event: Any) -> None:
            assert isinstance(event, Note)
            notes.append(dict(event.facts))

    counts = reuse.CompilationCounts()
    report = compiling._FirstStepReport(counts, Notes(), "", is_first_rank)
    counts.num_graphs, counts.seconds = 2, 3.0
    counts.why_not_kept = "/home/me/.cache/phalanx/compiled: No space left on device"
    report.begin_span("optimizer", "", "", None)
    [facts] = notes
    assert facts["not_kept"] == counts.why_not_kept
    assert facts["why"] == (
        f"2 graphs in 3.0 s; the code is not kept for later runs: {counts.why_not_kept}"
    )


def test_a_store_that_refuses_an_entry_is_why_it_is_not_kept(
    store: CodeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write", refuse)
    rank = begin(store, tmp_path / "rank")
    compile_with(rank, "fxgraph_cache_miss")
    assert rank.counts.why_not_kept == f"{store.root}: No space left on device"
