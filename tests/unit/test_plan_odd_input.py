"""`phalanx plan` of input that nobody prepared: one line that says what is wrong, and no answer to
another question."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import pytest

from phalanx.checkpoint.shard_file import parse_safetensors_header
from phalanx.cli import _app
from phalanx.cli._plan_keys import build_model_override
from phalanx.cli._plan_search import check_plan_files
from phalanx.core.errors import JobError, LayoutError, ResourceError, UsageError
from phalanx.job.hugging_face import find_config_file, read_model_config
from phalanx.job.load import load_job, load_job_json
from phalanx.plan.advice.explain_term import parse_term_name
from phalanx.plan.described_cluster import choose_cluster_of_job
from phalanx.plan.search.contradiction import explain_contradiction
from phalanx.plan.search.scaling import parse_device_counts
from phalanx.plan.search.screening import NoLayoutError
from phalanx.plan.search.search import search_layouts
from phalanx.plan.search.task import build_search_task

LLAMA = ["plan", "--model", "llama3-8b", "--gpu", "h100-sxm", "--seq-len", "4096"]
GPT2 = ["model.preset=gpt2", "cluster.gpu=h100-sxm", "data.seq_len=1024"]


def run(*words: str) -> int:
    return _app.run_command_line(list(words))


def test_a_list_of_gpus_is_no_number_with_separators() -> None:
    assert parse_device_counts("1,024") == [1024]
    for text in ("8,16,32", "64..128..256", "\N{ARABIC-INDIC DIGIT THREE}", "1,24"):
        with pytest.raises(LayoutError, match="wanted a number from 1 on, or a range"):
            parse_device_counts(text)


def test_more_gpus_than_there_are_are_refused_before_the_search(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(*LLAMA, "--gpus", "1..1000000000") == 3
    assert "at most 1,048,576" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--out", "--page", "--cluster", "--from", "--recut", "--validate"]
)
def test_an_empty_path_is_not_the_directory_that_one_stands_in(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("plan", option, "") == 2
    assert f"'{option}': the path is empty" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_path_that_is_no_model_is_no_preset_with_a_strange_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    for name in (f"{tmp_path}/config.json", str(tmp_path), "./nowhere", "nowhere/config.json"):
        assert build_model_override(name).startswith("model.kind=hf:")
    assert build_model_override("gpt2") == "model.preset=gpt2"
    with pytest.raises(LayoutError, match="nothing is downloaded"):
        build_model_override("meta-llama/Meta-Llama-3-8B")


def test_a_config_that_is_a_pipe_is_said_to_be_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(LayoutError, match="not a regular file"):
        find_config_file(f"hf:{tmp_path}")


@pytest.mark.parametrize("size", [0, -4])
def test_a_config_without_blocks_is_no_model_that_fits(tmp_path: Path, size: int) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "num_hidden_layers": size})
    )
    with pytest.raises(LayoutError, match=f"num_hidden_layers is {size}"):
        read_model_config(f"hf:{tmp_path}")


@pytest.mark.parametrize("size", ["8", True, 8.5, math.nan, math.inf])
def test_a_size_of_another_type_is_refused_before_a_module_is_built(
    tmp_path: Path, size: object
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": size}))
    said = re.escape(f"hidden_size is {json.dumps(size)}; give a whole number from 1 on")
    with pytest.raises(LayoutError, match=said):
        read_model_config(f"hf:{tmp_path}")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"num_attention_heads": 4, "num_key_value_heads": 3},
            "num_key_value_heads is 3, which does not divide num_attention_heads, 4",
        ),
        (
            {"num_local_experts": 4, "num_experts_per_tok": 8},
            "num_experts_per_tok is 8, and num_local_experts is 4; give at most 4",
        ),
        ({"num_local_experts": 0, "num_experts_per_tok": 2}, "num_local_experts is 0"),
        ({"rope_theta": "10000"}, 'rope_theta is "10000"; give a number, without quotation marks'),
        ({"rope_scaling": {"factor": "2"}}, 'rope_scaling.factor is "2"; give a number'),
        ({"rope_scaling": "linear"}, 'rope_scaling is "linear"; give an object'),
        ({"attention_dropout": 2.0}, "attention_dropout is 2.0; give a probability"),
        ({"vocab_size": 10**15}, "vocab_size is 1,000,000,000,000,000; give at most 100,000,000"),
        ({"head_dim": -16}, "head_dim is -16"),
        ({"max_position_embeddings": -5}, "max_position_embeddings is -5"),
        ({"architectures": "LlamaForCausalLM"}, 'architectures is "LlamaForCausalLM"; give a list'),
    ],
)
def test_settings_of_a_config_that_cannot_be_are_refused_by_name(
    tmp_path: Path, settings: dict[str, object], said: str
) -> None:
    """They were told by an error of a product in the traced forward, or not at all."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **settings}))
    with pytest.raises(LayoutError) as raised:
        read_model_config(f"hf:{tmp_path}")
    assert str(raised.value).startswith(f"{tmp_path}/config.json: {said}")


