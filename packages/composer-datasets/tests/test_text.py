from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer import datasets
from composer.datasets import CharTokenizer, DeviceLoader, PackedTokens, TokenTransform, mask_tokens
from composer.datasets._tokens import TextTokenizer, encode, vocab_size_of
from composer.datasets.c4 import read_documents
from composer.testing import run_on_ranks

TEXT = "the quick brown fox jumps over the lazy dog\n" * 20


# ---- characters


@given(st.text(min_size=1))
def test_characters_go_there_and_back(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()  # lone surrogates are no text
    tokenizer = CharTokenizer(text or "x")

    assert text == tokenizer.decode(tokenizer.encode(text))
    assert sorted(tokenizer.get_vocab().values()) == list(range(tokenizer.vocab_size))


def test_tokens_with_names_come_after_the_characters() -> None:
    tokenizer = CharTokenizer("ab", eos_token="<eos>", mask_token="<mask>", unk_token="<unk>")

    assert (2, 3, 4, 5) == (tokenizer.eos_token_id, tokenizer.mask_token_id, tokenizer.unk_token_id, len(tokenizer))
    assert [0, 4, 1] == tokenizer.encode("a?b")
    assert "b<eos>" == tokenizer.decode(torch.tensor([1, 2]))
    assert CharTokenizer.from_text("ba").mask_token_id is None


def test_unknown_characters_are_said() -> None:
    with pytest.raises(ValueError, match="has the character '\\\\xe9', which is not in the vocabulary"):
        CharTokenizer("acf").encode("caf\u00e9")
    for characters in ("", ["ab"]):
        with pytest.raises(ValueError, match="one or more single characters"):
            CharTokenizer(characters)


# ---- packing


@given(st.lists(st.lists(st.integers(0, 99), max_size=20), min_size=1), st.integers(1, 9))
def test_packing_keeps_all_tokens_in_their_order(documents: list[list[int]], length: int) -> None:
    class Tokenizer:
        vocab_size = 101

        def encode(self, text: str) -> list[int]:
            return documents[int(text)]

    tokens = TextTokenizer(Tokenizer(), 100).tokenize(lambda: map(str, range(len(documents))), [], None)
    expected = [token for document in documents for token in [*document, 100]]

    assert expected == tokens.tolist()
    assert np.uint16 == tokens.dtype
    if len(expected) < length:
        with pytest.raises(ValueError, match="at least one sequence"):
            PackedTokens(tokens, length)
        return
    packed = PackedTokens(tokens, length)
    kept = torch.cat([packed[index] for index in range(len(packed))]).tolist()

    assert expected[: len(kept)] == kept
    assert len(expected) - len(kept) < length
    assert kept == packed.as_tensor().flatten().tolist()


def test_parts_do_not_overlap_and_leave_nothing_out() -> None:
    tokens = np.arange(103)
    parts = [PackedTokens(tokens, 1, part) for part in ((0.0, 0.9), (0.9, 1.0))]
    kept = [int(token) for part in parts for index in range(len(part)) for token in part[index]]

    assert list(range(103)) == kept


@pytest.mark.parametrize("part", [(0.5, 0.5), (-0.1, 1.0), (0.0, 1.1)])
def test_a_part_is_a_range(part: Any) -> None:
    with pytest.raises(ValueError, match="`part` must be a range within"):
        PackedTokens(np.arange(9), 2, part)
    with pytest.raises(ValueError, match="`max_seq_len` must be positive"):
        PackedTokens(np.arange(9), 0)


# ---- hiding


def slow_mask(ids: Any, chosen: Any, fate: Any, random_ids: Any, mask: int, probability: float) -> Any:
    hidden, labels = [], []
    for token, c, f, r in zip(ids, chosen, fate, random_ids, strict=True):
        labels.append(token if c < probability else -100)
        replacement = mask if f < np.float32(0.8) else r if f < np.float32(0.9) else token
        hidden.append(replacement if c < probability else token)
    return hidden, labels


UNIT = st.floats(0, 1, exclude_max=True, width=32)


@given(
    st.lists(st.tuples(st.integers(0, 9), UNIT, UNIT, st.integers(0, 9)), min_size=1), st.floats(0.125, 1.0, width=32)
)
def test_tokens_are_hidden_one_by_one(columns: list[Any], probability: float) -> None:
    ids, chosen, fate, random_ids = (torch.tensor(column)[None] for column in zip(*columns, strict=True))
    expected = slow_mask(*(part[0].tolist() for part in (ids, chosen, fate, random_ids)), 10, probability)
    hidden, labels = mask_tokens(ids, chosen, fate, random_ids, 10, probability)

    assert expected == (hidden[0].tolist(), labels[0].tolist())


def test_the_shares_are_those_of_bert() -> None:
    transform = TokenTransform(50, vocab_size=51, probability=0.15, special_token_ids=[7])
    ids = torch.randint(0, 50, (400, 500), generator=torch.Generator().manual_seed(1))
    batch = transform(ids, None, transform.draw(ids.shape, torch.Generator().manual_seed(0)))
    predicted = batch["labels"] != -100
    hidden, plain = batch["input_ids"][predicted], ids[predicted]

    assert torch.equal(plain, batch["labels"][predicted])
    assert torch.equal(ids[~predicted], batch["input_ids"][~predicted])
    assert not (plain == 7).any()
    assert abs(float(predicted[ids != 7].float().mean()) - 0.15) < 0.005
    assert abs(float((hidden == 50).float().mean()) - 0.8 - 0.1 / 51) < 0.01
    assert abs(float((hidden == plain).float().mean()) - 0.1 - 0.1 / 51) < 0.01
    assert 51 == len(hidden.unique())


def test_masking_needs_a_vocabulary_size_and_a_probability() -> None:
    with pytest.raises(ValueError, match="`vocab_size` must be given together"):
        TokenTransform(3)
    with pytest.raises(ValueError, match="`probability` must be above 0"):
        TokenTransform(probability=0.0)


# ---- tokenizers


def bpe() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator([TEXT], tokenizers.trainers.BpeTrainer(vocab_size=60, special_tokens=special))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def test_tokenizers_add_no_special_tokens() -> None:
    tokenizer = bpe()
    (ids,) = encode(tokenizer, ["the dog"])

    assert tokenizer.encode("the dog", add_special_tokens=False).ids == ids
    assert tokenizer.get_vocab_size() == vocab_size_of(tokenizer)
    assert 3 == TokenTransform.of(tokenizer, True, 0.15).mask_token_id


def test_tokenizers_of_transformers_are_taken() -> None:
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe(), mask_token="[MASK]", sep_token="[SEP]", unk_token="[UNK]"
    )
    transform = TokenTransform.of(fast, True, 0.15)

    assert encode(bpe(), ["the dog", "fox"]) == encode(fast, ["the dog", "fox"])
    assert len(fast) == vocab_size_of(fast) == transform.vocab_size
    assert 3 == transform.mask_token_id
    assert {0, 2} == set(transform.special_token_ids)


