"""The seam between what a verb prints and the terminal: nothing that a terminal obeys passes,
and no way leads past."""

from __future__ import annotations

import ast
import importlib
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import phalanx
from hostile import EVIL, EVIL_NAME, moves_a_cursor
from phalanx.cli import _app
from phalanx.core.printable import MAX_PRINTABLE_LINE_CHARS
from phalanx.core.registry import list_modules_of_registry
from phalanx.core.terminal import (
    FilteredTextStream,
    filter_standard_streams,
    filtering_standard_streams,
    print_coloured,
    print_document,
    unwrap_stream,
)
from phalanx.job.toml import format_toml_value
from phalanx.observe.screen import open_safe_console

SOURCE = Path(phalanx.__file__).parent


def filtered(text: str) -> str:
    stream = io.StringIO()
    FilteredTextStream(stream).write(text)
    return stream.getvalue()


OBEYED = [
    "\x1b[2J",
    "\x9b2J",
    "\x07",
    "\r",
    "\x08",
    "\x7f",
    "\u202e",
    "\u2067",
    "\u2028",
    "\ud800",
    "\0",
]


@pytest.mark.parametrize("evil", OBEYED, ids=ascii)
def test_what_a_terminal_obeys_does_not_pass(evil: str) -> None:
    shown = filtered(f"a{evil}b\n\tc {evil}")
    assert shown == f"a{evil.replace(evil[0], ' ')}b\n\tc {evil.replace(evil[0], ' ')}"


def test_letters_of_any_script_pass_as_they_are() -> None:
    text = "  نیم‌ف 👨‍👧 全角　a b\n\n\t| [red]x[/red] [link=http://a]b[/link] \n"
    assert filtered(text) == text


def test_the_middle_of_a_long_line_goes_and_its_end_stays() -> None:
    shown = filtered("begin " + "x" * 300_000 + "; do this\nnext")
    first, second = shown.split("\n")
    assert len(first) < MAX_PRINTABLE_LINE_CHARS + 100
    assert first.startswith("begin xxx")
    assert first.endswith("xxx; do this")
    assert "characters" in first
    assert second == "next"


def test_secrets_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setenv("A_TOKEN", "s3cr3t-s3cr3t")  # also one that user code sets after the start
    FilteredTextStream(stream).write("it is s3cr3t-s3cr3t, at http://me:pw@host/x")
    assert stream.getvalue() == "it is ***, at http://me:***@host/x"


def test_letters_that_the_stream_lacks_are_question_marks() -> None:
    raw = io.BytesIO()
    stream = FilteredTextStream(io.TextIOWrapper(raw, encoding="ascii"))
    stream.write("é…\n")
    stream.flush()
    assert raw.getvalue() == b"??\n"


def test_bytes_are_filtered_too() -> None:
    stream = io.StringIO()
    FilteredTextStream(stream).buffer.write(b"\x1b[2Jx\xff")
    assert stream.getvalue() == " [2Jx\\xff"


