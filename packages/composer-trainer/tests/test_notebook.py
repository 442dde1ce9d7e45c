"""The Trainer's output in notebooks, which a real Jupyter kernel executes."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

CELLS = {
    "setup": """
        import os, signal, warnings
        import torch
        warnings.filterwarnings("ignore", message="IProgress")  # of libraries that torchmetrics imports
        from composer import Callback, Trainer
        from composer.testing import RandomClassificationDataset, SimpleModel

        data = torch.utils.data.DataLoader(RandomClassificationDataset(size=100), batch_size=1)

        def make(**options):
            model = SimpleModel()
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            return Trainer(model=model, train_dataloader=data, optimizers=sgd, device="cpu", seed=1, **options)
    """,
    "fit": """
        trainer = make(max_duration="2ep", eval_dataloader=data, python_log_level="info")
        trainer.fit()
    """,
    "fit again": 'trainer.fit(duration="1ep")',
    "evaluate": "trainer.eval()",
    "interrupted": """
        class Interrupt(Callback):
            def batch_end(self, state, logger):
                if state.timestamp.batch.value == 40:
                    os.kill(os.getpid(), signal.SIGINT)  # as a notebook interrupts its kernel

        interrupted = make(max_duration="80ba", callbacks=Interrupt())
        interrupted.fit()
    """,
    "after the interrupt": "interrupted.fit()",
    "trainer": """
        from composer.loggers import InMemoryLogger

        from torchmetrics.classification import MulticlassAccuracy

        shown = Trainer(
            model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(1, 2)),
            loss=torch.nn.functional.cross_entropy,
            metrics=MulticlassAccuracy(2),
            train_dataloader=data,
            eval_dataloader=data,
            optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            max_duration="2ep",
            device="cpu",
            progress_bar=False,
            loggers=InMemoryLogger(),
        )
        shown.fit()
        shown
    """,
    "state": "shown.state",
    "plan": "shown.engine.explain()",
    "plot": "shown.plot()",
    "plot of one": 'shown.plot("Accuracy").axes[0].get_title()',
    "console": 'make(max_duration="2ba", progress_bar=False, log_to_console=True).fit()',
    "to a file": """
        with open("log.txt", "w") as stream:
            logged = make(max_duration="1ep", console_stream=stream)
            logged.fit()
            logged.close()
    """,
    "download": """
        from composer.checkpoint.storage import showing_progress

        with showing_progress(True, "ep1.pt") as callback:
            callback.set_size(100)
            for _ in range(100):
                callback.relative_update(1)
    """,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the notebook."""
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def outputs(folder: Path) -> dict[str, list[Any]]:
    """The outputs of each cell."""
    notebook = nbformat.v4.new_notebook()
    for code in CELLS.values():
        notebook.cells.append(nbformat.v4.new_code_cell(re.sub(r"^ {8}", "", code, flags=re.MULTILINE)))
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(variable, str(folder / variable))
        NotebookClient(notebook, kernel_name="python3", timeout=600, allow_errors=True).execute(cwd=str(folder))
    return dict(zip(CELLS, (cell.outputs for cell in notebook.cells), strict=True))


def bars(outputs: list[Any]) -> list[str]:
    """The lines of the bars, as they stand at the end."""
    return [output.data["text/plain"] for output in outputs if output.output_type == "display_data"]


def printed(outputs: list[Any]) -> str:
    """Return the printed text."""
    return "".join(output.text for output in outputs if output.output_type == "stream")


def test_nothing_is_red_but_the_interrupt(outputs: dict[str, list[Any]]) -> None:
    streams = {output.name for each in outputs.values() for output in each if output.output_type == "stream"}
    errors = {cell: [o.ename for o in each if o.output_type == "error"] for cell, each in outputs.items()}

    assert streams == {"stdout"}
    assert {cell: names for cell, names in errors.items() if names} == {"interrupted": ["KeyboardInterrupt"]}


