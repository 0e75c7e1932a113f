"A grid that is killed and run again ends with the same bytes as one that ran through, and no process stays behind."
import os
import signal

import pytest
from toy import GRID, Runner, make_grid, qk, wait_for

from qk_geometry.columns import read_rows
from qk_geometry.grid import Grid, is_done, is_running

SLOW = GRID.replace("pause = 0.0", "pause = 1.5").replace("[0.1, 0.2]", "[0.1]").replace("[7, 37]", "[7, 37, 42]")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "rows.parquet of a run that nobody disturbed."
    path = make_grid(tmp_path_factory.mktemp("whole"), SLOW)
    answer = qk("grid", "run", path, "--workers", 2)
    assert answer.returncode == 0, answer.stderr
    rows = Grid.load(path).results / "rows.parquet"
    assert len(read_rows(rows)) == 9
    return rows.read_bytes()


@pytest.mark.parametrize("how", ["process group", "runner alone", "ctrl-c"])
def test_killed_and_resumed(tmp_path, whole, how):
    path = make_grid(tmp_path, SLOW)
    grid, runner = Grid.load(path), Runner("grid", "run", path, "--workers", 2)
    cells = grid.cells()
    working = lambda: any(map(is_done, cells)) and any(is_running(c) and c.file("starts").exists() and not is_done(c) for c in cells)
    assert wait_for(working), runner.process.stderr.read()
    if how == "process group": os.killpg(runner.process.pid, signal.SIGKILL)
    else: runner.process.send_signal(signal.SIGINT if how == "ctrl-c" else signal.SIGKILL)
    stderr = runner.process.communicate(timeout=60)[1]
    assert runner.gone() and not all(map(is_done, cells))
    if how == "ctrl-c": assert runner.process.returncode == 130 and "interrupted" in stderr and "Traceback" not in stderr
    else: assert runner.process.returncode == -signal.SIGKILL
    assert not grid.results.joinpath("rows.parquet").exists()
    starts = {c.id: c.file("starts").read_text() for c in cells if is_done(c)}
    answer = qk("grid", "run", path, "--workers", 2)
    assert answer.returncode == 0, answer.stderr
    assert (grid.results / "rows.parquet").read_bytes() == whole
    assert starts and all(c.file("starts").read_text() == starts[c.id] for c in cells if c.id in starts)


def test_a_killed_cell_and_a_killed_kernel_fail_alone(tmp_path):
    path = make_grid(tmp_path, GRID.replace("pause = 0.0", "pause = 3.0").replace("[0.1, 0.2]", "[0.1]").replace("[7, 37]", "[7, 37, 42]"))
    runner, cells = Runner("grid", "run", path), Grid.load(path).cells()
    for victim, cell in zip(("cell", "kernel"), cells):
        assert wait_for(cell.file("starts").exists)
        kernel, = [p for p in runner.processes() if any("ipykernel" in word for word in p.cmdline())]
        (kernel if victim == "kernel" else kernel.parent()).kill()
        assert wait_for(cell.file("error.txt").exists)
    assert runner.process.wait(120) == 1 and runner.gone()
    assert "SIGKILL" in cells[0].file("error.txt").read_text() and "kernel died" in cells[1].file("error.txt").read_text()
    assert list(map(is_done, cells)) == [False, False, True]
