"""Every algorithm can be saved safely, and those that a model cannot be loaded without come back by themselves."""

from __future__ import annotations

import datetime
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_runs import CLASSES, LANGUAGE, Classifier, index_of, noise, teacher
from torch.utils.data import DataLoader, default_collate
from torchmetrics.classification import MulticlassAccuracy
from transformers import BertConfig, BertModel

from composer import Trainer
from composer.algorithms import EMA, SAM, GatedLinearUnits, NoOpModel
from composer.algorithms.warnings import NoEffectWarning
from composer.checkpoint import save_checkpoint
from composer.core import REPLACES_OPTIMIZER, Algorithm, Callback, Engine, Event, State
from composer.core.saving.rebuild import rebuild
from composer.export import plain_state_dict, restore
from composer.loggers import ConsoleLogger, FileLogger, InMemoryLogger, Logger, ProgressBarLogger
from composer.loss import soft_cross_entropy
from composer.models import ComposerClassifier, ComposerModel
from composer.testing import SimpleModel, deep_compare, train_by_hand

REQUIRED = sorted(name for name, cls in CLASSES.items() if cls.required_on_load())
# Small enough for the models here, acting within three batches, and other than the defaults.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "Alibi": {"max_sequence_length": 32, "train_sequence_length_scaling": 1.0},
    "BatchSizeWarmup": {"initial_batch_size": 2, "duration": "12sp"},
    "BlurPool": {"min_channels": 0, "blur_first": False},
    "ChunkedCrossEntropy": {"head_name": "head", "target_key": index_of},
    "Distillation": {"teacher": teacher(), "weight": 0.2},
    "EMA": {"half_life": "2ba"},
    "Factorize": {"min_channels": 4, "min_features": 4, "latent_channels": 2, "latent_features": 0.5},
    "GatedLinearUnits": {"gated_layer_bias": True},
    "GhostBatchNorm": {"ghost_batch_size": 4},
    "GradientClipping": {"clipping_type": "norm", "clipping_threshold": 0.1},
    "GyroDropout": {"p": 0.25, "sigma": 8, "tau": 4},
    "LAWA": {"num_snapshots": 2, "interval": "1ba"},
    "LayerFreezing": {"freeze_start": 0.0, "freeze_level": 0.5},
    "LowPrecisionGroupNorm": {"apply_at": Event.INIT},
    "LowPrecisionLayerNorm": {"apply_at": Event.INIT},
    "LogitSoftcap": {"final": 2.0, "attention": 2.0, "head_name": "head"},
    "PostHocEMA": {"sigma_rels": (0.05, 0.2), "snapshot_interval": "1ba"},
    "QKNorm": {"norm": "layer", "query_name": "query", "key_name": "key", "head_dim": 8},
    "SAM": {"interval": 2},
    "SWA": {
        "swa_start": "0.1dur",
        "swa_end": "0.9dur",
        "update_interval": "1ba",
        "schedule_swa_lr": True,
        "swa_lr": 0.01,
    },
    "ScaleSchedule": {"ratio": 2.0},
    "ScheduleFree": {"warmup": "2ba", "lr": 0.5, "momentum": 0.8, "r": 1.0},
    "SelectiveBackprop": {"start": 0.0, "end": 1.0, "interrupt": 0},
    "SeqLengthWarmup": {"duration": 0.5, "min_seq_length": 8, "max_seq_length": 16},
    "SequencePacking": {"length": 16},
    "SqueezeExcite": {"min_channels": 4, "latent_channels": 2},
    "StochasticDepth": {"target_layer_name": "ResNetBottleneck", "drop_rate": 0.5, "drop_warmup": "2ba"},
    "Whitening": {"num_images": 8, "bias_duration": "1ba"},
    "WeightStandardization": {"n_last_layers_ignore": 1},
}


