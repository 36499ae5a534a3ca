# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The notebooks: every one runs from top to bottom, and what is committed with it is what such a run shows."""

import os
import re
from pathlib import Path

import pytest
from places import ROOT


nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install -e '.[around]'")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install -e '.[around]'")
jupyter_client = pytest.importorskip("jupyter_client", reason="nbclient is not installed: pip install -e '.[around]'")

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
if not NOTEBOOKS:
    pytest.skip("a source distribution has no notebooks", allow_module_level=True)

# Paths of a machine, but for the place where Debian puts data sets, which notebook 05 looks for and names.
FOLDERS = "tmp|home|root|work|opt|usr(?!/share/datasets/)|var|mnt|media|data|srv|Users|private"
MACHINE = re.compile(rf"(?<![\w.])/({FOLDERS})/|\b[A-Z]:\\\w|(site|dist)-packages")


def code_cells(notebook: "nbformat.NotebookNode") -> "list[nbformat.NotebookNode]":
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def shown(cell: "nbformat.NotebookNode") -> set[str]:
    kinds = set()
    for output in cell.outputs:
        kinds |= {output.name} if output.output_type == "stream" else set(output.get("data", {"error": None}))
    return kinds


class Kernel:
    """A kernel that runs one notebook after the other, in an empty folder. Importing transformers once saves a minute."""

    def __init__(self, folder: Path) -> None:
        self.work, self.temporary = folder / "work", folder / "temporary"
        self.work.mkdir()
        self.temporary.mkdir()
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
        paths |= {"IPYTHONDIR": str(folder / "ipython"), "TMPDIR": str(self.temporary)}
        options = {"RETNET_HF_NOTEBOOKS": "small", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        options |= {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
        options["ORT_DISABLE_TELEMETRY"] = "1"  # which leaves a file behind
        self.manager = jupyter_client.KernelManager(kernel_name="python3", shutdown_wait_time=60)
        self.manager.start_kernel(env=os.environ | paths | options, cwd=str(self.work))

    def run(self, notebook: "nbformat.NotebookNode") -> None:
        """Runs a notebook, which sees nothing of those before it."""
        for one in (nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("%reset -f")]), notebook):
            client = nbclient.NotebookClient(one, km=self.manager, timeout=240)
            client.execute()
            client.kc.stop_channels()


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    kernel = Kernel(tmp_path_factory.mktemp("kernel"))
    yield kernel
    kernel.manager.shutdown_kernel()
    assert not list(kernel.temporary.iterdir())  # nothing is left behind


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_it_runs_and_shows_what_is_committed(file, kernel):
    notebook = nbformat.read(file, as_version=4)
    committed = [shown(cell) for cell in code_cells(notebook)]
    kernel.run(notebook)
    assert [shown(cell) - {"stderr"} for cell in code_cells(notebook)] == committed
    assert not list(kernel.work.iterdir())


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_it_is_committed_as_one_whole_run_left_it_explains_itself_and_names_nothing_of_its_machine(file):
    assert file.stat().st_size < 1_000_000
    notebook = nbformat.read(file, as_version=4)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert sum("image/png" in shown(cell) for cell in cells) >= 2
    assert not any(shown(cell) & {"stderr", "error"} for cell in cells)
    said = [cell.source for cell in notebook.cells]
    kinds = ["code", *(cell.cell_type for cell in notebook.cells)]  # each cell of code comes after one of text
    assert ("code", "code") not in zip(kinds, kinds[1:])
    for output in (output for cell in cells for output in cell.outputs):
        texts = output.get("data", {}) | {"stream": output.get("text", "")}
        said += [text for kind, text in texts.items() if not kind.startswith("image/")]
    assert not [text for text in said if MACHINE.search(text)]
