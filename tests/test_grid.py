"What a grid refuses before anything starts, and what becomes of cells that fail."
import json
from pathlib import Path

import pandas as pd
import pytest
from toy import GRID, Runner, make_grid, wait_for

from qk_geometry.columns import read_rows
from qk_geometry.grid import Grid, check, collect, is_done, status
from qk_geometry.runner import run_grid


@pytest.mark.parametrize("line, words", [
    ("sede = 7", "no parameter 'sede'"),
    ("threads = 2.0", "threads = 2.0 is float, but the notebook declares int"),
    ("threads = true", "threads = True is bool"),
    ("corpus = 3", "corpus = 3 is int, but the notebook declares str"),
    ("corpus = 'nowhere'", "no corpus 'nowhere'"),
    ("seed = 3", "set in [nuisance] and again in [fixed]"),
    ("cell = 'x'", "set by the runner"),
    ("threads = nan", "declares int"),
    ("pause = nan", "Cannot overwrite"),
])
def test_refused_before_anything_starts(tmp_path, line, words):
    with pytest.raises((ValueError, FileNotFoundError)) as error: run_grid(Grid.load(make_grid(tmp_path, f"{GRID}{line}\n")))
    assert words in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "results").exists()


def test_values_are_judged_by_the_configuration(tmp_path, monkeypatch):
    (tmp_path / "toyconfig.py").write_text("from dataclasses import dataclass\n@dataclass\nclass C:\n    lr: float = 0.0\n"
                                           "    def validate(self):\n        if self.lr > 0.15: raise ValueError(f'lr = {self.lr} is too large')\n")
    monkeypatch.syspath_prepend(tmp_path)
    grid = Grid.load(make_grid(tmp_path, 'config = "toyconfig:C"\n' + GRID))
    with pytest.raises(ValueError, match=r"cell lr=0.2-seed=7-\w{8}: lr = 0.2 is too large"): check(grid)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("place", ["file", "/proc"])
def test_results_folder_that_cannot_be_written(tmp_path, place):
    if place == "file": (tmp_path / "file").write_text("in the way")
    results = tmp_path / "file" if place == "file" else Path("/proc/results")
    if place == "/proc" and not Path("/proc").is_dir(): pytest.skip("no /proc on this system")
    with pytest.raises(OSError, match="cannot write results to") as error: run_grid(Grid.load(make_grid(tmp_path), results=results))
    assert "\n" not in str(error.value)


def test_an_id_follows_every_parameter(tmp_path):
    first = Grid.load(make_grid(tmp_path)).cells()
    second = Grid.load(make_grid(tmp_path, GRID + "threads = 2\n")).cells()
    same = Grid.load(make_grid(tmp_path, GRID.replace("pause = 0.0", "threads = 1\npause = 0"))).cells()
    assert [c.id for c in first] == [c.id for c in same] and not {c.id for c in first} & {c.id for c in second}
    assert [c.id[:-9] for c in first] == ["lr=0.1-seed=7", "lr=0.1-seed=37", "lr=0.2-seed=7", "lr=0.2-seed=37"]


def test_the_path_of_a_text_is_no_parameter(tmp_path):
    for place in ("here", "there"):
        (tmp_path / place / "prose").mkdir(parents=True)
        (tmp_path / place / "prose/train.txt").write_text("a text long enough to be cut in two " * 99)
    path = make_grid(tmp_path, GRID.replace("[0.1, 0.2]", "[0.1]").replace("[7, 37]", "[7]"))
    builtin = Grid.load(path)
    here, there = (Grid.load(path, data=tmp_path / place / "prose") for place in ("here", "there"))
    named = Grid.load(make_grid(tmp_path, path.read_text() + 'corpus = "prose"\n'), data=tmp_path / "here")
    assert here.cells() == there.cells() == named.cells() != builtin.cells()
    assert run_grid(here) == {}
    cell, = here.cells()
    assert json.loads(cell.file("summary.json").read_text())["QK_DATA"] == str(tmp_path / "here/prose")
    assert str(tmp_path) not in json.dumps(json.loads(cell.file("parameters.json").read_text())["parameters"])


