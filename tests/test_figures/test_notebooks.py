"""Every notebook runs, and its two forms are one notebook without outputs."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import jupytext
import nbformat
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
SCRIPTS = sorted(FOLDER.glob("*.py"))
CELLS = ("cell_type", "source")


def test_every_notebook_is_a_pair():
    assert SCRIPTS
    assert {file.stem for file in SCRIPTS} == {file.stem for file in FOLDER.glob("*.ipynb")}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.stem)
def test_the_pair_agrees_and_holds_no_outputs(script):
    built = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(built)
    written = jupytext.read(script)
    assert [[cell[key] for key in CELLS] for cell in built.cells] == [
        [cell[key] for key in CELLS] for cell in written.cells
    ], "run jupytext --sync notebooks/*.py"
    for cell in built.cells:
        assert not cell.get("outputs"), cell.source
        assert cell.get("execution_count") is None


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.stem)
def test_it_runs(script):
    from nbclient import NotebookClient
    from traitlets.config import Config

    notebook = jupytext.read(script)
    # Sockets by name: a port that is free when it is chosen may be taken when the kernel asks for it.
    with TemporaryDirectory() as folder:
        sockets = {"transport": "ipc", "ip": f"{folder}/kernel"}
        client = NotebookClient(
            notebook,
            config=Config(KernelManager=sockets),
            kernel_name="python3",
            timeout=240,
            startup_timeout=240,
            resources={"metadata": {"path": str(FOLDER.parent)}},
        )
        client.execute(env={**os.environ, "PYTHONWARNINGS": "error"})
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    errors = [output for output in outputs if output.get("name") == "stderr"]
    assert errors == []
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 2
