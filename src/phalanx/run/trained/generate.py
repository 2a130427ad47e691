"""Continue texts with a checkpoint: prompts to token ids, ranks that continue them, and their
tokens as they come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.errors import CheckpointError, DataError, LayoutError, UsageError
from phalanx.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from phalanx.plan.plan import Plan
from phalanx.run.scratch import ScratchDirectory
from phalanx.run.trained.files import TOKENS_FILE_NAME
from phalanx.run.trained.launch import (
    build_model_payload_fields,
    require_result_file,
    run_payload_in_ranks,
)
from phalanx.run.trained.model import TrainedModel
from phalanx.run.trained.payloads import GeneratePayload, SamplingOptions

# What a command line may change of the job that trained the model.
GENERATION_KEYS = ("parallel", "precision", "cluster", "data.tokenizer", "train.compile")


@dataclass
class GeneratedText:
    """A prompt and the tokens that follow it so far. `wall_s` is set when the text has ended."""

    prompt: str
    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    wall_s: float | None = None

    @property
    def has_ended(self) -> bool:
        return self.wall_s is not None


@dataclass(frozen=True)
class TextGenerator:
    """A model that generates, its plan and its tokenizer. Without a tokenizer, prompts and texts
    are token ids.
    """

    model: TrainedModel
    plan: Plan
    tokenizer: Tokenizer | None

    @property
    def end_token(self) -> int | None:
        """The id of the token that ends a document."""
        if self.tokenizer is None:
            return None
        return self.tokenizer.end_of_document

    @property
    def num_ids_with_text(self) -> int | None:
        """The number of ids that have a text; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return self.tokenizer.vocab_size

    def encode_prompt(self, prompt: str) -> GeneratedText:
        """A text of which only the prompt is there. An empty prompt begins a document, if a token
        ends documents.

        Raises UsageError or DataError for a prompt that the model cannot read.
        """
        tokens = self._encode_prompt_text(prompt)
        if not tokens and self.end_token is not None:
            tokens = [self.end_token]
        if not tokens:
            raise UsageError("the prompt is empty", fix='give --prompt "TEXT"')
        vocab_size = self.plan.vocab_size
        if vocab_size and max(tokens) >= vocab_size:
            raise DataError(
                f"token {max(tokens)} of the prompt does not fit the model's vocabulary of"
                f" {vocab_size}"
            )
        return GeneratedText(prompt, tokens)

    def _encode_prompt_text(self, text: str) -> list[int]:
        if self.tokenizer is None:
            return _parse_token_ids(text)
        return self.tokenizer.encode(text)

    def decode(self, text: GeneratedText) -> str:
        """Text that follows the prompt. It is decoded with the prompt: a tokenizer may join a
        token to the one before."""
        if self.tokenizer is None:
            return " ".join(map(str, text.tokens))
        prompt = self.tokenizer.decode(text.prompt_tokens)
        prompt_and_text = self.tokenizer.decode([*text.prompt_tokens, *text.tokens])
        # It does not where the prompt ends within a character, say.
        if prompt_and_text.startswith(prompt):
            return prompt_and_text[len(prompt) :]
        return self.tokenizer.decode(text.tokens)


@dataclass(frozen=True)
class GenerationResult:
    """Texts that have ended, and how they were drawn. The text of index i was drawn with `seed` +
    i.
    """

    generator: TextGenerator
    sampling: SamplingOptions
    seed: int
    texts: Sequence[GeneratedText]

    @property
    def num_tokens(self) -> int:
        """Number of tokens that follow the prompts."""
        return sum(len(text.tokens) for text in self.texts)

    @property
    def generated_s(self) -> float:
        return sum(text.wall_s or 0.0 for text in self.texts)

    def to_json(self) -> dict[str, Any]:
        """The facts of `phalanx generate --json`."""
        model, plan = self.generator.model, self.generator.plan
        tokens_per_s = None
        if self.generated_s:
            tokens_per_s = self.num_tokens / self.generated_s
        return {
            "checkpoint": model.name,
            "step": model.step,
            "world_size": plan.world_size,
            "context": plan.seq_len,
            **asdict(self.sampling),
            "seed": self.seed,
            "texts": [self._text_to_json(text) for text in self.texts],
            "tokens_per_s": tokens_per_s,
        }

    def _text_to_json(self, text: GeneratedText) -> dict[str, Any]:
        prompt, continuation, ended_by = None, None, "length"
        if self.generator.tokenizer is not None:
            prompt, continuation = text.prompt, self.generator.decode(text)
        if text.tokens[-1:] == [self.generator.end_token]:
            ended_by = "document"
        return {
            "prompt": prompt,
            "prompt_tokens": text.prompt_tokens,
            "text": continuation,
            "tokens": text.tokens,
            "ended_by": ended_by,
        }


