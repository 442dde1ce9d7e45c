"""Names of earlier releases and of other trainers, and what to write instead of them."""

from __future__ import annotations

import difflib
from collections.abc import Collection

_CLIPPING = "Write `algorithms=[GradientClipping(clipping_type='norm', clipping_threshold=...)]`."
_FSDP = "Write `parallelism_config={'fsdp': {...}}`."
_LAUNCH = "Write `device='gpu'`, and start one process for each GPU: `composer -n 8 script.py`."
_MICROBATCH = (
    "Write `device_train_microbatch_size=...`, the number of samples in each forward pass. The loader yields whole "
    "batches."
)
_NEVER = "Use `eval_interval=0`, formerly -1, to never evaluate."

REMOVED_ARGUMENTS = {
    "fsdp_config": _FSDP,
    "fsdp_auto_wrap": "Write `parallelism_config={'fsdp': {'auto_wrap': ...}}`.",
    "load_fsdp_monolith_rank0_only": "Write `parallelism_config={'fsdp': {...}}` and `load_path=...`: the ranks keep "
    "only what they need of a full checkpoint.",
    "deepspeed_config": "Write `parallelism_config={'fsdp': {}}`, which shards parameters, gradients and optimizer "
    "states as ZeRO stage 3 does, or `{'fsdp': {'reshard_after_forward': False}}` for stage 2.",
    "grad_accum": _MICROBATCH,
    "grad_clip_norm": _CLIPPING,
    "validate_every_n_epochs": f"Write `eval_interval='...ep'`. {_NEVER}",
    "validate_every_n_batches": f"Write `eval_interval='...ba'`. {_NEVER}",
    "compute_training_metrics": "Return the metrics to compute from the model's `get_metrics(is_train=True)`.",
    "log_destinations": "Write `loggers=[...]`.",
    "logger_destinations": "Write `loggers=[...]`.",
    "load_logger_destination": "Write `load_object_store=...`.",
}
"""Arguments of earlier releases of the Trainer."""

ARGUMENTS_OF_OTHERS = {
    "accelerator": "Write `device='gpu'`.",
    "accumulate_grad_batches": _MICROBATCH,
    "args": "Write `max_duration=...`, `device=...` and the other arguments of the `Trainer`.",
    "batch_size": "Write `train_dataloader=torch.utils.data.DataLoader(dataset, batch_size=...)`.",
    "bf16": "Write `precision='amp_bf16'`.",
    "check_val_every_n_epoch": "Write `eval_interval='...ep'`.",
    "ckpt_path": "Write `load_path=...` or `autoresume=True`.",
    "compute_metrics": "Write `metrics=...`.",
    "criterion": "Write `loss=...`.",
    "data_collator": "Write `train_dataloader=torch.utils.data.DataLoader(dataset, collate_fn=...)`.",
    "datamodule": "Write `train_dataloader=...` and `eval_dataloader=...`.",
    "default_root_dir": "Write `save_folder=...`.",
    "devices": _LAUNCH,
    "enable_checkpointing": "Write `save_folder=...`.",
    "enable_progress_bar": "Write `progress_bar=...`.",
    "epochs": "Write `max_duration='...ep'`.",
    "eval_dataset": "Write `eval_dataloader=torch.utils.data.DataLoader(dataset, batch_size=...)`.",
    "eval_steps": "Write `eval_interval='...ba'`.",
    "fast_dev_run": "Write `max_duration='1ba'` and `eval_subset_num_batches=1`.",
    "fp16": "Write `precision='amp_fp16'`.",
    "gradient_accumulation_steps": _MICROBATCH,
    "gradient_clip_val": _CLIPPING,
    "gpus": _LAUNCH,
    "learning_rate": "Write `optimizers=lambda parameters: torch.optim.AdamW(parameters, lr=...)`.",
    "limit_train_batches": "Write `train_subset_num_batches=...`.",
    "limit_val_batches": "Write `eval_subset_num_batches=...`.",
    "logger": "Write `loggers=[...]`.",
    "log_every_n_steps": "Write `console_log_interval='...ba'`.",
    "loss_fn": "Write `loss=...`.",
    "lr": "Write `optimizers=lambda parameters: torch.optim.AdamW(parameters, lr=...)`.",
    "lr_scheduler": "Write `schedulers=...`.",
    "lr_schedulers": "Write `schedulers=...`.",
    "max_epochs": "Write `max_duration='...ep'`.",
    "max_grad_norm": _CLIPPING,
    "max_steps": "Write `max_duration='...ba'`.",
    "max_time": "Write `max_duration='...h'`.",
    "num_epochs": "Write `max_duration='...ep'`.",
    "num_train_epochs": "Write `max_duration='...ep'`.",
    "optimizer": "Write `optimizers=...`.",
    "output_dir": "Write `save_folder=...`.",
    "per_device_train_batch_size": "Write `train_dataloader=torch.utils.data.DataLoader(dataset, batch_size=...)`.",
    "report_to": "Write `loggers=[...]`.",
    "resume_from_checkpoint": "Write `load_path=...` or `autoresume=True`.",
    "save_steps": "Write `save_interval='...ba'`.",
    "scheduler": "Write `schedulers=...`.",
    "strategy": "Write `parallelism_config={'fsdp': {...}}`, or nothing for DDP.",
    "torch_compile": "Write `compile_config={}`.",
    "train_dataloaders": "Write `train_dataloader=...`.",
    "train_dataset": "Write `train_dataloader=torch.utils.data.DataLoader(dataset, batch_size=...)`.",
    "train_loader": "Write `train_dataloader=...`.",
    "use_cpu": "Write `device='cpu'`.",
    "val_check_interval": "Write `eval_interval='...ba'`.",
    "val_dataloader": "Write `eval_dataloader=...`.",
    "val_dataloaders": "Write `eval_dataloader=...`.",
    "val_loader": "Write `eval_dataloader=...`.",
    "warmup_steps": "Write `schedulers=...`, such as `LinearWithWarmupScheduler(t_warmup='...ba')`.",
    "weight_decay": "Write `optimizers=lambda parameters: torch.optim.AdamW(parameters, weight_decay=...)`.",
}
"""Arguments of other trainers."""

METHODS_OF_OTHERS = {
    "evaluate": "Call `eval()`.",
    "test": "Call `eval(eval_dataloader=...)`.",
    "train": "Call `fit()`.",
    "validate": "Call `eval()`.",
}
"""Methods of other trainers."""


def explain_argument(name: str, known: Collection[str]) -> str:
    """Return what to write instead of a name that is not an argument of the `Trainer`.

    Args:
        name: The name.
        known: The names of the arguments.
    """
    if name in REMOVED_ARGUMENTS:
        return f"`{name}` is not an argument of the `Trainer` any more. {REMOVED_ARGUMENTS[name]}"
    near = difflib.get_close_matches(name, known, 1)
    hint = f"Did you mean `{near[0]}`?" if near else "`help(Trainer)` lists its arguments."
    return f"`{name}` is not an argument of the `Trainer`. {ARGUMENTS_OF_OTHERS.get(name, hint)}"
