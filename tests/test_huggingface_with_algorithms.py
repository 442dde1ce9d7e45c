"""Language models of transformers, trained with the algorithms for language, and asked to write in between."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from composer import Trainer
from composer.algorithms import (
    EMA,
    SAM,
    Alibi,
    ChunkedCrossEntropy,
    GatedLinearUnits,
    GradientClipping,
    LowPrecisionLayerNorm,
    SeqLengthWarmup,
    SequencePacking,
)
from composer.algorithms.gated_linear_units.gated_linear_unit_layers import BERTGatedFFOutput
from composer.callbacks import Generate
from composer.core import Algorithm, Callback, Precision, State
from composer.loggers import InMemoryLogger, Logger
from composer.loop import HostedRun
from composer.models import HuggingFaceModel, create_bert_classification, create_bert_mlm, create_gpt2

LENGTH = 16
TEXTS = ["a cat sat on the mat and looked", "the dog ran over a hill and back", "on the hill a cat met the dog"] * 4
BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": LENGTH,
    "vocab_size": 64,
}
GPT2 = {
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 2 * LENGTH,
    "vocab_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
ALGORITHMS: dict[str, Any] = {
    "none": list,
    "Alibi": lambda: [Alibi(max_sequence_length=2 * LENGTH, train_sequence_length_scaling=0.5)],
    "GatedLinearUnits": lambda: [GatedLinearUnits()],
    "SeqLengthWarmup": lambda: [SeqLengthWarmup(duration=0.5, min_seq_length=4, max_seq_length=LENGTH, step_size=4)],
    "SequencePacking": lambda: [SequencePacking(2 * LENGTH)],
    "LowPrecisionLayerNorm": lambda: [LowPrecisionLayerNorm()],
    "EMA and SAM": lambda: [EMA(half_life="2ba"), SAM(rho=0.05), GradientClipping("norm", 1.0)],
}
ALGORITHMS["all of language"] = lambda: [
    algorithm
    for name in ("Alibi", "GatedLinearUnits", "SeqLengthWarmup", "LowPrecisionLayerNorm")
    for algorithm in ALGORITHMS[name]()
]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=64, special_tokens=["<end>", "<mask>"]))
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>", pad_token="<end>", mask_token="<mask>")
    tokenizer.save_pretrained(folder)
    return str(folder)


def make(kind: str, tokenizer_folder: str, seed: int = 0) -> HuggingFaceModel:
    torch.manual_seed(seed)
    if kind == "gpt2":
        return create_gpt2(model_config=GPT2, tokenizer_name=tokenizer_folder)
    if kind == "classifier":
        return create_bert_classification(3, model_config=BERT, tokenizer_name=tokenizer_folder)
    return create_bert_mlm(model_config=BERT, tokenizer_name=tokenizer_folder)


class Collate:
    """Batches of a kind of model, the same in every epoch."""

    def __init__(self, kind: str, tokenizer: Any) -> None:
        self.kind, self.tokenizer = kind, tokenizer

    def __call__(self, texts: list[str]) -> dict[str, torch.Tensor]:
        found = self.tokenizer(texts, return_tensors="pt", padding="max_length", truncation=True, max_length=LENGTH)
        tokens, mask = found["input_ids"], found["attention_mask"]
        batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
        if self.kind == "bert":
            hidden = (torch.arange(LENGTH) % 3 == 1) & (mask == 1)
            batch["labels"] = tokens.masked_fill(~hidden, -100)
            batch["input_ids"] = tokens.masked_fill(hidden, self.tokenizer.mask_token_id)
        if self.kind == "classifier":
            batch["labels"] = torch.tensor([TEXTS.index(text) % 3 for text in texts])
        return batch


def trainer_of(kind: str, model: HuggingFaceModel, algorithms: list[Algorithm], **kwargs: Any) -> Trainer:
    collate = Collate(kind, model.tokenizer)
    lower = any(isinstance(algorithm, LowPrecisionLayerNorm) for algorithm in algorithms)
    return Trainer(
        model=model,
        train_dataloader=DataLoader(TEXTS, batch_size=4, collate_fn=collate),  # type: ignore[arg-type]
        eval_dataloader=DataLoader(TEXTS, batch_size=4, collate_fn=collate),  # type: ignore[arg-type]
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        algorithms=algorithms,
        precision=Precision.AMP_BF16 if lower else Precision.FP32,
        progress_bar=False,
        device="cpu",
        seed=5,
        **{"max_duration": "8ep", "eval_interval": "8ep", **kwargs},
    )


ONLY_BERT = {"GatedLinearUnits", "all of language"}
CASES = [("bert", name) for name in ALGORITHMS] + [("gpt2", name) for name in ALGORITHMS if name not in ONLY_BERT]
CASES += [("classifier", name) for name in ("none", "Alibi", "GatedLinearUnits", "LowPrecisionLayerNorm")]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_model_learns_and_comes_back(kind: str, name: str, tokenizer_folder: str, tmp_path: Path) -> None:
    model = make(kind, tokenizer_folder)
    trainer = trainer_of(kind, model, ALGORITHMS[name]())
    trainer.eval()
    metric = "MulticlassAccuracy" if kind == "classifier" else "LanguageCrossEntropy"
    before = trainer.state.eval_metric_values[metric].item()
    trainer.fit()
    after = trainer.state.eval_metric_values[metric].item()
    assert after >= before if kind == "classifier" else after < 0.9 * before
    assert torch.isfinite(torch.tensor(trainer.state.total_loss_dict["loss/train/total"]))

    batch = Collate(kind, model.tokenizer)(TEXTS[:4])
    expected = model.eval().eval_forward(batch).detach()
    trainer.save_checkpoint(str(tmp_path / "a.pt"))
    restored = HuggingFaceModel.from_composer_checkpoint(tmp_path / "a.pt", use_logits=True)
    assert [*map(type, restored.modules())] == [*map(type, model.modules())]
    assert torch.equal(expected, restored.eval_forward(batch))
    assert restored.tokenizer.get_vocab() == model.tokenizer.get_vocab()


class Died(Exception):
    """The process is lost."""


class Death(Callback):
    """Ends the process in the middle of an epoch."""

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch == 10:
            raise Died


@pytest.mark.parametrize(
    ("kind", "name"),
    [("bert", "all of language"), ("gpt2", "Alibi"), ("gpt2", "SeqLengthWarmup"), ("gpt2", "SequencePacking")],
)
def test_a_run_that_stops_goes_on_bit_for_bit(kind: str, name: str, tokenizer_folder: str, tmp_path: Path) -> None:
    whole = trainer_of(kind, make(kind, tokenizer_folder), ALGORITHMS[name]())
    whole.fit()
    options: dict[str, Any] = {"save_folder": tmp_path, "save_interval": "1ba", "run_name": "run", "autoresume": True}
    first = trainer_of(kind, make(kind, tokenizer_folder), ALGORITHMS[name](), callbacks=Death(), **options)
    with pytest.raises(Died):
        first.fit()
    first.close()
    second = trainer_of(kind, make(kind, tokenizer_folder, seed=1), ALGORITHMS[name](), **options)
    assert second.state.timestamp.batch == 10
    second.fit()

    for (key, one), other in zip(whole.state.model.named_parameters(), second.state.model.parameters(), strict=True):
        assert torch.equal(one, other), key


def test_alibi_reads_longer_texts_than_it_was_trained_on(tokenizer_folder: str) -> None:
    model = make("bert", tokenizer_folder)
    trainer_of("bert", model, ALGORITHMS["Alibi"](), max_duration="1ba").fit()
    batch = {"input_ids": torch.zeros(1, 2 * LENGTH, dtype=torch.int64)}

    assert model(batch)["logits"].shape == (1, 2 * LENGTH, 64)


def test_gated_layers_are_where_the_others_were(tokenizer_folder: str) -> None:
    model = make("bert", tokenizer_folder)
    trainer_of("bert", model, ALGORITHMS["GatedLinearUnits"](), max_duration="1ba")

    assert [type(layer.output) for layer in model.model.bert.encoder.layer] == [BERTGatedFFOutput] * 2


@pytest.mark.parametrize("name", ["none", "Alibi"])
def test_prompts_are_continued_while_it_learns(name: str, tokenizer_folder: str) -> None:
    log = InMemoryLogger()
    model = make("gpt2", tokenizer_folder)
    generate = Generate(["a cat", "the dog ran over"], "8ba", batch_size=2, max_new_tokens=6, do_sample=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer_of("gpt2", model, ALGORITHMS[name](), callbacks=generate, loggers=log, max_duration="24ba").fit()

    assert "the dog ran over" in log.tables["generations"]
    assert model.tokenizer.padding_side == "right"


def test_training_is_the_same_with_and_without_generations(tokenizer_folder: str) -> None:
    found = []
    for callbacks in ([], [Generate(["a cat"], "2ba", max_new_tokens=3, do_sample=True)]):
        model = make("gpt2", tokenizer_folder)
        trainer_of("gpt2", model, [], callbacks=callbacks, max_duration="4ba").fit()
        found.append([weight.detach() for weight in model.parameters()])

    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_causal_model_of_transformers_shifts_its_labels_without_a_wrapper() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    net, tokens = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)), torch.randint(32, (4, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens}
    run = HostedRun(
        net,
        [ChunkedCrossEntropy()],
        forward=lambda net, batch: net(**batch),
        loss=lambda outputs, batch: outputs.loss,
        optimizers=torch.optim.SGD(net.parameters(), lr=0.1),
        dataloader=[batch],
        max_duration="1ep",
    )
    expected = net(**batch).loss.detach()
    run.begin_fit()
    for each in run.epoch():
        loss = run.loss(each)
        run.backward(loss)
        run.step()
    run.end_fit()

    torch.testing.assert_close(loss.detach(), expected)
