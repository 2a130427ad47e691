"""The tokenizer that a model brings is the one of its text; another one is said, or refused
where it cannot fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_zoo import TEXT, write_config, write_tokenizer
from models import CPU
from phalanx.cli import _app
from phalanx.core.errors import DataError
from phalanx.data.build import build_dataset
from phalanx.data.corpus import Corpus
from phalanx.data.prepare import prepare_corpus
from phalanx.data.tokenizer import load_tokenizer
from phalanx.data.tokenizer_files import collect_tokenizer_files
from phalanx.job.load import load_job
from phalanx.job.schema import Job
from phalanx.plan.planner import make_plan
from phalanx.run.tokens import find_job_tokens, find_tokenizer_beside_weights

tokenizers = pytest.importorskip("tokenizers")
ROWS = 290


def write_model(directory: Path, *, is_trained: bool = True) -> str:
    """`model.kind=hf:DIR` of a config.json, and of weights that nobody reads here."""
    write_config(directory, "llama", vocab_size=ROWS, max_position_embeddings=64)
    if is_trained:
        (directory / "model.safetensors").write_bytes(b"")
    return f"model.kind=hf:{directory}"


@pytest.fixture
def text(tmp_path: Path) -> str:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(TEXT)
    return f"data.source={folder}"


def job_of(*overrides: str) -> Job:
    return load_job(None, ["data.seq_len=16", *overrides])


def prepared(job: Job, out: Path) -> Corpus:
    return prepare_corpus(
        job.data, out, vocab_size=ROWS, default_tokenizer=find_job_tokens(job).default
    )


def said(job: Job, corpus: Corpus | None = None) -> tuple[dict[str, str], str]:
    """(warnings by code, all reasons) of the plan of a built-in model: to measure the job's own
    takes seconds."""
    plan = make_plan(Job(), cluster=CPU, more=find_job_tokens(job).list_corpus_remarks(corpus))
    return {warning.code: warning.text for warning in plan.warnings}, "\n".join(plan.reasons)


@pytest.mark.parametrize("names", ["", "/config.json"])
def test_text_becomes_tokens_by_the_tokenizer_of_the_directory(
    tmp_path: Path, text: str, names: str
) -> None:
    kind = write_model(tmp_path / "model")
    own = load_tokenizer(str(write_tokenizer(tmp_path / "model")))
    job = job_of(kind + names, text)
    corpus = prepared(job, tmp_path / "data")
    tokenizer = corpus.tokenizer()
    assert tokenizer is not None
    assert tokenizer.digest == own.digest
    assert corpus.vocab_size == own.vocab_size == 277
    warnings, reasons = said(job)
    assert (warnings, reasons) == said(job, corpus), "plan and train say the same"
    assert warnings == {}
    assert f"text becomes the 277 tokens of {tmp_path / 'model' / 'tokenizer.json'}" in reasons
    assert job.data.tokenizer is None, "nothing derived is written into the job"


def test_another_tokenizer_is_used_and_said(tmp_path: Path, text: str) -> None:
    kind = write_model(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    other = write_tokenizer(tmp_path / "other", num_merges=30)
    for name, size in (("bytes", 257), (str(other), 287)):
        job = job_of(kind, text, f"data.tokenizer={name}")
        corpus = prepared(job, tmp_path / f"data-{size}")
        assert corpus.vocab_size == size
        warnings, _ = said(job)
        assert warnings == said(job, corpus)[0]
        message = warnings["other_tokenizer"]
        for part in (
            name,
            f"{size} of the model's 290 rows",
            "trained for other tokens",
            "leave data.tokenizer out",
        ):
            assert part in message
    same = job_of(kind, text, f"data.tokenizer={tmp_path / 'model'}")
    assert "other_tokenizer" not in said(same)[0]


def test_shards_of_another_tokenizer_are_said_and_of_the_same_are_not(
    tmp_path: Path, text: str
) -> None:
    kind = write_model(tmp_path / "model")
    own = write_tokenizer(tmp_path / "model")
    source = text.partition("=")[2]
    build_dataset([source], tmp_path / "own", tokenizer=str(own))
    build_dataset([source], tmp_path / "bytes")
    assert said(job_of(kind, f"data.source={tmp_path / 'own'}"))[0] == {}
    job = job_of(kind, f"data.source={tmp_path / 'bytes'}")
    warnings, _ = said(job)
    assert f"build the shards with --tokenizer {own}" in warnings["other_tokenizer"]
    assert warnings == said(job, prepared(job, tmp_path / "data"))[0]


def test_a_tokenizer_with_more_tokens_than_rows_is_refused_before_anything_is_built(
    tmp_path: Path, text: str
) -> None:
    kind = write_model(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    large = write_tokenizer(tmp_path / "large", num_merges=38)
    for job in (job_of(kind, text, f"data.tokenizer={large}"),):
        with pytest.raises(DataError, match=r"has 295 tokens, and the model 290 rows") as refused:
            find_job_tokens(job)
        assert str(large) in str(refused.value)
    write_tokenizer(tmp_path / "model", num_merges=38)  # the directory's own
    with pytest.raises(DataError, match="the model 290 rows"):
        find_job_tokens(job_of(kind, text))


def test_a_padding_token_above_the_rows_is_no_token_of_text(tmp_path: Path, text: str) -> None:
    kind = write_model(tmp_path / "model")
    path = write_tokenizer(tmp_path / "model", num_merges=ROWS - 257)
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["[PAD]"])
    tokenizer.save(str(path))
    assert load_tokenizer(str(path)).vocab_size == ROWS + 1
    corpus = prepared(job_of(kind, text), tmp_path / "data")
    assert corpus.vocab_size == ROWS + 1


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_a_tokenizer_in_another_form_is_refused_with_a_way_out(
    tmp_path: Path, text: str, name: str
) -> None:
    kind = write_model(tmp_path / "model", is_trained=False)
    (tmp_path / "model" / name).write_text("{}")
    with pytest.raises(DataError) as refused:
        find_job_tokens(job_of(kind, text))
    message = str(refused.value)
    for part in (
        "cannot be read",
        f"has {name}, and no tokenizer.json",
        "save_pretrained",
        "set data.tokenizer",
    ):
        assert part in message
    assert find_job_tokens(job_of(kind, text, "data.tokenizer=bytes")).sources[0].vocab_size == 257


def test_without_any_tokenizer_it_is_bytes_and_that_is_said(tmp_path: Path, text: str) -> None:
    kind = write_model(tmp_path / "model", is_trained=False)
    warnings, reasons = said(job_of(kind, text))
    assert (warnings, f"text becomes bytes: {kind} brings no tokenizer" in reasons) == ({}, True)
    kind = write_model(tmp_path / "model")
    warnings, _ = said(job_of(kind, text))
    assert "nothing says which tokens the weights" in warnings["tokenizer_unknown"]
    assert said(job_of(kind, text, "data.tokenizer=bytes"))[0] == {}
    assert said(job_of(text)) == said(job_of()), "a built-in model with random weights expects none"


def test_weights_of_a_run_bring_the_tokenizer_of_the_run(tmp_path: Path, text: str) -> None:
    own = write_tokenizer(tmp_path / "own")
    first = job_of(text, f"data.tokenizer={own}")
    prepare_corpus(first.data, tmp_path / "run" / "data", vocab_size=None)
    job = job_of(text, f"model.init_from={tmp_path / 'run'}")
    brought = find_tokenizer_beside_weights(job.model)
    assert brought is not None
    assert brought.name is not None
    assert load_tokenizer(brought.name).digest == load_tokenizer(str(own)).digest
    corpus = prepare_corpus(
        job.data, tmp_path / "data", vocab_size=None, default_tokenizer=find_job_tokens(job).default
    )
    assert corpus.vocab_size == 277
    assert (
        "other_tokenizer"
        in said(job_of(text, f"model.init_from={tmp_path / 'run'}", "data.tokenizer=bytes"))[0]
    )
    imported = tmp_path / "imported"
    write_tokenizer(imported)
    assert find_job_tokens(job_of(text, f"model.init_from={imported}")).default == str(
        imported / "tokenizer.json"
    )


def test_a_run_that_goes_on_keeps_its_tokens(tmp_path: Path, text: str) -> None:
    """What lies beside the model by now is not asked, but another one is said."""
    kind = write_model(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    job = job_of(kind, text)
    corpus = prepared(job, tmp_path / "data")
    write_tokenizer(tmp_path / "model", num_merges=40)
    again = prepare_corpus(job.data, tmp_path / "data", vocab_size=ROWS, default_tokenizer="")
    assert again.to_json() == corpus.to_json()
    tokens = find_job_tokens(job, is_prepared=True)
    assert [warning.code for warning in tokens.list_corpus_remarks(again).warnings] == [
        "other_tokenizer"
    ]


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({"tokenizer_config.json": {"eos_token": "<|endoftext|>"}}, "<|endoftext|>"),
        ({"special_tokens_map.json": {"eos_token": {"content": "Ġthe"}}}, "Ġthe"),
        ({"config.json": {"eos_token_id": [5, 6]}}, "<|endoftext|>"),  # a usual name comes first
    ],
)
def test_what_ends_a_document_is_what_the_tokenizers_files_say(
    tmp_path: Path, files: dict[str, Any], end: str
) -> None:
    path = write_tokenizer(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert load_tokenizer(str(path)).end_name == end


def test_an_unusual_end_is_the_models(tmp_path: Path, text: str) -> None:
    path = write_tokenizer(tmp_path / "model", end="<|fin|>")
    assert load_tokenizer(str(path)).end_of_document is None
    (tmp_path / "model" / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.end_name, tokenizer.end_of_document) == ("<|fin|>", 0)
    dataset = build_dataset([text.partition("=")[2]], tmp_path / "tokens", tokenizer=str(path))
    assert dataset.end_of_document == 0
    copied = dataset.load_tokenizer()  # which lies without the model's config.json
    assert copied is not None
    assert copied.end_of_document == 0


def test_an_export_has_all_files_of_the_models_tokenizer_or_those_it_was_trained_with(
    tmp_path: Path, text: str
) -> None:
    kind = write_model(tmp_path / "model")
    path = write_tokenizer(tmp_path / "model", eos_token="<|endoftext|>", model_max_length=77)
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    kept = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    job = job_of(kind, text)
    files = collect_tokenizer_files(
        prepared(job, tmp_path / "data"), find_tokenizer_beside_weights(job.model), kept
    )
    assert files.is_models
    assert dict(files.files) == {name: path.parent / name for name in kept}
    assert not files.settings, "config.json says itself what ends a text"
    other = job_of(kind, text, "data.tokenizer=bytes")
    files = collect_tokenizer_files(
        prepared(other, tmp_path / "bytes"), find_tokenizer_beside_weights(other.model), kept
    )
    assert (files.is_models, dict(files.files)) == (False, {})
    # A null, for the model's class has a token of its own: Gemma pads with byte 0.
    assert files.settings == {"eos_token_id": 256, "bos_token_id": None, "pad_token_id": None}
    assert len(files.texts["tokenizer.json"]["model"]["vocab"]) == 257


def test_explain_says_where_the_tokenizer_comes_from(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = write_tokenizer(tmp_path / "own")
    prepare_corpus(
        job_of(text, f"data.tokenizer={own}").data, tmp_path / "run" / "data", vocab_size=None
    )
    arguments = [text, "data.seq_len=16", f"model.init_from={tmp_path / 'run'}"]
    assert _app.run_command_line(["train", "--explain", "--json", *arguments]) == 0
    values = {one["key"]: one for one in json.loads(capsys.readouterr().out)["values"]}
    assert values["data.tokenizer"]["value"].endswith("source-0/tokenizer.json")
    assert "model.init_from" in values["data.tokenizer"]["why"]
    assert values["model.vocab_size"]["value"] == 277


class Images:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"labels": index}


def images(split: str) -> Images:
    return Images()


def test_an_export_of_a_model_of_images_says_how_they_are_made_ready(tmp_path: Path) -> None:
    kind = write_model(tmp_path / "model")
    file = tmp_path / "model" / "preprocessor_config.json"
    file.write_text("{}")
    job = job_of(kind, "data.source=test_model_tokenizer:images")
    files = collect_tokenizer_files(
        prepared(job, tmp_path / "data"), find_tokenizer_beside_weights(job.model)
    )
    assert dict(files.files) == {file.name: file}
    assert "there is no tokenizer" in files.note
