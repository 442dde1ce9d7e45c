"""Trained weights go home: into timm, transformers, Lightning and ONNX Runtime, with the same outputs.

Where the home allows it, the comparison is in float64: rounding then stays far below 1e-9 of the outputs, and any wrong
weight above it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import functional as cf
from composer.algorithms import GhostBatchNorm, SqueezeExcite, WeightStandardization
from composer.checkpoint import save_checkpoint
from composer.core import Algorithm, Engine, State
from composer.export import plain_state_dict, restore
from composer.inference import export_for_inference

SURGERY: dict[str, Callable[[nn.Module], object]] = {
    "GhostBatchNorm": lambda model: cf.apply_ghost_batchnorm(model, 2),
    "WeightStandardization": lambda model: cf.apply_weight_standardization(model, 1),
    "Factorize": lambda model: cf.apply_factorization(model, min_channels=64, min_features=64, latent_features=16),
    "GyroDropout": lambda model: cf.apply_gyro_dropout(model, iters_per_epoch=1, max_epoch=1, p=0.1),
    "FusedLayerNorm": cf.apply_fused_layernorm,
}


def apply_stochastic_depth(model: nn.Module) -> None:
    from timm.models.resnet import BasicBlock, Bottleneck  # type: ignore[import-untyped,unused-ignore]

    cf.apply_stochastic_depth(model, lambda module: isinstance(module, BasicBlock | Bottleneck), drop_rate=0.5)


SURGERY["StochasticDepth"] = apply_stochastic_depth


def train(model: nn.Module, *inputs: torch.Tensor) -> None:
    """Take a step, so that no weight and no running statistic is as it was initialized."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    outputs = model.train()(*inputs)
    getattr(outputs, "logits", outputs).square().mean().backward()
    optimizer.step()
    model.eval()


