"""The Trainer takes models of transformers and peft as they are."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torchmetrics.classification import MulticlassAccuracy
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from composer import Trainer
from composer.models import HuggingFaceModel, ModuleWithLoss
from composer.testing import deep_compare


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2))


def texts(**more: Any) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(32, (2, 4, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": each, "labels": each, **more} for each in tokens]


def trained(model: Any, batches: Any = None, **arguments: Any) -> Trainer:
    trainer = Trainer(
        model=model,
        train_dataloader=texts() if batches is None else batches,
        max_duration="2ep",
        optimizers=lambda parameters: torch.optim.AdamW((p for p in parameters if p.requires_grad), lr=1e-2),
        device="cpu",
        seed=2,
        progress_bar=False,
        **arguments,
    )
    trainer.fit()
    return trainer


def test_a_model_of_transformers_is_wrapped() -> None:
    plain, wrapped = trained(gpt2()), trained(HuggingFaceModel(gpt2()))
    assert isinstance(plain.state.model, HuggingFaceModel)
    deep_compare(plain.state.model.state_dict(), wrapped.state.model.state_dict())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
def test_a_model_of_peft_is_wrapped() -> None:
    adapted = peft.get_peft_model(gpt2(), peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    trainer = trained(adapted)
    assert isinstance(trainer.state.model, HuggingFaceModel)
    assert trainer.state.model.using_peft


def test_a_loss_of_ones_own() -> None:
    def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs["logits"], targets)

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=2
    )
    model = BertForSequenceClassification(config)
    batches = [{"input_ids": torch.ones(4, 8, dtype=torch.long), "label": torch.tensor([0, 1, 0, 1])}]
    trainer = trained(model, batches, loss=loss)
    assert isinstance(trainer.state.model, ModuleWithLoss)
    assert list(trainer.state.model.state_dict()) == list(model.state_dict())
    with pytest.raises(
        ValueError, match="`target_key` must be given together with `loss` for a model of `transformers`"
    ):
        trained(model, batches, target_key="label")


def test_metrics_get_logits_and_labels() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=2
    )
    batches = [{"input_ids": torch.ones(4, 8, dtype=torch.long), "labels": torch.tensor([0, 1, 1, 1])}]
    metrics = MulticlassAccuracy(num_classes=2, average="micro")
    trainer = trained(BertForSequenceClassification(config), batches, metrics=metrics, eval_dataloader=batches)
    assert trainer.state.eval_metric_values["MulticlassAccuracy"] in (0.25, 0.75)  # all examples have the same inputs


def test_without_metrics_an_evaluation_has_the_mean_loss_over_all_labels() -> None:
    first, second = texts()
    first = {**first, "labels": first["labels"].masked_fill(torch.arange(8) > 4, -100)}
    second = {name: value[:1] for name, value in second.items()}
    trainer = trained(gpt2(), eval_dataloader=[first, second])

    network = trainer.state.model.model.eval()
    with torch.no_grad():
        losses = [network(**batch).loss for batch in (first, second)]
    expected = (losses[0] * 4 * 4 + losses[1] * 7) / (4 * 4 + 7)  # labels, but for the first token of each text
    torch.testing.assert_close(trainer.state.eval_metric_values["Loss"], expected)


def test_without_labels_there_is_no_loss_to_evaluate() -> None:
    trainer = trained(gpt2(), eval_dataloader=[{"input_ids": texts()[0]["input_ids"]}])
    assert trainer.state.eval_metric_values["Loss"].isnan()
