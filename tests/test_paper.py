"The paper is a function of stored rows: rebuilding gives the committed bytes, other rows give other bytes, and nothing loads torch."
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import papermill
import pytest

from qk_geometry.arms import RULES, intervention_tables
from qk_geometry.causes import read_receipts
from qk_geometry.claims import Study, ledger, table_ledger
from qk_geometry.columns import METRICS, write_rows
from qk_geometry.comovement import read_series
from qk_geometry.example import example_grid, example_interventions
from qk_geometry.interventions import INTERVENTIONS
from qk_geometry.relatives import read_relatives, relative_entries, relative_tables, system_cells
from qk_geometry.revisions import read_stand_ins, series_tables
from qk_geometry.stats import read_results
from qk_geometry.tables import paper_tables
from qk_geometry.typeset import save_table, to_markdown

ROOT = Path(__file__).resolve().parent.parent
SCALES = sorted(p.parent.parent.name for p in (ROOT / "results").glob("*/characters/rows.parquet"))
committed = pytest.mark.parametrize("scale", SCALES or [pytest.param("", marks=pytest.mark.skip(reason="no committed rows in results/*/characters"))])


def tables_of(scale):
    "All tables of the committed results of a scale."
    folder, published = ROOT / "results" / scale, ROOT / "paper" / "published.toml"
    main, steered = read_results(folder / "characters"), folder / "interventions"
    arms = read_results(steered) if steered.is_dir() else None
    tables = paper_tables(*main, published, scale) + (intervention_tables(*arms, read_receipts(steered), published, scale, main) if arms else [])
    if (folder / "checkpoints").is_dir(): tables = tables + series_tables(*read_series(folder / "checkpoints"), published, scale, read_stand_ins(folder))
    found = read_relatives(folder)
    cells = pd.concat([main[1], *([arms[1]] if arms else []), system_cells(found)])
    return tables + relative_tables(folder, found, published, scale) + [table_ledger(ledger(Study(main, arms), published, relative_entries(found)), scale, cells)]


def bytes_of(tables, folder):
    "Tables as file name -> bytes."
    return {p.name: p.read_bytes() for t in tables for p in save_table(t, folder)}


def written(rows, cells, scale, folder):
    "All tables of these rows as file name -> bytes."
    return bytes_of(paper_tables(rows, cells, ROOT / "paper" / "published.toml", scale), folder)


@committed
def test_committed_tables_are_those_of_the_committed_rows(scale, tmp_path):
    made = bytes_of(tables_of(scale), tmp_path)
    stored = {p.name: p.read_bytes() for p in (ROOT / "paper" / "tables" / scale).iterdir()}
    assert sorted(made) == sorted(stored)
    assert [name for name in made if made[name] != stored[name]] == []


@committed
def test_committed_figures_are_there_in_both_formats(scale):
    names = {p.name for p in (ROOT / "paper" / "figures" / scale).iterdir()}
    drawn = ("figure1", "figure2", "figure3", "multiverse", "specifications", *(("figure4", "causes") if (ROOT / "results" / scale / "interventions").is_dir() else ()),
             *(("figure5",) if (ROOT / "results" / scale / "checkpoints").is_dir() else ()), *(("systems",) if read_relatives(ROOT / "results" / scale) else ()))
    assert names == {f"{name}.{kind}" for name in drawn for kind in ("pdf", "png")}


@pytest.mark.skipif("smoke" not in SCALES, reason="no committed rows in results/smoke/characters")
def test_the_committed_paper_shows_the_committed_tables():
    cells = nbformat.read(ROOT / "paper" / "paper.ipynb", 4).cells
    shown = [o["data"].get("text/markdown", "") for c in cells for o in c.get("outputs", []) if "data" in o]
    tables = tables_of("smoke")
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
    modules = ", ".join(f"qk_geometry.{m}" for m in ("data", "columns", "example", "stats", "causes", "figures", "typeset", "tables", "arms"))
    assert subprocess.run([sys.executable, "-c", f"import sys, {modules}; sys.exit('torch' in sys.modules)"], cwd=ROOT).returncode == 0


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    "A results folder with made-up rows under three scales; the middle one has no interventions."
    folder = tmp_path_factory.mktemp("results")
    rows, cells, _ = example_grid()
    for scale in ("smoke", "cpu", "paper"):
        write_rows(rows, folder / scale / "characters" / "rows.parquet")
        run = dict(d_model=32, n_ctx=32, n_params=1000, seconds=1.5, tokens_per_second=2000, version="0")
        cells.assign(**run).to_csv(folder / scale / "characters" / "cells.csv", index=False)
    rows, cells, _ = example_interventions()
    for scale in ("smoke", "paper"):
        write_rows(rows, folder / scale / "interventions" / "rows.parquet")
        cells.to_csv(folder / scale / "interventions" / "cells.csv", index=False)
        receipt = dict(cell="k_clamp-7", intervention="k_clamp", layer=0, weight="W_K", applications=1, change=1.0, optimizer_state="kept", scale=np.nan)
        spectra = dict.fromkeys(("frobenius_before", "frobenius_after", "erank_sv_before", "erank_sv_after"), 8.0)
        pd.DataFrame([receipt | spectra]).to_parquet(folder / scale / "interventions" / "receipts.parquet")
    return folder


