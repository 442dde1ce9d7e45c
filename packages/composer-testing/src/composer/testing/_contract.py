"""Tests that every algorithm must pass; the tests of its package subclass them."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from composer.core import Algorithm, Engine, Event, Placement, Precision, State
from composer.loggers import Logger
from composer.models import ComposerModel
from composer.testing._compare import deep_compare
from composer.testing._models import SimpleConvModel, _Classifier
from composer.testing._processes import run_on_ranks
from composer.utils import needs_closure
from composer.utils.reproducibility import get_rng_state, load_rng_state

_BATCHES = 4


class AlgorithmContract:
    """Tests that every algorithm must pass.

    The tests of a package subclass this and define how to make the algorithm::

        class TestMixUp(AlgorithmContract):
            def make(self) -> MixUp:
                return MixUp(alpha=0.2)

    A subclass may override `make_model`, `make_batches` and `make_dataloader` if the algorithm needs others. A `test_*`
    method may only be overridden if it is marked `xfail(reason=..., strict=True)`.

    Attributes:
        microbatch_reason: The reason why several microbatches do not equal one batch; "" if they do. The reason must be
            part of the class docstring of the algorithm, where users look for it.
        tolerance: The allowed difference between one batch and its microbatches, whose gradients are added in another
            order.
    """

    microbatch_reason: ClassVar[str] = ""
    tolerance: ClassVar[float] = 1e-10

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, test in vars(cls).items():
            marks = [mark.kwargs for mark in getattr(test, "pytestmark", []) if mark.name == "xfail"]
            is_excused = any(kwargs.get("strict") and kwargs.get("reason") for kwargs in marks)
            if name.startswith("test_") and hasattr(super(cls, cls), name) and not is_excused:
                raise TypeError(
                    f"`{cls.__name__}.{name}` replaces a test of the contract. Mark it "
                    f"`@pytest.mark.xfail(reason=..., strict=True)`, or give your own test another name."
                )

    def make(self) -> Algorithm:
        """Return a new algorithm to test."""
        raise TypeError(f"`{type(self).__name__}` must override `make`.")

    def make_model(self) -> ComposerModel:
        """Return a model for the algorithm, with weights from the global generator of torch."""
        return SimpleConvModel()

    def make_batches(self) -> Sequence[Any]:
        """Return four batches of equal shape for the model: pairs of floating inputs and integer targets, or dicts."""
        generator = torch.Generator().manual_seed(7)
        return [
            (torch.randn(8, 3, 16, 16, generator=generator), torch.randint(0, 2, (8,), generator=generator))
            for _ in range(_BATCHES)
        ]

    def make_dataloader(self) -> Iterable[Any]:
        """Return the training dataloader of the state: the batches, or a dataloader with a dataset if required."""
        return self.make_batches()

    # ---- the tests ----

    def test_the_entry_point_is_this_class(self) -> None:
        cls = type(self.make())
        registered = entry_points(group="composer.algorithms", name=cls.__name__)

        assert [point.load() for point in registered] == [cls], (
            f"`{cls.__name__}` must be registered by its package. Add to its pyproject.toml "
            f'[project.entry-points."composer.algorithms"] {cls.__name__} = "{cls.__module__}:{cls.__name__}" and '
            f"install it. If your project has no package for it, override this test with one that is marked "
            f"`@pytest.mark.xfail(reason=..., strict=True)`."
        )

    def test_it_acts_only_at_the_events_it_names(self) -> None:
        algorithm = self.make()
        state = self._state(algorithm, torch.float64)
        named = algorithm.events

        name = type(algorithm).__name__
        are_events = isinstance(named, (set, frozenset)) and all(isinstance(event, Event) for event in named)
        assert are_events, (
            f"`{name}.events` must be a set of the events at which it acts, got {named!r}. Set for example "
            f"`events = frozenset({{Event.BATCH_END}})`, so that `match` is not called at other events."
        )
        others = [event for event in Event if event not in (named or ()) and algorithm.match(event, state)]
        assert not others, (
            f"`{name}.match` must return False at events that are not in `events`, but returns True at {others}."
        )

    def test_its_placement_is_declared(self) -> None:
        placement = self.make().placement

        assert isinstance(placement, Placement), f"`placement` must be a `Placement`, got {placement!r}."

    def test_its_repr_is_its_constructor_call(self) -> None:
        algorithm = self.make()
        cls, text = type(algorithm), repr(algorithm)
        parameters = inspect.signature(cls).parameters.values()
        named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        missing = [name for name in named if f"{name}=" not in text]
        is_call = "0x" not in text and text.startswith((f"{cls.__name__}(", f"{cls.__qualname__}("))

        assert (is_call, missing) == (True, []), (
            f"`repr` of `{cls.__name__}` must be its constructor call with all of {named}, got {text!r}. Store each "
            f"argument in an attribute of the same name (`self.x = x`), which `Algorithm.__repr__` reads, or define "
            f"`__repr__`. Checkpoints are loaded with it."
        )
        assert repr(self.make()) == text, (
            f"`repr` of `{cls.__name__}` must be the same for equal arguments, got {text!r} and {self.make()!r}."
        )

    def test_it_does_not_write_into_the_batches_it_is_given(self) -> None:
        batches = self.make_batches()
        expected = copy.deepcopy(batches)

        train_by_hand(self._state(self.make(), torch.float32), batches)

        deep_compare(expected, batches)

    def test_it_keeps_dtype_and_device(self) -> None:
        self._check_kept("cpu")

    def test_on_a_gpu_it_keeps_dtype_and_device(self) -> None:
        _need_gpu()
        self._check_kept("cuda")

    def test_the_same_seed_gives_the_same_result(self) -> None:
        self._check_seeded("cpu")

    def test_on_a_gpu_the_same_seed_gives_the_same_result(self) -> None:
        _need_gpu()
        self._check_seeded("cuda")

    def test_a_resumed_run_continues_identically(self) -> None:
        self._check_resumed("cpu")

    def test_on_a_gpu_a_resumed_run_continues_identically(self) -> None:
        _need_gpu()
        self._check_resumed("cuda")

    def test_microbatches_equal_one_batch_or_the_docs_say_why_not(self) -> None:
        if self.microbatch_reason:
            doc = " ".join((type(self.make()).__doc__ or "").split())
            assert " ".join(self.microbatch_reason.split()) in doc, (
                f"`microbatch_reason` must be in the docstring of `{type(self.make()).__name__}`, where users look "
                f"for it, got {self.microbatch_reason!r}."
            )
            return
        one = self._trained(self.make_batches())
        split = self._trained(self.make_batches(), microbatches=2)

        deep_compare(one.model.state_dict(), split.model.state_dict(), atol=self.tolerance, rtol=self.tolerance)

    def test_any_label_may_be_the_one_that_the_loss_ignores(self) -> None:
        pairs = [batch for batch in self.make_batches() if isinstance(batch, tuple) and len(batch) == 2]
        batches = [(x, y) for x, y in pairs if y.dim() == 1 and not y.is_floating_point()]
        expected, found = (self._trained_with_ignored(batches, label) for label in (-100, 255))

        name = type(self.make()).__name__
        try:
            deep_compare(expected, found, atol=1e-10, rtol=1e-10)
        except AssertionError as error:
            raise AssertionError(
                f"`{name}` must treat the `ignore_index` of the loss as a label without a class, which is 255 here: "
                f"read it with `composer.loss.utils.ignored_label(state.model)`. The first difference: {error}"
            ) from None

    def test_two_optimizers_equal_one_with_two_groups(self) -> None:
        def trained(several: bool) -> Any:
            state = self._state(self.make(), torch.float64)
            parameters = list(state.model.parameters())
            halves = [parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]]
            groups = [[{"params": half}] for half in halves] if several else [[{"params": half} for half in halves]]
            state.optimizers = [torch.optim.SGD(group, lr=0.05, momentum=0.9) for group in groups]
            try:
                train_by_hand(state, _cast(self.make_batches(), torch.float64))
            except RuntimeError as error:
                if "must have one parameter group" not in str(error):
                    raise
                return str(error)  # surgery cannot choose between groups, nor between optimizers
            return state.model.state_dict()

        deep_compare(trained(several=False), trained(several=True))

    def test_a_step_that_a_scaler_skips_moves_no_weight(self) -> None:
        """Check weights only: layers may measure statistics in the passes of a step that is skipped."""
        state = self._state(self.make(), torch.float32)
        state.precision = Precision.AMP_FP16
        first, *batches = _cast(self.make_batches(), torch.float32)
        engine = _started(state)
        engine.run_event("fit_start")
        engine.run_event("epoch_start")
        for batch in (first, *batches):
            before = {name: weight.detach().clone() for name, weight in state.model.named_parameters()}
            _step(state, engine, batch, is_skipped=batch is not first)
            for name, weight in state.model.named_parameters() if batch is not first else ():
                assert torch.equal(before[name], weight), (
                    f"`{type(self.make()).__name__}` must leave {name!r} as it was before a step of fp16 that the "
                    f"scaler skips, since gradients overflowed: do not move weights that the optimizer did not move."
                )

    def test_frozen_weights_stay(self) -> None:
        """Train a part of the weights, as with adapters beside a frozen model."""
        state = self._state(self.make(), torch.float64)
        *frozen, _, _ = state.model.named_parameters()
        for _, weight in frozen:
            weight.requires_grad_(False)
        before = {name: weight.detach().clone() for name, weight in frozen}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it may say that it leaves frozen layers as they are
            try:
                train_by_hand(state, _cast(self.make_batches(), torch.float64))
            except ValueError as error:
                if "frozen" not in str(error):
                    raise
                return  # it is refused

        for name, weight in state.model.named_parameters():
            kept = before.get(name)
            is_same = kept is None or kept.shape != weight.shape or torch.equal(kept, weight)
            assert is_same, f"`{type(self.make()).__name__}` must not change {name!r}, whose `requires_grad` is False."

    def test_ranks_agree(self) -> None:
        ranks = run_on_ranks(_train_on_rank, 2, type(self))

        try:
            deep_compare(ranks[0], ranks[1])
        except AssertionError as error:
            name = type(self.make()).__name__
            raise AssertionError(
                f"`{name}` must leave the same weights on all ranks of `DistributedDataParallel`, which only averages "
                f"gradients: ranks have different batches and random numbers. Where it changes weights by these, use "
                f"the values of rank 0 (`composer.utils.dist.broadcast`) or a mean (`dist.all_reduce`); replace layers "
                f"at `Event.INIT`, before the model is wrapped. The first difference: {error}"
            ) from None

    # ---- helpers ----

    def _check_kept(self, device: str) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            state = self._state(self.make(), dtype, device)
            seen: list[torch.Tensor] = []

            train_by_hand(state, _cast(self.make_batches(), dtype, device), seen)

            assert {tensor.dtype for tensor in seen} <= {dtype}, f"a batch of {dtype} must keep its dtype"
            assert {tensor.device.type for tensor in seen} <= {device}, "a batch must stay on its device"
            bad = [name for name, p in state.model.named_parameters() if not torch.isfinite(p).all()]
            assert not bad, f"training in {dtype} must keep parameters finite, but these are not: {bad}"

    def _check_seeded(self, device: str) -> None:
        first, second = (self._trained(self.make_batches(), device=device) for _ in range(2))

        _compare(first.model.state_dict(), second.model.state_dict(), device)

    def _check_resumed(self, device: str) -> None:
        batches = self.make_batches()
        expected = self._trained(batches, device=device)

        begun = self._trained(batches[: _BATCHES // 2], device=device)
        file, rng = io.BytesIO(), get_rng_state()
        torch.save(begun.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, map_location="cpu", weights_only=False)  # on the host, as from a checkpoint
        resumed = self._state(self.make(), torch.float64, device)
        engine = _started(resumed)
        resumed.load_state_dict(saved)
        load_rng_state(rng)
        _steps(resumed, engine, _cast(batches[_BATCHES // 2 :], torch.float64, device))

        _compare(expected.model.state_dict(), resumed.model.state_dict(), device)
        _compare(expected.algorithms[0].state_dict(), resumed.algorithms[0].state_dict(), device)

    def _state(self, algorithm: Algorithm, dtype: torch.dtype, device: str = "cpu") -> State:
        torch.manual_seed(11)
        model = self.make_model().to(dtype).to(device)
        return State(
            model=model,
            max_duration=f"{_BATCHES}ba",
            rank_zero_seed=0,
            dataloader=self.make_dataloader(),
            optimizers=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            algorithms=algorithm,
            device="gpu" if device == "cuda" else device,
        )

    def _trained_with_ignored(self, batches: Sequence[Any], label: int) -> Any:
        """Train with a loss whose `ignore_index` is `label`, which every third target has; return the weights."""
        state = self._state(self.make(), torch.float64)
        model = state.model
        if isinstance(model, _Classifier):
            model.loss_fn = partial(torch.nn.functional.cross_entropy, ignore_index=label)
            marked = [(x, torch.where(torch.arange(len(y)) % 3 == 0, label, y)) for x, y in batches]
            train_by_hand(state, _cast(marked, torch.float64))
        return model.state_dict()

    def _trained(self, batches: Iterable[Any], microbatches: int = 1, device: str = "cpu") -> State:
        state = self._state(self.make(), torch.float64, device)
        train_by_hand(state, _cast(batches, torch.float64, device), microbatches=microbatches)
        return state


class DatasetTransformContract(AlgorithmContract):
    """Tests that every algorithm that adds a random transform to the training dataset at FIT_START must pass.

    In addition to `AlgorithmContract`: the transform is added once, only to the training data, and each worker of a
    dataloader uses different random numbers::

        class TestRandAugment(DatasetTransformContract):
            def make(self) -> RandAugment:
                return RandAugment(depth=1)

    A subclass may override `make_dataset` for transforms of something other than images.
    """

    def make_dataset(self) -> Dataset[Any]:
        """Return a dataset of eight equal examples, images of (3, 32, 40) bytes, with `transform = None`.

        Dataloaders must be able to collate the outputs of the transform.
        """
        return _Pictures()

    def make_dataloader(self) -> Iterable[Any]:
        """Return a dataloader of `make_dataset`."""
        return DataLoader(self.make_dataset())

    # ---- the tests ----

    def test_a_second_fit_adds_nothing(self) -> None:
        algorithm, dataset = self.make(), self.make_dataset()
        self._fit(DataLoader(dataset), algorithm)
        added: Any = dataset.transform  # type: ignore[attr-defined]
        self._fit(DataLoader(dataset), algorithm)

        name = type(algorithm).__name__
        assert added is not None, f"`{name}` must add a transform to the training dataset at FIT_START, but did not."
        assert dataset.transform is added, (  # type: ignore[attr-defined]
            f"`{name}` must add its transform once, but did so in the second fit too. Create it in `__init__`."
        )

    def test_another_data_set_in_the_second_fit_gets_the_transform_too(self) -> None:
        algorithm, first, second = self.make(), self.make_dataset(), self.make_dataset()
        self._fit(DataLoader(first), algorithm)
        self._fit(DataLoader(second), algorithm)

        assert first.transform is second.transform is not None  # type: ignore[attr-defined]

    def test_the_validation_part_of_a_split_keeps_its_examples(self) -> None:
        algorithm = self.make()
        train, validation = random_split(self.make_dataset(), [6, 2])
        for _ in range(2):
            self._fit(DataLoader(train), algorithm)

        assert train.dataset.transform is not None  # type: ignore[attr-defined]
        assert validation.dataset.transform is None, (  # type: ignore[attr-defined]
            f"`{type(algorithm).__name__}` must not change the examples of other subsets of the dataset. Use "
            f"`composer.algorithms.utils.add_training_transform`."
        )

    def test_a_loop_that_sets_only_the_active_loader_gets_the_transform_too(self) -> None:
        dataset = self.make_dataset()
        state = State(model=SimpleConvModel(), max_duration="1ep", algorithms=self.make())
        engine = Engine(state)
        engine.run_event("init")
        state.set_dataloader(DataLoader(dataset), "train")
        engine.run_event("fit_start")

        assert dataset.transform is not None  # type: ignore[attr-defined]

    def test_a_data_set_that_is_evaluated_too_is_refused(self) -> None:
        """Check INIT, and FIT_START, because an evaluator may be added in a later fit."""
        dataset = self.make_dataset()
        state = self._fit(DataLoader(dataset), self.make())
        spec = SimpleNamespace(dataloader=DataLoader(dataset))
        state.evaluators = [SimpleNamespace(label="test", dataloader=spec)]  # as an `Evaluator` of composer-loop

        for event in (Event.INIT, Event.FIT_START):
            error = _error_at(state, event)
            assert isinstance(error, ValueError), f"must raise a ValueError at {event.name}, got {error!r}."
            assert "'test'" in str(error), f"the message must name the evaluator 'test', got {error}"

    def test_a_loader_that_cannot_take_the_transform_is_refused_at_once(self) -> None:
        for loader in ([torch.zeros(2)], DataLoader(TensorDataset(torch.zeros(2)))):
            state = State(model=SimpleConvModel(), max_duration="1ep", dataloader=loader, algorithms=self.make())
            for event in (Event.INIT, Event.FIT_START):
                error = _error_at(state, event)
                assert isinstance(error, TypeError), f"must raise a TypeError at {event.name}, got {error!r}."

    def test_masks_which_a_transform_of_images_does_not_change_are_refused(self) -> None:
        state = self._fit(DataLoader(self.make_dataset()), self.make())
        images = torch.zeros(2, 3, 8, 8)
        for target in (torch.zeros(2, 8, 8), torch.zeros(2, 5, 8, 8), torch.zeros(2, 10), images):
            state.batch = images, target
            error = _error_at(state, Event.AFTER_DATALOADER)
            is_mask = target.dim() > 2 and target is not images

            assert isinstance(error, ValueError if is_mask else type(None)), (
                f"must raise a ValueError at AFTER_DATALOADER for a mask, and only then, got {error!r} for a target of "
                f"shape {tuple(target.shape)}. Call `composer.algorithms.utils.check_targets_stay`."
            )

    def test_each_worker_draws_its_own_in_every_epoch(self) -> None:
        for persistent in (False, True):
            loader = DataLoader(self.make_dataset(), batch_size=1, num_workers=2, persistent_workers=persistent)
            assert len(_examples(loader)) == 1  # workers start before the transform is there
            torch.manual_seed(1)
            self._fit(loader, self.make())
            seen = _examples(loader) | _examples(loader)

            # With the same random numbers in each worker or epoch, at most 8 of the 16 examples would differ.
            assert len(seen) > 8, f"16 examples must use different random numbers, got {len(seen)} different examples."

    def _fit(self, loader: Iterable[Any], algorithm: Algorithm) -> State:
        state = State(model=SimpleConvModel(), max_duration="1ep", dataloader=loader, algorithms=algorithm)
        Engine(state).run_event("fit_start")
        return state


class _Pictures(Dataset[Any]):
    transform: Any = None

    def __init__(self) -> None:
        self.picture = torch.randint(30, 220, (3, 32, 40), generator=torch.Generator().manual_seed(0)).to(torch.uint8)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.picture if self.transform is None else self.transform(self.picture)


def _examples(loader: Iterable[Any]) -> set[bytes]:
    """Return the different examples of an epoch."""
    return {pickle.dumps([t.tolist() for t in _tensors(batch)]) for batch in loader}


def _error_at(state: State, event: Event) -> Exception | None:
    try:
        Engine(state).run_event(event)
    except Exception as error:  # noqa: BLE001 - the caller compares its type
        return error
    return None


def train_by_hand(
    state: State, batches: Iterable[Any], seen: list[torch.Tensor] | None = None, microbatches: int = 1
) -> None:
    """Train in a plain loop that runs every event of a training step.

    Args:
        state: A state with a model, its optimizers, the first of which runs the passes, and the algorithms.
        batches: The batches, on the device of the model.
        seen: A list to which the floating tensors of every model input are appended.
        microbatches: The number of equal microbatches to split each batch into.
    """
    _steps(state, _started(state), batches, seen, microbatches)


def _started(state: State) -> Engine:
    engine = Engine(state, Logger(state))
    for event in ("init", "before_load", "after_load"):
        engine.run_event(event)
    torch.manual_seed(13)
    return engine


def _steps(
    state: State, engine: Engine, batches: Iterable[Any], seen: list[torch.Tensor] | None = None, microbatches: int = 1
) -> None:
    engine.run_event("fit_start")
    engine.run_event("epoch_start")
    for batch in batches:
        _step(state, engine, batch, seen, microbatches)
    engine.run_event("epoch_end")
    engine.run_event("fit_end")
    engine.close()


def _step(
    state: State,
    engine: Engine,
    batch: Any,
    seen: list[torch.Tensor] | None = None,
    microbatches: int = 1,
    is_skipped: bool = False,
) -> None:
    """Train on a batch; the optimizers do not step if a scaler skips it."""
    engine.run_event("before_dataloader")
    state.batch = batch
    engine.run_event("after_dataloader")
    engine.run_event("batch_start")
    first, *others = state.optimizers
    compute = partial(_compute_gradients, state, engine, seen, microbatches)
    if not is_skipped:
        first.step(closure=compute)  # type: ignore[arg-type]
        for optimizer in others:
            optimizer.step()
    elif needs_closure(first):

        def overflowing(**kwargs: Any) -> None:
            compute(**kwargs)

        first.step(closure=overflowing)  # type: ignore[arg-type]
    else:
        compute()
    state.previous_timestamp = state.timestamp
    state.timestamp = state.timestamp.to_next_batch(samples=8)
    engine.run_event("batch_end")
    engine.run_event("batch_checkpoint")


def _compute_gradients(
    state: State, engine: Engine, seen: list[torch.Tensor] | None, microbatches: int, **kwargs: Any
) -> torch.Tensor:
    """Compute the gradients of a batch: the closure of the optimizer step."""
    batch, total = state.batch, torch.zeros(())
    engine.run_event("before_train_batch")
    state.optimizers.zero_grad()
    for part in _split(batch, microbatches):
        state.batch = part
        engine.run_event("before_forward")
        if seen is not None:
            seen.extend(t for t in _tensors(state.batch) if t.is_floating_point() and t.dim() > 1)
        state.outputs = state.model(state.batch)
        engine.run_event("after_forward")
        engine.run_event("before_loss")
        model: Any = getattr(state.model, "module", state.model) if state.is_model_ddp else state.model
        state.loss = model.loss(state.outputs, state.batch)
        engine.run_event("after_loss")
        engine.run_event("before_backward")
        loss = state.loss / microbatches
        loss.backward()
        total = total + loss.detach()
        engine.run_event("after_backward")
    state.batch = batch
    engine.run_event("after_train_batch")
    return total


def _train_on_rank(contract: type[AlgorithmContract]) -> dict[str, Any]:
    """Train with DDP on this rank's half of every batch; return the weights."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    test = contract()
    state = test._state(test.make(), torch.float64)
    engine = _started(state)
    unused = any(algorithm.find_unused_parameters for algorithm in state.algorithms)
    state.model = DistributedDataParallel(state.model, find_unused_parameters=unused)
    torch.manual_seed(13 + dist.get_rank())
    _steps(state, engine, [_split(b, 2)[dist.get_rank()] for b in _cast(test.make_batches(), torch.float64)])
    weights: dict[str, Any] = {name: p.detach() for name, p in state.model.module.named_parameters()}
    return weights


