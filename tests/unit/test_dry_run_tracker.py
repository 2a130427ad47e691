"""StorageTracker: storages are followed from birth to death, views share one, and each byte has a
category."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.core.errors import LayoutError
from phalanx.verify.dry_run.moments import BACKWARD, FORWARD, LOSS, StepMoment
from phalanx.verify.dry_run.program import track_parts
from phalanx.verify.dry_run.storage_log import (
    ACTIVATIONS,
    COMMUNICATION,
    GRADIENTS,
    LOSS_CATEGORY,
    OTHER,
    PARAMETERS,
    StorageLog,
    build_memory_timeline,
    find_highest_point,
)
from phalanx.verify.dry_run.tracker import StorageTracker


def enter(tracker: StorageTracker, phase: str, part: str = "") -> None:
    tracker.log.moments.enter(StepMoment(phase, part, microbatch=0))


@pytest.fixture(params=["real", "fake"])
def tracker(request: pytest.FixtureRequest) -> StorageTracker:
    is_fake = request.param == "fake"
    tracker = StorageTracker(StorageLog(), is_dry=is_fake)
    if not is_fake:
        with tracker.tracking_storage_resizes(), tracker:
            yield tracker
        return
    with FakeTensorMode(), tracker.tracking_storage_resizes(), tracker:
        yield tracker


def test_views_share_a_storage_that_lives_as_long_as_the_last_of_them(
    tracker: StorageTracker,
) -> None:
    whole = torch.empty(100)
    row = whole.view(10, 10)[3]
    assert tracker.log.live_bytes == 400
    del whole
    assert tracker.log.live_bytes == 400
    del row
    assert tracker.log.live_bytes == 0


def test_in_place_operations_make_nothing(tracker: StorageTracker) -> None:
    values = torch.zeros(50)
    values.add_(1).mul_(2)
    assert tracker.log.live_bytes == 200
    values += torch.ones(50)
    assert tracker.log.live_bytes == 200


def test_a_storage_that_is_emptied_counts_as_freed(tracker: StorageTracker) -> None:
    gathered = torch.empty(100)
    storage = gathered.untyped_storage()
    storage.resize_(0)
    assert tracker.log.live_bytes == 0
    storage.resize_(400)
    assert tracker.log.live_bytes == 400
    del storage, gathered
    assert tracker.log.live_bytes == 0
    assert torch.UntypedStorage.resize_ is not None


def test_peak_is_the_most_at_one_time_and_says_when(tracker: StorageTracker) -> None:
    enter(tracker, FORWARD, "first")
    kept = torch.empty(100)
    passing = torch.empty(1000)
    del passing
    enter(tracker, FORWARD, "second")
    more = torch.empty(200)
    peak = find_highest_point(build_memory_timeline(tracker.log, 0))
    assert peak.total_bytes == 4400
    assert peak.moment.describe() == "forward of first, microbatch 0"
    assert peak.by_category[ACTIVATIONS] == 400
    assert peak.by_category[OTHER] == 4000
    del kept, more


def test_categories_of_a_training_step(tracker: StorageTracker) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    tracker.mark(model.parameters(), PARAMETERS)
    track_parts(model, tracker)
    enter(tracker, FORWARD)
    outputs = model(torch.ones(32, 8))
    tracker.enter_part(LOSS)
    loss = outputs.square().sum()
    enter(tracker, BACKWARD)
    loss.backward()
    tracker.mark((parameter.grad for parameter in model.parameters()), GRADIENTS)
    by_category = build_memory_timeline(tracker.log, 0)[-1].by_category
    num_params = 8 * 16 + 16 + 16 * 4 + 4
    assert by_category[PARAMETERS] == by_category[GRADIENTS] == 4 * num_params
    in_loss = max(
        (point for point in build_memory_timeline(tracker.log, 0) if point.moment.part == LOSS),
        key=lambda point: point.total_bytes,
    )
    assert in_loss.by_category[LOSS_CATEGORY] >= 4 * 32 * 4
    # What ReLU and the second layer keep is one tensor.
    assert by_category[ACTIVATIONS] >= 4 * 32 * 16
    backward_of = [
        moment.part for moment in tracker.log.moments.moments if moment.phase == BACKWARD
    ]
    assert [part for part in backward_of if part] == ["2", "1", "0"]


def test_copies_of_weights_in_another_type_are_communication(tracker: StorageTracker) -> None:
    weight = nn.Parameter(torch.ones(64))
    tracker.mark([weight], PARAMETERS)
    enter(tracker, FORWARD, "layer")
    cast = weight.to(torch.bfloat16)
    by_category = build_memory_timeline(tracker.log, 0)[-1].by_category
    assert by_category[COMMUNICATION] == 128
    del cast


def test_a_number_that_nobody_knows_is_refused_with_the_line_that_wants_it() -> None:
    with FakeTensorMode(), StorageTracker(StorageLog(), is_dry=True):
        scores = torch.ones(4)
        with pytest.raises(LayoutError, match=r"test_dry_run_tracker.py:\d+ .*\(item\)"):
            scores.max().item()
        with pytest.raises(LayoutError, match=r"\(nonzero\)"):
            scores.nonzero()
        with pytest.raises(LayoutError, match="a dry run has no numbers"):
            bool((scores > 0).all())


def test_real_tensors_are_read_as_they_are() -> None:
    state, same = torch.get_rng_state(), torch.get_rng_state()
    with FakeTensorMode(allow_non_fake_inputs=True), StorageTracker(StorageLog(), is_dry=True):
        assert torch.equal(state, same)
