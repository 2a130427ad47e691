"""`phalanx generate`: prompts to token ids, ranks that continue them, and text as it comes."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.cli._arguments import split_arguments
from phalanx.cli._checkpoint_output import refusing, tell
from phalanx.cli._json import print_json
from phalanx.cli._launched import refuse_launcher
from phalanx.core.errors import CheckpointError, DataError, ExitCode, LayoutError, UsageError
from phalanx.core.output import silence
from phalanx.core.printable import printable
from phalanx.core.units import format_seconds, plural
from phalanx.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from phalanx.plan.plan import Plan
from phalanx.run.scratch import scratch_directory
from phalanx.run.trained.launch import require_result, run_ranks
from phalanx.run.trained.model import Subject, describe_ranks, open_subject

SECTIONS = ("parallel", "precision", "cluster", "data.tokenizer", "train.compile")
TOKENS = "tokens.jsonl"
MAX_PROMPT_BYTES = 16 << 20
UNFINISHED = "\ufffd"  # what a decoder gives for bytes whose letter is not whole yet


@dataclass(frozen=True)
class Request:
    """The command line. `prompts` is None where the text comes from standard input."""

    checkpoint: str
    arguments: tuple[str, ...]
    prompts: tuple[str, ...] | None
    num_tokens: int
    sampling: dict[str, Any]
    seed: int
    best: bool
    as_json: bool


@dataclass
class Text:
    """One text as it comes. `shown`: how many letters of what follows the prompt are on the terminal."""

    prompt: str
    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    shown: int = 0
    wall_s: float | None = None


def generate(request: Request) -> int:
    """The verb. Raises PhalanxError for what a user can mend; returns the exit code."""
    with refusing(request.as_json), scratch_directory("generate") as scratch:
        refuse_launcher("generate")
        job_file, overrides = split_arguments(request.arguments)
        subject = open_subject(
            request.checkpoint, job_file, overrides, best=request.best, sections=SECTIONS, alone=True
        )
        tokenizer = _tokenizer(subject)
        plan = subject.make_plan(vocab_size=tokenizer.vocab_size if tokenizer is not None else None)
        if plan.model_shape.reads_images:
            raise LayoutError("this model does not generate", why="it reads images", where=subject.name)
        texts = [_prompt(text, tokenizer, plan) for text in _prompts(request)]
        stream = _Stream(texts, tokenizer, scratch.directory / TOKENS, shows=not request.as_json)
        if not request.as_json:
            tell(f"model   {subject.name}, on {describe_ranks(subject, plan)}", as_problem=True)
        more = {
            "prompts": [text.prompt_tokens for text in texts],
            "num_tokens": request.num_tokens,
            "context": plan.seq_len,
            "seed": request.seed,
            "end": tokenizer.end_of_document if tokenizer is not None else None,
            "sampling": {**request.sampling, "num_choices": tokenizer.vocab_size if tokenizer is not None else None},
        }
        code = run_ranks("continue_texts", subject, plan, scratch, more, stream.poll)
        stream.poll()
        if code != ExitCode.OK:
            return code
        require_result(scratch.directory / TOKENS)
    if request.as_json:
        print_json("generate", _facts(request, subject, plan, texts, tokenizer), indent=1)
    else:
        tell(_speed(texts, plan), as_problem=True)
    return ExitCode.OK


def _tokenizer(subject: Subject) -> Tokenizer | None:
    """What the run's text went through, or what the command line or an import names; None where ids have no text."""
    given = subject.job.data.tokenizer
    own = subject.corpus() if not subject.gives("data.tokenizer") else None
    if own is not None:
        return own.tokenizer()
    found = load_tokenizer(given) if given else None
    if found is None and subject.folder is None:
        return None  # a Hugging Face directory without tokenizer.json
    if found is None and subject.run_dir is not None and (subject.run_dir / TOKENIZER_FILE).is_file():
        found = load_tokenizer(str(subject.run_dir))
    trained = subject.tokenizer_digest
    if found is None and trained == load_tokenizer("bytes").digest:
        return load_tokenizer("bytes")
    if found is None and trained:
        fix = "give data.tokenizer=FILE"
        raise DataError(f"the tokenizer {trained} it was trained with is not here", where=subject.name, fix=fix)
    if found is not None and trained and found.digest != trained:
        why = f"data.tokenizer {given} is {found.digest}"
        raise CheckpointError(f"it was trained on tokens of tokenizer {trained}", where=subject.name, why=why)
    return found


def _prompts(request: Request) -> tuple[str, ...]:
    if request.prompts is not None:
        return request.prompts
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("there is no prompt", fix='give --prompt "TEXT", or the text on standard input')
    raw = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(raw) > MAX_PROMPT_BYTES:
        raise UsageError(f"the prompt on standard input has more than {MAX_PROMPT_BYTES >> 20} MiB")
    return (raw.decode("utf-8", "surrogateescape").removesuffix("\n"),)


