"What can befall a long run, done to it on purpose: signal 9 at random moments, no memory, no disk, no end, and Ctrl-C."
import os
import random
import signal
import subprocess
import sys
import time

import pandas as pd
import psutil
import pytest
from toy import BODY, GRID, TRAINING, Runner, make_grid, qk, wait_for

from qk_geometry import runner as running
from qk_geometry.columns import write_rows
from qk_geometry.grid import Grid, collect, is_done, is_running, status
from qk_geometry.presence import hold, newest, owner, read_pulse
from qk_geometry.runner import CellFailed, execute, run_grid
from qk_geometry.train import TrainConfig, train

VICTIMS = {"runner": "cli import main", "process": "job_process", "kernel": "ipykernel_launcher"}


def living(runner, kind):
    "Processes of a runner by what they are."
    found = []
    for p in runner.processes():
        try:
            if VICTIMS[kind] in " ".join(p.cmdline()): found.append(p)
        except psutil.Error: continue
    return found


def test_killed_at_twenty_moments_and_the_table_is_the_same(tmp_path):
    path = make_grid(tmp_path, GRID, TRAINING)
    grid, chance, runner = Grid.load(path), random.Random(7), None
    begun = lambda: [c for c in grid.cells() if not is_done(c) and c.file("checkpoint.safetensors").exists() and is_running(c)]
    for kill in range(20):
        if runner is None: runner = Runner("grid", "run", path, "--workers", 2)
        if kill % 5 == 4: wait_for(lambda: begun() or runner.process.poll() is not None, 60)
        else: time.sleep(chance.uniform(0, 3))
        victims = living(runner, chance.choice(list(VICTIMS))) or living(runner, "runner")
        if victims: victims[0].kill()
        if victims and victims[0].pid == runner.process.pid or runner.process.poll() is not None:
            runner.process.wait(60)
            assert runner.gone(), [p.cmdline() for p in runner.processes()]
            runner = None
    if runner: runner.process.wait(300)
    answer = qk("grid", "run", path, "--workers", 2)
    assert answer.returncode == 0, answer.stderr
    config = lambda c: TrainConfig(n_chars=60_000, n_layers=1, d_model=16, n_ctx=16, n_eval=8, n_probe=4, epochs=12, steps_per_epoch=50, lr=c.parameters["lr"], seed=c.parameters["seed"])
    whole = pd.concat([train(config(c), progress=False, cell=c.id).rows for c in grid.cells()], ignore_index=True)
    assert (grid.results / "rows.parquet").read_bytes() == write_rows(whole, tmp_path / "whole.parquet").read_bytes()
    starts = [int(s) for c in grid.cells() for s in c.file("starts").read_text().split()]
    assert any(s > 0 for s in starts), "no attempt went on from a checkpoint"


def test_a_hung_cell_is_ended_and_says_so(tmp_path):
    grid = Grid.load(make_grid(tmp_path, "time_limit = 15\n" + GRID.replace("[0.1, 0.2]", "[0.1]").replace("[7, 37]", "[15]")))
    assert list(run_grid(grid).values()) == ["time limit: ended after 15 s"]
    assert collect(grid)["error"][0] == "time limit: ended after 15 s" and psutil.Process().children() == []


def test_no_memory(tmp_path, monkeypatch):
    grid = Grid.load(make_grid(tmp_path, GRID.replace("[0.1, 0.2]", "[0.1]").replace("[7, 37]", "[16, 17]")))
    allocation, killed = run_grid(grid, workers=2).values()
    assert allocation.startswith("out of memory: MemoryError") and killed.startswith("the kernel died; nothing says why")
    counts = iter([4, 5])
    monkeypatch.setattr(running, "memory_kills", lambda: next(counts))
    with pytest.raises(CellFailed, match="^out of memory: the kernel died when the system killed processes"): execute(grid.jobs("seed=17")[0])
    assert grid.cells()[1].file("error.txt").read_text().startswith("out of memory: ")


def test_torch_without_memory_is_recognised():
    import torch
    with pytest.raises(RuntimeError) as error: torch.empty(1 << 58)
    assert running.real_error(error.value).startswith("out of memory: RuntimeError")
    assert running.real_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")).startswith("out of memory: OutOfMemoryError")


