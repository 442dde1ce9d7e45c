"""A strategy that divides optimizer states, gradients and parameters among ranks: ZeRO, by DeepSpeed.

The Trainer keeps the loop, the data, the precision of the forward pass and the checkpoints; DeepSpeed's engine computes
the gradients and steps the optimizer. Checkpoints hold whole tensors under the usual names: any stage, any number of
ranks, and a run without DeepSpeed can load them.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch

from composer.core import Algorithm, Precision, State, effects
from composer.devices import Device
from composer.trainer import RankStrategy
from composer.utils import needs_closure

_OWN_WEIGHTS = "DeepSpeed trains its own copies of the weights, so that changes of those in the model are lost."
_REFUSED = {
    effects.CLIPS_GRADIENTS: "The gradients are in shards. Write `'gradient_clipping': 1.0` in the configuration.",
    effects.WRAPS_OPTIMIZER: "DeepSpeed steps the optimizer itself, once for each batch.",
    effects.REPLACES_OPTIMIZER: "DeepSpeed needs one optimizer, which treats all parts of a tensor alike.",
    effects.CHANGES_MEMORY_FORMAT: "DeepSpeed only divides weights that are contiguous.",
    effects.FREEZES_WEIGHTS: "DeepSpeed divides the states of all trained weights before the first step.",
    effects.DISPLACES_WEIGHTS: _OWN_WEIGHTS,
    effects.PINS_NORMS: _OWN_WEIGHTS,
    effects.DECAYS_WEIGHTS: _OWN_WEIGHTS,
}
_WHOLE_WEIGHTS = "With stage 3, no rank has whole weights. Use stage 2, or `parallelism_config={'fsdp': {}}`."
_REFUSED_IN_STAGE_3 = {effects.REPLACES_LOSS: _WHOLE_WEIGHTS, effects.SWAPS_WEIGHTS: _WHOLE_WEIGHTS}
_SIZE = "It follows from the loader and `device_train_microbatch_size`: leave it out, or write 'auto'."
_OF_THE_TRAINER = {
    "optimizer": "Give the optimizer to the `Trainer`: `optimizers=...`.",
    "scheduler": "Give schedulers to the `Trainer`: `schedulers=...`.",
    "amp": "Write `precision='amp_fp16'` or 'amp_bf16'.",
    "train_batch_size": _SIZE,
    "train_micro_batch_size_per_gpu": _SIZE,
    "gradient_accumulation_steps": _SIZE,
}
_DEFAULTS = {
    "gradient_clipping": 0.0,  # DeepSpeed itself clips to 1 if nothing is said
    "steps_per_print": None,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
_NEED_WHOLE_TENSORS = {"Adafactor", "LAMB", "LARS", "Lamb", "Lars", "Muon"}  # by name: they are in many libraries
_PRECISIONS = {Precision.AMP_FP16: "fp16", Precision.AMP_BF16: "bf16"}


class DeepSpeed(RankStrategy):
    """Divide optimizer states (ZeRO stage 1), gradients (2) and parameters (3) among the ranks, by DeepSpeed.

    `Trainer(parallelism_config={"deepspeed": config})`. The configuration is DeepSpeed's own, without the sizes of
    batches, which the Trainer knows: these are left out or "auto". "fp16" and "bf16" must not contradict its precision.
    Sources: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    arXiv:1910.02054; https://www.deepspeed.ai/docs/config-json/.

    With `precision="amp_bf16"` the weights stay in fp32, as without DeepSpeed; a section "bf16" keeps them in bf16,
    with copies in fp32 in the optimizer. `precision="amp_fp16"` keeps them in fp16, and DeepSpeed scales the loss.

    Args:
        config: The configuration, or the path of a JSON file.

    Raises:
        TypeError: `config` is neither a dict nor a path.
        ValueError: The stage is not 1, 2 or 3, a precision is no dict, or a section is the Trainer's; all are named.
    """

    averages_in_backward = True
    scales_losses = True

    def __init__(self, config: Mapping[str, Any] | str | os.PathLike[str]) -> None:
        if isinstance(config, (str, os.PathLike)):
            config = json.loads(Path(config).expanduser().read_text(encoding="utf-8"))
        if not isinstance(config, Mapping):
            raise TypeError(f"The configuration of DeepSpeed must be a dict or the path of one, got {config!r}.")
        self._config: dict[str, Any] = copy.deepcopy({key: value for key, value in config.items() if value != "auto"})
        problems = [f"{key!r} must not be there. {way}" for key, way in _OF_THE_TRAINER.items() if key in self._config]
        problems += [
            f"{key!r} must be a dict such as {{'enabled': True}}, got {self._config[key]!r}."
            for key in _PRECISIONS.values()
            if not isinstance(self._config.get(key, {}), Mapping)
        ]
        zero = config.get("zero_optimization")
        self._stage: Any = zero.get("stage") if isinstance(zero, Mapping) else None
        if self._stage not in (1, 2, 3):
            problems.append(
                f"'zero_optimization' must have a 'stage' of 1, 2 or 3, got {zero!r}. Without stages, leave DeepSpeed "
                f"out: DDP is the default."
            )
        if problems:
            raise ValueError(f"The configuration of DeepSpeed is wrong. {' '.join(problems)}")
        self.collective_forward = self._stage == 3
        self._precision: Precision | None = None
        self._engine: Any = None

    # ---- at construction ----

    def connect(self, device: Device, timeout: float) -> None:
        """Prepare the exchange with other ranks.

        Raises:
            ValueError: DeepSpeed works on another kind of device.
        """
        from deepspeed.accelerator import get_accelerator  # DeepSpeed takes seconds to import, and prints what it finds

        ours, theirs = device.torch_type, get_accelerator().device_name().partition(":")[0]
        if ours != theirs:
            raise ValueError(
                f"`device` must be the one that DeepSpeed works on, {theirs!r}, got {ours!r}. Set the environment "
                f"variable `DS_ACCELERATOR={ours}` before Python starts."
            )
        super().connect(device, timeout)

    def refusal(self, algorithm: Algorithm) -> str | None:
        provided = algorithm.placement.provides
        if algorithm.backwards_create_graph:
            return "DeepSpeed frees the graph in its backward pass."
        if effects.AVERAGES_WEIGHTS in provided and effects.SWAPS_WEIGHTS not in provided:
            return _OWN_WEIGHTS  # the average may become the weights that are trained
        refused = _REFUSED | (_REFUSED_IN_STAGE_3 if self._stage == 3 else {})
        return next((reason for effect, reason in refused.items() if effect in provided), None)

    def check_precision(self, precision: Precision) -> None:
        """Fill in and check the sections "fp16" and "bf16".

        Raises:
            ValueError: They contradict the precision, or the engine was made for another one.
        """
        if self._precision is not None and precision is not self._precision:
            raise ValueError(
                f"`precision` must stay {self._precision.value!r} with DeepSpeed, got {precision.value!r}. Make a new "
                f"`Trainer`."
            )
        if precision is Precision.AMP_FP8:
            raise ValueError("`precision` must be 'fp32', 'amp_fp16' or 'amp_bf16' with DeepSpeed, got 'amp_fp8'.")
        self._precision = precision
        for section in ("fp16", "bf16"):
            own = self._config.setdefault(section, {})
            fits = _PRECISIONS.get(precision) == section
            needed = fits and section == "fp16"  # bf16 may leave the weights in fp32
            enabled = own.get("enabled", needed)
            enabled = fits if enabled == "auto" else enabled
            if (enabled and not fits) or (needed and not enabled):
                raise ValueError(
                    f"`precision` is {precision.value!r}, but the configuration of DeepSpeed has "
                    f"`{{{section!r}: {own!r}}}`. Leave the section out."
                )
            own["enabled"] = bool(enabled)

    def shard(self, state: State) -> None:
        """Check what the engine needs; it is made by `wrap`, when a checkpoint is loaded.

        Raises:
            ValueError: The run has not one optimizer that treats each weight alike, or searches for a microbatch size.
        """
        self._state = state
        optimizers = state.optimizers
        if len(optimizers) != 1 or needs_closure(optimizers[0]):
            kinds = ", ".join(type(each).__name__ for each in optimizers) or "none"
            raise ValueError(f"`optimizers` must be one that needs no closure with DeepSpeed, got {kinds}.")
        if (kind := type(optimizers[0]).__name__) in _NEED_WHOLE_TENSORS:
            raise ValueError(
                f"`optimizers` must treat each weight alike with DeepSpeed, which gives them flat parts of many "
                f"tensors, got {kind}. Use AdamW or SGD, or `parallelism_config={{'fsdp': {{}}}}`."
            )
        if state.auto_microbatching:
            raise ValueError(
                "`device_train_microbatch_size` must not be 'auto' with DeepSpeed, whose gradients of a pass that runs "
                "out of memory cannot be taken back. Give a number."
            )
        size = state.device_train_microbatch_size or getattr(state.train_dataloader, "batch_size", None) or 1
        self._config["train_micro_batch_size_per_gpu"] = int(size)
        # The loop counts batches and weighs microbatches itself, however many there are.
        self._config |= {"gradient_accumulation_steps": 1, "managed_gradient_accumulation": False}

    def wrap(self, model: torch.nn.Module, algorithms: Iterable[Algorithm]) -> torch.nn.Module:
        """Hand the model and its optimizer to an engine of DeepSpeed; return the model."""
        import deepspeed

        model = super().wrap(model, algorithms)
        (optimizer,) = self._state.optimizers
        groups = [[*group["params"]] for group in optimizer.param_groups]
        loaded = {parameter: dict(states) for parameter, states in optimizer.state.items()}
        optimizer.state.clear()
        config = _DEFAULTS | _chosen(self._config)
        with self.report_lost_ranks(), torch.random.fork_rng():  # training begins with the same random numbers
            self._engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=config, dist_init_required=False
            )
        outer = _ZeroOptimizer(self._engine, optimizer, groups, self._stage)
        outer.restore(loaded)
        self._state.optimizers = outer

        def gather(*args: Any) -> None:  # a method would take the engine with it when the model is copied
            self._gather(*args)

        model.register_state_dict_post_hook(gather)  # type: ignore[no-untyped-call]
        return model

    def _gather(self, model: torch.nn.Module, found: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Replace weights in shards, and those of half precision, by whole ones in fp32. A collective operation."""
        import deepspeed
        from deepspeed.utils import safe_get_full_fp32_param

        if self._engine is None and self._stage == 3:
            raise RuntimeError(
                "The weights of the model are in shards, which only the `Trainer` could gather, and it is closed. Call "
                "`trainer.save_checkpoint(...)` or `model.state_dict()` on all ranks before `trainer.close()`."
            )
        for name, parameter in model.named_parameters():
            if prefix + name not in found:
                continue
            if self._stage == 3 and not parameter.requires_grad:
                with deepspeed.zero.GatheredParameters([parameter]):
                    found[prefix + name] = parameter.detach().clone()
            elif self._stage == 3:
                found[prefix + name] = safe_get_full_fp32_param(parameter)
            elif self._engine is not None and parameter.requires_grad and parameter.dtype is not torch.float32:
                whole = safe_get_full_fp32_param(parameter)
                if torch.equal(whole.to(parameter.dtype), parameter):  # otherwise an average is in the model
                    found[prefix + name] = whole

    # ---- in a step ----

    def forward(self, model: torch.nn.Module, batch: Any) -> Any:
        return self._engine(batch)

    def backward(self, loss: torch.Tensor, create_graph: bool) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)

    # ---- between steps ----

    def close(self) -> None:
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None
        super().close()