def _prompt(text: str, tokenizer: Tokenizer | None, plan: Plan) -> Text:
    """A prompt as token ids. An empty one begins a document, where there is a token that ends them."""
    if tokenizer is not None:
        ids = tokenizer.encode(text)
        if not ids and tokenizer.end_of_document is not None:
            ids = [tokenizer.end_of_document]
    else:
        words = [word for word in re.split(r"[\s,]+", text.strip()) if word]
        if not all(re.fullmatch(r"\d{1,9}", word) for word in words):
            raise UsageError(
                "the prompt is no list of token ids",
                why="there is no tokenizer with the checkpoint",
                fix='write ids, --prompt "12 7 99", or give data.tokenizer=FILE',
            )
        ids = [int(word) for word in words]
    if not ids:
        raise UsageError("the prompt is empty", fix='give --prompt "TEXT"')
    if plan.vocab_size and max(ids) >= plan.vocab_size:
        raise DataError(f"token {max(ids)} of the prompt does not fit the model's vocabulary of {plan.vocab_size}")
    return Text(text, ids)


class _Stream:
    """What ranks have written so far, as text on standard output."""

    def __init__(self, texts: list[Text], tokenizer: Tokenizer | None, path: Path, *, shows: bool) -> None:
        self._texts, self._tokenizer, self._path, self._shows = texts, tokenizer, path, shows
        self._offset = 0
        self._begun = 0

    def poll(self) -> None:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                raw = file.read()
        except FileNotFoundError:
            return
        raw = raw[: raw.rfind(b"\n") + 1]
        self._offset += len(raw)
        for line in raw.splitlines():
            self._take(json.loads(line))
        if raw and self._shows and self._begun:
            self._show(self._texts[self._begun - 1], is_end=False)

    def _take(self, told: dict[str, Any]) -> None:
        text = self._texts[told["text"]]
        if self._begun <= told["text"]:
            self._begun = told["text"] + 1
            if self._shows:
                self._write(_safe(text.prompt if self._tokenizer is not None else text.prompt.strip() + " "))
        if "token" in told:
            text.tokens.append(told["token"])
            return
        text.wall_s = told["wall_s"]
        if self._shows:
            self._show(text, is_end=True)
            self._write("\n")

    def _show(self, text: Text, *, is_end: bool) -> None:
        """What is new; the letters of a word that is not whole yet wait."""
        if text.wall_s is not None and not is_end:
            return
        whole = decode(text, self._tokenizer)
        if not is_end:
            whole = whole.rstrip(UNFINISHED)
        self._write(_safe(whole[text.shown :]))
        text.shown = max(text.shown, len(whole))

    def _write(self, text: str) -> None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except UnicodeEncodeError:  # a terminal that is not of UTF-8
            encoding = sys.stdout.encoding or "ascii"
            sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        except BrokenPipeError:
            silence(sys.stdout)


def decode(text: Text, tokenizer: Tokenizer | None) -> str:
    """What follows the prompt. Decoded together with it: a tokenizer may join what it decodes to what was before."""
    if tokenizer is None:
        return " ".join(map(str, text.tokens))
    before = tokenizer.decode(text.prompt_tokens)
    both = tokenizer.decode([*text.prompt_tokens, *text.tokens])
    return both[len(before) :] if both.startswith(before) else tokenizer.decode(text.tokens)


def _safe(text: str) -> str:
    """Lines stay lines; what else could move a cursor does not pass."""
    lines = text.expandtabs(4).split("\n")
    return "\n".join(_printable_keeping_spaces(line) for line in lines)


def _printable_keeping_spaces(line: str) -> str:
    body = line.rstrip()
    return printable(body, max(1, len(body))) + " " * (len(line) - len(body))


def _speed(texts: list[Text], plan: Plan) -> str:
    count, took = sum(len(text.tokens) for text in texts), sum(text.wall_s or 0.0 for text in texts)
    rate = f"{count / took:,.1f} tokens/s" if took else "at once"
    return f"speed   {plural(count, 'token')} in {format_seconds(took)}: {rate}, without a key-value cache"


def _facts(
    request: Request, subject: Subject, plan: Plan, texts: list[Text], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    end = tokenizer.end_of_document if tokenizer is not None else None
    count, took = sum(len(text.tokens) for text in texts), sum(text.wall_s or 0.0 for text in texts)
    return {
        "checkpoint": subject.name,
        "step": subject.step,
        "world_size": plan.world_size,
        "context": plan.seq_len,
        **request.sampling,
        "seed": request.seed,
        "texts": [
            {
                "prompt": text.prompt if tokenizer is not None else None,
                "prompt_tokens": text.prompt_tokens,
                "text": decode(text, tokenizer) if tokenizer is not None else None,
                "tokens": text.tokens,
                "ended_by": "document" if text.tokens[-1:] == [end] else "length",
            }
            for text in texts
        ],
        "tokens_per_s": count / took if took else None,
    }
