"""`phalanx checkpoint import` and `export` as a person uses them; weights that are not what they
say; pickles."""

from __future__ import annotations

import importlib
import json
import math
import pickle
import resource
import shutil
import struct
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.checkpoint.chunks import FileSizeAndChecksums
from phalanx.checkpoint.exchange.checkpoint_reader import CheckpointReader
from phalanx.checkpoint.exchange.families import find_family_of_model_type
from phalanx.checkpoint.exchange.new_directory import create_directory_atomically
from phalanx.checkpoint.exchange.settings import build_hugging_face_config
from phalanx.checkpoint.manifest import (
    MANIFEST_FILE_NAME,
    compute_manifest_checksum,
    encode_canonical_manifest,
    read_manifest,
)
from phalanx.checkpoint.reading.origin import ModelOfCheckpoint
from phalanx.cli._app import run_command_line
from phalanx.core.errors import CheckpointError
from phalanx.core.registry import list_modules_of_registry
from phalanx.job.load import load_job
from phalanx.job.model import build_model_shape
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.run.export import require_model_of_job


def phalanx(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run_command_line(["checkpoint", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys: pytest.CaptureFixture[str], *arguments: object, code: int) -> str:
    """Standard error of a command that must fail so, and say it in one line unless there is a
    table."""
    found, out, err = phalanx(capsys, *arguments)
    assert (found, out) == (code, ""), err
    assert err.startswith("phalanx: ")
    assert len(err.splitlines()) == 1 or err.splitlines()[1].split() == [
        "tensor",
        "wanted",
        "found",
    ]
    return err


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """The format by hand: what is read must not depend on our own writer."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": tensor.shape,
            "data_offsets": [len(data), len(data) + tensor.nbytes],
        }
        data += tensor.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


SHAPE = DecoderShape(1, 8, 2, 1, 4, 12, 11, True)


def weights() -> dict[str, np.ndarray]:
    """A Llama of one block, in transformers' names."""
    layer, random = "model.layers.0", np.random.default_rng(0)
    sizes = {
        "model.embed_tokens.weight": (11, 8),
        "model.norm.weight": (8,),
        f"{layer}.input_layernorm.weight": (8,),
        f"{layer}.post_attention_layernorm.weight": (8,),
        f"{layer}.self_attn.q_proj.weight": (8, 8),
        f"{layer}.self_attn.k_proj.weight": (4, 8),
        f"{layer}.self_attn.v_proj.weight": (4, 8),
        f"{layer}.self_attn.o_proj.weight": (8, 8),
        f"{layer}.mlp.gate_proj.weight": (12, 8),
        f"{layer}.mlp.up_proj.weight": (12, 8),
        f"{layer}.mlp.down_proj.weight": (8, 12),
    }
    return {name: random.standard_normal(size).astype(np.float32) for name, size in sizes.items()}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A directory of two files with an index."""
    folder, parts, found = tmp_path / "llama", {}, weights()
    folder.mkdir()
    for number, chosen in enumerate((list(found)[:4], list(found)[4:])):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        write_safetensors(folder / file, {name: found[name] for name in chosen})
        parts |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    (folder / "config.json").write_text(
        json.dumps(build_hugging_face_config(SHAPE) | {"bos_token_id": 1, "eos_token_id": 2})
    )
    (folder / "tokenizer.json").write_text('{"a": 1}')
    return folder


def test_import_writes_a_checkpoint_and_a_job_file_that_fits(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "imported"
    code, said, _ = phalanx(capsys, "import", llama, "--out", out)
    assert code == 0
    assert [line.split()[0] for line in said.splitlines()] == ["from", "wrote", "train"]
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoints",
        "model.toml",
        "tokenizer.json",
    ]
    job = load_job(out / "model.toml")
    assert build_model_shape(job, 1) == SHAPE
    assert (job.model.init_from, job.data.tokenizer) == (str(out), str(out / "tokenizer.json"))
    assert phalanx(capsys, "verify", out)[0] == 0
    assert "step-0" in phalanx(capsys, "ls", out)[1]
    with CheckpointReader(out / "checkpoints" / "step-0") as reader:
        found = reader.load("blocks.0.attention.q.weight").view(np.float32)
    assert np.array_equal(found, weights()["model.layers.0.self_attn.q_proj.weight"])
    assert phalanx(capsys, "import", llama, "--out", tmp_path / "again")[0] == 0
    assert phalanx(capsys, "diff", out, tmp_path / "again")[0] == 0


def test_a_head_of_its_own_is_not_left_out_for_the_embedding(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where config.json says that the two are one."""
    head = weights()["model.embed_tokens.weight"]
    (llama / "model.safetensors.index.json").unlink()
    write_safetensors(llama / "model-00003-of-00003.safetensors", {"lm_head.weight": head})
    code, said, _ = phalanx(capsys, "import", llama, "--out", tmp_path / "same")
    assert (code, "lm_head.weight is left out" in said) == (0, True)
    head[5, 3] += 1.0
    write_safetensors(llama / "model-00003-of-00003.safetensors", {"lm_head.weight": head})
    code, _, said = phalanx(capsys, "import", llama, "--out", tmp_path / "other")
    assert (code, "lm_head.weight is not the embedding" in said) == (3, True)
    assert "set tie_word_embeddings to false" in said
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert phalanx(capsys, "import", llama, "--out", tmp_path / "other")[0] == 0
    with CheckpointReader(tmp_path / "other" / "checkpoints" / "step-0") as reader:
        assert np.array_equal(reader.load("head.weight").view(np.float32), head)


def test_export_of_an_import_has_its_weights_settings_and_tokenizer(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, back = tmp_path / "imported", tmp_path / "back"
    assert phalanx(capsys, "import", llama, "--out", out)[0] == 0
    code, said, _ = phalanx(capsys, "export", out, "--out", back, "--json")
    facts = json.loads(said)
    assert (code, facts["schema"], facts["architecture"]) == (
        0,
        "phalanx.checkpoint-export/1",
        "LlamaForCausalLM",
    )
    assert sorted(path.name for path in back.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    config = json.loads((back / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert (back / "tokenizer.json").read_bytes() == (llama / "tokenizer.json").read_bytes()
    assert phalanx(capsys, "import", back, "--out", tmp_path / "again")[0] == 0
    assert phalanx(capsys, "diff", out, tmp_path / "again", "--json")[0] in (
        0,
        11,
    )  # they say where they came from
    difference = json.loads(phalanx(capsys, "diff", out, tmp_path / "again", "--json")[1])
    assert (difference["tensors"], list(difference["facts"])) == ([], ["imported_from"])


def test_a_special_token_that_is_null_stays_null(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And one that is left out is left out: transformers' own is meant."""
    edit_config(bos_token_id=None)(llama)
    assert phalanx(capsys, "import", llama, "--out", tmp_path / "imported")[0] == 0
    code, _, _ = phalanx(capsys, "export", tmp_path / "imported", "--out", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (code, config["bos_token_id"], config["eos_token_id"]) == (0, None, 2)
    assert "pad_token_id" not in config


def test_files_of_processors_come_along_both_ways(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["preprocessor_config.json", "processor_config.json", "spiece.model", "vocab.txt"]
    for name in names:
        (llama / name).write_text("{}")
    assert phalanx(capsys, "import", llama, "--out", tmp_path / "imported")[0] == 0
    code, said, _ = phalanx(capsys, "export", tmp_path / "imported", "--out", tmp_path / "back")
    assert code == 0
    # The optimizer's state is not opened.
    assert "every byte of the weights verified" in said
    for name in names:
        assert (tmp_path / "back" / name).read_text() == "{}"


def test_a_type_to_round_to(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """bfloat16 by hand is the reference: the upper half of the bits, rounded to even."""
    from ranks import run_ranks

    out, back = tmp_path / "imported", tmp_path / "back"
    assert phalanx(capsys, "import", llama, "--out", out)[0] == 0
    assert run_ranks(1, export_as_bf16, out, back) == [0]
    assert phalanx(capsys, "import", back, "--out", tmp_path / "again")[0] == 0
    with CheckpointReader(tmp_path / "again" / "checkpoints" / "step-0") as reader:
        assert reader.tensors["embed.weight"].dtype == "bfloat16"
        found = reader.load("embed.weight")
    bits = weights()["model.embed_tokens.weight"].view(np.uint32)
    assert np.array_equal(found, ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))
    assert "init_cast = true" in (tmp_path / "again" / "model.toml").read_text()


def export_as_bf16(rank: int, out: Path, back: Path) -> int:
    return run_command_line(
        ["checkpoint", "export", str(out), "--out", str(back), "--dtype", "bf16"]
    )


# What is refused


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def edit_index(edit: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        edit(index["weight_map"])
        path.write_text(json.dumps(index))

    return apply


def edit_index_file(index: object) -> Callable[[Path], None]:
    return lambda folder: write_json(folder / "model.safetensors.index.json", index)


def edit_header(header: object) -> Callable[[Path], None]:
    text = json.dumps(header).encode()
    return lambda folder: write_bytes(folder / FIRST, struct.pack("<Q", len(text)) + text)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)


FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
NO_JOB = edit_config(rope_theta=0.5)
BAD: dict[str, tuple[int, str, Callable[[Path], object]]] = {
    "a missing file": (5, f"{SECOND} is missing", lambda d: (d / SECOND).unlink()),
    "a file cut short": (
        5,
        "not a safetensors file",
        lambda d: (d / FIRST).write_bytes((d / FIRST).read_bytes()[:-4]),
    ),
    "a file that is empty": (5, "not a safetensors file", lambda d: (d / FIRST).write_bytes(b"")),
    "a header longer than the file": (
        5,
        "longer than the file",
        lambda d: (d / FIRST).write_bytes(b"\xff" * 64),
    ),
    "a tensor in two files": (
        5,
        "in more than one file",
        lambda d: (d / SECOND).write_bytes((d / FIRST).read_bytes()),
    ),
    "an index that points elsewhere": (
        5,
        "the index names the file",
        edit_index(lambda m: m.update(x="../../secret.safetensors")),
    ),
    "an index without its map": (
        5,
        "it has no weight_map, an object of tensors and their files",
        edit_index_file({"weight_map": None}),
    ),
    "an index of lists": (
        5,
        "the index names the file [1] for a (it must be the name of a file beside it)",
        edit_index_file({"weight_map": {"a": [1]}}),
    ),
    "a header of zeros": (
        5,
        "its header is no JSON at byte 0",
        lambda d: (d / FIRST).write_bytes(struct.pack("<Q", 64) + bytes(64)),
    ),
    "a header without a shape": (
        5,
        "the shape of a is no list of whole numbers",
        edit_header({"a": {"dtype": "F32", "shape": None, "data_offsets": [0, 0]}}),
    ),
    "a header of an unknown type": (
        5,
        'the type of a is "F99", which is none of numbers',
        edit_header({"a": {"dtype": "F99", "shape": [0], "data_offsets": [0, 0]}}),
    ),
    "a shape that no array has": (
        5,
        "no array has the shape [0, 9223372036854775808] of a",
        edit_header({"a": {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}}),
    ),
    "a name that is no text": (
        5,
        r"the name 'a\ud800' is no text",
        edit_header({"a\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}),
    ),
    "an empty tokenizer": (
        5,
        "llama/tokenizer.json: it is empty; put it back, or remove it",
        lambda d: (d / "tokenizer.json").write_bytes(b""),
    ),
    "a tokenizer cut short": (
        5,
        "llama/tokenizer.json: it is no JSON, or cut short",
        lambda d: (d / "tokenizer.json").write_text('{"model": {"vo'),
    ),
    "empty merges": (
        5,
        "llama/merges.txt: it is empty",
        lambda d: (d / "merges.txt").write_bytes(b""),
    ),
    "an index that is none": (
        5,
        "index cannot be read",
        lambda d: (d / "model.safetensors.index.json").write_text("[]"),
    ),
    "a configuration that is no JSON": (
        5,
        "config.json cannot be read",
        lambda d: (d / "config.json").write_text("{"),
    ),
    "a configuration that is no object": (
        5,
        "not an object",
        lambda d: (d / "config.json").write_text("[1]"),
    ),
    "another width": (5, "of another shape", edit_config(intermediate_size=16)),
    "another depth": (5, "missing", edit_config(num_hidden_layers=2)),
    "a head that is not there": (5, "head.weight", edit_config(tie_word_embeddings=False)),
    "another family": (3, "cannot be imported", edit_config(model_type="bert")),
    "another family, by its file": (3, "llama/config.json: ", edit_config(model_type="bert")),
    "a configuration that makes no sense": (
        3,
        'llama/config.json: tie_word_embeddings is "x"; it must be true or false',
        edit_config(tie_word_embeddings="x"),
    ),
    "a length that is no number": (
        3,
        "llama/config.json: max_position_embeddings is NaN; it must be a whole number from 1 on",
        edit_config(max_position_embeddings=math.nan),
    ),
    "a token that is no number": (
        3,
        "llama/config.json: eos_token_id is Infinity; it must be a whole number or a list of them",
        edit_config(eos_token_id=math.inf),
    ),
    "a scaling that is no table": (
        3,
        "llama/config.json: rope_scaling is 8.0; it must be an object",
        edit_config(rope_scaling=8.0),
    ),
    "a scaling without its factor": (
        3,
        "llama/config.json: config.json has no factor",
        edit_config(rope_scaling={"rope_type": "linear"}),
    ),
    "a width that is not there": (
        3,
        "llama/config.json: config.json has no hidden_size",
        edit_config(hidden_size=None),
    ),
    "quantized weights": (
        3,
        "llama/config.json: the weights are q",
        edit_config(quantization_config={"bits": 4}),
    ),
    "a configuration that no job can have": (
        3,
        "llama/config.json: config.json describes a model that no job",
        NO_JOB,
    ),
    "another activation": (3, "hidden_act", edit_config(hidden_act="relu")),
}


@pytest.mark.parametrize("case", BAD)
def test_a_directory_that_is_not_what_it_says_is_refused(
    case: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, words, damage = BAD[case]
    damage(llama)
    assert words in refused(capsys, "import", llama, "--out", tmp_path / "imported", code=code)
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


def test_commands_that_make_no_sense(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "imported"
    assert phalanx(capsys, "import", llama, "--out", out)[0] == 0
    (tmp_path / "empty").mkdir()
    for words, code, arguments in (
        ("no such file", 2, ("import", tmp_path / "nowhere", "--out", tmp_path / "x")),
        ("only files of this machine", 2, ("import", "https://a/b", "--out", tmp_path / "x")),
        ("phalanx's own already", 2, ("import", out, "--out", tmp_path / "x")),
        ("there are no weights in it", 5, ("import", tmp_path / "empty", "--out", tmp_path / "x")),
        ("something is there already", 2, ("import", llama, "--out", out)),
        (
            "--prefix is for weights",
            2,
            ("import", llama, "--out", tmp_path / "x", "--prefix", "model."),
        ),
        ("something is there already", 2, ("export", out, "--out", llama)),
        ("unknown format", 2, ("export", out, "--out", tmp_path / "x", "--format", "gguf")),
        ("unknown type", 2, ("export", out, "--out", tmp_path / "x", "--dtype", "int8")),
        ("no checkpoint is there", 5, ("export", tmp_path / "empty", "--out", tmp_path / "x")),
        ("kept as the best", 5, ("export", out, "--out", tmp_path / "x", "--best")),
    ):
        assert words in refused(capsys, *arguments, code=code)
    assert not (tmp_path / "x").exists()


def test_a_flipped_bit_is_found_and_nothing_is_exported(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "imported"
    phalanx(capsys, "import", llama, "--out", out)
    file = out / "checkpoints" / "step-0" / "weights-0000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    assert "not those that were written" in refused(
        capsys, "export", out, "--out", tmp_path / "x", code=5
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["imported", "llama"]


def test_a_plan_of_another_model_than_its_jobs_is_not_exported(tmp_path: Path) -> None:
    job = load_job(None, ["model.num_layers=1", "model.dim=64", "data.seq_len=32"])
    (tmp_path / "job.json").write_text(json.dumps(job.to_json()))
    shape = build_model_shape(job, 99)
    require_model_of_job(ModelOfCheckpoint(shape, 32), tmp_path)
    assert isinstance(shape, DecoderShape)
    for edited, seq_len, words in (
        (replace(shape, rope_theta=5.0), 32, "rope_theta is 5.0, and job.json makes it 10000.0"),
        (replace(shape, activation="geglu"), 32, 'activation is "geglu"'),
        (shape, 64, "seq_len is 64, and job.json makes it 32"),
    ):
        with pytest.raises(CheckpointError, match=words):
            require_model_of_job(ModelOfCheckpoint(edited, seq_len), tmp_path)


def test_a_directory_is_whole_or_absent(tmp_path: Path) -> None:
    def fail() -> None:
        with create_directory_atomically(tmp_path / "deep" / "new") as folder:
            (folder / "half").write_text("x")
            assert not (tmp_path / "deep" / "new").exists()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list((tmp_path / "deep").iterdir()) == []
    (tmp_path / "empty").mkdir()
    with create_directory_atomically(tmp_path / "empty") as folder:
        (folder / "whole").write_text("x")
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["whole"]


# Pickles


class Payload:
    """Unpickling it leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.trace,))


def pickled(trace: Path) -> bytes:
    return pickle.dumps({"state": Payload(trace)})


class Prints:
    """Unpickling it prints a line without an end."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("import sys; sys.stdout.write('no end')",))


def as_torch_saves(path: Path, content: object) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"state": content}))
        archive.writestr("archive/version", "3")


DISGUISES = (
    *(
        "job.toml",
        "job.json",
        "plan.json",
        "best.json",
        "init.json",
        "epoch",
        "config.json",
        "model.safetensors",
    ),
    *(
        "model.safetensors.index.json",
        "pytorch_model.bin",
        ".metadata",
        "__0_0.distcp",
        "tokenizer.json",
        "tokens.npy",
    ),
    *(
        "text.bin",
        "text.idx",
        "dataset.json",
        "manifest.json",
        "data/corpus.json",
        "checkpoints/step-1/manifest.json",
    ),
    *(
        "checkpoints/step-1/rank-0000.safetensors",
        "events/rank-0.jsonl",
        "traces/rank-0000-attempt-00-steps-1-2.jsonl",
        "rows.parquet",
        "weights.pt",
        "weights.ckpt",
    ),
)
VERBS: dict[tuple[str, ...], Callable[[Path], Iterable[tuple[object, ...]]]] = {
    ("checkpoint", "ls"): lambda d: [(d,)],
    ("checkpoint", "verify"): lambda d: [(d,), (d / "checkpoints" / "step-1",)],
    ("checkpoint", "diff"): lambda d: [(d, d)],
    ("checkpoint", "prune"): lambda d: [(d, "--keep-last", "1")],
    ("checkpoint", "export"): lambda d: [
        (d, "--out", d.parent / "x"),
        (d, "--best", "--out", d.parent / "x"),
    ],
    ("checkpoint", "import"): lambda d: [
        (path, "--out", d.parent / "x") for path in (d, *d.iterdir())
    ],
    ("data", "build"): lambda d: [
        (d / "job.json", "--tokenizer", d / "tokenizer.json", "--out", d.parent / "x")
    ],
    ("data", "tokenizer"): lambda d: [(d / "job.toml", "--out", d.parent / "x")],
    ("data", "verify"): lambda d: [(d,)],
    ("data", "stats"): lambda d: [(d,)],
    ("data", "ledger"): lambda d: [(d,)],
    # Measuring reads no file: what it is given is where it writes.
    ("bench", "gemm"): lambda d: [("--out", d), ("--out", d / "job.toml", "--seconds", "1")],
    ("bench", "comm"): lambda d: [("--out", d)],
    ("bench", "storage"): lambda d: [("--directory", d / "job.toml")],
    ("bench", "all"): lambda d: [("--directory", d / "job.toml")],
    ("init",): lambda d: [(d / "job.toml",)],
    ("plan",): lambda d: [
        (d / "job.toml",),
        (f"model.init_from={d}",),
        (f"data.tokenizer={d}", "--explain"),
    ],
    ("report",): lambda d: [(d,)],
    ("where",): lambda d: [(d,)],
    ("logs",): lambda d: [(d,)],
    # One that is taken for a run would be served until Ctrl-C.
    ("watch",): lambda d: [(d / "weights.pt",), (d / "weights.pt", "--terminal")],
    ("metrics",): lambda d: [(d, "--once")],
    ("bench", "scaling"): lambda d: [
        (d / "job.toml",),
        (f"model.init_from={d}", "--ranks", "1,2", "--repeats", "1", "--steps", "8"),
    ],
    # Whatever it compares begins with random weights.
    ("bench", "train"): lambda d: [(d / "job.toml",)],
    ("drill",): lambda d: [
        (d / "job.toml", "kill"),
        ("kill", "--campaign", d / "job.toml", "parallel.ranks=2"),
    ],
    ("trace",): lambda d: [(d,), (d, "--steps", "1")],
    ("eval",): lambda d: [(d,), (d / "checkpoints" / "step-1",)],
    ("generate",): lambda d: [
        (d, "--prompt", "a"),
        (d / "checkpoints" / "step-1", "--prompt", "a"),
    ],
    ("verify",): lambda d: [
        (d / "job.toml",),
        # Each type and each step read the same.
        (f"model.init_from={d}", "--ranks", "1", "--shrink", "--types", "float64", "--steps", "1"),
    ],
    ("train",): lambda d: [
        *((d / "job.toml",), ("--resume", d)),
        *(
            (f"model.init_from={place}", f"run.dir={d.parent / 'x'}")
            for place in (d, d / "checkpoints" / "step-1")
        ),
        *(
            (f"data.source={d / name}", f"run.dir={d.parent / 'x'}")
            for name in ("tokens.npy", "text.bin", "rows.parquet")
        ),
        (f"data.source={d / 'job.toml'}", f"data.tokenizer={d}", f"run.dir={d.parent / 'x'}"),
    ],
}


def test_the_payload_is_one(tmp_path: Path) -> None:
    pickle.loads(pickled(tmp_path / "trace"))
    assert (tmp_path / "trace").exists()


def test_every_verb_is_asked() -> None:
    modules = {
        verb: importlib.import_module(f"phalanx.cli.{verb}")
        for verb in list_modules_of_registry("phalanx.cli")
    }
    groups = {verb: getattr(module, "COMMANDS", None) for verb, module in modules.items()}
    assert set(VERBS) == {
        (verb, *sub)
        for verb, subs in groups.items()
        for sub in ([(s,) for s in subs] if subs else [()])
    }


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_no_verb_unpickles_what_it_is_given(
    verb: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever its name, a pickle is refused or taken for text, and never run."""
    folder, trace = tmp_path / "gift", tmp_path / "trace"
    for name in DISGUISES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(pickled(trace))
    as_torch_saves(folder / "weights.pt", Payload(trace))
    np.save(folder / "tokens.npy", np.array([Payload(trace)], dtype=object), allow_pickle=True)
    for arguments in VERBS[verb](folder):
        run_command_line([*verb, *map(str, arguments)])
        assert "Traceback" not in capsys.readouterr().err
        assert not trace.exists(), arguments


RUN_FILES = (
    "model.toml",
    "tokenizer.json",
    "job.json",
    "plan.json",
    "best.json",
    "init.json",
    "epoch",
    "events/rank-0.jsonl",
)
STEP_FILES = (
    MANIFEST_FILE_NAME,
    "rank-0000.safetensors",
    "pytorch_model.bin",
    ".metadata",
    "__0_0.distcp",
    "config.json",
    "data.pkl",
)
READING: dict[str, Callable[[Path], list[object]]] = {
    "ls": lambda d: [d],
    "verify": lambda d: [d],
    "diff": lambda d: [d, d.parent / "good"],
    "prune": lambda d: [d, "--keep-last", "1"],
    "export": lambda d: [d, "--out", d.parent / "x"],
}


@pytest.mark.parametrize(
    "name", [*RUN_FILES, *(f"checkpoints/step-0/{name}" for name in STEP_FILES)]
)
def test_one_pickle_in_a_whole_checkpoint_is_never_run(
    name: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing else is wrong: a file of the checkpoint that became one has its right checksum in
    the manifest."""
    good, folder, trace = tmp_path / "good", tmp_path / "gift", tmp_path / "trace"
    assert phalanx(capsys, "import", llama, "--out", good)[0] == 0
    shutil.copytree(good, folder)
    path = folder / name
    is_listed = path.exists() and path.suffix == ".safetensors"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickled(trace))
    if is_listed:
        body = json.loads((path.parent / MANIFEST_FILE_NAME).read_text())
        body["files"][path.name] = asdict(FileSizeAndChecksums.compute_from_file(path))
        (path.parent / MANIFEST_FILE_NAME).write_bytes(
            encode_canonical_manifest(body | {"xxh3": compute_manifest_checksum(body)})
        )
    codes = {
        verb: phalanx(capsys, verb, *arguments(folder))[0] for verb, arguments in READING.items()
    }
    codes["load"] = run_command_line(["plan", f"model.init_from={folder}"])
    assert "Traceback" not in capsys.readouterr().err
    assert not trace.exists()
    if "step-0" in name:
        assert codes["verify"] == 5
    else:
        assert codes["verify"] == 0  # the checkpoint is whole: the pickle lies beside it


def test_a_pickle_is_read_only_when_it_is_trusted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And then elsewhere: this process does not even import torch for it."""
    file, trace = tmp_path / "weights.pt", tmp_path / "trace"
    as_torch_saves(file, Payload(trace))
    assert "--trust-pickle" in refused(capsys, "import", file, "--out", tmp_path / "x", code=5)
    assert not trace.exists()
    refused(
        capsys, "import", file, "--out", tmp_path / "x", "--trust-pickle", code=5
    )  # it ran, and held no tensors
    assert trace.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace", "weights.pt"]


def test_what_is_no_pickle_is_not_called_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody is asked to trust a file that would not be unpickled anyway."""
    file = tmp_path / "notes.txt"
    file.write_text("weights are on the other disk\n")
    said = refused(capsys, "import", file, "--out", tmp_path / "x", code=5)
    assert said.startswith(f"phalanx: {file}: it is neither safetensors nor a file of torch.save")
    assert "--trust-pickle" not in said
    said = refused(capsys, "import", "https://host/weights.pt", "--out", tmp_path / "x", code=2)
    assert "download it first" in said


def test_the_answer_is_read_though_what_is_unpickled_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "weights.pt"
    as_torch_saves(file, Prints())
    said = refused(capsys, "import", file, "--out", tmp_path / "x", "--trust-pickle", code=5)
    assert said.startswith(f"phalanx: {file}: there is no tensor in it"), said


class LargerThanDisk:
    """Unpickling it makes a tensor of 256 KiB, and lets no file have more than 4: a full disk."""

    def __reduce__(self) -> tuple[Any, ...]:
        limit = f"__import__('resource').setrlimit({resource.RLIMIT_FSIZE}, (4096, 4096))"
        return (eval, (f"{limit} or __import__('torch').ones(65536)",))


def test_a_disk_that_takes_no_unpickled_weights_is_not_blamed_on_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "weights.pt", tmp_path / "folder"
    as_torch_saves(file, LargerThanDisk())
    said = refused(capsys, "import", file, "--out", file / "x", "--trust-pickle", code=7)
    assert said.startswith(f"phalanx: {file}: failed while making a directory for the unpickled")
    said = refused(capsys, "import", file, "--out", folder / "x", "--trust-pickle", code=7)
    assert said.startswith(f"phalanx: {folder}: failed while writing the unpickled weights")
    assert "ulimit -f" in said
    assert list(folder.iterdir()) == []


def save_as_torch_does(rank: int, folder: Path) -> None:
    """A nested dictionary, a whole module, a DCP directory and a Hugging Face directory of
    before safetensors."""
    import torch
    from torch.distributed import checkpoint as dcp

    warnings.simplefilter("ignore")  # about a single process, which is meant
    turned = torch.arange(6.0).reshape(2, 3).t()
    inner = {"a.weight": turned, "b": torch.ones(3, dtype=torch.bfloat16)}
    nested = {"module": inner, "net": torch.nn.Linear(3, 2), "step": 3, "list": [torch.zeros(2)]}
    torch.save({**nested, "tied": {"b": inner["b"]}}, folder / "nested.pt")
    dcp.save({"model": inner, "step": 3}, checkpoint_id=folder / "dcp", no_dist=True)
    (folder / "hf").mkdir()
    torch.save(
        {name: torch.from_numpy(tensor) for name, tensor in weights().items()}
        | {"sparse": torch.eye(2).to_sparse()},
        folder / "hf" / "pytorch_model.bin",
    )
    (folder / "hf" / "config.json").write_text(json.dumps(build_hugging_face_config(SHAPE)))


def tensors_of(out: Path) -> dict[str, tuple[str, list[float]]]:
    with CheckpointReader(out / "checkpoints" / "step-0") as reader:
        loaded = {
            name: (tensor.dtype, reader.load(name)) for name, tensor in reader.tensors.items()
        }
    return {
        name: (dtype, [hex(int(bit)) for bit in bits.reshape(-1)])
        for name, (dtype, bits) in loaded.items()
    }


def save_what_loses_tensors(rank: int, folder: Path) -> None:
    """By name: what must be refused, and with which words; and one whose strange tensors are
    named."""
    import torch
    from torch.distributed import checkpoint as dcp

    warnings.simplefilter("ignore")  # about a single process, which is meant
    one, other = torch.ones(2), torch.zeros(2)
    torch.save({"_orig_mod.a": one, "a": other}, folder / "wrapped.pt")
    torch.save({"a": {"b": one}, "a.b": other}, folder / "nested.pt")
    torch.save({"a": 3}, folder / "none.pt")
    (folder / "empty.pt").write_bytes(b"")
    (folder / "garbage.pt").write_bytes(b"e said the dice\n")
    (folder / "cut.pt").write_bytes((folder / "wrapped.pt").read_bytes()[:300])
    dcp.save({"a._orig_mod.w": one, "a.w": other}, checkpoint_id=folder / "dcp", no_dist=True)
    dcp.save({"w": one}, checkpoint_id=folder / "torn", no_dist=True)
    (folder / "torn" / ".metadata").write_bytes(b"e said the dice\n")
    for name in ("two", "twice"):
        (folder / name).mkdir()
    theirs = {name: torch.from_numpy(tensor) for name, tensor in weights().items()}
    torch.save(
        theirs | {"norm.weight": theirs["model.norm.weight"] + 1},
        folder / "twice" / "pytorch_model.bin",
    )
    (folder / "twice" / "config.json").write_text(json.dumps(build_hugging_face_config(SHAPE)))
    for number in (1, 2):
        torch.save({"w": one}, folder / "two" / f"pytorch_model-{number}.bin")
    torch.save(
        {"w": one.to_sparse(), "z": one.to(torch.complex128), "s": one}, folder / "strange.pt"
    )


LOSES = {
    "wrapped.pt": "'_orig_mod.a' and 'a' are in it, and only one can be 'a'",
    "nested.pt": "'a.b' is in it, and only one can be 'a.b'",
    "none.pt": "there is no tensor in it",
    "empty.pt": "it is empty",
    "garbage.pt": "it is neither safetensors nor a file of torch.save",
    "cut.pt": "cut.pt cannot be unpickled",
    "dcp": "'a._orig_mod.w' and 'a.w' are in it",
    "torn": ".metadata is not that of torch.distributed.checkpoint",
    "two": "'w' is in it",
}


def test_no_tensor_is_lost_in_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ranks import run_ranks

    run_ranks(1, save_what_loses_tensors, tmp_path)
    out = tmp_path / "out"
    for name, words in LOSES.items():
        said = refused(capsys, "import", tmp_path / name, "--out", out, "--trust-pickle", code=5)
        assert said.startswith(f"phalanx: {tmp_path / name}: {words}"), said
        assert ".unpickled-" not in said
    said = refused(capsys, "import", tmp_path / "twice", "--out", out, "--trust-pickle", code=5)
    assert said.startswith(f"phalanx: {tmp_path / 'twice'}: ")
    assert "are the same tensor of the model" in said
    code, told, _ = phalanx(
        capsys, "import", tmp_path / "strange.pt", "--out", out, "--trust-pickle", "--json"
    )
    assert (code, list(tensors_of(out))) == (0, ["s"])
    assert json.loads(told)["notes"] == [
        "no checkpoint can hold w (sparse_coo), z (complex128): left out"
    ]


def test_trusted_files_of_torch_become_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nested names are joined by dots, strides are straightened, what is no tensor is counted."""
    from ranks import run_ranks

    run_ranks(1, save_as_torch_does, tmp_path)
    wanted = {
        "a.weight": (
            "float32",
            [hex(int(np.float32(x).view(np.uint32))) for x in (0, 3, 1, 4, 2, 5)],
        ),
        "b": ("bfloat16", ["0x3f80"] * 3),
    }

    def taken(name: str, *more: str) -> tuple[dict[str, Any], list[str]]:
        out = tmp_path / f"out-{len(list(tmp_path.glob('out-*')))}"
        code, said, err = phalanx(
            capsys, "import", tmp_path / name, "--out", out, "--trust-pickle", "--json", *more
        )
        assert code == 0, err
        return tensors_of(out), json.loads(said)["notes"]

    found, notes = taken("nested.pt")
    assert {name: found[f"module.{name}"] for name in wanted} == wanted
    assert sorted(found) == ["list.0", "module.a.weight", "module.b", "net.bias", "net.weight"]
    assert read_manifest(tmp_path / "out-0" / "checkpoints" / "step-0").aliases == {
        "tied.b": "module.b"
    }
    assert notes[0] == "1 thing in it is no tensor and is left out"
    assert "unpickled in full" in notes[1]
    found, notes = taken("dcp", "--prefix", "model.a.")
    assert found == {"weight": wanted["a.weight"]}
    assert notes == [
        "1 thing in it is no tensor and is left out",
        "of 2 tensors 1 do not begin with 'model.a.'",
    ]
    found, notes = taken("hf")
    assert "blocks.0.ffn.down.weight" in found
    assert notes == ["no checkpoint can hold sparse (sparse_coo): left out"]
    assert "--trust-pickle" in refused(
        capsys, "import", tmp_path / "hf", "--out", tmp_path / "x", code=5
    )


def test_a_safetensors_file_alone_keeps_its_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_safetensors(
        tmp_path / "w.safetensors",
        {"net.a": np.ones(3, np.float32), "net.b": np.zeros(2, np.float32)},
    )
    code, said, _ = phalanx(
        capsys, "import", tmp_path / "w.safetensors", "--out", tmp_path / "o", "--prefix", "net."
    )
    assert code == 0
    assert "model.init_from" in said
    assert list(tensors_of(tmp_path / "o")) == ["a", "b"]
    assert not (tmp_path / "o" / "model.toml").exists()


# Memory


def test_weights_pass_through_one_tensor_at_a_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """50 MB of weights in tensors of at most 1.6 MB: neither way holds more than a few of them,
    and a chunk."""
    shape = DecoderShape(8, 256, 4, 4, 64, 1536, 512, False)
    folder, imported, sizes = tmp_path / "llama", tmp_path / "imported", _their_sizes(shape)
    folder.mkdir()
    write_safetensors(
        folder / "model.safetensors",
        {name: np.ones(size, np.float32) for name, size in sizes.items()},
    )
    (folder / "config.json").write_text(json.dumps(build_hugging_face_config(shape)))
    total_bytes = sum(4 * math.prod(size) for size in sizes.values())
    assert total_bytes > 45e6
    for arguments in (
        ("import", folder, "--out", imported),
        ("export", imported, "--out", tmp_path / "x"),
    ):
        tracemalloc.start()
        assert phalanx(capsys, *arguments)[0] == 0
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < total_bytes / 4


def _their_sizes(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    family = find_family_of_model_type("llama")
    return {
        next(filter(None, (r.translate_to_hugging_face_name(n) for r in family.rules))): s
        for n, s in shape.list_tensors().items()
    }
