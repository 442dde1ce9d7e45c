"""Tests of the position in the training data: a resumed run equals the uninterrupted one bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_runs import (
    EPOCHS,
    LOADERS,
    WITH_WORKERS,
    KeepsItsPlace,
    OwnGenerator,
    Run,
    Samples,
    all_globals,
    assert_same_end,
    batches,
    batches_of,
    generator,
)
from torch.utils.data import (
    DataLoader,
    Dataset,
)

from composer.core import State, Timestamp
from composer.loop.position import LoaderPosition
from composer.testing import SimpleModelWithDropout, deep_compare, run_on_ranks
from composer.trainer.metrics import TrainMetrics
from composer.utils import dist, reproducibility

WHEN = ("2ba", "4ba", "1ep", "7ba", "8ba", "2ep")


@pytest.mark.parametrize("name", LOADERS)
def test_a_resumed_run_equals_the_uninterrupted_one(name: str) -> None:
    untouched, whole = Run(LOADERS[name]()).fit(), Run(LOADERS[name](), *WHEN).fit()
    ends = reproducibility.get_rng_state()

    assert len(WHEN) == len(whole.snapshots.taken)
    assert_same_end(untouched, whole)  # a snapshot changes nothing
    for snapshot in whole.snapshots.taken:
        resumed = Run(LOADERS[name](), seed=99).load(snapshot).fit()
        assert_same_end(whole, resumed)
        deep_compare(ends, reproducibility.get_rng_state())


@pytest.mark.parametrize("name", WITH_WORKERS)
def test_augmentation_in_worker_processes_goes_on_where_it_was(name: str) -> None:
    whole = Run(WITH_WORKERS[name](), "2ba", "1ep", max_duration="2ep").fit()
    for snapshot in whole.snapshots.taken:
        assert_same_end(whole, Run(WITH_WORKERS[name](), seed=99, max_duration="2ep").load(snapshot).fit())


@pytest.mark.parametrize("name", ["global transform", "stream", "own state"])
def test_a_run_may_be_resumed_twice_in_one_epoch(name: str) -> None:
    whole = Run(LOADERS[name](), "5ba").fit()
    once = Run(LOADERS[name](), "6ba", seed=98).load(whole.snapshots.taken[0]).fit()
    at_once = once.snapshots.taken[0]
    twice = Run(LOADERS[name](), seed=99).load(at_once)
    deep_compare(twice.trainer._progress.loader._saved[0], twice.trainer._progress.loader.state_dict())  # type: ignore[index]

    assert_same_end(whole, twice.fit())


def test_microbatches_change_nothing_about_it() -> None:
    whole = Run(LOADERS["global transform"](), "6ba", device_train_microbatch_size=2).fit()
    resumed = Run(LOADERS["global transform"](), seed=99, device_train_microbatch_size=2)

    assert_same_end(whole, resumed.load(whole.snapshots.taken[0]).fit())


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_s_loader_resumes_by_its_own_state(workers: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        return torchdata.StatefulDataLoader(Samples(all_globals), 4, shuffle=True, num_workers=workers)

    when = ("3ba", "4ba", "1ep") if workers == 0 else ("3ba",)
    whole = Run(make(), *when, max_duration="2ep").fit()
    for snapshot in whole.snapshots.taken:
        resumed = Run(make(), max_duration="2ep").load(snapshot).fit()
        if workers == 0:
            assert_same_end(whole, resumed)
        assert whole.journal.samples[-1] == resumed.journal.samples[-1]


class SavesItsGenerator(Samples):
    """A dataset whose transform has a generator of its own, with a state."""

    def __init__(self) -> None:
        super().__init__(OwnGenerator())

    def state_dict(self) -> dict[str, Any]:
        assert isinstance(self.transform, OwnGenerator)
        return {"generator": self.transform.generator.bit_generator.state}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        assert isinstance(self.transform, OwnGenerator)
        self.transform.generator.bit_generator.state = saved["generator"]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
def test_a_dataset_keeps_a_generator_of_its_own_with_a_state() -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        return torchdata.StatefulDataLoader(SavesItsGenerator(), 4, shuffle=True)

    whole = Run(make(), "3ba", "4ba", "1ep", max_duration="2ep").fit()
    for snapshot in whole.snapshots.taken:
        assert_same_end(whole, Run(make(), max_duration="2ep").load(snapshot).fit())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves its files open
@pytest.mark.filterwarnings("ignore:.*without a length:UserWarning")
def test_shards_of_webdataset_have_epochs_and_resume(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "0.tar")) as shard:
        for i in range(16):
            shard.write({"__key__": f"{i:04d}", "x.pth": torch.tensor([float(i), 0.0]), "y.cls": i % 2})

    def make() -> Any:
        shards = webdataset.WebDataset(str(tmp_path / "0.tar"), shardshuffle=False)
        return DataLoader(shards.decode().to_tuple("x.pth", "y.cls"), batch_size=4)

    whole = Run(make(), "2ba", "1ep", "7ba").fit()
    assert whole.state.timestamp.batch == 4 * EPOCHS
    for snapshot in whole.snapshots.taken:
        assert_same_end(whole, Run(make(), seed=9).load(snapshot).fit())


def test_a_loader_with_its_own_state_draws_nothing_twice() -> None:
    whole = Run(KeepsItsPlace(), "6ba").fit()
    loader = KeepsItsPlace()
    Run(loader).load(whole.snapshots.taken[0]).fit()

    assert 6 == loader.drawn


def test_without_spinning_the_epoch_has_as_many_batches_but_starts_anew(caplog: pytest.LogCaptureFixture) -> None:
    whole = Run(DataLoader(Samples(all_globals), 4), "6ba").fit()
    resumed = Run(DataLoader(Samples(all_globals), 4), "7ba", seed=9).load(whole.snapshots.taken[0])
    resumed.trainer._progress.loader.spin = False
    resumed.fit()

    assert [list(range(8)), list(range(16))] == resumed.journal.samples
    assert whole.state.timestamp.batch == resumed.state.timestamp.batch
    assert whole.state.timestamp.epoch == resumed.state.timestamp.epoch
    twice = Run(DataLoader(Samples(all_globals), 4)).load(resumed.snapshots.taken[0]).fit()
    assert_same_end(resumed, twice)


@pytest.mark.parametrize(("size", "drop_last"), [(2, False), (3, True), (8, True), (16, False)])
def test_with_another_batch_size_no_sample_is_lost_or_trained_twice(size: int, drop_last: bool) -> None:
    def make(batch_size: int) -> Any:
        return DataLoader(Samples(size=20), batch_size, shuffle=True, drop_last=drop_last)

    whole = Run(make(4), "3ba").fit()
    resumed = Run(make(size), "4ba", seed=9, max_duration="2ep").load(whole.snapshots.taken[0]).fit()
    before, after = whole.journal.samples[0][:12], resumed.journal.samples[0]

    expected = 8 // size * size if drop_last else 8
    assert expected == len(after)
    assert whole.journal.samples[0][12 : 12 + expected] == after
    assert not set(before) & set(after)
    assert "2ep" == str(resumed.state.timestamp.epoch)
    if resumed.snapshots.taken and expected:
        again = Run(make(size), max_duration="2ep").load(resumed.snapshots.taken[0]).fit()
        assert_same_end(resumed, again)


def test_with_another_batch_size_a_run_in_batches_closes_the_epoch_at_its_end() -> None:
    def make(batch_size: int) -> Any:
        return DataLoader(Samples(), batch_size, shuffle=True)

    whole = Run(make(4), "2ba").fit()
    resumed = Run(make(2), max_duration="6ba").load(whole.snapshots.taken[0]).fit()

    now = resumed.state.timestamp
    assert (6, 1, 0) == (now.batch.value, now.epoch.value, now.batch_in_epoch.value)


def test_the_last_batch_s_metrics_are_logged_once_more_when_only_the_epoch_s_end_is_left() -> None:
    whole = Run(batches_of(4), "12ba").fit()
    resumed = Run(batches_of(4), seed=3).load(whole.snapshots.taken[0]).fit()
    logged = [(name, value) for _, name, value in resumed.journal.metrics if name.startswith("metrics/")]

    assert [whole.journal.metrics[-6][1:]] == logged
    assert not resumed.journal.batches
    assert f"{EPOCHS}ep" == str(resumed.state.timestamp.epoch)


@pytest.mark.parametrize("when", ["1ep", "6ba"])
def test_a_checkpoint_without_a_place_starts_the_loader_once_per_epoch(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Any:
        return DataLoader(Samples(), 4, shuffle=True, generator=generator())

    whole = Run(make(), when).fit()
    resumed = Run(make()).load(whole.snapshots.taken[0], "resumption").fit()

    assert_same_end(whole, resumed)
    assert "starting the loader 1 times" in caplog.text


def test_without_spinning_a_checkpoint_without_a_place_costs_nothing() -> None:
    whole, data = Run(batches_of(4), "6ba").fit(), Samples()
    resumed = Run(DataLoader(data, 4)).load(whole.snapshots.taken[0], "resumption")
    resumed.trainer._progress.loader.spin = False
    resumed.fit()

    assert 6 * 4 == data.calls
    assert whole.state.timestamp.batch == resumed.state.timestamp.batch


@pytest.mark.parametrize("saved", [[], {}, [None]])
def test_what_is_no_place_is_refused(saved: Any) -> None:
    with pytest.raises(TypeError, match=r"must be a list of one dict per rank.*load_ignore_keys"):
        Run(batches_of(4)).trainer._progress.loader.load_state_dict(saved, None)


class Streaming(Dataset[Any]):
    """Numbers its samples through the epoch, as streaming data sets do, and saves how far it was."""

    def __init__(self) -> None:
        self.first = 0

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([float(self.first + index), 0.0]), torch.tensor(index % 2)

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        return {"first": num_samples}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.first = saved["first"]


def test_a_data_set_that_resumes_itself_is_not_skipped_through() -> None:
    whole = Run(DataLoader(Streaming(), 4), "3ba", max_duration="1ep").fit()
    resumed = Run(DataLoader(Streaming(), 4), max_duration="1ep").load(whole.snapshots.taken[0]).fit()

    assert [[12, 13, 14, 15]] == resumed.journal.samples
    assert not resumed.state.dataset_resumption


def test_a_loader_s_own_state_is_used_whatever_spinning_says() -> None:
    whole = Run(KeepsItsPlace(), "6ba").fit()
    resumed = Run(KeepsItsPlace(), spin_dataloaders=False).load(whole.snapshots.taken[0]).fit()

    assert_same_end(whole, resumed)


def test_a_place_of_another_version_counts_as_none() -> None:
    whole = Run(batches_of(4), "1ep").fit()
    resumed = Run(batches_of(4)).load(whole.snapshots.taken[0])
    saved: Any = resumed.trainer._progress.loader._saved
    del saved[0]["position"]

    assert_same_end(whole, resumed.fit())


def test_what_an_earlier_release_saved_in_addition_is_ignored() -> None:
    whole = Run(LOADERS["own generator"](), "6ba").fit()
    resumed = Run(LOADERS["own generator"](), seed=9).load(whole.snapshots.taken[0])
    saved: Any = resumed.trainer._progress.loader._saved
    hidden = {"kind": "python", "state": (3, torch.zeros(625), None)}
    saved[0].update(first={"train": {"epoch": 0}}, number=0, ends_at=4, sample_in_epoch=8)
    saved[0]["generators"]["dataset.transform.generator"] = hidden

    assert_same_end(whole, resumed.fit())


def test_a_one_shot_iterable_loses_nothing_between_fits() -> None:
    parts = Run(iter(batches()), max_duration="1ba").fit().fit(duration="2ba")

    assert [list(range(12))] == parts.journal.samples


@pytest.mark.parametrize(("size", "workers"), [(12, 0), (16, 1), (40, 0)])
def test_another_loader_in_mid_epoch_starts_at_its_beginning(size: int, workers: int) -> None:
    run = Run(DataLoader(Samples(), 4, num_workers=workers), max_duration="3ba").fit()
    run.fit(train_dataloader=DataLoader(Samples(size=size), 4, num_workers=workers), duration="1ep")

    assert [[*range(12), *range(size)]] == run.journal.samples
    now = run.state.timestamp
    assert (1, 0, 3 + size // 4) == (now.epoch.value, now.batch_in_epoch.value, now.batch.value)
    run.fit(duration="1ep")
    assert list(range(size)) == run.journal.samples[1]


def test_the_same_loader_given_again_goes_on_where_it_was() -> None:
    loader = DataLoader(Samples(), 4)
    run = Run(loader, max_duration="1ba").fit().fit(train_dataloader=loader, duration="1ep")

    assert [list(range(16))] == run.journal.samples


@pytest.mark.parametrize(("subset", "then"), [(1, range(4)), (3, range(12)), (4, range(12, 16))])
def test_a_subset_that_the_epoch_has_had_already_begins_at_its_beginning(subset: int, then: range) -> None:
    run = Run(batches_of(4), max_duration="3ba").fit().fit(duration="1ep", train_subset_num_batches=subset)

    assert [[*range(12), *then]] == run.journal.samples
    assert "1ep" == str(run.state.timestamp.epoch)


def share(batch_size: int) -> tuple[State, LoaderPosition]:
    """This rank's part of 24 samples."""
    data = Samples(size=24)
    loader = DataLoader(data, batch_size, sampler=dist.get_sampler(data, shuffle=True, seed=1))
    state = State(model=torch.nn.Linear(1, 1), dataloader=loader)
    return state, LoaderPosition(state, TrainMetrics(state, SimpleModelWithDropout(), defer=False))


