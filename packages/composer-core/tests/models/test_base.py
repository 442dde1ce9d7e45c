"""`ComposerModel`: defaults, copies and pickles."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import composer
import composer.models
from composer.models import ComposerModel


class Tiny(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.calls = 0

    def forward(self, batch: Any) -> torch.Tensor:
        self.calls += 1
        outputs: torch.Tensor = self.linear(batch)
        return outputs

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = outputs.sum()
        return result


class Parent(Tiny):
    """A model inside a model, as in distillation; the child knows its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = Tiny()
        self.owner = [self]


class Scripted(Tiny):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.linear(batch)
        return outputs


class FakeLogger:
    """Can be neither copied nor pickled."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("the logger was copied")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AssertionError("the logger was pickled")


@pytest.fixture
def model() -> Tiny:
    model = Tiny()
    model.logger = FakeLogger()  # type: ignore[assignment]
    return model


class TestDefaults:
    def test_forward_and_loss_must_be_defined(self) -> None:
        with pytest.raises(TypeError, match="abstract method"):
            ComposerModel()  # type: ignore[abstract]

    def test_there_is_no_logger_and_there_are_no_metrics(self) -> None:
        assert Tiny().logger is None
        assert {} == Tiny().get_metrics(is_train=True) == Tiny().get_metrics(is_train=False)

    def test_evaluation_runs_the_model_unless_outputs_are_given(self) -> None:
        model, batch = Tiny(), torch.ones(1, 2)
        outputs = torch.zeros(())

        assert model.eval_forward(batch, outputs) is outputs
        assert 0 == model.calls
        assert torch.equal(model.linear(batch), model.eval_forward(batch))

    def test_evaluation_runs_hooks(self) -> None:
        model, seen = Tiny(), []
        model.register_forward_hook(lambda *arguments: seen.append(arguments))

        model.eval_forward(torch.ones(1, 2))

        assert 1 == len(seen)

    def test_a_metric_needs_a_method_that_updates_it(self) -> None:
        with pytest.raises(NotImplementedError, match="`Tiny` must define `update_metric` to measure object"):
            Tiny().update_metric(None, None, object())

    def test_it_is_exported_by_name(self) -> None:
        assert composer.ComposerModel is ComposerModel
        assert "ComposerModel" in dir(composer.models)
        assert "ComposerModel" in composer.models.__all__

    @pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
    def test_it_can_be_scripted(self) -> None:
        model = Scripted()
        model.logger = FakeLogger()  # type: ignore[assignment]

        scripted = torch.jit.script(model)

        assert torch.equal(model(torch.ones(1, 2)), scripted(torch.ones(1, 2)))


class TestCopies:
    def test_a_deep_copy_shares_the_logger_and_nothing_else(self, model: Tiny) -> None:
        duplicate = copy.deepcopy(model)

        with torch.no_grad():
            duplicate.linear.weight.add_(1)

        assert duplicate.logger is model.logger
        assert torch.equal(model.linear.weight + 1, duplicate.linear.weight)

    def test_a_shallow_copy_shares_the_parameters_too(self, model: Tiny) -> None:
        duplicate = copy.copy(model)
        duplicate.calls = 5

        assert duplicate.logger is model.logger
        assert duplicate.linear is model.linear
        assert 0 == model.calls

    def test_a_model_that_refers_to_itself_is_copied_once(self) -> None:
        model = Parent()
        model.logger = model.teacher.logger = FakeLogger()  # type: ignore[assignment]

        duplicate = copy.deepcopy(model)

        assert duplicate.owner[0] is duplicate
        assert duplicate.teacher.logger is model.logger
        assert duplicate.teacher.linear is not model.teacher.linear

    def test_a_pickle_has_no_logger(self, model: Tiny) -> None:
        restored = pickle.loads(pickle.dumps(model))

        assert restored.logger is None
        assert model.logger is not None
        assert torch.equal(model.linear.weight, restored.linear.weight)

    def test_a_copy_of_a_compiled_model_is_not_compiled(self, model: Tiny) -> None:
        model.compile(backend="eager")

        assert torch.equal(model(torch.ones(1, 2)), copy.deepcopy(model)(torch.ones(1, 2)))
        assert copy.deepcopy(model)._compiled_call_impl is None
