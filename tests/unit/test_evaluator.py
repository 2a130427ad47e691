"""How often ranks of an evaluation agree whether to go on."""

from __future__ import annotations

import pytest

from phalanx.train.evaluator import (
    MAX_BATCHES_BETWEEN_AGREEMENTS,
    STOP_AGREEMENT_INTERVAL_S,
    compute_batches_until_agreement,
)


@pytest.mark.parametrize("batch_s", [1e-4, 3e-3, 0.02, 0.2, 3.0])
def test_ranks_agree_about_twice_a_second_and_never_wait_for_many_batches(batch_s: float) -> None:
    """A stop is heard within two such waits, or one batch where that is longer; short batches
    share one wait."""
    batches, waits = 1, []
    for _ in range(20):
        batches = compute_batches_until_agreement(batches, batches * batch_s)
        waits.append(batches)
    assert max(waits) * batch_s <= max(2 * STOP_AGREEMENT_INTERVAL_S, batch_s)
    assert (
        waits[-1] == MAX_BATCHES_BETWEEN_AGREEMENTS
        or waits[-1] * batch_s >= STOP_AGREEMENT_INTERVAL_S / 4
    )
