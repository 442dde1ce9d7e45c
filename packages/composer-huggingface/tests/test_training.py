"""Through the Trainer: training, checkpoints, resumption, several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers

from composer import Trainer
from composer.checkpoint import safe_torch_load
from composer.core import Callback, State
from composer.loggers import Logger, LoggerDestination
from composer.models import HuggingFaceModel
from composer.models.huggingface._factories import recompute_activations
from composer.testing import run_on_ranks
from composer.utils import dist

# The first versions of `fully_shard` ask the CPU's streams for events, which they did not have.
CAN_SHARD = hasattr(torch.cpu.Stream, "record_event")
needs_sharding = pytest.mark.skipif(not CAN_SHARD, reason="`fully_shard` of this torch needs a GPU")
KINDS = ["ddp", *(pytest.param(kind, marks=needs_sharding) for kind in ("fsdp", "shards"))]
MAKERS = {"gpt2": tiny.causal_model, "bert": tiny.masked_model}


def loaded_tokenizer(content: dict[str, Any]) -> Any:
    return HuggingFaceModel.load_huggingface_tokenizer_from_saved_state(content["state"]["integrations"]["huggingface"])


@pytest.mark.parametrize("kind", MAKERS)
def test_training_learns_and_measures(kind: str) -> None:
    model = MAKERS[kind]()
    evaluation = tiny.loader(tiny.causal if kind == "gpt2" else tiny.masked)
    trainer = tiny.trainer_of(model, max_duration="10ep", eval_dataloader=evaluation, eval_interval="10ep")
    trainer.eval()
    before = trainer.state.eval_metric_values["LanguageCrossEntropy"].item()
    trainer.fit()
    after = trainer.state.eval_metric_values

    assert after["LanguageCrossEntropy"].item() < 0.8 * before
    assert after["MaskedAccuracy"].item() > 0.2
    assert trainer.state.train_metric_values.keys() == {"LanguageCrossEntropy", "MaskedAccuracy"}


def test_the_metrics_of_a_batch_are_those_of_its_loss() -> None:
    model = tiny.causal_model()
    trainer = tiny.trainer_of(model, max_duration="1ba")
    trainer.fit()
    cross_entropy = trainer.state.train_metric_values["LanguageCrossEntropy"]

    assert pytest.approx(trainer.state.total_loss_dict["loss/train/total"]) == cross_entropy.item()


class Reader(Callback):
    """Reads the metrics of some batches only."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch in (2, 5):
            loss = float(state.total_loss_dict["loss/train/total"])
            self.seen.append((loss, state.train_metric_values["LanguageCrossEntropy"].item()))


class Quiet(LoggerDestination):
    """Wants no value."""

    accepts_deferred = True

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        pass


def test_metrics_that_are_not_read_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    update = HuggingFaceModel.update_metric

    def counted(self: Any, batch: Any, outputs: Any, metric: Any) -> Any:
        measured.append(type(metric).__name__)
        return update(self, batch, outputs, metric)

    monkeypatch.setattr(HuggingFaceModel, "update_metric", counted)
    reader = Reader()
    tiny.trainer_of(tiny.causal_model(), callbacks=reader, loggers=Quiet()).fit()

    assert measured == ["LanguageCrossEntropy", "MaskedAccuracy"] * 3  # two batches, and the last one
    for loss, cross_entropy in reader.seen:
        assert pytest.approx(loss, rel=1e-5) == cross_entropy


class Death(Callback):
    """Ends a run in the middle of an epoch."""

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch == 5:
            raise RuntimeError("died")


@pytest.mark.parametrize("kind", MAKERS)
def test_a_crashed_run_resumes_bit_for_bit_with_its_tokenizer(kind: str, tmp_path: Path) -> None:
    make = MAKERS[kind]
    whole = tiny.trainer_of(make())
    whole.fit()
    options: dict[str, Any] = {"save_folder": tmp_path, "save_interval": "1ba", "run_name": "run", "autoresume": True}
    with pytest.raises(RuntimeError, match="died"):
        tiny.trainer_of(make(), callbacks=Death(), **options).fit()
    content = safe_torch_load(tmp_path / "ep1-ba5-rank0.pt")
    tokenizer = loaded_tokenizer(content)
    resumed = tiny.trainer_of(make(seed=9, tokenizer=tokenizer), **options)
    assert resumed.state.timestamp.batch == 5
    resumed.fit()

    tiny.assert_equal(tiny.weights(whole.state.model), tiny.weights(resumed.state.model))
    tiny.assert_same_tokenizer(make().tokenizer, tokenizer)
    for name, value in whole.state.train_metric_values.items():
        assert torch.equal(value, resumed.state.train_metric_values[name])


