from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from composer.algorithms import CutMix, MixUp
from composer.core import Engine, State
from composer.metrics import LanguageCrossEntropy, LanguagePerplexity, MaskedAccuracy
from composer.models import HuggingFaceModel
from composer.models.huggingface import maybe_get_underlying_model
from composer.models.huggingface._metadata import class_of


def batch_of(kind: Any) -> dict[str, torch.Tensor]:
    batch: dict[str, torch.Tensor] = kind(tiny.TEXTS)
    return batch


# ---- forward and loss ----


def test_unknown_entries_of_a_batch_are_ignored() -> None:
    model, batch = tiny.causal_model().eval(), batch_of(tiny.causal)
    outputs = model({**batch, "idx": torch.arange(4), "source": ["a"] * 4})
    expected = model.model(**batch, use_cache=False)

    assert torch.equal(expected.logits, outputs["logits"])
    assert torch.equal(expected.loss, model.loss(outputs, batch))


def test_the_encoding_of_a_tokenizer_is_a_batch() -> None:
    encoding = tiny.bert_tokenizer()(tiny.TEXTS, return_tensors="pt", padding=True)

    assert tiny.masked_model()(encoding)["logits"].shape == (*encoding["input_ids"].shape, 60)


def test_a_batch_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ValueError, match=r"A batch must be a mapping .* got list"):
        tiny.causal_model()([torch.zeros(1, 2)])


def test_past_key_values_are_returned_only_with_use_cache() -> None:
    model, batch = tiny.causal_model(), batch_of(tiny.causal)

    assert model(batch).get("past_key_values") is None
    assert model({**batch, "use_cache": True})["past_key_values"] is not None


def test_a_tuple_of_outputs_begins_with_the_loss() -> None:
    model, batch = tiny.causal_model().eval(), batch_of(tiny.causal)
    as_tuple = model.model(**batch, return_dict=False)

    assert torch.equal(model.loss(model(batch), batch), model.loss(as_tuple, batch))


def test_outputs_without_a_loss_are_explained() -> None:
    model, batch = tiny.causal_model(), batch_of(tiny.causal)
    del batch["labels"]
    with pytest.raises(ValueError, match=r"The model returned no loss.* Put 'labels' into the batch"):
        model.loss(model(batch), batch)


def test_another_reduction_is_not_ignored() -> None:
    model, batch = tiny.causal_model(), batch_of(tiny.causal)
    with pytest.raises(ValueError, match=r"so \['reduction'\] cannot change it"):
        model.loss(model(batch), batch, reduction="none")


# ---- evaluation ----


@pytest.mark.parametrize("use_logits", [True, False])
def test_metrics_of_a_causal_model_compare_with_the_next_token(use_logits: bool) -> None:
    model, batch = tiny.causal_model(use_logits=use_logits).eval(), batch_of(tiny.causal)
    kept = {key: value.clone() for key, value in batch.items()}
    outputs = model.eval_forward(batch)
    metric = LanguageCrossEntropy()
    model.update_metric(batch, outputs, metric)

    logits = model.model(**kept).logits
    assert torch.allclose(
        F.cross_entropy(logits[:, :-1].flatten(0, 1), kept["labels"][:, 1:].flatten()), metric.compute()
    )
    assert torch.allclose(model.model(**kept).loss, metric.compute())
    assert all(torch.equal(kept[key], batch[key]) for key in kept)


def test_metrics_of_a_masked_model_compare_with_the_token() -> None:
    model, batch = tiny.masked_model().eval(), batch_of(tiny.masked)
    outputs = model.eval_forward(batch)
    accuracy = MaskedAccuracy()
    model.update_metric(batch, outputs, accuracy)
    right = [
        int(outputs[i, j].argmax() == batch["labels"][i, j])
        for i in range(4)
        for j in range(16)
        if batch["labels"][i, j] != -100
    ]

    assert not model.shift_labels
    assert pytest.approx(sum(right) / len(right)) == accuracy.compute().item()


