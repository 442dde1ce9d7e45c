"""From checkpoints back to `transformers`, without a Trainer."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from torch import nn

from composer.algorithms import Alibi
from composer.checkpoint import UnsafeCheckpointError, read_checkpoint
from composer.models import HuggingFaceModel, write_huggingface_pretrained_from_composer_checkpoint
from composer.models.huggingface import get_hf_config_from_composer_state_dict, get_peft_config_from_composer_state_dict

Saved = tuple[Path, HuggingFaceModel]
WRITE = write_huggingface_pretrained_from_composer_checkpoint


def trained(make: Callable[..., HuggingFaceModel], path: Path, weights_only: bool = False, **kwargs: Any) -> Saved:
    model = make()
    trainer = tiny.trainer_of(model, max_duration="2ba", **kwargs)
    trainer.fit()
    trainer.save_checkpoint(str(path), weights_only=weights_only)
    return path, model.eval()


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return trained(tiny.causal_model, tmp_path_factory.mktemp("gpt2") / "a.pt")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return trained(tiny.masked_model, tmp_path_factory.mktemp("bert") / "a.pt")


def altered(saved: Saved, path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of a checkpoint with another description of the model."""
    content = read_checkpoint(saved[0])
    content.pop("has_checksum")
    change(content["state"]["integrations"]["huggingface"])
    torch.save(content, path)
    return path


# ---- models ----


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_model_and_tokenizer_come_back(kind: str, request: pytest.FixtureRequest) -> None:
    path, model = request.getfixturevalue(kind)
    restored, tokenizer = HuggingFaceModel.hf_from_composer_checkpoint(path)

    assert type(restored) is type(model.model)
    assert not restored.training
    tiny.assert_equal(tiny.weights(model.model), tiny.weights(restored))
    tiny.assert_same_tokenizer(model.tokenizer, tokenizer)
    assert restored.config.to_diff_dict() == model.config.to_diff_dict()


def test_the_complete_model_is_restored(gpt2: Saved) -> None:
    path, model = gpt2
    restored = HuggingFaceModel.from_composer_checkpoint(path, use_logits=True, metrics=tiny.metrics())
    batch = tiny.causal(tiny.TEXTS)

    assert torch.equal(model(batch)["logits"], restored(batch)["logits"])
    assert not restored.training
    assert list(restored.get_metrics(True)) == list(model.get_metrics(True))
    assert restored.model.lm_head.weight is restored.model.transformer.wte.weight


def test_the_configuration_of_an_adapter_is_that_of_the_checkpoint(gpt2: Saved) -> None:
    with pytest.raises(TypeError, match="multiple values for keyword argument 'peft_config'"):
        HuggingFaceModel.from_composer_checkpoint(gpt2[0], peft_config="other")


