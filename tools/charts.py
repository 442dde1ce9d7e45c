"""Charts and diagrams of the READMEs, drawn with the functions that the packages export."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models.resnet import Bottleneck

from composer import functional as cf
from composer import optim
from composer.algorithms import SWA, ScaleSchedule, SeqLengthWarmup
from composer.algorithms.alibi.attention_surgery_functions import register_alibi
from composer.algorithms.factorize import FactorizedLinear
from composer.algorithms.fused_layernorm import MixedLayerNorm
from composer.algorithms.ghost_batchnorm import GhostBatchNorm1d
from composer.algorithms.gyro_dropout import GyroDropoutLayer
from composer.algorithms.low_precision_groupnorm import LPGroupNorm
from composer.algorithms.low_precision_layernorm import LPLayerNorm
from composer.algorithms.schedule_free import ScheduleFreeSGD
from composer.algorithms.weight_standardization import WeightStandardizer
from composer.core import Engine, Event, State
from composer.evidence import charts as evidence
from composer.evidence.charts import BLUE, GRAY, ORANGE, make_axes
from composer.evidence.ledger import PUBLISHED, Ledger
from composer.evidence.page import ranked

LIGHT, DARK = "#eceff2", "#4b535c"
VALLEY = torch.tensor([0.4, 1.0])  # curvatures of a loss of two weights


def alibi() -> Figure:
    """Show what two heads add to the scores of their attention."""
    heads, tokens = 8, 12
    both = register_alibi(torch.nn.Module(), heads, tokens, causal=False).alibi
    assert isinstance(both, torch.Tensor)
    hidden = torch.ones(tokens, tokens).triu(1).bool()
    shades = matplotlib.colormaps["Blues_r"].resampled(24).with_extremes(bad=GRAY)
    shown = [("head 1, causal mask", both[0, 0].masked_fill(hidden, math.nan)), ("head 1", both[0, 0])]
    shown.append(("head 3", both[0, 2]))
    figure, axes = _row(len(shown), height=2.7, sharey=True)
    for axis, (title, bias) in zip(axes, shown, strict=True):
        axis.imshow(bias, cmap=shades, vmin=-6, vmax=0)
        axis.set(title=title, xlabel="key", xticks=[0, 5, 11], yticks=[0, 5, 11])
    axes[0].set_ylabel("query")
    figure.colorbar(axes[0].images[0], ax=axes, label="bias", shrink=0.8)
    return figure


def ema() -> Figure:
    """Show a weight that training moves about, and its average."""
    steps, weight = 150, torch.nn.Linear(1, 1, bias=False)
    average = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(weight.weight)
    average.load_state_dict(weight.state_dict())
    weights, averages = [], []
    for batch in range(steps):
        with torch.no_grad():
            weight.weight.fill_(1 - math.exp(-batch / 30) + 0.15 * torch.randn(()).item())
        cf.compute_ema(weight, average, smoothing=2 ** (-1 / 10))
        weights.append(weight.weight.item())
        averages.append(average.weight.item())
    figure, axes = make_axes("batch", "one weight")
    axes.plot(weights, color=GRAY, linewidth=1, label="training weight")
    axes.plot(averages, color=BLUE, linewidth=2, label='average, half_life="10ba"')
    axes.legend(frameon=False, loc="lower right")
    return figure


def ema_nesterov() -> Figure:
    """Show the noisy path of two weights, and the points ahead of it at which gradients are computed."""
    weight = torch.tensor([-5.0, 2.2])
    average, path, ahead = weight.clone(), [], []
    for _ in range(10):
        point = weight.clone()
        cf.displace_weights([point], [average], beta=1.2, decay=0.8)
        path.append(weight)
        ahead.append(point)
        weight = point - 0.2 * (VALLEY * point + 1.2 * torch.randn(2))
        average = 0.8 * average + 0.2 * weight
    figure, axes = _valley()
    for start, end in zip(ahead[:-1], path[1:], strict=True):
        axes.plot(*torch.stack([start, end]).T, color=GRAY, linewidth=1)
    axes.plot(*torch.stack(path).T, "o", color=DARK, markersize=4, label="weights, after each step")
    for start, end in zip(path, ahead, strict=True):
        axes.plot(*torch.stack([start, end]).T, color=BLUE, linewidth=1)
    axes.plot(*torch.stack(ahead).T, "o", color=BLUE, markersize=4, label="where the gradient is computed")
    axes.legend(frameon=False, loc="lower right")
    return figure


def swa() -> Figure:
    """Show when SWA averages, and when the average becomes the weights."""
    algorithm = SWA(swa_start="0.6dur", swa_end="0.9dur", update_interval="1ep")
    state = State(
        model=torch.nn.Linear(1, 1), max_duration="20ep", rank_zero_seed=0, dataloader=[0], algorithms=[algorithm]
    )
    engine = Engine(state)
    engine.run_event(Event.INIT)
    engine.run_event(Event.FIT_START)
    averaged, replaced = [], []
    for epoch in range(20):
        counter, completed = algorithm.step_counter, algorithm.swa_completed
        state.timestamp = state.timestamp.to_next_batch(samples=1).to_next_epoch()
        engine.run_event(Event.EPOCH_END)
        if algorithm.step_counter > counter:
            averaged.append(epoch + 1)
        if algorithm.swa_completed and not completed:
            replaced.append(epoch + 1)
    figure, axes = make_axes("epoch", height=1.7)
    axes.scatter(range(1, 21), [0] * 20, s=80, facecolors="white", edgecolors=GRAY, label="weights after an epoch")
    axes.scatter(averaged, [0] * len(averaged), s=80, color=BLUE, label="averaged")
    for epoch in replaced:
        axes.annotate(
            "swa_end: the average\nbecomes the weights", (epoch, 0.008), (epoch, 0.045), ha="center", va="bottom",
            arrowprops={"arrowstyle": "->"},
        )  # fmt: skip
    axes.annotate(
        "swa_start", (averaged[0], 0.008), (averaged[0], 0.045), ha="center", va="bottom",
        arrowprops={"arrowstyle": "->"},
    )  # fmt: skip
    axes.set(ylim=(-0.03, 0.11), yticks=[], xticks=range(0, 21, 5))
    axes.spines["left"].set_visible(False)
    axes.legend(frameon=False, loc="upper left", ncols=1)
    return figure


def layer_freezing() -> Figure:
    """Show which layers are trained, over a run."""
    names, steps = ["conv1", "conv2", "conv3", "conv4", "linear"], 200
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in names))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    frozen_at = [1.0] * len(names)
    for step in range(steps + 1):
        count, _ = cf.freeze_layers(model, optimizer, step / steps, freeze_start=0.4, freeze_level=1.0)
        for layer in range(count):
            frozen_at[layer] = min(frozen_at[layer], step / steps)
    figure, axes = make_axes("fraction of the run", "")
    axes.barh(names, frozen_at, color=BLUE, height=0.6, label="trained")
    axes.barh(names, [1 - at for at in frozen_at], left=frozen_at, color=GRAY, height=0.6, label="frozen")
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return figure


def no_op_model() -> Figure:
    """Show which parts of a step are left without the model; the widths are an example."""
    parts = {
        "batch from the dataloader": (3, BLUE),
        "callbacks and loop": (1, ORANGE),
        "model and optimizer": (6, GRAY),
    }
    figure, axes = make_axes("time of a step: an example", "", height=1.7)
    for row, kept in (("your model", 3), ("NoOpModel", 2)):
        start = 0
        for name, (width, color) in list(parts.items())[:kept]:
            axes.barh(row, width, left=start, color=color, height=0.6, label=name if kept == len(parts) else None)
            start += width
    axes.invert_yaxis()
    axes.set(xticks=[], xlim=(0, 10))
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    return figure


def seq_length_warmup() -> Figure:
    """Show how long the sequences of the batches are, over a run."""
    batches, length = 100, 128
    algorithm = SeqLengthWarmup(duration=0.5, min_seq_length=16, max_seq_length=length, step_size=16)
    tokens = torch.zeros(1, length, dtype=torch.int64)
    state = State(
        model=torch.nn.Linear(1, 1), max_duration=f"{batches}ba", rank_zero_seed=0, dataloader=[0],
        algorithms=[algorithm],
    )  # fmt: skip
    engine = Engine(state)
    lengths = []
    for _ in range(batches):
        state.batch = {"input_ids": tokens}
        engine.run_event(Event.AFTER_DATALOADER)
        lengths.append(state.batch["input_ids"].shape[1])
        state.timestamp = state.timestamp.to_next_batch(samples=1)
    figure, axes = make_axes("batch", "tokens per sequence")
    axes.plot(lengths, color=BLUE, linewidth=2, drawstyle="steps-post")
    axes.set(ylim=(0, 1.05 * length), yticks=range(0, length + 1, 32))
    return figure


def batch_size_warmup() -> Figure:
    """Show the size of batches over the samples of a run."""
    figure, axes = make_axes("samples", "samples per batch")
    for shape, color in (("doubling", BLUE), ("linear", ORANGE)):
        drawn, sizes = [0], []
        while drawn[-1] < 10_000:
            sizes.append(cf.compute_batch_size(drawn[-1], duration=6_000, initial=16, final=256, shape=shape))
            drawn.append(drawn[-1] + sizes[-1])
        axes.plot(drawn[:-1], sizes, color=color, linewidth=2, drawstyle="steps-post", label=f'shape="{shape}"')
    axes.set(ylim=(0, 275), yticks=[16, 64, 128, 256], xlim=(0, 10_000))
    axes.legend(frameon=False, loc="lower right")
    return figure


def logit_softcap() -> Figure:
    """Show capped logits as a function of the logits."""
    figure, axes = make_axes("logit", "capped logit")
    logits = torch.linspace(-120, 120, 241)
    axes.plot(logits, logits, color=GRAY, linewidth=1, label="not capped")
    for cap, color in ((30.0, BLUE), (50.0, ORANGE)):
        axes.plot(logits, cf.softcap_logits(logits, cap), color=color, linewidth=2, label=f"cap {cap:g}")
    axes.set(ylim=(-62, 62), yticks=[-50, -30, 0, 30, 50])
    axes.legend(frameon=False, loc="upper left")
    return figure


def stochastic_depth() -> Figure:
    """Show with which probability each block of a network is skipped."""
    figure, axes = make_axes("block", "probability to skip it")
    for distribution, color, marker in (("linear", BLUE, "o"), ("uniform", ORANGE, "s")):
        model: Any = torch.nn.Sequential(*(Bottleneck(64, 16) for _ in range(16)))
        cf.apply_stochastic_depth(model, "ResNetBottleneck", drop_rate=0.2, drop_distribution=distribution)
        rates = [float(block.drop_rate) for block in model]
        axes.plot(range(1, 17), rates, marker=marker, color=color, label=f'drop_distribution="{distribution}"')
    axes.set(ylim=(0, 0.27), xticks=[1, 4, 8, 12, 16])
    axes.legend(frameon=False, loc="upper left", ncols=2)
    return figure


def schedules() -> Figure:
    """Show the factors of the learning rate, over a run."""
    shown = [
        ("StepScheduler", optim.StepScheduler("20ep", gamma=0.5)),
        ("LinearScheduler", optim.LinearScheduler()),
        ("CosineAnnealingScheduler", optim.CosineAnnealingScheduler()),
        ("CosineAnnealingWarmRestartsScheduler", optim.CosineAnnealingWarmRestartsScheduler("20ep", t_mult=1.6)),
        ("PolynomialScheduler", optim.PolynomialScheduler(power=3.0)),
        ("CosineAnnealingWithWarmupScheduler", optim.CosineAnnealingWithWarmupScheduler("20ep")),
    ]
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes: Any = figure.subplots(2, 3, sharex=True, sharey=True)
    for axis, (name, schedule) in zip(axes.flat, shown, strict=True):
        state = State(model=torch.nn.Linear(1, 1), max_duration="100ep", rank_zero_seed=0, dataloader=[0])
        factors = []
        while state.timestamp < "100ep":
            factors.append(schedule(state))
            state.timestamp = state.timestamp.to_next_batch(samples=1).to_next_epoch()
        axis.plot(factors, color=BLUE, linewidth=2)
        axis.set_title(name, fontsize=7.5)
        axis.set(ylim=(0, 1.05), yticks=[0, 1], xticks=[0, 50, 100])
    figure.supxlabel("epoch", fontsize=9)
    figure.supylabel("factor", fontsize=9)
    return figure


def effects() -> Figure:
    """Show what the published ledger says of all methods on its first task: effects with their intervals."""
    entries = next(iter(ranked([Ledger(PUBLISHED)]).values()))
    return evidence.effects([entry for entry in entries if entry.get("comparison") is not None])


def composing() -> Figure:
    """Show what the stack of each task of the published ledger buys: complete runs of each length, and plain's."""
    ledger, stacks = Ledger(PUBLISHED), list[dict[str, Any]]()
    for entries in ranked([ledger]).values():
        gains = (entry for entry in entries if "+" in entry["method"] and entry["verdict"]["word"] == "gain")
        stacks += itertools.islice(gains, 1)
    return evidence.ladders(stacks, [ledger.entries("ladder", stack["task"])[-1] for stack in stacks])