def test_an_unsupported_tokenizer_is_an_error() -> None:
    with pytest.raises(TypeError, match="must be a tokenizer of transformers or tokenizers, or have `encode"):
        encode(object(), ["a"])
    with pytest.raises(TypeError, match="`tokenizer` must have `vocab_size`"):
        vocab_size_of(object())
    with pytest.raises(ValueError, match="must have a mask token for masked language modeling, got CharTokenizer"):
        TokenTransform.of(CharTokenizer("a"), True, 0.15)


# ---- loaders


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "b.txt").write_text(TEXT[::-1], encoding="utf-8")
    return tmp_path


TOKENIZER = CharTokenizer(TEXT, eos_token="<eos>", mask_token="<mask>")


def test_files_follow_each_other_with_a_separator(text: Path) -> None:
    spec = datasets.build_text_dataloader(text, 1, tokenizer=TOKENIZER, max_seq_len=8, is_train=False)
    tokens = torch.cat([batch["input_ids"][0] for batch in spec.dataloader])

    assert f"{TEXT}<eos>{TEXT[::-1]}<eos>".startswith(TOKENIZER.decode(tokens))
    assert len(tokens) == spec.num_tokens
    assert 8 == spec.get_num_tokens_in_batch(next(iter(spec.dataloader)))


