"The manners of `qk`: help at once, one line for an error."
import re
import time
from pathlib import Path

import pytest
from nbformat import v4, write
from toy import GRID, make_grid, qk

from qk_geometry.cli import EXAMPLES
from qk_geometry.grid import Grid

NOTEBOOK = Path(__file__).parent.parent / "nbs/runs/train.ipynb"


def test_help_is_quick_and_has_an_example_for_every_command():
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        answer = qk("--help")
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 2 and answer.returncode == 0
    assert EXAMPLES and all(e in answer.stdout for e in EXAMPLES)
    for example in EXAMPLES:
        words = [w for w in example.split()[1:3 if example.startswith("qk grid") else 2]]
        assert f"Example: {example}" in " ".join(qk(*words, "--help").stdout.split())


@pytest.mark.parametrize("args, code, words", [
    (["nothing"], 2, "No such command"),
    (["grid", "run"], 2, "Missing argument"),
    (["grid", "run", "GRID", "--workers", "0"], 2, "workers"),
    (["grid", "run", "GRID", "--workers", "two"], 2, "valid integer"),
    (["grid", "run", "absent.toml"], 1, "absent.toml"),
    (["grid", "run", "GRID", "--data", "absent"], 1, "no text at"),
    (["grid", "run", "GRID", "--only", "seed=8"], 1, "no cell matches 'seed=8'"),
    (["grid", "run", "GRID", "--engine", "spark"], 2, "spark"),
    (["grid", "run", "GRID", "--address", "auto"], 1, "--address and --store need --engine ray"),
    (["grid", "run", "GRID", "--time-limit", "0"], 2, "time-limit"),
    (["explore", "--results", "absent"], 1, "no rows at absent/SCALE/GRID"),
    (["grid", "run", "GRID", "--results", "/dev/null"], 1, "cannot write results to /dev/null"),
    (["grid", "collect", "GRID"], 1, "no cell of toy.toml has run"),
    (["paper", "--notebook", "absent.ipynb"], 1, "no absent.ipynb here"),
])
def test_an_error_is_one_line(tmp_path, args, code, words):
    path = make_grid(tmp_path)
    answer = qk(*[path if a == "GRID" else a for a in args])
    assert answer.returncode == code and words in answer.stderr, answer.stderr
    assert answer.stderr.count("\n") == 1 and answer.stderr.startswith("qk: ") and answer.stdout == ""
    assert not (tmp_path / "results/smoke/toy/rows.parquet").exists()


def test_a_failed_cell_shows_in_the_exit_code_and_in_status(tmp_path):
    path = make_grid(tmp_path, GRID.replace("[0.1, 0.2]", "[0.1]").replace("[7, 37]", "[7, 13]"))
    answer = qk("grid", "run", path, "--workers", 2)
    assert answer.returncode == 1 and "1 of 2 cells in" in answer.stdout
    assert answer.stderr.splitlines()[-1].startswith("qk: 1 cells failed")
    listing = qk("grid", "status", path)
    assert listing.returncode == 0 and "2 cells: 1 ok, 0 running, 1 failed, 0 missing" in listing.stdout
    assert "RuntimeError: seed 13 diverged at step 1" in listing.stdout
    plan = qk("grid", "run", path, "--dry-run").stdout
    assert plan.startswith(listing.stdout) and re.fullmatch(r"1 cells left: about .+ with 1 at a time and .+ MB of disk, by 1 finished cells", plan.splitlines()[-1])


def test_an_estimate_before_anything_has_run(tmp_path):
    path = make_grid(tmp_path)
    assert qk("grid", "run", path, "--dry-run").stdout.splitlines()[-1] == "4 cells left; no estimate: no cell is done yet, and toy.ipynb has no epochs and steps_per_epoch that a trial could shorten"
    path.write_text(f'notebook = "{NOTEBOOK}"\n[nuisance]\nseed = [7, 37]\n[fixed]\nn_chars = 60000\nn_layers = 1\nd_model = 16\nn_ctx = 16\nepochs = 200\n')
    plan = qk("grid", "run", path, "--dry-run", "--workers", 2)
    assert re.fullmatch(r"2 cells left: about .+ with 2 at a time and .+ MB of disk, by a trial of 8 and 40 steps of seed=7-\w{8}", plan.stdout.splitlines()[-1]), plan.stderr
    assert not (tmp_path / "results").exists()


def test_a_part_of_a_grid_lists_the_rest_as_missing(tmp_path):
    path = make_grid(tmp_path, GRID.replace("[0.1, 0.2]", "[0.1]"))
    assert qk("grid", "run", path, "--only", "seed=7-").returncode == 0
    assert "1 of 2 cells in" in qk("grid", "collect", path).stdout
    assert [line.split(",")[1] for line in (Grid.load(path).results / "cells.csv").read_text().splitlines()] == ["status", "ok", "missing"]


def test_the_paper_is_a_page_without_code(tmp_path):
    body = "from pathlib import Path\nif scale == 'none': raise FileNotFoundError('no rows\\nat results/none')\nprint('the scale', 'is', scale, Path.cwd().name)"
    cells = [v4.new_code_cell("scale:str = 'cpu' # which results", metadata={"tags": ["parameters"]}), v4.new_code_cell(body)]
    path = tmp_path / "paper/paper.ipynb"
    path.parent.mkdir()
    write(v4.new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}}), path)
    before = path.read_bytes()
    answer = qk("paper", "--scale", "smoke", cwd=tmp_path)
    assert answer.returncode == 0 and "Open paper/paper.html in a browser" in answer.stdout, answer.stderr
    page = path.with_suffix(".html").read_text()
    assert "the scale is smoke paper" in page and "Path.cwd" not in page and path.read_bytes() == before
    answer = qk("paper", "--scale", "none", cwd=tmp_path)
    assert answer.returncode == 1 and answer.stderr.splitlines()[-1] == "qk: paper.ipynb: FileNotFoundError: no rows at results/none"
    assert path.with_suffix(".html").read_text() == page