def test_a_fresh_process_needs_no_trainer(gpt2: Saved, tmp_path: Path) -> None:
    path, model = gpt2
    batch = tiny.causal(tiny.TEXTS)
    torch.save((batch, model(batch)["logits"]), tmp_path / "expected.pt")
    program = f"""
import torch
from composer.models import HuggingFaceModel
model = HuggingFaceModel.from_composer_checkpoint({str(path)!r})
batch, logits = torch.load({str(tmp_path / "expected.pt")!r})
assert torch.equal(logits, model(batch)["logits"])
assert model.tokenizer("the cat")["input_ids"] == {model.tokenizer("the cat")["input_ids"]}
import sys
assert "composer.trainer" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)


def test_a_classifier_is_built_from_a_masked_model(bert: Saved, caplog: pytest.LogCaptureFixture) -> None:
    path, model = bert
    with caplog.at_level(logging.WARNING, "composer"):
        restored, _ = HuggingFaceModel.hf_from_composer_checkpoint(
            path, "transformers.AutoModelForSequenceClassification", {"num_labels": 3}
        )
    assert type(restored) is transformers.BertForSequenceClassification
    assert restored.classifier.out_features == 3
    tiny.assert_equal(tiny.weights(model.model.bert.encoder), tiny.weights(restored.bert.encoder))
    assert "model.classifier.weight" in caplog.text
    assert "model.cls.predictions.bias" in caplog.text
    by_class, _ = HuggingFaceModel.hf_from_composer_checkpoint(path, transformers.BertForTokenClassification)
    assert type(by_class) is transformers.BertForTokenClassification


def test_layers_that_an_algorithm_changed_are_changed_again(tmp_path: Path) -> None:
    path, model = trained(tiny.causal_model, tmp_path / "a.pt", algorithms=Alibi(32, 1.0))
    restored = HuggingFaceModel.from_composer_checkpoint(path)
    tokens = torch.arange(32).remainder(40)[None]
    batch = {"input_ids": tokens, "labels": tokens}

    assert torch.equal(model(batch)["logits"], restored(batch)["logits"])
    with pytest.warns(UserWarning, match=r"The run changed the layers of the model \(Alibi\)"):
        WRITE(path, tmp_path / "out")


def test_changed_layers_of_a_weights_only_checkpoint_are_an_error(tmp_path: Path) -> None:
    path, _ = trained(tiny.causal_model, tmp_path / "a.pt", weights_only=True, algorithms=Alibi(32, 1.0))
    with pytest.raises(RuntimeError, match=r"weights of the checkpoint do not fit|size mismatch"):
        HuggingFaceModel.from_composer_checkpoint(path)


def test_weights_alone_are_enough(tmp_path: Path) -> None:
    path, model = trained(tiny.masked_model, tmp_path / "a.pt", weights_only=True)
    restored, _ = HuggingFaceModel.hf_from_composer_checkpoint(path)

    tiny.assert_equal(tiny.weights(model.model), tiny.weights(restored))


def test_weights_keep_their_precision(tmp_path: Path) -> None:
    def in_float32() -> HuggingFaceModel:
        inner = tiny.gpt2(dtype="bfloat16")
        return HuggingFaceModel(inner.float(), tiny.gpt2_tokenizer())

    path, model = trained(in_float32, tmp_path / "a.pt")
    for kind in (None, transformers.AutoModelForCausalLM):
        restored, _ = HuggingFaceModel.hf_from_composer_checkpoint(path, kind)
        tiny.assert_equal(tiny.weights(model.model), tiny.weights(restored))


def test_a_checkpoint_of_ddp_with_prefixes_is_read(gpt2: Saved, tmp_path: Path) -> None:
    content = read_checkpoint(gpt2[0])
    state = content["state"]
    state["model"] = {f"module.{name}": value for name, value in state["model"].items()}
    state["is_model_ddp"] = True
    content.pop("has_checksum")
    torch.save(content, tmp_path / "ddp.pt")
    restored, _ = HuggingFaceModel.hf_from_composer_checkpoint(tmp_path / "ddp.pt")

    tiny.assert_equal(tiny.weights(gpt2[1].model), tiny.weights(restored))


def test_an_archive_is_read_and_linked_to(tmp_path: Path) -> None:
    path, model = trained(tiny.causal_model, tmp_path / "a.tar.gz")
    link = tmp_path / "kept" / "b.tar.gz"
    restored, _ = HuggingFaceModel.hf_from_composer_checkpoint(path, local_checkpoint_save_location=link)

    tiny.assert_equal(tiny.weights(model.model), tiny.weights(restored))
    assert link.resolve() == path.resolve()


def test_a_remote_checkpoint_is_fetched(gpt2: Saved, tmp_path: Path) -> None:
    restored, _ = HuggingFaceModel.hf_from_composer_checkpoint(
        f"file://{gpt2[0]}", local_checkpoint_save_location=tmp_path / "b.pt"
    )
    tiny.assert_equal(tiny.weights(gpt2[1].model), tiny.weights(restored))
    again, _ = HuggingFaceModel.hf_from_composer_checkpoint(f"file://{gpt2[0]}")
    tiny.assert_equal(tiny.weights(gpt2[1].model), tiny.weights(again))


class Mine(transformers.BertForMaskedLM):
    """A class of the user's own."""


def test_a_custom_class_is_restored_where_it_is_imported(tmp_path: Path) -> None:
    def own() -> HuggingFaceModel:
        torch.manual_seed(0)
        return HuggingFaceModel(Mine(tiny.bert().config), tiny.bert_tokenizer())

    path, model = trained(own, tmp_path / "a.pt", train_dataloader=tiny.loader(tiny.masked))
    restored, _ = HuggingFaceModel.hf_from_composer_checkpoint(path)
    assert type(restored) is Mine
    tiny.assert_equal(tiny.weights(model.model), tiny.weights(restored))


def test_the_configuration_comes_back_with_changes(bert: Saved) -> None:
    content = read_checkpoint(bert[0])
    config = get_hf_config_from_composer_state_dict(content, {"num_labels": 5, "attn_implementation": "eager"})

    assert isinstance(config, transformers.BertConfig)
    assert (config.hidden_size, config.num_labels, len(config.id2label)) == (16, 5, 5)
    assert config._attn_implementation == "eager"
    assert get_peft_config_from_composer_state_dict(content) is None


