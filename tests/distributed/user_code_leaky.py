"""A user's model that does what happens: once, it prints a secret in every way there is and
raises with it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from user_code import Bigram


class Leaky(Bigram):
    num_calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if os.environ["RANK"] == "1" and self.num_calls == 3 and not Path("leaked").exists():
            Path("leaked").touch()
            self.leak(os.environ["MY_SECRET_TOKEN"])
        return super().forward(inputs)

    def leak(self, token: str) -> None:
        print("logged in with", token)
        print(f"{token=}", os.environ, file=sys.stderr)
        warnings.warn(f"{token} is about to expire", stacklevel=1)
        logging.getLogger("leaky").error("refused: %s", token)
        os.write(1, f"from C: {token}\n".encode())
        subprocess.run(["echo", f"from a child: {token}"], check=True)
        raise RuntimeError(f"{os.environ['STORE_URL']} refuses {token!r}")


def leaky(vocab_size: int = 257) -> nn.Module:
    return Leaky(vocab_size)
