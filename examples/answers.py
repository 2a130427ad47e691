"""Learn answers, not questions: your own dataset of tokens, in which targets that are -100 count
for nothing.

cd examples
phalanx train data.source=answers:dataset model.vocab_size=257 data.seq_len=31 train.steps=200
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IGNORED = -100  # what F.cross_entropy ignores by default, too
END = 256  # of the bytes tokenizer: the end of a document
LENGTH = 31  # inputs of a sample; data.seq_len of the job

QUESTIONS = [(f"{a} + {b} = ", str(a + b)) for a in range(40) for b in range(40)]


# [dataset]
class Answers:
    """A sample is a question and its answer.

    The shift by one is the dataset's: target i is the token after input i.
    """

    def __init__(self, split: str) -> None:
        held_out = split == "held_out"
        self.pairs = [
            pair for number, pair in enumerate(QUESTIONS) if (number % 20 == 0) == held_out
        ]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        question, answer = (list(text.encode()) for text in self.pairs[index])
        tokens = [*question, *answer, END]
        inputs = np.full(
            LENGTH, END, np.int64
        )  # what stands behind the end may be any token: nothing is learned of it
        targets = np.full(LENGTH, IGNORED, np.int64)
        inputs[: len(tokens) - 1] = tokens[:-1]
        targets[len(question) - 1 : len(tokens) - 1] = tokens[
            len(question) :
        ]  # the answer and its end
        return {"inputs": inputs, "targets": targets, "positions": np.arange(LENGTH)}


# [/dataset]


def dataset(split: str) -> Answers:
    return Answers(split)