def test_a_checkpoint_describes_the_model(tmp_path: Path) -> None:
    model = tiny.masked_model()
    trainer = tiny.trainer_of(model, max_duration="1ba")
    for weights_only in (False, True):
        path = trainer.save_checkpoint(str(tmp_path / f"{weights_only}.pt"), weights_only=weights_only)
        content = safe_torch_load(path)
        found = content["state"]["integrations"]["huggingface"]
        config = found["model"]["config"]
        assert config["class"] == "transformers.models.bert.modeling_bert.BertForMaskedLM"
        assert config["file_extension"] == ".json"
        assert config["content"]["hidden_size"] == 16
        assert set(found) == {"model", "tokenizer"}
        tiny.assert_same_tokenizer(model.tokenizer, loaded_tokenizer(content))


def test_a_checkpoint_of_a_model_without_tokenizer_has_none(tmp_path: Path) -> None:
    trainer = tiny.trainer_of(tiny.causal_model(tokenizer=None), max_duration="1ba")
    content = safe_torch_load(trainer.save_checkpoint(str(tmp_path / "a.pt")))

    assert content["state"]["integrations"]["huggingface"]["tokenizer"] == {}
    assert loaded_tokenizer(content) is None


def test_microbatches_equal_one_batch() -> None:
    found = []
    for size in (None, 2):
        model = tiny.causal_model()
        model.eval()
        batch = tiny.causal(tiny.TEXTS)
        batch["labels"] = batch["input_ids"]  # equally many tokens in each
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        trainer = tiny.trainer_of(
            model,
            train_dataloader=[batch],
            max_duration="1ba",
            device_train_microbatch_size=size,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        )
        trainer.fit()
        found.append(tiny.weights(model))
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_run_saves_the_names_of_a_plain_one(tmp_path: Path) -> None:
    model = tiny.causal_model()
    names = list(model.state_dict())
    trainer = tiny.trainer_of(model, max_duration="2ba", compile_config={"backend": "eager"})
    trainer.fit()
    content = safe_torch_load(trainer.save_checkpoint(str(tmp_path / "a.pt")))

    assert names == list(content["state"]["model"])
    assert "huggingface" in content["state"]["integrations"]


def test_gradient_checkpointing_changes_no_gradient() -> None:
    found = []
    for checkpointing in (False, True):
        model = tiny.causal_model(seed=1).train()
        if checkpointing:
            recompute_activations(model.model)
        batch = tiny.causal(tiny.TEXTS)
        torch.manual_seed(5)
        model.loss(model(batch), batch).backward()
        found.append({name: weight.grad for name, weight in model.named_parameters()})
    tiny.assert_equal(*found)


# ---- several ranks ----


