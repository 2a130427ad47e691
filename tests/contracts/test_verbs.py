"""Every verb, on arrival: a line of help, an example that parses, and a `--help` that imports
nothing heavy."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cpu_time import measure_cpu_s
from phalanx.cli import _app
from phalanx.cli._app import join_first_paragraph
from phalanx.cli._arguments import split_job_file_and_overrides
from phalanx.core.registry import list_modules_of_registry

VERBS = list_modules_of_registry("phalanx.cli")
GROUPS = [
    verb for verb in VERBS if hasattr(importlib.import_module(f"phalanx.cli.{verb}"), "COMMANDS")
]
SUB_VERBS = [
    (verb, sub)
    for verb in GROUPS
    for sub in importlib.import_module(f"phalanx.cli.{verb}").COMMANDS
]
ROOT = Path(__file__).parents[2]
SLACK = 3.0
HEAVY = {"torch", "numpy", "pydantic", "rich", "psutil", "safetensors", "phalanx.job.schema"}
ASK = """
import sys, json, time
began = time.perf_counter()
from phalanx.__main__ import main
sys.argv = ["phalanx", *sys.argv[1:]]
try:
    main()
except SystemExit as stop:
    code = stop.code
took_s = time.perf_counter() - began
sys.stdout.flush()
# Behind the filter that a command puts before its output, which shortens long lines.
print(json.dumps([code, took_s, sorted(sys.modules)]), file=sys.__stdout__)
"""


def ask(*arguments: str) -> tuple[int, float, set[str], str]:
    """(exit code, seconds, modules imported, output) of a command line in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", ASK, *arguments], capture_output=True, text=True, check=True
    )
    out, _, last = done.stdout.rstrip().rpartition("\n")
    code, took_s, modules = json.loads(last)
    assert done.stderr == ""
    return code, took_s, set(modules), out


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    """0.3 s for the whole process, of a processor: what others do beside it is not its own."""
    code, _, modules, out = ask("--help")
    assert code == 0
    assert not HEAVY & modules
    assert not [name for name in modules if name in {f"phalanx.cli.{verb}" for verb in VERBS}]
    for verb in VERBS:
        assert re.search(
            rf"^  {verb} +{re.escape(_app.read_help_line(verb)[:20])}", out, re.MULTILINE
        )

    def help_alone() -> None:
        subprocess.run([sys.executable, "-m", "phalanx", "--help"], capture_output=True, check=True)

    assert min(measure_cpu_s(help_alone) for _ in range(3)) < 0.3 * SLACK


def test_a_search_for_a_layout_imports_no_more_than_it_needs() -> None:
    options = ["--gpu=h100-sxm", "--nodes=1", "--seq-len=2048", "--global-batch=8"]
    code, _, modules, _ = ask("plan", "--model=llama3.2-1b", *options)
    assert code == 0
    assert not {"torch", "rich", "phalanx.observe.events"} & modules


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_explains_itself(verb: str) -> None:
    module = importlib.import_module(f"phalanx.cli.{verb}")
    line = _app.read_help_line(verb)
    assert re.fullmatch(r"[A-Z].*[.]", line), "the first line of its docstring is a sentence"
    assert len(line) < 100
    assert verb in GROUPS or module.command.__doc__
    code, _, modules, out = ask(verb, "--help")
    assert code == 0
    assert not {"torch", "numpy", "phalanx.job.schema"} & modules  # typer itself brings pydantic
    shown = " ".join(out.split())
    assert module.EXAMPLE in shown
    assert shown.index(module.EXAMPLE) > shown.index("--help")


@pytest.mark.parametrize("verb", VERBS)
def test_the_example_of_a_verb_is_one_of_it(verb: str) -> None:
    """It begins with the verb, and its overrides are keys of a job."""
    from phalanx.job.load import load_job

    example = importlib.import_module(f"phalanx.cli.{verb}").EXAMPLE
    words = shlex.split(example.removeprefix("Example: "))
    assert words[:2] == ["phalanx", verb]
    arguments = [word for word in words[2:] if not word.startswith("-")]
    if verb == "drill":
        from phalanx.cli._drill import split_faults_from_job

        # Faults stand beside the job.
        faults, arguments = split_faults_from_job(arguments)
        assert faults
    if verb not in GROUPS:  # whose example is that of one of them
        load_job(None, split_job_file_and_overrides(arguments)[1])


@pytest.mark.parametrize("verb", GROUPS)
def test_a_verb_of_verbs_lists_them_with_their_words(verb: str) -> None:
    module = importlib.import_module(f"phalanx.cli.{verb}")
    assert set(module.EXAMPLE_OF_COMMAND) == set(module.COMMANDS)
    code, _, modules, out = ask(verb, "--help")
    assert code == 0
    assert not {"torch", "numpy", "pyarrow", "tokenizers"} & modules
    for name, function in module.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(function.__doc__[:20])}", out, re.MULTILINE)
        assert re.fullmatch(r"[A-Z].*[.]", join_first_paragraph(function.__doc__))


@pytest.mark.parametrize(("verb", "sub_verb"), SUB_VERBS)
def test_a_sub_verb_explains_itself(
    verb: str, sub_verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"phalanx.cli.{verb}")
    assert _app.run_command_line([verb, sub_verb, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    example = module.EXAMPLE_OF_COMMAND[sub_verb]
    assert example in shown
    assert shown.index(example) > shown.index("--help")
    assert shlex.split(example.removeprefix("Example: "))[:3] == ["phalanx", verb, sub_verb]


@pytest.mark.parametrize("verb", GROUPS)
def test_a_misspelt_sub_verb_is_corrected(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = max(importlib.import_module(f"phalanx.cli.{verb}").COMMANDS, key=len)
    assert _app.run_command_line([verb, name[:-1] + "x"]) == 2
    captured = capsys.readouterr()
    assert f'did you mean "{name}"?' in captured.err
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["no-such-verb"], ["train", "--no-such-option"], ["report"]])
def test_a_wrong_command_line_is_exit_2_and_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _app.run_command_line(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("phalanx: ")


def test_a_misspelt_verb_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    assert _app.run_command_line(["trian"]) == 2
    assert 'did you mean "train"?' in capsys.readouterr().err


def list_promised_verbs(page: str) -> set[str]:
    """The verbs of commands that a page shows, in a block of lines or within one."""
    call = r"(?:\$ |\S*/|python -m )?phalanx ([a-z][a-z-]*)"
    blocks = re.findall(r"^```.*?^```", page, re.MULTILINE | re.DOTALL)
    in_blocks = re.findall(rf"^\s*{call}", "\n".join(blocks), re.MULTILINE)
    return {*in_blocks, *re.findall(rf"`{call}", page)}


def test_no_verb_is_promised_that_is_not_there() -> None:
    promised: set[str] = set()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        found = list_promised_verbs(path.read_text(encoding="utf-8"))
        assert found <= set(VERBS), path.name
        promised |= found
    assert promised == set(VERBS), "a verb that no page shows"
    assert list_promised_verbs("```\n$ phalanx fly\n```\n`phalanx swim x`") == {"fly", "swim"}
