"The command for a machine with a GPU, on a CPU and in small, and its cells against those of the grid."
import dataclasses
import json
import subprocess
import sys

import pandas as pd
import pytest

from qk_geometry.columns import read_rows
from qk_geometry.gpu import GRID, PAPER, load_grid
from qk_geometry.grid import Grid, is_done
from qk_geometry.train import train
from qk_geometry.watch import WatchConfig
from test_training_notebook import NOTEBOOK

TOY = f"""notebook = "{NOTEBOOK}"
[scientific]
init = ["identical", "independent"]
[nuisance]
seed = [7, 37]
[fixed]
n_layers = 1
d_model = 16
n_ctx = 16
batch_size = 4
epochs = 2
steps_per_epoch = 4
lr = 1
n_eval = 4
n_probe = 4
"""


def gpu(*args): return subprocess.run([sys.executable, "-m", "qk_geometry.gpu", *map(str, args)], capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("name", ["characters", "interventions"])
def test_cells_are_those_of_the_grid(tmp_path, name):
    path = GRID.with_name(f"{name}.toml")
    assert load_grid(path, tmp_path).cells() == Grid.load(path, tmp_path / f"results/paper/{name}").cells()


def test_measures_and_trains_a_toy_grid(tmp_path):
    (tmp_path / "prose").mkdir()
    (tmp_path / "prose/train.txt").write_text("a text long enough to be cut in two, " * 99)
    grid = tmp_path / "grids/toy/characters.toml"
    grid.parent.mkdir(parents=True)
    grid.write_text(TOY)
    shape = {f.name: f.default for f in dataclasses.fields(PAPER)} | dict(n_layers=1, d_model=16, n_ctx=16, batch_size=4, n_eval=4, n_probe=4)
    answer = gpu("--out", tmp_path / "out", "--data", tmp_path / "prose", "--grid", grid, "--members", 2, "--shape", json.dumps(shape))
    assert answer.returncode == 0, answer.stderr
    lines = pd.read_csv(tmp_path / "out/gpu.csv")
    assert lines["what"].to_list() == ["single", "ensemble", "transformers GPT-2"] and (lines["status"][:2] == "ok").all() and (lines["tokens_per_second"][:2] > 0).all()
    assert json.loads((tmp_path / "out/machine.json").read_text())["matrix_rate"] > 0
    same = Grid.load(grid, tmp_path / "out/results/toy/characters", tmp_path / "prose")
    assert all(map(is_done, same.cells())) and len(read_rows(same.results / "rows.parquet")["cell"].unique()) == 4
    assert "4 of 4 cells done" in answer.stdout
    cell = same.cells()[1]
    alone = train(dataclasses.replace(WatchConfig(**cell.parameters).training, corpus=str(tmp_path / "prose")), progress=False).summary
    assert json.loads(cell.file("summary.json").read_text())["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-3)


def test_one_line_where_it_cannot_work(tmp_path):
    cpu = ["--shape", '{"device": "cpu"}']
    for args, words in ((["--grid", tmp_path / "none.toml", *cpu], "no grid file"), (["--data", tmp_path / "none", *cpu], "no text at"), (["--shape", '{"lr": 0.0}'], "lr = 0.0 must be positive")):
        answer = gpu("--out", tmp_path, *args)
        assert answer.returncode == 1 and words in answer.stderr and len(answer.stderr.strip().splitlines()) == 1