def on_a_rank(
    folder: str, fsdp: dict[str, str] | None = None
) -> tuple[dict[str, torch.Tensor], list[str], torch.Tensor]:
    model = tiny.causal_model(tokenizer=tiny.gpt2_tokenizer(padding_side="left", pad_token="<|endoftext|>"))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    texts = [" ".join((text, other)) for text in tiny.TEXTS for other in tiny.TEXTS]
    sampler = dist.get_sampler(texts, shuffle=False)
    trainer = tiny.trainer_of(
        model,
        train_dataloader=tiny.loader(tiny.causal, sampler, batch_size=4 // dist.get_world_size()),
        eval_dataloader=tiny.loader(tiny.causal, dist.get_sampler(texts), batch_size=2),
        max_duration="1ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        parallelism_config=None if fsdp is None else {"fsdp": fsdp},
        save_folder=folder,
    )
    trainer.fit()
    model.eval()
    prompts = model.tokenizer(["the cat", "a dog ran over"], return_tensors="pt", padding=True)
    batch = {**prompts, "mode": "generate", "generation_length": 5, "generation_kwargs": {"do_sample": False}}
    generated = model.eval_forward(batch)
    state = trainer.state.get_model_state_dict()
    values = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
    trainer.close()
    return values, generated, trainer.state.eval_metric_values["LanguageCrossEntropy"]


def encoder_decoder_on_a_rank() -> tuple[list[list[int]], list[list[int]]]:
    """Generates before anything was trained, and what parts of the model do that are called directly."""
    model = HuggingFaceModel(tiny.t5()).eval()
    tokens = torch.arange(2, 16).reshape(2, 7)
    expected = model.model.generate(tokens, max_new_tokens=4, do_sample=False)
    trainer = Trainer(
        model=model,
        max_duration="1ba",
        parallelism_config={"fsdp": {}},
        progress_bar=False,
        device="cpu",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    generated = model.eval().generate(tokens, max_new_tokens=4, do_sample=False)
    batch = {"input_ids": tokens, "labels": tokens}
    model.loss(model(batch), batch).backward()  # still works afterwards
    again = model.generate(tokens, max_new_tokens=4, do_sample=False)
    trainer.close()
    assert torch.equal(generated, again)
    return expected.tolist(), generated.tolist()


def all_on_a_rank(folder: str) -> dict[str, Any]:
    """Everything in one go: processes take longer to start than to run."""
    found: dict[str, Any] = {}
    if CAN_SHARD:
        found |= {"encoder-decoder": encoder_decoder_on_a_rank(), "fsdp": on_a_rank(f"{folder}/fsdp", {})}
        found["shards"] = on_a_rank(f"{folder}/shards", {"state_dict_type": "sharded"})
    return {**found, "ddp": on_a_rank(f"{folder}/ddp")}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    return folder, run_on_ranks(all_on_a_rank, 2, str(folder), timeout=120.0)


Ranks = tuple[Path, list[dict[str, Any]]]


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_like_one(kind: str, two_ranks: Ranks, tmp_path: Path) -> None:
    alone, _, loss = on_a_rank(str(tmp_path))
    for values, generated, measured in (rank[kind] for rank in two_ranks[1]):
        assert values.keys() == alone.keys()
        assert generated == two_ranks[1][0][kind][1]
        torch.testing.assert_close(measured, loss, rtol=0.02, atol=0.0)
        for name, value in alone.items():
            # The mean of two means is not that of the batch: texts have different numbers of tokens.
            torch.testing.assert_close(values[name], value, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_two_ranks_is_complete(kind: str, two_ranks: Ranks) -> None:
    folder, ranks = two_ranks
    (file,) = (folder / kind).glob("ep1*")
    restored, tokenizer = HuggingFaceModel.hf_from_composer_checkpoint(file)
    values, texts, _ = ranks[0][kind]
    for name, value in restored.state_dict().items():
        assert torch.equal(value, values[f"model.{name}"])
    tiny.assert_same_tokenizer(tiny.gpt2_tokenizer(padding_side="left", pad_token="<|endoftext|>"), tokenizer)
    assert type(restored) is transformers.GPT2LMHeadModel
    encoded = tokenizer(["the cat", "a dog ran over"], return_tensors="pt", padding=True)
    tokens = restored.generate(**encoded, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert tokenizer.batch_decode(tokens[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True) == texts


@needs_sharding
def test_a_sharded_encoder_decoder_generates_before_training(two_ranks: Ranks) -> None:
    for rank in two_ranks[1]:
        expected, generated = rank["encoder-decoder"]
        assert expected == generated


def test_predictions_have_no_keys_and_values() -> None:
    model = HuggingFaceModel(tiny.gpt2(), tiny.gpt2_tokenizer())
    trainer = tiny.trainer_of(model, max_duration="1ba")
    (first, *_) = trainer.predict(tiny.loader(tiny.causal))

    assert set(first) == {"loss", "logits"}
    assert isinstance(model.model, transformers.GPT2LMHeadModel)
