"""The page in a notebook, which a real Jupyter kernel executes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from composer.report import Report, RunNotFoundError

CELLS = {
    "one": "from composer.report import Report\n\nReport('{running}')",
    "compared": "Report(['{finished}', '{running}'], height=500)",
    "wrong": "Report('nothing-here')",
}


def test_one_line_shows_a_run_that_goes_on_and_two_compared(record: Any, tmp_path: Path) -> None:
    for name in ("finished", "running"):
        run = record(name, name=name).fit([3.0, 2.0]).evaluate(0.5)
        run.recorder._sender.flush()
    record("finished", name="finished").fit([3.0, 2.0]).end().close()
    notebook = nbformat.v4.new_notebook()
    for code in CELLS.values():
        places = {name: tmp_path / name for name in ("finished", "running")}
        notebook.cells.append(nbformat.v4.new_code_cell(code.format(**places)))
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(variable, str(tmp_path / variable))
        NotebookClient(notebook, kernel_name="python3", timeout=600, allow_errors=True).execute(cwd=str(tmp_path))
    [one], [compared], [wrong] = (cell.outputs for cell in notebook.cells)

    assert [output.output_type for output in (one, compared, wrong)] == ["execute_result", "execute_result", "error"]
    assert one.data["text/plain"] == f"Report(['{tmp_path}/running'])"
    assert "unfinished" in one.data["text/html"]
    assert "Comparison of 2 runs" in compared.data["text/html"]
    assert compared.data["text/html"].endswith('height="500" style="border: 0"></iframe>')
    assert re.fullmatch(r"'nothing-here' must be the folder of a run.*", wrong.evalue)


def test_a_report_without_a_run_is_refused_where_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match="must be the folder of a run"):
        Report(tmp_path)
    with pytest.raises(ValueError, match="`folders` must have at least one folder"):
        Report([])