def test_what_model_args_mend_in_a_config_is_not_refused(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model_config(f"hf:{tmp_path}", {"num_key_value_heads": 2})
    with pytest.raises(LayoutError, match=r"model.args: num_key_value_heads is 0"):
        read_model_config(f"hf:{tmp_path}", {"num_key_value_heads": 0})


def test_a_key_that_stands_twice_is_refused_by_name(tmp_path: Path) -> None:
    """Python takes the last of them, and other readers may take the first."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 32, "hidden_size": 64}'
    )
    with pytest.raises(LayoutError, match="the key 'hidden_size' is there twice"):
        read_model_config(f"hf:{tmp_path}")
    (tmp_path / "job.json").write_text('{"train": {"steps": 3, "steps": 4}}')
    with pytest.raises(JobError, match="the key 'steps' is there twice"):
        load_job_json(tmp_path / "job.json")
    entry = b'"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    with pytest.raises(ValueError, match="the key 'a' is there twice"):
        list(parse_safetensors_header(b"{%s, %s}" % (entry, entry), 0, 4))


def test_more_blocks_than_a_plan_looks_at_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "num_hidden_layers": 10**30})
    )
    with pytest.raises(LayoutError, match="give at most 4,096"):
        read_model_config(f"hf:{tmp_path}")
    with pytest.raises(JobError, match=r"model.num_layers: wanted a whole number from 1 to 4096"):
        load_job(None, ["model.num_layers=10000"])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("memory_gib = 1e30", "cluster.memory_gib is 1e+30, which no machine has"),
        ("watts = 1e-300", "cluster.watts"),
        ("price_per_hour = 1e300", "cluster.price_per_hour"),
        ('device = "cpu"', "cluster.device is cpu"),
        ("[cluster]\nnodes = 4", "at the top of the file"),
        ('nodes = "four"', ": nodes: wanted a whole number of at least 1"),
        ("nodes = 0", ", was given 0"),
        ("[links]\nname = 'a'", ": links: wanted a list, each a table, was given a table"),
        ("[[links]]\nname = 'a'\nnum_devices = 8", "links.0.gb_s: is missing"),
        ("[[links]]\nname = 'a'\nspeed = 3\nnum_devices = 8\ngb_s = 5", "one of name"),
    ],
)
def test_a_cluster_file_that_does_not_hold_is_refused(
    tmp_path: Path, text: str, named: str
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(f'gpu = "h100-sxm"\n{text}\n')
    with pytest.raises(LayoutError) as raised:
        choose_cluster_of_job(load_job(None, [f"cluster.file={file}"]))
    assert named in str(raised.value)


def test_a_wrong_value_in_a_cluster_file_has_no_advice_to_name_its_own_key(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('gpu = "h100-sxm"\nnodes = "four"\n')
    with pytest.raises(LayoutError) as raised:
        choose_cluster_of_job(load_job(None, [f"cluster.file={file}"]))
    assert "did you mean" not in str(raised.value)


def test_none_in_a_cluster_file_leaves_a_key_out_as_in_a_job_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    clusters = []
    for watts in ("", 'watts = "none"\n'):
        file.write_text(f'gpu = "h100-sxm"\nnodes = 2\n{watts}')
        clusters.append(choose_cluster_of_job(load_job(None, [f"cluster.file={file}"])))
    assert clusters[0] == clusters[1]


def test_a_cluster_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_bytes(b'\xef\xbb\xbfgpu = "h100-sxm"\nnodes = 2\n')
    assert choose_cluster_of_job(load_job(None, [f"cluster.file={file}"])).num_devices == 16


def test_files_that_cannot_be_written_are_refused_before_the_search(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    # Else a page would take the place of a device, for every program of the machine.
    for page in ("pipe", ".", "none/page.html", "file/page.html"):
        with pytest.raises(ResourceError):
            check_plan_files(None, tmp_path / page, force=False)
    with pytest.raises(ResourceError, match="not a folder"):
        check_plan_files(tmp_path / "file", None, force=False)
    check_plan_files(tmp_path / "new" / "folder", tmp_path / "file", force=False)
    (tmp_path / "job.toml").write_text("")
    with pytest.raises(UsageError, match="is there already"):
        check_plan_files(tmp_path, None, force=False)
    check_plan_files(tmp_path, None, force=True)


def test_a_plan_without_a_layout_leaves_no_job_of_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("")
    question = [*LLAMA, "--nodes", "1", "cluster.memory_gib=4", "train.global_batch_size=8"]
    assert run(*question, "--out", str(tmp_path), "--force") == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "plan.json"]


def test_values_are_explained_in_the_layout_that_the_plan_proposes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    question = [*LLAMA, "--nodes", "1", "--global-batch", "64", "--json"]
    assert run(*question) == 0
    keys = json.loads(capsys.readouterr().out)["winner"]["job_keys"]
    assert run(*question, "--explain") == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)["values"]}
    for key, value in keys.items():
        assert rows[key]["value"] == value
        assert "chosen by the search" in rows[key]["why"]
    assert rows["train.global_batch_size"]["origin"] == "override"


def test_layouts_of_other_gpus_are_not_run_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "--autotune", "2", "--model", "gpt2", "cluster.gpu=h100-sxm") == 6
    assert "planned for h100-sxm" in capsys.readouterr().err


def test_offload_of_parameters_without_shards_is_not_blamed_on_the_batch() -> None:
    task = build_search_task(
        load_job(None, [*GPT2, "parallel.ranks=1", "parallel.offload=parameters"])
    )
    with pytest.raises(NoLayoutError) as raised:
        search_layouts(task)
    words = str(explain_contradiction(task, raised.value))
    assert "shards of ZeRO 2 and 3, and one rank has none" in words
    assert "parallel.ranks=2" in words


def test_machines_without_ranks_are_named() -> None:
    task = build_search_task(load_job(None, [*GPT2, "cluster.nodes=2", "parallel.ranks=8"]))
    assert any("8 GPUs of 16 are left unused" in remark for remark in search_layouts(task).remarks)
    task = build_search_task(load_job(None, [*GPT2, "cluster.nodes=1", "parallel.ranks=4"]))
    assert not any("unused" in remark for remark in search_layouts(task).remarks)


def test_words_of_the_answer_are_terms_too() -> None:
    assert parse_term_name("tokens/s/GPU") == "mfu"
    assert parse_term_name("energy") == "cost"
    assert parse_term_name("expert parallel") == "ep"
    with pytest.raises(UsageError, match="name one: between-steps, forward, backward, update"):
        parse_term_name("peak")