def label_smoothing() -> Figure:
    """Show the target of an example before and after smoothing."""
    classes, logits, label = ["cat", "dog", "car", "house", "tree"], torch.zeros(1, 5), torch.tensor([0])
    before, after = (cf.smooth_labels(logits, label, smoothing)[0] for smoothing in (0.0, 0.2))
    return _bars(classes, {"label": before, "smoothing=0.2": after}, "target")


def distillation() -> Figure:
    """Show a label, and what a teacher says of the same image."""
    classes, logits = ["cat", "lynx", "dog", "car", "house"], torch.tensor([8.0, 6.2, 4.4, 0.0, -0.6])
    label = torch.nn.functional.one_hot(torch.tensor(0), 5)
    shown = {"label": label, "teacher": logits.softmax(0), "teacher, temperature=4": (logits / 4).softmax(0)}
    return _bars(classes, shown, "probability")


def sam() -> Figure:
    """Show a loss, and the highest loss in the neighborhood of each weight, with their lowest points."""
    w, near = torch.linspace(0, 5, 1001), 100  # 100 points are rho = 0.5
    sharp, flat = torch.exp(-((w - 1.2).div(0.14) ** 2)), torch.exp(-((w - 3.3).div(0.9) ** 2))
    loss = 1 + 0.02 * (w - 3) ** 2 - 0.85 * sharp - 0.75 * flat
    highest = torch.nn.functional.max_pool1d(loss[None], 2 * near + 1, 1, near)[0]
    figure, axes = make_axes("weight", "")
    shown = [
        (loss, ORANGE, "loss", "sharp minimum"),
        (highest, BLUE, "highest loss nearby (minimized by SAM)", "flat minimum"),
    ]
    for values, color, label, name in shown:
        lowest = values.argmin()
        axes.plot(w, values, color=color, linewidth=2, label=label)
        axes.plot(w[lowest], values[lowest], "o", color=color)
        axes.annotate(name, (w[lowest], loss[lowest]), (0, -13), textcoords="offset points", ha="center")
    axes.set(xlim=(0.5, 4.5), ylim=(0, 1.45), yticks=[], xticks=[])
    axes.legend(frameon=False, loc="upper right", ncols=2)
    return figure


