"""The documentation site: its pages, and the built site in a real browser. `nox -s site` builds it and runs these."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import griffe
import nbformat
import pytest
import torch

from composer import Callback, Trainer
from composer.core import Event, State
from composer.loggers import Logger
from composer.testing import RandomClassificationDataset, SimpleModel
from tools import pairs
from tools.site import api, examples, loop, methods, models, networks, notebooks, pages
from tools.workspace import ROOT, Workspace

WORKSPACE = Workspace()
BUILT = ROOT / ".nox" / "pages" / "html"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
built = pytest.mark.skipif(not BUILT.exists(), reason="the site is not built: run `nox -s site`")
in_browser = pytest.mark.skipif(BROWSER is None, reason=f"needs a browser: {' or '.join(BROWSERS)} on the PATH")


@pytest.fixture(scope="module")
def names() -> list[api.PublicName]:
    return api.names(api.public(WORKSPACE))


# ---- pages -----------------------------------------------------------------------------------------------------------


def test_every_package_guide_and_tutorial_has_a_page() -> None:
    places = pages.places(WORKSPACE)

    assert {f"packages/{name}/README.md" for name in WORKSPACE.names} <= set(places.values())
    assert all(path.is_file() for path in places)
    texts = json.dumps(pages.navigation(WORKSPACE, ["reference/index.md"]))
    missing = [page for page in places.values() if not page.endswith("CHANGELOG.md") and f'"{page}"' not in texts]
    assert missing == []


def test_a_guide_that_has_no_place_in_the_navigation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_GUIDES", pages._GUIDES[1:])

    with pytest.raises(ValueError, match=r"must be listed in tools/site/pages\.py"):
        pages.places(WORKSPACE)


SOURCE = ROOT / "packages" / "composer-mixup" / "README.md"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[core](../composer-core)", "[core](../composer-core/README.md)"),
        ("[`Engine(a=[...])`](../composer-core)", "[`Engine(a=[...])`](../composer-core/README.md)"),
        ("[files](../composer-datasets#image-files)", "[files](../composer-datasets/README.md#image-files)"),
        ("[all](../../README.md)", "[all](../../index.md)"),
        ("[e](../composer-core/src/composer/core/event.py)", "[e](../../reference/composer.core.event.md)"),
        ("[tests](tests) and [toml](pyproject.toml)", "tests and toml"),
        ("[paper](https://arxiv.org/abs/1710.09412)", "[paper](https://arxiv.org/abs/1710.09412)"),
        ("[below](#formula)", "[below](#formula)"),
        ("`x[0](y)`", "`x[0](y)`"),
        ("```python\nx[0](y)\n```", "```python\nx[0](y)\n```"),
    ],
)
def test_links_lead_to_pages(text: str, expected: str) -> None:
    changed, pictures = pages.rewritten(text, SOURCE, "packages/composer-mixup/README.md", pages.places(WORKSPACE))

    assert changed == expected
    assert pictures == {}


def test_pictures_come_along() -> None:
    text, pictures = pages.rewritten(
        "![two](images/mixup.png)", SOURCE, "packages/composer-mixup/README.md", pages.places(WORKSPACE)
    )

    assert text == "![two](../../images/mixup.png)"
    assert pictures == {"images/mixup.png": SOURCE.parent / "images" / "mixup.png"}


def test_links_to_generated_pictures_stay_as_they_are() -> None:
    text, _ = pages.rewritten("![png](a_files/a_0.png)", SOURCE, "tutorials/a.md", {}, {"a_files/a_0.png": b""})

    assert text == "![png](a_files/a_0.png)"


def test_a_link_to_no_file_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'\.\./composer-mixxup' leads to no file"):
        pages.rewritten("[x](../composer-mixxup)", SOURCE, "packages/composer-mixup/README.md", {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("three:\n- a\n- b\n", "three:\n\n- a\n- b\n"),
        ("- a\n  more\n- b\n\n- c", "- a\n  more\n- b\n\n- c"),
        ("- a\n\ntext:\n1. b", "- a\n\ntext:\n\n1. b"),
        ("```\ntext\n- a\n```", "```\ntext\n- a\n```"),
    ],
)
def test_a_list_begins_after_an_empty_line(text: str, expected: str) -> None:
    assert pages.readable(text) == expected


def test_a_page_has_its_own_title_and_its_weight_in_the_search() -> None:
    def finish(page: str, text: str = "# A\n\nb\n") -> str:
        return pages.finished(text, page, WORKSPACE)

    assert finish("packages/composer-muon/README.md") == "---\ntitle: Muon (composer-muon)\n---\n\n# A\n\nb\n"
    assert finish("packages/composer-core/README.md").startswith("---\ntitle: composer-core\n---\n")
    assert finish("packages/composer-muon/CHANGELOG.md") == (
        "---\nsearch: {boost: 0.3}\n---\n\n# Changelog of composer-muon\n\nb\n"
    )
    assert finish("reference/composer.core.md") == "---\ntitle: composer.core\n---\n\n# A\n\nb\n"
    assert finish("guides/speed.md", "---\nhide: [toc]\n---\n\n# A") == (
        "---\nsearch: {boost: 1.5}\nhide: [toc]\n---\n\n# A"
    )
    assert finish("methods.md") == "# A\n\nb\n"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("| a b | +1.9% [+1.6, +2.1] | 20 / 20 |", "| a b | +1.9%&nbsp;[+1.6,&nbsp;+2.1] | 20&nbsp;/&nbsp;20 |"),
        ("| 1.02 (0.99 to 1.05) | 3 of 4 |", "| 1.02&nbsp;(0.99&nbsp;to&nbsp;1.05) | 3 of 4 |"),
        ("`| 1 2 |`", "`| 1&nbsp;2 |`"),
    ],
)
def test_numbers_in_a_table_stay_on_one_line(row: str, expected: str) -> None:
    assert pages.finished(row, "methods.md", WORKSPACE) == expected


@pytest.mark.parametrize(
    ("page", "row", "expected"),
    [
        (
            "pairs.md",
            "| EMA | MixUp | EMA averages |",
            "| [EMA](packages/composer-ema/README.md) | [MixUp](packages/composer-mixup/README.md) | EMA averages |",
        ),
        (
            "packages/composer-core/HOSTS.md",
            "| PostHocEMA | = | refused (1) |",
            "| [PostHocEMA](../composer-lawa/README.md) | = | refused (1) |",
        ),
        ("compatibility.md", "| composer-sam | 0.1.0 |", "| [composer-sam](packages/composer-sam/README.md) | 0.1.0 |"),
        ("methods.md", "| EMA | any |", "| EMA | any |"),
    ],
)
def test_an_index_leads_to_the_cards(page: str, row: str, expected: str) -> None:
    assert pages.finished(row, page, WORKSPACE) == expected


# ---- the loop, the methods -------------------------------------------------------------------------------------------


def test_the_diagram_has_all_events_of_training_in_their_order() -> None:
    training = [event for event in Event if not (event.is_eval or event.is_predict)]

    drawn = list(loop.FIT.events())

    assert sorted(drawn, key=lambda event: event.index) == training
    drawn += [*loop.EVALUATION.events(), *loop.PREDICTION.events()]
    assert set(drawn) == set(Event)
    assert len(set(drawn)) == len(drawn)
    text = loop.diagram(methods.acting())
    assert text.count("<div") == text.count("</div>")
    assert re.search(r"BEFORE_LOSS</code><span>[^<]*LabelSmoothing", text)


def test_the_trainer_announces_the_events_in_the_order_of_the_diagram() -> None:
    seen: list[Event] = []

    class Watch(Callback):
        def run_event(self, event: Event, state: State, logger: Logger) -> None:
            seen.append(event)

    model = SimpleModel()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=torch.utils.data.DataLoader(RandomClassificationDataset(size=4), batch_size=4),
        max_duration="1ep",
        callbacks=[Watch()],
        progress_bar=False,
    )
    trainer.fit()
    drawn = list(loop.FIT.events())
    first_times = [event for event in dict.fromkeys(seen) if event in drawn]
    assert first_times == [event for event in drawn if event in seen]
    # An iteration without a length never ends.
    assert set(drawn) - set(seen) == {Event.ITERATION_END, Event.ITERATION_CHECKPOINT}

    seen.clear()
    batches = torch.utils.data.DataLoader(RandomClassificationDataset(size=4), batch_size=4)
    trainer.eval(batches)
    in_a_run = {Event.EVAL_BEFORE_ALL, Event.EVAL_AFTER_ALL}
    assert list(dict.fromkeys(seen)) == [event for event in loop.EVALUATION.events() if event not in in_a_run]
    seen.clear()
    trainer.predict(batches)
    assert list(dict.fromkeys(seen)) == list(loop.PREDICTION.events())
    trainer.close()


def test_the_page_of_methods_has_a_row_for_each() -> None:
    text = methods.page(WORKSPACE, pairs.pairs())

    missing = [cls.__name__ for cls in pairs.classes() if f"\n| [{cls.__name__}](packages/composer-" not in text]
    assert missing == []
    assert methods.MODELS.keys() <= {cls.__name__ for cls in pairs.classes()}
    assert "| [Muon](packages/composer-muon/README.md) | gain |" in text
    answer = next(line for line in text.splitlines() if line.startswith("| Text |"))
    gains, nothing, unknown = answer.split(" | ")[1:]
    assert "[Muon](packages/composer-muon/README.md) (shakespeare)" in gains
    assert "[SAM]" in nothing
    assert "[SequencePacking]" in unknown


def test_the_gallery_has_a_card_of_each_method_with_what_it_changes_and_its_verdicts() -> None:
    text = methods.gallery(WORKSPACE)
    found = re.findall(r'<div class="method ([\w ]+)" markdown>\n.*?\*\*\[(\w+)\]', text, re.DOTALL)
    cards = {name: classes.split() for classes, name in found}

    assert set(cards) == {cls.__name__ for cls in pairs.classes()}
    changes = dict(re.findall(r'value="(change\d)">([^<]+)<', text))
    assert [changes[each] for each in cards["Muon"] if each in changes] == ["optimize"]
    assert {"images", "tokens"} <= set(cards["Muon"])
    assert ("images" in cards["Alibi"], "tokens" in cards["Alibi"]) == (False, True)
    muon = text.partition("**[Muon](packages/composer-muon/README.md)**")[2].partition("</div>")[0]
    assert re.search(r"_better: .*shakespeare.*_\{ \.gain \}", muon)
    assert "](images/muon.svg){ loading=lazy }\n**[Muon]" in text


def test_the_programs_of_the_front_page_are_short() -> None:
    text = (ROOT / "tools" / "site" / "guides" / "index.md").read_text(encoding="utf-8")
    tabs = text.partition('=== "')[2].partition("\n## ")[0]
    programs = re.findall(r"```py(?:thon)?\n(.*?)\n    ```", tabs, re.DOTALL)

    assert len(programs) == 3
    assert [program for program in programs if len(program.splitlines()) > 12] == []


# ---- the reference ---------------------------------------------------------------------------------------------------


def test_every_model_has_a_card(names: list[api.PublicName]) -> None:
    text = models.page(WORKSPACE, names)
    found = [name for _, name, _ in models.models(WORKSPACE)]

    assert {"composer_resnet", "UNet3D", "create_gpt2", "vit_small_patch16"} <= set(found)
    for name in found:
        card = text.partition(f"## {name} ")[2].partition("\n## ")[0]
        assert "**Source**: " in card or name in ("ComposerClassifier", "HuggingFaceModel"), name
        assert "| argument | default | meaning |" in card, name
        assert "[Reference](reference/composer.models." in card, name
        assert card.count('<figure class="network">') == 1, name
    assert "| `num_classes` | `1000` | Number of classes. |" in text
    assert "# torch.Size([2, 10])" in text
    assert "Metrics" not in text.partition("## composer_resnet ")[2].partition("\n## ")[0]


def test_a_picture_of_a_network_has_its_blocks_in_the_order_of_the_forward_pass() -> None:
    example = networks.EXAMPLES["composer_resnet"]
    found = networks.blocks(example.make(), example.inputs)

    stages = {block.path: block for block in found}
    assert list(stages) == ["conv1", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", "fc"]
    shapes = [stages[f"layer{i}"].shape for i in (1, 2, 3, 4)]
    assert shapes == [(256, 56, 56), (512, 28, 28), (1024, 14, 14), (2048, 7, 7)]
    assert stages["fc"].parameters == 2048 * 1000 + 1000
    left_out = 2 * 64  # the normalization after the first convolution
    assert sum(block.parameters for block in found) + left_out == 25_557_032


def test_a_picture_joins_equal_blocks_and_counts_shared_parameters_once() -> None:
    example = networks.EXAMPLES["create_gpt2"]
    embeddings, layers, head = networks.blocks(example.make(), example.inputs)

    assert (embeddings.path, embeddings.parameters) == ("transformer.wte", 50_257 * 768)
    assert (layers.kind, layers.count, layers.shape) == ("GPT2Block", 12, (128, 768))
    assert (head.path, head.parameters, head.shared) == ("lm_head", 0, True)
    assert "shared" in networks.picture(example)


def test_the_programs_of_the_models_run_as_they_are_shown(names: list[api.PublicName]) -> None:
    text = models.page(WORKSPACE, names)
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)

    assert len(programs) == text.count("[Reference](")
    for program in programs:
        exec(program, {})  # noqa: S102 - the program is ours


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (">>> f(torch.ones(1))", ">>> import torch\n>>> from composer.x import f\n>>> f(torch.ones(1))"),
        ("A:\n    >>> F.f()\n    1", "A:\n    >>> from torch.nn import functional as F\n    >>> F.f()\n    1"),
        (">>> import torch\n>>> f(torch)\n1", ">>> import torch\n>>> from composer.x import f\n>>> f(torch)\n1"),
        (">>> from composer.x import f\n>>> f(unknown)", ">>> from composer.x import f\n>>> f(unknown)"),
        (
            ">>> def g(f):\n...     return f\n>>> [t for t in g(1)]",
            ">>> def g(f):\n...     return f\n>>> [t for t in g(1)]",
        ),
        ("no example of f", "no example of f"),
    ],
)
def test_examples_import_what_they_use(text: str, expected: str) -> None:
    paths = {"f": "composer.x.f", "torch": "torch", "F": "torch.nn.functional", "t": "composer.x.t"}

    assert examples.with_imports(text, paths.get) == expected


def test_the_examples_of_the_reference_run_as_they_are_shown(names: list[api.PublicName], tmp_path: Path) -> None:
    modules = {entry.definition: entry.modules[0] for entry in names if entry.definition}
    (tmp_path / "names.json").write_text(json.dumps(modules))
    extension = examples.Examples(names=str(tmp_path / "names.json"))
    for definition in ("composer.algorithms.mixup.mixup.MixUp", "composer.core.time.Time"):
        name = definition.rpartition(".")[2]
        documented = visited(definition)

        extension.on_object(obj=documented)

        program = "".join(each.source for each in doctest.DocTestParser().get_examples(documented.docstring.value))
        assert program.startswith(f"from {modules[definition]} import {name}\n")
        exec(program, {})  # noqa: S102 - the program is ours


def test_a_literal_block_of_a_docstring_is_shown_as_python(tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text("{}")
    state = visited("composer.core.state.State")

    examples.Examples(names=str(tmp_path / "names.json")).on_object(obj=state)

    assert "are enough:\n\n```python\nstate = State(" in state.docstring.value


def visited(definition: str) -> griffe.Object:
    module, _, name = definition.rpartition(".")
    source = Path(importlib.import_module(module).__file__ or "")
    found: griffe.Object = griffe.visit(module, filepath=source, code=source.read_text(encoding="utf-8"))[name]
    return found


def test_a_public_name_is_documented_once_where_it_is_defined(names: list[api.PublicName]) -> None:
    mixup = [entry for entry in names if entry.name == "MixUp"]

    assert [(entry.definition, entry.page, entry.modules[0]) for entry in mixup] == [
        ("composer.algorithms.mixup.mixup.MixUp", "composer.algorithms.mixup", "composer.algorithms")
    ]
    assert len({(entry.name, entry.definition) for entry in names}) == len(names)


@pytest.mark.parametrize("name", ["PRUNES_BATCH", "HostedRun", "Trainer", "Time", "build_cifar10_dataloader", "Grid"])
def test_names_that_are_imported_on_first_access_are_found(names: list[api.PublicName], name: str) -> None:
    assert [entry.definition is not None for entry in names if entry.name == name] == [True]


def test_no_name_of_the_list_is_left_out(names: list[api.PublicName]) -> None:
    documented = {(module, entry.name) for entry in names for module in entry.modules}

    for module, members in api.public(WORKSPACE).items():
        left = [name for name in members if (module, name) not in documented]
        assert all(f"{module}.{name}" in api.public(WORKSPACE) or _is_module(module, name) for name in left), left


def _is_module(module: str, name: str) -> bool:
    return isinstance(getattr(importlib.import_module(module), name), ModuleType)


def test_every_public_name_has_a_description(names: list[api.PublicName]) -> None:
    assert api.undescribed(names) == []


def test_a_public_name_without_a_description_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "constants_of_mine.py").write_text('A = 1\n"""One."""\nB = 2\n\n\ndef f() -> None: ...\n')
    names = [api.PublicName(name, ("short",), f"constants_of_mine.{name}") for name in ("A", "B", "f")]
    names += [api.PublicName("prod", ("math",), None), api.PublicName("pi", ("math",), None)]

    problems = api.undescribed(names)

    assert problems[0] == (
        "`short.B` has no description in the reference. Write a docstring for `constants_of_mine.B`; that of a "
        "constant or an alias stands below the assignment."
    )
    assert [problem.split()[0] for problem in problems] == ["`short.B`", "`short.f`", "`math.pi`"]


def test_a_name_that_is_imported_on_first_access_is_described_where_it_is_defined(names: list[api.PublicName]) -> None:
    found = {entry.name: entry for entry in names}

    assert found["__version__"].definition == "composer.__version__"
    factories = found["BACKEND_TO_OBJECT_STORE_FACTORY"]
    assert factories.definition == "composer.utils.object_store.remote_paths.BACKEND_TO_OBJECT_STORE_FACTORY"
    assert factories.modules == ("composer.utils", "composer.utils.file_helpers")


def test_a_bound_method_shows_what_it_does(names: list[api.PublicName]) -> None:
    texts = api.pages(names)

    recipes = "".join(text for page, text in texts.items() if page.startswith("reference/composer.recipes"))
    assert re.search(r"## \S*composed\n\n`composer\.\S+\.Task\.composed`: \w+", recipes)


# ---- notebooks -------------------------------------------------------------------------------------------------------


DRAW = "from matplotlib import pyplot\npyplot.plot([1, 2]);"


def test_a_notebook_is_run_and_shows_what_it_prints_and_draws(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_markdown_cell("# Title"),
            nbformat.v4.new_code_cell("print(6 * 7)"),
            nbformat.v4.new_code_cell(DRAW, metadata={"alt": "A line"}),
        ]
    )
    path = tmp_path / "small.ipynb"
    nbformat.write(notebook, path)

    rendered = notebooks.render([path])[path]

    assert "# Title" in rendered.text
    assert "    42" in rendered.text
    (picture,) = rendered.pictures
    assert f"![A line]({picture})" in rendered.text
    assert rendered.pictures[picture].startswith(b"\x89PNG")


def test_a_picture_without_a_description_ends_the_build(tmp_path: Path) -> None:
    path = tmp_path / "drawn.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(DRAW)]), path)

    with pytest.raises(ValueError, match=r'drawn\.ipynb: cell 0 draws a picture; .* as "alt"'):
        notebooks.render([path])


def test_a_failing_cell_ends_the_build(tmp_path: Path) -> None:
    path = tmp_path / "bad.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")]), path)

    with pytest.raises(RuntimeError, match=r"bad\.ipynb failed(?s:.*)ZeroDivisionError"):
        notebooks.render([path])


# ---- the built site --------------------------------------------------------------------------------------------------


@built
def test_no_class_of_the_reference_shows_a_private_base() -> None:
    shown = {
        re.sub(r"<[^>]*>", "", base)
        for page in (BUILT / "reference").glob("*.html")
        for line in re.findall(r'class="doc doc-class-bases">(.*?)</p>', page.read_text(encoding="utf-8"), re.DOTALL)
        for base in re.findall(r"<code>(.*?)</code>", line, re.DOTALL)
    }

    assert "Algorithm" in shown
    assert [base for base in shown if base.rpartition(".")[2].startswith("_")] == []


def browse(address: str, folder: Path) -> tuple[str, str]:
    """Return the document after its scripts ran, and the log of the browser's network."""
    assert BROWSER is not None
    log = folder / "net.json"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += ["--virtual-time-budget=20000", f"--log-net-log={log}", f"--user-data-dir={folder / 'profile'}"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", f"file://{BUILT / address}"]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return run.stdout, log.read_text(encoding="utf-8") if log.exists() else ""


@built
@in_browser
def test_the_search_works_without_a_server(tmp_path: Path) -> None:
    document, _ = browse("index.html?q=mixup", tmp_path)

    results = document[document.index('class="md-search-result"') :]
    assert "packages/composer-mixup/index.html" in results
    assert "reference/composer.algorithms.mixup.html" in results


@built
@in_browser
def test_the_search_finds_words_with_other_endings(tmp_path: Path) -> None:
    found = []
    for word in ("stopping", "stopped"):
        document, _ = browse(f"index.html?q={word}", tmp_path / word)
        results = document[document.index('class="md-search-result"') :]
        found.append(re.findall(r'href="([^"#?]+)', results))

    assert found[0] == found[1]
    assert any("how_do_i.html" in address for address in found[0])


@built
@in_browser
@pytest.mark.parametrize("page", ["index.html", "how_it_works.html", "tutorials/first_run.html"])
def test_no_request_leaves_a_page(page: str, tmp_path: Path) -> None:
    document, log = browse(page, tmp_path)

    assert "md-content" in document
    requested = set(re.findall(r'"url":"(https?://[^"/]+)', log))
    browsers_own = {address for address in requested if re.search(r"\.(google|googleapis|gvt1|gstatic)\.com$", address)}
    assert requested - browsers_own == set()
