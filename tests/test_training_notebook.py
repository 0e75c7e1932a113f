"The training notebook: its parameters are the configuration, and a run that was killed half way ends with the same bytes."
import os
import signal
from dataclasses import fields
from pathlib import Path

from toy import Runner, qk, wait_for

from qk_geometry.columns import write_rows
from qk_geometry.grid import Grid, check, is_done, notebook_parameters
from qk_geometry.train import train
from qk_geometry.watch import WatchConfig

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "nbs/runs/train.ipynb"


def test_parameters_are_the_fields_of_the_configuration():
    fields_of_config = {f.name: (type(f.default), f.default) for f in fields(WatchConfig)}
    assert notebook_parameters(NOTEBOOK) == fields_of_config | {name: (str, "") for name in ("cell", "out", "members")}


def test_the_grids_of_the_study_are_what_the_methods_say(tmp_path):
    for scale, depths, seeds, width in (("smoke", [2, 3], 2, 32), ("cpu", [4, 6, 8], 4, 64), ("paper", [4, 6, 8], 4, 256)):
        grid = Grid.load(ROOT / f"grids/{scale}/characters.toml")
        assert len(grid.cells()) == 3 * len(depths) * seeds and grid.axes["n_layers"] == depths and grid.fixed["d_model"] == width
        for cell in grid.cells(): WatchConfig(**cell.parameters).validate()
    check(Grid.load(ROOT / "grids/smoke/characters.toml", results=tmp_path))


def test_killed_in_training_and_resumed(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(f'notebook = "{NOTEBOOK}"\nconfig = "qk_geometry.train:TrainConfig"\n[nuisance]\nseed = [7]\n'
                    "[fixed]\nn_chars = 100000\nn_layers = 1\nd_model = 16\nn_ctx = 16\nepochs = 8\nsteps_per_epoch = 40\n")
    grid = Grid.load(path, results=tmp_path / "results")
    cell, = grid.cells()
    runner = Runner("grid", "run", path, "--results", grid.results)
    assert wait_for(cell.file("checkpoint.safetensors").exists), runner.process.stderr.read()
    os.killpg(runner.process.pid, signal.SIGKILL)
    assert runner.process.wait(60) == -signal.SIGKILL and runner.gone() and not is_done(cell)
    answer = qk("grid", "run", path, "--results", grid.results)
    assert answer.returncode == 0, answer.stderr
    whole = train(WatchConfig(**cell.parameters).training, progress=False, cell=cell.id)
    assert (grid.results / "rows.parquet").read_bytes() == write_rows(whole.rows, tmp_path / "whole.parquet").read_bytes()