def muon() -> Figure:
    """Show the size of a gradient, and of the update that is made of it, in each direction of the matrix."""
    size = 16
    left, right = (torch.linalg.qr(torch.randn(size, size))[0] for _ in range(2))
    sizes = 0.8 ** torch.arange(size)
    update = left.T @ cf.orthogonalize_matrix(left @ sizes.diag() @ right) @ right.T
    names = [str(direction + 1) for direction in range(size)]
    figure = _bars(names, {"gradient": sizes, "update": update.diag()}, "size (singular value)", texts=False)
    figure.axes[0].set_xlabel("direction of the matrix")
    return figure


def soap() -> Figure:
    """Show how the entries of the gradients of a matrix correlate, among the weights and in the eigenbasis."""
    size = 4
    model = torch.nn.Sequential(*(torch.nn.Linear(size, size, bias=False) for _ in range(3)))
    optimizer, _ = cf.build_soap(model, precondition_frequency=1, shampoo_beta=0.99)
    left, right = (torch.randn(size, size) for _ in range(2))
    gradients = left @ torch.randn(1000, size, size) @ right
    weight: Any = model[1].weight
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    rows, columns = optimizer.state[weight]["Q"]
    figure, axes = _row(2, height=2.7)
    for axis, values, title in zip(
        axes, (gradients, rows.T @ gradients @ columns), ("weights", "eigenbasis of SOAP"), strict=True
    ):
        axis.imshow(torch.corrcoef(values.flatten(1).T).abs(), cmap="Blues", vmin=0, vmax=1)
        axis.set(title=title, xlabel="entry of the gradient", xticks=[], yticks=[])
    figure.colorbar(axes[0].images[0], ax=axes, label="correlation (absolute)", shrink=0.8)
    return figure