@pytest.mark.parametrize("scale", ["smoke", "cpu", "paper"])
def test_the_paper_runs_and_only_smoke_is_a_pipeline_check(scale, made_up, tmp_path):
    papermill.execute_notebook(ROOT / "paper" / "paper.ipynb", tmp_path / "paper.ipynb", cwd=ROOT / "paper", progress_bar=False,
                               parameters=dict(scale=scale, results=str(made_up), out=str(tmp_path)))
    outputs = str([c.get("outputs") for c in nbformat.read(tmp_path / "paper.ipynb", 4).cells])
    assert ("pipeline check" in outputs) == (scale == "smoke")
    assert ("published spread" in outputs) == (scale == "paper")
    assert {p.suffix for p in (tmp_path / "figures" / scale).iterdir()} == {".pdf", ".png"}
    assert ("No interventions have been run at this scale" in outputs) == (scale == "cpu") == (not (tmp_path / "tables" / scale / "table5.md").exists())
    assert ("| 4 of 4 | 4 of 4 |" in outputs) == (scale == "paper")           # the directions of an arm, decided
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


def test_what_is_cited_has_an_entry_among_the_references():
    entries = re.findall(r"@\w+\{.*?\n\}", (ROOT / "paper" / "references.bib").read_text(encoding="utf-8"), re.S)
    plain = lambda text: re.sub(r"[{}]", "", text.replace(r'\"o', "ö"))
    known = {f"{plain(re.search(r'author = {(.*?),', e)[1])} {re.search(r'year = {(.*?)}', e)[1]}" for e in entries if "author = " in e}
    prose = [c.source for c in nbformat.read(ROOT / "paper" / "paper.ipynb", 4).cells if c.cell_type == "markdown"]
    text = "\n".join((*(column.source for column in METRICS.values()), *prose))
    cited = {" ".join(pair) for pair in re.findall(r"\b([A-ZÀ-Þ][\w'-]+)(?: et al\.| and [A-ZÀ-Þ][\w'-]+)? ((?:19|20)\d\d)\b", text)}
    assert {"Shannon 1948", "Björck 1973", "Vaswani 2017"} <= cited and sorted(cited - known) == []
    ids = set(re.findall(r"arXiv (\d{4}\.\d{5})", text))
    assert len(ids) >= 4 and ids <= set(re.findall(r"eprint = {(.*?)}", "\n".join(entries)))


def test_every_arm_has_a_rule_and_the_other_way_round():
    assert list(RULES) == list(INTERVENTIONS)


def test_what_an_arm_did_shows_in_the_tables_of_arms_alone(tmp_path):
    rows, cells, _ = example_interventions()
    receipts = read_receipts(ROOT / "results" / "smoke" / "interventions")
    def made(rows, receipts): return bytes_of(intervention_tables(rows, cells, receipts, ROOT / "paper" / "published.toml", "cpu"), tmp_path)
    before = made(rows, receipts)
    last = (rows["step"] == 2000) & (rows["cell"] == "freeze_k-42")
    altered = made(rows.assign(attention_entropy=rows["attention_entropy"].where(~last, 1.0)), receipts)
    assert {Path(n).stem for n in before if before[n] != altered[n]} == {"table5", "table5_deltas", "directions", "causes"}
    assert {Path(n).stem for n in before if before[n] != made(rows, receipts.assign(change=1.0))[n]} == {"receipts"}