class Language(ComposerModel):
    """A small BERT that classifies."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
        )
        self.text = BertModel(config, add_pooling_layer=False)
        self.head = torch.nn.Linear(16, 4)

    def forward(self, batch: Any) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.text(input_ids=batch["input_ids"]).last_hidden_state.mean(1))
        return outputs

    def loss(self, outputs: torch.Tensor, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return soft_cross_entropy(outputs, batch["labels"], *args, **kwargs)


def batch_of(name: str) -> Any:
    if name in LANGUAGE:
        return {
            "input_ids": torch.arange(64).reshape(4, 16).remainder(31),
            "labels": torch.eye(4),
            "index": torch.arange(4)[:, None],
        }
    return default_collate(list(noise()))  # type: ignore[arg-type]


def make_state(name: str, *algorithms: Algorithm, seed: int = 0) -> State:
    model = Language(seed) if name in LANGUAGE else Classifier(seed=seed)
    return State(
        model=model,
        max_duration="3ba",
        run_name="run",
        precision="amp_bf16",  # with which the layers of low precision are used
        dataloader=[batch_of(name)] if name in LANGUAGE else DataLoader(noise(), batch_size=8),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        algorithms=algorithms,
    )


def schedulers_of(state: State) -> list[torch.optim.lr_scheduler.LRScheduler]:
    """Return a scheduler, unless an algorithm makes other optimizers, for which it would be too early."""
    replaced = any(REPLACES_OPTIMIZER in algorithm.placement.provides for algorithm in state.algorithms)
    return [] if replaced else [torch.optim.lr_scheduler.StepLR(state.optimizers[0], 1)]


def trained(name: str, *algorithms: Algorithm) -> State:
    state = make_state(name, *algorithms)
    state.schedulers = schedulers_of(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoEffectWarning)
        train_by_hand(state, [batch_of(name)] * 2)
    return state


def through_a_file(saved: dict[str, Any]) -> dict[str, Any]:
    """Save, and load without running code from the file."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    with torch.serialization.safe_globals([datetime.timedelta]):
        loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def outputs_of(state: State, name: str) -> torch.Tensor:
    state.model.eval()
    with torch.no_grad():
        outputs: torch.Tensor = state.model(batch_of(name))
    return outputs


def kinds(state: State) -> list[str]:
    """The modules of the model, and what they hold."""
    modules = [type(module).__name__ for module in state.model.modules()]
    return modules + [f"{name} {tuple(value.shape)}" for name, value in state.model.state_dict().items()]


def make(name: str) -> Algorithm:
    return CLASSES[name](**ARGUMENTS.get(name, {}))


# ---- what is saved ----


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_what_every_algorithm_saves_is_safe_to_load(name: str) -> None:
    saved = trained(name, make(name)).state_dict()

    deep_compare(saved, through_a_file(saved))


class Snapshot(Callback):
    """Takes the state in the middle of a run."""

    def __init__(self) -> None:
        self.saved: dict[str, Any] = {}

    def batch_end(self, state: State, logger: Logger) -> None:
        self.saved = state.state_dict()


def test_what_loggers_callbacks_and_metrics_save_is_safe_to_load(tmp_path: Any) -> None:
    snapshot = Snapshot()
    model = SimpleModel(train_metrics={"accuracy": MulticlassAccuracy(2)})
    data = [(torch.randn(4, 1, 2, 2), torch.tensor([0, 1, 0, 1]))] * 3
    trainer = Trainer(
        model=model,
        train_dataloader=data,
        max_duration="1ep",
        optimizers=torch.optim.Adam(model.parameters()),
        loggers=[
            ProgressBarLogger(stream=io.StringIO()),
            ConsoleLogger(stream=io.StringIO()),
            FileLogger(str(tmp_path / "log.txt")),
            InMemoryLogger(),
        ],
        callbacks=snapshot,
        progress_bar=False,
        device="cpu",
    )
    trainer.state.save_metrics = True
    trainer.fit()
    trainer.close()
    loaded = through_a_file(snapshot.saved)

    assert {"ProgressBarLogger", "ConsoleLogger", "FileLogger", "InMemoryLogger", "Snapshot"} == set(
        loaded["callbacks"]
    )
    deep_compare(snapshot.saved, loaded)
    state = State(SimpleModel(), save_metrics=True, run_name="run")
    state.train_metrics = {"accuracy": MulticlassAccuracy(2)}
    del loaded["optimizers"]
    state.load_state_dict(loaded)

    deep_compare(trainer.state.train_metrics["accuracy"].compute(), state.train_metrics["accuracy"].compute())


