"The cluster engine on a real Ray cluster of this machine: two machines in small, one of which is lost half way."
from functools import partial

import pytest
from toy import GRID, TRAINING, make_grid

from qk_geometry.cluster import quiet_ray, run_ray
from qk_geometry.columns import read_rows
from qk_geometry.grid import Grid, collect, is_done, is_running
from qk_geometry.presence import read_pulse
from qk_geometry.runner import run_grid


@pytest.fixture(scope="module")
def cluster():
    "A head without processors and two machines with one each, told apart by loopback addresses. Ray takes 127.0.0.1 for another name of the machine, so none of them is that."
    quiet_ray()
    from ray.cluster_utils import Cluster
    node = lambda n, **more: {"node_ip_address": f"127.0.0.{n}", "object_store_memory": 80 * 2**20, "include_log_monitor": False, **more}
    cluster = Cluster(initialize_head=True, head_node_args=node(2, num_cpus=0, include_dashboard=False, no_monitor=True))
    cluster.machines = [cluster.add_node(**node(n, num_cpus=1)) for n in (3, 4)]
    yield cluster
    cluster.shutdown()


def lose_one(jobs, workers, environment, cluster, **options):
    "The engine, while one machine of the cluster is killed once training is under way on both."
    begun = lambda: [j for j in jobs if read_pulse(j.first.folder) and not is_done(j.first) and is_running(j.first)]
    for running, finished in run_ray(jobs, workers, environment, cluster.address, **options):
        if len(cluster.machines) == 2 and len(begun()) == 2: cluster.remove_node(cluster.machines.pop(), allow_graceful=False)
        yield running, finished


def test_a_machine_is_lost_and_the_rows_are_those_of_one_machine(tmp_path, cluster):
    text = GRID.replace("[0.1, 0.2]", "[0.1]").replace("[7, 37]", "[7, 37, 42]")
    body = TRAINING.replace("epochs=12", "epochs=40")
    far, near = Grid.load(make_grid(tmp_path / "far", text, body)), Grid.load(make_grid(tmp_path / "near", text, body))
    assert run_grid(far, None, engine=partial(lose_one, cluster=cluster)) == {} and len(cluster.machines) == 1
    assert run_grid(near, 2) == {}
    assert (collect(far)["status"] == "ok").all() and (collect(near)["status"] == "ok").all()
    assert (far.results / "rows.parquet").read_bytes() == (near.results / "rows.parquet").read_bytes()
    starts = [[int(s) for s in c.file("starts").read_text().split()] for c in far.cells()]
    assert max(map(len, starts)) == 2 and max(map(max, starts)) > 0, "nothing went on from a checkpoint of the lost machine"


def test_files_travel_through_a_store(tmp_path, cluster):
    text = GRID.replace("[0.1, 0.2]", "[0.1]").replace("[7, 37]", "[7, 13]")
    grid = Grid.load(make_grid(tmp_path, text))
    failures = run_grid(grid, None, engine=partial(run_ray, address=cluster.address, store=f"file://{tmp_path}/store"))
    assert list(failures.values()) == ["RuntimeError: seed 13 diverged at step 1"] and list(collect(grid)["status"]) == ["ok", "failed"]
    first, second = grid.cells()
    assert read_rows(first.file("rows.parquet"))["cell"][0] == first.id and second.file("error.txt").is_file() and second.file("toy.ipynb").is_file()
    assert (tmp_path / "store" / first.id / "done.json").is_file() and not list(tmp_path.glob("store/*/.*"))
    for p in first.folder.iterdir(): p.unlink()                # another runner, which has only the store
    assert list(run_grid(grid, None, only="seed=7", engine=partial(run_ray, address=cluster.address, store=f"file://{tmp_path}/store"))) == []
    assert is_done(first) and first.file("starts").read_text() == "start\n"


def test_more_than_the_cluster_has_is_refused(tmp_path, cluster):
    grid = Grid.load(make_grid(tmp_path, "cpus = 64\n" + GRID))
    with pytest.raises(ValueError, match="a job asks for 64 CPUs and 0 GPUs; the largest machine of the cluster has 1 and 0"):
        run_grid(grid, None, engine=partial(run_ray, address=cluster.address, cpus=grid.cpus, gpus=grid.gpus))
