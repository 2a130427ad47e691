"""What `phalanx generate` prints: texts as they come on standard output, and their speed."""

from __future__ import annotations

import sys

from phalanx.core.output import redirect_stream_to_devnull
from phalanx.core.printable import printable
from phalanx.core.units import format_seconds, plural
from phalanx.run.trained.generate import GeneratedText, GenerationResult, TextGenerator

# What a decoder gives for bytes of a letter that is not complete yet.
REPLACEMENT_CHARACTER = "\ufffd"


class GeneratedTextPrinter:
    """Prints texts that come one after another, each with its prompt, as far as their letters are
    complete.
    """

    def __init__(self, generator: TextGenerator) -> None:
        self._generator = generator
        self._text: GeneratedText | None = None
        self._num_printed = 0  # letters of the text that follow its prompt

    def print_new_text(self, text: GeneratedText) -> None:
        """Print what `text` has more than at the last call; the prompt first where it is another
        text.
        """
        if text is not self._text:
            self._text, self._num_printed = text, 0
            has_tokenizer = self._generator.tokenizer is not None
            _write_text(
                _remove_control_characters(
                    text.prompt if has_tokenizer else text.prompt.strip() + " "
                )
            )
        decoded = self._generator.decode(text)
        if not text.has_ended:
            decoded = decoded.rstrip(REPLACEMENT_CHARACTER)
        _write_text(_remove_control_characters(decoded[self._num_printed :]))
        # Never back: what is printed stays, should more tokens decode to fewer letters.
        self._num_printed = max(self._num_printed, len(decoded))
        if text.has_ended:
            _write_text("\n")


def describe_generation_speed(result: GenerationResult) -> str:
    """A line: how many tokens in which time, and tokens per second."""
    rate = "at once"
    if result.generated_s:
        rate = f"{result.num_tokens / result.generated_s:,.1f} tokens/s"
    tokens, seconds = plural(result.num_tokens, "token"), format_seconds(result.generated_s)
    return f"speed   {tokens} in {seconds}: {rate}, without a key-value cache"


def _write_text(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    # A terminal that is not of UTF-8.
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding or "ascii"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    except BrokenPipeError:
        redirect_stream_to_devnull(sys.stdout)


def _remove_control_characters(text: str) -> str:
    """Lines stay lines; what else could move a cursor does not pass."""
    # Tabs first, of which `printable` would make one blank each.
    lines = text.expandtabs(4).split("\n")
    return "\n".join(_remove_control_characters_of_line(line) for line in lines)


def _remove_control_characters_of_line(line: str) -> str:
    """One line without control characters. The spaces at its end stay, which `printable` takes
    away.
    """
    text = line.rstrip()
    return printable(text, max(1, len(text))) + " " * (len(line) - len(text))
