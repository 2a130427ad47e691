"""`phalanx data` as a person uses it: what is said, the exit codes, Ctrl-C and kill -9."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sysconfig
from pathlib import Path

import psutil
import pytest

from commands import DEADLINE_S, PHALANX, environment, finish, start, wait_until, write_text
from phalanx.cli import _app
from phalanx.data.dataset import open_dataset
from phalanx.data.shards import PAYLOAD_OFFSET


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("texts") / "texts")


@pytest.fixture(scope="module")
def made(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and a dataset made with it."""
    folder = tmp_path_factory.mktemp("made")
    assert (
        _app.run_command_line(
            ["data", "tokenizer", str(texts), "--vocab-size", "500", "--out", str(folder)]
        )
        == 0
    )
    arguments = ["--tokenizer", str(folder), "--out", str(folder / "tokens"), "--workers", "1"]
    assert _app.run_command_line(["data", "build", str(texts), *arguments]) == 0
    return folder


def said(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """Standard output; standard error must be one line if the code is not 0, else nothing."""
    assert _app.run_command_line(["data", *map(str, arguments)]) == code
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == (1 if code else 0), captured.err
    return captured.err if code else captured.out


def test_what_a_build_says(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a row"}\n{"text": null}\n')
    (tmp_path / "picture.png").write_bytes(b"\0\0")
    out = said(capsys, "build", texts, f"{tmp_path}/*.*", "--out", tmp_path / "out", "--workers", 1)
    dataset = open_dataset(tmp_path / "out")
    assert f"{dataset.num_documents:,} documents" in out
    assert "1 binary file skipped; 1 null row skipped" in out
    assert re.search(r"speed +[\d.,]+ MB/s \(0\.1 MB in .*, 1 worker\)", out)
    assert out.splitlines()[-1] == f"next    phalanx train data.source={tmp_path / 'out'}"
    again = said(capsys, "build", texts, f"{tmp_path}/*.*", "--out", tmp_path / "out")
    assert again.startswith("there   ")


def test_what_a_build_left_out_is_said(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("a text")
    (folder / "b.txt").symlink_to("a.txt")
    said(capsys, "build", texts, "--out", folder / "tokens")
    out = said(capsys, "build", folder, folder / "a.txt", "--out", tmp_path / "out")
    assert (
        "1 folder skipped, a dataset or a run and not text; 2 files given again, read once\n" in out
    )


def test_a_build_says_how_fast_the_tokenizer_alone_is(
    texts: Path, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = said(
        capsys, "build", texts, "--tokenizer", made, "--out", tmp_path / "out", "--workers", 1
    )
    assert re.search(r"the tokenizer alone [\d.,]+ MB/s per worker, \d+ % of the time", out)


def test_facts_have_a_versioned_schema(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those of all verbs; so has an error."""
    (tmp_path / "a.txt").write_text("a text")
    arguments = [tmp_path / "a.txt", "--out", tmp_path / "out", "--json"]
    for verb, rest in {
        "build": arguments,
        "tokenizer": [*arguments, "--vocab-size", 300],
        "verify": [made / "tokens", "--json"],
        "stats": [made / "tokens", "--json"],
    }.items():
        facts = json.loads(said(capsys, verb, *rest))
        assert facts["schema"] == f"phalanx.data-{verb}/1"
        assert "format" not in facts
        assert _app.run_command_line(["data", verb, "nowhere", *map(str, rest[1:])]) == 4
        assert json.loads(capsys.readouterr().out)["schema"] in (
            "phalanx.error/1",
            "phalanx.data-verify/1",
        )


def test_facts_of_a_build_as_json(
    texts: Path, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    facts = json.loads(said(capsys, "build", texts, "--tokenizer", made, "--out", out, "--json"))
    dataset = open_dataset(out)
    assert facts["schema"] == "phalanx.data-build/1"
    assert (facts["digest"], facts["num_tokens"]) == (dataset.digest, dataset.num_tokens)
    assert facts["build"]["text_bytes"] == facts["source_bytes"]
    assert facts["build"]["tokenizer_bytes_per_s_per_worker"] > 0
    assert (
        json.loads(said(capsys, "build", texts, "--tokenizer", made, "--out", out, "--json"))[
            "build"
        ]
        is None
    )


def test_training_a_tokenizer_twice_gives_the_same_file(
    texts: Path, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = said(
        capsys, "tokenizer", texts, "--vocab-size", 500, "--out", tmp_path / "deep" / "mine.json"
    )
    assert "500 tokens from 0.1 MB of text" in out
    assert (tmp_path / "deep" / "mine.json").read_bytes() == (made / "tokenizer.json").read_bytes()
    assert "is there already" in said(
        capsys, "tokenizer", texts, "--vocab-size", 500, "--out", made, code=4
    )


def test_a_tokenizer_of_a_corpus_with_few_pairs_is_smaller_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("aaaa")
    out = said(capsys, "tokenizer", tmp_path / "a.txt", "--vocab-size", 5000, "--out", tmp_path)
    assert "the corpus has no more; 5,000 were asked for" in out
    assert "at least 257" in said(
        capsys, "tokenizer", "stdlib", "--vocab-size", 256, "--out", tmp_path, code=2
    )
    assert "at most 4,194,304" in said(
        capsys, "tokenizer", "stdlib", "--vocab-size", 10**11, "--out", "x", code=2
    )


def test_a_part_of_the_corpus_is_enough(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": f"row {n} " * 99}) + "\n" for n in range(3000))
    )
    arguments = ("tokenizer", tmp_path / "rows.jsonl", "--vocab-size", 300, "--max-mb", 1, "--json")
    facts = [json.loads(said(capsys, *arguments, "--out", tmp_path / name)) for name in ("a", "b")]
    assert 0.8e6 < facts[0]["text_bytes"] == facts[1]["text_bytes"] < 1.2e6
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (
        tmp_path / "b" / "tokenizer.json"
    ).read_bytes()


def test_verifying(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "every checksum holds" in said(capsys, "verify", made / "tokens")
    path = made / "tokens" / "shard-00000.tokens"
    content = path.read_bytes()
    try:
        path.write_bytes(
            content[: PAYLOAD_OFFSET + 9]
            + bytes([content[PAYLOAD_OFFSET + 9] ^ 4])
            + content[PAYLOAD_OFFSET + 10 :]
        )
        line = said(capsys, "verify", made / "tokens", code=4)
        assert line.startswith(f"phalanx: {path}: bytes 4096 to ")
        assert "checksum differs; tokens 0 to " in line
        assert _app.run_command_line(["data", "verify", str(made / "tokens"), "--json"]) == 4
        (problem,) = json.loads(capsys.readouterr().out)["problems"]
        assert problem["where"] == str(path)
        path.unlink()
        assert "the shard is missing" in said(capsys, "verify", made / "tokens", code=4)
    finally:
        path.write_bytes(content)
    assert json.loads(said(capsys, "verify", made / "tokens", "--json"))["problems"] == []
    assert "no finished dataset" in said(capsys, "verify", made, code=4)


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_what_is_wrong_with_a_dataset_is_said_without_secrets(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
) -> None:
    monkeypatch.setenv("MY_API_KEY", "SEKRET-1234567")
    assert _app.run_command_line(["data", "verify", str(tmp_path / "SEKRET-1234567"), *more]) == 4
    told = "".join(capsys.readouterr())
    assert "/***" in told
    assert "SEKRET" not in told


def test_statistics_are_those_of_the_tokens(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = open_dataset(made / "tokens")
    (shard,) = dataset.shards
    ends = shard.ends.tolist()
    lengths = sorted(b - a for a, b in zip([0, *ends], ends, strict=False))
    facts = json.loads(said(capsys, "stats", made / "tokens", "--json"))
    assert (facts["num_documents"], facts["num_tokens"]) == (len(lengths), len(shard.tokens))
    assert facts["length_quantiles"] == {
        **facts["length_quantiles"], "0": lengths[0], "0.5": lengths[len(lengths) // 2], "1": lengths[-1]
    }  # fmt: skip
    histogram = facts["length_histogram"]
    assert sum(bin["num_documents"] for bin in histogram) == len(lengths)
    assert sum(bin["num_tokens"] for bin in histogram) == len(shard.tokens)
    assert all(
        bin["num_documents"] == sum(bin["low"] <= length <= bin["high"] for length in lengths)
        for bin in histogram
    )
    counts = {token: shard.tokens.tolist().count(token) for token in set(shard.tokens.tolist())}
    top = facts["frequent_tokens"][0]
    assert top["count"] == max(counts.values()) == counts[top["token"]]
    assert facts["num_tokens_used"] == len(counts)


def test_statistics_count_a_document_of_several_shards_once(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = tmp_path / "large.txt"
    large.write_text("".join(path.read_text() for path in sorted(texts.iterdir())) * 60)
    said(capsys, "build", large, texts, "--out", tmp_path / "out", "--shard-mb", 1)
    facts = json.loads(said(capsys, "stats", tmp_path / "out", "--json"))
    assert facts["num_shards"] > 1
    assert facts["num_documents"] == 1 + len(list(texts.iterdir()))
    assert facts["length_quantiles"]["1"] == large.stat().st_size + 1


def test_a_picture_of_lengths(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "tokens.html"
    out = said(capsys, "stats", made / "tokens", "--page", page)
    assert "█" * 40 in out  # the highest bar is full
    html = page.read_text()
    assert "<svg" in html
    assert "Documents by length" in html
    assert not re.search(r"(src|href)=\"(?!data:|#)", html)  # it loads nothing
    assert "http" not in html.replace("http-equiv", "")


def test_a_picture_takes_the_place_of_no_shard(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = made / "tokens" / "dataset.json"
    before = facts.read_bytes()
    assert _app.run_command_line(["data", "stats", str(facts.parent), "--page", str(facts)]) == 2
    assert "is there already, and is no page" in capsys.readouterr().err
    assert facts.read_bytes() == before
    os.mkfifo(made / "pipe")
    pipe = str(made / "pipe")
    assert _app.run_command_line(["data", "stats", str(facts.parent), "--page", pipe]) == 7
    assert (made / "pipe").is_fifo()


def test_a_picture_where_only_ascii_can_be_shown(made: Path) -> None:
    done = finish(
        start("data", "stats", "tokens", cwd=made, env=environment(PYTHONIOENCODING="ascii"))
    )
    assert (done.code, done.err) == (0, "")
    assert "#" * 40 in done.out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere", "--out", "out"], 4, "nowhere: no such file or folder"),
        (["stdlb", "--out", "out"], 4, 'did you mean "stdlib"?'),
        (["stdlib", "--out", "."], 4, "the folder holds something else"),
        (["stdlib", "--out", "out", "--tokenizer", "nowhere.json"], 4, "no such tokenizer"),
        (
            ["stdlib", "--out", "out", "--tokenizer", "note.txt"],
            4,
            "not a Hugging Face tokenizer.json",
        ),
        (
            ["rows.jsonl", "--out", "out", "--column", "txt"],
            4,
            "rows.jsonl:1: there is no field 'txt'",
        ),
        (["ids.npy", "--out", "out"], 4, "data.source takes the .npy itself"),
        (["stdlib"], 2, "--out"),
        (["--out", "out"], 2, "INPUT"),
        (["stdlib", "--out", "out", "--workers", "0"], 2, "--workers"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], code: int, words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "note.txt").write_text("a note")
    (tmp_path / "rows.jsonl").write_text('{"text": "a row"}\n')
    (tmp_path / "ids.npy").write_bytes(b"\x93NUMPY\0")
    line = said(capsys, "build", *arguments, code=code)
    assert words in line
    assert not (tmp_path / "out" / "dataset.json").exists()


def slow_corpus(folder: Path, num_files: int = 4) -> Path:
    """A dozen shards of 1 MiB, with four files: enough to be caught in the middle."""
    folder.mkdir()
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(library.glob("[a-k]*.py")))
    for number in range(num_files):
        (folder / f"{number}.txt").write_bytes(text)
    return folder


@pytest.mark.parametrize(
    "how", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)]
)
def test_a_build_that_is_stopped_goes_on(made: Path, tmp_path: Path, how: signal.Signals) -> None:
    """Also kill -9: whole shards are kept and not written again, workers end with their parent."""
    corpus = slow_corpus(tmp_path / "corpus")
    out = tmp_path / "tokens"
    command = f"data build corpus --tokenizer {made} --out tokens --workers 2 --shard-mb 1".split()
    process = start(*command, cwd=tmp_path)
    notes = out / ".build"
    wait_until(lambda: len(list(notes.glob("[0-9]*.json"))) >= 2)
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 2
    (os.killpg if how == signal.SIGINT else os.kill)(process.pid, how)
    done = finish(process)
    assert psutil.wait_procs(workers, timeout=DEADLINE_S)[1] == []
    assert not (out / "dataset.json").exists()
    if how == signal.SIGINT:
        assert done.code == 130
        # A slow machine sees progress on the way, and nothing else.
        lines = [line for line in done.err.splitlines() if not line.startswith("building ")]
        assert re.fullmatch(
            r"stopped: \d+ of \d+ shards are whole and kept; the same command goes on from there",
            "\n".join(lines),
        )
        assert done.out == ""
    written = {
        path.name: path.stat().st_mtime_ns
        for path in out.glob("shard-*")
        if (notes / f"{path.name[6:11]}.json").exists()
    }
    assert len(written) >= 2
    again = finish(start(*command, cwd=tmp_path))
    assert again.code == 0, again.err
    assert f"{len(written)} of them there before" in again.out
    assert {name: (out / name).stat().st_mtime_ns for name in written} == written
    dataset = open_dataset(out)
    tokenizer = dataset.load_tokenizer()
    assert tokenizer is not None
    assert dataset.num_documents == 4
    assert dataset.source_bytes == sum(path.stat().st_size for path in corpus.iterdir())
    if how == signal.SIGKILL:
        text = (corpus / "0.txt").read_text()
        first = [token for shard in dataset.shards for token in shard.tokens.tolist()]
        assert first[: first.index(0)] == tokenizer.encode(text)
    assert not list(out.glob(".*"))


def test_progress_on_a_terminal(made: Path, texts: Path, tmp_path: Path) -> None:
    """A bar on standard error, taken away at the end; without colours if NO_COLOR is set."""
    slow_corpus(tmp_path / "corpus", num_files=2)
    ours, theirs = pty.openpty()
    command = [
        *PHALANX,
        "data",
        "build",
        "corpus",
        "--tokenizer",
        str(made),
        "--out",
        "tokens",
        "--workers",
        "2",
    ]
    env = environment(NO_COLOR="1", TERM="xterm", COLUMNS="120")
    process = subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    drawn = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        drawn += data
    out = process.communicate()[0].decode()
    os.close(ours)
    assert process.returncode == 0
    assert out.startswith("built ")
    text = drawn.decode()
    assert re.search(r"building .*%  *\d+/\d+ MB  [\d.]+ MB/s  eta .*documents", text)
    assert "\x1b[3" not in text  # no colour
