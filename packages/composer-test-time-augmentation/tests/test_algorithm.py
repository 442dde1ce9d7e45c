"""`TestTimeAugmentation` at its events, with the engine and the Trainer."""

from __future__ import annotations

import copy
from collections import UserDict, namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.algorithms.test_time_augmentation import TestTimeAugmentation, average_views
from composer.core import REPLACES_MODEL, Algorithm, Engine, Evaluator, Event, Placement, State
from composer.loggers import Logger
from composer.models import ComposerModel
from composer.testing import SimpleModel, deep_compare, run_on_ranks
from composer.utils import dist

IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 0, 1])
EVENTS = [("eval_before_forward", "eval_after_forward"), ("predict_before_forward", "predict_after_forward")]


class Collected:
    """A metric that keeps the outputs and targets."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.outputs: list[torch.Tensor] = []
        self.targets: list[torch.Tensor] = []

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.outputs.append(outputs)
        self.targets.append(targets)

    def compute(self) -> torch.Tensor:
        return torch.cat(self.outputs).double().sum()


class Classifier(ComposerModel):
    """Depends on the position of every pixel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Tanh(), torch.nn.Flatten())
        self.head = torch.nn.Linear(144, 4)
        self.metric = Collected()

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.net(images))
        return result

    def forward(self, batch: Any) -> torch.Tensor:
        return self.logits(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, batch[1])

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {} if is_train else {"Collected": self.metric}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(outputs, batch[1])


def loader(batch_size: int = 6) -> DataLoader[Any]:
    return DataLoader(TensorDataset(IMAGES, LABELS), batch_size=batch_size)


def trainer_of(*algorithms: Algorithm, **arguments: Any) -> Trainer:
    model = Classifier()
    arguments = {"eval_dataloader": loader(), "precision": "fp32", "train_dataloader": loader(3), **arguments}
    return Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=list(algorithms),
        max_duration="2ba",
        progress_bar=False,
        device="cpu",
        seed=1,
        **arguments,
    )


def expected_of(trainer: Trainer, level: int = 2) -> torch.Tensor:
    model: Any = trainer.state.model
    with torch.no_grad():
        return average_views(getattr(model, "module", model).logits, IMAGES, level)


def seen_by(trainer: Trainer) -> Collected:
    metric: Any = trainer.state.eval_metrics["eval"]["Collected"]
    return metric  # type: ignore[no-any-return]


# ---- evaluation and prediction ----


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("size", [None, 4])
def test_metrics_get_the_mean_of_the_views_also_of_microbatches(level: int, size: int | None) -> None:
    evaluator = Evaluator(label="eval", dataloader=loader(), device_eval_microbatch_size=size)
    trainer = trainer_of(TestTimeAugmentation(level), eval_dataloader=evaluator)
    trainer.eval()
    metric = seen_by(trainer)

    assert (1 if size is None else 2) == len(metric.outputs)
    torch.testing.assert_close(expected_of(trainer, level), torch.cat(metric.outputs))
    assert torch.equal(LABELS, torch.cat(metric.targets))
    assert (level > 0) != torch.allclose(expected_of(trainer, 0), torch.cat(metric.outputs), atol=1e-4)


def test_predictions_are_those_of_the_views() -> None:
    trainer = trainer_of(TestTimeAugmentation())
    outputs = torch.cat(trainer.predict(loader(4)))

    torch.testing.assert_close(expected_of(trainer), outputs)


def test_the_views_run_in_the_precision_of_the_run_without_gradients() -> None:
    trainer = trainer_of(TestTimeAugmentation(), precision="amp_bf16")
    trainer.eval()
    (outputs,) = seen_by(trainer).outputs
    with torch.autocast("cpu", torch.bfloat16):
        expected = expected_of(trainer)

    assert torch.bfloat16 is expected.dtype is outputs.dtype
    assert not outputs.requires_grad
    torch.testing.assert_close(expected, outputs, rtol=0.01, atol=0.01)


