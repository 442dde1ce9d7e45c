"""The pages of the site: which file of the repository becomes which page, with links that lead to pages."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

from tools.markdown import outside_code, with_links
from tools.site.api import page_of_module
from tools.workspace import ROOT, Package, Workspace

_SITE = Path(__file__).parent
_DOCUMENTS = ("README.md", "MIGRATING.md", "HOSTS.md", "CHANGELOG.md")
_ITEM = re.compile(r"(?:[-*]|\d+\.) ")
_NUMBERS = re.compile(r"(?<=\| )(at most )?[-+]?\d([-+\d.,%/()\[\] ]|to)*(?= \|)")  # "1.02 (0.99 to 1.05)" in a cell
_GUIDES = (
    "how_do_i",
    "your_trainer",
    "finetune_images",
    "finetune_language_model",
    "finetune_segmentation",
    "lightning_project",
    "measuring",
    "optimizers",
    "resuming",
    "stores",
    "many_machines",
    "clusters",
    "profiling",
    "speed",
    "data_formats",
    "imagenet",
    "export",
    "debugging",
)
_FIRST = ("index", "start", "how_it_works")
_INDEXES = ("pairs.md", "compatibility.md", "packages/composer-core/HOSTS.md")
_CELL = re.compile(r"(?<=\| )[\w-]+(?= \|)")
# Links to what writes a page lead to that page.
_WRITTEN = {
    _SITE / "methods.py": "methods.md",
    _SITE / "models.py": "models.md",
    Path(__file__): "changelogs.md",
    ROOT / "tools" / "pairs.py": "pairs.md",
    ROOT / "tools" / "compatibility.py": "compatibility.md",
}
_TUTORIALS = ("first_run", "own_algorithm", "finetune_transformers", "which_methods")


def places(workspace: Workspace) -> dict[Path, str]:
    """Return `{file of the repository: page}` for the pages that are written by hand, and for programs that write one.

    Links to the README of the repository lead to the front page, which is the guide `index`.

    Args:
        workspace: The packages.
    """
    guides, tutorials = _SITE / "guides", _SITE / "tutorials"
    found = {ROOT / "README.md": "index.md"}
    found |= {guides / f"{name}.md": f"{name}.md" for name in _FIRST}
    found |= {guides / f"{name}.md": f"guides/{name}.md" for name in _GUIDES}
    found |= {tutorials / f"{name}.ipynb": f"tutorials/{name}.md" for name in _TUTORIALS}
    found[ROOT / "CONTRIBUTING.md"] = "project/contributing.md"
    found[ROOT / ".github" / "SECURITY.md"] = "project/security.md"
    for package in workspace.packages.values():
        for name in _DOCUMENTS:
            if (package.path / name).is_file():
                found[package.path / name] = f"packages/{package.name}/{name}"
    unknown = {*guides.glob("*.md"), *tutorials.glob("*.ipynb")} - found.keys()
    if unknown:
        names = sorted(str(path.relative_to(ROOT)) for path in unknown)
        raise ValueError(
            f"{names} must be listed in tools/site/pages.py, which gives guides and tutorials their order."
        )
    return found | _WRITTEN


def rewritten(
    text: str, source: Path, page: str, pages: Mapping[Path, str], beside: Container[str] = ()
) -> tuple[str, dict[str, Path]]:
    """Return a text with links to pages in place of links to files, and the pictures that it shows.

    A link to a module leads to its page of the reference. Of links to other files only the label is left.

    Args:
        text: The Markdown text.
        source: Its file.
        page: Its page.
        pages: The pages of files, by `places`.
        beside: Generated files beside the page; links to these stay as they are.

    Returns:
        The text, and `{path in the site: file}`.

    Raises:
        ValueError: A link leads to a file that does not exist.
    """
    pictures: dict[str, Path] = {}

    def replace(label: str, path: str, anchor: str) -> str:
        if path in beside:
            return f"{label}({path}{anchor})"
        file = Path(os.path.normpath(source.parent / path))
        if not file.exists():
            raise ValueError(f"{source}: the link to {path + anchor!r} leads to no file.")
        if label.startswith("!"):
            place = f"images/{file.name}"
            if pictures.setdefault(place, file) != file:
                raise ValueError(f"{source}: two pictures are named {file.name!r}; rename one.")
        else:
            found = pages.get(file / "README.md" if file.is_dir() else file) or _module_page(file)
            if found is None:
                return label[1:-1]
            place = found
        return f"{label}({os.path.relpath(place, Path(page).parent)}{anchor})"

    return with_links(text, replace), pictures


def readable(text: str) -> str:
    """Return a text of GitHub's dialect as Python-Markdown reads it: a list begins after an empty line."""
    return outside_code(text, _separate_lists)


def _separate_lists(text: str) -> str:
    lines: list[str] = []
    in_list = False
    for line in text.split("\n"):
        if not line.strip():
            in_list = in_list and not lines  # the next line decides: an item, or not
        elif _ITEM.match(line):
            if lines and lines[-1].strip() and not in_list:
                lines.append("")
            in_list = True
        lines.append(line)
    return "\n".join(lines)


def _module_page(file: Path) -> str | None:
    if file.suffix != ".py" or "src" not in file.parts:
        return None
    parts = file.with_suffix("").parts
    return page_of_module(".".join(parts[parts.index("src") + 1 :]))