def hyperball() -> Figure:
    """Show a step of an optimizer, and the step on the circle of the initial norm in the same direction."""
    figure, axes = make_axes("one weight", "another weight", height=2.8)
    weight, before = torch.tensor([[3.5, 1.3]]), torch.tensor([[3.0, 2.0]])
    stepped, radii = weight.clone(), cf.matrix_norms([before])
    cf.apply_hyperball([weight], [before], radii, lr=0.5)
    angles = torch.linspace(-0.4, 1.9, 100)
    axes.plot(radii[0] * angles.cos(), radii[0] * angles.sin(), color=GRAY, linewidth=1, label="the initial norm")
    arrows = ((before, "black", "weights"), (stepped, GRAY, "after the optimizer's step"), (weight, BLUE, "Hyperball"))
    for end, color, label in arrows:
        axes.plot(*end.T, "o", color=color, label=label, zorder=3)
    along = before + 0.5 * radii[0] * (stepped - before) / (stepped - before).norm()
    axes.annotate("", along[0].tolist(), before[0].tolist(), arrowprops={"arrowstyle": "->", "color": ORANGE})
    axes.annotate("", weight[0].tolist(), along[0].tolist(), arrowprops={"arrowstyle": "->", "color": ORANGE})
    axes.plot([0], [0], "+", color="black")
    axes.set(aspect="equal", xlim=(-1.5, 8.5), ylim=(-0.8, 4.0), xticks=[], yticks=[])
    axes.legend(frameon=False, loc="upper right")
    return figure


def cautious_decay() -> Figure:
    """Show the elements of a weight before and after a step, and after the decay of some of them."""
    before, weight = 1.2 * torch.randn(12), torch.zeros(12)
    weight += before + 0.35 * torch.randn(12)
    stepped = weight.clone()
    cf.apply_cautious_decay([weight], [before], lr=1.0, weight_decay=0.25)
    is_decayed, places = weight != stepped, torch.arange(12.0)
    figure, axes = make_axes("element of the weight", "value", height=2.6)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.vlines(places, before, stepped, color=GRAY, linewidth=1.5)
    axes.vlines(places, stepped, weight, color=ORANGE, linewidth=2.5)
    axes.plot(places, before, "o", color="white", markeredgecolor=GRAY, label="before the step")
    axes.plot(places, stepped, "o", color=BLUE, label="after it")
    axes.plot(places[is_decayed], weight[is_decayed], "o", color=ORANGE, label="decayed: the step went towards zero")
    axes.set(xticks=[])
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    return figure


def gradient_clipping() -> Figure:
    """Show the norms of gradients before and after clipping."""
    weight, threshold = torch.nn.Parameter(torch.zeros(30)), 1.5
    spikes = {18: 5.0, 44: 8.0, 45: 2.5, 66: 4.0}
    before, after = [], []
    for batch in range(80):
        weight.grad = spikes.get(batch, 1.0) * torch.randn(30) / 30**0.5
        before.append(weight.grad.norm().item())
        cf.apply_gradient_clipping([weight], "norm", threshold)
        after.append(weight.grad.norm().item())
    figure, axes = make_axes("batch", "norm of the gradients")
    axes.plot(before, color=GRAY, linewidth=2, label="before")
    axes.plot(after, color=BLUE, linewidth=2, label="after")
    axes.axhline(threshold, color="black", linewidth=0.8, linestyle="--")
    axes.annotate("clipping_threshold", (0, threshold), (0, 4), textcoords="offset points")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper right")
    return figure