def compare(expected: nn.Module, found: nn.Module, *inputs: torch.Tensor, tolerance: float = 1e-9) -> None:
    with torch.no_grad():
        pair = [model.eval()(*inputs) for model in (expected, found)]
    first, second = (getattr(outputs, "logits", outputs) for outputs in pair)
    torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("network", "methods"),
    [
        ("test_resnet", ["GhostBatchNorm", "WeightStandardization"]),
        ("test_resnet", ["StochasticDepth", "WeightStandardization"]),
        ("test_vit", ["Factorize"]),
    ],
)
def test_timm_loads_the_weights(network: str, methods: list[str], tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model(network, num_classes=5).double()
    for method in methods:
        SURGERY[method](model)
    images = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    train(model, images)
    names = list(model.state_dict())
    torch.save(plain_state_dict(model), tmp_path / "model.pth")
    plain = timm.create_model(network, num_classes=5).double()
    timm.models.load_checkpoint(plain, str(tmp_path / "model.pth"))  # `create_model(checkpoint_path=...)` in float32

    assert names == list(model.state_dict()) != list(plain.state_dict())
    compare(model, plain, images)


def test_transformers_loads_the_weights(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    model = BertForSequenceClassification(BertConfig(vocab_size=32, **sizes))
    for method in ("Factorize", "GyroDropout", "FusedLayerNorm"):
        SURGERY[method](model)
    tokens = torch.randint(0, 32, (4, 8))
    train(model, tokens)
    model.double().save_pretrained(tmp_path, state_dict=plain_state_dict(model))
    plain, report = BertForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True, dtype=torch.float64
    )

    assert [] == [name for names in report.values() for name in names]
    compare(model, plain, tokens)


def lightning_net() -> Any:
    pl = pytest.importorskip("lightning.pytorch")

    class Net(pl.LightningModule):  # type: ignore[misc,name-defined,unused-ignore]
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layers = nn.Sequential(
                nn.Conv2d(3, width, 3),
                nn.BatchNorm2d(width),
                nn.Conv2d(width, width, 3),
                nn.Flatten(),
                nn.LazyLinear(2),
            )
            self(torch.zeros(2, 3, 8, 8))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = self.layers(images)
            return outputs

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Net


def lightning_checkpoint(net: Any, algorithms: list[Algorithm], folder: Path) -> Path:
    import lightning.pytorch as pl

    from composer.hosts.lightning import ComposeCallback

    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    callback = ComposeCallback(algorithms)
    trainer = pl.Trainer(max_steps=2, accelerator="cpu", callbacks=[callback], enable_model_summary=False, **quiet)
    data = TensorDataset(torch.randn(8, 3, 8, 8), torch.arange(8) % 2)
    trainer.fit(net, DataLoader(data, batch_size=4))
    trainer.save_checkpoint(folder / "run.ckpt")
    return folder / "run.ckpt"


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:.*does not have many workers")
def test_lightning_loads_the_weights(tmp_path: Path) -> None:
    cls = lightning_net()
    net = cls(width=6)
    file = lightning_checkpoint(net, [WeightStandardization(), GhostBatchNorm(2)], tmp_path)
    content = torch.load(file, weights_only=False)
    content["state_dict"] = plain_state_dict(net)
    torch.save(content, tmp_path / "plain.ckpt")

    with pytest.raises(RuntimeError, match="parametrizations"):
        cls.load_from_checkpoint(file)
    plain = cls.load_from_checkpoint(tmp_path / "plain.ckpt", map_location="cpu")
    compare(net, plain, torch.randn(4, 3, 8, 8), tolerance=1e-5)  # three layers in float32


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:.*does not have many workers")
def test_a_checkpoint_of_lightning_is_restored(tmp_path: Path) -> None:
    cls = lightning_net()
    net = cls()
    file = lightning_checkpoint(net, [SqueezeExcite(4, min_channels=8)], tmp_path)

    compare(net, restore(cls(), file), torch.randn(4, 3, 8, 8), tolerance=0.0)


def test_onnx_runtime_runs_what_no_plain_model_computes(tmp_path: Path) -> None:
    """In float32: a few rounding errors of 6e-8 in each of some 30 layers, relative to the largest output."""
    timm, onnxruntime = pytest.importorskip("timm"), pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=5)
    cf.apply_squeeze_excite(model, 4, 16)
    cf.apply_blurpool(model)
    for method in ("GhostBatchNorm", "Factorize", "WeightStandardization"):
        SURGERY[method](model)
    images = torch.randn(4, 3, 64, 64)
    train(model, images)
    export_for_inference(model, "onnx", tmp_path / "model.onnx", sample_input=(images,))
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    (found,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})

    expected = model(images).detach()
    torch.testing.assert_close(expected, torch.from_numpy(found), rtol=0.0, atol=1e-4 * float(expected.abs().max()))


def test_all_reasons_against_a_plain_model_are_given_at_once() -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3, 2), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16))
    cf.apply_squeeze_excite(model, 4, 16)
    cf.apply_blurpool(model, replace_convs=False)
    cf.apply_ghost_batchnorm(model, 2)

    with pytest.raises(ValueError, match=r"(?s)`2` and 1 more \(SqueezeExciteConv2d\).*`1` \(BlurMaxPool2d\).*restore"):
        plain_state_dict(model)


def test_wrapped_and_compiled_parts_have_the_names_of_the_plain_model() -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)))

    model, plain = build().double(), build().double()
    cf.apply_ghost_batchnorm(model, 2)
    cf.apply_weight_standardization(model)
    images = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    train(model, images)
    expected = model(images)
    model[1] = torch.compile(model[1], backend="eager")  # type: ignore[assignment,unused-ignore]
    plain.load_state_dict(plain_state_dict(torch.compile(nn.DataParallel(model).module, backend="eager")))  # type: ignore[arg-type,unused-ignore]

    torch.testing.assert_close(expected, plain.eval()(images), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("layer", "change", "reason"),
    [
        (
            nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)),
            cf.apply_weight_standardization,
            "other parametrizations",
        ),
        (
            nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)),
            lambda model: cf.apply_ghost_batchnorm(model, 2),
            "no running statistics",
        ),
        (
            nn.Sequential(nn.Conv2d(64, 64, 3, bias=False)),
            lambda model: cf.apply_factorization(model, min_channels=64),
            "the layer that they replaced has none",
        ),
    ],
)
def test_what_would_be_folded_wrongly_is_refused(layer: nn.Module, change: Any, reason: str) -> None:
    change(layer)

    with pytest.raises(ValueError, match=reason):
        plain_state_dict(layer)


