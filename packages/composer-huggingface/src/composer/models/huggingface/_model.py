"""The class that makes any model of `transformers` a `ComposerModel`."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from composer.models.base import ComposerModel, of_outputs_alone
from composer.models.huggingface import _checkpoint, _evaluation, _generation, _metadata, _peft
from composer.models.huggingface._construction import fit_tokenizer, in_place
from composer.models.huggingface._files import tokenizer_of
from composer.models.huggingface._restore import Request, restored, without_adapter

__all__ = ["HuggingFaceModel"]

Path_ = str | os.PathLike[str]


class HuggingFaceModel(ComposerModel):
    """Makes a model of `transformers` trainable here, and keeps its configuration and tokenizer in checkpoints.

    A batch is a mapping such as `{"input_ids": ..., "attention_mask": ..., "labels": ...}`, as a tokenizer or a
    collator of `transformers` makes it; what the model's `forward` does not take is left out. The loss is the model's
    own.

    Metrics take `(logits, labels)` with `use_logits=True`, otherwise `(outputs, labels)` with all that the model
    returns. Those with an attribute `needs_batch = True` take `batch=`, `outputs=` and `labels=`. For a causal language
    model labels are shifted by one to the left, so that they are the next token. They are named by their class.

    With LoRA, a checkpoint has the adapter only, and loading it leaves the rest of the model alone.

    Args:
        model: A model of `transformers`, or of `peft` around one.
        tokenizer: Its tokenizer. None: the checkpoint has none, and the model generates from token ids only.
        use_logits: Whether metrics get the logits, and the forward pass of an evaluation no labels, so that it computes
            no loss.
        metrics: Metrics in training: one, or several.
        eval_metrics: Metrics in evaluation; None: copies of `metrics`.
        shift_labels: Whether metrics compare with the next token; None: if the model is a causal language model.
        allow_embedding_resizing: Whether embeddings grow to the size of a larger tokenizer.
        peft_config: A `peft.LoraConfig`, with which an adapter is added to the model.
        should_save_peft_only: Whether the state of an adapted model is that of its adapter.

    Attributes:
        model: The model of `transformers` or `peft`.
        config: Its configuration.
        model_forward_args: The names of what its `forward` takes.
        labels: Those of the last batch that was evaluated.
        train_metrics: Metrics by name.
        val_metrics: Metrics by name.
        using_peft: Whether the model has an adapter.

    Raises:
        TypeError: `model` is no model of `transformers`.
        ValueError: The tokenizer has more tokens than the model, two metrics have one name, or the adapter is not LoRA.
        MissingConditionalImportError: `peft_config` is given, and `peft` is not installed.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(
        ...     vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2, eos_token_id=0, bos_token_id=0
        ... )
        >>> model = HuggingFaceModel(GPT2LMHeadModel(config))
        >>> tokens = torch.zeros(2, 8, dtype=torch.int64)
        >>> batch = {"input_ids": tokens, "labels": tokens}
        >>> model.loss(model(batch), batch).shape
        torch.Size([])

    Differs: batches keep their labels in evaluation. Outputs have no `past_key_values` unless the batch says
        `use_cache`: training has no use for them. Two metrics of one class are an error.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        use_logits: bool | None = False,
        metrics: Any = None,
        eval_metrics: Any = None,
        shift_labels: bool | None = None,
        allow_embedding_resizing: bool = False,
        peft_config: Any = None,
        should_save_peft_only: bool = True,
    ) -> None:
        super().__init__()
        model = in_place(model)
        inner = _peft.maybe_get_underlying_model(model)
        if not isinstance(inner, transformers.PreTrainedModel):
            raise TypeError(
                f"`model` must be a model of `transformers`, got {type(model).__name__}. Write a `ComposerModel` for "
                f"any other."
            )
        self.config = inner.config
        self.tokenizer = tokenizer
        fit_tokenizer(inner, tokenizer, allow_embedding_resizing)
        self.use_logits = bool(use_logits)
        self.model_forward_args = set(inspect.signature(inner.forward).parameters)
        self.train_metrics = _evaluation.named(metrics)
        self.val_metrics = (
            copy.deepcopy(self.train_metrics) if eval_metrics is None else _evaluation.named(eval_metrics)
        )
        self.labels: Any = None
        self._unshifted: Any = None  # those labels as they are in the batch
        self._labels_of_loss: Any = None  # those of which the last forward pass computed a loss
        self.shift_labels = _evaluation.shifts(inner, shift_labels)
        self.model = model if peft_config is None else _peft.adapted(model, peft_config)
        self.using_peft = _peft.is_adapted(self.model)
        self.should_save_peft_only = should_save_peft_only
        self.dummy_forward_called = False  # programs ask; a sharded model needs no such pass here
        if self.using_peft:
            _peft.check_adapters(self.model)
            if should_save_peft_only:
                _peft.save_adapters_only(self)

    def forward(self, batch: Mapping[str, Any]) -> Any:
        """The model's outputs, for what of the batch its `forward` takes.

        Raises:
            ValueError: The batch is no mapping.
        """
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"A batch must be a mapping such as {{'input_ids': ..., 'labels': ...}}, got {type(batch).__name__}. "
                f"Use a collate function that makes one."
            )
        taken = {key: value for key, value in batch.items() if key in self.model_forward_args}
        if "use_cache" in self.model_forward_args:
            taken.setdefault("use_cache", False)
        self._labels_of_loss = taken.get("labels")
        return self.model(**taken)

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The loss that the model computed in its forward pass.

        If the labels in the batch have been replaced since, by an algorithm such as MixUp, the loss is changed by the
        difference that they make. That is possible for classifiers of `transformers`, of whole examples or of tokens.

        Raises:
            ValueError: It computed none, or it is to be computed otherwise.
            NotImplementedError: The labels have been replaced, and how the model computes its loss is not known.
        """
        if args or kwargs:
            raise ValueError(
                f"The loss is computed by the model of `transformers` in its forward pass, so {[*args, *kwargs]} can "
                f"not change it. Override `loss` in a subclass to compute it from `outputs`."
            )
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
        if not isinstance(loss, torch.Tensor):
            raise ValueError(
                "The model returned no loss, which it computes of labels. Put 'labels' into the batch, for example "
                "with `transformers.DataCollatorForLanguageModeling`."
            )
        old, new = self._labels_of_loss, batch.get("labels") if isinstance(batch, Mapping) else None
        if old is None or new is None or not _evaluation.are_replaced(old, new):
            return loss
        loss_of = _evaluation.loss_of_labels(_peft.maybe_get_underlying_model(self.model))
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[1]
        # Not the loss of the new labels alone: the model may have added terms that no label changes.
        return loss + (loss_of(logits, new) - loss_of(logits, old))

    @of_outputs_alone
    def eval_forward(self, batch: Any, outputs: Any | None = None) -> Any:
        """What metrics are measured on: logits or all outputs, or texts if the batch says so.

        A batch with `"mode": "generate"` is continued by up to `batch["generation_length"]` tokens, with what is in
        `batch["generation_kwargs"]`; the result is a list of texts.

        Raises:
            ValueError: The batch has no labels and logits are measured, or there is no tokenizer to generate texts.
        """
        mode = batch.get("mode") if isinstance(batch, Mapping) else None
        measures_logits = mode != "generate" and (self.use_logits or mode == "icl_task")
        self._take_labels(batch, required=measures_logits)
        if mode == "generate":
            return _generation.generated_texts(self, batch)
        if not measures_logits:
            return self(batch) if outputs is None else outputs
        if outputs is None:
            outputs = self(_evaluation.without_labels(batch, _peft.maybe_get_underlying_model(self.model)))
        return _evaluation.logits_of(outputs)

    def _take_labels(self, batch: Any, required: bool) -> None:
        found = self._unshifted = _evaluation.labels_of(batch, required)
        shifted = self.shift_labels and found is not None and batch.get("mode") != "generate"
        self.labels = _evaluation.next_tokens(found) if shifted else found

    def generate(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """Let the model continue token ids, in the mode it is in. Of a sharded model, to be called on every rank.

        Args:
            input_ids: Shape (N, S); padded on the left, for models that are no encoder-decoders.
            **kwargs: For `generate` of `transformers`, such as `attention_mask` and `max_new_tokens`.

        Returns:
            The tokens; after those of `input_ids`, for models that are no encoder-decoders.
        """
        return _generation.generate(self, input_ids, kwargs)

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> dict[str, Any] | None:
        if isinstance(batch, Mapping) and batch.get("labels", self._unshifted) is not self._unshifted:
            self._take_labels(batch, required=False)  # another batch was evaluated in between
        if getattr(metric, "needs_batch", False):
            found = metric.update(batch=batch, outputs=outputs, labels=self.labels)
        else:
            found = metric.update(outputs, self.labels)
        return found if isinstance(found, dict) else None

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return self.train_metrics if is_train else self.val_metrics

    def get_metadata(self) -> dict[str, Any]:
        """What a checkpoint says about the model: its configuration, its class, its adapter, its tokenizer.

        Raises:
            ValueError: The tokenizer has files of a kind that cannot be kept there.
        """
        return _metadata.describe(self.model, self.tokenizer)

    @staticmethod
    def load_huggingface_tokenizer_from_saved_state(
        hf_state: Mapping[str, Any], trust_remote_code: bool = False, tokenizer_save_dir: str | None = None
    ) -> Any:
        """The tokenizer of a checkpoint.

        Args:
            hf_state: `checkpoint["state"]["integrations"]["huggingface"]`.
            trust_remote_code: Whether code of the tokenizer's own, which then is in the checkpoint, may run.
            tokenizer_save_dir: A folder for its files; None: a temporary one, as long as the tokenizer is there.

        Returns:
            The tokenizer; None if the checkpoint has none.

        Raises:
            ValueError: An entry leads out of the folder, is of an unknown kind, or is code that is not trusted.
        """
        return tokenizer_of(hf_state.get("tokenizer") or {}, trust_remote_code, tokenizer_save_dir)

    @staticmethod
    def load_huggingface_model_from_saved_state(
        hf_state: Mapping[str, Any],
        model_instantiation_class: type | str | None = None,
        model_config_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The model of a checkpoint, with new weights and without an adapter.

        Args:
            hf_state: `checkpoint["state"]["integrations"]["huggingface"]`.
            model_instantiation_class: Another class than the saved one, or its path, such as
                `"transformers.AutoModelForSequenceClassification"`.
            model_config_kwargs: What is to differ in the configuration, such as `{"num_labels": 3}`.

        Raises:
            ValueError: The class cannot be imported, or the configuration is not known or not safe.
        """
        return _metadata.instantiate(hf_state, model_instantiation_class, model_config_kwargs)

    @staticmethod
    def hf_from_composer_checkpoint(
        checkpoint_path: Path_,
        model_instantiation_class: type | str | None = None,
        model_config_kwargs: Mapping[str, Any] | None = None,
        local_checkpoint_save_location: Path_ | None = None,
        trust_remote_code: bool = False,
    ) -> tuple[Any, Any]:
        """The model of `transformers` in a checkpoint with its weights, and its tokenizer. Runs no code from it.

        With another class, such as one for classification, the weights that fit are loaded, the others are new. Of an
        adapted model, this is the model without the adapter; see `from_composer_checkpoint`.

        Args:
            checkpoint_path: The checkpoint: a path or a URI.
            model_instantiation_class: Another class than the saved one, or its path, such as
                `"transformers.AutoModelForSequenceClassification"`.
            model_config_kwargs: What is to differ in the configuration, such as `{"num_labels": 3}`.
            local_checkpoint_save_location: Where to keep a checkpoint that is downloaded; None: nowhere.
            trust_remote_code: Whether code of the tokenizer's own, which then is in the checkpoint, may run.

        Returns:
            The model, and the tokenizer or None.

        Raises:
            FileNotFoundError: There is no such checkpoint.
            CorruptCheckpointError: It is torn, truncated or altered.
            UnsafeCheckpointError: It holds types whose loading could run code.
            ValueError: It holds no model of `transformers`, or one that cannot be built safely.
            RuntimeError: The weights do not match.

        Warns:
            UserWarning: The checkpoint has an adapter only, so the weights of the model itself are new.

        Differs: the weights are loaded, and layers changed by algorithms such as ALiBi are changed again.
        """
        content = _checkpoint.read(checkpoint_path, local_checkpoint_save_location)
        request = Request(model_instantiation_class, model_config_kwargs, trust_remote_code)
        built = restored(HuggingFaceModel, content, request)
        return without_adapter(built.model), built.tokenizer

    @classmethod
    def from_composer_checkpoint(
        cls,
        checkpoint_path: Path_,
        *,
        base_model: Any = None,
        model_instantiation_class: type | str | None = None,
        model_config_kwargs: Mapping[str, Any] | None = None,
        local_checkpoint_save_location: Path_ | None = None,
        trust_remote_code: bool = False,
        **kwargs: Any,
    ) -> HuggingFaceModel:
        """The model of a checkpoint as it was trained, with its tokenizer and adapter, in eval mode.

        Args:
            checkpoint_path: The checkpoint: a path or a URI.
            base_model: The model of `transformers` that was adapted, if the checkpoint has the adapter only.
            model_instantiation_class: As in `hf_from_composer_checkpoint`.
            model_config_kwargs: As in `hf_from_composer_checkpoint`.
            local_checkpoint_save_location: As in `hf_from_composer_checkpoint`.
            trust_remote_code: As in `hf_from_composer_checkpoint`.
            **kwargs: For the constructor: `metrics`, `use_logits` and so on, which a checkpoint does not have.

        Raises:
            ValueError: As in `hf_from_composer_checkpoint`; or the checkpoint has an adapter only, and there is no
                `base_model`.
        """
        content = _checkpoint.read(checkpoint_path, local_checkpoint_save_location)
        request = Request(
            model_instantiation_class, model_config_kwargs, trust_remote_code, base_model, needs_base=True
        )
        built: HuggingFaceModel = restored(cls, content, request, **kwargs)
        return built
