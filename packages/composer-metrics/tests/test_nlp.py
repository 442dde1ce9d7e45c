from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer.metrics import BinaryF1Score, LanguageCrossEntropy, LanguagePerplexity, MaskedAccuracy


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([-100, 0, 1, 2, 3])), min_size=1, max_size=12))
def test_masked_accuracy_equals_counting(reference, pairs):
    predictions, targets = zip(*pairs, strict=True)
    batch = torch.nn.functional.one_hot(torch.tensor(predictions), 4).float(), torch.tensor(targets)
    metric = MaskedAccuracy()
    metric.update(*batch)
    expected = reference["masked_accuracy"]([batch])

    assert pytest.approx(expected, nan_ok=True) == metric.compute().item()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from([-100, 0, 1])), min_size=1, max_size=12))
def test_f1_equals_counting(reference, pairs):
    predictions, targets = zip(*pairs, strict=True)
    batch = torch.nn.functional.one_hot(torch.tensor(predictions), 2).float(), torch.tensor(targets)
    metric = BinaryF1Score()
    metric.update(*batch)

    assert pytest.approx(reference["f1"]([batch])) == metric.compute().item()


def test_masked_accuracy_takes_another_index():
    metric = MaskedAccuracy(ignore_index=1)
    metric.update(torch.eye(3), torch.tensor([0, 1, 0]))

    assert 0.5 == metric.compute().item()


def test_every_token_weighs_the_same():
    metric = LanguageCrossEntropy()
    metric.update(torch.tensor([[[100.0, 0.0]]]), torch.tensor([[0]]))
    metric.update(torch.zeros(1, 3, 2), torch.tensor([[0, 1, 1]]))

    assert pytest.approx(0.75 * math.log(2)) == metric.compute().item()


def test_perplexity_is_the_exponential_of_the_cross_entropy():
    logits = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(0))
    targets = torch.randint(9, (3, 4), generator=torch.Generator().manual_seed(1))
    entropy, perplexity = LanguageCrossEntropy(), LanguagePerplexity()
    entropy.update(logits, targets)
    perplexity.update(logits, targets)

    torch.testing.assert_close(entropy.compute().exp(), perplexity.compute())


@pytest.mark.parametrize("make", [LanguageCrossEntropy, LanguagePerplexity])
@pytest.mark.parametrize("mapping", [dict, OrderedDict])
def test_language_metrics_take_a_mapping_with_logits(make, mapping):
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[0, 1, -100], [2, 3, 4]])
    of_tensor, of_mapping = make(), make()
    of_tensor.update(logits, targets)
    of_mapping.update(mapping(logits=logits, loss=torch.zeros(())), targets)

    assert of_tensor.compute() == of_mapping.compute()


def test_language_metrics_take_flat_tensors():
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[0, 1, -100], [2, 3, 4]])
    structured, flat = LanguageCrossEntropy(), LanguageCrossEntropy()
    structured.update(logits, targets)
    flat.update(logits.view(6, 5), targets.view(6))

    assert structured.compute() == flat.compute()


def test_language_metrics_ignore_another_index():
    metric = LanguageCrossEntropy(ignore_index=0)
    metric.update(torch.zeros(1, 3, 2), torch.tensor([[0, 1, 0]]))

    assert 1 == metric.total_items.item()


def test_language_metrics_use_the_states_of_checkpoints():
    metric = LanguageCrossEntropy()
    metric.persistent(True)

    assert {"sum_loss", "total_items"} == set(metric.state_dict())


@pytest.mark.parametrize("make", [LanguageCrossEntropy, LanguagePerplexity, MaskedAccuracy])
def test_the_value_without_any_token_is_nan(make):
    metric = make()
    metric.update(torch.zeros(1, 3, 2), torch.full((1, 3), -100))

    assert metric.compute().isnan()


def test_f1_is_zero_without_any_positive():
    metric = BinaryF1Score()
    metric.update(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))

    assert 0.0 == metric.compute().item()


def test_f1_takes_a_mapping_with_logits():
    metric = BinaryF1Score()
    metric.update({"logits": torch.tensor([[0.0, 1.0]])}, torch.tensor([1]))

    assert 1.0 == metric.compute().item()


@pytest.mark.parametrize("make", [LanguageCrossEntropy, LanguagePerplexity, BinaryF1Score])
def test_the_output_must_be_a_tensor_or_a_mapping(make):
    with pytest.raises(TypeError, match="`output` must be a tensor or a mapping with the key 'logits', got list"):
        make().update([torch.zeros(1, 2)], torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("make", [LanguageCrossEntropy, LanguagePerplexity, BinaryF1Score])
def test_the_mapping_must_have_logits(make):
    with pytest.raises(KeyError, match=r"`output` must have the key 'logits', got the keys \['loss'\]"):
        make().update({"loss": torch.zeros(())}, torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("make", [LanguageCrossEntropy, LanguagePerplexity])
@pytest.mark.parametrize("logits", [(2, 3, 5), ()])
def test_the_number_of_tokens_must_fit(make, logits):
    with pytest.raises(ValueError, match=r"`target` must have one index for each .* got \(2, 4\)"):
        make().update(torch.zeros(logits), torch.zeros(2, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("metric", "scores", "targets", "message"),
    [
        (MaskedAccuracy(), (2, 3, 5), (2, 1), r"shape \(2, 3\) for scores of shape \(2, 3, 5\), got \(2, 1\)"),
        (MaskedAccuracy(), (4,), (4,), r"must have shape \(\.\.\., C\), got \(4,\)"),
        (MaskedAccuracy(), (4, 1), (4,), r"at least 2 classes, got \(4, 1\)"),
        (BinaryF1Score(), (4, 2), (4, 1), r"shape \(4,\) for scores of shape \(4, 2\), got \(4, 1\)"),
        (BinaryF1Score(), (4, 1), (4,), r"with 2 classes, got \(4, 1\)"),
        (BinaryF1Score(), (4,), (4,), r"must have shape \(N, C, \.\.\.\), got \(4,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_an_error(metric, scores, targets, message):
    with pytest.raises(ValueError, match=message):
        metric.update(torch.zeros(scores), torch.zeros(targets, dtype=torch.int64))
