"""A job of which no layout can be had: the constraint that has no solution is named, and a remedy
that works when it is applied; where nothing fits, the advice works as it is printed."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from phalanx.cli import _app
from phalanx.cli._plan_keys import check_options_against_keys, spell_keys_as_options
from phalanx.core.errors import LayoutError, UsageError
from phalanx.job.load import load_job
from phalanx.plan.described_cluster import choose_cluster_of_job, list_instance_types
from phalanx.plan.pipeline.generate import generate_schedule
from phalanx.plan.pipeline.schedule import save_schedule_csv
from phalanx.plan.search.contradiction import explain_contradiction
from phalanx.plan.search.overrides import format_overrides, list_changed_keys
from phalanx.plan.search.result import SearchResult
from phalanx.plan.search.search import search_layouts
from phalanx.plan.search.task import SearchTask, build_search_task

LLAMA = ["model.preset=llama3-8b", "cluster.gpu=h100-sxm", "data.seq_len=8192"]
PLAN = ["plan", "--model", "llama3-8b", "--gpu", "h100-sxm", "--seq-len", "8192"]
ON_64 = [*PLAN, "--gpus", "64", "--global-batch", "64"]


def run(*words: str) -> int:
    return _app.run_command_line(list(words))


def build_task(*words: str) -> SearchTask:
    return build_search_task(load_job(None, [*LLAMA, *words]))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--gpus 8 --global-batch 16 parallel.tp=3", "tp 3 does not divide 32 heads"),
        ("--gpus 64 --global-batch 64 parallel.tp=64", "tp 64 does not divide 32 heads"),
        ("--gpus 8 --global-batch 16 parallel.tp=16", "parallel.tp=16 does not divide the 8 ranks"),
        ("--gpus 8 --global-batch 16 parallel.pp=3", "parallel.pp=3 does not divide the 8 ranks"),
        (
            "--gpus 8 --global-batch 16 parallel.dp_shard=4 parallel.dp_replicate=4",
            "parallel.dp_replicate=4 x parallel.dp_shard=4 = 16 does not divide the 8 ranks",
        ),
        (
            "--gpus 8 --global-batch 8 parallel.tp=8 parallel.zero_stage=1",
            "zero_stage=1 needs two data-parallel ranks or more",
        ),
        ("--gpus 8 --global-batch 9 parallel.dp_shard=4", "divides train.global_batch_size 9"),
        ("--gpus 7 --global-batch 64 parallel.pp=1", "divide train.global_batch_size 64"),
        (
            "--gpus 8 --global-batch 8 parallel.pp=8 parallel.schedule=dualpipe-v",
            "no pipeline of parallel.pp=8 with parallel.schedule=dualpipe-v its microbatches (it"
            " needs two of them for each rank)",
        ),
        (
            "--gpus 64 --global-batch 64 parallel.pp=32 parallel.schedule=interleaved",
            "parallel.pp=32 with 2 stages a rank of parallel.schedule=interleaved needs a block",
        ),
        ("--gpus 64 --global-batch 64 parallel.pp=64", "the model has 32"),
    ],
)
def test_the_constraint_is_named_and_each_remedy_works_as_printed(
    words: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*PLAN, *words.split()]
    assert run(*command) == 3
    line = capsys.readouterr().err
    assert named in line
    assert len(line.splitlines()) == 1
    remedies = re.findall(
        r"(?:set|or) (--[a-z-]+ |parallel\.\w+=)(\S+?)(?: or ([^\s-]\S*?))?[,\n]", line
    )
    assert remedies, line
    for key, *values in remedies:
        for value in filter(None, values):
            assert run(*command, *f"{key}{value}".split()) == 0, (key, value)


def test_a_schedule_of_a_file_is_left_out_where_that_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_schedule_csv(generate_schedule("zb-v", 4, 8), file := tmp_path / "mine.csv")
    written = ["parallel.pp=4", f"parallel.schedule_file={file}"]
    command = [*PLAN, "--gpus", "8", "parallel.tp=2", *written]
    assert run(*command, "--global-batch", "22") == 3
    line = capsys.readouterr().err
    assert f"({file} has 8 microbatches)" in line
    assert "set parallel.schedule_file=none" in line
    assert run(*command, "--global-batch", "22", "parallel.schedule_file=none") == 0
    # Where it does not fit, too: no layout of another pp can have it.
    fixed = ["--gpus", "16", "--global-batch", "64", "parallel.zero_stage=1"]
    command = [*PLAN, "--model", "llama3-70b", *written, *fixed, "parallel.tp=1", "parallel.cp=1"]
    capsys.readouterr()
    assert run(*command) == 3
    printed = capsys.readouterr().out
    change, size = find_offered_changes(printed)[0]
    assert "parallel.schedule_file=none" in change
    assert run(*command, *shlex.split(change)) == 0
    assert f"peak {size} of" in capsys.readouterr().out.splitlines()[0]


PP_32 = ["parallel.pp=32", "parallel.schedule=gpipe", "train.micro_batch_size=1"]


@pytest.fixture(scope="module")
def of_32_stages() -> str:
    """What is printed where 32 stages do not fit. The search for what would takes seconds."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert run(*ON_64, *PP_32) == 3
    return printed.getvalue()


