from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recipe_runs import POEM

from composer.core import ensure_data_spec
from composer.datasets import CharTokenizer
from composer.datasets.lm import PackedTokens
from composer.devices import DeviceCPU
from composer.recipes.tiny_lm import Data, Network, Text

SMALL: dict[str, Any] = {"batch_size": 4, "seq_length": 16}
TEXT = 20 * POEM


def sequences(loader: Any) -> list[list[int]]:
    return [row for batch in ensure_data_spec(loader).dataloader for row in batch["input_ids"].tolist()]


def cut(text: str, begin: int, end: int, dataset: Text) -> list[list[int]]:
    """The slow reference: characters become numbers, and every 16 of them a sequence."""
    alphabet = sorted(set(TEXT))
    codes = [alphabet.index(character) for character in text[begin:end]]
    return [codes[at : at + 16] for at in range(0, len(codes) - 15, 16)]


def test_the_first_nine_tenths_are_for_training_and_the_rest_for_testing(data: Path) -> None:
    dataset = Data(data=data, **SMALL).load()
    border = round(0.9 * len(TEXT))
    expected = [cut(TEXT, 0, border, dataset), cut(TEXT, border, len(TEXT), dataset)]

    train, test = dataset.loaders(0, DeviceCPU())
    first, second = sequences(train), sequences(train)

    assert expected[1] == sequences(test)
    assert [len(part) for part in expected] == [dataset.num_train, dataset.num_test]
    assert len(expected[0]) // 4 * 4 == len(first) == len(second)
    assert first != second  # another order in each epoch
    assert {*map(tuple, first), *map(tuple, second)} <= set(map(tuple, expected[0]))


def test_the_labels_are_the_characters_themselves(data: Path) -> None:
    train, _ = Data(data=data, **SMALL).load().loaders(0, DeviceCPU())
    batch = next(iter(ensure_data_spec(train).dataloader))

    assert torch.equal(batch["input_ids"], batch["labels"])


def test_the_seed_decides_the_order(data: Path) -> None:
    dataset = Data(data=data, **SMALL).load()
    one, same, other = (sequences(dataset.loaders(seed, DeviceCPU())[0]) for seed in (1, 1, 2))

    assert one == same
    assert one != other


def test_the_first_characters_have_the_token_ids_of_the_full_text(data: Path) -> None:
    dataset = Data(data=data, characters=500, **SMALL).load()

    _, test = dataset.loaders(0, DeviceCPU())

    assert cut(TEXT, 450, 500, dataset) == sequences(test)
    assert (450 // 16, 50 // 16) == (dataset.num_train, dataset.num_test)
    assert len(set(TEXT)) == dataset.vocab_size


def test_hyperparameters_are_chosen_on_held_out_characters_of_the_training_part(data: Path) -> None:
    dataset = Data(data=data, characters=500, validation_characters=100, **SMALL).load()

    train, validation = dataset.loaders(0, DeviceCPU())

    assert cut(TEXT, 350, 450, dataset) == sequences(validation)
    assert {*map(tuple, sequences(train))} <= set(map(tuple, cut(TEXT, 0, 350, dataset)))
    assert (350 // 16, 100 // 16) == (dataset.num_train, dataset.num_test)


def test_holding_out_all_of_the_training_part_is_told(data: Path) -> None:
    with pytest.raises(ValueError, match=r"must have a batch of 4 sequences of 16 characters to train on, and one"):
        Data(data=data, characters=500, validation_characters=450, **SMALL).load()


def test_there_are_as_many_sequences_as_said_whatever_the_length(data: Path, tmp_path: Path) -> None:
    tokens = torch.zeros(len(TEXT), dtype=torch.int64).numpy()
    for characters in range(400, len(TEXT), 7):
        dataset = Data(data=data, characters=characters, **SMALL).load()
        parts = dataset._parts

        expected = [len(PackedTokens(tokens, 16, part)) for part in parts]

        assert expected == [dataset.num_train, dataset.num_test]


def test_any_file_can_be_given_and_is_called_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "poem.txt").write_text(TEXT + "\u00e9", encoding="utf-8")

    dataset = Data(data=tmp_path / "poem.txt", **SMALL).load()

    assert (
        f"poem.txt: 91 sequences to train on, 10 to test, of 16 characters, {len(set(TEXT)) + 1} of them distinct"
        == dataset.describe()
    )


def test_a_file_of_tokens_is_a_text(data: Path, tmp_path: Path) -> None:
    ids = CharTokenizer.from_text(TEXT).encode(TEXT)
    np.save(tmp_path / "ids.npy", np.array(ids, np.uint16))
    text = Data(data=data, **SMALL).load()
    tokens = Data(data=tmp_path / "ids.npy", **SMALL).load()

    assert tokens.vocab_size == text.vocab_size
    assert tokens.describe() == text.describe().replace("tinyshakespeare.txt", "ids.npy").replace(
        "characters", "tokens"
    )
    for ours, theirs in zip(tokens.loaders(3, DeviceCPU()), text.loaders(3, DeviceCPU()), strict=True):
        assert sequences(ours) == sequences(theirs)
    assert Data(data=tmp_path / "ids.npy", vocab_size=50_304, **SMALL).load().vocab_size == 50_304


def test_the_vocabulary_of_a_file_must_fit(data: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(1000) % 30)
    with pytest.raises(ValueError, match=r"`vocab_size` must be above 29, a token of '.*ids.npy', got 29"):
        Data(data=tmp_path / "ids.npy", vocab_size=29, **SMALL).load()
    with pytest.raises(ValueError, match="`vocab_size` must be None for a text"):
        Data(data=data, vocab_size=29, **SMALL).load()


@pytest.mark.parametrize("place", ["tinyshakespeare.txt", "text/tinyshakespeare.txt"])
def test_the_folder_may_hold_it_in_two_places(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPOSER_DATA", str(tmp_path))
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text(TEXT, encoding="utf-8")

    assert tmp_path / place == Data(**SMALL).load().path


def test_the_error_for_a_missing_text_has_its_paths_and_the_command(tmp_path: Path) -> None:
    message = r"looked for '.*/tinyshakespeare.txt' and '.*/text/tinyshakespeare.txt'\. To get it, run `curl -Lo .*`\."

    with pytest.raises(FileNotFoundError, match=message):
        Data(data=tmp_path).load()


def test_there_are_no_more_characters_than_there_are(data: Path) -> None:
    message = rf"`characters` must be at most {len(TEXT):,}, the length of '.*tinyshakespeare.txt', got 9999"

    with pytest.raises(ValueError, match=message):
        Data(data=data, characters=9999, **SMALL).load()


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        ({"batch_size": 92, "seq_length": 16}, "91 and 10"),
        ({"batch_size": 2, "seq_length": 200}, "7 and 0"),
        ({"batch_size": 2, "seq_length": 16, "characters": 9}, "0 and 0"),
    ],
)
def test_a_text_must_have_a_batch_to_train_on_and_a_sequence_to_test(
    arguments: dict[str, int], numbers: str, data: Path
) -> None:
    with pytest.raises(ValueError, match=f"The text must have a batch of .*got {numbers}. Use more text"):
        Data(data=data, **arguments).load()


