"""Graphs of compiled models with each algorithm: those of the first batch, and those that are compiled later."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from algorithm_runs import (
    CLASSES,
    LANGUAGE,
    LOWER_PRECISION,
    Captioned,
    Classifier,
    arguments_of,
    captioned,
    choose,
    make,
    noise,
)
from torch.utils.data import DataLoader
from torchvision.models.resnet import Bottleneck, ResNet

from composer import Trainer
from composer.algorithms.stochastic_depth import apply_stochastic_depth
from composer.core import Callback, State
from composer.loggers import InMemoryLogger, Logger
from composer.optim import CosineAnnealingScheduler, DecoupledAdamW, DecoupledSGDW
from tools.workspace import ROOT

# Dynamo looks at the attribute of whatever is passed to a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
STEPS = 8
# Algorithms whose card does not say "static": graphs in the first batch, and later.
CHANGING = {
    "BatchSizeWarmup": (1, 1),  # sizes, the second of them as a variable
    "GyroDropout": (1, 1),  # once the masks are there
    "ProgressiveResizing": (1, 2),  # sizes, the second of them as a variable
    "SelectiveBackprop": (2, 0),  # a pass to choose, without gradients, and one to train
    "SeqLengthWarmup": (1, 1),
    "SequencePacking": (1, 0),  # numbers of rows, which is one number here
    "Whitening": (1, 1),  # once the bias is frozen
}
# No graph of the whole model, because the host decides in each step.
SPLIT = {"StochasticDepth"}
# Its graph changes between epochs.
LATER = {"LayerFreezing"}


class Graphs(Callback):
    """The number of graphs that were compiled up to the end of each batch."""

    def __init__(self) -> None:
        self.compiled = 0
        self.after: list[int] = []

    def compile(self, module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """Compile nothing, but count."""
        self.compiled += 1
        return module.forward

    def batch_end(self, state: State, logger: Logger) -> None:
        self.after.append(self.compiled)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()


def graphs_of(
    names: str | Sequence[str], optimizer: Any = torch.optim.SGD, lr: float | torch.Tensor = 0.1, **options: Any
) -> list[int]:
    names = [names] if isinstance(names, str) else names
    graphs = Graphs()
    lower, has_text = bool(LOWER_PRECISION & set(names)), bool(LANGUAGE & set(names))
    norm = partial(torch.nn.GroupNorm, 4) if lower else torch.nn.BatchNorm2d
    keys = {"input_key": "image", "target_key": "label"} if has_text else {}
    model = Captioned(norm=norm) if has_text else Classifier(norm=norm)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(noise(8 * STEPS), batch_size=8, collate_fn=captioned if has_text else None),
        optimizers=optimizer(model.parameters(), lr=lr),
        algorithms=[make(name, keys, arguments_of(name)) for name in names],
        callbacks=graphs,
        compile_config={"backend": graphs.compile},
        max_duration=f"{STEPS}ba",
        device="cpu",
        precision="amp_bf16" if lower else "fp32",
        progress_bar=False,
        seed=0,
        **options,
    )
    trainer.fit()
    trainer.close()
    return graphs.after


def test_a_model_is_one_graph() -> None:
    assert [1] * STEPS == graphs_of([])


def test_a_learning_rate_in_a_tensor_is_no_constant_of_the_compiled_step() -> None:
    """One graph without and one with optimizer state, for all learning rates; a float takes another one."""
    make = partial(DecoupledAdamW, weight_decay=1e-4)
    after = graphs_of([], make, lr=torch.tensor(0.1), compile_step=True, schedulers=CosineAnnealingScheduler())

    assert [2, *[3] * (STEPS - 1)] == after


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, DecoupledAdamW])
def test_a_compiled_step_is_two_graphs_at_any_learning_rate(optimizer: Any) -> None:
    after = graphs_of([], optimizer, compile_step=True, schedulers=CosineAnnealingScheduler())

    # Forward pass and loss; the optimizer, again once it has a state, and again with a learning rate that varies.
    assert 2 == after[0]
    assert after[2] <= 4
    assert after[2] == after[-1]


def test_losses_outlive_graphs_that_overwrite_what_they_return() -> None:
    """As CUDA graphs do; losses are kept for loggers, for `plot` and to detect NaN."""
    overwritten = 0

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        returned: list[torch.Tensor] = []

        def run(*arguments: Any) -> Any:
            nonlocal overwritten
            for tensor in returned:
                tensor.fill_(torch.nan)
                overwritten += 1
            outputs = module(*arguments)
            returned[:] = [each.detach() for each in outputs if isinstance(each, torch.Tensor) and each.requires_grad]
            return outputs

        return run

    torch.manual_seed(0)
    model, memory = Classifier(), InMemoryLogger()
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(noise(8 * 20), batch_size=8),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        max_duration="1ep",
        loggers=memory,
        compile_step=True,
        compile_config={"backend": backend},
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    losses = [float(value) for _, value in memory.data["loss/train/total"]]

    assert overwritten >= 19
    assert len(losses) == 20
    assert all(map(math.isfinite, losses))


def test_what_acts_between_forward_and_loss_keeps_the_loss_out_of_the_graph() -> None:
    assert [2] * STEPS == graphs_of("LabelSmoothing", compile_step=True)  # the forward pass; the optimizer
    # An optimizer that runs the passes itself is not compiled.
    assert [1] * STEPS == graphs_of("SAM", compile_step=True)


@pytest.mark.parametrize("options", [{"precision": "amp_bf16"}, {"device_train_microbatch_size": 4}])
def test_a_compiled_step_trains_as_an_eager_one_does(options: dict[str, Any]) -> None:
    weights = []
    for compiled in ({}, {"compile_config": {"backend": "aot_eager"}, "compile_step": True}):
        torch.manual_seed(0)
        model = Classifier()
        trainer = Trainer(
            model=model,
            train_dataloader=DataLoader(noise(8 * STEPS), batch_size=8),
            optimizers=DecoupledSGDW(model.parameters(), lr=0.1, momentum=0.9),
            max_duration=f"{STEPS}ba",
            device="cpu",
            progress_bar=False,
            seed=0,
            **{**options, **compiled},
        )
        trainer.fit()
        trainer.close()
        weights.append([parameter.detach().clone() for parameter in model.parameters()])

    for eager, graph in zip(*weights, strict=True):
        torch.testing.assert_close(eager, graph)


STATIC = sorted(CLASSES.keys() - CHANGING.keys() - SPLIT - LATER)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_the_card_says_whether_the_graph_is_static(name: str) -> None:
    distribution = CLASSES[name].__module__.split(".")[2].replace("_", "-")
    readme = (ROOT / "packages" / f"composer-{distribution}" / "README.md").read_text(encoding="utf-8")
    for text in (CLASSES[name].__doc__ or "", readme):
        card = re.search(r"\*\*Compilation\*\*\s+(.*?)\.(?:\s|$)", text, re.DOTALL)
        assert card is not None, "the card of an algorithm and its README have an entry Compilation"
        assert card.group(1).startswith("static") == (name in STATIC), card.group(1)


@pytest.mark.parametrize("name", CHANGING)
def test_the_graphs_are_those_of_the_card(name: str) -> None:
    after = graphs_of(name)

    assert CHANGING[name] == (after[0], after[-1] - after[0])


def static_stacks() -> dict[str, list[str]]:
    """Return every static algorithm in a stack with others that it may be used with, by the first of the stack."""
    stacks, left = {}, STATIC
    while left:
        chosen = choose([name for name in left if (name in LANGUAGE) == (left[0] in LANGUAGE)])
        chosen = [name for name in chosen if (name in LOWER_PRECISION) == (left[0] in LOWER_PRECISION)]
        # `SWA` with a schedule needs one optimizer, and `Muon` and `SOAP` make two.
        chosen = [name for name in chosen if name not in ("Muon", "SOAP") or name == left[0]]
        stacks[left[0]] = chosen
        left = [name for name in left if name not in chosen]
    return stacks


@pytest.mark.parametrize("names", static_stacks().values(), ids="+".join)
@pytest.mark.filterwarnings("ignore::composer.algorithms.warnings.NotIntendedUseWarning")
def test_static_algorithms_together_are_one_graph(names: list[str]) -> None:
    """So each of them is; that they were not all in one run is because some exclude others."""
    assert {1} == set(graphs_of(names))


def test_blocks_that_may_be_skipped_are_graphs_of_their_own() -> None:
    graphs = Graphs()
    torch.manual_seed(0)
    model = ResNet(Bottleneck, [2, 2, 2, 2], num_classes=10, width_per_group=4)
    apply_stochastic_depth(model, "ResNetBottleneck", drop_rate=0.5, drop_distribution="uniform")
    compiled = torch.compile(model, backend=graphs.compile)
    after = []
    for _ in range(12):
        compiled(torch.randn(2, 3, 32, 32)).sum().backward()
        after.append(graphs.compiled)

    # Two kinds of blocks in each stage, a skipped block with a layer in its shortcut, and what is around the blocks.
    assert after[-1] <= 2 * 4 + 4 + 2
    assert after[-1] == after[-3], "no graph is compiled again and again"
    graphs.compiled = 0
    compiled.eval()(torch.randn(2, 3, 32, 32))
    assert 1 == graphs.compiled, "in evaluation nothing is skipped"
