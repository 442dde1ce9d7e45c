"""`ChunkedCrossEntropy` at its events: models train as they do with all logits."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from composer.algorithms.chunked_cross_entropy import ChunkedCrossEntropy
from composer.core import (
    ADDS_LOSS,
    MIXES_TARGETS,
    REPLACES_LOSS,
    SMOOTHS_TARGETS,
    Algorithm,
    Engine,
    Event,
    Placement,
    State,
)
from composer.loggers import Logger
from composer.models import ComposerModel, ModuleWithLoss
from composer.testing import SimpleModel, SimpleTransformerModel, run_on_ranks, train_by_hand

VOCABULARY = 40
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
LLAMA = {**SMALL, "num_key_value_heads": 2, "head_dim": 4}
MODELS: dict[str, Any] = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=8, n_layer=1, n_head=2, eos_token_id=0, bos_token_id=0)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "qwen, tied": lambda: Qwen2ForCausalLM(Qwen2Config(**LLAMA, tie_word_embeddings=True)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SMALL)),
}


class OfTransformers(ComposerModel):
    """A model of transformers whose loss is its own, as `HuggingFaceModel` of `composer-huggingface`."""

    def __init__(self, kind: str = "gpt2", seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model: PreTrainedModel = MODELS[kind]()
        for module in self.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        self.shift_labels = kind != "bert"

    def forward(self, batch: Any) -> Any:
        return self.model(**batch, use_cache=False) if self.shift_labels else self.model(**batch)

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = outputs["loss"]
        return loss


def batches(count: int = 3) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    made = []
    for _ in range(count):
        tokens = torch.randint(VOCABULARY, (4, 10), generator=generator)
        labels = tokens.clone()
        labels[:, 3] = labels[0, 5:] = -100
        made.append({"input_ids": tokens, "labels": labels})
    return made


def trained(model: Any, *algorithms: Algorithm, data: Any = None) -> dict[str, torch.Tensor]:
    state = State(
        model=model,
        max_duration="3ba",
        dataloader=[0],
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        algorithms=algorithms,
    )
    train_by_hand(state, batches() if data is None else data)
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("kind", MODELS)
def test_models_of_transformers_train_as_with_all_logits(kind: str) -> None:
    expected = trained(OfTransformers(kind).double())
    actual = trained(OfTransformers(kind).double(), ChunkedCrossEntropy(chunk_size=8))

    # Causal models compute their own loss from logits that they round to float32.
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12 if kind == "bert" else 1e-7)


def test_other_models_train_as_with_all_logits() -> None:
    data = batches()
    expected = trained(SimpleTransformerModel(VOCABULARY).double(), data=data)
    actual = trained(SimpleTransformerModel(VOCABULARY).double(), ChunkedCrossEntropy("head", chunk_size=8), data=data)

    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def engine_of(model: Any, *algorithms: Algorithm) -> tuple[State, Engine]:
    state = State(model=model, max_duration="1ep", dataloader=[0], algorithms=algorithms)
    engine = Engine(state, Logger(state))
    engine.run_event(Event.INIT)
    return state, engine


def run_pass(state: State, engine: Engine, batch: Any) -> None:
    state.batch = batch
    engine.run_event(Event.BEFORE_TRAIN_BATCH)
    engine.run_event(Event.BEFORE_FORWARD)
    state.outputs = state.model(state.batch)
    engine.run_event(Event.AFTER_FORWARD)
    engine.run_event(Event.BEFORE_LOSS)
    state.loss = state.model.loss(state.outputs, state.batch)  # type: ignore[operator,union-attr]
    engine.run_event(Event.AFTER_LOSS)


def test_there_are_no_logits_in_training_and_the_batch_keeps_its_labels() -> None:
    batch = batches(1)[0]
    state, engine = engine_of(OfTransformers(), ChunkedCrossEntropy())
    run_pass(state, engine, batch)

    assert state.batch is batch
    assert ["loss"] == list(state.outputs)
    assert state.outputs["loss"] is state.loss
    assert "loss" not in vars(state.model)


def test_evaluation_is_unchanged() -> None:
    """After training, and in the middle of a pass that failed."""
    batch = batches(1)[0]
    plain = OfTransformers().eval()
    state, engine = engine_of(OfTransformers().eval(), ChunkedCrossEntropy())
    run_pass(state, engine, batch)
    for event in (Event.AFTER_LOSS, Event.BEFORE_FORWARD):
        engine.run_event(event)
        with torch.no_grad():
            expected, actual = plain(batch), state.model(batch)
        assert torch.equal(expected["logits"], actual["logits"])
        assert torch.equal(expected["loss"], actual["loss"])


def test_a_microbatch_without_labels_has_no_gradients() -> None:
    batch = batches(1)[0]
    batch["labels"] = torch.full_like(batch["labels"], -100)
    state, engine = engine_of(OfTransformers(), ChunkedCrossEntropy())
    run_pass(state, engine, batch)
    state.loss.backward()

    assert 0 == state.loss.item()
    assert not any(p.grad.any() for p in state.model.parameters() if p.grad is not None)


def test_options_reach_the_loss() -> None:
    batch = batches(1)[0]
    model = SimpleTransformerModel(VOCABULARY)
    logits = model(batch)[:, :-1].flatten(0, 1)
    labels = batch["labels"].clone()
    labels[0, 1] = 7
    targets = labels[:, 1:].flatten()
    squares = logits.logsumexp(1).square()[targets != 7].mean()
    expected = F.cross_entropy(logits, targets.clamp(min=0), ignore_index=7, label_smoothing=0.1) + 0.2 * squares
    algorithm = ChunkedCrossEntropy(
        "head", "target", ignore_index=7, shift_labels=True, label_smoothing=0.1, z_loss=0.2, kernel="torch"
    )
    state, engine = engine_of(model, algorithm)
    run_pass(state, engine, {"input_ids": batch["input_ids"], "target": labels.clamp(min=0)})

    torch.testing.assert_close(state.loss, expected)


def test_a_model_can_be_copied_and_pickled() -> None:
    model = SimpleTransformerModel(VOCABULARY)
    batch = batches(1)[0]
    engine_of(model, ChunkedCrossEntropy("head"))
    expected = model(batch)

    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(expected, other(batch))


# ---- what is refused ----


class Other(Algorithm):
    def __init__(self, effect: str = "", excluded: str = "") -> None:
        self.placement = Placement(provides={effect} - {""}, excludes={excluded} - {""})  # type: ignore[misc]

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    "other",
    [Other(SMOOTHS_TARGETS), Other(MIXES_TARGETS), Other(REPLACES_LOSS), Other(ADDS_LOSS, REPLACES_LOSS)],
)
def test_methods_that_need_logits_or_other_targets_are_refused(other: Algorithm) -> None:
    with pytest.raises(ValueError, match="cannot be used together"):
        engine_of(OfTransformers(), ChunkedCrossEntropy(), other)


def test_training_metrics_are_refused_at_init_and_those_of_evaluation_are_not() -> None:
    with pytest.raises(ValueError, match=r"not be used with training metrics.* but the model has accuracy.*= \{\}"):
        engine_of(SimpleModel(train_metrics={"accuracy": None}), ChunkedCrossEntropy("fc2"))
    engine_of(SimpleModel(eval_metrics={"accuracy": None}), ChunkedCrossEntropy("fc2"))


def test_a_model_without_a_known_head_is_refused() -> None:
    with pytest.raises(ValueError, match="`head_name` must be the name of the last layer of the model, got None"):
        engine_of(SimpleModel(), ChunkedCrossEntropy())
    with pytest.raises(AttributeError, match=r"`head_name` must be a name in .*, got '4'.* Use 'module.4'"):
        engine_of(SimpleModel(), ChunkedCrossEntropy("4"))
    with pytest.raises(AttributeError, match=r"`head_name` must be a name in .*, got 'last'"):
        engine_of(SimpleModel(), ChunkedCrossEntropy("last"))
    with pytest.raises(TypeError, match=r"needs a head that is a `torch.nn.Linear`, got `Sequential`.*LoRA"):
        engine_of(SimpleModel(), ChunkedCrossEntropy("module"))


def wrapped(model: Any) -> OfTransformers:
    made = OfTransformers()
    made.model = model
    return made


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: T5ForConditionalGeneration(T5Config(**T5)), "does not support encoder-decoders such as `T5For"),
        (lambda: Gemma2ForCausalLM(Gemma2Config(**LLAMA)), "`final_logit_softcapping=30.0` in its configuration"),
        (
            lambda: MixtralForCausalLM(MixtralConfig(**LLAMA, num_local_experts=2, output_router_logits=True)),
            "`output_router_logits=True` in its configuration",
        ),
    ],
)
def test_models_with_another_loss_are_refused_at_init(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_of(wrapped(make()), ChunkedCrossEntropy())


T5 = {"vocab_size": VOCABULARY, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}


def test_a_loss_function_of_the_user_is_refused() -> None:
    model = OfTransformers()
    model.model.loss_function = lambda logits, labels, **kwargs: logits.sum()  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="the loss of `GPT2LMHeadModel` is `<lambda>`"):
        engine_of(model, ChunkedCrossEntropy())


class Scaled(SimpleTransformerModel):
    """A model that scales its logits."""

    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch) / 2


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (torch.nn.CrossEntropyLoss(weight=torch.ones(3)), "weight=None, got tensor"),
        (torch.nn.CrossEntropyLoss(reduction="sum"), "reduction='mean', got 'sum'"),
        (torch.nn.CrossEntropyLoss(label_smoothing=0.1), "label_smoothing=0.0, got 0.1"),
        (torch.nn.MultiMarginLoss(), "`loss` is `MultiMarginLoss`"),
        (torch.nn.functional.multi_margin_loss, "`loss` is `multi_margin_loss`"),
        (torch.nn.CrossEntropyLoss(), None),
        (torch.nn.functional.cross_entropy, None),
        (lambda outputs, targets: torch.nn.functional.cross_entropy(outputs, targets.flatten()), None),
    ],
)
def test_a_loss_beside_the_model_must_be_the_one_that_is_replaced(loss: Any, message: str | None) -> None:
    model = ModuleWithLoss(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)), loss)
    engine = Engine(State(model=model, max_duration="1ep", algorithms=[ChunkedCrossEntropy(head_name="1")]))
    if message is None:
        engine.run_event("init")
    else:
        with pytest.raises(ValueError, match=re.escape(message)):
            engine.run_event("init")


def test_a_model_that_changes_the_output_of_its_head_is_refused_in_the_first_batch() -> None:
    batch = batches(1)[0]
    state, engine = engine_of(Scaled(VOCABULARY), ChunkedCrossEntropy("head"))
    with pytest.raises(RuntimeError, match="`Scaled` does not return its output unchanged as its logits"):
        run_pass(state, engine, batch)
    model = SimpleTransformerModel(VOCABULARY)
    model.unused = torch.nn.Linear(2, 2)  # type: ignore[assignment]
    state, engine = engine_of(model, ChunkedCrossEntropy("unused"))
    with pytest.raises(RuntimeError, match="`SimpleTransformerModel` does not call it"):
        run_pass(state, engine, batch)


def test_wrong_arguments_are_refused_at_construction() -> None:
    with pytest.raises(ValueError, match="`chunk_size` must be at least 1, got 0"):
        ChunkedCrossEntropy(chunk_size=0)
    with pytest.raises(TypeError, match="`shift_labels` must be True or False, got 'no'"):
        ChunkedCrossEntropy(shift_labels="no")  # type: ignore[arg-type]


# `peft` asks `transformers` by a name that it is about to lose.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_head_with_lora_is_refused_and_others_are_not() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    adapted = peft.get_peft_model(MODELS["llama"](), peft.LoraConfig(target_modules=["q_proj"]))
    state, engine = engine_of(wrapped(adapted), ChunkedCrossEntropy())
    run_pass(state, engine, batches(1)[0])
    assert state.loss.requires_grad
    head = peft.get_peft_model(MODELS["llama"](), peft.LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(TypeError, match=r"needs a head that is a `torch\.nn\.Linear`"):
        engine_of(wrapped(head), ChunkedCrossEntropy())


# ---- ranks ----


def _train_sharded(shards_head: bool) -> dict[str, torch.Tensor]:
    """Train on two ranks with half of every batch each; return the full weights."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model = OfTransformers("llama").double()
    algorithm = ChunkedCrossEntropy(chunk_size=8)
    state = State(model=model, max_duration="3ba", dataloader=[0], algorithms=algorithm)
    engine = Engine(state, Logger(state))
    engine.run_event(Event.INIT)
    if shards_head:
        fully_shard(model.model.lm_head)  # type: ignore[arg-type]
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        optimizer.zero_grad()
        rank = dist.get_rank()
        half = {key: value[2 * rank : 2 * rank + 2] for key, value in batch.items()}
        run_pass(state, engine, half)
        counts = [(batch["labels"][rows, 1:] >= 0).sum() for rows in (slice(0, 2), slice(2, 4))]
        (state.loss * counts[rank] * 2 / sum(counts)).backward()
        optimizer.step()
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}  # type: ignore[attr-defined]


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="`fully_shard` needs a GPU")
@pytest.mark.parametrize("shards_head", [False, True])
def test_a_sharded_model_trains_as_one_process_does(shards_head: bool) -> None:
    model = OfTransformers("llama").double()
    state, engine = engine_of(model, ChunkedCrossEntropy(chunk_size=8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        optimizer.zero_grad()
        run_pass(state, engine, batch)
        state.loss.backward()
        optimizer.step()
    expected = {name: weight.detach() for name, weight in model.named_parameters()}

    for rank in run_on_ranks(_train_sharded, 2, shards_head):
        torch.testing.assert_close(rank, expected, rtol=1e-10, atol=1e-10)
