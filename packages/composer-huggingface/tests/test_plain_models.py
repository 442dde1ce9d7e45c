"""The Trainer takes models of transformers and peft as they are."""

from __future__ import annotations

from functools import partial
from typing import Any

import peft
import pytest
import tiny
import torch
from torchmetrics.classification import MulticlassAccuracy
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

from composer import Trainer
from composer.loop import HostedRun
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


def padded() -> dict[str, torch.Tensor]:
    tokens = torch.randint(2, 60, (4, 8), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([[8], [6], [2], [1]])
    return {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(8) >= lengths, -100)}


def segments() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (4, 32, 32), generator=generator)
    labels[:2, :28] = 255
    return {"pixel_values": torch.randn(4, 3, 32, 32, generator=generator), "labels": labels}


def segformer() -> SegformerForSemanticSegmentation:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict.fromkeys(("depths", "num_attention_heads", "sr_ratios"), [1] * 4)
    dropout = dict.fromkeys(("hidden_dropout_prob", "drop_path_rate", "classifier_dropout_prob"), 0.0)
    config = SegformerConfig(hidden_sizes=[4] * 4, decoder_hidden_size=4, num_labels=3, **sizes, **dropout)
    model = SegformerForSemanticSegmentation(config)
    model.decode_head.batch_norm = torch.nn.Identity()  # its statistics are those of a microbatch
    return model


def spoken() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(1, 8, (4, 4), generator=generator)
    labels[:2, 1:] = -100
    return {"input_values": torch.randn(4, 400, generator=generator), "labels": labels}


def wav2vec2() -> Wav2Vec2ForCTC:
    torch.manual_seed(0)
    names = ("hidden_dropout", "attention_dropout", "feat_proj_dropout", "final_dropout", "activation_dropout")
    sizes: dict[str, Any] = {"conv_dim": (8,), "conv_kernel": (10,), "conv_stride": (10,), "vocab_size": 8}
    sizes |= dict.fromkeys(("hidden_size", "intermediate_size"), 8) | dict.fromkeys(names, 0.0)
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "layerdrop": 0.0, "apply_spec_augment": False}
    sizes |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    return Wav2Vec2ForCTC(Wav2Vec2Config(ctc_loss_reduction="mean", feat_extract_norm="layer", **sizes))


MODELS: dict[str, tuple[Any, Any]] = {
    "next tokens": (partial(tiny.gpt2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), padded),
    "masked tokens": (partial(tiny.bert, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), padded),
    "an encoder-decoder": (partial(tiny.t5, dropout_rate=0.0), padded),
    "pixels": (segformer, segments),
    "speech": (wav2vec2, spoken),
}


# The loss of CTC is a mean over examples, so it has no tokens to count.
@pytest.mark.parametrize(
    ("case", "on_tokens"), [*((case, False) for case in MODELS), *((case, True) for case in MODELS if case != "speech")]
)
def test_microbatches_weigh_by_the_labels_that_the_loss_counts(case: str, on_tokens: bool) -> None:
    make, batch = MODELS[case]

    def weights(size: int) -> dict[str, torch.Tensor]:
        model = make()
        Trainer(
            model=model,
            train_dataloader=[batch()] * 2,
            max_duration="1ep",
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            device_train_microbatch_size=size,
            accumulate_train_batch_on_tokens=on_tokens,
            progress_bar=False,
        ).fit()
        found: dict[str, torch.Tensor] = model.state_dict()
        return found

    deep_compare(weights(4), weights(2), atol=1e-6, rtol=0.0)


def test_the_batches_of_a_step_in_a_loop_weigh_by_the_labels_that_the_loss_counts() -> None:
    make, batch = MODELS["next tokens"][0], padded()
    halves = [{name: value[rows] for name, value in batch.items()} for rows in (slice(0, 2), slice(2, 4))]

    def weights(batches: list[Any]) -> dict[str, torch.Tensor]:
        model = HuggingFaceModel(make())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = HostedRun(model, optimizers=optimizer, dataloader=batches, max_duration="2ep", accumulate=len(batches))
        run.begin_fit()
        while not run.is_over():
            for each in run.epoch():
                run.backward(run.loss(each))
                run.step()
        run.end_fit()
        return model.state_dict()

    deep_compare(weights([batch]), weights(halves), atol=1e-6, rtol=0.0)


def test_without_labels_there_is_no_loss_to_evaluate() -> None:
    trainer = trained(gpt2(), eval_dataloader=[{"input_ids": texts()[0]["input_ids"]}])
    assert trainer.state.eval_metric_values["Loss"].isnan()