def test_no_loss_is_computed_for_logits() -> None:
    model, batch = tiny.causal_model().eval(), batch_of(tiny.causal)
    seen: list[set[str]] = []
    model.model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(set(kwargs)), with_kwargs=True)
    model.eval_forward(batch)

    assert seen == [{"input_ids", "attention_mask", "use_cache"}]


def test_outputs_that_are_there_are_not_computed_again() -> None:
    model, batch = tiny.causal_model().eval(), batch_of(tiny.causal)
    outputs = model(batch)
    model.model.register_forward_pre_hook(lambda *_: pytest.fail("was called"))

    assert model.eval_forward(batch, outputs) is outputs["logits"]
    model.use_logits = False
    assert model.eval_forward(batch, outputs) is outputs
    assert model.eval_forward({**batch, "mode": "icl_task"}, outputs) is outputs["logits"]


def test_logits_without_labels_are_explained() -> None:
    model, batch = tiny.causal_model(), batch_of(tiny.causal)
    del batch["labels"]
    with pytest.raises(ValueError, match=r"A batch must have 'labels' .* got \['attention_mask', 'input_ids'\]"):
        model.eval_forward(batch)
    model.use_logits = False
    assert "logits" in model.eval_forward(batch)
    assert model.labels is None


def test_a_single_class_has_no_dimension() -> None:
    model = HuggingFaceModel(tiny.bert(kind=transformers.BertForSequenceClassification, num_labels=1), use_logits=True)
    batch = {**batch_of(tiny.masked), "labels": torch.rand(4)}

    assert model.eval_forward(batch).shape == (4,)


def test_metrics_of_an_encoder_decoder_use_the_training_inputs() -> None:
    model = HuggingFaceModel(tiny.t5(), use_logits=True, metrics=LanguageCrossEntropy()).eval()
    batch = {"input_ids": torch.randint(2, 60, (3, 7)), "labels": torch.randint(2, 60, (3, 5))}
    metric = LanguageCrossEntropy()
    model.update_metric(batch, model.eval_forward(batch), metric)

    assert torch.allclose(model.model(**batch).loss, metric.compute())


def test_a_metric_gets_the_labels_of_its_batch_whatever_was_evaluated_since() -> None:
    model, batch = tiny.causal_model().eval(), batch_of(tiny.causal)
    alone, later = LanguageCrossEntropy(), LanguageCrossEntropy()
    outputs = model.eval_forward(batch)
    model.update_metric(batch, outputs, alone)
    model.eval_forward({key: value[:2] for key, value in batch.items()})
    model.update_metric(batch, outputs, later)

    assert torch.equal(alone.compute(), later.compute())


def test_logits_of_a_batch_that_is_not_a_mapping_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"A batch must have 'labels' .* got list"):
        tiny.causal_model().eval_forward([1])


class WithBatch:
    needs_batch = True
    seen: Any = None

    def update(self, batch: Any, outputs: Any, labels: Any) -> dict[str, int]:
        self.seen = (batch, outputs, labels)
        return {"rows": len(labels)}


def test_a_metric_may_ask_for_the_batch() -> None:
    model, batch, metric = tiny.masked_model(), batch_of(tiny.masked), WithBatch()
    outputs = model.eval_forward(batch)

    assert model.update_metric(batch, outputs, metric) == {"rows": 4}
    assert metric.seen[0] is batch
    assert metric.seen[1] is outputs
    assert torch.equal(batch["labels"], metric.seen[2])


def test_evaluation_has_copies_of_the_metrics_of_training() -> None:
    model = tiny.causal_model()
    train, val = model.get_metrics(is_train=True), model.get_metrics(is_train=False)

    assert list(train) == list(val) == ["LanguageCrossEntropy", "MaskedAccuracy"]
    assert all(train[name] is not val[name] for name in train)
    own = tiny.causal_model(eval_metrics=[LanguagePerplexity()])
    assert list(own.get_metrics(False)) == ["LanguagePerplexity"]
    none = HuggingFaceModel(tiny.gpt2())
    assert none.get_metrics(True) == none.get_metrics(False) == {}


