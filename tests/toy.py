"A grid over a notebook that only counts, so that the road can be tested in seconds."
import os
import signal
import subprocess
import sys
import time
import uuid

import psutil
from nbformat import v4, write

PARAMETERS = """seed:int = 7 # RNG seed
lr:float = 0.1 # step size
corpus:str = "builtin" # text
pause:float = 0.0 # seconds to wait
threads:int = 1 # threads
cell:str = "" # id of the cell
out:str = "" # folder of the cell
members:str = "" # JSON list of cell, out and seed, when a job has several"""

BODY = """
import json, os, time
from pathlib import Path
import pandas as pd
from qk_geometry.grid import finish_cell

for m in json.loads(members) if members else [dict(cell=cell, out=out, seed=seed)]:
    cell, out, seed = m["cell"], m["out"], m["seed"]
    with open(Path(out) / "starts", "a") as f: f.write("start\\n")
    time.sleep(pause)
    if seed == 13: raise RuntimeError(f"seed {seed} diverged\\nat step 1")
    none = pd.array([None] * 3, "Int16")
    rows = pd.DataFrame({"cell": cell, "step": range(3), "epoch": [0.0, 1.0, 2.0], "tokens": [0, 64, 128], "layer": none, "head": none,
                         "status": "ok", "val_loss": [4.0 / (1 + lr * seed * s) for s in range(3)]})
    seen = {name: os.environ.get(name, "") for name in ("QK_DATA", "OMP_NUM_THREADS")}
    if seed == 15: time.sleep(3600)
    if seed == 16: bytearray(1 << 60)
    if seed == 17: os.kill(os.getpid(), 9)
    if seed == 18: Path(out, "ballast").write_bytes(bytes(1 << 22))
    if seed != 14: finish_cell(out, cell, rows, dict(val_loss=float(rows.val_loss.iloc[-1]), seconds=time.process_time(), **seen))
"""

GRID = """notebook = "../../nbs/runs/toy.ipynb"

[scientific]
lr = [0.1, 0.2]

[nuisance]
seed = [7, 37]

[fixed]
pause = 0.0
"""


TRAINING = """
from pathlib import Path
from qk_geometry.grid import finish_cell
from qk_geometry.train import Callback, TrainConfig, train

class Note(Callback):
    def on_start(self, run): open(Path(out) / "starts", "a").write(f"{run.step}\\n")

config = TrainConfig(n_chars=60_000, n_layers=1, d_model=16, n_ctx=16, n_eval=8, n_probe=4, epochs=12, steps_per_epoch=50, lr=lr, seed=seed)
run = train(config, callbacks=[Note()], out=out, cell=cell, progress=False)
finish_cell(out, cell, run.rows, run.summary)
"""


def make_grid(root, text=GRID, body=BODY):
    "A checkout in small: the notebook and one grid file, whose path is returned."
    for folder in ("nbs/runs", "grids/smoke"): (root / folder).mkdir(parents=True, exist_ok=True)
    cells = [v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}), v4.new_code_cell(body)]
    kernel = {"name": "python3", "display_name": "python3", "language": "python"}
    write(v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), root / "nbs/runs/toy.ipynb")
    path = root / "grids/smoke/toy.toml"
    path.write_text(text)
    return path


def qk(*args, **kwargs):
    "`qk` in a process of its own, to its end."
    command = [sys.executable, "-c", "from qk_geometry.cli import main; main()", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **kwargs)


class Runner:
    "`qk` in the background, all of whose processes can be found again by a mark in their environment."

    def __init__(self, *args):
        self.mark = uuid.uuid4().hex
        command = [sys.executable, "-c", "from qk_geometry.cli import main; main()", *map(str, args)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                                        env={**os.environ, "QK_TEST_MARK": self.mark}, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))   # a background job would ignore Ctrl-C

    def processes(self):
        "Living processes started by this runner, itself included."
        found = []
        for p in psutil.process_iter():
            try:
                if p.status() != psutil.STATUS_ZOMBIE and p.environ().get("QK_TEST_MARK") == self.mark: found.append(p)
            except psutil.Error: continue
        return found

    def gone(self, seconds=30):
        "Whether every process has ended within the given time."
        return wait_for(lambda: not self.processes(), seconds)


def wait_for(condition, seconds=120):
    "Poll until a condition holds; False when it does not in time."
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition(): return True
        time.sleep(0.05)
    return False
