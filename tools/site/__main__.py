"""Build the site.

python -m tools.site                   # .nox/pages/html, with the tutorials run
python -m tools.site --skip-tutorials  # without their outputs
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tools import pairs
from tools.compatibility import compatibility
from tools.link_sources import link
from tools.site import api, loop, methods, models, notebooks, pages
from tools.workspace import ROOT, Workspace

_SITE = Path(__file__).parent
_DIAGRAMS = {
    "<!-- diagram -->": loop.FIT,
    "<!-- diagram of evaluations -->": loop.EVALUATION,
    "<!-- diagram of predictions -->": loop.PREDICTION,
}


def write(folder: Path, *, run_tutorials: bool) -> list[api.PublicName]:
    """Write the Markdown pages and MkDocs' configuration into a folder; return the public names.

    Args:
        folder: An empty folder.
        run_tutorials: False: leave out what the tutorials print and draw.
    """
    workspace = Workspace()
    places = pages.places(workspace)
    entries = api.names(api.public(workspace))
    texts = api.pages(entries)
    files = {name: _SITE / name for name in ("style.css", "iframe-worker.js", "search.js")}

    references = [path for path in texts if path != "reference/index.md"]
    homes = _modules_by_package(workspace, [Path(path).stem for path in references])
    for source, page in places.items():
        if source == ROOT / "README.md" or source.suffix != ".md":
            continue
        text, pictures = pages.rewritten(pages.readable(source.read_text(encoding="utf-8")), source, page, places)
        if source.name == "README.md":
            text = pages.card(text, workspace[source.parent.name], homes[source.parent.name])
        texts[page] = text
        files |= pictures
    acting = methods.acting()
    for mark, drawn in _DIAGRAMS.items():
        texts["how_it_works.md"] = texts["how_it_works.md"].replace(mark, loop.diagram(acting, drawn))

    repository = workspace.settings.get("repository")
    links = f"[Repository]({repository}) | [Registry](https://pypi.org/project/composer-all/)" if repository else ""
    for mark, shown in {"<!-- gallery -->": methods.gallery(workspace), "<!-- links -->": links}.items():
        texts["index.md"] = texts["index.md"].replace(mark, shown)

    results = pairs.pairs()
    texts["methods.md"] = methods.page(workspace, results)
    texts["models.md"] = models.page(workspace, entries)
    texts["pairs.md"] = pairs.text_of(results)
    texts["changelogs.md"] = pages.changelogs(workspace)
    texts["compatibility.md"] = compatibility(workspace)

    tutorials = [source for source in places if source.suffix == ".ipynb"]
    for source, rendered in notebooks.render(tutorials, run=run_tutorials).items():
        page = places[source]
        text, pictures = pages.rewritten(pages.readable(rendered.text), source, page, places, rendered.pictures)
        texts[page] = f"{text}\n\n[Download this notebook]({source.name})\n"
        files |= pictures | {f"tutorials/{source.name}": source}
        for name, data in rendered.pictures.items():
            path = folder / "docs" / "tutorials" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    for page, text in texts.items():
        path = folder / "docs" / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(pages.finished(text, page, workspace), encoding="utf-8")
    for name in ("templates", "theme"):
        shutil.copytree(_SITE / name, folder / name)
    for place, file in files.items():
        path = folder / "docs" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, path)
    imported = {entry.definition: entry.modules[0] for entry in entries if entry.definition}
    (folder / "names.json").write_text(json.dumps(imported), encoding="utf-8")  # for `examples`
    navigation = json.dumps(pages.navigation(workspace, ["reference/index.md", *references]))  # JSON is YAML
    configuration = (_SITE / "mkdocs.yml").read_text(encoding="utf-8")
    if repository:
        configuration += f"\nrepo_url: {repository}\n"
    (folder / "mkdocs.yml").write_text(f"{configuration}\nnav: {navigation}\n", encoding="utf-8")
    return entries


def _modules_by_package(workspace: Workspace, modules: list[str]) -> dict[str, list[str]]:
    """Return the modules that each package ships."""
    found: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        path = Path(*module.split("."))
        for package in workspace.packages.values():
            if any((package.source / file).is_file() for file in (path.with_suffix(".py"), path / "__init__.py")):
                found[package.name].append(module)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the documentation site and check its links.")
    parser.add_argument("--out", type=Path, default=ROOT / ".nox" / "pages", help="replaced; the site is in OUT/html")
    parser.add_argument("--skip-tutorials", action="store_true", help="do not run the tutorials")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    if out.exists() and not (out / "mkdocs.yml").is_file() and any(out.iterdir()):
        parser.error(f"--out must be a new or empty folder, or one of an earlier build, got {out}.")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)

    link(Workspace(), out / "src")  # mkdocstrings reads sources, of one `composer` package
    names = write(out, run_tutorials=not arguments.skip_tutorials)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", "mkdocs.yml", "-d", "html"]
    variables = {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}  # for `examples`, an extension
    if subprocess.run(command, cwd=out, check=False, env={**os.environ, **variables}).returncode:
        sys.exit("mkdocs refused the pages; see above.")
    problems = api.undescribed(names)
    print(*problems, sep="\n", end="\n" if problems else "")
    words = sum(len(re.findall(r"\w+", path.read_text(encoding="utf-8"))) for path in (out / "docs").rglob("*.md"))
    print(
        f"{out / 'html' / 'index.html'}: {words} words without docstrings, {len(names)} public names, "
        f"{len(problems)} problems"
    )
    if problems:
        sys.exit(1)


if __name__ == "__main__":
    main()