# ---- folders of transformers ----


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_folder_loads_with_transformers_alone(
    kind: str, safe: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path, model = request.getfixturevalue(kind)
    usual = os.umask(0o027)
    try:
        WRITE(path, tmp_path / "out", safe_serialization=safe)
    finally:
        os.umask(usual)
    auto = transformers.AutoModelForCausalLM if kind == "gpt2" else transformers.AutoModelForMaskedLM
    restored, info = auto.from_pretrained(tmp_path / "out", output_loading_info=True)

    weights = tmp_path / "out" / ("model.safetensors" if safe else "pytorch_model.bin")
    assert 0o640 == weights.stat().st_mode & 0o777
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tiny.assert_equal(tiny.weights(model.model), tiny.weights(restored))
    head, embedding = restored.get_output_embeddings(), restored.get_input_embeddings()
    assert head.weight is embedding.weight
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    tiny.assert_same_tokenizer(model.tokenizer, tokenizer)
    assert restored.config.architectures == [type(model.model).__name__]
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir() if entry.name.startswith(".")) == []


def test_weights_that_are_not_tied_stay_two(tmp_path: Path) -> None:
    def untied() -> HuggingFaceModel:
        return HuggingFaceModel(tiny.gpt2(tie_word_embeddings=False), tiny.gpt2_tokenizer())

    path, model = trained(untied, tmp_path / "a.pt")
    WRITE(path, tmp_path / "out", safe_serialization=True)
    restored = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")

    assert restored.lm_head.weight is not restored.transformer.wte.weight
    tiny.assert_equal(tiny.weights(model.model), tiny.weights(restored))


def test_from_a_folder_and_back_nothing_changes(bert: Saved, tmp_path: Path) -> None:
    """`save_pretrained`, training for nothing, and a folder again."""
    bert[1].model.save_pretrained(tmp_path / "first")
    bert[1].tokenizer.save_pretrained(tmp_path / "first")
    model = HuggingFaceModel(
        transformers.BertForMaskedLM.from_pretrained(tmp_path / "first"),
        transformers.AutoTokenizer.from_pretrained(tmp_path / "first"),
    )
    tiny.trainer_of(model, max_duration="1ba").save_checkpoint(str(tmp_path / "a.pt"))
    WRITE(tmp_path / "a.pt", tmp_path / "second")
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path / "second")

    tiny.assert_equal(tiny.weights(bert[1].model), tiny.weights(again))
    tiny.assert_same_tokenizer(bert[1].tokenizer, transformers.AutoTokenizer.from_pretrained(tmp_path / "second"))


def test_an_existing_file_is_preserved_if_writing_fails(
    gpt2: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "pytorch_model.bin").write_bytes(b"old")

    def full(weights: Any, file: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("composer.models.huggingface._checkpoint.torch.save", full)
    with pytest.raises(OSError, match="No space left"):
        WRITE(gpt2[0], tmp_path / "out")
    assert (tmp_path / "out" / "pytorch_model.bin").read_bytes() == b"old"
    assert [p.name for p in (tmp_path / "out").iterdir() if p.name.startswith("pytorch_model")] == ["pytorch_model.bin"]


# ---- what cannot be loaded, or must not ----


class Evil:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.proof, "ran"))


@pytest.mark.parametrize("place", ["tokenizer", "config"])
def test_code_in_the_description_does_not_run(place: str, gpt2: Saved, tmp_path: Path) -> None:
    def change(found: dict[str, Any]) -> None:
        target = found["tokenizer"]["tokenizer.json"] if place == "tokenizer" else found["model"]["config"]
        target["content"] = Evil(tmp_path / "proof")

    path = altered(gpt2, tmp_path / "evil.pt", change)
    for load in (HuggingFaceModel.hf_from_composer_checkpoint, HuggingFaceModel.from_composer_checkpoint):
        with pytest.raises(UnsafeCheckpointError):
            load(path)
    with pytest.raises(UnsafeCheckpointError):
        WRITE(path, tmp_path / "out")
    assert not (tmp_path / "proof").exists()


def test_a_hostile_file_name_leads_nowhere(gpt2: Saved, tmp_path: Path) -> None:
    def change(found: dict[str, Any]) -> None:
        found["tokenizer"]["../../evil"] = {"file_extension": ".txt", "content": "evil"}

    path = altered(gpt2, tmp_path / "evil.pt", change)
    (tmp_path / "a" / "b").mkdir(parents=True)
    with pytest.raises(ValueError, match="which is not a name within a folder"):
        HuggingFaceModel.hf_from_composer_checkpoint(path)
    with pytest.raises(ValueError, match="which is not a name within a folder"):
        WRITE(path, tmp_path / "a" / "b")
    assert list(tmp_path.rglob("evil.txt")) == []


@pytest.mark.parametrize(
    "path",
    ["subprocess.Popen", "os.system", "antigravity.fly", "transformers.models.auto.modeling_auto.logger", "x", ""],
)
def test_a_checkpoint_cannot_cause_imports(path: str, gpt2: Saved, tmp_path: Path) -> None:
    def change(found: dict[str, Any]) -> None:
        found["model"]["config"]["class"] = path

    sys.modules.pop("antigravity", None)
    file = altered(gpt2, tmp_path / "evil.pt", change)
    with pytest.raises(ValueError, match=r"of the checkpoint's model cannot be imported.*`model_instantiation_class`"):
        HuggingFaceModel.hf_from_composer_checkpoint(file)
    assert "antigravity" not in sys.modules
    restored, _ = HuggingFaceModel.hf_from_composer_checkpoint(file, transformers.AutoModelForCausalLM)
    tiny.assert_equal(tiny.weights(gpt2[1].model), tiny.weights(restored))


