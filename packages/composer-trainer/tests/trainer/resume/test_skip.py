"""Tests of skipping batches up to the position of a resumed run."""

from __future__ import annotations

import pytest
from resumed_runs import (
    Run,
    Samples,
    batches,
    batches_of,
)
from torch.utils.data import (
    DataLoader,
)


def test_skipped_samples_are_neither_loaded_nor_transformed(caplog: pytest.LogCaptureFixture) -> None:
    whole = Run(DataLoader(Samples(), 4, shuffle=True), "7ba").fit()
    data = Samples()
    Run(DataLoader(data, 4, shuffle=True)).load(whole.snapshots.taken[0]).fit()

    assert 5 * 4 == data.calls
    assert not caplog.records


def test_what_is_loaded_again_is_announced_with_the_way_out(caplog: pytest.LogCaptureFixture) -> None:
    whole = Run(batches(), "7ba").fit()
    Run(batches()).load(whole.snapshots.taken[0]).fit()

    assert ["Loading 3 batches again to "] == [record.getMessage()[:27] for record in caplog.records]
    assert "`spin_dataloaders=False`" in caplog.text


def test_with_another_batch_size_workers_skip_whole_batches_and_say_what_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = Run(batches_of(4), "1ba").fit()
    resumed = Run(DataLoader(Samples(), 3, num_workers=1), max_duration="1ep").load(whole.snapshots.taken[0]).fit()

    assert [list(range(6, 16))] == resumed.journal.samples
    assert "2 samples are left out" in caplog.text
