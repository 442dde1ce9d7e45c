"""Any model of `transformers` as a `ComposerModel`."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
import transformers

from composer.models.base import ComposerModel, of_outputs_alone
from composer.models.huggingface import _checkpoint, _evaluation, _metadata, _peft
from composer.models.huggingface._files import tokenizer_of
from composer.utils import dist, is_model_fsdp2, renamed_arguments

log = logging.getLogger(__name__)

Path_ = str | os.PathLike[str]


class HuggingFaceModel(ComposerModel):
    """A model of `transformers` for training, with its configuration and tokenizer in checkpoints.

    A batch is a mapping such as `{"input_ids": ..., "attention_mask": ..., "labels": ...}`, as made by a tokenizer or a
    collator of `transformers`; entries that the model's `forward` does not take are ignored. The loss is that of the
    model.

    Metrics get `(logits, labels)` with `use_logits=True`, otherwise `(outputs, labels)` with all outputs. Those with an
    attribute `needs_batch = True` get `batch=`, `outputs=` and `labels=`. For a causal language model, labels are
    shifted to the left by one, so that they are the next token. Metrics are named by their class.

    With LoRA, a checkpoint has only the adapter, and loading it does not change the rest of the model.

    Args:
        model: A model of `transformers`, or a `PeftModel`.
        tokenizer: Its tokenizer. None: checkpoints have none, and texts cannot be generated.
        use_logits: Pass logits to metrics, and no labels to the model in evaluation, so that it computes no loss.
        metrics: Training metrics: one, a sequence, or a mapping from names.
        eval_metrics: Evaluation metrics. None: copies of `metrics`.
        shift_labels: Shift the labels of metrics to the next token. None: if the model is a causal language model.
        allow_embedding_resizing: Enlarge the embeddings for a larger tokenizer.
        peft_config: A `peft.LoraConfig`; adds an adapter to the model.
        should_save_peft_only: Restrict the state dict of an adapted model to its adapter.

    Attributes:
        model: The model of `transformers` or `peft`.
        config: Its configuration.
        model_forward_args: The names of the arguments of its `forward`.
        labels: The labels of the last evaluated batch.
        ignore_index: The label that the loss leaves out of its mean: -100, or the `semantic_loss_ignore_index` of a
            model for segmentation. Microbatches and ranks are weighted by the other labels. None for CTC, whose loss is
            not a mean over labels: they are weighted by their samples.
        train_metrics: Metrics by name.
        val_metrics: Metrics by name.
        using_peft: True if the model has an adapter.

    Raises:
        TypeError: `model` is not a model of `transformers`.
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

    Differs: evaluation does not remove labels from batches. Outputs have no cache for generation unless the batch has
        `use_cache`: training does not need it. Two metrics of one class are an error.
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
        original = getattr(model, "_modules", {}).get("_orig_mod")
        if isinstance(original, torch.nn.Module):
            # The wrapper of `torch.compile` adds a prefix to all names, so compile the model in place instead.
            original._compiled_call_impl = model.dynamo_ctx(original._call_impl)
            model = original
        inner = _peft.maybe_get_underlying_model(model)
        if not isinstance(inner, transformers.PreTrainedModel):
            raise TypeError(
                f"`model` must be a model of `transformers`, got {type(model).__name__}. Write a `ComposerModel` for "
                f"other models."
            )
        self.config = inner.config
        self.tokenizer = tokenizer
        _fit_tokenizer(inner, tokenizer, allow_embedding_resizing)
        self.use_logits = bool(use_logits)
        self.model_forward_args = set(inspect.signature(inner.forward).parameters)
        self.train_metrics = _evaluation.named(metrics)
        self.val_metrics = (
            copy.deepcopy(self.train_metrics) if eval_metrics is None else _evaluation.named(eval_metrics)
        )
        self.labels: Any = None
        self._unshifted: Any = None  # the same labels as they are in the batch
        self._labels_of_loss: Any = None  # the labels of the last forward pass with a loss
        self.shift_labels = _evaluation.resolve_shift_labels(inner, shift_labels)
        self.model = model if peft_config is None else _peft.adapted(model, peft_config)
        self.using_peft = _peft.is_adapted(self.model)
        self.should_save_peft_only = should_save_peft_only
        self.dummy_forward_called = False  # read by other programs; not needed here
        if self.using_peft:
            _peft.check_adapters(self.model)
            if should_save_peft_only:
                _peft.save_adapters_only(self)

    @property
    def ignore_index(self) -> int | None:
        """Return the label that the loss of the model leaves out of its mean; None if that is not over labels."""
        inner = _peft.maybe_get_underlying_model(self.model)
        if "CTC" in type(inner).__name__:
            return None
        if "Segmentation" in type(inner).__name__:  # classifiers of images have the setting, too, and do not read it
            return int(getattr(self.config, "semantic_loss_ignore_index", -100))
        return -100

    def forward(self, batch: Mapping[str, Any]) -> Any:
        """Return the model's outputs, for the entries of the batch that its `forward` takes.

        Raises:
            ValueError: The batch is not a mapping.
        """
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"A batch must be a mapping such as {{'input_ids': ..., 'labels': ...}}, got {type(batch).__name__}. "
                f"Use a collate function that returns one."
            )
        inputs = {key: value for key, value in batch.items() if key in self.model_forward_args}
        if "use_cache" in self.model_forward_args:
            inputs.setdefault("use_cache", False)
        self._labels_of_loss = inputs.get("labels")
        return self.model(**inputs)

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the loss that the model computed in its forward pass.

        If an algorithm such as MixUp has replaced the labels in the batch since, the difference between the losses of
        new and old labels is added. This is supported for sequence, image and token classifiers of `transformers`.

        Raises:
            ValueError: The model returned no loss, or there are other arguments.
            NotImplementedError: The labels were replaced, and the model is not such a classifier.
        """
        if args or kwargs:
            raise ValueError(
                f"The model of `transformers` computes the loss in its forward pass, so {[*args, *kwargs]} cannot "
                f"change it. Override `loss` in a subclass to compute it from `outputs`."
            )
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
        if not isinstance(loss, torch.Tensor):
            raise ValueError(
                "The model returned no loss, which it computes from labels. Put 'labels' into the batch, for example "
                "with `transformers.DataCollatorForLanguageModeling`."
            )
        old, new = self._labels_of_loss, batch.get("labels") if isinstance(batch, Mapping) else None
        if old is None or new is None or not _evaluation.are_replaced(old, new):
            return loss
        loss_of = _evaluation.loss_of_labels(_peft.maybe_get_underlying_model(self.model))
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[1]
        # Not just the loss of the new labels: the model may have added terms that do not depend on labels.
        return loss + (loss_of(logits, new) - loss_of(logits, old))

    @of_outputs_alone
    def eval_forward(self, batch: Any, outputs: Any | None = None) -> Any:
        """Return the inputs of metrics: logits, all outputs, or generated texts.

        For a batch with `"mode": "generate"`, up to `batch["generation_length"]` tokens are generated with
        `batch["generation_kwargs"]`; the result is a list of texts.

        Raises:
            ValueError: Metrics use logits and the batch has no labels, or there is no tokenizer to generate texts.
        """
        mode = batch.get("mode") if isinstance(batch, Mapping) else None
        returns_logits = mode != "generate" and (self.use_logits or mode == "icl_task")
        self._take_labels(batch, required=returns_logits)
        if mode == "generate":
            return _generate_texts(self, batch)
        if not returns_logits:
            return self(batch) if outputs is None else outputs
        if outputs is None:
            outputs = self(_evaluation.without_labels(batch, _peft.maybe_get_underlying_model(self.model)))
        return _evaluation.logits_of(outputs)

    def _take_labels(self, batch: Any, required: bool) -> None:
        found = self._unshifted = _evaluation.labels_of(batch, required)
        shifted = self.shift_labels and found is not None and batch.get("mode") != "generate"
        self.labels = _evaluation.next_tokens(found) if shifted else found

    def generate(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """Generate tokens, in the current mode (train or eval). For a sharded model, call it on every rank.

        Args:
            input_ids: Shape (N, S); padded on the left, except for encoder-decoders.
            **kwargs: Arguments of `generate` of `transformers`, such as `attention_mask` and `max_new_tokens`.

        Returns:
            The tokens, following those of `input_ids` except for encoder-decoders.
        """
        if "pad_token_id" not in kwargs and self.tokenizer is not None:
            pad = self.tokenizer.pad_token_id
            kwargs["pad_token_id"] = self.tokenizer.eos_token_id if pad is None else pad
        if is_model_fsdp2(self) or is_model_fsdp2(self.model):
            if "generate" not in vars(self.model):
                # `generate` calls parts of the model without calling the model, which would gather the weights.
                from torch.distributed.fsdp import register_fsdp_forward_method

                register_fsdp_forward_method(self.model, "generate")
            if dist.get_world_size() > 1:  # all ranks continue until the last has finished
                kwargs.setdefault("synced_gpus", True)
        return self.model.generate(input_ids=input_ids, **kwargs)

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
        """Return the description of the model for a checkpoint: configuration, class, adapter and tokenizer.

        Raises:
            ValueError: The tokenizer has a file of an unsupported type.
        """
        return _metadata.describe(self.model, self.tokenizer)

    @staticmethod
    def load_huggingface_tokenizer_from_saved_state(
        hf_state: Mapping[str, Any], trust_remote_code: bool = False, tokenizer_save_dir: str | None = None
    ) -> Any:
        """Return the tokenizer of a checkpoint, or None.

        Args:
            hf_state: `checkpoint["state"]["integrations"]["huggingface"]`.
            trust_remote_code: Allow custom code of the tokenizer, which is in the checkpoint, to run.
            tokenizer_save_dir: A folder for its files. None: a temporary one that exists as long as the tokenizer.

        Raises:
            ValueError: An entry is outside of the folder, has an unsupported type, or is code that is not trusted.
        """
        return tokenizer_of(hf_state.get("tokenizer") or {}, trust_remote_code, tokenizer_save_dir)

    @staticmethod
    @renamed_arguments(hf_state="loaded_state_dict")
    def load_huggingface_model_from_saved_state(
        loaded_state_dict: Mapping[str, Any],
        model_instantiation_class: type | str | None = None,
        model_config_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the model of a checkpoint, with new weights and without an adapter.

        Args:
            loaded_state_dict: `checkpoint["state"]["integrations"]["huggingface"]`.
            model_instantiation_class: Another class than the saved one, or its path, such as
                `"transformers.AutoModelForSequenceClassification"`.
            model_config_kwargs: Values of the configuration to change, such as `{"num_labels": 3}`.

        Raises:
            ValueError: The class cannot be imported, or the configuration is unknown or not safe.
        """
        return _metadata.instantiate(loaded_state_dict, model_instantiation_class, model_config_kwargs)

    @staticmethod
    def hf_from_composer_checkpoint(
        checkpoint_path: Path_,
        model_instantiation_class: type | str | None = None,
        model_config_kwargs: Mapping[str, Any] | None = None,
        local_checkpoint_save_location: Path_ | None = None,
        trust_remote_code: bool = False,
    ) -> tuple[Any, Any]:
        """Return the model of `transformers` in a checkpoint with its weights, and its tokenizer. Runs no code from it.

        With another class, such as one for classification, matching weights are loaded and the others are new. An
        adapted model is returned without its adapter; see `from_composer_checkpoint`.

        Args:
            checkpoint_path: The checkpoint: a path or a URI.
            model_instantiation_class: Another class than the saved one, or its path, such as
                `"transformers.AutoModelForSequenceClassification"`.
            model_config_kwargs: Values of the configuration to change, such as `{"num_labels": 3}`.
            local_checkpoint_save_location: Save a downloaded checkpoint here. None: do not save it.
            trust_remote_code: Allow custom code of the tokenizer, which is in the checkpoint, to run.

        Returns:
            The model, and the tokenizer or None.

        Raises:
            FileNotFoundError: The checkpoint does not exist.
            CorruptCheckpointError: It is truncated or altered.
            UnsafeCheckpointError: It has types whose loading could run code.
            ValueError: It has no model of `transformers`, or one that cannot be built safely.
            RuntimeError: The weights do not match.

        Warns:
            UserWarning: The checkpoint has only an adapter, so the weights of the model itself are new.

        Differs: the weights are loaded, and algorithms that change layers, such as ALiBi, are applied again.
        """
        content = _checkpoint.read(checkpoint_path, local_checkpoint_save_location)
        options = model_instantiation_class, model_config_kwargs, trust_remote_code
        built = _restore(HuggingFaceModel, content, *options)
        model = built.model.unload() if _peft.is_adapted(built.model) else built.model
        return model, built.tokenizer

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
        """Return the trained model of a checkpoint, with its tokenizer and adapter, in eval mode.

        Arguments that are not described here, and errors, are those of `hf_from_composer_checkpoint`.

        Args:
            checkpoint_path: The checkpoint: a path or a URI.
            base_model: The original model of `transformers`; required if the checkpoint has only an adapter.
            model_instantiation_class: Another class than the saved one, or its path.
            model_config_kwargs: Values of the configuration to change.
            local_checkpoint_save_location: Save a downloaded checkpoint here.
            trust_remote_code: Allow custom code of the tokenizer to run.
            **kwargs: Arguments of the constructor that a checkpoint does not have, such as `metrics` and `use_logits`.

        Raises:
            ValueError: The checkpoint has only an adapter, and there is no `base_model`.
        """
        content = _checkpoint.read(checkpoint_path, local_checkpoint_save_location)
        options = model_instantiation_class, model_config_kwargs, trust_remote_code

        def make(model: Any, tokenizer: Any, peft_config: Any) -> HuggingFaceModel:
            return cls(model, tokenizer, peft_config=peft_config, **kwargs)

        built: HuggingFaceModel = _restore(make, content, *options, base_model, needs_base=True)
        return built


