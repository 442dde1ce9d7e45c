"""Record a run as a result of the MLPerf Training benchmark."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, SupportsIndex

import psutil
import torch

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import check_finite, dist, int_at_least, plain_number
from composer.utils.misc import cpu_model

log = logging.getLogger(__name__)

_STATUS_NAMES = {
    "onprem": "Available on-premise",
    "cloud": "Available cloud",
    "preview": "Preview",
    "research": "Research, Development, or Internal (RDI)",
}
"""The status of a submission, and of its system."""

_MANUAL_FIELDS = (
    "host_processor_caches host_processor_interconnect host_storage_type host_storage_capacity host_networking "
    "host_networking_topology host_memory_configuration accelerator_host_interconnect accelerator_frequency "
    "accelerator_on-chip_memories accelerator_memory_configuration accelerator_interconnect "
    "accelerator_interconnect_topology cooling hw_notes sw_notes"
).split()


class MLPerfCallback(Callback):
    """Writes the log of a run that a submission to MLPerf Training requires, and a description of the system.

    ```
    root_folder/results/<system_name>/<benchmark>/result_<index>.txt
    root_folder/systems/<system_name>.json
    ```

    The log is written with the library `mlperf_logging` and can be checked with its `compliance_checker`. The run
    starts with the first call of `fit` and ends when the metric reaches its target (status "success") or that call
    returns ("aborted"); later calls, and what was trained before a loaded checkpoint, are not recorded. The description
    contains the fields that can be read from the machine; the others are empty and must be filled in by hand. An
    existing description is not changed. An existing log with this index is renamed to `result_<index>.txt.old`.

    **Events** INIT, FIT_START, EPOCH_START, EPOCH_END, EVAL_START, EVAL_END, FIT_END, CLOSE.
    **Reads** `state.eval_metrics[metric_label][metric_name]`, computed after each evaluation. **Writes** the files, on
    rank 0. **Requires** `pip install 'composer-compat[mlperf]'`.

    Args:
        root_folder: The folder of the submission.
        index: The number of the run, from 0.
        benchmark: The name of the benchmark, such as "resnet" or "bert".
        target: The value of the metric at which the run succeeds; a value equal to it is enough.
        division: "open". The closed division requires hyperparameters of each benchmark, which are not recorded.
        metric_name: The name of the metric.
        metric_label: The label of the evaluator.
        submitter: The organization that submits.
        system_name: The name of the system; None: a generated name such as "8xNVIDIA_H100_composer".
        status: "onprem", "cloud", "preview" or "research".
        cache_clear_cmd: A command that clears the caches of the system, as the rules require; it runs on each node at
            INIT. A string is run by the shell. None: no command, and the log is not compliant.
        host_processors_per_node: Processors per node; None: read from the machine.
        exit_at_target: Stop training when the target is reached.

    Attributes:
        filename: The path of the log; None before INIT.
        success: True if the target was reached.

    Raises:
        ValueError: An argument is invalid; at the end of an evaluation, if there is no such metric.
        ModuleNotFoundError: `mlperf_logging` is not installed.
        RuntimeError: At INIT, if the command fails.

    Differs: the status of the system is written as the rules require since version 4.
    """

    def __init__(
        self,
        root_folder: str | os.PathLike[str],
        index: SupportsIndex,
        benchmark: str = "resnet",
        target: float = 0.759,
        division: str = "open",
        metric_name: str = "MulticlassAccuracy",
        metric_label: str = "eval",
        submitter: str = "MosaicML",
        system_name: str | None = None,
        status: str = "onprem",
        cache_clear_cmd: str | Sequence[str] | None = None,
        host_processors_per_node: int | None = None,
        exit_at_target: bool = False,
    ) -> None:
        check_finite(target=target)
        if host_processors_per_node is not None:
            check_finite(host_processors_per_node=host_processors_per_node)
        number = int_at_least("index", index, 0, hint="It is the number of the run, from 0.")
        _check_arguments(benchmark, division, status, system_name)
        try:
            self._mllog: Any = import_module("mlperf_logging.mllog.mllog")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "`MLPerfCallback` needs `mlperf_logging`. Run `pip install 'composer-compat[mlperf]'`.",
                name=error.name,
            ) from error
        self.root_folder, self.index = Path(root_folder).expanduser(), number
        self.benchmark, self.target, self.division = benchmark, float(target), division
        self.metric_name, self.metric_label = metric_name, metric_label
        self.submitter, self.system_name, self.status = submitter, system_name, status
        self.cache_clear_cmd, self.exit_at_target = cache_clear_cmd, exit_at_target
        self.host_processors_per_node = plain_number(host_processors_per_node)
        self.filename: Path | None = None
        self.success = False
        self._writer: Any = None  # only on rank 0
        self._phase = "before"  # "before", "in" or "after" the recorded run

    def init(self, state: State, logger: Logger) -> None:
        self._close()
        self.success, self._phase = False, "before"
        accelerator = _accelerator(state.device.name == "gpu")
        name = self.system_name or _default_system_name(accelerator)
        self.filename = self.root_folder / "results" / name / self.benchmark / f"result_{self.index}.txt"
        if self.cache_clear_cmd is not None:
            if dist.get_local_rank() == 0:
                command = self.cache_clear_cmd
                done = subprocess.run(
                    command, shell=isinstance(command, str), capture_output=True, text=True, check=False
                )
                if done.returncode != 0:
                    raise RuntimeError(
                        f"`cache_clear_cmd` {command!r} failed with status {done.returncode}: "
                        f"{done.stderr.strip() or 'no message'}. The caches are not cleared. Correct the command, or "
                        f"remove it."
                    )
            dist.barrier()
        if dist.get_global_rank() != 0:
            return
        self._open(self.filename)
        description = self.root_folder / "systems" / f"{name}.json"
        if not description.exists():
            description.parent.mkdir(parents=True, exist_ok=True)
            known = self.submitter, self.division, self.status, name, self.host_processors_per_node
            description.write_text(json.dumps(_describe(accelerator, *known), indent=4) + "\n", encoding="utf-8")
        if self.cache_clear_cmd is not None:
            self._event("cache_clear", True)
        self._event("init_start", kind="start")
        self._event("submission_benchmark", self.benchmark)
        self._event("submission_division", self.division)
        self._event("submission_org", self.submitter)
        self._event("submission_platform", name)
        self._event("submission_status", self.status)
        self._event("seed", state.rank_zero_seed)

    def fit_start(self, state: State, logger: Logger) -> None:
        if self._phase != "before":
            return
        batch_size = getattr(state.train_dataloader, "batch_size", None)
        evaluated = [e.dataloader.dataloader for e in state.evaluators if e.label == self.metric_label]
        counts = {
            "train_samples": _num_samples(state.train_dataloader),
            "eval_samples": _num_samples(evaluated[0]) if evaluated else None,
            "global_batch_size": None if batch_size is None else batch_size * dist.get_world_size(),
        }
        for key, value in counts.items():
            if value is not None:
                self._event(key, value)
        self._event("init_stop", kind="end")
        self._event("run_start", kind="start")
        self._phase = "in"

    def epoch_start(self, state: State, logger: Logger) -> None:
        self._within(state, "epoch_start", "start", epoch=state.timestamp.epochs + 1)

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._within(state, "epoch_stop", "end", epoch=state.timestamp.epochs)

    def eval_start(self, state: State, logger: Logger) -> None:
        if state.dataloader_label == self.metric_label:
            self._within(state, "eval_start", "start")

    def eval_end(self, state: State, logger: Logger) -> None:
        if state.dataloader_label != self.metric_label or self._phase != "in":
            return
        metrics = state.eval_metrics[self.metric_label]
        if self.metric_name not in metrics:
            raise ValueError(
                f"`metric_name` must be a metric of {self.metric_label!r}, got {self.metric_name!r}. Known metrics: "
                f"{', '.join(map(repr, metrics)) or 'none'}."
            )
        # Computed on every rank, because it is a collective operation.
        value = float(metrics[self.metric_name].compute())
        self._within(state, "eval_accuracy", "event", value)
        self._within(state, "eval_stop", "end")
        if value >= self.target:
            self.success = True
            self._end(state)
            if self.exit_at_target:
                state.stop_training()

    def fit_end(self, state: State, logger: Logger) -> None:
        if self._phase == "in":
            self._end(state)

    def close(self, state: State, logger: Logger) -> None:
        if self._phase == "in":  # training failed
            self._end(state)
        self._close()

    def post_close(self) -> None:
        self._close()

    def _end(self, state: State) -> None:
        self._within(state, "run_stop", "end", status="success" if self.success else "aborted")
        self._phase = "after"
        self._close()

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            os.replace(path, path.with_name(f"{path.name}.old"))
            log.warning("The existing %s was renamed to %s.old.", path, path.name)
        writer = logging.Logger("composer.mlperf", logging.INFO)  # noqa: LOG001 - no other records in the file
        writer.addHandler(logging.FileHandler(path, encoding="utf-8"))
        here = re.escape(str(Path(__file__).parent))
        self._writer = self._mllog.MLLogger(logger=writer, root_dir=here)

    def _close(self) -> None:
        if self._writer is not None:
            for handler in list(self._writer.logger.handlers):
                self._writer.logger.removeHandler(handler)
                handler.close()
            self._writer = None

    def _within(
        self, state: State, key: str, kind: str, value: Any = None, epoch: int | None = None, **metadata: Any
    ) -> None:
        """Record an event of the run with the current training time."""
        if self._phase != "in":
            return
        time = state.timestamp
        if epoch is None:  # the current epoch, or the one that was just completed
            epoch = time.epochs + (time.batches_in_epoch > 0)
        self._event(key, value, kind, {"epoch_num": epoch, "samples_count": time.samples, **metadata})

    def _event(self, key: str, value: Any = None, kind: str = "event", metadata: dict[str, Any] | None = None) -> None:
        if self._writer is not None:
            getattr(self._writer, kind)(key=key, value=value, metadata=metadata)


def get_system_description(
    submitter: str,
    division: str,
    status: str,
    system_name: str | None = None,
    host_processors_per_node: int | None = None,
) -> dict[str, str]:
    """Return the description of this system that a submission to MLPerf requires.

    Args:
        submitter: The organization that submits.
        division: The division, such as "open".
        status: "onprem", "cloud", "preview" or "research".
        system_name: The name of the system; None: a generated name such as "8xNVIDIA_H100_composer".
        host_processors_per_node: Processors per node; None: read from the machine.

    Returns:
        The fields by name. Those that cannot be read from the machine are empty and must be filled in by hand.

    Raises:
        ValueError: `status` is unknown.
    """
    _check_status(status)
    accelerator = _accelerator(torch.cuda.is_available())
    name = system_name or _default_system_name(accelerator)
    return _describe(accelerator, submitter, division, status, name, host_processors_per_node)


def _check_status(status: str) -> None:
    if status not in _STATUS_NAMES:
        raise ValueError(f"`status` must be one of {', '.join(map(repr, _STATUS_NAMES))}, got {status!r}.")


def _check_arguments(benchmark: str, division: str, status: str, system_name: str | None) -> None:
    if division != "open":
        raise ValueError(
            f"`division` must be 'open', got {division!r}. The closed division requires hyperparameters of each "
            f"benchmark, which are not recorded."
        )
    _check_status(status)
    for argument, name in (("benchmark", benchmark), ("system_name", system_name)):
        if name is not None and not re.fullmatch(r"[\w.+-]+", name):
            raise ValueError(f"`{argument}` must be a folder name without spaces, got {name!r}.")


def _num_samples(loader: Any) -> int | None:
    """Return the number of samples in the dataset of a dataloader, if it is known."""
    data = getattr(loader, "dataset", None)
    try:
        return len(data)  # type: ignore[arg-type]
    except TypeError:
        log.warning("The number of samples in %r is unknown, so it is not recorded for MLPerf.", loader)
        return None


def _default_system_name(accelerator: str) -> str:
    """Return a name such as "8xNVIDIA_H100_composer"."""
    device = re.sub(r"[^\w.+-]+", "_", accelerator or "cpu")
    return f"{dist.get_world_size()}x{device}_composer"


def _describe(
    accelerator: str, submitter: str, division: str, status: str, name: str, processors: int | None
) -> dict[str, str]:
    """Return the fields of a description; unknown fields are empty."""
    listing = Path("/proc/cpuinfo")  # only Linux has it
    sockets = set(re.findall(r"^physical id.*$", listing.read_text() if listing.exists() else "", re.MULTILINE))
    memory = torch.cuda.get_device_properties(0).total_memory if accelerator else 0
    frequency: Any = psutil.cpu_freq()  # None if it is unknown
    cuda = f", CUDA {torch.version.cuda}" if accelerator else ""
    known: dict[str, object] = {
        "submitter": submitter,
        "division": division,
        "status": _STATUS_NAMES[status],
        "system_name": name,
        "number_of_nodes": dist.get_world_size() // dist.get_local_world_size(),
        "host_processors_per_node": processors or len(sockets) or "",
        "host_processor_model_name": cpu_model(),
        "host_processor_core_count": psutil.cpu_count(logical=False) or "",
        "host_processor_vcpu_count": psutil.cpu_count() or "",
        "host_processor_frequency": f"{frequency.max or frequency.current:.0f} MHz" if frequency else "",
        "host_memory_capacity": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "accelerators_per_node": dist.get_local_world_size() if accelerator else 0,
        "accelerator_model_name": accelerator,
        "accelerator_memory_capacity": f"{memory / 2**30:.0f} GiB" if memory else "",
        "framework": f"PyTorch {torch.__version__}",
        "other_software_stack": f"Python {platform.python_version()}{cuda}",
        "operating_system": platform.platform(),
    }
    return {**{field: str(value) for field, value in known.items()}, **dict.fromkeys(_MANUAL_FIELDS, "")}


def _accelerator(uses_gpu: bool) -> str:
    return torch.cuda.get_device_name() if uses_gpu else ""
