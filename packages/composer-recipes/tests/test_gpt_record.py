from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from composer.recipes.cli import make_parser, make_recipes
from composer.recipes.gpt_record import TASK, RecordGPT, _rotated


def batch_of(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens, "labels": tokens}


def make(**arguments: Any) -> RecordGPT:
    torch.manual_seed(0)
    network = RecordGPT(vocab_size=7, **{"width": 16, "layers": 2, "heads": 2, "projection_std": 1.0, **arguments})
    torch.nn.init.normal_(network.head.weight)
    return network.double()


def test_no_position_sees_a_later_one() -> None:
    network, tokens = make(), torch.randint(0, 7, (2, 9))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 7

    before, after = network(batch_of(tokens)), network(batch_of(changed))

    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.isclose(before[:, 5:], after[:, 5:]).all(-1).any()


def test_products_of_rotated_queries_and_keys_depend_on_distances_alone() -> None:
    query, key = torch.randn(2, 8)
    queries, keys = (_rotated(each.expand(1, 12, 1, 8))[0, :, 0] for each in (query, key))
    products = queries @ keys.T

    for distance in range(-5, 6):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along))
    assert products[0].std() > 0.01
    torch.testing.assert_close(products[3, 3], query @ key)


def test_blocks_begin_as_the_identity_by_default() -> None:
    network, tokens = make(projection_std=0.0), torch.randint(0, 7, (2, 9))
    embedded = F.rms_norm(network.embedding(tokens), (16,))

    torch.testing.assert_close(network(batch_of(tokens)), network.head(F.rms_norm(embedded, (16,))))


def test_the_loss_and_the_metric_are_those_of_the_next_token() -> None:
    network, tokens = make(), torch.randint(0, 7, (2, 9))
    labels = tokens.clone()
    labels[1, 5:] = -100
    batch = {"input_ids": tokens, "labels": labels}
    outputs = network(batch)
    wanted = [(outputs[i, t], labels[i, t + 1]) for i in range(2) for t in range(8) if labels[i, t + 1] != -100]
    expected = torch.stack([F.cross_entropy(scores, label) for scores, label in wanted]).mean()

    torch.testing.assert_close(network.loss(outputs, batch), expected)
    metric = network.get_metrics(is_train=False)["LanguageCrossEntropy"]
    network.update_metric(batch, outputs, metric)
    torch.testing.assert_close(metric.compute().double(), expected)


def test_a_method_of_the_stack_is_left_out_by_its_name() -> None:
    parser = make_parser(TASK)
    stack = Path(str(TASK.stacks["record"]))
    options = parser.parse_args(["--config", str(stack), "--without", "hyperball", "ema"])

    (recipe,) = make_recipes(TASK, parser, options)

    assert ["Muon", "CautiousDecay", "EMANesterov"] == [type(each).__name__ for each in recipe.algorithms]