def test_two_metrics_of_one_class_need_names() -> None:
    two = [LanguageCrossEntropy(), LanguageCrossEntropy(ignore_index=3)]
    with pytest.raises(ValueError, match="`metrics` must not have two of one class"):
        HuggingFaceModel(tiny.gpt2(), metrics=two)
    model = HuggingFaceModel(tiny.gpt2(), metrics={"all": two[0], "some": two[1]})
    assert list(model.get_metrics(True)) == ["all", "some"]


# ---- construction ----


class OwnCausal(transformers.PreTrainedModel):
    config_class = transformers.GPT2Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layer = nn.Linear(1, 1)

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.layer(input_ids)


class OwnGPT2(transformers.GPT2LMHeadModel):
    """A causal language model by what it is derived from."""


def test_labels_are_shifted_for_causal_models_only() -> None:
    config = tiny.gpt2(attn_implementation="eager").config
    shifted = {
        type(model): HuggingFaceModel(model).shift_labels
        for model in (tiny.gpt2(), tiny.bert(), tiny.t5(), OwnCausal(config), OwnGPT2(config))
    }

    assert list(shifted.values()) == [True, False, False, False, True]
    assert not HuggingFaceModel(tiny.gpt2(), shift_labels=False).shift_labels
    assert HuggingFaceModel(tiny.bert(), shift_labels=True).shift_labels


def test_unshifted_labels_of_a_causal_model_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "composer"):
        HuggingFaceModel(tiny.gpt2(), tiny.gpt2_tokenizer(), shift_labels=False)
    assert [record.message[:45] for record in caplog.records] == ["`shift_labels=False` for a causal language mo"]


def test_no_tokenizer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "composer"):
        HuggingFaceModel(tiny.gpt2())
    assert "There is no tokenizer" in caplog.text


def test_a_tokenizer_larger_than_the_model_is_refused_or_fitted(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny.gpt2_tokenizer()
    tokenizer.add_tokens([f"<{number}>" for number in range(62 - len(tokenizer))])
    assert len(tokenizer) == 62
    with pytest.raises(ValueError, match=r"got 62 and 60. Pass `allow_embedding_resizing=True`"):
        HuggingFaceModel(tiny.gpt2(), tokenizer)
    with caplog.at_level(logging.WARNING, "composer"):
        model = HuggingFaceModel(tiny.gpt2(), tokenizer, allow_embedding_resizing=True)
    assert "60 embeddings are enlarged" in caplog.text
    assert model.config.vocab_size == 62
    assert model(tokenizer("the <1>", return_tensors="pt"))["logits"].shape[-1] == 62


def test_a_model_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="`model` must be a model of `transformers`, got Linear"):
        HuggingFaceModel(nn.Linear(1, 1))


@torch.no_grad()
def test_a_compiled_model_keeps_its_names_and_stays_compiled() -> None:
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(1)
        return graph

    inner, batch = tiny.gpt2(), {"input_ids": torch.zeros(2, 4, dtype=torch.int64)}
    plain = HuggingFaceModel(copy.deepcopy(inner), use_logits=True)
    model = HuggingFaceModel(torch.compile(inner, backend=backend), use_logits=True)

    assert model.model is inner
    assert list(plain.state_dict()) == list(model.state_dict())
    assert torch.equal(plain.eval()(batch)["logits"], model.eval()(batch)["logits"])
    assert calls


def test_copies_and_pickles_are_complete() -> None:
    model, batch = tiny.causal_model().eval(), batch_of(tiny.causal)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(model(batch)["logits"], other(batch)["logits"])
        assert other.model is not model.model
        tiny.assert_same_tokenizer(model.tokenizer, other.tokenizer)


