"""The trials of `benchmarks/bottlenecks.py`: which cause is put into a run, drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

BATCH_OF_RANK = 4
OWN_JOB = (
    "model.kind=bottleneck_models:build",
    "model.vocab_size=512",
    "data.source=bottleneck_models:dataset",
    f"train.global_batch_size={2 * BATCH_OF_RANK}",
)
# Few tokens and layers: the table's update is a third of a step, and more.
WIDE_TABLE_JOB = (*OWN_JOB, "model.args.num_layers=2", "train.global_batch_size=2")
PRESET_JOB = ("train.global_batch_size=16",)
LAYOUTS = {"ddp": "none", "zero3": "3"}


@dataclass(frozen=True)
class Trial:
    """One cause: `expected` are the kinds that a right verdict has, `rank` the rank it names (None:
    it names none). `without` and `cause` are settings of the job; `delays` are settings in seconds,
    as shares of a step without the cause. `about` has {name} for the milliseconds of each.
    `setting`: the one whose gain is judged, where it is not that of the whole cause; steps with
    it train `tokens_factor` times the tokens."""

    name: str
    expected: tuple[str, ...]
    base: tuple[str, ...]
    cause: tuple[str, ...]
    rank: int | None = None
    without: tuple[str, ...] = ()
    mbit: float = 0.0
    about: str = ""
    delays: Mapping[str, float] = field(default_factory=dict)
    setting: str = ""
    tokens_factor: int = 1

    @property
    def is_healthy(self) -> bool:
        return not (self.cause or self.delays or self.mbit)

    def list_delay_settings(self, step_s: float) -> list[str]:
        return [f"{key}={share * step_s:.5f}" for key, share in self.delays.items()]

    def describe(self, step_s: float) -> str:
        return self.about.format(
            model=f"{1e3 * step_s * self.delays.get('model.args.seconds', 0):.0f}",
            data=f"{1e3 * step_s * BATCH_OF_RANK * self.delays.get('data.args.seconds', 0):.0f}",
        )


def draw_trials(seed: int) -> list[Trial]:
    """Twenty-nine trials, healthy ones among them; the same for the same seed."""
    rng = random.Random(seed)
    trials: list[Trial] = []
    for number in range(7):
        where = ("backward", "forward")[number % 2]
        layout = tuple(LAYOUTS)[number // 2 % 2]
        trials.append(_draw_straggler(rng, f"late-{where}-{number}", where, layout))
    for number in range(2):
        trials.append(_draw_loader(rng, f"late-loader-{number}", rank=rng.randrange(2)))
    for number in range(2):
        trials.append(_draw_loader(rng, f"slow-loaders-{number}", rank=-1))
    for number in range(2):
        trials.append(_draw_link(rng, f"slow-link-{number}"))
    trials.append(
        Trial(
            "many-checkpoints",
            ("checkpoint",),
            (*OWN_JOB, "model.args.dim=384", "checkpoint.asynchronous=false"),
            ("checkpoint.every_steps=1",),
            about="a save after every step, not beside training",
        )
    )
    for number in range(2):
        trials.append(_draw_bubble(rng, f"bubble-{number}"))
    trials.append(_draw_evaluations(rng, "many-evaluations"))
    trials.append(_draw_small_microbatches(rng, "small-microbatches"))
    for number in range(2):
        trials.append(_draw_two_causes(rng, f"two-causes-{number}"))
    for number in range(5):
        trials.append(
            Trial(
                f"healthy-{number}",
                ("compute", "communication"),
                (*OWN_JOB, f"parallel.zero_stage={tuple(LAYOUTS.values())[number % 2]}"),
                (),
                about=f"nothing, {tuple(LAYOUTS)[number % 2]}",
            )
        )
    for number in range(2):
        trials.append(_draw_wide_table(rng, f"wide-table-{number}"))
    trials.append(_draw_shared_update(rng, "wide-table-shared"))
    trials.append(
        Trial(
            "healthy-products",
            ("compute", "communication"),
            (*OWN_JOB, "model.args.dim=384", "train.global_batch_size=32"),
            (),
            about="nothing: wide layers and a large batch, ddp",
        )
    )
    return trials


def _draw_straggler(rng: random.Random, name: str, where: str, layout: str) -> Trial:
    """Late by a quarter of a step to a whole one: a fifth to a half of the step with it."""
    rank, share, is_busy = rng.randrange(2), rng.uniform(0.25, 1.0), rng.random() < 0.5
    how = "spins" if is_busy else "sleeps"
    return Trial(
        name,
        ("straggler",),
        (*OWN_JOB, f"parallel.zero_stage={LAYOUTS[layout]}"),
        (
            f"model.args.where={where}",
            f"model.args.rank={rank}",
            f"model.args.is_busy={str(is_busy).lower()}",
        ),
        rank=rank,
        about=f"rank {rank} {how} {{model}} ms in its {where}, {layout}",
        delays={"model.args.seconds": share},
    )


def _draw_loader(rng: random.Random, name: str, rank: int) -> Trial:
    """Reading a batch takes longer than the step beside which it is read."""
    per_batch = rng.uniform(1.3, 2.2)
    who = "all ranks" if rank < 0 else f"rank {rank}"
    return Trial(
        name,
        ("data",) if rank < 0 else ("straggler",),
        OWN_JOB,
        (f"data.args.rank={rank}",),
        rank=None if rank < 0 else rank,
        about=f"{who}: reading a batch takes {{data}} ms",
        delays={"data.args.seconds": per_batch / BATCH_OF_RANK},
    )


def _draw_link(rng: random.Random, name: str) -> Trial:
    mbit = round(rng.uniform(150, 500))
    return Trial(
        name,
        ("communication",),
        (*OWN_JOB, "parallel.zero_stage=none"),
        (),
        mbit=mbit,
        about=f"a link of {mbit} Mbit/s between two machines, ddp",
    )


def _draw_bubble(rng: random.Random, name: str) -> Trial:
    """Wide enough that a microbatch of 2 costs no more a token than a larger one."""
    batch = rng.choice((12, 16))
    return Trial(
        name,
        ("bubble",),
        ("parallel.pp=2", "model.dim=256", f"train.global_batch_size={batch}"),
        (f"train.micro_batch_size={batch // 2}",),
        without=("train.micro_batch_size=2",),
        setting="train.micro_batch_size=2",
        about=f"two stages and two microbatches of {batch // 2} (without: of 2)",
    )


def _draw_evaluations(rng: random.Random, name: str) -> Trial:
    every = rng.choice((5, 8))
    return Trial(
        name,
        ("evaluation",),
        (*PRESET_JOB,),
        (f"eval.every_steps={every}", "eval.tokens=16384"),
        about=f"an evaluation every {every} steps",
    )


def _draw_small_microbatches(rng: random.Random, name: str) -> Trial:
    batch = rng.choice((16, 24))
    return Trial(
        name,
        ("host overhead",),
        ("model.dim=64", "data.seq_len=64", f"train.global_batch_size={batch}"),
        ("train.micro_batch_size=1",),
        about=f"{batch // 2} microbatches of one sequence of 64 tokens (without: one of all)",
    )


def _draw_wide_table(rng: random.Random, name: str) -> Trial:
    """The table has nearly all parameters, and a step few tokens."""
    rows, factor = rng.choice((65_536, 98_304)), rng.choice((2, 4))
    larger_batch = f"train.global_batch_size={factor * 2}"
    return Trial(
        name,
        ("optimizer",),
        (*WIDE_TABLE_JOB, f"model.args.num_rows={rows}"),
        ("train.global_batch_size=2",),
        without=(larger_batch,),
        about=f"a table of {rows:,} rows and few tokens a step (without: {factor} times as many)",
        setting=larger_batch,
        tokens_factor=factor,
    )


def _draw_shared_update(rng: random.Random, name: str) -> Trial:
    rows = rng.choice((65_536, 98_304))
    return Trial(
        name,
        ("optimizer",),
        (*WIDE_TABLE_JOB, f"model.args.num_rows={rows}"),
        ("parallel.zero_stage=none",),
        without=("parallel.zero_stage=1",),
        about=f"a table of {rows:,} rows, each rank updates all (without: zero1)",
        setting="parallel.zero_stage=1",
    )


def _draw_two_causes(rng: random.Random, name: str) -> Trial:
    """Reading takes longer than the late step beside which it is read."""
    rank, share = rng.randrange(2), rng.uniform(0.5, 1.0)
    per_batch = rng.uniform(1.5, 2.0) + share
    return Trial(
        name,
        ("straggler", "data"),
        OWN_JOB,
        ("model.args.where=backward", f"model.args.rank={rank}", "data.args.rank=-1"),
        rank=rank,
        about=f"rank {rank} spins {{model}} ms in its backward; all read for {{data}} ms a batch",
        delays={"model.args.seconds": share, "data.args.seconds": per_batch / BATCH_OF_RANK},
    )
