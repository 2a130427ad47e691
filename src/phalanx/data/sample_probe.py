"""`python -m phalanx.data.sample_probe JSON`: the form of the first sample of a user's own dataset,
for the torch-free planner."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from phalanx.core.errors import ExitCode, PhalanxError
from phalanx.core.parent import kill_this_process_with_parent
from phalanx.data.user_dataset import UserSamples, open_user_dataset
from phalanx.job.module_probe import print_answer


def describe_first_sample(request: Mapping[str, Any]) -> dict[str, list[Any]]:
    """[shape, dtype] of each entry of the first training sample. Raises what the dataset raises."""
    dataset = open_user_dataset(request["source"], request["args"], "train")
    rows = UserSamples(dataset, request["source"], request["seed"]).take(np.arange(1))
    return {key: [list(array.shape[1:]), str(array.dtype)] for key, array in rows.items()}


if __name__ == "__main__":
    kill_this_process_with_parent()
    # Last, as in ranks: nothing in the user's folder stands for a library that is imported late.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        print_answer({"sample_form": describe_first_sample(json.loads(sys.argv[1]))})
    except PhalanxError as error:
        print(error, file=sys.stderr)
        sys.exit(ExitCode.JOB)