def test_any_model_of_transformers_will_do() -> None:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4
    )
    accuracy = MulticlassAccuracy(num_classes=2, average="micro", validate_args=False)
    model = HuggingFaceModel(transformers.ViTForImageClassification(config), use_logits=True, metrics=accuracy)
    batch = {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 1])}
    model.loss(model(batch), batch).backward()
    model.update_metric(batch, model.eval_forward(batch), accuracy)
    assert accuracy.compute() in (0.0, 0.5, 1.0)
    assert maybe_get_underlying_model(model.model) is model.model
    assert class_of(model.model) is transformers.ViTForImageClassification


# ---- generation ----


def test_texts_are_continued_greedily_as_transformers_does() -> None:
    model = tiny.causal_model(tokenizer=tiny.gpt2_tokenizer(padding_side="left", pad_token="<|endoftext|>")).eval()
    encoded = model.tokenizer(["the cat", "a dog ran over"], return_tensors="pt", padding=True)
    batch = {
        **encoded,
        "labels": [["sat"], ["the hill"]],
        "mode": "generate",
        "generation_length": 4,
        "generation_kwargs": {"do_sample": False},
    }
    texts = model.eval_forward(batch)
    tokens = model.model.generate(**encoded, max_new_tokens=4, do_sample=False, pad_token_id=0)

    assert model.tokenizer.batch_decode(tokens[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True) == texts
    assert len(texts) == 2
    assert model.labels == [["sat"], ["the hill"]]


def test_an_encoder_decoder_does_not_repeat_the_prompt() -> None:
    model = HuggingFaceModel(tiny.t5(), tiny.bert_tokenizer()).eval()
    tokens = torch.randint(5, 60, (2, 7))
    expected = model.model.generate(tokens, max_new_tokens=3, do_sample=False)
    texts = model.eval_forward({"input_ids": tokens, "mode": "generate", "generation_length": 3})

    assert model.tokenizer.batch_decode(expected, skip_special_tokens=True) == texts


def test_texts_need_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="Generating texts needs a tokenizer"):
        HuggingFaceModel(tiny.gpt2()).eval_forward({"mode": "generate", "input_ids": torch.zeros(1, 2)})


def test_padding_is_that_of_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    for tokenizer in (tiny.gpt2_tokenizer(pad_token="the"), tiny.gpt2_tokenizer(), None):
        model = HuggingFaceModel(tiny.gpt2(), tokenizer)
        monkeypatch.setattr(model.model, "generate", lambda **kwargs: seen.append(kwargs.get("pad_token_id", "none")))
        model.generate(torch.zeros(1, 2, dtype=torch.int64))
    model.generate(torch.zeros(1, 2, dtype=torch.int64), pad_token_id=7)

    assert seen == [tiny.gpt2_tokenizer(pad_token="the").pad_token_id, 0, "none", 7]


# ---- labels that were replaced after the forward pass ----

SEQUENCES = transformers.BertForSequenceClassification


