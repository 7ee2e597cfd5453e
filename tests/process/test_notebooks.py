"""The tutorials' notebooks are what their script makes of the pages, and run as they are."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from runs import PATIENCE

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_is_its_page(page):
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "scripts" / "notebooks.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert (ROOT / "docs" / "notebooks" / f"{page.stem}.ipynb").read_text("utf-8") == script.notebook(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_runs(page, tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    made = nbformat.read(ROOT / "docs" / "notebooks" / f"{page.stem}.ipynb", as_version=4)
    NotebookClient(made, timeout=PATIENCE, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [
        (cell, "".join(output.get("text", "") for output in cell.outputs))
        for cell in made.cells
        if cell.cell_type == "code"
    ]
    assert any("MB up" in text or "bytes up" in text for _, text in printed)
    for cell, text in printed:
        assert not cell.source.startswith("!") or (text and "Traceback" not in text and "Error" not in text)
