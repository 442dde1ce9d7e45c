"""Tests of the Trainer's signature and of arguments that were removed."""

from __future__ import annotations

import inspect

import pytest

from composer.trainer import Trainer


@pytest.mark.parametrize(
    ("argument", "now"),
    [
        ("fsdp_config", "parallelism_config={'fsdp': {...}}"),
        ("fsdp_auto_wrap", "{'auto_wrap': ...}"),
        ("load_fsdp_monolith_rank0_only", "a full checkpoint"),
        ("grad_accum", "device_train_microbatch_size"),
        ("grad_clip_norm", "GradientClipping"),
        (
            "validate_every_n_epochs",
            "Write `eval_interval='...ep'`. Use `eval_interval=0`, formerly -1, to never evaluate.",
        ),
        ("validate_every_n_batches", "eval_interval='...ba'"),
        ("compute_training_metrics", "get_metrics(is_train=True)"),
        ("log_destinations", "loggers=[...]"),
        ("logger_destinations", "loggers=[...]"),
        ("load_logger_destination", "load_object_store=..."),
    ],
)
def test_arguments_of_earlier_releases_are_answered(argument: str, now: str) -> None:
    with pytest.raises(TypeError, match=f"`{argument}` is not an argument of the `Trainer` any more") as caught:
        Trainer(model=None, **{argument: {}})

    assert now in str(caught.value)


def test_the_signature_that_editors_show_is_that_of_the_constructor() -> None:
    expected = list(inspect.signature(Trainer.__init__).parameters)[1:]

    assert expected == list(inspect.signature(Trainer).parameters)
    assert "max_duration" in expected