def test_streams_are_filtered_once_and_given_back(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with filtering_standard_streams(), filtering_standard_streams():
        filter_standard_streams()
        assert unwrap_stream(sys.stdout) is before
        print(EVIL)
        print(EVIL, file=sys.stderr)
    assert sys.stdout is before
    for shown in capsys.readouterr():
        assert moves_a_cursor(shown) == []


def test_documents_keep_every_value(capsys: pytest.CaptureFixture[str]) -> None:
    value = {EVIL: [EVIL, "é\x7f\u2028", "x" * 50_000], "lone": "\ud800"}
    with filtering_standard_streams():
        print_document(json.dumps(value, ensure_ascii=False))
    shown = capsys.readouterr().out
    assert moves_a_cursor(shown) == []
    assert json.loads(shown) == value
    assert moves_a_cursor(format_toml_value("\x9b\u202e\x1b")) == []


def test_only_our_own_colours_are_painted(capsys: pytest.CaptureFixture[str]) -> None:
    with filtering_standard_streams():
        print_coloured("\033[32mgreen\033[0m \x1b[2J\x1b]0;t\x07")
    assert capsys.readouterr().out == "\033[32mgreen\033[0m  [2J ]0;t \n"


def test_what_rich_draws_obeys_no_markup_and_holds_no_controls() -> None:
    from rich.table import Table
    from rich.text import Text

    stream = io.StringIO()
    screen = open_safe_console(stream)
    table = Table.grid()
    table.add_row(f"[red]{EVIL}[/red]")
    for drawn in (f"[red]{EVIL}[/red] [link=http://a]b[/link] :smile:", Text(EVIL), table):
        screen.print(drawn, soft_wrap=True)
    shown = stream.getvalue()
    assert moves_a_cursor(shown) == []
    assert "[red]" in shown
    assert "[link=http://a]b[/link] :smile:" in shown


# --- no way past ----------------------------------------------------------------------------------

# Who asks for the stream behind the filter, draws with rich, or starts a process that has our
# standard error, and why.
MAY_PASS = {
    ("core/terminal.py", "unwrap_stream"): "is the seam",
    ("core/terminal.py", "behind"): "is the seam",
    ("observe/screen.py", "unwrap_stream"): "filters the texts that it draws",
    ("observe/screen.py", "Console"): "filters the texts that it draws",
    ("observe/console.py", "unwrap_stream"): "hands it to the screen",
    ("data/build_worker.py", "unwrap_stream"): "standard output is a pipe to the parent",
    ("data/build_pool.py", "Popen"): "the worker filters its standard error itself",
    (
        "observe/sink_process.py",
        "Popen",
    ): "the sink's output goes to its log; its first message is JSON in a pipe",
    ("observe/alerts/targets.py", "run"): "the outputs of the process it runs in are a log",
    ("core/forked_copy.py", "os.write"): "our own words; what Python buffers is of the rank",
}
RAW_STREAMS = {"__stdout__", "__stderr__"}
DRAWERS = {
    "Console",
    "get_console",
    "print",
    "Prompt",
    "Confirm",
    "Status",
    "RichHandler",
    "install",
}
STARTERS = {"Popen", "run", "call", "check_call", "check_output", "system", "spawnv", "popen"}
# A word of these is in each file that `ways_past` finds something in: to parse the others takes
# seconds.
SUSPECT_WORDS = re.compile(
    r"__stdout__|__stderr__|behind|\.buffer|rich|/dev/tty|unwrap_stream|Live|Progress|TextColumn"
    rf"|subprocess|\bos\.({'|'.join(sorted(STARTERS))}|write)\b"
)


def owner_of(called: ast.expr) -> str:
    return ast.unparse(called).rpartition(".")[0]


def ways_past(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(what is used, line) wherever something is printed past the filter, or could be."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in RAW_STREAMS | {"behind"}:
            yield node.attr, node.lineno
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "buffer"
            and ast.unparse(node.value) in ("sys.stdout", "sys.stderr")
        ):
            yield "buffer", node.lineno
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rich"):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name in DRAWERS)
        if isinstance(node, ast.Constant) and node.value == "/dev/tty":
            yield "/dev/tty", node.lineno
        if not isinstance(node, ast.Call):
            continue
        name = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        words = {keyword.arg for keyword in node.keywords}
        if name == "unwrap_stream":
            yield name, node.lineno
        if name in ("Live", "Progress") and "console" not in words:
            yield name, node.lineno
        if (
            name in STARTERS
            and owner_of(node.func) in ("subprocess", "os")
            and not ({"stdout", "stderr"} <= words or "capture_output" in words)
        ):
            yield name, node.lineno
        if name == "TextColumn" and "markup" not in words:
            yield "TextColumn with markup", node.lineno
        if (
            name == "write"
            and owner_of(node.func) == "os"
            and ast.unparse(node.args[0]) in ("1", "2", "sys.stdout.fileno()")
        ):
            yield "os.write", node.lineno


def test_nothing_prints_past_the_seam() -> None:
    found = {
        (str(path.relative_to(SOURCE)), name): line
        for path in sorted(SOURCE.rglob("*.py"))
        if SUSPECT_WORDS.search(text := path.read_text(encoding="utf-8"))
        for name, line in ways_past(ast.parse(text))
    }
    assert {place: line for place, line in found.items() if place not in MAY_PASS} == {}
    assert MAY_PASS.keys() - found.keys() == set(), "no longer needed"


@pytest.mark.parametrize(
    "line",
    [
        "sys.__stdout__.write(x)", "sys.stderr.buffer.write(x)", "from rich.console import Console", "Live(x)",
        "subprocess.run(x)", "subprocess.Popen(x, stdout=log)", "os.write(1, x)", "unwrap_stream(s)",
        "TextColumn('x')", "open('/dev/tty')",
    ],
)  # fmt: skip
def test_a_way_past_is_found(line: str) -> None:
    assert list(ways_past(ast.parse(line)))
    assert SUSPECT_WORDS.search(line)


# --- every verb, with hostile words and names -----------------------------------------------------

VERBS = [
    [verb, *([sub] if sub else [])]
    for verb in list_modules_of_registry("phalanx.cli")
    for sub in getattr(importlib.import_module(f"phalanx.cli.{verb}"), "COMMANDS", None) or [""]
]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
@pytest.mark.parametrize(
    "words",
    [[EVIL], [f"--{EVIL}"], [f"{EVIL}=1"], [f"run.name={EVIL}"], [EVIL, EVIL], [EVIL, "--out", EVIL], [EVIL, "--json"],
     ["--resume", EVIL], ["--from-run", EVIL], [f"data.source={EVIL}"], [f"model.kind={EVIL}:{EVIL}"]],
    ids=ascii,
)  # fmt: skip
def test_a_verb_given_hostile_words(
    verb: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if verb in (["train"], ["verify"]) and words[0].startswith("run.name"):
        words = [*words, "train.steps=0"]  # nothing starts
    assert _app.run_command_line([*verb, *words]) != 1
    for shown in capsys.readouterr():
        assert moves_a_cursor(shown) == []


def test_hostile_files_of_data_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of files, fields, tokens, of a run and what its events say: none moves the cursor of
    who looks at them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / EVIL_NAME).mkdir()
    (tmp_path / EVIL_NAME / f"{EVIL_NAME}.txt").write_text(
        EVIL.encode("utf-8", "replace").decode() * 99
    )
    (tmp_path / f"{EVIL_NAME}.jsonl").write_text(json.dumps({EVIL: EVIL}) + "\n")
    run_dir = tmp_path / f"{EVIL_NAME}-run"
    (run_dir / "events").mkdir(parents=True)
    (run_dir / "job.json").write_text(json.dumps({"run": {"name": EVIL}, EVIL: EVIL}))
    note = {
        "event": "note",
        "code": EVIL,
        "facts": {"why": EVIL},
        "rank": 0,
        "attempt": 0,
        "time_unix_s": 1.0,
    }
    (run_dir / "events" / "rank-00000-attempt-000.jsonl").write_text(json.dumps(note) + "\n")
    inputs, page = str(tmp_path / EVIL_NAME), str(tmp_path / f"{EVIL_NAME}.html")
    commands: dict[int, list[list[str]]] = {
        0: [
            ["data", "build", inputs, "--out", f"{EVIL_NAME}.out"],
            ["data", "verify", f"{EVIL_NAME}.out"],
            ["data", "stats", f"{EVIL_NAME}.out", "--page", page],
            ["data", "stats", f"{EVIL_NAME}.out", "--json"],
            ["report", str(run_dir)],
            ["report", str(run_dir), "--json"],
            ["plan", "--explain", f"run.dir={EVIL_NAME[:-1]}"],
            ["plan", "--explain", "--json", f"run.dir={EVIL_NAME[:-1]}"],
        ],
        2: [["init", f"{EVIL_NAME}.toml"]],
        4: [["data", "build", f"{EVIL_NAME}.jsonl", "--out", "o"], ["data", "stats", inputs]],
    }
    for code, each in commands.items():
        for arguments in each:
            assert _app.run_command_line(arguments) == code, (arguments, capsys.readouterr())
            for shown in capsys.readouterr():
                assert moves_a_cursor(shown) == [], arguments
    for written in (page, run_dir / "report.html"):
        assert moves_a_cursor(Path(written).read_text(encoding="utf-8")) == []


def test_a_worker_of_a_build_filters_what_it_says() -> None:
    """It has the terminal's standard error, and parses what strangers wrote."""
    text = (SOURCE / "data" / "build_worker.py").read_text()
    main = next(
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name == "main"
    )
    assert ast.unparse(main.body[0]) == "filter_standard_streams()"


def test_the_traceback_of_a_bug_is_filtered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(EVIL)

    monkeypatch.setattr(_app, "build_app", fail)
    assert _app.run_command_line(["train"]) == 1
    shown = capsys.readouterr().err
    assert "RuntimeError" in shown
    assert moves_a_cursor(shown) == []