def _split(batch: Any, parts: int) -> list[Any]:
    if isinstance(batch, torch.Tensor):
        return list(batch.chunk(parts))
    if isinstance(batch, dict):
        columns = {key: _split(value, parts) for key, value in batch.items()}
        return [{key: values[i] for key, values in columns.items()} for i in range(parts)]
    return list(zip(*(_split(item, parts) for item in batch), strict=True))


def _tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    parts = batch.values() if isinstance(batch, dict) else batch
    return [tensor for part in parts for tensor in _tensors(part)]


def _cast(batches: Any, dtype: torch.dtype, device: str = "cpu") -> Any:
    if isinstance(batches, torch.Tensor):
        return batches.to(device, dtype if batches.is_floating_point() else batches.dtype)
    if isinstance(batches, dict):
        return {key: _cast(value, dtype, device) for key, value in batches.items()}
    return type(batches)(_cast(item, dtype, device) for item in batches)


def _compare(expected: Any, found: Any, device: str) -> None:
    """Compare exactly; on a GPU with a tolerance, because some float64 sums vary in their order."""
    tolerance = 0.0 if device == "cpu" else 1e-10
    deep_compare(expected, found, atol=tolerance, rtol=tolerance)


def _need_gpu() -> None:
    if not torch.cuda.is_available():
        import pytest  # only tests need it

        pytest.skip("needs a CUDA device")
