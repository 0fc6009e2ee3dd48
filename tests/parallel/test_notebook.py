"""The notebook of the examples runs as it stands, and is kept without outputs."""

from pathlib import Path

import nbformat
import pytest
from support.documents import ROOT

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def test_it_is_kept_without_outputs(notebook):
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells
    assert [(cell.outputs, cell.execution_count) for cell in cells] == [([], None)] * len(cells)


def test_it_runs(notebook, tmp_path: Path, monkeypatch):
    from nbclient import NotebookClient

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    client = NotebookClient(
        notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    shown = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "largest relative difference of the evaluation losses" in shown
    pictures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 1