def find_offered_changes(printed: str) -> list[tuple[str, str]]:
    """Of each change that would fit the keys and the memory per rank."""
    return re.findall(
        r"^  [a-z -]+: (.+?) \((?:[\d,]+ ranks .*?, )?([\d.]+ \w+) per rank", printed, re.M
    )


def check_that_changes_give_what_they_promise(
    command: list[str], printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = find_offered_changes(printed)
    assert len(changes) >= 2, printed
    for change, size in changes:
        assert run(*command, *shlex.split(change)) == 0, change
        assert f"peak {size} of" in capsys.readouterr().out.splitlines()[0]


def test_what_would_fit_added_to_the_command_gives_the_plan_that_it_promises(
    of_32_stages: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_that_changes_give_what_they_promise([*ON_64, *PP_32], of_32_stages, capsys)


def test_what_would_fit_beside_a_fixed_recomputation_gives_the_plan_that_it_promises(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fixed = ["parallel.tp=1", "parallel.pp=1", "parallel.cp=1", "train.micro_batch_size=8"]
    command = [*ON_64[:-1], "512", *fixed, "train.recompute=none"]
    assert run(*command) == 3
    check_that_changes_give_what_they_promise(command, capsys.readouterr().out, capsys)


def test_a_key_that_falls_back_to_its_default_is_part_of_the_advice(of_32_stages: str) -> None:
    changes = [change.split() for change, _ in find_offered_changes(of_32_stages)]
    assert any({"parallel.pp=1", "parallel.schedule=none"} <= set(change) for change in changes)


def test_changed_keys_are_what_turns_one_job_into_another() -> None:
    before = ["train.micro_batch_size=8", "parallel.pp=2", "parallel.schedule=gpipe"]
    after = ["train.micro_batch_size=8", "train.recompute=none", "parallel.pp=1"]
    keys = list_changed_keys(load_job(None, before), load_job(None, after))
    assert format_overrides(keys) == ("parallel.pp=1 parallel.schedule=none train.recompute=none")


def test_figures_of_what_does_not_fit_are_those_of_a_plan(of_32_stages: str) -> None:
    needed, present = map(float, re.findall(r"([\d.]+) GiB", of_32_stages.splitlines()[0]))
    assert needed > present
    result = search_layouts(build_task("cluster.nodes=8", "train.global_batch_size=64", *PP_32))
    assert result.smallest_bytes > result.capacity_bytes > 0
    assert needed == pytest.approx(result.smallest_bytes / 2**30, abs=0.05)


def test_a_remedy_without_room_in_memory_is_said_as_such() -> None:
    words = ["model.preset=llama3-405b", "parallel.tp=3", "train.global_batch_size=16"]
    task = build_task(*words)
    with pytest.raises(LayoutError) as caught:
        search_layouts(task)
    fix = str(explain_contradiction(task, caught.value).fix)
    assert fix.startswith("with parallel.tp=")
    assert "none fits" in fix


@pytest.mark.parametrize("ranks", [24, 48, 96, 1024])
def test_ranks_are_the_key_that_gpus_is(ranks: int) -> None:
    job = load_job(None, [*LLAMA, "train.global_batch_size=512", f"parallel.ranks={ranks}"])
    assert choose_cluster_of_job(job).num_devices == ranks
    assert search_layouts(build_search_task(job)).winner is not None


def test_more_ranks_than_the_machines_have_are_refused_with_how_many_it_takes() -> None:
    with pytest.raises(LayoutError, match=r"set cluster\.nodes=3"):
        build_task("cluster.nodes=2", "parallel.ranks=24")


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [
        ("--gpu", "h100-sxm", "cluster.gpu=a100-sxm"),
        ("--gpus", "8", "parallel.ranks=16"),
        ("--gpus", "8..16", "parallel.ranks=8"),
        ("--gpus", "8", "cluster.nodes=4"),
        ("--nodes", 2, "cluster.nodes=4"),
        ("--seq-len", 1024, "data.seq_len=2048"),
        ("--global-batch", 64, "train.global_batch_size=32"),
        ("--cluster", Path("a.toml"), "cluster.file=b.toml"),
    ],
)
def test_an_option_and_a_key_that_contradict_it_are_refused(
    option: str, value: object, word: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(option)):
        check_options_against_keys({option: value}, None, [word])


def test_an_option_and_a_key_that_say_the_same_are_taken() -> None:
    options = {"--gpu": "h100-sxm", "--gpus": "8", "--seq-len": 1024, "--nodes": None}
    words = ["cluster.gpu=h100-sxm", "parallel.ranks=8", "data.seq_len=1_024", "job.toml"]
    check_options_against_keys(options, "model.preset=gpt2", [*words, "model.preset=gpt2"])
    with pytest.raises(UsageError, match=r"--model says gpt2 and model\.preset says gpt2-xl"):
        check_options_against_keys({}, "model.preset=gpt2", ["model.preset=gpt2-xl"])


def test_advice_is_spelled_as_the_options_of_the_command() -> None:
    change = "train.global_batch_size=8 parallel.ranks=16 cluster.nodes=2 parallel.tp=2"
    assert spell_keys_as_options(change, ()) == change
    assert spell_keys_as_options(change, ("--gpus", "--global-batch")) == (
        "--global-batch 8 --gpus 16 parallel.tp=2"
    )
    assert "--nodes 2" in spell_keys_as_options(change, ("--nodes",))


def test_a_range_in_which_nothing_fits_is_exit_3_with_the_numbers_that_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(*PLAN, "--global-batch", "64", "--gpus", "65..130") == 3
    text = capsys.readouterr().out
    assert "or --gpus 64 or 68" in text
    assert "or --gpus 128 or 136" in text
    large = ["plan", "--model", "llama3-70b", *PLAN[3:]]
    assert run(*large, "--global-batch", "64", "--gpus", "1..2") == 3
    assert "2 GPUs: the least of " in capsys.readouterr().out


def test_a_range_names_the_steps_and_the_price_of_its_hours_and_costs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(*PLAN, "--global-batch", "64", "--gpus", "8..16") == 0
    text = capsys.readouterr().out
    assert "of 500 steps, the default of train.steps" in text
    assert "no price on demand is known" in text
    assert run(*PLAN, "--global-batch", "64", "--gpus", "8..16", "train.steps=7") == 0
    assert "of 7 steps\n" in capsys.readouterr().out


def test_a_step_of_images_counts_images_and_names_what_is_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("plan", "--model", "vit-l16", "--gpu", "t4", "--global-batch", "256") == 0
    text = capsys.readouterr().out
    assert "256 images x 197 tokens a step" in text
    assert "a million images" in text
    assert "energy unknown: set cluster.watts" in text
    assert "default" not in text.splitlines()[1]
    assert run("plan", "--model", "gpt2", "--gpu", "h100-sxm") == 0
    named = "(data.seq_len and train.global_batch_size are defaults)"
    assert named in capsys.readouterr().out.splitlines()[1]


def test_oversubscribed_links_are_shown_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        'gpu = "h100-sxm"\nnodes = 2\n[[links]]\nname = "nvlink"\nnum_devices = 8\ngb_s = 450\n'
        '[[links]]\nname = "spine"\nnum_devices = 16\ngb_s = 50\noversubscription = 2\n'
    )
    words = ["--model", "gpt2", "--seq-len", "1024", "--global-batch", "64"]
    assert run("plan", "--cluster", str(file), *words) == 0
    assert "spine 50 GB/s oversubscribed 2:1" in capsys.readouterr().out


def test_checked_prices_rest_on_no_memory_and_no_estimate() -> None:
    for instance in list_instance_types().values():
        doubts = re.findall("memory|unverified|estimate|approximate", instance.source)
        assert not (instance.is_checked and doubts), instance.name
        assert instance.source.count("(") == instance.source.count(")"), instance.name


def test_a_layout_that_is_refused_for_no_memory_says_why_first() -> None:
    reason = "parallel.cp sends keys and values from inside of attention"
    refused = {reason: 5, "another reason": 1}
    result = SearchResult("m", 1, "h100-sxm", 8, 8192, 64, None, refused=refused)
    assert (result.failure_kind, result.failure) == ("REFUSED", reason)
    lacking = SearchResult("m", 1, "h100-sxm", 8, 8192, 64, None, smallest_bytes=2**31)
    assert lacking.failure_kind == "DOES NOT FIT"
    assert "2.0 GiB" in lacking.failure


def test_keys_that_only_together_are_in_the_way_are_left_out_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    question = ["plan", "--model", "gpt2", "--gpu", "h100-sxm", "--gpus", "7"]
    question += ["--seq-len", "512", "--global-batch", "8"]
    fixed = ["parallel.pp=8", "parallel.stages_per_rank=2"]
    assert run(*question, *fixed) == 3
    remedy = capsys.readouterr().err.strip().partition("; set ")[2]
    assert remedy == "parallel.pp=none parallel.stages_per_rank=none"
    assert run(*question, *fixed, *remedy.split()) == 0


def test_copies_that_the_job_asks_for_are_had_over_any_number_of_ranks() -> None:
    words = ["model.preset=gpt2", "cluster.gpu=h100-sxm", "data.seq_len=512", "cluster.nodes=3"]
    words += ["train.global_batch_size=24", "parallel.dp_replicate=2", "parallel.pp=1"]
    winner = search_layouts(build_search_task(load_job(None, words))).winner
    assert winner is not None
    assert winner.layout.dp_replicate == 2


def test_axes_that_other_keys_forbid_are_not_searched() -> None:
    words = ["model.preset=mixtral-8x7b", "train.global_batch_size=64", "cluster.nodes=2"]
    assert build_task(*words).open_keys.cp != (1,)
    keys = build_task(*words, "train.compile=true").open_keys
    assert (keys.cp, keys.ep) == ((1,), (1,))


def test_stages_per_rank_leave_the_schedules_that_have_so_many() -> None:
    task = build_task("cluster.nodes=2", "parallel.pp=2", "parallel.stages_per_rank=2")
    assert {name for name, _ in task.open_keys.schedules} == {"interleaved", "zb-v"}
    task = build_task("cluster.nodes=2", "parallel.pp=2", "parallel.stages_per_rank=1")
    assert {name for name, _ in task.open_keys.schedules} == {"1f1b"}


def test_another_batch_is_part_of_the_advice_where_the_layout_alone_is_not_enough(
    capsys: pytest.CaptureFixture[str],
) -> None:
    question = ["plan", "--model", "gpt2", "--gpu", "b200-sxm", "--gpus", "256", "--seq-len", "512"]
    question += ["--global-batch", "12", "parallel.pp=32", "parallel.schedule=1f1b"]
    assert run(*question) == 3
    line = capsys.readouterr().err.strip()
    assert "parallel.pp=32 needs a block for each stage, and the model has 12" in line
    remedy = line.partition("; set ")[2]
    assert "--global-batch" in remedy
    assert run(*question, *remedy.split()) == 0


def test_the_subject_and_the_advice_of_another_error_are_kept() -> None:
    keys = ["model.preset=llama3-8b", "cluster.gpu=h100-sxm", "cluster.nodes=2"]
    keys += ["train.global_batch_size=128", "parallel.cp=4", "train.compile=true"]
    task = build_search_task(load_job(None, keys))
    with pytest.raises(LayoutError) as raised:
        search_layouts(task)
    explained = explain_contradiction(task, raised.value)
    assert explained.fix is not None
    assert "parallel.cp=1" in explained.fix
    assert "train.compile=false" in explained.fix
    subject = LayoutError("no module is named so", where="sharding rule 'a'", fix="name one")
    kept = explain_contradiction(task, subject)
    assert kept.where == "sharding rule 'a'"
    assert kept.fix is not None
    assert "name one" in kept.fix


def test_a_fix_names_a_key_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*PLAN, "--gpus", "8", "parallel.tp=2", "parallel.compress=int8") == 3
    said = capsys.readouterr().err
    assert said.rstrip().endswith("; set parallel.tp=1, or parallel.compress=none"), said
