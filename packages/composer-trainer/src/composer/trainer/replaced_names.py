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
    "batch_size": "Write `train_dataloader=torch.utils.data.DataLoader(dataset, batch_size=...)`.",
    "bf16": "Write `precision='amp_bf16'`.",
    "check_val_every_n_epoch": "Write `eval_interval='...ep'`.",
    "ckpt_path": "Write `load_path=...` or `autoresume=True`.",
    "criterion": "Write `loss=...`.",
    "devices": _LAUNCH,
    "epochs": "Write `max_duration='...ep'`.",
    "fp16": "Write `precision='amp_fp16'`.",
    "gradient_accumulation_steps": _MICROBATCH,
    "gradient_clip_val": _CLIPPING,
    "limit_train_batches": "Write `train_subset_num_batches=...`.",
    "limit_val_batches": "Write `eval_subset_num_batches=...`.",
    "loss_fn": "Write `loss=...`.",
    "lr": "Write `optimizers=lambda parameters: torch.optim.AdamW(parameters, lr=...)`.",
    "max_epochs": "Write `max_duration='...ep'`.",
    "max_grad_norm": _CLIPPING,
    "max_steps": "Write `max_duration='...ba'`.",
    "num_epochs": "Write `max_duration='...ep'`.",
    "per_device_train_batch_size": "Write `train_dataloader=torch.utils.data.DataLoader(dataset, batch_size=...)`.",
    "resume_from_checkpoint": "Write `load_path=...` or `autoresume=True`.",
    "strategy": "Write `parallelism_config={'fsdp': {...}}`, or nothing for DDP.",
    "torch_compile": "Write `compile_config={}`.",
    "val_check_interval": "Write `eval_interval='...ba'`.",
    "val_dataloader": "Write `eval_dataloader=...`.",
}
"""Arguments of other trainers."""


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