def test_an_evaluation_within_training_changes_nothing_in_training() -> None:
    weights = []
    for algorithms in ((), (TestTimeAugmentation(),)):
        trainer = trainer_of(*algorithms, eval_interval="1ba")
        trainer.fit()
        weights.append(trainer.state.model.state_dict())
        if algorithms:
            torch.testing.assert_close(expected_of(trainer), torch.cat(seen_by(trainer).outputs))

    deep_compare(*weights)


def test_a_compiled_model_is_evaluated_in_one_graph_of_all_views() -> None:
    shapes: list[Any] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        shapes.append([len(value) for value in inputs if isinstance(value, torch.Tensor) and value.dim() == 4][-1])
        return graph.forward

    trainer = trainer_of(TestTimeAugmentation(), compile_config={"backend": backend})
    trainer.eval()

    assert [36] == shapes
    torch.testing.assert_close(expected_of(trainer), torch.cat(seen_by(trainer).outputs))
    torch.compiler.reset()


def _evaluate_part() -> tuple[torch.Tensor, torch.Tensor]:
    data = TensorDataset(IMAGES, LABELS)
    part = DataLoader(data, batch_size=2, sampler=dist.get_sampler(data))
    trainer = trainer_of(TestTimeAugmentation(), train_dataloader=part, eval_dataloader=part)
    trainer.eval()
    return torch.cat(seen_by(trainer).outputs), expected_of(trainer)[dist.get_global_rank() :: 2]


def test_each_of_two_ranks_evaluates_its_images() -> None:
    for outputs, expected in run_on_ranks(_evaluate_part, 2):
        torch.testing.assert_close(expected, outputs)


# ---- batches and outputs of every form ----


def prepare(batch: Any, algorithm: Algorithm | None = None) -> tuple[State, Engine]:
    algorithm = algorithm or TestTimeAugmentation(level=1)
    state = State(model=SimpleModel(), max_duration="1ba", dataloader=[batch], algorithms=algorithm)
    state.batch = batch
    return state, Engine(state)


Pair = namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize(("before", "after"), EVENTS)
@pytest.mark.parametrize(
    ("batch", "key"),
    [
        ((IMAGES, LABELS), 0),
        ([IMAGES, LABELS], 0),
        ({"x": IMAGES, "y": LABELS}, "x"),
        (UserDict(x=IMAGES, y=LABELS), "x"),
        (Pair(IMAGES, LABELS), "x"),
        ({"x": IMAGES, "y": {"inner": (LABELS,)}, "names": list("abcdef"), "weights": torch.ones(4), "n": 3}, "x"),
        (SimpleNamespace(x=IMAGES), "x"),
        (IMAGES, (lambda batch: batch, lambda batch, value: value)),
    ],
)
def test_the_batch_has_a_row_for_every_view_and_is_restored(batch: Any, key: Any, before: str, after: str) -> None:
    original = copy.deepcopy(batch)
    state, engine = prepare(batch, TestTimeAugmentation(level=1, input_key=key))
    engine.run_event(before)
    views = state.batch_get_item(key)

    assert torch.equal(torch.cat([IMAGES, IMAGES.flip(3)]), views)
    assert type(batch) is type(state.batch)
    if not isinstance(batch, (torch.Tensor, SimpleNamespace)):
        repeated = state.batch_get_item("y" if key == "x" else 1)
        repeated = repeated["inner"][0] if isinstance(repeated, dict) else repeated
        assert torch.equal(torch.cat([LABELS, LABELS]), repeated)
    if isinstance(batch, dict) and "n" in batch:
        assert ([*"abcdefabcdef"], 4, 3) == (state.batch["names"], len(state.batch["weights"]), state.batch["n"])
    state.outputs = torch.arange(24.0).view(12, 2)
    engine.run_event(after)

    assert batch is state.batch
    if isinstance(batch, SimpleNamespace):
        assert torch.equal(original.x, batch.x)
    else:
        deep_compare(original, batch)
    assert torch.equal(torch.arange(12.0).view(6, 2) + 6, state.outputs)