# ---- what comes back ----


@pytest.mark.parametrize("name", REQUIRED)
def test_a_representation_is_read_back(name: str) -> None:
    expected = make(name)
    found = rebuild(CLASSES[name], repr(expected))

    assert repr(expected) == repr(found)


@pytest.mark.parametrize("name", REQUIRED)
def test_a_required_algorithm_comes_back_with_the_checkpoint(name: str) -> None:
    expected = trained(name, make(name))
    saved = through_a_file(expected.state_dict())
    state = make_state(name, seed=1)
    state.schedulers = schedulers_of(state)
    with pytest.warns(UserWarning, match=f"^Automatically adding required_on_load algorithm `{name}"):
        state.load_state_dict(saved, strict=True)

    deep_compare(outputs_of(expected, name), outputs_of(state, name))
    deep_compare(expected.state_dict()["optimizers"], state.state_dict()["optimizers"])
    if name != "GyroDropout":  # which acts when training starts
        assert kinds(expected) == kinds(state) != kinds(make_state(name))
        deep_compare(expected.state_dict()["algorithms"], state.state_dict()["algorithms"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("BlurPool(replace_convs=True,replace_maxpools=False,blur_first=True,min_channels=8)", {"min_channels": 8}),
        ("GyroDropout()", {"sigma": 256}),
        (
            "StochasticDepth(target_layer_name='ResNetBottleneck',stochastic_method='block',drop_rate=0.2,"
            "drop_distribution='linear',drop_warmup=Time(0.0, TimeUnit.DURATION))",
            {"drop_rate": 0.2},
        ),
        ("LowPrecisionGroupNorm(apply_at=Event.INIT)", {"apply_at": Event.INIT}),
        ("Factorize(min_channels=256,latent_channels=0.25)", {"latent_channels": 0.25}),
    ],
)
def test_representations_of_other_files_are_read(text: str, expected: dict[str, Any]) -> None:
    found = rebuild(CLASSES[text.partition("(")[0]], text)

    assert expected == {name: getattr(found, name) for name in expected}


def test_an_activation_of_your_own_must_be_given_again() -> None:
    expected = trained("GatedLinearUnits", GatedLinearUnits(act_fn=torch.nn.functional.silu))
    saved = through_a_file(expected.state_dict())
    with (
        pytest.warns(UserWarning, match=r"required_on_load algorithm `GatedLinearUnits`.*`act_fn` is not a plain"),
        pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict"),
    ):
        make_state("GatedLinearUnits", seed=1).load_model_state(saved)
    state = make_state("GatedLinearUnits", GatedLinearUnits(act_fn=torch.nn.functional.silu), seed=1)
    Engine(state).run_event("init")
    state.load_model_state(saved)

    deep_compare(outputs_of(expected, "GatedLinearUnits"), outputs_of(state, "GatedLinearUnits"))


def test_one_that_should_have_come_before_the_averages_is_an_error() -> None:
    saved = trained("BlurPool", make("BlurPool")).state_dict()
    state = make_state("BlurPool", EMA(half_life="2ba"))
    Engine(state).run_event("init")
    with pytest.raises(
        ValueError, match=r"`BlurPool` of the checkpoint must act before `EMA`.*`algorithms=\[BlurPool\("
    ):
        state.load_state_dict(saved)


def test_several_come_back_in_their_order() -> None:
    expected = trained("BlurPool", make("SqueezeExcite"), make("BlurPool"))
    state = make_state("BlurPool", seed=1)
    with pytest.warns(UserWarning, match="Automatically adding") as seen:
        state.load_model_state(through_a_file(expected.state_dict()))

    assert 2 == sum("Automatically adding required_on_load" in str(warning.message) for warning in seen)
    deep_compare(outputs_of(expected, "BlurPool"), outputs_of(state, "BlurPool"))


# ---- outside of a run ----

# Without these layers no weights compute the same.
NOT_PLAIN = {
    "Alibi": "biases its scores",
    "BlurPool": "blurs where it subsamples",
    "Factorize": "the layer that they replaced has none",
    "GatedLinearUnits": "multiplies by a gate",
    "LogitSoftcap": "caps at 2.0",
    "NoOpModel": "was not trained",
    "QKNorm": "normalizes queries or keys",
    "SqueezeExcite": "weights channels",
}


