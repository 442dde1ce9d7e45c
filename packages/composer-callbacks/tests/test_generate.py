from __future__ import annotations

from math import ceil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from composer.callbacks.generate import Generate
from composer.core import Event
from composer.loggers import LoggerDestination
from composer.testing import RandomTextDataset, SimpleTransformerModel


class Tokenizer:
    """Maps letters to numbers."""

    padding_side = "right"
    eos_token = "|"

    def __init__(self, pad_token: str | None = "_") -> None:
        self.pad_token = pad_token
        self.sides: list[str] = []

    def __call__(self, texts: list[str], return_tensors: str, padding: bool) -> dict[str, torch.Tensor]:
        assert (return_tensors, padding) == ("pt", True)
        assert self.pad_token is not None
        self.sides.append(self.padding_side)
        length = max(map(len, texts))
        ids = [[0] * (length - len(text)) + [ord(letter) - ord("a") + 1 for letter in text] for text in texts]
        tokens = torch.tensor(ids)
        return {"input_ids": tokens, "attention_mask": (tokens > 0).long()}

    def batch_decode(self, tokens: torch.Tensor, skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return ["".join(chr(int(token) + ord("a") - 1) for token in row if token) for row in tokens]


class Model(SimpleTransformerModel):
    """Continues a text with its last letter, and draws random numbers meanwhile."""

    def __init__(self, tokenizer: Any = None, repeats_prompt: bool = True, p: float = 0.5) -> None:
        super().__init__(p=p)
        self.tokenizer = tokenizer
        self.config = SimpleNamespace(is_encoder_decoder=not repeats_prompt)
        self.calls: list[tuple[int, bool, dict[str, Any]]] = []

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.calls.append((len(input_ids), self.training, kwargs))
        torch.rand(3)
        new = input_ids[:, -1:].repeat(1, kwargs.get("max_new_tokens", 1))
        return new if self.config.is_encoder_decoder else torch.cat([input_ids, new], dim=1)


class Tables(LoggerDestination):
    def __init__(self) -> None:
        self.tables: list[tuple[Any, ...]] = []

    def log_table(self, columns: Any, rows: Any, name: str = "Table", step: int | None = None) -> None:
        self.tables.append((columns, rows, name, step))


def train(run: Any, callbacks: Any, model: Any, max_duration: str = "5ba", size: int = 16) -> Any:
    loader = DataLoader(RandomTextDataset(size=size), batch_size=2)
    begun = run(callbacks, model=model, train_dataloader=loader, max_duration=max_duration, seed=7)
    begun.tables = Tables()
    begun.trainer.logger.destinations = (begun.tables,)
    return begun.fit()


@pytest.mark.parametrize(
    ("interval", "max_duration", "steps"),
    [
        ("2ba", "5ba", [2, 4, 5]),
        ("1ba", "3ba", [1, 2, 3]),
        ("9ba", "3ba", [3]),
        (1, "2ep", [8, 16]),
        ("5ep", "1ep", [8]),
    ],
)
def test_a_table_is_logged_at_the_interval_and_at_the_end(
    run: Any, interval: Any, max_duration: str, steps: list[int]
) -> None:
    model = Model(Tokenizer())
    prompts = ["ab", "c", "xyz"]
    generate = Generate(prompts, interval, batch_size=2, max_new_tokens=2)
    done = train(run, generate, model, max_duration)
    done.trainer.engine.run_event(Event.FIT_END)
    rows = [["ab", "bb"], ["c", "cc"], ["xyz", "zz"]]

    assert done.tables.tables == [(["prompt", "generation"], rows, "generations", step) for step in steps]
    assert len(model.calls) == len(steps) * ceil(3 / 2)
    assert model.calls[:2] == [(2, False, {"max_new_tokens": 2}), (1, False, {"max_new_tokens": 2})]
    assert set(model.tokenizer.sides) == {"left"}
    assert model.tokenizer.padding_side == "right"
    assert model.training


def test_training_is_the_same_with_and_without(run: Any) -> None:
    models = [Model(Tokenizer()), Model(Tokenizer())]
    train(run, Generate(["ab"], "1ba"), models[0])
    train(run, [], models[1])
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_model_that_does_not_repeat_the_prompt_is_understood(run: Any) -> None:
    done = train(run, Generate(["ab"], "1ba", max_new_tokens=3), Model(Tokenizer(), repeats_prompt=False), "1ba")
    assert done.tables.tables[0][1] == [["ab", "bbb"]]


def test_a_tokenizer_without_a_padding_token_pads_with_the_end(run: Any) -> None:
    model = Model(Tokenizer(pad_token=None))
    train(run, Generate(["ab", "c"], "1ba"), model, "1ba")
    assert len(model.calls) == 1
    assert model.tokenizer.pad_token is None


def test_other_ranks_log_nothing(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done = train(run, generate := Generate(["ab"], "9ba"), Model(Tokenizer()), "1ba")
    monkeypatch.setattr("composer.callbacks.generate.dist.get_global_rank", lambda: 1)
    generate.generate(done.state, done.trainer.logger)
    assert len(done.tables.tables) == 1


def test_a_model_that_cannot_generate_is_refused(run: Any) -> None:
    with pytest.raises(ValueError, match=r"`Generate` needs a `HuggingFaceModel`.* got `SimpleModel`"):
        run(Generate(["a"], "1ba"))
    with pytest.raises(ValueError, match="`Generate` needs a model with a tokenizer"):
        train(run, Generate(["a"], "1ba"), Model(None))


@pytest.mark.parametrize("prompts", ["a", [], [1]])
def test_impossible_prompts_are_refused(prompts: Any) -> None:
    with pytest.raises(ValueError, match="`prompts` must be a list of at least one text"):
        Generate(prompts, "1ba")


def test_an_impossible_batch_size_is_refused() -> None:
    with pytest.raises(ValueError, match="`batch_size` must be at least 1 prompt"):
        Generate(["a"], "1ba", batch_size=0)


def test_a_real_model_and_tokenizer(run: Any) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "[EOS]": 1, "[PAD]": 2, "a": 3, "b": 4}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", eos_token="[EOS]")
    config = transformers.GPT2Config(
        vocab_size=5, n_positions=32, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1, pad_token_id=2
    )
    model = SimpleTransformerModel()
    model.tokenizer, model.config = tokenizer, config
    model.model = transformers.GPT2LMHeadModel(config)
    model.generate = model.model.generate  # type: ignore[method-assign]
    done = train(run, Generate(["a b", "b"], "1ba", max_new_tokens=4, do_sample=False), model, "1ba")
    rows = done.tables.tables[0][1]
    assert [row[0] for row in rows] == ["a b", "b"]
    assert all(isinstance(row[1], str) for row in rows)