def wrap_model(model: Any, metrics: Any = None) -> HuggingFaceModel:
    """Return a model as the `Trainer` wraps it: its metrics get logits and labels.

    Args:
        model: A model of transformers or peft.
        metrics: Metrics of torchmetrics: one, a sequence or a dict. None: "Loss" in evaluation, the mean of the loss
            over all labels, if torchmetrics is installed.
    """
    if metrics is not None:
        return HuggingFaceModel(model, metrics=metrics, use_logits=True)
    if find_spec("torchmetrics") is None:
        return HuggingFaceModel(model)
    from composer.models.huggingface._loss import LabelLoss

    wrapped = HuggingFaceModel(model)
    wrapped.val_metrics = {"Loss": LabelLoss(wrapped.ignore_index)}
    return wrapped


def _fit_tokenizer(model: Any, tokenizer: Any, allow_resizing: bool) -> None:
    """Ensure that the model has an embedding for each token.

    Raises:
        ValueError: It has too few, and must not be changed.
    """
    if tokenizer is None:
        log.warning(
            "There is no tokenizer, so checkpoints will not have one, and texts cannot be generated. Pass `tokenizer` "
            "to `HuggingFaceModel`."
        )
        return
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    if size is None or len(tokenizer) <= size:
        return
    if not allow_resizing:
        raise ValueError(
            f"`tokenizer` must not have more tokens than the model has embeddings, got {len(tokenizer)} and {size}. "
            f"Pass `allow_embedding_resizing=True`, or build the model with `vocab_size={len(tokenizer)}`."
        )
    log.warning("The tokenizer has %d tokens: the model's %d embeddings are enlarged.", len(tokenizer), size)
    model.resize_token_embeddings(len(tokenizer))


