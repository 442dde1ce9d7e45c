"""`SequencePacking` with models of transformers: outputs, gradients, whole runs, and what it refuses."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from composer.algorithms.sequence_packing import (
    SequencePacking,
    count_tokens,
    make_block_mask,
    make_document_mask,
    pack_sequences,
)
from composer.core import (
    RESHAPES_SEQUENCES,
    Algorithm,
    Callback,
    ConflictError,
    DataSpec,
    Engine,
    Event,
    Placement,
    State,
)
from composer.loggers import Logger, LoggerDestination
from composer.models import HuggingFaceModel
from composer.testing import SimpleTransformerModel, run_on_ranks
from composer.trainer import Trainer

VOCABULARY, LENGTH, ROWS = 48, 24, 6
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
BERT: dict[str, Any] = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": LENGTH,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
KINDS: dict[str, Any] = {
    "gpt2": lambda **more: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2 | more)),
    "llama": lambda **more: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | more)),
    "qwen": lambda **more: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SIZES | {"num_key_value_heads": 1, "head_dim": 8} | more)
    ),
    "bert": lambda **more: transformers.BertForMaskedLM(transformers.BertConfig(**BERT | more)),
    "roberta": lambda **more: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**BERT | more)),
}
ENCODERS = {"bert", "roberta"}
DOCUMENTS = [
    torch.randint(2, VOCABULARY, (int(size),), generator=torch.Generator().manual_seed(index))
    for index, size in enumerate(torch.randint(2, 20, (36,), generator=torch.Generator().manual_seed(5)))
]


def make(kind: str, implementation: str = "sdpa", seed: int = 0, **more: Any) -> HuggingFaceModel:
    """A model in float64, with weights that are large enough for every token to matter."""
    torch.manual_seed(seed)
    model = KINDS[kind](attn_implementation=implementation, **more)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return HuggingFaceModel(model.double())


def collate(documents: list[torch.Tensor], encodes: bool = False) -> dict[str, torch.Tensor]:
    """Pad documents. Encoders predict every third token."""
    ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=1)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in documents], batch_first=True)
    is_hidden = (torch.arange(ids.shape[1]) % 3 == 1) & (mask == 1)
    labels = ids.masked_fill(~is_hidden if encodes else mask == 0, -100)
    return {"input_ids": ids.masked_fill(is_hidden, 2) if encodes else ids, "attention_mask": mask, "labels": labels}


def start(model: torch.nn.Module, algorithms: Any, **arguments: Any) -> Engine:
    loader = [collate(DOCUMENTS[:2])]
    state = State(model=model, max_duration="1ba", dataloader=loader, algorithms=algorithms, **arguments)
    engine = Engine(state)
    engine.run_event(Event.FIT_START)
    return engine


def give(engine: Engine, batch: Any) -> Any:
    """Return what the model gets."""
    engine.state.batch = batch
    engine.run_event(Event.AFTER_DATALOADER)
    engine.run_event(Event.BEFORE_FORWARD)
    return engine.state.batch


def gradients_of(model: torch.nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True))


def loss_of(logits: torch.Tensor, labels: torch.Tensor, encodes: bool) -> torch.Tensor:
    """The sum over tokens."""
    if not encodes:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_have_the_outputs_and_gradients_of_separate_ones(
    kind: str, implementation: str, dtype: torch.dtype
) -> None:
    # Rounding of sums of some hundred values of about 1; eager attention of Llama and Qwen has a softmax in float32.
    is_double = dtype == torch.float64 and (kind, implementation) not in {("llama", "eager"), ("qwen", "eager")}
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if is_double else {"rtol": 1e-5, "atol": 1e-5}
    model, encodes = make(kind, implementation).to(dtype).eval(), kind in ENCODERS
    batch = collate(DOCUMENTS[:12], encodes)
    packed = give(start(model, SequencePacking(LENGTH)), batch)
    outputs = model(packed).logits
    losses: list[torch.Tensor] = []
    for index, document in enumerate(DOCUMENTS[:12]):
        alone = model({key: value[index : index + 1, : len(document)] for key, value in batch.items()}).logits
        losses.append(loss_of(alone, batch["labels"][index : index + 1, : len(document)], encodes))

        torch.testing.assert_close(outputs[packed["document_ids"] == index], alone[0], **tolerance)
    assert len(outputs) < 12
    loss = loss_of(outputs, packed["labels"], encodes)
    separate = torch.stack(losses).sum()
    torch.testing.assert_close(loss, separate, **tolerance)
    expected = gradients_of(model, separate)
    # The largest gradient of a parameter is the scale of the rounding of its sum over tokens.
    for found, wanted in zip(gradients_of(model, loss), expected, strict=True):
        scale = wanted.abs().max().clamp(min=1)
        torch.testing.assert_close(found / scale, wanted / scale, **tolerance)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_of_transformers_takes_the_block_mask() -> None:
    model = make("llama", "flex_attention", head_dim=16).float().eval()
    packed = pack_sequences(collate(DOCUMENTS[:12]), LENGTH)
    block = {**packed, "attention_mask": make_block_mask(packed["document_ids"])}
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        found = model(block).logits
    model.model.set_attn_implementation("sdpa")
    dense = {**packed, "attention_mask": make_document_mask(packed["document_ids"])}

    torch.testing.assert_close(found, model(dense).logits.detach(), rtol=1e-4, atol=1e-5)


def test_positions_of_roberta_begin_after_its_padding() -> None:
    packed = give(start(make("roberta"), SequencePacking(LENGTH)), collate(DOCUMENTS[:4], encodes=True))

    assert packed["position_ids"].min() == 2


def test_roberta_with_its_own_padding_token_is_accepted() -> None:
    """A row with little but padding, which RoBERTa numbers in its own way, passes the check of the model."""
    batch = collate([DOCUMENTS[0][:3]], encodes=True)

    assert (give(start(make("roberta"), SequencePacking(LENGTH, pad_token_id=1)), batch)["input_ids"] == 1).any()


class Weights(Callback):
    """Records the weights after each batch, and the timestamps."""

    def __init__(self) -> None:
        self.weights: list[list[torch.Tensor]] = []
        self.times: list[tuple[int, ...]] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        self.weights.append([parameter.detach().clone() for parameter in state.model.parameters()])
        now = state.timestamp
        self.times.append((int(now.batch), int(now.sample), int(now.token)))


def run(
    algorithms: list[Algorithm],
    kind: str = "gpt2",
    *,
    batch_size: int = 12,
    ranks: int = 1,
    rank: int = 0,
    counts: bool = True,
    collate_fn: Any = None,
    seed: int = 0,
    **options: Any,
) -> Weights:
    """Train for two epochs of three batches of documents in a given order."""
    encodes = kind in ENCODERS
    weights, model = Weights(), make(kind, seed=seed)
    documents: Any = DOCUMENTS
    options.setdefault("callbacks", [])
    trainer = Trainer(
        model=model,
        train_dataloader=DataSpec(
            DataLoader(
                documents,
                batch_size=batch_size // ranks,
                collate_fn=partial(collate, encodes=encodes) if collate_fn is None else collate_fn,
                sampler=None if ranks == 1 else DistributedSampler(documents, ranks, rank, shuffle=False),
            ),
            get_num_tokens_in_batch=partial(count_tokens, causal=not encodes) if counts else None,
        ),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        algorithms=algorithms,
        accumulate_train_batch_on_tokens=counts,
        progress_bar=False,
        device="cpu",
        seed=3,
        **{"max_duration": "2ep", **options, "callbacks": [weights, *options["callbacks"]]},
    )
    trainer.fit()
    trainer.close()
    return weights


def assert_same(found: Weights, expected: Weights, tolerance: float) -> None:
    assert found.times == expected.times
    for one, other in zip(found.weights, expected.weights, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_run_is_the_run_of_one_document_a_row(kind: str) -> None:
    expected = run([], kind)
    packed = run([SequencePacking(LENGTH)], kind)

    # Transformers computes the loss of causal models in float32, and the norms of Llama and Qwen.
    tolerance = 1e-11 if kind in ENCODERS else 1e-5
    assert expected.times[-1] == (6, 72, 2 * sum(map(len, DOCUMENTS)))
    assert_same(packed, expected, tolerance)
    assert_same(run([SequencePacking(LENGTH)], kind, device_train_microbatch_size=2), expected, tolerance)


def test_a_run_without_microbatches_needs_no_counts() -> None:
    assert_same(run([SequencePacking(LENGTH)], counts=False), run([], counts=False), 1e-6)


def test_a_loader_may_pack_itself() -> None:
    expected = run([])
    packed = run([SequencePacking(LENGTH)], collate_fn=partial(pack_sequences, length=LENGTH))

    assert [time[2] for time in packed.times] == [time[2] for time in expected.times]
    packed.times = expected.times  # samples are rows
    assert_same(packed, expected, 1e-6)


def run_on_rank(algorithms: list[Algorithm]) -> Weights:
    from composer.utils import dist

    return run(algorithms, ranks=dist.get_world_size(), rank=dist.get_global_rank())


def test_two_ranks_train_as_one_does() -> None:
    """Of a batch, one rank has the even documents and the other one the odd ones."""
    expected = run([])
    for found in run_on_ranks(run_on_rank, 2, [SequencePacking(LENGTH)], timeout=400):
        assert_same(found, expected, 1e-6)


class Died(Exception):
    """The process is lost."""


class Death(Callback):
    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch == 4:
            raise Died


def test_a_resumed_run_is_an_uninterrupted_one(tmp_path: Path) -> None:
    expected = run([SequencePacking(LENGTH)])
    options: dict[str, Any] = {
        "save_folder": str(tmp_path),
        "save_interval": "1ba",
        "run_name": "run",
        "autoresume": True,
    }
    with pytest.raises(Died):
        run([SequencePacking(LENGTH)], callbacks=[Death()], **options)
    resumed = run([SequencePacking(LENGTH)], seed=1, **options)

    assert resumed.times == expected.times[4:]
    for one, other in zip(resumed.weights, expected.weights[4:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_it_trains_in_lower_precision() -> None:
    model = make("llama").float()
    batch = collate(DOCUMENTS[:12])
    engine = start(model, SequencePacking(LENGTH), precision="amp_bf16")
    packed = give(engine, batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(model(packed), packed)
        expected = model.loss(model(batch), batch)

    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0)


def test_a_host_may_convert_outputs_of_lower_precision_to_float32() -> None:
    model = make("llama").float().model
    forward = model.forward

    def prepared(**inputs: Any) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return {"logits": forward(**inputs)["logits"].float()}

    model.forward = prepared
    packed = give(start(model, SequencePacking(LENGTH), precision="amp_bf16"), collate(DOCUMENTS[:12]))

    assert packed["attention_mask"].dim() == 4


def test_the_check_of_a_model_changes_nothing() -> None:
    model = make("gpt2", attn_pdrop=0.5, resid_pdrop=0.5)
    engine = start(model, SequencePacking(LENGTH))
    model.train()
    model.model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(1)
    give(engine, collate(DOCUMENTS[:12]))

    assert torch.equal(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(1)))
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


class Recorder(LoggerDestination):
    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.logged.append(metrics)


def test_rows_and_fill_are_logged() -> None:
    recorder = Recorder()
    batch = give(start(make("gpt2"), SequencePacking(10), callbacks=recorder), collate([DOCUMENTS[0][:2]] * 7))

    assert len(batch["input_ids"]) == 2
    assert recorder.logged == [{"sequence_packing/rows": 2, "sequence_packing/fill": pytest.approx(0.7)}]


class Blind(SimpleTransformerModel):
    """Takes a mask of any form, and ignores it."""

    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward({"input_ids": batch["input_ids"]})


class WithoutPositions(HuggingFaceModel):
    """Takes the mask, but not the positions."""

    def forward(self, batch: Any) -> Any:
        return super().forward({key: value for key, value in batch.items() if key != "position_ids"})


def without_positions() -> HuggingFaceModel:
    return WithoutPositions(make("gpt2").model)


def bloom() -> HuggingFaceModel:
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 1, "n_head": 2}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return HuggingFaceModel(transformers.BloomForCausalLM(transformers.BloomConfig(**sizes, **ids)))


@pytest.mark.parametrize(
    ("make_model", "arguments", "message"),
    [
        (lambda: Blind(VOCABULARY).double(), {}, "apart, got one whose outputs for a document differ by"),
        (
            lambda: SimpleTransformerModel(VOCABULARY),
            {},
            "takes an `attention_mask` of shape .*, got one that fails with",
        ),
        (without_positions, {}, "keeps the documents of a row apart"),
        (lambda: make("gpt2"), {"causal": False}, "If `causal=False` is not what the model does"),
        (lambda: make("bert"), {"causal": True}, "If `causal=True` is not what the model does"),
        (lambda: make("roberta"), {"first_position": 0}, "keeps the documents of a row apart"),
        (bloom, {}, "takes an `attention_mask` of shape .*, got one that fails with"),
    ],
)
def test_models_that_mix_documents_are_refused(make_model: Any, arguments: dict[str, Any], message: str) -> None:
    engine = start(make_model(), SequencePacking(LENGTH, **arguments))
    with pytest.raises(ValueError, match=message):
        give(engine, collate(DOCUMENTS[:12]))


def mistral() -> HuggingFaceModel:
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=LENGTH - 1)
    return HuggingFaceModel(transformers.MistralForCausalLM(config))


def t5() -> HuggingFaceModel:
    sizes: dict[str, Any] = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": VOCABULARY}
    return HuggingFaceModel(transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)))


def flash() -> HuggingFaceModel:
    model = make("llama")
    model.config._attn_implementation_internal = "flash_attention_2"  # which cannot be set where it is not installed
    return model


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (
            mistral,
            "must not be more than the window of attention, 23 tokens, got 24 for a model with `MistralConfig`",
        ),
        (t5, "cannot pack for an encoder-decoder, got a model with `T5Config`"),
        (flash, "needs attention that takes a mask, got 'flash_attention_2'"),
    ],
)
def test_models_whose_masks_would_be_lost_are_refused_before_training(make_model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start(make_model(), SequencePacking(LENGTH))


@pytest.mark.parametrize(
    ("batch", "message"),
    [((torch.zeros(2, 3), torch.zeros(2)), "got tuple"), ({"tokens": torch.zeros(2, 3)}, r"got one with \['tokens'\]")],
)
def test_batches_without_tokens_are_refused(batch: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"needs batches that are mappings with 'input_ids', {message}"):
        give(start(make("gpt2"), SequencePacking(LENGTH)), batch)


def test_a_model_of_transformers_gets_the_parts_of_a_batch_as_arguments() -> None:
    found = give(start(make("gpt2").model, SequencePacking(LENGTH)), collate(DOCUMENTS))

    assert found["attention_mask"].dim() == 4


def test_labels_of_a_causal_model_are_not_invented() -> None:
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long)}
    with pytest.raises(ValueError, match=r"needs the 'labels' of a causal model, got a batch with \['input_ids'\]"):
        give(start(make("gpt2"), SequencePacking(LENGTH)), batch)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"length": 0}, ValueError, "`length` must be"),
        ({"causal": 2}, TypeError, "`causal` must be"),
        ({"split_long": "no"}, TypeError, "`split_long` must be"),
        ({"pad_token_id": -1}, ValueError, "`pad_token_id` must not be negative"),
        ({"first_position": -1}, ValueError, "`first_position` must not be negative"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SequencePacking(**{"length": 8, **arguments})


class Reshaping(Algorithm):
    events = frozenset({Event.AFTER_DATALOADER})
    placement = Placement(provides={RESHAPES_SEQUENCES})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Do nothing."""


@pytest.mark.parametrize("other", [Reshaping(), SequencePacking(8)])
def test_what_assumes_one_document_a_row_is_refused(other: Algorithm) -> None:
    with pytest.raises(ConflictError, match=r"cannot be used together|is given twice"):
        start(make("gpt2"), [SequencePacking(LENGTH), other])
