"""Models with LoRA adapters."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from torch import nn

from composer.checkpoint import read_checkpoint, safe_torch_load
from composer.models import HuggingFaceModel, write_huggingface_pretrained_from_composer_checkpoint
from composer.models.huggingface import (
    filter_state_dict_peft,
    get_peft_config_from_composer_state_dict,
    maybe_get_underlying_model,
    peft_filter_state_dict_trainable,
    peft_installed,
)
from composer.utils import MissingConditionalImportError

peft = pytest.importorskip("peft")
# `peft` asks `transformers` by a name that it is about to lose.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def lora(**kwargs: Any) -> Any:
    arguments = {"task_type": "CAUSAL_LM", "r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, **kwargs}
    return peft.LoraConfig(**arguments)


def adapted(seed: int = 0, config: Any = None, base_seed: int = 0, **kwargs: Any) -> HuggingFaceModel:
    inner = tiny.gpt2(base_seed)
    torch.manual_seed(seed)
    arguments = {"tokenizer": tiny.gpt2_tokenizer(), "use_logits": True, "metrics": tiny.metrics(), **kwargs}
    return HuggingFaceModel(inner, peft_config=config or lora(), **arguments)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=0.01)


def trainer_of(model: HuggingFaceModel, **kwargs: Any) -> Any:
    return tiny.trainer_of(model, optimizers=optimizer_of(model), **kwargs)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, HuggingFaceModel]:
    model = adapted()
    trainer = trainer_of(model, max_duration="3ba")
    trainer.fit()
    path = tmp_path_factory.mktemp("lora") / "a.pt"
    trainer.save_checkpoint(str(path))
    return path, model.eval()


def test_only_the_adapter_is_trained_and_saved(trained: tuple[Path, HuggingFaceModel]) -> None:
    path, model = trained
    saved = safe_torch_load(path)["state"]["model"]

    assert peft_installed
    assert model.using_peft
    assert isinstance(model.model, peft.PeftModel)
    assert type(maybe_get_underlying_model(model.model)) is transformers.GPT2LMHeadModel
    assert list(saved) == list(model.state_dict())
    assert len(saved) == 4
    assert all(".lora_" in name and name.startswith("model.base_model.model.") for name in saved)
    before = tiny.gpt2(0).transformer.h[0].attn.c_attn.weight
    assert torch.equal(before, model.model.base_model.model.transformer.h[0].attn.c_attn.base_layer.weight)
    assert model.shift_labels


def test_a_stopped_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = adapted()
    trainer_of(whole).fit()
    options: dict[str, Any] = {"save_folder": tmp_path, "save_interval": "1ba", "run_name": "run", "autoresume": True}
    trainer_of(adapted(), max_duration="5ba", **options).fit()
    resumed = adapted(seed=7)
    trainer_of(resumed, **options).fit()

    tiny.assert_equal(tiny.weights(whole), tiny.weights(resumed))


def test_a_strict_load_does_not_change_other_weights(trained: tuple[Path, HuggingFaceModel]) -> None:
    path, model = trained
    other = adapted(seed=9, base_seed=5)
    base = tiny.gpt2(5).transformer.wte.weight
    tiny.trainer_of(other, optimizers=optimizer_of(other), load_path=str(path), load_weights_only=True)

    tiny.assert_equal(dict(model.state_dict()), dict(other.state_dict()))
    assert torch.equal(base, other.model.base_model.model.transformer.wte.weight)
    saved = safe_torch_load(path)["state"]["model"]
    name = next(iter(saved))
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({key: value for key, value in saved.items() if key != name})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        other.load_state_dict({**saved, "model.more": torch.zeros(1)})


def test_a_complete_state_dict_is_loaded_completely() -> None:
    source, target = adapted(should_save_peft_only=False, base_seed=3), adapted(seed=4)
    target.load_state_dict(source.state_dict())

    tiny.assert_equal(tiny.weights(source), tiny.weights(target))
    assert len(source.state_dict()) > len(target.state_dict())


def test_inside_another_module_only_the_own_part_is_left_out() -> None:
    outer = nn.ModuleDict({"inner": adapted(), "more": nn.Linear(1, 1)})
    state = outer.state_dict()

    assert {"more.weight", "more.bias"} <= state.keys()
    assert len(state) == 6
    other = nn.ModuleDict({"inner": adapted(seed=5), "more": nn.Linear(1, 1)})
    other.load_state_dict(state)
    tiny.assert_equal(dict(state), dict(other.state_dict()))
    with pytest.raises(RuntimeError, match=r"Missing key.*more.bias"):
        other.load_state_dict({key: value for key, value in state.items() if key != "more.bias"})


def test_a_copy_saves_the_adapter_too() -> None:
    model = adapted()
    tiny.assert_equal(dict(model.state_dict()), dict(copy.deepcopy(model).state_dict()))


def test_a_model_that_has_its_adapter_is_taken_as_it_is() -> None:
    torch.manual_seed(0)
    own = peft.get_peft_model(tiny.gpt2(), lora())
    model = HuggingFaceModel(own, tiny.gpt2_tokenizer())

    assert model.model is own
    assert model.using_peft
    assert all("lora_" in name for name in model.state_dict())
    assert model(tiny.causal(tiny.TEXTS))["loss"].requires_grad


# ---- checkpoints ----


def test_the_adapted_model_comes_back_with_its_base(trained: tuple[Path, HuggingFaceModel]) -> None:
    path, model = trained
    restored = HuggingFaceModel.from_composer_checkpoint(path, base_model=tiny.gpt2(0))
    batch = tiny.causal(tiny.TEXTS)

    assert torch.equal(model(batch)["logits"], restored(batch)["logits"])
    with pytest.raises(ValueError, match=r"has only the adapter.* Pass it as `base_model`"):
        HuggingFaceModel.from_composer_checkpoint(path)


def test_the_name_of_the_base_model_is_in_the_error(tmp_path: Path) -> None:
    tiny.gpt2().save_pretrained(tmp_path / "base")
    model = HuggingFaceModel(
        transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base"), tiny.gpt2_tokenizer(), peft_config=lora()
    )
    trainer_of(model, max_duration="1ba").save_checkpoint(str(tmp_path / "a.pt"))
    with pytest.raises(ValueError, match=f"It was '{tmp_path / 'base'}'"):
        HuggingFaceModel.from_composer_checkpoint(tmp_path / "a.pt")


def test_a_checkpoint_with_only_an_adapter_gives_a_new_model_with_a_warning(
    trained: tuple[Path, HuggingFaceModel],
) -> None:
    with pytest.warns(UserWarning, match="The weights of the returned model are new"):
        restored, tokenizer = HuggingFaceModel.hf_from_composer_checkpoint(trained[0])
    assert type(restored) is transformers.GPT2LMHeadModel
    assert not any("lora_" in name for name, _ in restored.named_parameters())
    tiny.assert_same_tokenizer(tiny.gpt2_tokenizer(), tokenizer)


def test_a_checkpoint_of_everything_needs_no_base(tmp_path: Path) -> None:
    model = adapted(should_save_peft_only=False)
    trainer = trainer_of(model, max_duration="2ba")
    trainer.fit()
    trainer.save_checkpoint(str(tmp_path / "a.pt"))
    restored = HuggingFaceModel.from_composer_checkpoint(tmp_path / "a.pt")
    tiny.assert_equal(tiny.weights(model), tiny.weights(restored))
    plain, _ = HuggingFaceModel.hf_from_composer_checkpoint(tmp_path / "a.pt")
    tiny.assert_equal(tiny.weights(tiny.gpt2()), tiny.weights(plain))


def test_the_configuration_comes_back(trained: tuple[Path, HuggingFaceModel]) -> None:
    content = read_checkpoint(trained[0])
    saved = content["state"]["integrations"]["huggingface"]["model"]["peft_config"]
    saved["content"]["peft_type"] = "lora"
    config = get_peft_config_from_composer_state_dict(content)

    assert isinstance(config, peft.LoraConfig)
    assert config.target_modules == {"c_attn"}
    assert (config.r, config.task_type, config.fan_in_fan_out) == (2, "CAUSAL_LM", True)
    assert saved["class"].startswith("peft.")
    saved["content"]["peft_type"] = "IA3"
    with pytest.raises(ValueError, match="must be of the type LORA, got IA3"):
        get_peft_config_from_composer_state_dict(content)


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"bias": "lora_only"}, {"bias": "all"}, {"modules_to_save": ["ln_f"]}, {"use_dora": True}], ids=str
)
def test_a_folder_loads_with_peft_alone(options: dict[str, Any], safe: bool, tmp_path: Path) -> None:
    model = adapted(config=lora(**options))
    trainer = trainer_of(model, max_duration="3ba")
    trainer.fit()
    path = trainer.save_checkpoint(str(tmp_path / "a.pt"))
    write_huggingface_pretrained_from_composer_checkpoint(path, tmp_path / "out", safe_serialization=safe)
    restored = peft.PeftModel.from_pretrained(tiny.gpt2(0), tmp_path / "out")
    batch = tiny.causal(tiny.TEXTS)

    assert (tmp_path / "out" / f"adapter_model.{'safetensors' if safe else 'bin'}").is_file()
    assert not list((tmp_path / "out").glob("*pytorch_model*"))
    tiny.assert_equal(tiny.weights(model.model), tiny.weights(restored))
    assert torch.equal(model.eval()(batch)["logits"], restored.eval()(**batch).logits)


# ---- filters ----


@pytest.mark.parametrize(
    "options", [{}, {"bias": "lora_only"}, {"bias": "all"}, {"modules_to_save": ["ln_f"]}], ids=str
)
def test_the_filter_is_that_of_peft(options: dict[str, Any]) -> None:
    model = peft.get_peft_model(tiny.gpt2(), lora(**options))
    expected = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    found = filter_state_dict_peft(model.state_dict(), model.peft_config["default"])

    more = found.keys() - expected.keys()

    tiny.assert_equal(dict(expected), {name: found[name] for name in expected})
    assert all(name.endswith("c_attn.base_layer.bias") for name in more)  # some releases forget those that are trained
    assert not more or options == {"bias": "lora_only"}


def test_each_adapter_has_its_own_entries() -> None:
    model = peft.get_peft_model(tiny.gpt2(), lora())
    model.add_adapter("second", lora(target_modules=["c_proj"]))
    state = model.state_dict()
    for name, layer in (("default", "c_attn"), ("second", "c_proj")):
        kept = filter_state_dict_peft(state, model.peft_config[name], name, remove_adapter_names=False)
        assert kept
        assert all(f".{name}." in key and layer in key for key in kept)
        without = filter_state_dict_peft(state, model.peft_config[name], name)
        assert not any(f".{name}." in key for key in without)
    wrapped = HuggingFaceModel(model, tiny.gpt2_tokenizer())
    assert {key.split(".")[-2] for key in wrapped.state_dict()} == {"default", "second"}


def test_a_layer_named_like_the_adapter_keeps_its_name() -> None:
    state = {"default.lora_A.default.weight": 1, "default.weight": 2}
    assert filter_state_dict_peft(state, lora()) == {"default.lora_A.weight": 1}


def test_the_trained_part_is_found_whatever_trains_it() -> None:
    model = adapted(should_save_peft_only=False)
    kept = peft_filter_state_dict_trainable(model.state_dict(), model)
    assert list(kept) == [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert len(kept) == 4


# ---- what is refused ----


def test_other_adapters_are_refused() -> None:
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="`peft_config` must be of the type LORA, got PROMPT_TUNING"):
        HuggingFaceModel(tiny.gpt2(), peft_config=prompt)
    with pytest.raises(ValueError, match="must be of the type LORA, got PROMPT_TUNING"):
        HuggingFaceModel(peft.get_peft_model(tiny.gpt2(), prompt))


def test_two_ways_to_an_adapter_are_one_too_many() -> None:
    with pytest.raises(ValueError, match="`peft_config` must be None for a model that is a `PeftModel`"):
        HuggingFaceModel(peft.get_peft_model(tiny.gpt2(), lora()), peft_config=lora())


def test_an_unknown_bias_is_refused() -> None:
    config = lora()
    config.bias = "some"
    with pytest.raises(ValueError, match=r"`peft_config.bias` must be 'none', 'all' or 'lora_only', got 'some'"):
        filter_state_dict_peft({}, config)


def test_a_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    config = lora()
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingConditionalImportError, match="pip install peft"):
        HuggingFaceModel(tiny.gpt2(), peft_config=config)
