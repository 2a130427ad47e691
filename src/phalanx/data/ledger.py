"""The sample ledger: proof, from a run's own records, that no sample was repeated or left out.
Torch-free.

With observe.samples every rank says which samples it read for each step that was done, and the
checksum of what was delivered. Restarts are part of it: what an attempt did after the step that the
next one continued from does not count, but what both read must have been the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.core.errors import DataError
from phalanx.core.files import read_json
from phalanx.data.corpus import load_corpus
from phalanx.data.samples import SampleSource, open_training_samples
from phalanx.data.user_dataset import hash_sample
from phalanx.observe.events import RolledBack, RunFinished, RunStarted, SamplesRead
from phalanx.observe.tail import EventTail

MAX_SHOWN_DOCUMENTS = 20
# What lies beyond was not written by a rank: a damaged record must not make arrays of any size.
# A run's own numbers, which are smaller, count where they are on record.
MAX_SAMPLE, MAX_OF_A_STEP, MAX_STEPS, MAX_RANKS = 2**60, 2**24, 2**53, 2**20


@dataclass(frozen=True)
class RankStepSamples:
    """One rank's record of one step."""

    attempt: int
    event: SamplesRead


@dataclass(frozen=True)
class AttemptStart:
    """The beginning of an attempt: the step it continued from, and what none of its records can
    exceed.
    """

    step: int
    total_steps: int
    world_size: int