def lawa() -> Figure:
    """Show how weights move around a minimum, and the mean of the last snapshots."""
    weight, path = torch.nn.Parameter(torch.tensor([-5.0, 2.2])), []
    optimizer = torch.optim.SGD([weight], lr=0.5)
    figure, axes = _valley()
    for _ in range(120):
        weight.grad = VALLEY * weight.detach() + 1.1 * torch.randn(2)
        optimizer.step()
        path.append(weight.detach().clone())
    snapshots = path[9::10]
    last = snapshots[-6:]
    mean = cf.average_weights([{"weight": snapshot} for snapshot in last])["weight"]
    axes.plot(*torch.stack(path).T, color=GRAY, linewidth=0.8)
    axes.scatter(*torch.stack(snapshots).T, s=36, facecolors="white", edgecolors=ORANGE, label="snapshots", zorder=3)
    axes.scatter(*torch.stack(last).T, s=36, color=ORANGE, label="the last 6", zorder=3)
    axes.scatter(*mean, s=130, marker="*", color=BLUE, label="their mean", zorder=4)
    axes.legend(frameon=False, loc="upper right")
    return figure


def schedule_free() -> Figure:
    """Show the weights that schedule-free training moves, and their average, which is evaluated."""
    weight = torch.nn.Parameter(torch.tensor([-5.0, 2.2]))
    optimizer = ScheduleFreeSGD([weight], lr=0.8)
    moved, averages = [], []
    figure, axes = _valley()
    for _ in range(80):
        weight.grad = VALLEY * weight.detach() + 0.9 * torch.randn(2)
        optimizer.step()
        moved.append(optimizer.state[weight]["z"].clone())
        optimizer.eval()
        averages.append(weight.detach().clone())
        optimizer.train()
    axes.plot(
        *torch.stack(moved).T, "o-", color=GRAY, linewidth=0.8, markersize=3, label="steps, constant learning rate"
    )
    axes.plot(*torch.stack(averages).T, color=BLUE, linewidth=2, label="average of all so far")
    axes.plot(*averages[-1], marker="*", markersize=11, color=BLUE)
    axes.legend(frameon=False, loc="upper right")
    return figure