def open_generator(model: TrainedModel) -> TextGenerator:
    """Find the tokenizer of `model` and plan how ranks share the work.

    Raises LayoutError for a model that reads images, DataError or CheckpointError for a tokenizer
    that is not there, or is not the one the model was trained with.
    """
    tokenizer = _find_tokenizer_of_trained_model(model)
    vocab_size = None
    if tokenizer is not None:
        vocab_size = tokenizer.vocab_size
    plan = model.make_plan(vocab_size=vocab_size)
    if plan.model_shape.reads_images:
        raise LayoutError("this model does not generate", why="it reads images", where=model.name)
    return TextGenerator(model, plan, tokenizer)


def generate_texts_in_ranks(
    generator: TextGenerator,
    texts: Sequence[GeneratedText],
    scratch: ScratchDirectory,
    *,
    num_tokens: int,
    sampling: SamplingOptions,
    seed: int,
    on_text: Callable[[GeneratedText], None],
) -> GenerationResult:
    """Start the ranks, which continue `texts` one after another by at most `num_tokens` tokens
    each.

    `on_text` is called several times a second with each text that has more tokens than before, or
    has ended, in order. Raises the PhalanxError of a rank, or RanksEndedError.
    """
    payload = GeneratePayload(
        model=build_model_payload_fields(generator.model, generator.plan, scratch),
        prompts=tuple(tuple(text.prompt_tokens) for text in texts),
        num_tokens=num_tokens,
        context=generator.plan.seq_len,
        seed=seed,
        end=generator.end_token,
        sampling=sampling,
        num_choices=generator.num_ids_with_text,
    )
    tokens_file = _GeneratedTokensReader(scratch.directory / TOKENS_FILE_NAME, texts, on_text)
    try:
        run_payload_in_ranks(payload, scratch, tokens_file.read_new_tokens)
    finally:
        # What ranks wrote since the last time, also where they were stopped.
        tokens_file.read_new_tokens()
    require_result_file(scratch.directory / TOKENS_FILE_NAME)
    return GenerationResult(generator, sampling, seed, texts)


class _GeneratedTokensReader:
    """The file to which rank 0 appends tokens while the texts grow; each poll reads what is new in
    it.
    """

    def __init__(
        self, path: Path, texts: Sequence[GeneratedText], on_text: Callable[[GeneratedText], None]
    ) -> None:
        self._path, self._texts, self._on_text = path, texts, on_text
        self._offset = 0

    def read_new_tokens(self) -> None:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                raw = file.read()
        except FileNotFoundError:
            return
        # A line that is not whole yet waits for the next poll.
        raw = raw[: raw.rfind(b"\n") + 1]
        self._offset += len(raw)
        # A set that keeps the order of the texts.
        changed: dict[int, None] = {}
        for line in raw.splitlines():
            record = json.loads(line)
            changed[record["text"]] = None
            text = self._texts[record["text"]]
            if "token" in record:
                text.tokens.append(record["token"])
            else:
                text.wall_s = record["wall_s"]
        for number in changed:
            self._on_text(self._texts[number])


def _find_tokenizer_of_trained_model(model: TrainedModel) -> Tokenizer | None:
    """The tokenizer of the run's text, or the one that the overrides or an import name; None where
    ids have no text.
    """
    setting = model.job.data.tokenizer
    if not model.overridden_keys("data.tokenizer"):
        corpus = model.corpus()
        if corpus is not None:
            return corpus.tokenizer()
    tokenizer = None
    if setting:
        tokenizer = load_tokenizer(setting)
    if tokenizer is None and model.folder is None:
        # A Hugging Face directory without tokenizer.json.
        return None
    if (
        tokenizer is None
        and model.run_dir is not None
        and (model.run_dir / TOKENIZER_FILE).is_file()
    ):
        tokenizer = load_tokenizer(str(model.run_dir))
    digest = model.tokenizer_digest
    if tokenizer is None and digest == load_tokenizer("bytes").digest:
        return load_tokenizer("bytes")
    if tokenizer is None and digest:
        fix = "give data.tokenizer=FILE"
        raise DataError(
            f"the tokenizer {digest} it was trained with is not here", where=model.name, fix=fix
        )
    if tokenizer is not None and digest and tokenizer.digest != digest:
        why = f"data.tokenizer {setting} is {tokenizer.digest}"
        raise CheckpointError(
            f"it was trained on tokens of tokenizer {digest}", where=model.name, why=why
        )
    return tokenizer


def _parse_token_ids(prompt: str) -> list[int]:
    """Token ids that are written as numbers, between spaces or commas."""
    words = re.findall(r"[^\s,]+", prompt)
    if not all(re.fullmatch(r"\d{1,9}", word) for word in words):
        raise UsageError(
            "the prompt is no list of token ids",
            why="there is no tokenizer with the checkpoint",
            fix='write ids, --prompt "12 7 99", or give data.tokenizer=FILE',
        )
    return list(map(int, words))
