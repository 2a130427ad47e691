"""How fast `phalanx data build` is beside what its tokenizer could do alone.

    python benchmarks/data_build.py --mb 1000

makes that much text (the standard library's sources, a part of the words changed in each
repetition, so that no tokenizer lives from its cache), as files of text, as one large file and as
JSONL; builds it with bytes and with a BPE of 16,384 tokens trained on it, with 1 and 2 workers; and
prints a table. "alone" is the same number of processes that do nothing but encode the same text
from memory (bytes: read, widen and write it), one core each, measured just before; "in tokenizer"
is the part of the build's own time that its workers spent encoding; memory is the largest
process's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np

from phalanx.data.dataset import open_dataset
from phalanx.data.tokenizer import load_tokenizer

VOCAB_SIZE = 16_384
WORDS_CHANGED = 0.1
ALONE_MB = 40  # of text for each process that only encodes
BATCH = 64
PHALANX = [sys.executable, "-m", "phalanx"]
# One core per process: what a worker of the build has.
ENVIRONMENT = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def make_text(folder: Path, num_bytes: int) -> None:
    """folder/text/NNNNN.py, folder/one.txt and folder/rows.jsonl, each about `num_bytes` of the
    same text."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    originals = [path.read_text(encoding="utf-8", errors="replace") for path in sources]
    words = sorted({word for text in originals for word in re.findall(r"[A-Za-z]{4,}", text)})
    chance = random.Random(0)

    def changed(match: re.Match[str]) -> str:
        return (
            chance.choice(words) + chance.choice("aeiou")
            if chance.random() < WORDS_CHANGED
            else match.group()
        )

    (folder / "text").mkdir(parents=True)
    written, number = 0, 0
    with open(folder / "one.txt", "w") as one, open(folder / "rows.jsonl", "w") as rows:
        while written < num_bytes:
            text = re.sub(r"[A-Za-z]{4,}", changed, originals[number % len(originals)])
            (folder / "text" / f"{number:06d}.py").write_text(text)
            one.write(text)
            rows.write(json.dumps({"text": text}) + "\n")
            written, number = written + len(text.encode()), number + 1


def alone_worker(tokenizer: str, folder: Path, number: int, count: int, out: Path) -> None:
    """Encode every `count`-th file from the `number`-th on; prints bytes and seconds."""
    paths = sorted((folder / "text").iterdir())[number::count]
    texts, num_bytes = [], 0
    for path in paths:
        texts.append(path.read_bytes())
        num_bytes += len(texts[-1])
        if num_bytes >= ALONE_MB * 10**6:
            break
    if tokenizer == "bytes":
        began = time.perf_counter()
        with open(out, "wb") as file:
            for path in paths[: len(texts)]:
                file.write(np.frombuffer(path.read_bytes(), np.uint8).astype("<u2").data)
            file.flush()
            os.fsync(file.fileno())
    else:
        encoder = load_tokenizer(tokenizer)
        decoded = [text.decode() for text in texts]
        began = time.perf_counter()
        for start in range(0, len(decoded), BATCH):
            encoder.encode_batch(decoded[start : start + BATCH])
    print(num_bytes, time.perf_counter() - began)


def alone(tokenizer: str, folder: Path, num_workers: int) -> float:
    """Bytes of text per second of `num_workers` processes side by side, each for itself."""
    commands = [
        [sys.executable, __file__, "--alone", tokenizer, str(folder), str(number), str(num_workers)]
        for number in range(num_workers)
    ]
    processes = [
        subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    answers = [process.communicate()[0].split() for process in processes]
    return sum(int(num_bytes) / float(seconds) for num_bytes, seconds in answers)


def build(
    source: Path, tokenizer: str, num_workers: int, out: Path
) -> tuple[dict[str, object], float]:
    """The facts that the verb prints, and the memory of its largest process in MiB."""
    shutil.rmtree(out, ignore_errors=True)
    command = [
        *PHALANX,
        "data",
        "build",
        str(source),
        "--tokenizer",
        tokenizer,
        "--out",
        str(out),
        "--json",
    ]
    command += ["--workers", str(num_workers)]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)  # of the process and all that it waited for
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    open_dataset(out)
    shutil.rmtree(out)
    return json.loads(said), usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=100, help="megabytes of text")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dir", type=Path, help="where to work; default a temporary folder")
    parser.add_argument("--alone", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        tokenizer, folder, number, count = arguments.alone
        alone_worker(
            tokenizer, Path(folder), int(number), int(count), Path(folder) / f"alone-{number}.bin"
        )
        return
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        measure(Path(folder), arguments.mb, arguments.workers)


def measure(folder: Path, num_mb: int, workers: list[int]) -> None:
    make_text(folder, num_mb * 10**6)
    began = time.perf_counter()
    train = [
        "data",
        "tokenizer",
        str(folder / "rows.jsonl"),
        "--vocab-size",
        str(VOCAB_SIZE),
        "--max-mb",
        "100",
    ]
    subprocess.run([*PHALANX, *train, "--out", str(folder)], check=True, stdout=subprocess.DEVNULL)
    print(
        f"trained a BPE of {VOCAB_SIZE:,} in {time.perf_counter() - began:.1f} s; {os.cpu_count()}"
        " cores"
    )
    print(
        "| tokenizer | input | workers | MB/s | alone MB/s | ratio | in tokenizer | wall | memory |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for tokenizer in ("bytes", str(folder / "tokenizer.json")):
        for num_workers in workers:
            ceiling = alone(tokenizer, folder, num_workers)
            for source in ("text", "one.txt", "rows.jsonl"):
                facts, peak_mib = build(folder / source, tokenizer, num_workers, folder / "out")
                speed = facts["build"]
                assert isinstance(speed, dict)
                rate, share = (
                    float(speed["text_bytes_per_s"]),
                    float(speed["tokenizer_share_of_time"]),
                )
                kind = "bytes" if tokenizer == "bytes" else f"BPE {VOCAB_SIZE:,}"
                cells = [
                    kind,
                    source,
                    str(num_workers),
                    f"{rate / 1e6:,.1f}",
                    f"{ceiling / 1e6:,.1f}",
                ]
                cells += [
                    f"{rate / ceiling:.2f}",
                    f"{100 * share:.0f} %",
                    f"{float(speed['elapsed_s']):.1f} s",
                ]
                print("| " + " | ".join([*cells, f"{peak_mib:,.0f} MiB"]) + " |", flush=True)


if __name__ == "__main__":
    main()
