"The paper is a function of stored rows: rebuilding gives the committed bytes, other rows give other bytes, and nothing loads torch."
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import papermill
import pytest

from qk_geometry.columns import write_rows
from qk_geometry.example import example_grid
from qk_geometry.stats import read_results
from qk_geometry.tables import paper_tables
from qk_geometry.typeset import save_table, to_markdown

ROOT = Path(__file__).resolve().parent.parent
SCALES = sorted(p.parent.parent.name for p in (ROOT / "results").glob("*/characters/rows.parquet"))
committed = pytest.mark.parametrize("scale", SCALES or [pytest.param("", marks=pytest.mark.skip(reason="no committed rows in results/*/characters"))])


def written(rows, cells, scale, folder):
    "All tables of these rows as file name -> bytes."
    return {p.name: p.read_bytes() for t in paper_tables(rows, cells, ROOT / "paper" / "published.toml", scale) for p in save_table(t, folder)}


@committed
def test_committed_tables_are_those_of_the_committed_rows(scale, tmp_path):
    made = written(*read_results(ROOT / "results" / scale / "characters"), scale, tmp_path)
    stored = {p.name: p.read_bytes() for p in (ROOT / "paper" / "tables" / scale).iterdir()}
    assert sorted(made) == sorted(stored)
    assert [name for name in made if made[name] != stored[name]] == []


@committed
def test_committed_figures_are_there_in_both_formats(scale):
    names = {p.name for p in (ROOT / "paper" / "figures" / scale).iterdir()}
    assert names == {f"{name}.{kind}" for name in ("figure1", "figure2", "figure3", "multiverse") for kind in ("pdf", "png")}


@pytest.mark.skipif("smoke" not in SCALES, reason="no committed rows in results/smoke/characters")
def test_the_committed_paper_shows_the_committed_tables():
    cells = nbformat.read(ROOT / "paper" / "paper.ipynb", 4).cells
    shown = [o["data"].get("text/markdown", "") for c in cells for o in c.get("outputs", []) if "data" in o]
    tables = paper_tables(*read_results(ROOT / "results" / "smoke" / "characters"), ROOT / "paper" / "published.toml", "smoke")
    wanted = set(re.findall(r'^show\("(\w+)"\)', "\n".join(c.source for c in cells), re.M))
    assert len(wanted) >= 8 and wanted <= {t.name for t in tables}
    assert [t.name for t in tables if t.name in wanted and to_markdown(t) not in shown] == []


@pytest.mark.parametrize("metric, tables", [("k_pr_cov", {"table4", "ours_against_published"}), ("val_loss", {"table3"}), ("attention_entropy", {"multiverse_exceptions", "invariants"})])
def test_an_altered_row_changes_the_tables_that_rest_on_it(metric, tables, tmp_path):
    rows, cells, _ = example_grid()
    last = (rows["step"] == rows["step"].max()) & rows["cell"].str.startswith("independent-3")
    altered = rows.assign(**{metric: np.where(last, 1.5 * rows[metric], rows[metric])})
    before, after = written(rows, cells, "cpu", tmp_path), written(altered, cells, "cpu", tmp_path)
    changed = {Path(name).stem for name in before if before[name] != after[name]}
    assert tables <= changed and not changed & {"table1", "left_open", "setup"}


def test_torch_is_not_loaded():
    modules = ", ".join(f"qk_geometry.{m}" for m in ("data", "columns", "example", "stats", "figures", "typeset", "tables"))
    assert subprocess.run([sys.executable, "-c", f"import sys, {modules}; sys.exit('torch' in sys.modules)"], cwd=ROOT).returncode == 0


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    "A results folder with made-up rows under two scales."
    folder = tmp_path_factory.mktemp("results")
    rows, cells, _ = example_grid()
    for scale in ("smoke", "cpu"):
        write_rows(rows, folder / scale / "characters" / "rows.parquet")
        run = dict(d_model=32, n_ctx=32, n_params=1000, seconds=1.5, tokens_per_second=2000, version="0")
        cells.assign(**run).to_csv(folder / scale / "characters" / "cells.csv", index=False)
    return folder


@pytest.mark.parametrize("scale", ["smoke", "cpu"])
def test_the_paper_runs_and_only_smoke_is_a_pipeline_check(scale, made_up, tmp_path):
    papermill.execute_notebook(ROOT / "paper" / "paper.ipynb", tmp_path / "paper.ipynb", cwd=ROOT / "paper", progress_bar=False,
                               parameters=dict(scale=scale, results=str(made_up), out=str(tmp_path)))
    outputs = str([c.get("outputs") for c in nbformat.read(tmp_path / "paper.ipynb", 4).cells])
    assert ("pipeline check" in outputs) == (scale == "smoke")
    assert ("published spread" in outputs) == (scale != "smoke")
    assert {p.suffix for p in (tmp_path / "figures" / scale).iterdir()} == {".pdf", ".png"}
    assert "pipeline check" in (tmp_path / "tables" / scale / "table4.md").read_text() or scale != "smoke"


def test_the_paper_says_what_is_missing(tmp_path):
    with pytest.raises(papermill.PapermillExecutionError, match="run the grid"):
        papermill.execute_notebook(ROOT / "paper" / "paper.ipynb", tmp_path / "paper.ipynb", cwd=ROOT / "paper", progress_bar=False,
                                   parameters=dict(results=str(tmp_path), out=str(tmp_path)))
    assert not (tmp_path / "tables").exists()


def test_the_readme_shows_the_committed_table_and_figure():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme.split("<!-- ours against published: begin -->")[1].split("<!-- ours against published: end -->")[0].strip()
    scale = re.search(r"Scale: (\w+)\.", shown)[1]
    assert shown == (ROOT / "paper/tables" / scale / "ours_against_published.md").read_text(encoding="utf-8").strip()
    for figure in re.findall(r"!\[.*?\]\((.*?)\)", readme): assert (ROOT / figure).is_file(), figure