def test_a_flag_that_transformers_4_saved_is_no_attention(gpt2: Saved, tmp_path: Path) -> None:
    change = {"_attn_implementation_autoset": True}
    path = altered(gpt2, tmp_path / "a.pt", lambda found: found["model"]["config"]["content"].update(change))
    model, _ = HuggingFaceModel.hf_from_composer_checkpoint(path)

    assert model.config.model_type == "gpt2"


@pytest.mark.parametrize(
    "change",
    [
        {"attn_implementation": "someone/evil-kernel"},
        {"_attn_implementation": "someone/evil-kernel"},
        {"text_config": {"attn_implementation": "someone/evil-kernel"}},
        {"experts_implementation": "someone/evil-kernel"},
        {"attn_implementation": {"": "someone/evil-kernel"}},
    ],
)
def test_attention_is_not_downloaded(change: dict[str, Any], gpt2: Saved, tmp_path: Path) -> None:
    path = altered(gpt2, tmp_path / "a.pt", lambda found: found["model"]["config"]["content"].update(change))
    with pytest.raises(ValueError, match=r"implementation=.*evil-kernel.* whose code would be downloaded"):
        HuggingFaceModel.hf_from_composer_checkpoint(path)


def test_an_unknown_type_of_model_is_an_error(gpt2: Saved, tmp_path: Path) -> None:
    def change(found: dict[str, Any]) -> None:
        found["model"]["config"]["content"]["model_type"] = "not-there"
        found["model"]["config"]["class"] = "elsewhere.Model"

    with pytest.raises(ValueError, match=r"a model of the type 'not-there' .*Import the module of its class first"):
        HuggingFaceModel.hf_from_composer_checkpoint(altered(gpt2, tmp_path / "a.pt", change))


def test_a_requested_class_must_exist(gpt2: Saved) -> None:
    for kind in ("transformers.NoSuchModel", "no_such_package.Model", "Model"):
        with pytest.raises(ValueError, match=f"`model_instantiation_class` '{kind}' cannot be imported"):
            HuggingFaceModel.hf_from_composer_checkpoint(gpt2[0], kind)
    with pytest.raises(ValueError, match="`model_instantiation_class` must be a class of a model, got 3"):
        HuggingFaceModel.load_huggingface_model_from_saved_state(gpt2[1].get_metadata(), 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["loaded_state_dict", "hf_state"])
def test_the_saved_state_may_be_passed_by_name(gpt2: Saved, name: str) -> None:
    state = {name: gpt2[1].get_metadata()}

    assert type(gpt2[1].model) is type(HuggingFaceModel.load_huggingface_model_from_saved_state(**state))


def test_a_file_that_is_not_such_a_checkpoint_is_an_error(gpt2: Saved, tmp_path: Path) -> None:
    torch.save({"state": {"model": nn.Linear(1, 1).state_dict(), "integrations": {}}}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="does not describe a model of `transformers`"):
        HuggingFaceModel.from_composer_checkpoint(tmp_path / "other.pt")
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="is not a checkpoint of a run"):
        HuggingFaceModel.from_composer_checkpoint(tmp_path / "list.pt")
    content = read_checkpoint(gpt2[0])
    del content["state"]["model"], content["has_checksum"]
    torch.save(content, tmp_path / "without.pt")
    with pytest.raises(ValueError, match="The checkpoint has no weights"):
        HuggingFaceModel.from_composer_checkpoint(tmp_path / "without.pt")
    with pytest.raises(FileNotFoundError):
        HuggingFaceModel.from_composer_checkpoint(tmp_path / "missing.pt")


def test_reading_checkpoints_requires_composer_trainer(gpt2: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "composer.checkpoint", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"is part of `composer-checkpoint`.*Run `pip install composer-checkpoint`"
    ):
        HuggingFaceModel.from_composer_checkpoint(gpt2[0])


def test_weights_that_do_not_fit_are_an_error(gpt2: Saved, tmp_path: Path) -> None:
    content = read_checkpoint(gpt2[0])
    content["state"]["model"]["model.more"] = content["state"]["model"].pop("model.transformer.ln_f.weight")
    content.pop("has_checksum")
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(
        RuntimeError,
        match=r"Missing in the checkpoint: \['model.transformer.ln_f.weight'\]; unknown to the model: \['mod",
    ):
        HuggingFaceModel.from_composer_checkpoint(tmp_path / "a.pt")
