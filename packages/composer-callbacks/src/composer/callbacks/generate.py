"""Log continuations of prompts by a language model during training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, SupportsIndex

import torch

from composer.core import Callback, Event, State, Time, get_precision_context
from composer.loggers import Logger
from composer.utils import create_interval_scheduler, dist, int_at_least, model_eval_mode, unwrapped_model


class Generate(Callback):
    """Continues prompts with the model at an interval and at the end of training, and logs them as a table.

    The model is a `HuggingFaceModel` with a tokenizer, or any other model with a `tokenizer` and a method
    `generate(input_ids, attention_mask=..., **kwargs)`. Prompts are padded on the left. Training is not affected: the
    mode of the model, the tokenizer and the random number generators are restored.

    The table `generations` has the columns `prompt` and `generation` and is logged by rank 0; all ranks generate.

    **Events** INIT (checks the model); BATCH_CHECKPOINT, EPOCH_CHECKPOINT or ITERATION_CHECKPOINT.
    **Cost** training pauses during the generation.

    Args:
        prompts: The prompts, at least one.
        interval: Interval between generations: a number of epochs or a time.
        batch_size: Number of prompts per call of `model.generate`; None: all.
        **kwargs: Arguments of `model.generate`, such as `max_new_tokens=20`.

    Raises:
        ValueError: An argument is out of range; at INIT, if the model cannot generate.

    Differs: random number generators are restored too. A tokenizer without a padding token uses its end-of-sequence
        token.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        interval: SupportsIndex | str | Time[Any],
        batch_size: SupportsIndex | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(prompts, str) or not prompts or not all(isinstance(prompt, str) for prompt in prompts):
            raise ValueError(f"`prompts` must be a list of at least one text, got {prompts!r}. Use ['Once upon a'].")
        if batch_size is not None:
            batch_size = int_at_least("batch_size", batch_size, 1, "prompt", "Use None for all at once.")
        self.prompts, self.batch_size, self.generate_kwargs = list(prompts), batch_size, kwargs
        self.check_interval = create_interval_scheduler(interval)
        self.last_generate_batch: Time[int] | None = None

    def init(self, state: State, logger: Logger) -> None:
        self.last_generate_batch = None
        model: Any = unwrapped_model(state.model)
        if not callable(getattr(model, "generate", None)) or not hasattr(model, "tokenizer"):
            raise ValueError(
                f"`Generate` needs a `HuggingFaceModel`, or another model with `generate` and `tokenizer`, got "
                f"`{type(model).__name__}`. Remove `Generate`, or wrap the model."
            )
        if model.tokenizer is None:
            raise ValueError("`Generate` needs a model with a tokenizer. Pass `tokenizer` to `HuggingFaceModel`.")

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        self._generate_if_due(Event.BATCH_CHECKPOINT, state, logger)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        self._generate_if_due(Event.EPOCH_CHECKPOINT, state, logger)

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        self._generate_if_due(Event.ITERATION_CHECKPOINT, state, logger)

    def _generate_if_due(self, event: Event, state: State, logger: Logger) -> None:
        if self.check_interval(state, event) and self.last_generate_batch != state.timestamp.batch:
            self.last_generate_batch = state.timestamp.batch
            self.generate(state, logger)

    def generate(self, state: State, logger: Logger) -> None:
        """Continue the prompts now and log the table. Call it on every rank.

        Args:
            state: The state of the run.
            logger: The logger for the table.
        """
        model: Any = unwrapped_model(state.model)
        size = len(self.prompts) if self.batch_size is None else self.batch_size
        device = state.device._device
        on_gpu = device.type == "cuda"
        precision = get_precision_context(
            state.precision, state.precision_config, fp8_autocast_enabled=False, device_type=device.type
        )
        generations: list[str] = []
        devices = [torch.cuda.current_device()] if on_gpu else []
        fork_rng, tokenizer = torch.random.fork_rng(devices), model.tokenizer
        with torch.no_grad(), model_eval_mode(state.model), fork_rng, precision, _pad_left(tokenizer):
            for start in range(0, len(self.prompts), size):
                generations += self._continue(self.prompts[start : start + size], state, model, tokenizer)
        if dist.get_global_rank() == 0:
            rows = [[prompt, text] for prompt, text in zip(self.prompts, generations, strict=True)]
            logger.log_table(columns=["prompt", "generation"], rows=rows, name="generations")

    def _continue(self, prompts: list[str], state: State, model: Any, tokenizer: Any) -> list[str]:
        encoded = tokenizer(prompts, return_tensors="pt", padding=True)
        tokens = state.device.tensor_to_device(encoded["input_ids"])
        mask = state.device.tensor_to_device(encoded["attention_mask"])
        output = model.generate(tokens, attention_mask=mask, **self.generate_kwargs)
        config = getattr(model, "config", None)
        if not getattr(config, "is_encoder_decoder", False):  # the output starts with the prompt
            output = output[:, tokens.shape[1] :]
        texts: list[str] = tokenizer.batch_decode(output, skip_special_tokens=True)
        return texts


@contextmanager
def _pad_left(tokenizer: Any) -> Iterator[None]:
    """Pad on the left within the body."""
    side, token = tokenizer.padding_side, tokenizer.pad_token
    tokenizer.padding_side = "left"
    if token is None:
        tokenizer.pad_token = tokenizer.eos_token
    try:
        yield
    finally:
        tokenizer.padding_side = side
        if token is None:
            tokenizer.pad_token = None