class _ZeroOptimizer(torch.optim.Optimizer):
    """The optimizer of the run: it is stepped by the engine, and its state is that of the whole tensors.

    Args:
        engine: DeepSpeed's engine.
        base: The user's optimizer, whose parameters DeepSpeed has replaced by its own shards.
        groups: The parameters of the model, by parameter group.
        stage: The stage of ZeRO.
    """

    def __init__(
        self, engine: Any, base: torch.optim.Optimizer, groups: Sequence[list[torch.nn.Parameter]], stage: int
    ) -> None:
        self._engine, self.base_optimizer, self._parameters, self._stage = engine, base, groups, stage
        super().__init__([parameter for group in groups for parameter in group], {})
        self.param_groups = [
            _Group(shards, parameters)  # type: ignore[misc]  # torch only uses it as a mapping
            for shards, parameters in zip(base.param_groups, groups, strict=True)
        ]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step with the gradients of all ranks, and clear them."""
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine clears the gradients after each step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole tensors, in torch's form. All ranks gather them together."""
        from deepspeed.utils import safe_get_full_optimizer_state

        states: dict[int, dict[str, Any]] = {}
        groups, numbers = [], itertools.count()
        for group, parameters, shards in zip(self.param_groups, self._parameters, self._shards(), strict=True):
            indices = [next(numbers) for _ in parameters]
            groups.append({**group, "params": indices})
            own: Mapping[str, Any] = next((self.base_optimizer.state[each] for each in shards), {})
            for index, parameter in zip(indices, parameters, strict=True):
                if own and parameter.requires_grad:
                    states[index] = {
                        key: safe_get_full_optimizer_state(parameter, key)
                        if _is_divided(value)
                        else copy.deepcopy(value)
                        for key, value in own.items()
                    }
        return {"state": states, "param_groups": groups}

    def restore(self, loaded: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Divide states that were loaded before the engine was made.

        Args:
            loaded: The states by parameter of the model.
        """
        from deepspeed.utils import lazy_init_hp_params_optimizer_state, safe_set_full_optimizer_state

        for parameters, shards in zip(self._parameters, self._shards(), strict=True):
            example = next((loaded[each] for each in parameters if loaded.get(each)), None)
            if example is None:
                continue
            for shard in shards:
                self.base_optimizer.state[shard] = {
                    key: torch.zeros_like(shard) if _is_divided(value) else copy.deepcopy(value)
                    for key, value in example.items()
                }
                if self._stage < 3:
                    lazy_init_hp_params_optimizer_state(parameters, shard, self.base_optimizer.state)
            for parameter in parameters:
                for key, value in loaded.get(parameter, {}).items():
                    if _is_divided(value):
                        safe_set_full_optimizer_state(parameter, value.detach().float(), key)

    def _shards(self) -> list[list[torch.Tensor]]:
        """Return the tensors that the base optimizer steps on this rank, by parameter group."""
        zero = self._engine.optimizer
        if self._stage < 3:
            return [[*group["params"]] for group in self.base_optimizer.param_groups]
        shards: list[list[torch.Tensor]] = [[] for _ in self._parameters]
        for i, shard in enumerate(zero.fp32_partitioned_groups_flat):
            shards[zero.sub_group_to_group_id[i]].append(shard)
        return shards


class _Group(MutableMapping[str, Any]):
    """A parameter group of the base optimizer, with the parameters of the model in place of DeepSpeed's shards."""

    def __init__(self, shards: dict[str, Any], parameters: list[torch.nn.Parameter]) -> None:
        self._shards, self._parameters = shards, parameters

    def __getitem__(self, key: str) -> Any:
        return self._parameters if key == "params" else self._shards[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._shards[key] = value

    def __delitem__(self, key: str) -> None:
        del self._shards[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


def _is_divided(value: Any) -> bool:
    """Return True for a state that has an element for each weight; a step count has no dimension."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _chosen(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the entries that are "auto": DeepSpeed has defaults for these."""
    return {
        key: _chosen(value) if isinstance(value, Mapping) else value for key, value in config.items() if value != "auto"
    }