def test_nothing_needs_a_widget_or_the_network(outputs: dict[str, list[Any]]) -> None:
    kinds = {kind for each in outputs.values() for o in each if "data" in o for kind in o.data}

    assert kinds == {"text/plain", "text/html", "image/png"}
    assert "http" not in json.dumps(outputs)


def test_each_bar_is_one_line_that_is_redrawn_to_its_end(outputs: dict[str, list[Any]]) -> None:
    titles = ["train epoch 1", "eval  epoch 1", "train epoch 2", "eval  epoch 2"]
    shown = bars(outputs["fit"])

    assert [line[:13] for line in shown] == titles
    assert all(re.search(r" 100%\|\u2588{10}\| 100/100 \[", line) for line in shown)
    assert all("\r" not in line and "\n" not in line for line in shown)
    assert "loss=" in shown[0]


def test_the_config_and_log_records_are_printed_once(outputs: dict[str, list[Any]]) -> None:
    assert printed(outputs["fit"]).count("Config:\n") == 1
    assert ": INFO: composer." in printed(outputs["fit"])
    assert "Config" not in printed(outputs["fit again"])


def test_a_second_fit_and_an_evaluation_have_bars_of_their_own(outputs: dict[str, list[Any]]) -> None:
    again, evaluated = bars(outputs["fit again"]), bars(outputs["evaluate"])

    assert [line[:13] for line in again] == ["train epoch 3", "eval  epoch 3"]
    assert [line[:13] for line in evaluated] == ["eval  epoch 3"]
    assert all(" 100%|" in line for line in [*again, *evaluated])


def test_an_interrupted_bar_stays_where_it_was_and_the_next_one_goes_on(outputs: dict[str, list[Any]]) -> None:
    [before], [after] = bars(outputs["interrupted"]), bars(outputs["after the interrupt"])

    assert "/80 [" in before
    assert "100%" not in before
    assert "| 80/80 [" in after
    assert "SIGINT: the batch is finished first" in printed(outputs["interrupted"])


def test_the_console_logger_prints_to_stdout(outputs: dict[str, list[Any]]) -> None:
    assert "Config:\n" in printed(outputs["console"])
    assert "Train loss/train/total: " in printed(outputs["console"])


def test_a_stream_that_is_not_the_notebooks_gets_lines(outputs: dict[str, list[Any]], folder: Path) -> None:
    text = (folder / "log.txt").read_text()

    assert bars(outputs["to a file"]) == []
    assert "Config:\n" in text
    assert re.search(r"^train epoch 1    100% 100/100 \[.*\]$", text, re.MULTILINE)
    assert "\r" not in text


def test_other_bars_are_redrawn_in_place_too(outputs: dict[str, list[Any]]) -> None:
    assert "\rep1.pt: 100%|" in printed(outputs["download"])


@pytest.mark.parametrize("cell", ["trainer", "state", "plan"])
def test_objects_are_small_tables_without_scripts(outputs: dict[str, list[Any]], cell: str) -> None:
    shown = outputs[cell][-1].data["text/html"]
    tree = xml.etree.ElementTree.fromstring(f"<div>{shown}</div>")  # well-formed, so all text is escaped

    tags = {element.tag for element in tree.iter()}
    assert tags <= {"div", "table", "caption", "tr", "th", "td", "details", "summary"}
    text = " ".join(tree.itertext())
    if cell != "plan":
        assert "epoch 2, batch 200, 200 samples of 2ep" in text
        assert "SGD, learning rate 0.1" in text
        assert "eval/MulticlassAccuracy" in text
    if cell != "state":
        assert "InMemoryLogger" in text
    assert len(shown) < 30_000
    assert "#" not in shown  # no colour of its own: that of the page, light or dark


def test_curves_are_drawn(outputs: dict[str, list[Any]]) -> None:
    (result,) = [output for output in outputs["plot"] if "image/png" in output.get("data", {})]
    assert result.output_type == "execute_result"
    assert outputs["plot of one"][-1].data["text/plain"] == "'MulticlassAccuracy'"