@pytest.mark.parametrize("name", sorted({*REQUIRED, "ChannelsLast"} - NOT_PLAIN.keys()))
def test_the_model_without_the_method_computes_the_same_with_the_plain_weights(name: str) -> None:
    expected, plain = trained(name, make(name)), make_state(name, seed=1)
    plain.model.load_state_dict(through_a_file(plain_state_dict(expected.model)), strict=True)

    # Ten layers in float32, with outputs of about 1.
    torch.testing.assert_close(outputs_of(expected, name), outputs_of(plain, name), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_weights_that_no_plain_model_can_use_are_refused_with_the_reason(name: str) -> None:
    model = trained(name, make(name)).model

    with pytest.raises(ValueError, match=rf"(?s){NOT_PLAIN[name]}.*composer\.export\.restore"):
        plain_state_dict(model)


@pytest.mark.parametrize("name", REQUIRED)
def test_a_new_model_is_restored_by_one_function(name: str, tmp_path: Path) -> None:
    expected, found = trained(name, make(name)), make_state(name, seed=1)
    file = save_checkpoint(expected, str(tmp_path / "run.pt"))
    assert file is not None
    found.model = restore(found.model, file)

    deep_compare(outputs_of(expected, name), outputs_of(found, name))


# ---- SAM around the optimizer ----


@pytest.mark.parametrize("with_sam", [True, False])
def test_runs_with_and_without_sam_find_each_others_momentum(with_sam: bool) -> None:
    algorithms = (SAM(rho=0.2, interval=2),) if with_sam else ()
    saved = through_a_file(trained("BlurPool", *algorithms).state_dict())
    others = () if with_sam else (SAM(rho=0.3, interval=2),)
    state = make_state("BlurPool", *others, seed=1)
    engine = Engine(state)
    engine.run_event("init")
    engine.run_event("before_load")
    del saved["algorithms"]
    state.load_state_dict(saved)
    found = state.state_dict()["optimizers"]["SGD"]

    assert list(saved["optimizers"]) == ["SGD"]
    deep_compare(saved["optimizers"]["SGD"]["state"], found["state"])
    group = found["param_groups"][0]
    assert group["rho"] == (0.2 if with_sam else 0.3)


def test_a_run_with_sam_continues_identically() -> None:
    batches = [batch_of("SAM")] * 3
    expected = make_state("SAM", SAM(rho=0.2, interval=2))
    train_by_hand(expected, batches)
    begun = make_state("SAM", SAM(rho=0.2, interval=2))
    train_by_hand(begun, batches[:1])
    saved, rng = through_a_file(begun.state_dict()), torch.get_rng_state()

    resumed = make_state("SAM", SAM(rho=0.9, interval=2), seed=1)
    engine = Engine(resumed)
    for event in ("init", "before_load"):
        engine.run_event(event)
    resumed.load_state_dict(saved)
    group = resumed.optimizers[0].param_groups[0]
    assert (group["rho"], group["global_step"]) == (0.2, 1)
    del engine
    torch.set_rng_state(rng)
    _continue(resumed, batches[1:], rng)

    deep_compare(expected.state_dict()["model"], resumed.state_dict()["model"])
    deep_compare(expected.state_dict()["optimizers"], resumed.state_dict()["optimizers"])


def _continue(state: State, batches: list[Any], rng: torch.Tensor) -> None:
    torch.set_rng_state(rng)
    for batch in batches:

        def closure(batch: Any = batch, **kwargs: Any) -> torch.Tensor:
            state.optimizers.zero_grad()
            loss = state.model.loss(state.model(batch), batch)  # type: ignore[operator,union-attr]
            loss.backward()
            return loss.detach()  # type: ignore[no-any-return]

        state.optimizers.step(closure=closure)


def test_a_checkpoint_of_sam_that_lacks_the_base_is_read() -> None:
    """Others save the wrapper only, under its name, with the climb e as state."""
    saved = trained("SAM", SAM(interval=2)).state_dict()
    entry = saved["optimizers"].pop("SGD")
    entry["state"] = {name: {"e_w": torch.zeros(1)} for name in entry["state"]}
    saved["optimizers"]["SAMOptimizer"] = entry
    state = make_state("SAM", SAM(interval=2), seed=1)
    for event in ("init", "before_load"):
        Engine(state).run_event(event)
    with pytest.warns(UserWarning, match="saved as `SAMOptimizer`, not as the `SGD` inside it"):
        state.load_optim_state(saved)
    _continue(state, [batch_of("SAM")], torch.get_rng_state())

    assert {"momentum_buffer"} == {key for own in state.optimizers[0].state.values() for key in own}


def test_a_model_that_comes_with_the_checkpoint_is_trained_and_measured(tmp_path: Any) -> None:
    """`NoOpModel` replaces the whole model, with its loss and metrics."""

    def trainer(algorithms: Any, **arguments: Any) -> Trainer:
        torch.manual_seed(0)
        model = ComposerClassifier(torch.nn.Linear(3, 4), num_classes=4)
        data = [(torch.zeros(2, 3), torch.tensor([1, 2]))] * 2
        return Trainer(
            model=model,
            train_dataloader=data,
            eval_dataloader=data,
            optimizers=torch.optim.Adam(model.parameters()),
            algorithms=algorithms,
            progress_bar=False,
            device="cpu",
            device_train_microbatch_size=2,
            **arguments,
        )

    first = trainer(NoOpModel(), max_duration="1ep", save_folder=str(tmp_path), run_name="first")
    first.fit()
    first.close()
    with pytest.warns(UserWarning, match="Automatically adding required_on_load algorithm `NoOpModel"):
        second = trainer(None, max_duration="2ep", load_path=str(tmp_path / "latest-rank0.pt"))
    for _ in range(2):
        second.fit(duration="1ep")
    second.eval()
    second.close()

    assert ["BinaryAccuracy"] == list(second.state.train_metrics)
    assert ["BinaryAccuracy"] == list(second.state.eval_metrics["eval"])
    assert 1.0 == second.state.eval_metric_values["BinaryAccuracy"]


def test_the_metrics_of_a_model_that_comes_with_the_checkpoint_are_loaded(tmp_path: Any) -> None:
    """In the middle of an epoch, after an evaluation: the metrics of the run are those of the original model."""

    def trainer(algorithms: Any, **arguments: Any) -> Trainer:
        torch.manual_seed(0)
        model = ComposerClassifier(torch.nn.Linear(3, 4), num_classes=4)
        data = [(torch.zeros(2, 3), torch.tensor([1, 2]))] * 4
        return Trainer(
            model=model,
            max_duration="1ep",
            train_dataloader=data,
            eval_dataloader=data,
            eval_interval="2ba",
            optimizers=torch.optim.Adam(model.parameters()),
            algorithms=algorithms,
            save_metrics=True,
            progress_bar=False,
            device="cpu",
            **arguments,
        )

    first = trainer(NoOpModel(), save_folder=str(tmp_path), save_filename="ba{batch}.pt", save_interval="1ba")
    first.fit()
    first.close()
    path = str(tmp_path / "ba3.pt")
    expected = trainer(NoOpModel(), load_path=path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second = trainer(None, load_path=path)

    assert not [str(warning.message) for warning in caught if "metric" in str(warning.message)]
    deep_compare(_counted(expected.state), _counted(second.state))
    assert {"train/BinaryAccuracy": 1, "eval/BinaryAccuracy": 4} == {
        name: count for name, (count, _) in _counted(second.state).items()
    }
    second.fit()

    assert 1.0 == second.state.train_metric_values["BinaryAccuracy"]
    assert 1.0 == second.state.eval_metric_values["BinaryAccuracy"]
    for each in (expected, second):
        each.close()


def _counted(state: State) -> dict[str, Any]:
    """Return the number of updates and the count of each metric."""
    groups = {"train": state.train_metrics, **state.eval_metrics}
    return {
        f"{label}/{name}": (metric._update_count, metric.state_dict())
        for label, metrics in groups.items()
        for name, metric in metrics.items()
    }