def selective_backprop() -> Figure:
    """Show the losses of a batch in order, and which examples are kept."""
    losses = torch.distributions.Gamma(1.2, 1.5).sample((48,)).sort().values

    def loss(outputs: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
        return outputs

    _, kept = cf.select_using_loss(losses, torch.arange(48), torch.nn.Identity(), loss, keep=0.5)
    figure, axes = make_axes("examples of a batch, by loss", "loss")
    colors = [BLUE if example in kept else GRAY for example in range(48)]
    axes.bar(range(48), losses, color=colors)
    axes.bar(0, 0, color=BLUE, label="trained on (keep=0.5)")
    axes.bar(0, 0, color=GRAY, label="skipped")
    axes.set_xticks([])
    axes.legend(frameon=False, loc="upper left")
    return figure


def sequence_packing() -> Figure:
    """Show documents as padded rows and as packed rows, and which tokens a packed token sees."""
    lengths, colors = (5, 3, 6, 1), [LIGHT, BLUE, ORANGE, GRAY, DARK]
    packed = cf.pack_sequences([[1] * length for length in lengths], length=8)["document_ids"]
    rows = [torch.full((size,), document) for document, size in enumerate(lengths)]
    padded = torch.stack([torch.nn.functional.pad(row, (0, 8 - len(row)), value=-1) for row in rows])
    seen = torch.where(cf.make_document_mask(packed[:1])[0, 0], packed[:1], -1)
    figure, axes = _grids("padded: 4 rows", "packed: 2 rows", "what the tokens of row 1 see", height=2.2)
    for axis, documents in zip(axes, (padded, packed, seen), strict=True):
        _cells(axis, documents + 1, colors)
    handles = [Patch(color=LIGHT, label="padding")]
    axes[0].legend(handles=handles, frameon=False, loc="upper left", bbox_to_anchor=(0, 0))
    axes[2].set(xlabel="token that is seen", ylabel="token")
    return figure


def gyro_dropout() -> Figure:
    """Show which units are kept at each step, by dropout and by gyro dropout."""
    units, batches = 12, 24
    gyro = GyroDropoutLayer(iters_per_epoch=batches, max_epoch=1, p=0.5, sigma=4, tau=1, seed=0)
    figure, axes = _grids("dropout", "gyro dropout, sigma=4, tau=1", height=2.2)
    for axis, layer in zip(axes, (torch.nn.Dropout(0.5), gyro), strict=True):
        kept = torch.stack([layer(torch.ones(1, units))[0] > 0 for _ in range(batches)], 1)
        _cells(axis, kept.int(), [LIGHT, BLUE])
        axis.set_xlabel("batch")
    axes[0].set_ylabel("unit (blue: kept)")
    return figure


def channels_last() -> Figure:
    """Show in which order the weights of a filter are in memory."""
    conv, colors = torch.nn.Conv2d(3, 1, 2), [BLUE, ORANGE, GRAY]
    figure = Figure(figsize=(6.4, 1.8), layout="constrained")
    axes: Any = figure.subplots(2, 1)
    for axis, name in zip(axes, ("NCHW", "NHWC"), strict=True):
        conv.weight.data.copy_(torch.arange(12).view(1, 3, 2, 2))
        memory = conv.weight.detach().as_strided((1, 12), (12, 1)).int()
        _cells(axis, memory // 4, colors)
        for place, number in enumerate(memory[0].tolist()):
            axis.text(place, 0, str(number % 4 + 1), color="white" if number < 4 else "black", ha="center", va="center")
        axis.set_ylabel(name, rotation=0, ha="right", va="center")
        cf.apply_channels_last(conv)
    axes[1].set_xlabel("order in memory of the weights at positions 1 to 4 of a filter")
    handles = [Patch(color=color, label=f"channel {index + 1}") for index, color in enumerate(colors)]
    figure.legend(handles=handles, frameon=False, loc="outside upper center", ncols=3)
    return figure


def chunked_cross_entropy() -> Figure:
    """Show the logits of a batch, and those that exist at the same time."""
    tokens, classes, width = 512, 8192, 256
    hidden, weight, targets = torch.randn(tokens, width), torch.randn(classes, width), torch.zeros(tokens).long()
    with Operators() as operators:
        cf.compute_chunked_cross_entropy(hidden, weight, targets)
    logits = [output for name, _, output in operators.calls if name.startswith("mm") and output.shape[1] == classes]
    figure, axes = _grids("cross_entropy", "compute_chunked_cross_entropy", height=2.4)
    for axis, rows in zip(axes, (tokens, len(logits[0])), strict=True):
        colors = [BLUE, *[LIGHT] * (tokens // rows - 1)]
        axis.barh(range(0, tokens, rows), 1, rows, align="edge", color=colors, edgecolor="white")
        mebibytes = rows * classes * hidden.element_size() / 2**20
        axis.text(0.5, rows / 2, f"{mebibytes:.0f} MiB of logits at a time", color="white", ha="center", va="center")
        axis.set(xlim=(0, 1), ylim=(tokens, 0), xlabel=f"{classes:,} classes")
    axes[0].set_ylabel(f"{tokens} tokens")
    return figure


def factorize() -> Figure:
    """Show a weight matrix and the two that replace it, to scale."""
    linear = torch.nn.Linear(512, 512)
    factorized = FactorizedLinear.from_linear(linear, latent_features=0.25)
    figure, axes = make_axes(height=2.2)
    left = 0
    for layer, sign in ((linear, r"$\approx$"), (factorized.module0, r"$\times$"), (factorized.module1, "")):
        columns, rows = layer.weight.shape
        fill, color = (GRAY, "black") if layer is linear else (BLUE, "white")
        axes.add_patch(Rectangle((left, 0), columns, rows, color=fill))
        center, angle = (left + columns / 2, rows / 2), 90 if columns < rows else 0
        text = f"{rows} by {columns}:\n{rows * columns:,} weights"
        axes.text(*center, text, color=color, rotation=angle, ha="center", va="center")
        axes.text(left + columns + 60, 256, sign, ha="center", va="center", fontsize=14)
        left += columns + 120
    axes.set(xlim=(0, left), ylim=(512, 0), aspect="equal")
    axes.axis("off")
    return figure


def ghost_batchnorm() -> Figure:
    """Show the parts of a batch that are normalized together, with mean and standard deviation."""
    values = torch.randn(32, 1)
    figure, axes = _row(2, height=2.4, sharey=True)
    for axis, size, title in zip(axes, (32, 8), ("batch normalization", "ghost_batch_size=8"), strict=True):
        layer, start = GhostBatchNorm1d(torch.nn.BatchNorm1d(1), ghost_batch_size=size), 0
        parts: list[torch.Tensor] = []
        layer.batchnorm.register_forward_pre_hook(lambda _, inputs, parts=parts: parts.append(inputs[0]))
        layer(values)
        axis.scatter(range(32), values, s=14, color=DARK, zorder=3)
        for part in parts:
            span, mean, std = (start - 0.4, start + len(part) - 0.6), part.mean().item(), part.std(correction=0).item()
            axis.fill_between(span, mean - std, mean + std, color=BLUE, alpha=0.2, linewidth=0)
            axis.plot(span, (mean, mean), color=BLUE, linewidth=2)
            start += len(part)
        axis.set(title=title, xlabel="example", xticks=[])
    axes[0].set_ylabel("one channel")
    return figure


def gated_linear_units() -> Figure:
    """Show the feed-forward layer of BERT without and with a gate."""
    figure, axes = make_axes(height=2.0)
    boxes: dict[str, Any] = {}  # drawn so far, by name
    layout = [  # name, text, place, color, the boxes that it feeds
        ("y", "linear", (3.2, 2), LIGHT, []), ("act", "GELU", (2, 2), LIGHT, ["y"]),
        ("dense", "linear", (1, 2), LIGHT, ["act"]), ("x", "x", (0, 2), "white", ["dense"]),
        ("gated y", "linear", (4.2, 0.5), LIGHT, []), ("product", r"$\times$", (3.2, 0.5), BLUE, ["gated y"]),
        ("gate act", "GELU", (2, 1), LIGHT, ["product"]), ("gate", "linear", (1, 1), LIGHT, ["gate act"]),
        ("value", "linear", (1, 0), BLUE, ["product"]), ("gated x", "x", (0, 0.5), "white", ["gate", "value"]),
    ]  # fmt: skip
    for name, text, place, color, targets in layout:
        style = {"boxstyle": "round,pad=0.4", "facecolor": color, "edgecolor": "none"}
        ink = "white" if color == BLUE else "black"
        boxes[name] = axes.text(*place, text, ha="center", va="center", color=ink, bbox=style)
        for target in targets:
            ends = {"patchA": boxes[name].get_bbox_patch(), "patchB": boxes[target].get_bbox_patch()}
            axes.annotate("", boxes[target].get_position(), place, arrowprops={"arrowstyle": "->", **ends})
    for y, title in ((2, "feed-forward layer"), (0.5, "GatedLinearUnits")):
        axes.text(-0.4, y, title, ha="right", va="center")
    axes.set(xlim=(-1.8, 4.6), ylim=(-0.5, 2.5))
    axes.axis("off")
    return figure


def fused_layernorm() -> Figure:
    """Show the precision of each part of layer normalization under autocast."""
    return _precisions("LayerNorm", "FusedLayerNorm", MixedLayerNorm(4))


def low_precision_groupnorm() -> Figure:
    """Show the precision of each part of group normalization under autocast."""
    return _precisions("GroupNorm", "LowPrecisionGroupNorm", LPGroupNorm(2, 4))


def low_precision_layernorm() -> Figure:
    """Show the precision of each part of layer normalization under autocast."""
    return _precisions("LayerNorm", "LowPrecisionLayerNorm", LPLayerNorm(4))


def qk_norm() -> Figure:
    """Show the largest score of attention as the weights of queries and keys grow."""
    tokens, dim = 64, 64
    x = torch.randn(tokens, dim)
    scales = torch.linspace(0.2, 4, 39)
    figure, axes = make_axes("factor on the weights of queries and keys", "largest score")
    for norms, color, label in ((False, ORANGE, "without QKNorm"), (True, BLUE, "QKNorm")):
        largest = []
        for scale in scales:
            layer: Any = torch.nn.ModuleDict({name: torch.nn.Linear(dim, dim, bias=False) for name in ("query", "key")})
            for seed, name in enumerate(layer):
                weight = torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed))
                layer[name].weight.data.copy_(scale * weight / dim**0.5)
            if norms:
                cf.apply_qk_norm(layer, query_name="query", key_name="key", head_dim=dim)
            scores = layer["query"](x) @ layer["key"](x).T / dim**0.5
            largest.append(scores.abs().max().item())
        axes.plot(scales, largest, color=color, linewidth=2, label=label)
    axes.set(ylim=0, xlim=0)
    axes.legend(frameon=False, loc="upper left")
    return figure


def scale_schedule() -> Figure:
    """Show the learning rate of a run, and of the run scaled to half."""
    figure, axes = make_axes("epoch", "learning rate")
    for ratio, color, label in ((1.0, GRAY, "90 epochs"), (0.5, BLUE, "ratio=0.5")):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 60, 80], gamma=0.3)
        state = State(
            model=torch.nn.Linear(1, 1), max_duration="90ep", rank_zero_seed=0, dataloader=[0], optimizers=optimizer,
            schedulers=scheduler, algorithms=[ScaleSchedule(ratio)],
        )  # fmt: skip
        Engine(state).run_event(Event.INIT)
        assert state.max_duration is not None
        rates: list[float] = []
        for _ in range(int(state.max_duration.value)):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        axes.plot([*rates, rates[-1]], color=color, linewidth=2, drawstyle="steps-post", label=label)
        axes.plot(len(rates), rates[-1], "o", color=color)
    axes.set(ylim=0, xlim=(0, 92), yticks=[0, 0.1], xticks=[0, 15, 30, 45, 60, 90])
    axes.legend(frameon=False, loc="upper right")
    return figure


