"""BERT and GPT-2 from a configuration, or from a folder; without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from torchmetrics import MeanSquaredError

from composer.models import HuggingFaceModel, create_bert_classification, create_bert_mlm, create_gpt2
from composer.models.huggingface import _factories

MAKERS = {
    "bert": (create_bert_mlm, tiny.BERT, transformers.BertForMaskedLM),
    "gpt2": (create_gpt2, tiny.GPT2, transformers.GPT2LMHeadModel),
    "classifier": (create_bert_classification, tiny.BERT, transformers.BertForSequenceClassification),
}
METRICS = {
    "bert": ["LanguageCrossEntropy", "MaskedAccuracy"],
    "gpt2": ["LanguageCrossEntropy", "LanguagePerplexity"],
    "classifier": ["MulticlassAccuracy", "BinaryF1Score"],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders as `save_pretrained` writes them."""
    found = {}
    for name, model, tokenizer in (
        ("bert", tiny.bert(3), tiny.bert_tokenizer()),
        ("gpt2", tiny.gpt2(3), tiny.gpt2_tokenizer()),
    ):
        found[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(found[name])
        tokenizer.save_pretrained(found[name])
    found["classifier"] = found["bert"]
    return found


@pytest.mark.parametrize("kind", MAKERS)
def test_a_configuration_is_enough(kind: str) -> None:
    make, config, cls = MAKERS[kind]
    model = make(model_config=config)

    assert isinstance(model, HuggingFaceModel)
    assert type(model.model) is cls
    assert METRICS[kind] == list(model.get_metrics(True)) == list(model.get_metrics(False))
    assert model.use_logits
    assert model.tokenizer is None
    assert model.shift_labels == (kind == "gpt2")


def test_without_a_configuration_it_is_the_one_of_the_paper() -> None:
    sizes = {}
    for kind, (make, _, _) in MAKERS.items():
        with torch.device("meta"):
            weights = dict(make().model.named_parameters())
        tied = ("lm_head.weight", "decoder.weight", "decoder.bias")  # which some releases do not tie without memory
        sizes[kind] = sum(weight.numel() for name, weight in weights.items() if not name.endswith(tied))
    # BERT-base has 109,482,240 with its pooler; GPT-2 124,439,808.
    hidden, vocabulary = 768, 30522
    pooler = head = hidden * hidden + hidden
    assert sizes["gpt2"] == 124_439_808
    assert sizes["classifier"] == 109_482_240 + 2 * hidden + 2
    assert sizes["bert"] == 109_482_240 - pooler + head + 2 * hidden + vocabulary


@pytest.mark.parametrize("kind", MAKERS)
def test_a_folder_gives_weights_and_tokenizer(kind: str, folders: dict[str, Path]) -> None:
    make, _, cls = MAKERS[kind]
    folder = str(folders[kind])
    model = make(use_pretrained=True, pretrained_model_name=folder, tokenizer_name=folder)
    part = "transformer" if kind == "gpt2" else "bert.encoder"
    expected = tiny.gpt2(3) if kind == "gpt2" else tiny.bert(3)

    assert type(model.model) is cls
    tiny.assert_equal(tiny.weights(expected.get_submodule(part)), tiny.weights(model.model.get_submodule(part)))
    tiny.assert_same_tokenizer(tiny.gpt2_tokenizer() if kind == "gpt2" else tiny.bert_tokenizer(), model.tokenizer)


def test_a_folder_provides_only_the_configuration_without_use_pretrained(folders: dict[str, Path]) -> None:
    torch.manual_seed(8)
    model = create_gpt2(pretrained_model_name=str(folders["gpt2"]), model_config={"n_layer": 1})

    assert (model.config.n_embd, model.config.n_layer) == (16, 1)
    trained = tiny.gpt2(3).transformer.wte.weight
    assert not torch.equal(trained, model.model.transformer.wte.weight)


def test_changes_of_the_configuration_apply_to_loaded_models(folders: dict[str, Path]) -> None:
    model = create_gpt2(
        use_pretrained=True, pretrained_model_name=str(folders["gpt2"]), model_config={"resid_pdrop": 0.5}
    )
    assert model.model.transformer.h[0].mlp.dropout.p == 0.5


@pytest.mark.parametrize("num_labels", [1, 2, 5])
def test_metrics_depend_on_the_number_of_classes(num_labels: int) -> None:
    model = create_bert_classification(num_labels, model_config={**tiny.BERT, "vocab_size": 60})
    batch = tiny.masked(tiny.TEXTS)
    batch["labels"] = torch.tensor([0.5, 0.1, 0.2, 0.9]) if num_labels == 1 else torch.tensor([0, 1, 1, 0])
    trainer = tiny.trainer_of(model, train_dataloader=[batch], eval_dataloader=[batch], max_duration="2ba")
    trainer.fit()
    found = trainer.state.eval_metric_values

    expected = {1: {"MeanSquaredError"}, 2: {"MulticlassAccuracy", "BinaryF1Score"}, 5: {"MulticlassAccuracy"}}
    assert expected[num_labels] == found.keys()
    outputs = model.eval().eval_forward(batch)
    if num_labels == 1:
        assert torch.allclose(((outputs - batch["labels"]) ** 2).mean(), found["MeanSquaredError"])
        assert isinstance(model.get_metrics(True)["MeanSquaredError"], MeanSquaredError)
    else:
        assert torch.allclose((outputs.argmax(1) == batch["labels"]).float().mean(), found["MulticlassAccuracy"])


def test_activations_are_recomputed_with_gradient_checkpointing() -> None:
    found: dict[bool, Any] = {}
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = create_gpt2(model_config={**tiny.GPT2, "vocab_size": 60}, gradient_checkpointing=checkpointing).train()
        calls: list[int] = []
        model.model.transformer.h[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        batch = tiny.causal(tiny.TEXTS)
        torch.manual_seed(1)
        model.loss(model(batch), batch).backward()
        found[checkpointing] = len(calls), {name: weight.grad for name, weight in model.named_parameters()}

    assert (found[False][0], found[True][0]) == (1, 2)
    tiny.assert_equal(found[False][1], found[True][1])


def test_the_own_name_needs_no_network() -> None:
    assert create_gpt2(pretrained_model_name="gpt2", model_config=tiny.GPT2).config.n_embd == 16


def test_other_names_are_looked_up() -> None:
    with pytest.raises(OSError, match="no-such"):
        create_gpt2(pretrained_model_name="./no-such-folder")


def test_a_tokenizer_must_fit(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="must not have more tokens than the model has embeddings, got"):
        create_bert_mlm(model_config={**tiny.BERT, "vocab_size": 10}, tokenizer_name=str(folders["bert"]))


def test_misspelled_entries_are_refused() -> None:
    with pytest.raises(ValueError, match="`model_config` must have entries of `GPT2Config`, got 'n_layers'"):
        create_gpt2(model_config={"n_layers": 1})
    assert (
        create_gpt2(model_config={**tiny.GPT2, "attn_implementation": "eager"}).config._attn_implementation == "eager"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_labels": 0}, "`num_labels` must be at least 1, got 0"),
        ({"num_labels": 3, "model_config": {"num_labels": 4}}, "`num_labels` is 3, but 4 in `model_config`"),
    ],
)
def test_numbers_of_classes_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_bert_classification(**arguments)


def test_the_default_configuration_is_that_of_the_class() -> None:
    plan = _factories.Plan("own", transformers.GPT2Config, transformers.GPT2LMHeadModel)
    model, tokenizer = _factories.build(plan, False, "own", tiny.GPT2, None, False)
    assert (model.config.n_layer, tokenizer) == (2, None)


def test_gpt2_sets_its_loss_type_to_avoid_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(transformers.modeling_utils.logger, "warning_once", told.append)
    model = create_gpt2(model_config=tiny.GPT2).eval()
    ids = torch.arange(8)[None]

    loss = model({"input_ids": ids, "labels": ids}).loss

    logits = model({"input_ids": ids}).logits
    torch.testing.assert_close(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]), loss)
    assert told == []