LOGITS = torch.arange(24.0).view(12, 2)
MEAN = torch.arange(12.0).view(6, 2) + 6


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ({"logits": LOGITS, "loss": torch.tensor(1.0)}, {"logits": MEAN, "loss": torch.tensor(1.0)}),
        ({"logits": LOGITS, "hidden": (LOGITS + 1,)}, {"logits": MEAN, "hidden": (LOGITS[:6] + 1,)}),
        ((torch.tensor(1.0), LOGITS), (torch.tensor(1.0), MEAN)),
        ([LOGITS, torch.arange(12)], [MEAN, torch.arange(6)]),
    ],
)
def test_the_mean_takes_the_place_of_the_logits(outputs: Any, expected: Any) -> None:
    state, engine = prepare((IMAGES, LABELS))
    engine.run_event("eval_before_forward")
    state.outputs = outputs
    engine.run_event("eval_after_forward")

    deep_compare(expected, state.outputs)


def test_half_precision_is_averaged_in_float32() -> None:
    """64 + 0.375 + 4 * 0.1875 = 65.125; in bfloat16, where 64.5 follows 64, each step would be rounded to 64.5."""
    state, engine = prepare((IMAGES[:1], LABELS[:1]), TestTimeAugmentation())
    engine.run_event("eval_before_forward")
    state.outputs = torch.tensor([[256.0]] + 5 * [[1.5]], dtype=torch.bfloat16)
    engine.run_event("eval_after_forward")

    assert torch.equal(torch.tensor([[65.0]], dtype=torch.bfloat16), state.outputs)


def test_an_object_with_logits_keeps_its_class() -> None:
    state, engine = prepare((IMAGES, LABELS))
    engine.run_event("eval_before_forward")
    state.outputs = outputs = SimpleNamespace(logits=LOGITS, loss=None)
    engine.run_event("eval_after_forward")

    assert torch.equal(MEAN, state.outputs.logits)
    assert torch.equal(LOGITS, outputs.logits)


def test_an_interrupted_forward_pass_leaves_nothing_behind() -> None:
    """After a lack of memory, smaller parts of the batch are evaluated."""
    state, engine = prepare((IMAGES, LABELS))
    engine.run_event("eval_before_forward")
    state.batch = (IMAGES[:3], LABELS[:3])
    engine.run_event("eval_before_forward")

    assert 6 == len(state.batch[0])
    state.outputs = LOGITS[:6]
    engine.run_event("eval_after_forward")
    assert 3 == len(state.outputs) == len(state.batch[0])


def test_only_evaluation_and_prediction_are_changed() -> None:
    assert {"EVAL", "PREDICT"} == {event.name.partition("_")[0] for event in TestTimeAugmentation.events}
    state, engine = prepare((IMAGES, LABELS), TestTimeAugmentation(level=0))
    engine.run_event("eval_before_forward")

    assert IMAGES is state.batch[0]


class Replaced(Algorithm):
    """A method whose model has no logits."""

    events = frozenset({Event.INIT})
    placement = Placement(provides={REPLACES_MODEL})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Do nothing."""


def test_what_cannot_be_averaged_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`input_key` must be the position of the images, one tensor, got a list"):
        prepare(([IMAGES], LABELS))[1].run_event("eval_before_forward")
    with pytest.raises(ValueError, match=r"must have shape \(N, C, H, W\).*got \(6,\)"):
        prepare((LABELS, LABELS))[1].run_event("eval_before_forward")
    state, engine = prepare((IMAGES, LABELS))
    engine.run_event("eval_before_forward")
    state.outputs = IMAGES
    with pytest.raises(ValueError, match=r"needs logits of shape .* \(12, classes\), got \(6, 3, 8, 8\)"):
        engine.run_event("eval_after_forward")
    state = State(model=SimpleModel(), algorithms=[TestTimeAugmentation(), Replaced()])
    with pytest.raises(ValueError, match=r"TestTimeAugmentation.*Replaced|Replaced.*TestTimeAugmentation"):
        Engine(state).run_event("init")


def test_wrong_arguments_are_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"`level` must be 0, 1 or 2, got -1"):
        TestTimeAugmentation(level=-1)
    with pytest.raises(TypeError, match=r"`shift` must be an integer, got 0.5"):
        TestTimeAugmentation(shift=0.5)  # type: ignore[arg-type]