def weight_standardization() -> Figure:
    """Show the weights of three filters before and after."""
    means, stds = torch.tensor([-1.5, 0.5, 3.0]), torch.tensor([0.6, 1.4, 0.3])
    weights = means[:, None] + stds[:, None] * torch.randn(3, 2304)
    figure, axes = _row(2, height=2.2, sharex=True)
    bins, shown = (
        torch.linspace(-5, 5, 41).tolist(),
        [("weights", weights), ("standardized", WeightStandardizer()(weights))],
    )
    for axis, (title, filters) in zip(axes, shown, strict=True):
        for index, color in enumerate((BLUE, ORANGE, DARK)):
            axis.hist(filters[index], bins, color=color, alpha=0.5, histtype="stepfilled", label=f"filter {index + 1}")
        axis.set(title=title, yticks=[])
        axis.spines["left"].set_visible(False)
    axes[0].legend(frameon=False, loc="upper left")
    return figure


def whitening() -> Figure:
    """Show the values of neighboring pixels, and the outputs of the whitening filters."""
    smooth = torch.nn.functional.avg_pool2d(torch.randn(1, 1, 62, 62), 5, 1)
    images = smooth / smooth.std()
    filters = cf.compute_whitening_filters(images, kernel_size=(1, 2))[:2]
    outputs = torch.nn.functional.conv2d(images.double(), filters)[0]
    pixels = torch.stack([images[0, 0, :, :-1], images[0, 0, :, 1:]])
    figure, axes = _row(2, height=2.9)
    shown = [(pixels, "pixel", "pixel to its right", DARK), (outputs, "output of filter 1", "output of filter 2", BLUE)]
    for axis, (values, xlabel, ylabel, color) in zip(axes, shown, strict=True):
        axis.scatter(*values.flatten(1)[:, ::23], s=9, color=color)
        axis.set(xlabel=xlabel, ylabel=ylabel, xlim=(-3.5, 3.5), ylim=(-3.5, 3.5), aspect="equal")
    return figure