@dataclass(frozen=True)
class LedgerReport:
    """`problems` is empty if every sample was read exactly once, in order, as the order of samples
    wants it.
    """

    num_samples: int
    num_steps: int
    num_attempts: int
    num_compared: int
    """Readings whose checksum was compared with the tokens themselves; none of a user's own
    dataset."""
    problems: tuple[str, ...] = field(default=())
    num_left_out: int = 0
    """Samples that the run left out when it went back because of a loss spike."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}

    def lines(self) -> list[str]:
        """The report as lines for people."""
        total = f"{self.num_samples:,} samples in {self.num_steps:,} steps"
        if self.num_attempts > 1:
            total += f" over {self.num_attempts} attempts"
        if self.ok:
            compared = "not compared with the dataset itself"
            if self.num_compared:
                compared = "checksums as the tokens say"
            lines = [f"{total}, each exactly once ({compared})"]
            if self.num_left_out:
                lines.append(
                    f"{self.num_left_out:,} samples before them were left out: the run went back"
                    " because of a loss spike"
                )
            return lines
        lines = [total, *self.problems[:MAX_SHOWN_DOCUMENTS]]
        if len(self.problems) > MAX_SHOWN_DOCUMENTS:
            lines.append(f"and {len(self.problems) - MAX_SHOWN_DOCUMENTS:,} more")
        return lines


def check_sample_records(run_dir: Path) -> LedgerReport:
    """Check the records of all attempts of a run. Raises DataError (exit 4) where there are none,
    or no run.
    """
    if not run_dir.is_dir():
        raise DataError("no such directory", where=str(run_dir), fix="give the directory of a run")
    events, starts, resumed_at, finished_at = _read_sample_events(run_dir)
    if not events:
        raise DataError(
            "the run has no record of its samples",
            where=str(run_dir),
            fix="train with observe.samples=true",
        )
    readings: list[RankStepSamples] = []
    problems: list[str] = []
    # Damaged ones first: all that follows counts as far as the records say.
    for reading in events:
        if damage := _find_record_damage(reading.event, starts.get(reading.attempt)):
            event = reading.event
            problems.append(
                f"step {event.step}: rank {event.data_parallel_rank} has a damaged record: {damage}"
            )
        else:
            readings.append(reading)
    done, incomplete = _list_steps_recorded_by_all_ranks(_select_final_records(readings, starts))
    gaps = _find_gaps_and_repetitions(done, resumed_at)
    problems += [*incomplete, *gaps.problems]
    last = max(done, default=0)
    if last < finished_at:
        steps = _format_step_numbers(last + 1, finished_at + 1)
        problems.append(f"{steps}: not every rank has a record, and the run finished them")
    problems += _find_changed_samples(readings)
    samples = _open_run_samples(run_dir)
    counted_readings = [reading for step in done.values() for reading in step]
    num_compared = 0
    if samples is not None:
        num_compared = len(counted_readings)
        problems += _find_wrong_checksums(counted_readings, samples)
    return LedgerReport(
        num_samples=sum(_count_samples(reading.event) for reading in counted_readings),
        num_steps=len(done),
        num_attempts=len({reading.attempt for reading in readings}),
        num_compared=num_compared,
        problems=tuple(problems),
        num_left_out=gaps.num_left_out,
    )


def _read_sample_events(
    run_dir: Path,
) -> tuple[list[RankStepSamples], dict[int, AttemptStart], set[int], int]:
    """All records, how each attempt began, the samples at which the run read on after it had gone
    back, and the step at which it finished (0: it did not)."""
    resumed_at: set[int] = set()
    finished_at = 0
    readings: list[RankStepSamples] = []
    starts: dict[int, AttemptStart] = {}
    for envelope in EventTail(run_dir, all_ranks=True).read_new_events():
        if isinstance(envelope.event, SamplesRead):
            readings.append(RankStepSamples(envelope.attempt, envelope.event))
        elif isinstance(envelope.event, RolledBack):
            resumed_at.add(int(envelope.event.skip_to_sample))
        elif isinstance(envelope.event, RunFinished):
            # Of one that was stopped the newest step may be incomplete.
            is_finished = envelope.event.status == "finished"
            finished_at = int(envelope.event.step) if is_finished else 0
        elif isinstance(envelope.event, RunStarted):
            event, finished_at = envelope.event, 0
            starts[envelope.attempt] = AttemptStart(
                int(event.step), int(event.total_steps), int(event.world_size)
            )
    return readings, starts, resumed_at, min(finished_at, MAX_STEPS)


def _find_record_damage(event: SamplesRead, start: AttemptStart | None) -> str:
    """Why a record cannot be what a rank wrote; empty if it can. Nothing that follows is longer
    than it says.
    """
    total_steps, num_ranks = MAX_STEPS, MAX_RANKS
    if start is not None:
        total_steps = min(start.total_steps, MAX_STEPS)
        num_ranks = min(start.world_size, MAX_RANKS)
    if not _is_integer_in_range(event.step, 1, total_steps + 1):
        return f"the attempt has steps 1 to {total_steps}"
    size = event.data_parallel_size
    if not (
        _is_integer_in_range(size, 1, num_ranks + 1)
        and _is_integer_in_range(event.data_parallel_rank, 0, size)
    ):
        return f"it is of {size} data-parallel ranks, and there are {num_ranks} ranks"
    edges = event.ranges
    if (
        not edges
        or len(edges) % 2
        or not all(_is_integer_in_range(edge, 0, MAX_SAMPLE) for edge in edges)
    ):
        return "its ranges are no pairs of sample numbers"
    sizes = [beyond - first for first, beyond in _parse_sample_ranges(event)]
    if min(sizes) <= 0 or sum(sizes) > MAX_OF_A_STEP:
        return "its ranges are empty or absurdly long"
    return ""


def _is_integer_in_range(value: object, least: int, beyond: int) -> bool:
    return type(value) is int and least <= value < beyond


def _select_final_records(
    readings: Sequence[RankStepSamples], starts: dict[int, AttemptStart]
) -> dict[int, list[RankStepSamples]]:
    """By step, the records that count: an attempt undoes all that was done after the step it
    continued from.
    """
    counted: dict[int, list[RankStepSamples]] = {}
    # An attempt that recorded nothing undoes steps, too.
    for attempt in sorted({reading.attempt for reading in readings} | set(starts)):
        own_readings = [reading for reading in readings if reading.attempt == attempt]
        if attempt in starts:
            continued_from = starts[attempt].step
        else:  # its start is not on record
            continued_from = min((reading.event.step for reading in own_readings), default=1) - 1
        undone = [step for step in counted if step > continued_from]
        for step in undone:
            del counted[step]
        for reading in own_readings:
            counted.setdefault(int(reading.event.step), []).append(reading)
    return dict(sorted(counted.items()))


def _list_steps_recorded_by_all_ranks(
    counted: dict[int, list[RankStepSamples]],
) -> tuple[dict[int, list[RankStepSamples]], list[str]]:
    """The steps that every rank has recorded. The newest may be incomplete: ranks were stopped in
    between.
    """
    done: dict[int, list[RankStepSamples]] = {}
    problems: list[str] = []
    newest, expected = max(counted, default=0), 1
    for step, readings in counted.items():
        if step > expected:
            problems.append(f"{_format_step_numbers(expected, step)}: no rank has a record")
        expected = step + 1
        by_rank: dict[int, RankStepSamples] = {}
        for reading in readings:
            rank = int(reading.event.data_parallel_rank)
            if rank in by_rank and by_rank[rank].event.ranges != reading.event.ranges:
                problems.append(f"step {step}: rank {rank} has two records that differ")
            by_rank[rank] = reading
        missing = _find_missing_ranks(by_rank)
        if not missing:
            done[step] = list(by_rank.values())
        elif step < newest:
            problems.append(f"step {step}: rank {_format_rank_numbers(missing)} has no record")
    return done, problems


def _find_missing_ranks(by_rank: dict[int, RankStepSamples]) -> list[int]:
    """The data-parallel ranks of a step that have no record, by what the others say of their
    number."""
    sizes = [int(reading.event.data_parallel_size) for reading in by_rank.values()]
    return [rank for rank in range(max(sizes, default=0)) if rank not in by_rank]


def _format_step_numbers(first: int, beyond: int) -> str:
    if beyond == first + 1:
        return f"step {first}"
    return f"steps {first} to {beyond - 1}"


def _format_rank_numbers(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[:MAX_SHOWN_DOCUMENTS]))
    if len(ranks) > MAX_SHOWN_DOCUMENTS:
        text += f" and {len(ranks) - MAX_SHOWN_DOCUMENTS:,} more"
    return text


@dataclass(frozen=True)
class SampleGaps:
    """The faults of a sequence of samples, and how many samples were left out on purpose."""

    problems: tuple[str, ...]
    num_left_out: int


def _find_gaps_and_repetitions(
    done: dict[int, list[RankStepSamples]], resumed_at: set[int]
) -> SampleGaps:
    """Steps that do not begin where the one before ended, and samples that a step repeats or leaves
    out; not those before one of `resumed_at`, at which the run read on after it had gone back.
    """
    problems: list[str] = []
    expected = num_left_out = 0
    for step, readings in done.items():
        ranges = sorted(
            edge for reading in readings for edge in _parse_sample_ranges(reading.event)
        )
        for first, beyond in ranges:
            if first > expected and first in resumed_at:
                num_left_out += first - expected
            elif first > expected:
                problems.append(
                    f"step {step}: {_format_samples_as_subject(expected, first)} missing"
                )
            elif first < expected:
                repeated = _format_samples_as_subject(first, min(beyond, expected))
                problems.append(f"step {step}: {repeated} repeated")
            expected = max(expected, beyond)
    return SampleGaps(tuple(problems), num_left_out)


def _format_sample_numbers(first: int, beyond: int) -> str:
    if beyond - first == 1:
        return f"sample {first}"
    return f"samples {first} to {beyond - 1}"


def _format_samples_as_subject(first: int, beyond: int) -> str:
    """The beginning of a sentence: "sample 3 is", "samples 3 to 5 are"."""
    verb = "is" if beyond - first == 1 else "are"
    return f"{_format_sample_numbers(first, beyond)} {verb}"


def _find_changed_samples(readings: Sequence[RankStepSamples]) -> Iterator[str]:
    """Samples that were read again after a restart, with another content."""
    first_readings: dict[tuple[int, ...], RankStepSamples] = {}
    for reading in readings:
        key = tuple(map(int, reading.event.ranges))
        first = first_readings.setdefault(key, reading)
        if first.event.xxh3 != reading.event.xxh3:
            summary = f"attempt {first.attempt} and attempt {reading.attempt} read other content"
            numbers = _format_sample_numbers(key[0], key[1])
            yield f"step {reading.event.step}: {summary} as {numbers}"


def _find_wrong_checksums(
    readings: Sequence[RankStepSamples], samples: SampleSource
) -> Iterator[str]:
    """Readings whose checksum is not that of the samples they name. Those of an unusual size are
    not even compared.
    """
    sizes = Counter((reading.attempt, _count_samples(reading.event)) for reading in readings)
    usual: dict[int, int] = {}
    for (attempt, size), _ in sizes.most_common():
        usual.setdefault(attempt, size)
    for reading in readings:
        if (size := _count_samples(reading.event)) != usual[reading.attempt]:
            read = f"rank {reading.event.data_parallel_rank} read {size} samples"
            yield f"step {reading.event.step}: {read}, and {usual[reading.attempt]} in other steps"
            continue
        parts = []
        for first, beyond in _parse_sample_ranges(reading.event):
            parts.append(np.arange(first, beyond, dtype=np.int64))
        indices = np.concatenate(parts)
        if hash_sample(samples.take(indices)) != reading.event.xxh3:
            rank = reading.event.data_parallel_rank
            yield (
                f"step {reading.event.step}: what rank {rank} was given is not what the order of"
                " samples says"
            )


def _open_run_samples(run_dir: Path) -> SampleSource | None:
    """The run's samples, to compare with; None for a user's own dataset, whose code is not run
    here.
    """
    seq_len, seed, document_masks = _read_order_of_samples(run_dir)
    corpus = load_corpus(run_dir / "data")
    if corpus.user is not None:
        return None
    return open_training_samples(corpus, seq_len, seed, document_masks)


def _read_order_of_samples(run_dir: Path) -> tuple[int, int, bool]:
    """What the order of a run's samples follows from: data.seq_len, run.seed and
    data.document_masks. Raises DataError for a job.json that does not say it."""
    path = run_dir / "job.json"
    try:
        job = read_json(path)
        values = job["data"]["seq_len"], job["run"]["seed"], job["data"]["document_masks"]
    except OSError as error:
        problem = error.strerror or str(error)
    except ValueError as error:
        problem = f"it is not JSON: {error}"
    except (LookupError, TypeError):
        problem = "it has no data.seq_len, run.seed or data.document_masks"
    else:
        seq_len, seed, document_masks = values
        if (
            _is_integer_in_range(seq_len, 1, MAX_SAMPLE)
            and (type(seed) is int and seed >= 0)
            and type(document_masks) is bool
        ):
            return seq_len, seed, document_masks
        problem = f"data.seq_len {seq_len!s:.40}, run.seed {seed!s:.40} or data.document_masks"
        problem += f" {document_masks!s:.40} is of no job"
    raise DataError(
        "the order of samples cannot be checked",
        where=str(path),
        why=problem,
        fix="put the file back as the run wrote it",
    )


def _parse_sample_ranges(event: SamplesRead) -> list[tuple[int, int]]:
    edges = list(map(int, event.ranges))
    return list(zip(edges[::2], edges[1::2], strict=True))


def _count_samples(event: SamplesRead) -> int:
    return sum(beyond - first for first, beyond in _parse_sample_ranges(event))