def card(text: str, package: Package, references: Iterable[str]) -> str:
    """Return the README of a package with a line of facts below its title.

    Args:
        text: The README.
        package: The package.
        references: The modules of its pages in the reference.
    """
    title, _, rest = text.partition("\n")
    facts = [f"version {package.version}", f"Python {package.requires_python}"]
    if package.changelog.is_file():
        facts.append("[changes](CHANGELOG.md)")
    links = [f"[{module}](../../{page_of_module(module)})" for module in references]
    if links:
        facts.append(f"reference: {', '.join(links)}")
    return f"{title}\n\n{' | '.join(facts)}\n{{ .facts }}\n{rest}"


def changelogs(workspace: Workspace) -> str:
    """Return the page that links the changelogs of all packages."""
    lines = [
        "# Changelogs\n",
        "Every package has its own version and its own changelog.\n",
        "| package | version |",
        "|---|---|",
    ]
    for package in workspace.packages.values():
        if package.changelog.is_file():
            lines.append(f"| [{package.name}](packages/{package.name}/CHANGELOG.md) | {package.version} |")
    return "\n".join(lines) + "\n"


def finished(text: str, page: str, workspace: Workspace) -> str:
    """Return a page with its weight in the search, a title of its own, and numbers in tables that stay on one line.

    In a generated index, methods and packages that have a cell of their own lead to their cards.

    Args:
        text: The Markdown text.
        page: Its path.
        workspace: The packages.
    """
    folder, _, rest = page.partition("/")
    lines = []
    text = outside_code(text, lambda part: _NUMBERS.sub(lambda match: match[0].replace(" ", "&nbsp;"), part))
    if page in _INDEXES:
        text = _with_cards(text, page, workspace)
    if folder == "packages" and rest.endswith("/README.md"):
        package = workspace[rest.removesuffix("/README.md")]
        algorithm = next(iter(package.entry_points.get("composer.algorithms", {})), None)
        lines.append(f"title: {f'{algorithm} ({package.name})' if algorithm else package.name}\n")
    elif folder == "packages" and rest.endswith("/CHANGELOG.md"):
        text = re.sub(r"^# .*", f"# Changelog of {rest.removesuffix('/CHANGELOG.md')}", text)
    elif folder == "reference" and rest != "index.md":
        lines.append(f"title: {rest.removesuffix('.md')}\n")
    if folder in (*(f"{name}.md" for name in _FIRST), "guides", "tutorials"):
        lines.append("search: {boost: 1.5}\n")
    elif page.endswith("/CHANGELOG.md"):
        lines.append("search: {boost: 0.3}\n")
    if not lines:
        return text
    if not text.startswith("---\n"):
        text = f"---\n---\n\n{text}"
    return text.replace("---\n", "".join(["---\n", *lines]), 1)


def _with_cards(text: str, page: str, workspace: Workspace) -> str:
    owners = {package.name: package.name for package in workspace.packages.values()}
    for package in workspace.packages.values():
        owners |= dict.fromkeys(package.entry_points.get("composer.algorithms", {}), package.name)

    def replace(match: re.Match[str]) -> str:
        owner = owners.get(match[0])
        place = os.path.relpath(f"packages/{owner}/README.md", Path(page).parent)
        return match[0] if owner is None else f"[{match[0]}]({place})"

    return outside_code(text, lambda part: _CELL.sub(replace, part))


def navigation(workspace: Workspace, references: Iterable[str]) -> list[object]:
    """Return the navigation of MkDocs.

    Args:
        workspace: The packages.
        references: The pages of the reference, with its index first.
    """
    methods, others = [], []
    for package in workspace.packages.values():
        entry = {package.name.removeprefix("composer-"): f"packages/{package.name}/README.md"}
        if "composer.algorithms" in package.entry_points:
            methods.append(entry)
        else:
            others.append(entry)
    return [
        {"Start": [*(f"{name}.md" for name in _FIRST), {"Tutorials": [f"tutorials/{name}.md" for name in _TUTORIALS]}]},
        {"Methods": ["methods.md", "pairs.md", {"Cards": methods}]},
        {"Models": "models.md"},
        {"Guides": [f"guides/{name}.md" for name in _GUIDES]},
        {"Packages": others},
        {"Reference": _by_package(references)},
        {
            "Project": [
                "changelogs.md",
                "compatibility.md",
                {
                    "Coming from": [
                        {"MosaicML's Composer": "packages/composer-trainer/MIGRATING.md"},
                        {"Lightning": "packages/composer-lightning/MIGRATING.md"},
                        {"transformers": "packages/composer-huggingface/MIGRATING.md"},
                    ]
                },
                {"In other trainers": "packages/composer-core/HOSTS.md"},
                "project/contributing.md",
                "project/security.md",
            ]
        },
    ]


def _by_package(references: Iterable[str]) -> list[object]:
    """Return the pages of the reference by the second part of their modules."""
    index, *pages = references
    groups: dict[str, list[object]] = {}
    for page in pages:
        parts = Path(page).stem.split(".")
        groups.setdefault(parts[min(1, len(parts) - 1)], []).append({parts[-1]: page})
    return [index, *({name: group} for name, group in groups.items())]