def _generate_texts(model: Any, batch: Mapping[str, Any]) -> list[str]:
    """Return generated continuations of the texts in a batch.

    Raises:
        ValueError: There is no tokenizer.
    """
    if model.tokenizer is None:
        raise ValueError("Generating texts needs a tokenizer. Pass `tokenizer` to `HuggingFaceModel`.")
    arguments = {"attention_mask": batch.get("attention_mask"), **batch.get("generation_kwargs", {})}
    if "generation_length" in batch:
        arguments["max_new_tokens"] = batch["generation_length"]
    tokens = model.generate(batch["input_ids"], **arguments)
    if not model.config.is_encoder_decoder:  # remove the prompt
        tokens = tokens[:, batch["input_ids"].shape[1] :]
    texts: list[str] = model.tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return texts


def _restore(
    make: Callable[..., Any],
    content: Mapping[str, Any],
    kind: type | str | None,
    overrides: Mapping[str, Any] | None,
    trust_remote_code: bool,
    base_model: Any = None,
    *,
    needs_base: bool = False,
) -> Any:
    """Return the model of a checkpoint, in eval mode.

    Args:
        make: Returns a `HuggingFaceModel` for a model, a tokenizer and `peft_config=`.
        content: The checkpoint.
        kind: Another class than the saved one, or its path.
        overrides: Values of the configuration to change.
        trust_remote_code: Allow custom code of the tokenizer to run.
        base_model: The original model, if the checkpoint has only an adapter.
        needs_base: Raise an error, not a warning, if the original model is missing.
    """
    hf_state = _metadata.hf_state_of(content)
    adapter, names = _metadata.peft_config_of(hf_state), _checkpoint.weights_of(content)
    is_partial = adapter is not None and len(_peft.filter_state_dict_peft(names, adapter)) == len(names)
    if is_partial and base_model is None:
        name = adapter.base_model_name_or_path
        hint = f"It was {name!r}. " if name else ""
        text = f"The checkpoint has only the adapter, not the weights of the model that was adapted. {hint}"
        if needs_base:
            raise ValueError(f"{text}Pass it as `base_model`, for example `AutoModelForCausalLM.from_pretrained(...)`.")
        warnings.warn(
            f"{text}The weights of the returned model are new. Use `HuggingFaceModel.from_composer_checkpoint` with "
            f"`base_model` to get the trained model.",
            stacklevel=3,
        )
    tokenizer = tokenizer_of(hf_state.get("tokenizer") or {}, trust_remote_code)
    base = _metadata.instantiate(hf_state, kind, overrides) if base_model is None else base_model
    model = make(base, tokenizer, peft_config=adapter)
    _checkpoint.load_weights(model, content, strict=kind is None and not overrides, adapter_only=is_partial)
    return model.eval()