def test_processes_share_each_batch_evenly(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Data(data=data, **SMALL)
    train, test = source.load().loaders(5, DeviceCPU())
    whole = [sequences(train), sequences(test)]
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        train, test = source.load().loaders(5, DeviceCPU())
        assert [whole[0][rank::2], whole[1][rank::2]] == [sequences(train), sequences(test)]


def test_three_processes_that_share_a_batch_evenly_can_test_too(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")

    train, test = Data(data=data, batch_size=6, seq_length=16).load().loaders(5, DeviceCPU())

    assert 2 == len(next(iter(ensure_data_spec(train).dataloader))["input_ids"])
    assert sequences(test)


def test_a_batch_that_cannot_be_shared_evenly_is_refused(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")

    with pytest.raises(ValueError, match="`batch_size` must be a multiple of the number of processes, 3, got 4"):
        Data(data=data, **SMALL).load()


def test_the_network_is_a_gpt2_of_the_text_without_advice(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = Data(data=data, **SMALL).load()
    log = logging.getLogger("composer.models.huggingface")
    level = log.level

    model: Any = Network(width=12, layers=3, heads=2, dropout=0.25).build(dataset)
    config = model.model.config

    expected = (len(set(TEXT)), 16, 12, 3, 2, 0.25, 0.25, 0.25)
    names = "vocab_size n_positions n_embd n_layer n_head embd_pdrop attn_pdrop resid_pdrop".split()
    assert expected == tuple(getattr(config, name) for name in names)
    assert {} == model.train_metrics
    assert [] == caplog.records
    assert level == log.level


def test_an_untrained_network_guesses_about_evenly(data: Path) -> None:
    torch.manual_seed(0)
    dataset = Data(data=data, **SMALL).load()
    model = Network(width=8, layers=1, heads=2).build(dataset)
    batch = next(iter(ensure_data_spec(dataset.loaders(0, DeviceCPU())[0]).dataloader))

    loss = model.loss(model(batch), batch)

    # Weights begin with a deviation of 0.02, so the 8 terms of a score are of about 0.02 * sqrt(8) = 0.06.
    assert torch.log(torch.tensor(float(len(set(TEXT))))).item() == pytest.approx(loss.item(), abs=0.1)