def test_weights_do_not_change_with_further_training() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1))
    cf.apply_weight_standardization(model, 1)
    first = plain_state_dict(model)
    before = {name: value.clone() for name, value in first.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)

    assert all(torch.equal(value, before[name]) for name, value in first.items())


def _tied(last: int) -> nn.Module:
    """Return two convolutions with one weight, of which all but the last ones are standardized."""
    first, second = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)
    second.weight = first.weight
    model = nn.Sequential(first, nn.GroupNorm(1, 3), second)
    cf.apply_weight_standardization(model, last)
    return model


def test_a_weight_that_only_some_layers_fold_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weights 0\.parametrizations\.weight\.original, 2\.weight are one tensor"):
        plain_state_dict(_tied(last=1))
    branch = nn.Linear(3, 3)

    def blocks() -> nn.Module:
        return nn.Sequential(*(_Branch(branch) for _ in range(2)))

    model = blocks()
    cf.apply_stochastic_depth(model, _Branch, drop_rate=0.5)  # each block has a rate of its own
    with pytest.raises(ValueError, match=r"weights 0\.last\.weight, 1\.last\.weight are one tensor"):
        plain_state_dict(model)
    plain = nn.Sequential(nn.Linear(2, 2))
    plain.append(plain[0])
    assert plain_state_dict(plain).keys() == plain.state_dict().keys()


class _Branch(nn.Module):
    """A residual block of vectors."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x)) + x
        return out


class Block(nn.Module):
    """A residual block whose branch ends with a layer."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 3, 3, padding=1), last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.conv(x)) + x
        return out


def test_a_branch_that_ends_with_a_standardized_convolution_is_scaled() -> None:
    model, plain = (nn.Sequential(Block(nn.Conv2d(3, 3, 3, padding=1))).double() for _ in range(2))
    cf.apply_stochastic_depth(model, Block, drop_rate=0.5)
    cf.apply_weight_standardization(model)
    plain.load_state_dict(plain_state_dict(model))

    compare(model, plain, torch.randn(4, 3, 8, 8, dtype=torch.float64))


def test_a_branch_whose_last_layer_is_not_linear_in_its_weights_is_refused() -> None:
    model = nn.Sequential(Block(nn.PReLU()))
    cf.apply_stochastic_depth(model, Block)

    with pytest.raises(ValueError, match=r"`0` \(Block\): .*ends with `last` \(PReLU\)"):
        plain_state_dict(model)


# ---- restore ----


def run_with(*algorithms: Algorithm) -> State:
    state = State(
        model=nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)),
        max_duration="1ep",
        rank_zero_seed=0,
        algorithms=list(algorithms),
    )
    Engine(state).run_event("init")
    train(state.model, torch.randn(4, 4, 8, 8))
    return state


def test_restored_methods_act_in_their_order(tmp_path: Path) -> None:
    state = run_with(WeightStandardization(), SqueezeExcite(2, min_channels=4), GhostBatchNorm(2))
    file = save_checkpoint(state, str(tmp_path / "run.pt"))
    assert file is not None
    model = restore(run_with().model, file)

    assert list(state.model.state_dict()) == list(model.state_dict())
    compare(state.model, model, torch.randn(4, 4, 8, 8), tolerance=0.0)


def test_what_a_file_of_weights_does_not_list_is_passed(tmp_path: Path) -> None:
    state, file = run_with(SqueezeExcite(2, min_channels=4)), tmp_path / "weights.pt"
    torch.save(state.model.state_dict(), file)
    model = restore(run_with().model, file, SqueezeExcite(2, min_channels=4))

    compare(state.model, model, torch.randn(4, 4, 8, 8), tolerance=0.0)
    with pytest.raises(RuntimeError, match="The file does not list algorithms"):
        restore(run_with().model, file)


def test_a_file_without_weights_is_refused(tmp_path: Path) -> None:
    torch.save({"state": {"run_name": "a"}}, tmp_path / "run.pt")

    with pytest.raises(ValueError, match=r"must be a checkpoint of composer or of Lightning, .* with 'state'\. Save"):
        restore(nn.Linear(2, 2), tmp_path / "run.pt")