def begin_on_a_rank() -> tuple[list[int], dict[str, Any]]:
    """Two batches of two samples, and the place after them."""
    state, position = share(2)
    iterator, drawn = position.start(), []
    for _ in range(2):
        drawn += rows_of(next(iterator))
        state.timestamp = state.timestamp.to_next_batch(2 * dist.get_world_size())
    return drawn, position.state_dict()


def resume_on_a_rank(places: list[dict[str, Any]], batch_size: int) -> tuple[list[int], int | None]:
    """The rest of the epoch, and how many batches it will have had."""
    state, position = share(batch_size)
    state.timestamp = Timestamp(batch=2, batch_in_epoch=2)
    position.load_state_dict(places, None)
    assert position.begin()
    rest = position.resume()
    assert rest is not None
    return [row for batch in rest for row in rows_of(batch)], position.ends_at


def rows_of(batch: Any) -> list[int]:
    rows: list[int] = batch[0][:, 0].int().tolist()
    return rows


def on_two_ranks() -> tuple[Any, ...]:
    drawn, place = begin_on_a_rank()
    places = dist.all_gather_object(place)
    return drawn, places, resume_on_a_rank(places, 2), resume_on_a_rank(places, 4)


def test_ranks_go_on_with_what_no_rank_has_trained(caplog: pytest.LogCaptureFixture) -> None:
    (first, places, *resumed), (second, _, *others) = run_on_ranks(on_two_ranks, 2)
    done, uneven = (
        {*first, *second},
        {**places[0], "position": {**places[0]["position"], "world_size": 3, "samples": 3}},
    )
    for ends_at, (rest, end), (other, other_end) in zip((6, 4), resumed, others, strict=True):
        assert [ends_at, ends_at] == [end, other_end]
        assert sorted({*range(24)} - done) == sorted(rest + other)

    rest, end = resume_on_a_rank(places, 4)  # by one rank
    assert 6 == end
    assert sorted({*range(24)} - done) == sorted(rest)
    rest, _ = resume_on_a_rank([uneven], 3)
    assert 24 - 9 == len(rest)
    uneven["position"]["samples"], uneven["position"]["batches"] = None, 1
    assert 24 - 3 * 3 == len(resume_on_a_rank([uneven], 3)[0])
    assert "trained twice" not in caplog.text

    places[0]["position"]["samples"] = 3  # twice that over four: one is left
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_world_size", lambda: 4)
        patch.setattr(dist, "all_gather_object", lambda value: [value])
        resume_on_a_rank(places[:1], 2)
    assert "2 samples are trained twice" in caplog.text