def _losses(labels: torch.Tensor, new: torch.Tensor, **config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss after the labels were replaced, and the loss of a forward pass with the new ones."""
    model = HuggingFaceModel(tiny.bert(**config)).eval()
    tokens = torch.arange(labels.shape[0] * 4).view(-1, 4)
    outputs = model({"input_ids": tokens, "labels": labels})
    expected = model.model(input_ids=tokens, labels=new).loss if new.dtype == labels.dtype else torch.empty(())
    return model.loss(outputs, {"input_ids": tokens, "labels": new}), expected


@pytest.mark.parametrize(
    ("kind", "num_labels", "labels"),
    [
        (SEQUENCES, 3, torch.tensor([0, 1, 2])),
        (SEQUENCES, 1, torch.tensor([0.5, -1.0, 2.0])),
        (SEQUENCES, 3, torch.tensor([[1.0, 0, 0], [0, 1, 1], [0, 0, 0]])),
        (transformers.BertForTokenClassification, 3, torch.tensor([[0, 1, 2, 1], [1, 1, -100, 0], [2, 2, 2, 2]])),
    ],
    ids=["single label", "regression", "multi-label", "tokens"],
)
def test_labels_that_were_replaced_count(kind: Any, num_labels: int, labels: torch.Tensor) -> None:
    actual, expected = _losses(labels, labels.roll(1, 0), kind=kind, num_labels=num_labels)

    torch.testing.assert_close(actual, expected)


def test_labels_of_one_value_per_class_count() -> None:
    labels, new = torch.tensor([0, 1, 2]), torch.tensor([1, 0, 2])
    indices, _ = _losses(labels, new, kind=SEQUENCES, num_labels=3)
    dense, _ = _losses(
        labels, F.one_hot(labels).float().lerp(F.one_hot(new).float(), 0.25), kind=SEQUENCES, num_labels=3
    )
    old, _ = _losses(labels, labels, kind=SEQUENCES, num_labels=3)

    torch.testing.assert_close(dense, old.lerp(indices, 0.25))


def test_terms_that_no_label_changes_stay() -> None:
    model = HuggingFaceModel(tiny.bert(kind=SEQUENCES, num_labels=3)).eval()
    batch = {"input_ids": torch.arange(8).view(2, 4), "labels": torch.tensor([0, 1])}
    outputs = model(batch)
    outputs["loss"] = outputs["loss"] + 5
    loss = model.loss(outputs, {**batch, "labels": torch.tensor([2, 0])})

    torch.testing.assert_close(loss, F.cross_entropy(outputs["logits"], torch.tensor([2, 0])) + 5)


def test_replaced_labels_of_a_model_with_an_unknown_loss_are_an_error() -> None:
    class Focal(SEQUENCES):  # type: ignore[misc]
        def forward(self, input_ids: Any, labels: Any = None, return_dict: Any = None) -> Any:
            return super().forward(input_ids, labels=labels)

    for kind in (transformers.BertForMaskedLM, Focal):
        labels = torch.zeros(2, 4, dtype=torch.int64) if kind is not Focal else torch.zeros(2, dtype=torch.int64)
        model = HuggingFaceModel(tiny.bert(kind=kind))
        batch = {"input_ids": torch.arange(8).view(2, 4), "labels": labels}
        with pytest.raises(NotImplementedError, match=rf"`{kind.__name__}` computes its loss.*Override"):
            model.loss(model(batch), {**batch, "labels": labels + 1})


@pytest.mark.parametrize("algorithm", [MixUp, CutMix])
def test_the_loss_of_an_image_classifier_is_interpolated(algorithm: Any) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    torch.manual_seed(0)
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=4, **sizes)
    model = HuggingFaceModel(transformers.ViTForImageClassification(config))
    mix = algorithm(alpha=1.0, interpolate_loss=True, input_key="pixel_values", target_key="labels")
    state = State(model=model, max_duration="1ep", dataloader=[0], algorithms=mix)
    engine = Engine(state)
    labels = torch.arange(4)
    state.batch = {"pixel_values": torch.randn(4, 3, 8, 8), "labels": labels}
    engine.run_event("before_forward")
    outputs = state.outputs = model(state.batch)
    engine.run_event("before_loss")
    state.loss = model.loss(outputs, state.batch)
    engine.run_event("after_loss")
    engine.run_event("before_backward")
    if algorithm is MixUp:
        weight, indices = mix.mixing, mix.indices
    else:
        weight, indices = 1 - mix._adjusted_lambda, mix._indices
    logits = outputs["logits"]
    expected = F.cross_entropy(logits, labels).lerp(F.cross_entropy(logits, labels[indices]), weight)

    assert 0 < weight < 1
    torch.testing.assert_close(state.loss, expected)
    assert state.batch["labels"] is labels