def test_a_failed_cell_becomes_a_line_and_the_others_go_on(tmp_path):
    grid = Grid.load(make_grid(tmp_path, GRID.replace("[0.1, 0.2]", "[0.1]").replace("[7, 37]", "[13, 7, 14]") + "threads = 2\n"))
    failures = run_grid(grid, workers=2)
    raised, silent = failures.values()
    assert raised == "RuntimeError: seed 13 diverged at step 1" and "without calling finish_cell" in silent
    collect(grid)
    lines = pd.read_csv(grid.results / "cells.csv", keep_default_na=False)
    assert list(lines["status"]) == ["failed", "ok", "failed"] and list(lines["error"]) == [raised, "", silent]
    assert set(read_rows(grid.results / "rows.parquet")["cell"]) == {lines["cell"][1]}
    assert json.loads(grid.cells()[1].file("summary.json").read_text())["OMP_NUM_THREADS"] == "2"


def test_one_process_can_run_several_seeds(tmp_path):
    alone = Grid.load(make_grid(tmp_path / "alone", GRID.replace("[7, 37]", "[7, 37, 42, 13, 9]")))
    together = Grid.load(make_grid(tmp_path / "together", "seeds_per_process = 3\n" + alone.path.read_text()))
    assert [c.id for c in alone.cells()] == [c.id for c in together.cells()] and [len(j.cells) for j in together.jobs()] == [3, 2, 3, 2]
    failures = run_grid(together, workers=2, only="lr=0.1*")
    thirteen, nine = together.jobs()[1].cells
    assert failures == dict.fromkeys((thirteen.id, nine.id), "RuntimeError: seed 13 diverged at step 1")
    assert [is_done(c) for c in together.cells()] == [True] * 3 + [False] * 7
    assert run_grid(together, only="seed=9") == failures | {c.id: e for c, e in zip(together.jobs()[3].cells, failures.values())}
    assert together.cells()[0].file("starts").read_text() == "start\n" and not nine.file("starts").exists()
    assert json.loads(thirteen.file("parameters.json").read_text())["members"] == [thirteen.id, nine.id]


def test_too_many_failures_end_the_run(tmp_path):
    grid = Grid.load(make_grid(tmp_path, GRID.replace("[7, 37]", "[13, 7]")))
    assert len(run_grid(grid, max_failures=1)) == 1
    assert list(status(grid)["status"]) == ["failed", "missing", "missing", "missing"]


def test_a_sentinel_of_another_cell_or_a_damaged_file_is_not_done(tmp_path):
    grid = Grid.load(make_grid(tmp_path, GRID.replace("[0.1, 0.2]", "[0.1]")))
    assert run_grid(grid, workers=2) == {}
    first, second = grid.cells()
    for name in ("rows.parquet", "summary.json", "done.json"): second.file(name).write_bytes(first.file(name).read_bytes())
    first.file("rows.parquet").write_bytes(first.file("rows.parquet").read_bytes()[:-1])
    assert not is_done(first) and not is_done(second)


def test_two_runners_share_one_folder(tmp_path):
    path = make_grid(tmp_path, GRID.replace("pause = 0.0", "pause = 1.0").replace("[0.1, 0.2]", "[0.1]").replace("[7, 37]", "[7, 37, 42]"))
    runners = [Runner("grid", "run", path) for _ in range(2)]
    assert [r.process.wait(300) for r in runners] == [0, 0], [r.process.stderr.read() for r in runners]
    grid = Grid.load(path)
    assert [c.file("starts").read_text() for c in grid.cells()] == ["start\n"] * 3
    assert (collect(grid)["status"] == "ok").all() and wait_for(lambda: not any(r.processes() for r in runners))
