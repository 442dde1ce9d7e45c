"""The page "Models": a card for each model of the packages, from its docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from docstring_parser import DocstringStyle, parse

from composer.models import ComposerModel
from tools.markdown import folded, table
from tools.site import networks
from tools.site.api import PublicName, page_of_module
from tools.site.examples import with_imports
from tools.workspace import Package, Workspace

_HEAD = """# Models

Each has its loss and its metrics, and trains in the Trainer or in your own loop. Any other module does, too: see
[your own module](packages/composer-models/README.md#your-own-module). The numbers of their parameters, and the methods
that they do not train with, are in the [table of the package](packages/composer-models/README.md#models).
"""
_ARGUMENTS = ("argument", "default", "meaning")
_ATTRIBUTION = re.compile(r"^(Source|Differs): ", re.MULTILINE)


def models(workspace: Workspace) -> Iterator[tuple[Package, str, Callable[..., Any]]]:
    """Yield the package, the name and the function or class of each model that is complete, with loss and metrics.

    Args:
        workspace: The packages, which must be installed.
    """
    import composer.models

    for package in workspace.packages.values():
        for name in package.entry_points.get("composer.models", {}):
            made = getattr(composer.models, name)
            kind = made if inspect.isclass(made) else inspect.signature(made, eval_str=True).return_annotation
            # `ModuleWithLoss` wraps any module, so there is nothing to draw.
            if inspect.isclass(kind) and issubclass(kind, ComposerModel) and name != "ModuleWithLoss":
                yield package, name, made


def page(workspace: Workspace, names: Iterable[PublicName]) -> str:
    """Return the page as Markdown.

    Args:
        workspace: The packages.
        names: The public names, whose pages of the reference are linked.
    """
    references = {each.name: each for each in names if each.definition}
    cards = [(name, package, _card(name, made)) for package, name, made in models(workspace)]
    index = [(f"[{name}](#{name})", text.partition("\n")[0]) for name, _, text in cards]
    parts = [_HEAD, table(("model", "what it is"), index)]
    for name, package, text in cards:
        reference = references[name]
        parts.append(f'## {name} {{ id="{name}" }}\n\n{text}')
        links = f"[Reference]({page_of_module(reference.page)}#{reference.definition})"
        parts.append(f"{links} | [{package.name}](packages/{package.name}/README.md)\n")
    return "\n".join(parts)


def _card(name: str, made: Callable[..., Any]) -> str:
    """Return the description of a model from its docstring, and folded, its picture and what else it says."""
    paths = {name: f"composer.models.{name}", "torch": "torch"}
    text = with_imports(inspect.cleandoc(made.__doc__ or ""), paths.get)
    start = _ATTRIBUTION.search(text)
    body, attribution = (text[: start.start()], text[start.start() :]) if start else (text, "")
    parsed = parse(body, DocstringStyle.GOOGLE)
    defaults = {name: each.default for name, each in inspect.signature(made).parameters.items()}
    rows = [
        (f"`{each.arg_name}`", _default(defaults[each.arg_name]), " ".join((each.description or "").split()))
        for each in parsed.params
        if each.args[0] == "param"
    ]
    examples = "".join(
        f"```python\n{_program(each.description or each.snippet or '')}\n```\n\n" for each in parsed.examples
    )
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    origins = _ATTRIBUTION.sub(r"\n**\1**: ", re.sub("\n +", "\n", attribution))
    drawn = networks.picture(networks.EXAMPLES[name])
    details = "\n\n".join(
        filter(None, (drawn, parsed.long_description, f"{table(_ARGUMENTS, cells)}\n{examples}{origins}\n"))
    )
    return (
        f"{parsed.short_description}\n\n{folded('Its blocks, batches, arguments, an example, and its source', details)}"
    )


def _default(value: Any) -> str:
    return "required" if value is inspect.Parameter.empty else f"`{value!r}`"


def _program(example: str) -> str:
    """Return the statements of an example without its prompts; what it prints becomes comments."""
    lines = []
    for line in example.splitlines():
        if line.startswith((">>> ", "... ")):
            lines.append(line[4:].partition("  # doctest:")[0])
        elif line.strip():
            lines.append(f"# {line}")
    return "\n".join(lines)
