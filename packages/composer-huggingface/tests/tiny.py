"""Small models, tokenizers and data, made on the spot."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch.utils.data import DataLoader

from composer import Trainer
from composer.metrics import LanguageCrossEntropy, MaskedAccuracy
from composer.models import HuggingFaceModel
from composer.models.huggingface._peft import maybe_get_underlying_model

TEXTS = ["the cat sat on the mat", "a dog ran over the hill", "the mat is on the hill", "a cat and a dog sat"]
BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}


@cache
def _wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=60, special_tokens=special))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


@cache
def _bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<|endoftext|>"])
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def bert_tokenizer(**kwargs: Any) -> Any:
    names = {name: f"[{name[:-6].upper()}]" for name in ("pad_token", "unk_token", "cls_token", "sep_token")}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=_wordpiece(), mask_token="[MASK]", model_max_length=16, **names, **kwargs
    )


def gpt2_tokenizer(**kwargs: Any) -> Any:
    end = "<|endoftext|>"
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=_bpe(), eos_token=end, bos_token=end, unk_token=end, model_max_length=16, **kwargs
    )


def bert(seed: int = 0, kind: Any = transformers.BertForMaskedLM, **config: Any) -> Any:
    torch.manual_seed(seed)
    return kind(transformers.BertConfig(vocab_size=60, **{**BERT, **config}))


def gpt2(seed: int = 0, **config: Any) -> Any:
    torch.manual_seed(seed)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=60, **{**GPT2, **ends, **config}))


def t5(seed: int = 0, **config: Any) -> Any:
    torch.manual_seed(seed)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 60}
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**{**sizes, **ends, **config}))


def masked(texts: list[str]) -> dict[str, torch.Tensor]:
    """A batch for masked language modelling, the same in every epoch."""
    batch = dict(bert_tokenizer()(texts, return_tensors="pt", padding="max_length", max_length=16))
    tokens = batch["input_ids"]
    hidden = (torch.arange(16) % 3 == 1) & (tokens > 4)
    batch["labels"] = tokens.masked_fill(~hidden, -100)
    batch["input_ids"] = tokens.masked_fill(hidden, 4)
    return batch


def causal(texts: list[str]) -> dict[str, torch.Tensor]:
    """A batch for causal language modelling."""
    tokenizer = gpt2_tokenizer(pad_token="<|endoftext|>")
    found = tokenizer(texts, return_tensors="pt", padding="max_length", truncation=True, max_length=16)
    return {
        "input_ids": found["input_ids"],
        "attention_mask": found["attention_mask"],
        "labels": found["input_ids"].masked_fill(found["attention_mask"] == 0, -100),
    }


def loader(collate: Any, sampler: Any = None, batch_size: int = 4) -> DataLoader[Any]:
    texts = [" ".join((text, other)) for text in TEXTS for other in TEXTS]
    return DataLoader(texts, batch_size=batch_size, collate_fn=collate, sampler=sampler)  # type: ignore[arg-type]


def metrics() -> list[Any]:
    return [LanguageCrossEntropy(), MaskedAccuracy()]


def causal_model(seed: int = 0, **kwargs: Any) -> HuggingFaceModel:
    arguments = {"tokenizer": gpt2_tokenizer(), "use_logits": True, "metrics": metrics(), **kwargs}
    return HuggingFaceModel(gpt2(seed), **arguments)


def masked_model(seed: int = 0, **kwargs: Any) -> HuggingFaceModel:
    arguments = {"tokenizer": bert_tokenizer(), "use_logits": True, "metrics": metrics(), **kwargs}
    return HuggingFaceModel(bert(seed), **arguments)


def trainer_of(model: HuggingFaceModel, **kwargs: Any) -> Trainer:
    is_causal = type(maybe_get_underlying_model(model.model)).__name__.endswith("GPT2LMHeadModel")
    defaults: dict[str, Any] = {
        "train_dataloader": loader(causal if is_causal else masked),
        "max_duration": "2ep",
        "optimizers": torch.optim.AdamW(model.parameters(), lr=0.01),
        "progress_bar": False,
        "device": "cpu",
        "seed": 3,
    }
    return Trainer(model=model, **{**defaults, **kwargs})


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_same_tokenizer(one: Any, other: Any) -> None:
    """Everything that decides what a tokenizer does."""
    assert type(one) is type(other)
    assert one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()
    assert one.special_tokens_map == other.special_tokens_map
    for name in (
        "padding_side",
        "truncation_side",
        "model_max_length",
        "chat_template",
        "clean_up_tokenization_spaces",
    ):
        assert getattr(one, name) == getattr(other, name)
    text = "the cat and unknown words"
    assert one(text)["input_ids"] == other(text)["input_ids"]
