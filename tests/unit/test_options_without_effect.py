"""An option that others leave without effect is refused in one line, not ignored."""

from __future__ import annotations

import pytest

from phalanx.cli._app import run_command_line


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("metrics", "--rules", "--json"), "--json has no effect with --rules"),
        (("metrics", "--dashboard", "--once"), "--once has no effect with --dashboard"),
        (("metrics", ".", "--once", "--port=9"), "--port has no effect with --once"),
        (("metrics", ".", "--json", "--host=::1"), "--host has no effect with --json"),
        (("drill", "kill", "--fault-every=5"), "--fault-every has no effect without --soak"),
        (("drill", "--list", "--repeat=3"), "--repeat has no effect with --list"),
        (("drill", "--list", "kill"), "a fault, job file or key has no effect with --list"),
        (("train", "--fallback"), "--fallback has no effect without --resume"),
        (
            ("train", "--resume=run", "--fallback", "checkpoint.fallback=false"),
            "--fallback says true and checkpoint.fallback says false",
        ),
        (("init", "-", "--editor"), "--editor has no effect where the file is printed"),
        (("init", "x.toml", "--from-run", ""), "--from-run names no run"),
        (
            ("verify", "--model=llama3-8b", "model.preset=small"),
            "--model says llama3-8b and model.preset says small",
        ),
        (
            ("plan", "--suggest-rules", "--model=llama3-8b", "model.preset=small"),
            "--model says llama3-8b and model.preset says small",
        ),
    ],
)
def test_it_is_refused(
    words: tuple[str, ...],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / "events").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("phalanx.launch.server_process.start_server_ahead", lambda _: None)
    assert run_command_line(list(words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    assert not (folder / "x.toml").exists()
