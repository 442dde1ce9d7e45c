"""Run the code blocks of docstrings: literal blocks, which follow `::`, and fenced blocks of `python`.

    python -m tools.docstring_blocks packages/composer-core/src/composer/core/engine.py

The blocks of a docstring run from top to bottom in one namespace, which has the names of the module, as for doctests,
and those of `assumed_names`; functions that they define as tests are called. A literal block that is not Python, such
as a listing of files, is ignored.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from tools.readme_blocks import Block, blocks
from tools.workspace import ROOT

_LITERAL = re.compile(r"^(?P<indent> *)(?P<text>\S.*)?::\n\n(?P<code>(?:(?P=indent) +\S.*(?:\n|\Z)|\n)+)", re.MULTILINE)


def is_python(code: str) -> bool:
    """Return True for Python, with or without syntax errors: the code, or one of its lines, has a statement or a call.

    Args:
        code: A block, without common indentation.
    """
    tree = _parsed(code)
    trees = [tree] if tree else [_parsed(line.strip()) for line in code.splitlines()]
    statements = [statement for tree in trees if tree for statement in tree.body]
    return not all(
        (isinstance(one, ast.Expr) and not isinstance(one.value, ast.Call))
        or (isinstance(one, ast.AnnAssign) and one.value is None)  # "key: text"
        for one in statements
    )


def _parsed(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except SyntaxError:
        return None


def docstring_blocks(docstring: str) -> list[Block]:
    """Return the blocks of a docstring; the language of a literal block is `python` or `text`.

    Args:
        docstring: The text, with the indentation that `inspect.cleandoc` leaves.
    """
    found = blocks(docstring)
    for match in _LITERAL.finditer(docstring):
        code = textwrap.dedent(match["code"])
        line = docstring.count("\n", 0, match.start("code")) + 1
        found.append(Block("python" if is_python(code) else "text", line, code))
    return sorted(found, key=lambda block: block.line)


def fenced(docstring: str) -> str:
    """Return a docstring with literal blocks in the form of Markdown, with the language for highlighting.

    Args:
        docstring: The text, with the indentation that `inspect.cleandoc` leaves.
    """

    def replace(match: re.Match[str]) -> str:
        indent, code = match["indent"], textwrap.dedent(match["code"])
        introduction = f"{indent}{match['text']}:\n\n" if match["text"] else ""
        block = f"```{'python' if is_python(code) else 'text'}\n{code.rstrip()}\n```\n"
        return introduction + textwrap.indent(block, indent) + code[len(code.rstrip()) + 1 :]

    return _LITERAL.sub(replace, docstring)


def programs(source: str) -> list[str]:
    """Return a program for each docstring with blocks of Python. Its lines have the numbers that they have in the file.

    Args:
        source: The text of a module.
    """
    result: list[str] = []
    if "::\n" not in source and "```" not in source:  # most modules
        return result
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines: list[str] = []
        for block in docstring_blocks(ast.get_docstring(node) or ""):
            if block.language == "python":
                before = node.body[0].lineno + block.line - 2
                lines += [""] * (before - len(lines)) + block.code.splitlines()
        if lines:
            result.append("\n".join(lines) + "\n")
    return result


def run(path: Path) -> None:
    """Execute the blocks of a module's docstrings, each docstring's in an empty directory.

    Args:
        path: The file of a module of a package.
    """
    parts = path.resolve().with_suffix("").parts
    name = ".".join(parts[parts.index("src") + 1 :]).removesuffix(".__init__")
    module = import_module(name)
    for text in programs(path.read_text(encoding="utf-8")):
        program = compile(text, str(path.resolve()), "exec", dont_inherit=True)
        namespace = {**assumed_names(name), **vars(module)}
        known = set(namespace)
        with tempfile.TemporaryDirectory() as scratch:
            os.chdir(scratch)
            try:
                exec(program, namespace)  # noqa: S102 -- the examples are the repository's own
                for test in [namespace[each] for each in namespace if each.startswith("test_") and each not in known]:
                    test()
            finally:
                os.chdir(ROOT)


def assumed_names(module: str) -> dict[str, Any]:
    """Return what blocks use without defining it: a training loop of four images, methods, objects of libraries.

    Args:
        module: The module whose docstrings are run. It is imported.
    """
    import torch

    from composer import algorithms
    from composer.core import Engine, State
    from composer.testing import RandomImageDataset, SimpleConvModel

    model = SimpleConvModel()
    data = RandomImageDataset(size=4)
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    state = State(model=model, max_duration="2ep", rank_zero_seed=0, dataloader=loader)
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    return {
        **{name: getattr(algorithms, name) for name in ("EMA", "MixUp", "RandAugment")},
        "client": Mock(),  # of a service
        "data": data,
        "engine": Engine(state),
        "loader": loader,
        "loss": lambda outputs, batch: torch.nn.functional.cross_entropy(outputs, batch[1]),
        "model": model,
        "net": model.module,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "state": state,
        **_OF_MODULES.get(module, dict)(),
    }


def _of_accelerate() -> dict[str, Any]:
    from accelerate import Accelerator

    return {"accelerator": Accelerator(cpu=True)}


def _of_ignite() -> dict[str, Any]:
    from ignite.metrics import Accuracy

    return {"Accuracy": Accuracy}


def _of_lightning() -> dict[str, Any]:
    from lightning.pytorch import LightningModule, Trainer
    from torch.nn.functional import cross_entropy

    return {"LightningModule": LightningModule, "Trainer": Trainer, "cross_entropy": cross_entropy}


def _of_transformers() -> dict[str, Any]:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    arguments = Seq2SeqTrainingArguments(output_dir=".", use_cpu=True, report_to="none")
    return {"Seq2SeqTrainer": Seq2SeqTrainer, "model": T5ForConditionalGeneration(config), "args": arguments}


def _of_resumption() -> dict[str, Any]:
    from torch.utils.data import DataLoader

    from composer import Trainer
    from composer.testing import SimpleConvModel

    return {"Classifier": SimpleConvModel, "DataLoader": DataLoader, "Trainer": Trainer}


def _of_profiler() -> dict[str, Any]:
    import torch

    from composer.core import State
    from composer.profiler import Profiler, cyclic_schedule
    from composer.testing import SimpleConvModel

    profiler = Profiler(schedule=cyclic_schedule(), trace_handlers=[])
    profiler.bind_to_state(State(model=SimpleConvModel(), max_duration="1ep", rank_zero_seed=0))
    return {"profiler": profiler, "images": torch.zeros(2, 3, 32, 32), "augment": torch.Tensor.neg}


_OF_MODULES: dict[str, Callable[[], dict[str, Any]]] = {
    "composer.hosts.accelerate": _of_accelerate,
    "composer.hosts.huggingface": _of_transformers,
    "composer.hosts.ignite": _of_ignite,
    "composer.hosts.lightning": _of_lightning,
    "composer.profiler.marker": _of_profiler,
    "composer.testing._resumption": _of_resumption,
}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.docstring_blocks MODULE.py")
    run(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