def z_loss() -> Figure:
    """Show the loss of an example as a number is added to all of its logits."""
    logits, label = torch.tensor([2.0, 1.0, 0.0]), torch.tensor([0])
    logits = logits - logits.logsumexp(0)
    shifts = torch.linspace(-60, 60, 121)
    entropy = torch.stack([torch.nn.functional.cross_entropy((logits + shift)[None], label) for shift in shifts])
    penalty = torch.stack([cf.compute_z_loss((logits + shift)[None], label, coefficient=1e-4) for shift in shifts])
    figure, axes = make_axes("log Z, as the same number is added to all logits", "loss")
    axes.plot(shifts, entropy, color=GRAY, linewidth=2, label="cross-entropy")
    axes.plot(shifts, entropy + penalty, color=BLUE, linewidth=2, label="cross-entropy + z-loss")
    axes.set(ylim=0)
    axes.legend(frameon=False, loc="lower right")
    return figure


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects what torch computes: for each operator its name, its tensors and its first result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        self.calls.append((func.__name__, tensors, result[0] if isinstance(result, tuple) else result))
        return result


def _bars(names: Sequence[str], groups: dict[str, torch.Tensor], ylabel: str, texts: bool = True) -> Figure:
    """Show groups of values, one of each group for each name."""
    figure, axes = make_axes("", ylabel)
    width, places = 0.8 / len(groups), torch.arange(len(names))
    for index, (label, values) in enumerate(groups.items()):
        color = (GRAY, BLUE, ORANGE)[index]
        bars = axes.bar(places + (index - (len(groups) - 1) / 2) * width, values, width, color=color, label=label)
        if texts:
            axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.set(xticks=places, xticklabels=names)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(groups))
    return figure


def _row(count: int, height: float, sharex: bool = False, sharey: bool = False) -> tuple[Figure, Any]:
    """Return axes side by side."""
    figure = Figure(figsize=(7.2, height), layout="constrained")
    return figure, figure.subplots(1, count, sharex=sharex, sharey=sharey)


def _grids(*titles: str, height: float) -> tuple[Figure, Any]:
    """Return axes side by side, without ticks and spines."""
    figure, axes = _row(len(titles), height)
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    return figure, axes


def _cells(axes: Any, values: torch.Tensor, colors: Sequence[str]) -> None:
    """Show a matrix of integers as cells of these colors."""
    rows, columns = values.shape
    axes.imshow(values, cmap=ListedColormap(colors), vmin=0, vmax=len(colors) - 1, interpolation="nearest")
    axes.vlines(torch.arange(columns + 1) - 0.5, -0.5, rows - 0.5, color="white", linewidth=1)
    axes.hlines(torch.arange(rows + 1) - 0.5, -0.5, columns - 0.5, color="white", linewidth=1)
    axes.set(xticks=[], yticks=[], anchor="N")
    axes.spines[:].set_visible(False)


def _precisions(before: str, after: str, layer: torch.nn.Module) -> Figure:
    """Show the dtypes of a normalization that autocast casts, as on GPUs, and those of a layer that replaces it."""
    with torch.autocast("cpu", torch.bfloat16), Operators() as operators:
        layer(torch.zeros(2, 4, dtype=torch.bfloat16))
    _, inputs, output = next(call for call in reversed(operators.calls) if "norm" in call[0])
    measured = [tensor.dtype for tensor in (*inputs[:2], output)]
    dtypes = {f"{before},\nautocast on GPUs": [torch.float32] * 3, after: measured}
    figure, axes = make_axes(height=1.5)
    for row, kinds in enumerate(dtypes.values()):
        for column, dtype in enumerate((torch.bfloat16, *kinds)):
            fill, text = (ORANGE, "black") if dtype is torch.float32 else (BLUE, "white")
            axes.add_patch(Rectangle((column - 0.45, row - 0.4), 0.9, 0.8, color=fill))
            axes.text(column, row, str(dtype).removeprefix("torch."), color=text, ha="center", va="center")
    axes.set(xlim=(-0.5, 3.5), ylim=(1.5, -0.5), xticks=range(4), yticks=range(2), yticklabels=dtypes)
    axes.set_xticklabels(["input", "input, as the\nkernel reads it", "weights", "output"])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def _valley() -> tuple[Figure, Any]:
    """Return axes with the contours of the loss `(VALLEY * weights**2).sum() / 2` of two weights."""
    figure, axes = make_axes("one weight", "another weight", height=2.8)
    x, y = torch.meshgrid(torch.linspace(-6, 5, 80), torch.linspace(-2.5, 3, 60), indexing="xy")
    axes.contour(x, y, VALLEY[0] * x**2 + VALLEY[1] * y**2, levels=[0.3, 1.2, 3, 6, 10], colors=GRAY, linewidths=0.5)
    axes.set(xticks=[], yticks=[], xlim=(-6, 5), ylim=(-2.5, 3))
    return figure, axes
