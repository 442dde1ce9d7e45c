"""`ComposerMixin` before the `Trainer` of other libraries, whose losses stay as they are."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers

from composer.algorithms.ema import EMA
from composer.hosts.huggingface import ComposerMixin
from composer.testing import deep_compare

STEPS = 3
OPTIONS: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 4,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_strategy": "no",
    "learning_rate": 0.01,
}


def without_dropout(model: torch.nn.Module) -> Any:
    """Return a model that draws no random numbers: those of training are the run's own."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def check(train: Any, kind: type) -> None:
    """Train with a trainer of another library, with the mixin before it, and with an algorithm.

    Args:
        train: `train(kind, **options)` returns the trainer after training.
        kind: The class of the other library.
    """
    composed = type("Composed", (ComposerMixin, kind), {})
    plain, without, averaged = train(kind), train(composed), train(composed, algorithms=EMA(half_life="1ba"))

    deep_compare(plain.model.state_dict(), without.model.state_dict())
    run = averaged.composer_run
    assert run.state.timestamp.batch == STEPS
    assert run.state.algorithms[0].ema_weights_active
    assert any(
        not torch.equal(a, b) for a, b in zip(plain.model.parameters(), averaged.model.parameters(), strict=True)
    )


@pytest.mark.filterwarnings("ignore")  # of other libraries
def test_supervised_fine_tuning_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": list(range(i, i + 10))} for i in range(2, 18)]

    def train(kind: Any, **options: Any) -> Any:
        model, tokenizer = without_dropout(tiny.gpt2()), tiny.gpt2_tokenizer()
        arguments = trl.SFTConfig(str(tmp_path), gradient_checkpointing=False, **OPTIONS)
        data = datasets.Dataset.from_list(rows)
        trainer = kind(model, arguments, train_dataset=data, processing_class=tokenizer, **options)
        trainer.train()
        return trainer

    check(train, trl.SFTTrainer)


@pytest.mark.filterwarnings("ignore")
def test_preference_optimization_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "to be", "chosen": " or not to be", "rejected": " that is"}] * 8

    def train(kind: Any, **options: Any) -> Any:
        model, reference = without_dropout(tiny.gpt2()), without_dropout(tiny.gpt2())
        arguments = trl.DPOConfig(str(tmp_path), gradient_checkpointing=False, **OPTIONS)
        data = datasets.Dataset.from_list(rows)
        trainer = kind(
            model, reference, arguments, train_dataset=data, processing_class=tiny.gpt2_tokenizer(), **options
        )
        trainer.train()
        return trainer

    check(train, trl.DPOTrainer)


@pytest.mark.filterwarnings("ignore")
def test_embeddings_of_sentence_transformers(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules", reason="needs version 6")
    losses = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "bert"
    tiny.bert(kind=transformers.BertModel).save_pretrained(folder)
    tiny.bert_tokenizer().save_pretrained(folder)
    rows = [{"anchor": "to be", "positive": "or not to be"}, {"anchor": "that is", "positive": "the question"}] * 8

    def train(kind: Any, **options: Any) -> Any:
        words = modules.Transformer(str(folder), max_seq_length=16)
        pooled = modules.Pooling(words.get_embedding_dimension())
        model = without_dropout(library.SentenceTransformer(modules=[words, pooled], device="cpu"))
        arguments = library.SentenceTransformerTrainingArguments(str(tmp_path), **OPTIONS)
        loss = losses.MultipleNegativesRankingLoss(model)
        data = datasets.Dataset.from_list(rows)
        trainer = kind(model, arguments, train_dataset=data, loss=loss, **options)
        trainer.train()
        return trainer

    check(train, library.SentenceTransformerTrainer)
