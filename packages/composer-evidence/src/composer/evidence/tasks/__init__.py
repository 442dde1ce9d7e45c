"""The built-in tasks by name; their modules are imported when they are used."""

from __future__ import annotations

TASKS = {
    "digits": "composer.evidence.tasks.images:digits",
    "fashion_mnist": "composer.evidence.tasks.images:fashion_mnist",
    "fashion_mnist_long": "composer.evidence.tasks.images:fashion_mnist_long",
    "cifar10": "composer.evidence.tasks.images:cifar10",
    "shakespeare": "composer.evidence.tasks.text:shakespeare",
    "shakespeare_larger": "composer.evidence.tasks.text:shakespeare_larger",
    "python_help": "composer.evidence.tasks.text:python_help",
    **{f"records_{size}": f"composer.evidence.tasks.text:records_{size}" for size in ("small", "medium", "large")},
}
"""Name -> `module:function` that returns the task."""