@pytest.fixture
def small_disk(tmp_path):
    "A file system of two megabytes."
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True).returncode: pytest.skip("mounting needs rights that this user lacks")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk(tmp_path, small_disk):
    grid = Grid.load(make_grid(tmp_path, GRID.replace("[0.1, 0.2]", "[0.1]").replace("[7, 37]", "[7, 18]")), results=small_disk)
    text, = run_grid(grid).values()
    assert text.startswith("disk full: OSError: [Errno 28]") and [is_done(c) for c in grid.cells()] == [True, False]
    grid.cells()[1].file("ballast").unlink()
    assert list(status(grid)["status"]) == ["ok", "failed"] and not list(grid.cells()[1].folder.glob("*.parquet"))
    assert list(collect(grid)["status"]) == ["ok", "failed"]


def test_a_disk_that_fills_up_while_a_result_is_written(tmp_path, monkeypatch):
    full = "import errno, os\ndef fsync(f): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))\nos.fsync = fsync\n"
    grid = Grid.load(make_grid(tmp_path, GRID.replace("[0.1, 0.2]", "[0.1]").replace("[7, 37]", "[7]"), full + BODY))
    text, = run_grid(grid).values()
    cell, = grid.cells()
    assert text.startswith("disk full: OSError: [Errno 28] cannot write: No space left on device") and cell.file("error.txt").read_text().strip() == text
    assert not is_done(cell) and not [p for p in cell.folder.iterdir() if "rows" in p.name]


def test_ctrl_c(tmp_path):
    path = make_grid(tmp_path, GRID.replace("[7, 37]", "[15, 7]"))
    runner = Runner("grid", "run", path, "--workers", 1)
    cell = Grid.load(path).cells()[0]
    assert wait_for(cell.file("starts").exists)
    assert owner(cell.folder)["pid"] in [p.pid for p in living(runner, "process")]
    runner.process.send_signal(signal.SIGINT)
    out, err = runner.process.communicate(timeout=60)
    assert runner.process.returncode == 130 and err.splitlines()[-1].startswith("qk: interrupted") and runner.gone()
    assert owner(cell.folder) is None and list(status(Grid.load(path))["status"]) == ["missing"] * 4


def test_a_cell_of_a_silent_machine_is_taken_over(tmp_path):
    grid = Grid.load(make_grid(tmp_path, GRID.replace("[0.1, 0.2]", "[0.1]").replace("[7, 37]", "[7]")))
    cell, = grid.cells()
    with hold([cell.folder], lost=print):
        lock = newest(cell.folder)[1]
        lock.write_text(lock.read_text().replace(owner(cell.folder)["machine"], "another machine"))
        assert status(grid)["status"][0] == "running"
        os.utime(lock, (time.time() - 3600,) * 2)
        assert run_grid(grid) == {} and is_done(cell) and newest(cell.folder)[0] == 2
    assert newest(cell.folder)[1].read_text() == "null"


def test_two_take_over_one_lock_and_one_of_them_gets_it(tmp_path):
    claim = "import sys, time; from qk_geometry.presence import try_lock\nwhile time.time() < float(sys.argv[2]): pass\nif try_lock(sys.argv[1]): print('mine', flush=True); time.sleep(5)"
    for n in range(3):
        folder = tmp_path / str(n)
        folder.mkdir()
        (folder / "lock.3").write_text('{"host": "gone", "machine": "gone", "pid": 1, "started": 0, "token": "x"}')
        os.utime(folder / "lock.3", (time.time() - 3600,) * 2)
    start = str(time.time() + 3)
    contenders = [subprocess.Popen([sys.executable, "-c", claim, tmp_path / str(n), start], stdout=subprocess.PIPE, text=True) for n in range(3) for _ in range(3)]
    answers = [p.communicate(timeout=60)[0] for p in contenders]
    assert [sum(map(bool, answers[3 * n:3 * n + 3])) for n in range(3)] == [1, 1, 1]


def test_a_running_cell_shows_how_far_it_is(tmp_path):
    path = make_grid(tmp_path, GRID.replace("[0.1, 0.2]", "[0.1]").replace("[7, 37]", "[7]"), TRAINING.replace("epochs=12", "epochs=400"))
    runner, (cell,) = Runner("grid", "run", path), Grid.load(path).cells()
    try:
        assert wait_for(lambda: read_pulse(cell.folder))
        line = qk("grid", "status", path).stdout.splitlines()[0]
    finally: runner.process.kill()
    runner.process.wait(60)
    assert line.startswith(f"running  {cell.id}  step ") and " of 20000, loss " in line and "tokens/s, process " in line and runner.gone()