@pytest.mark.parametrize("masked", [False, True])
def test_host_and_device_pack_identically(text: Path, masked: bool) -> None:
    options: dict[str, Any] = {"tokenizer": TOKENIZER, "max_seq_len": 16, "masked": masked, "is_train": False}
    host = datasets.build_text_dataloader([text / "a.txt", text / "b.txt"], 4, **options)
    device = datasets.build_text_dataloader(str(text), 4, device="cpu", **options)

    assert isinstance(device.dataloader, DeviceLoader)
    for one, other in zip(host.dataloader, device.dataloader, strict=True):
        whole = [torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"]) for batch in (one, other)]
        assert torch.equal(*whole)
        assert ["attention_mask", "input_ids", "labels"] == sorted(one) == sorted(other)
        assert all(torch.int64 == part.dtype for part in (*one.values(), *other.values()))
        assert masked == (not torch.equal(one["labels"], one["input_ids"]))
        assert 1 == one["attention_mask"].min()


@pytest.mark.parametrize("device", [None, "cpu"])
def test_tokens_are_hidden_anew_in_every_epoch_and_the_same_in_every_run(text: Path, device: str | None) -> None:
    options: dict[str, Any] = {"tokenizer": TOKENIZER, "max_seq_len": 16, "masked": True, "shuffle": False}
    loader, again = (datasets.build_text_dataloader(text, 4, device=device, **options).dataloader for _ in range(2))
    first, second = ([batch["labels"] for batch in loader] for _ in range(2))
    same = [batch["labels"] for batch in again]

    assert not torch.equal(torch.cat(first), torch.cat(second))
    assert torch.equal(torch.cat(first), torch.cat(same))


def test_text_that_is_missing_is_said(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no.txt"):
        with pytest.raises(FileNotFoundError, match=r"The text was not found: looked for .*txt(?s:.*)curl"):
            datasets.build_text_dataloader(path, 1, tokenizer=TOKENIZER, max_seq_len=8)


def test_a_device_loader_of_text_has_no_workers(text: Path) -> None:
    with pytest.raises(TypeError, match="takes no num_workers"):
        datasets.build_text_dataloader(text, 1, tokenizer=TOKENIZER, max_seq_len=8, device="cpu", num_workers=1)


@pytest.mark.parametrize("masked", [False, True])
def test_synthetic_text_needs_no_files(masked: bool) -> None:
    spec = datasets.build_synthetic_text_dataloader(4, num_samples=8, max_seq_len=10, vocab_size=12, masked=masked)
    batch = next(iter(spec.dataloader))

    assert (4, 10) == batch["input_ids"].shape
    assert batch["input_ids"].max() < 12
    assert masked == (not torch.equal(batch["input_ids"], batch["labels"]))


# ---- the cache


class Counting(CharTokenizer):
    """Counts the texts it was given."""

    calls = 0

    def encode(self, text: str) -> list[int]:
        Counting.calls += 1
        return super().encode(text)


def test_tokens_are_made_once_per_text_and_tokenizer(text: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    def load(tokenizer: CharTokenizer) -> list[int]:
        spec = datasets.build_text_dataloader(
            text / "a.txt", 1, tokenizer=tokenizer, max_seq_len=8, is_train=False, cache_dir=cache
        )
        return torch.cat([batch["input_ids"][0] for batch in spec.dataloader]).tolist()

    first = load(Counting(TEXT))
    assert first == load(Counting(TEXT))
    assert 1 == Counting.calls
    load(Counting(TEXT + "?"))
    (text / "a.txt").write_text(TEXT[::-1], encoding="utf-8")
    assert first != load(Counting(TEXT))
    assert 3 == Counting.calls
    assert 3 == len(list(cache.glob("tokens-*.uint16")))
    assert 3 == len(list(cache.iterdir()))


def test_a_cache_that_could_not_be_finished_is_not_left(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which is not in the vocabulary"):
        datasets.build_text_dataloader(
            text, 1, tokenizer=CharTokenizer("abc"), max_seq_len=8, cache_dir=tmp_path / "cache"
        )
    assert not list((tmp_path / "cache").glob("*tokens*"))


def shard_of_rank(folder: str) -> list[int]:
    spec = datasets.build_c4_dataloader(
        folder, 2, tokenizer=TOKENIZER, max_seq_len=8, split="validation", cache_dir=f"{folder}/cache"
    )
    return [int(token) for batch in spec.dataloader for token in batch["input_ids"].flatten()]


def test_two_ranks_share_a_cache_and_the_sequences(tmp_path: Path) -> None:
    shards(tmp_path)
    shares = run_on_ranks(shard_of_rank, 2, str(tmp_path))
    alone = datasets.build_c4_dataloader(tmp_path, 1, tokenizer=TOKENIZER, max_seq_len=8, split="validation")
    sequences = [tuple(batch["input_ids"][0].tolist()) for batch in alone.dataloader]
    split = [tuple(share[i : i + 8]) for share in shares for i in range(0, len(share), 8)]

    assert sorted(sequences) == sorted(split)


# ---- C4

DOCUMENTS = [TEXT[:30], "", TEXT[40:90], TEXT[7:50]]


def shards(root: Path, ending: str = "json.gz", split: str = "validation") -> None:
    root.mkdir(parents=True, exist_ok=True)
    for number in range(2):
        lines = [json.dumps({"text": text, "url": "x"}) for text in DOCUMENTS[2 * number : 2 * number + 2]]
        content = ("\n".join(lines) + "\n\n").encode()
        if ending.endswith("gz"):
            content = gzip.compress(content)
        elif ending.endswith("zst"):
            content = pytest.importorskip("zstandard").compress(content)
        (root / f"c4-{split}.0000{number}-of-00002.{ending}").write_bytes(content)


@pytest.mark.parametrize("ending", ["json.gz", "jsonl.gz", "json", "jsonl", "json.zst"])
def test_shards_of_any_kind_are_read(tmp_path: Path, ending: str) -> None:
    shards(tmp_path / "en", ending)
    spec = datasets.build_c4_dataloader(tmp_path, 1, tokenizer=TOKENIZER, max_seq_len=9, split="validation")
    tokens = torch.cat([batch["input_ids"][0] for batch in spec.dataloader])

    assert "".join(f"{text}<eos>" for text in DOCUMENTS).startswith(TOKENIZER.decode(tokens))
    assert DOCUMENTS == list(read_documents(sorted((tmp_path / "en").iterdir())))


def test_the_first_shards_can_do(tmp_path: Path) -> None:
    shards(tmp_path, split="train")
    build: Callable[..., Any] = datasets.build_c4_dataloader
    options: dict[str, Any] = {"tokenizer": TOKENIZER, "max_seq_len": 8}

    assert build(tmp_path, 1, max_shards=1, **options).num_samples < build(tmp_path, 1, **options).num_samples
    with pytest.raises(ValueError, match="`max_shards` must be positive"):
        build(tmp_path, 1, max_shards=0, **options)


def test_shards_that_are_missing_are_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"The split 'train' of C4 was not found(?s:.*)hf download allenai/c4"):
        datasets.build_c4_dataloader(tmp_path, 1, tokenizer=TOKENIZER, max_seq_len=8)


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"txt": "a"}', '{"text": 3}'])
def test_a_line_that_is_no_document_is_said(tmp_path: Path, line: str) -> None:
    (tmp_path / "c4-train.jsonl").write_text(f'{{"text": "a"}}\n{line}\n')
    with pytest.raises(ValueError, match=r"c4-train.jsonl', line 2: must be a JSON object"):
        list(read_documents([tmp_path / "c4-train.jsonl"]))


@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda content: b"nonsense"])
def test_a_damaged_shard_is_said(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "c4-train.json.gz"
    path.write_bytes(damage(gzip.compress(b'{"text": "a"}\n' * 1000)))
    with pytest.raises(ValueError, match=r"c4-train.json.gz' is damaged .* Download it again"):
        list(read_documents([path]))


def test_shards_compressed_by_zstd_without_the_package_name_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.zst").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install composer-datasets\[zstd\]"):
        list(read_documents([tmp_path / "a.zst"]))


