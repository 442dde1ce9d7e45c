"""What an exported model takes and returns, and its graph."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from composer.inference._call import Call, inputs_only
from composer.inference._natural import (
    DynamicAxes,
    Inputs,
    arranged_as,
    axes_of,
    names_of,
    natural,
    selected,
    small_sample,
)
from composer.inference._outputs import output_names as names_of_outputs
from composer.inference._outputs import plain_outputs, tensors_in
from composer.inference._torchscript import first_line

__all__ = ["Plan", "explained"]

Axes: TypeAlias = Mapping[str, Mapping[int, str]]


class Plan:
    """What the exported model takes and returns.

    Args:
        model: The model, in evaluation mode. It is run.
        call: How it is called.
        dynamic_axes: As in `export_for_inference`, like all others.
        input_names: The names of inputs.
        output_names: The names of outputs.

    Attributes:
        inputs: The tensors it takes, by name.
        outputs: The names of the tensors it returns.
        axes: The axes of each input whose sizes vary, with their names.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        call: Call,
        dynamic_axes: DynamicAxes | None,
        input_names: Sequence[str] | None,
        output_names: Sequence[str] | None,
    ) -> None:
        self.model = model
        self.call, outputs = inputs_only(model, selected(call, input_names), input_names or ())
        self.inputs: Inputs = names_of(self.call, input_names)
        plain = plain_outputs(outputs)
        self.outputs = names_of_outputs(plain)
        self.renamed = None if output_names is None else list(output_names)
        if self.renamed is not None:
            if len(self.renamed) != len(self.outputs) or len({*self.renamed}) != len(self.renamed):
                raise ValueError(
                    f"`output_names` must be one name for each output, of which the model has {len(self.outputs)} "
                    f"({', '.join(self.outputs)}), got {self.renamed!r}."
                )
            self.outputs = self.renamed
        self.axes: Axes = axes_of(self.call, self.inputs, dynamic_axes, self.outputs)
        self._may_be_static = dynamic_axes is None

    @property
    def inputs_text(self) -> str:
        """The inputs and their shapes."""
        texts = []
        for name, path in self.inputs.items():
            sizes = [self.axes[name].get(axis, size) for axis, size in enumerate(self.call.tensors[path].shape)]
            texts.append(f"{name} ({', '.join(map(str, sizes))})")
        return ", ".join(texts)

    def sample(self, axes: Axes) -> dict[str, torch.Tensor]:
        """Inputs of zeros.

        Args:
            axes: Those that vary.
        """
        tensors = small_sample(self.call, self.inputs, axes).tensors
        return {name: tensors[path] for name, path in self.inputs.items()}

    def exported(self, flat: bool) -> torch.export.ExportedProgram:
        """The graph.

        Args:
            flat: Whether it returns a tuple of tensors, and takes them by position.
        """
        try:
            return self._exported(flat, self.axes)
        except Exception as error:
            if not self._may_be_static or not any(self.axes.values()):
                raise explained("torch_export", error) from error
            try:
                found = self._exported(flat, {name: {} for name in self.inputs})
            except Exception as other:
                raise explained("torch_export", other) from other
            self.axes = {name: {} for name in self.inputs}
            warnings.warn(
                f"The exported model takes batches as large as the sample only: {self.inputs_text}. With a batch size "
                f"that varies it cannot be exported: {first_line(error)}",
                stacklevel=6,
            )
            return found

    def flat(self) -> torch.nn.Module:
        """A module that takes tensors by position, and returns a tuple of them."""
        return natural(self.model, self.call, self.inputs, lambda outputs: tuple(tensors_in(outputs)))

    def _exported(self, flat: bool, axes: Axes) -> torch.export.ExportedProgram:
        module = self.flat() if flat else natural(self.model, self.call, self.inputs, arranged_as(self.renamed))
        tensors = self.sample(axes)
        by_name = self.call.is_named and not flat
        dynamic = torch.export.Dim.DYNAMIC
        return torch.export.export(
            module,
            () if by_name else tuple(tensors.values()),
            tensors if by_name else {},
            dynamic_shapes={name: dict.fromkeys(axes[name], dynamic) for name in self.inputs},
            strict=False,
        )


def explained(save_format: str, error: BaseException) -> RuntimeError:
    """An error of torch's exporters, told shortly.

    Args:
        save_format: The format.
        error: The error.
    """
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = first_line(error) if cause is error else f"{first_line(error)} ({first_line(cause)})"
    hint = " Use `save_format='torchscript'`." if "__obj_flatten__" in str(error) else ""
    return RuntimeError(f"The model cannot be exported as {save_format!r}: {type(error).__name__}: {text}{hint}")
