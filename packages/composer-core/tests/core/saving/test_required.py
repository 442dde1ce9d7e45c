"""Algorithms that a saved model cannot be loaded without are added before it is loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import composer.algorithms
from composer.core import REPLACES_CONVS, Algorithm, Engine, Event, Placement, State, _registry
from composer.loggers import Logger, LoggerDestination
from composer.testing import run_on_ranks


class Renamed(Algorithm):
    """Puts the layer of a model into a sequence, so that its weights are called otherwise."""

    events = frozenset({Event.INIT})
    placement = Placement(provides={REPLACES_CONVS})

    def __init__(self, scale: float = 1.0) -> None:
        if scale < 0:
            raise ValueError(f"`scale` must not be negative, got {scale!r}.")
        self.scale = scale

    @staticmethod
    def required_on_load() -> bool:
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        model: Any = state.model
        if self.scale == 13:
            raise RuntimeError("no layer to rename.")
        if isinstance(model.layer, torch.nn.Linear):
            model.layer = torch.nn.Sequential(model.layer)
        logger.log_hyperparameters({"renamed": 1})


class Late(Renamed):
    """Acts when training starts."""

    events = frozenset({Event.FIT_START})


class Watching(Algorithm):
    """Looks at the layers at INIT, so the ones that change them must come before."""

    events = frozenset({Event.INIT})
    placement = Placement(after={REPLACES_CONVS})

    def __init__(self) -> None:
        self.seen: list[str] = []

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        model: Any = state.model
        self.seen.append(type(model.layer).__name__)
        model.register_buffer("watched", torch.zeros(len(self.seen)), persistent=False)


class Alone(Algorithm):
    events = frozenset({Event.FIT_START})
    placement = Placement(excludes={REPLACES_CONVS})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        pass


class Model(torch.nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer: torch.nn.Module = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)
        return result


class Hyperparameters(LoggerDestination):
    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self.seen.update(hyperparameters)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = {cls.__name__: cls for cls in (Renamed, Late, Watching, Model)}
    points = {name: SimpleNamespace(load=lambda cls=cls: cls) for name, cls in classes.items()}
    monkeypatch.setattr(_registry, "points", lambda group: points if group == "composer.algorithms" else {})
    for name in classes:
        monkeypatch.delitem(vars(composer.algorithms), name, raising=False)


def make(*algorithms: Algorithm, seed: int = 0, **kwargs: Any) -> State:
    state = State(model=Model(seed), algorithms=algorithms, **kwargs)
    state.optimizers = torch.optim.SGD(state.model.parameters(), lr=0.1, momentum=0.9)  # type: ignore[assignment]
    Engine(state).run_event("init")
    return state


def saved(*algorithms: Algorithm) -> dict[str, Any]:
    state = make(*algorithms)
    state.model(torch.ones(1, 2)).sum().backward()
    state.optimizers.step()
    return state.state_dict()


def test_it_is_added_and_applied_before_the_model_is_loaded() -> None:
    expected = saved(Renamed(2.0))
    state = make(seed=1, callbacks=Hyperparameters())
    expected["callbacks"] = {"Hyperparameters": {}}
    with pytest.warns(UserWarning, match=r"^Automatically adding required_on_load algorithm `Renamed\(scale=2.0\)`"):
        state.load_state_dict(expected, strict=True)

    assert ["Renamed(scale=2.0)"] == [repr(algorithm) for algorithm in state.algorithms]
    assert torch.equal(expected["model"]["layer.0.weight"], state.model.layer[0].weight)  # type: ignore[index]
    momentum = expected["optimizers"]["SGD"]["state"]["layer.0.bias"]["momentum_buffer"]
    assert torch.equal(momentum, state.optimizers[0].state[state.model.layer[0].bias]["momentum_buffer"])  # type: ignore[index]
    assert {"renamed": 1} == state.callbacks[0].seen  # type: ignore[attr-defined]


def test_it_is_added_when_only_the_model_is_loaded() -> None:
    state = make(seed=1)
    with pytest.warns(UserWarning, match="Automatically adding required_on_load"):
        state.load_model_state(saved(Renamed()), Logger(state), strict=True)

    assert "layer.0.weight" in state.model.state_dict()


def test_an_engine_runs_what_was_added() -> None:
    state = make(seed=1, dataloader=[1], max_duration="1ba")
    engine = Engine(state)
    with pytest.warns(UserWarning, match="required_on_load algorithm `Late"):
        state.load_model_state(saved(Late()))
    assert "layer.weight" in state.model.state_dict()  # it does not act at INIT
    assert ["Late(scale=1.0)/Event.FIT_START"] == list(engine.run_event("fit_start"))


def test_one_that_is_there_already_is_kept() -> None:
    state = make(Renamed(2.0), seed=1)
    state.load_state_dict(saved(Renamed(2.0)), strict=True)
    written_otherwise = saved(Renamed(2.0))
    written_otherwise["algorithms"] = [("Renamed", {"repr": "Renamed( 2.0 )"})]
    state.load_model_state(written_otherwise)

    assert len(state.algorithms) == 1


@pytest.mark.parametrize("text", ["Renamed(scale=2.0)", "Renamed(scale=act_fn)"])
def test_one_with_other_arguments_is_kept_with_a_warning(text: str) -> None:
    state, other = make(Renamed(3.0), seed=1), saved(Renamed(2.0))
    other["algorithms"] = [("Renamed", {"repr": text})]
    with pytest.warns(
        UserWarning, match=r"required_on_load algorithm `Renamed` .* this run uses `Renamed\(scale=3.0\)`"
    ):
        state.load_model_state(other)

    assert len(state.algorithms) == 1


def test_a_class_of_your_own_is_known_when_the_run_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    state, other = make(Renamed(3.0), seed=1), saved(Renamed(2.0))
    monkeypatch.setattr(_registry, "points", lambda group: {})
    with pytest.warns(UserWarning, match="but this run uses"):
        state.load_model_state(other)


@pytest.mark.parametrize(
    "own", [{}, {"repr": "Renamed(scale=act_fn)"}, {"repr": "Renamed(size=1)"}, {"repr": "Renamed(-1)"}]
)
def test_one_that_cannot_be_rebuilt_is_left_out_with_a_warning(own: dict[str, Any]) -> None:
    state, other = make(seed=1), saved()
    other["algorithms"] = [("Renamed", own)]
    with pytest.warns(UserWarning, match=r"The required_on_load algorithm `Renamed`.* pass it in `algorithms`"):
        state.load_model_state(other)

    assert state.algorithms == []


def test_excluded_algorithms_are_left_out() -> None:
    state = make(seed=1)
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict"):
        state.load_model_state(saved(Renamed()), exclude_algorithms=["Renamed"])
    with pytest.warns(UserWarning, match="does not match"), pytest.raises(KeyError, match="hold different parameters"):
        state.load_state_dict(saved(Renamed()), exclude_algorithms=["Renamed"])

    assert state.algorithms == []


def test_what_is_not_required_not_an_algorithm_or_unknown_is_passed_over() -> None:
    state, other = make(seed=1), saved()
    other["algorithms"] = [("Watching", {"repr": "Watching()"}), ("Model", {"repr": "Model()"}), ("Unknown", {})]
    state.load_model_state(other)
    other["algorithms"] = {"Renamed": {"repr": "Renamed()"}}  # as in very old files
    state.load_model_state(other)

    assert state.algorithms == []


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_registry, "points", lambda group: {})
    other = saved()
    other["algorithms"] = [("MixUp", {"repr": "MixUp()"}), ("BlurPool", {"repr": "BlurPool()"})]
    with pytest.raises(
        ModuleNotFoundError, match=r"`BlurPool` of `composer-blurpool`.* Run `pip install composer-blurpool`"
    ):
        make().load_model_state(other)

    make().load_model_state(other, exclude_algorithms=["BlurPool"])


def test_what_an_algorithm_itself_misses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Renamed, scale: float) -> None:
        raise ImportError("Run `pip install something`.")

    other = saved(Renamed())
    monkeypatch.setattr(Renamed, "__init__", fail)
    with pytest.raises(ImportError, match="pip install something"):
        make().load_model_state(other)


def test_one_that_need_not_act_earlier_does_not_apply_the_others_again() -> None:
    watching = Watching()
    watching.placement = Placement()
    state = make(watching, seed=1)
    with pytest.warns(UserWarning, match="Automatically adding"):
        state.load_model_state(saved(Renamed()))

    assert ["Linear"] == watching.seen


@pytest.mark.parametrize("by", ["placement", "pass"])
def test_one_that_should_have_acted_earlier_is_an_error(by: str) -> None:
    watching = Watching()
    if by == "pass":
        watching.placement = Placement()
    state, passes = make(watching, seed=1), None if by == "placement" else (lambda algorithms, event: algorithms[::-1])
    with pytest.raises(
        ValueError, match=r"`Renamed` of the checkpoint must act before `Watching`.*`algorithms=\[Renamed"
    ):
        state.load_model_state(saved(Renamed()), algorithm_passes=passes)

    assert state.algorithms == [watching]


def test_one_that_the_run_excludes_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"cannot be added to this run. `Alone` cannot be used together with `Renamed`"
    ):
        make(Alone(), seed=1).load_model_state(saved(Renamed()))


def test_one_that_cannot_be_applied_is_an_error() -> None:
    state, other = make(seed=1), saved()
    other["algorithms"] = [("Renamed", {"repr": "Renamed(13)"})]
    with (
        pytest.warns(UserWarning, match="Automatically adding"),
        pytest.raises(ValueError, match=r"could not be applied to the model: no layer to rename\. Pass `algorithms"),
    ):
        state.load_model_state(other)

    assert state.algorithms == []


def load_into_a_wrapped_model(other: dict[str, Any]) -> None:
    state = make(seed=1)
    state.model = torch.nn.parallel.DistributedDataParallel(state.model)
    points = {"Renamed": SimpleNamespace(load=lambda: Renamed)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_registry, "points", lambda group: points)
        state.load_model_state(other)


def test_a_wrapped_model_is_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"ValueError: `Renamed` of the checkpoint cannot be applied to .* wrapped in"
    ):
        run_on_ranks(load_into_a_wrapped_model, 1, saved(Renamed()))
