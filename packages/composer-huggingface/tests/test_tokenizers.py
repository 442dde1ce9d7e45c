"""Tokenizers in checkpoints, honest and hostile."""

from __future__ import annotations

import gc
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from composer.models import HuggingFaceModel
from composer.models.huggingface._files import read_tokenizer, write_files

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def saved_and_loaded(value: Any) -> Any:
    """Save a value with torch and load it as weights only."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def load(saved: dict[str, Any], **kwargs: Any) -> Any:
    return HuggingFaceModel.load_huggingface_tokenizer_from_saved_state({"tokenizer": saved}, **kwargs)


@pytest.mark.parametrize("make", [tiny.bert_tokenizer, tiny.gpt2_tokenizer])
def test_a_tokenizer_comes_back_equal(make: Any) -> None:
    tokenizer = make(padding_side="left", truncation_side="left", chat_template=TEMPLATE)
    tokenizer.add_tokens(["<mine>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|a|>", "<|b|>"]})
    loaded = load(saved_and_loaded(read_tokenizer(tokenizer)))

    tiny.assert_same_tokenizer(tokenizer, loaded)
    assert loaded("<mine><|a|>")["input_ids"] == tokenizer("<mine><|a|>")["input_ids"]
    assert loaded.apply_chat_template([{"content": "the cat"}], tokenize=False) == "the cat"
    assert loaded.name_or_path == ""


def test_several_templates_come_back() -> None:
    templates = {"default": TEMPLATE, "tool": "{{ messages[0]['content'] }}!"}
    loaded = load(saved_and_loaded(read_tokenizer(tiny.gpt2_tokenizer(chat_template=templates))))
    assert templates == loaded.chat_template


def test_a_restored_model_can_be_saved_and_restored_again() -> None:
    tokenizer = tiny.bert_tokenizer()
    once = read_tokenizer(load(read_tokenizer(tokenizer)))

    assert read_tokenizer(load(once)) == once


def test_a_checkpoint_holds_files_by_name() -> None:
    saved = read_tokenizer(tiny.gpt2_tokenizer())

    assert {"tokenizer.json", "tokenizer_config.json"} <= saved.keys()
    assert all(set(entry) == {"file_extension", "content"} for entry in saved.values())
    assert isinstance(saved["tokenizer.json"]["content"], dict)
    assert read_tokenizer(None) == {}
    assert load({}) is None


def test_names_without_extension_and_lists_of_lines_are_understood(tmp_path: Path) -> None:
    saved = {
        "tokenizer": {"file_extension": ".json", "content": {"a": 1}},
        "vocab": {"file_extension": ".txt", "content": ["[PAD]", "the", ""]},
        "spiece": {"file_extension": ".model", "content": b"\x00\xff"},
        "chat_template.jinja": {"file_extension": ".jinja", "content": TEMPLATE},
    }
    write_files(saved, tmp_path)

    assert {"a": 1} == json.loads((tmp_path / "tokenizer.json").read_text())
    assert (tmp_path / "vocab.txt").read_text() == "[PAD]\nthe\n"
    assert (tmp_path / "spiece.model").read_bytes() == b"\x00\xff"
    assert (tmp_path / "chat_template.jinja").read_text() == TEMPLATE


def test_a_tokenizer_without_extensions_in_its_names_loads() -> None:
    tokenizer = tiny.bert_tokenizer()
    short = {name.rpartition(".")[0]: entry for name, entry in read_tokenizer(tokenizer).items()}
    short["tokenizer_config"]["content"]["name_or_path"] = "mine"
    loaded = load(short)

    tiny.assert_same_tokenizer(tokenizer, loaded)
    assert loaded.name_or_path == "mine"


def test_files_are_in_the_given_folder_or_removed_with_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    saved = read_tokenizer(tiny.bert_tokenizer())
    kept = load(saved, tokenizer_save_dir=str(tmp_path / "kept"))
    assert (tmp_path / "kept" / "tokenizer.json").is_file()
    assert os.listdir(tmp_path / "temporary") == []
    loaded = load(saved)
    assert len(os.listdir(tmp_path / "temporary")) == 1
    del loaded
    gc.collect()
    assert os.listdir(tmp_path / "temporary") == []
    assert kept("the")["input_ids"]


# ---- hostile ones ----

OUTSIDE = [
    "../evil.json",
    "/tmp/evil.json",
    "a/../../evil.json",
    "..",
    "a/b/c.json",
    "a\\..\\evil.json",
    "evil\x00.json",
    "~/evil.json",
    "./evil.json",
    "",
    "/",
    "C:evil.json",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_nothing_is_written_outside_of_the_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "in" / "ner"
    saved = {"tokenizer.json": {"file_extension": ".json", "content": {}}}
    saved[name] = {"file_extension": ".json", "content": {"a": 1}}
    with pytest.raises(ValueError, match=r"which is not a name within a folder. Nothing was written"):
        write_files(saved, folder)
    assert not folder.exists()


@given(st.text(), st.sampled_from([".json", ".txt", ".model", ".jinja"]))
def test_whatever_the_name_all_files_are_inside(name: str, extension: str) -> None:
    content: Any = {".json": {}, ".model": b""}.get(extension, "")
    import tempfile

    with tempfile.TemporaryDirectory() as outer:
        folder = Path(outer, "in")
        try:
            write_files({name: {"file_extension": extension, "content": content}}, folder)
        except ValueError:
            assert os.listdir(outer) == []
        else:
            assert os.listdir(outer) == ["in"]
            (file,) = (path for path in folder.rglob("*") if path.is_file())
            assert file.resolve().is_relative_to(folder.resolve())


def test_a_link_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("mine")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "vocab.txt").symlink_to(tmp_path / "outside")
    write_files({"vocab.txt": {"file_extension": ".txt", "content": "evil"}}, tmp_path / "in")

    assert (tmp_path / "outside").read_text() == "mine"
    assert (tmp_path / "in" / "vocab.txt").read_text() == "evil"


def test_a_linked_folder_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "more").symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match="a link"):
        write_files({"more/a.jinja": {"file_extension": ".jinja", "content": "evil"}}, tmp_path / "in")
    assert os.listdir(tmp_path / "outside") == []


CODE = """
import pathlib
pathlib.Path({path!r}).write_text("ran")
from transformers import PreTrainedTokenizerFast
class Mine(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def with_code(tmp_path: Path) -> tuple[dict[str, Any], Path]:
    saved = read_tokenizer(tiny.bert_tokenizer())
    config = saved["tokenizer_config.json"]["content"]
    config["auto_map"] = {"AutoTokenizer": [None, "mine.Mine"]}
    config["tokenizer_class"] = "Mine"
    proof = tmp_path / "proof"
    saved["mine.py"] = {"file_extension": ".py", "content": CODE.format(path=str(proof))}
    return saved, proof


def test_code_of_a_tokenizer_does_not_run(with_code: tuple[dict[str, Any], Path]) -> None:
    saved, proof = with_code
    with pytest.raises(ValueError, match=r"has custom code, 'mine.py', which would run.*`trust_remote_code=True`"):
        load(saved)
    del saved["mine.py"]  # and is not fetched
    try:
        loaded = load(saved)
    except (ValueError, OSError):
        loaded = None
    assert loaded is None or type(loaded).__module__.startswith("transformers.")
    assert not proof.exists()


def test_code_of_a_tokenizer_runs_if_it_is_trusted(
    with_code: tuple[dict[str, Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, proof = with_code
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    loaded = load(saved, trust_remote_code=True)

    assert type(loaded).__name__ == "Mine"
    assert proof.read_text() == "ran"


def test_a_tokenizer_does_not_read_files_that_it_names(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("[UNK]\nsecret\n")
    saved = read_tokenizer(tiny.bert_tokenizer())
    saved["tokenizer_config.json"]["content"]["vocab_file"] = str(secret)
    write_files(saved, tmp_path / "in")
    written = json.loads((tmp_path / "in" / "tokenizer_config.json").read_text())

    assert "vocab_file" not in written
    assert "secret" not in load(saved).get_vocab()


@pytest.mark.parametrize(
    "entry",
    [
        {"file_extension": ".sh", "content": "rm"},
        {"file_extension": "", "content": ""},
        {"content": ""},
        {"file_extension": ".txt"},
        "text",
        None,
    ],
)
def test_other_entries_are_refused(entry: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has an entry 'a' that is not a file ending in .jinja, .json"):
        write_files({"a": entry}, tmp_path)


@pytest.mark.parametrize(("extension", "content"), [(".txt", 1), (".txt", [1]), (".model", "text"), (".jinja", b"")])
def test_other_contents_are_refused(extension: str, content: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="whose content is of the type"):
        write_files({"a": {"file_extension": extension, "content": content}}, tmp_path)


def test_a_tokenizer_with_other_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny.bert_tokenizer()
    monkeypatch.setattr(tokenizer, "save_pretrained", lambda folder: Path(folder, "vocab.bin").write_bytes(b""))
    with pytest.raises(ValueError, match=r"The tokenizer has a file 'vocab.bin'; only files ending in"):
        HuggingFaceModel(tiny.bert(), tokenizer).get_metadata()


def test_an_unsupported_tokenizer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *args, **kwargs: object())
    with pytest.raises(ValueError, match="has the type object, which is not a tokenizer"):
        load(read_tokenizer(tiny.bert_tokenizer()))