# ---- tokens of other programs


@pytest.mark.parametrize("dtype", [np.uint16, np.int64])
def test_tokens_in_a_file_are_those_of_the_text(dtype: type, tmp_path: Path) -> None:
    tokenizer = CharTokenizer.from_text(TEXT)
    (tmp_path / "text.txt").write_text(TEXT)
    np.save(tmp_path / "ids.npy", np.array(tokenizer.encode(TEXT), dtype))
    options: dict[str, Any] = {"max_seq_len": 8, "part": (0.1, 0.9), "seed": 5}

    ours = datasets.build_token_dataloader(tmp_path / "ids.npy", 4, **options)
    theirs = datasets.build_text_dataloader(tmp_path / "text.txt", 4, tokenizer=tokenizer, **options)

    for one, other in zip(ours.dataloader, theirs.dataloader, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert ours.num_tokens == theirs.num_tokens


def test_a_file_without_tokens_is_told(tmp_path: Path) -> None:
    np.save(tmp_path / "floats.npy", np.zeros(9))
    with pytest.raises(ValueError, match=r"`path` must hold integers of shape \(number of tokens,\), got float64"):
        datasets.build_token_dataloader(tmp_path / "floats.npy", 4, max_seq_len=8)
    with pytest.raises(FileNotFoundError, match=r"numpy\.save"):
        datasets.build_token_dataloader(tmp_path / "absent.npy", 4, max_seq_len=8)
