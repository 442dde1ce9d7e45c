"""Two optimizers train as one with two parameter groups, with every algorithm and with the monitors."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_runs import (
    CLASSES,
    LANGUAGE,
    LOWER_PRECISION,
    Captioned,
    Classifier,
    captioned,
    make,
    noise,
    record_stack,
)

from composer import Trainer
from composer.algorithms import (
    EMA,
    SAM,
    BlurPool,
    Factorize,
    GradientClipping,
    LayerFreezing,
    Muon,
    SqueezeExcite,
)
from composer.callbacks import LRMonitor, OptimizerMonitor
from composer.core import Precision
from composer.loggers import InMemoryLogger
from composer.optim import ConstantScheduler, CosineAnnealingScheduler, DecoupledAdamW
from composer.testing import deep_compare

Split = list[list[torch.nn.Parameter]]


def split(model: torch.nn.Module, by_shape: bool) -> Split:
    """Every other layer, so that layers that are replaced have parameters in both halves; or matrices and vectors."""
    halves: Split = [[], []]
    layers = [module for module in model.modules() if module._parameters]
    for number, layer in enumerate(layers):
        for parameter in layer.parameters(recurse=False):
            halves[parameter.dim() < 2 if by_shape else number % 2].append(parameter)
    return halves


def run(count: int, names: Sequence[str] = (), kind: Any = torch.optim.AdamW, **arguments: Any) -> dict[str, Any]:
    """Train with one optimizer of two groups, or with two optimizers."""
    is_language = bool(LANGUAGE & set(names))
    keys = {"input_key": "image", "target_key": "label"} if is_language else {}
    model = Captioned() if is_language else Classifier()
    settings: list[dict[str, Any]] = [{"weight_decay": 0.0}, {"weight_decay": 1e-3}]
    groups = [{"params": half, **each} for half, each in zip(split(model, is_language), settings, strict=True)]
    optimizers = [kind(groups, lr=1e-2)] if count == 1 else [kind([group], lr=1e-2) for group in groups]
    loader = torch.utils.data.DataLoader(
        noise(16), batch_size=8, shuffle=True, collate_fn=captioned if is_language else None
    )
    defaults: dict[str, Any] = {
        "max_duration": "4ep",
        "schedulers": CosineAnnealingScheduler(alpha_f=0.1),
        "algorithms": [make(name, keys) for name in names],
        "precision": Precision.AMP_BF16 if LOWER_PRECISION & set(names) else Precision.FP32,
    }
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=optimizers,
        device_train_microbatch_size=4,
        progress_bar=False,
        device="cpu",
        seed=3,
        **{**defaults, **arguments},
    )
    trainer.fit()
    trainer.close()
    state = trainer.state
    moments: dict[str, Any] = {}
    for saved in state.get_optim_state_dict().values():
        moments |= {name.removeprefix("module."): value for name, value in saved["state"].items()}
    return {
        "weights": state.model.state_dict(),
        "moments": moments,
        "loss": state.total_loss_dict["loss/train/total"],
        "scale": None if state.scaler is None else state.scaler.get_scale(),
    }


# They change batches, targets or losses, and have nothing to do with parameters.
OF_BATCHES = """
    AlternatingFlip AugMix BatchSizeWarmup ChunkedCrossEntropy ColOut CutMix CutOut Distillation LabelSmoothing MixUp
    ProgressiveResizing RandAugment SelectiveBackprop SeqLengthWarmup SequencePacking TestTimeAugmentation ZLoss
""".split()


# New layers of language models, such as a gate, go where one group has parameters of their shape: the halves are
# matrices and vectors. Whoever replaces every layer leaves nothing to compare.
@pytest.mark.parametrize("name", sorted(CLASSES.keys() - {"NoOpModel", *OF_BATCHES}))
def test_with_every_algorithm_two_optimizers_equal_one(name: str, tmp_path: Path) -> None:
    # Schedule-free optimizers refuse a decay.
    schedule: dict[str, Any] = {"schedulers": ConstantScheduler()} if name == "ScheduleFree" else {}
    one = run(1, [name], **schedule)
    save: dict[str, Any] = {"save_folder": str(tmp_path), "save_interval": "3ba", "save_filename": "ba{batch}.pt"}
    two = run(2, [name], **save, **schedule)
    resumed = run(2, [name], load_path=str(tmp_path / "ba3.pt"), **schedule)

    deep_compare(one, two)
    deep_compare(two, resumed)


def stack() -> list[Any]:
    return [
        BlurPool(min_channels=0),
        GradientClipping("norm", 0.05),
        EMA(half_life="3ba"),
        LayerFreezing(0.2, 0.5),
        SAM(interval=2),
        *record_stack("Muon", "EMA"),
    ]


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")  # the first step overflows
@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
def test_a_stack_of_methods_sees_both_optimizers(precision: str, tmp_path: Path) -> None:
    """Surgery, one norm to clip, averages, frozen layers, two passes and what acts around a step, for 20 steps.

    In fp16 the first steps overflow.
    """
    save: dict[str, Any] = {"save_folder": str(tmp_path), "save_interval": "1ep", "save_filename": "ep{epoch}.pt"}
    options: dict[str, Any] = {"precision": precision, "max_duration": "10ep"}
    one = run(1, algorithms=stack(), **options)
    two = run(2, algorithms=stack(), **options, **save)
    resumed = run(2, algorithms=stack(), load_path=str(tmp_path / "ep3.pt"), **options)

    # The matrices of one optimizer are multiplied in larger batches, which may change the last bit. Before a norm, the
    # gradient of a bias is nothing but such bits, and optimizers make steps of the usual length of them.
    matrices = [[weight for weight in each["weights"].values() if weight.dim() > 1] for each in (one, two)]
    deep_compare(*matrices, atol=1e-5)
    deep_compare(two, resumed)


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")  # the first step may overflow
@pytest.mark.parametrize("precision", ["amp_bf16", "amp_fp16"])
def test_muon_after_surgery_in_lower_precision(precision: str, tmp_path: Path) -> None:
    def methods() -> list[Any]:
        factorize = Factorize(min_channels=4, min_features=4, latent_channels=4, latent_features=4)
        return [Muon(cautious=True, normalize=True), factorize, SqueezeExcite(4, 4), GradientClipping("norm", 1.0)]

    save: dict[str, Any] = {"save_folder": str(tmp_path), "save_interval": "3ba", "save_filename": "ba{batch}.pt"}
    whole = run(2, algorithms=methods(), precision=precision, **save)
    resumed = run(2, algorithms=methods(), precision=precision, load_path=str(tmp_path / "ba3.pt"))

    deep_compare(whole, resumed)
    assert whole["moments"].keys() <= whole["weights"].keys()
    moved = [name for name, moments in whole["moments"].items() if "momentum_buffer" in moments]
    assert len(moved) > 3
    assert all(weight.isfinite().all() for weight in whole["weights"].values())


def test_monitors_report_both_optimizers() -> None:
    logged = []
    for count in (1, 2):
        logger = InMemoryLogger()
        callbacks = [LRMonitor(), OptimizerMonitor(batch_log_interval=1)]
        run(count, kind=DecoupledAdamW, callbacks=callbacks, loggers=logger, max_duration="3ba")
        logged.append({key: [float(value) for _, value in values] for key, values in logger.data.items()})
    keys = [key for key in logged[0] if key.startswith(("l2_norm/", "lr-"))]

    assert {"lr-DecoupledAdamW/group0", "lr-DecoupledAdamW/group1"} == {key for key in keys if key.startswith("lr-")}
    assert sum(key.startswith("l2_norm/update/") for key in keys) == len(list(Classifier().parameters()))
    assert {key: logged[0][key] for key in keys} == {key: logged[1][key] for key in keys}


def test_a_file_of_one_optimizer_has_the_established_layout(tmp_path: Path) -> None:
    """One entry under the name of the class; several only add entries."""
    entries = []
    for count in (1, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(count, max_duration="2ba", save_folder=str(tmp_path / str(count)), save_filename="file.pt")
        content = torch.load(tmp_path / str(count) / "file.pt", weights_only=False)
        entries.append(content["state"]["optimizers"])
    (only,) = entries[0].values()

    assert ["AdamW"] == list(entries[0])
    assert {"state", "param_groups"} == only.keys()
    assert ["AdamW", "AdamW#2"] == list(entries[1])
    assert only["state"].keys() == entries[1]["AdamW"]["state"].keys() | entries[1]["AdamW#2"]["state"].keys()
