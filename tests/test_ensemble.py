"An ensemble against its members' single runs: steered in every way, killed between files, spoiled by one member, and as jobs of a grid."
import dataclasses

import pandas as pd
import pytest
import torch

from qk_geometry import ensemble as module
from qk_geometry.columns import read_rows
from qk_geometry.data import CharCorpus
from qk_geometry.device import without_waiting
from qk_geometry.ensemble import Ensemble, checkpoints, ensemble_step, train_ensemble
from qk_geometry.grid import Grid, is_done
from qk_geometry.interventions import INTERVENTIONS, InterventionConfig, receipts
from qk_geometry.runner import run_grid
from qk_geometry.train import Callback, Run, TrainConfig, train, training_step
from test_training_notebook import NOTEBOOK

SMALL = TrainConfig(n_chars=50_000, n_layers=1, d_model=16, n_ctx=16, batch_size=4, epochs=4, steps_per_epoch=5, warmup_steps=5, n_eval=4, n_probe=4)
PAIR = [dataclasses.replace(SMALL, seed=seed) for seed in (7, 37)]


@pytest.fixture(scope="module")
def corpus(): return CharCorpus.load("builtin", n_chars=50_000)


def weights(run): return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def start(config, corpus, callbacks, dtype):
    run = Run(config, corpus, callbacks)
    run.model.to(dtype)
    for c in run.callbacks: c.on_start(run)
    return run


def test_every_intervention_in_one_stack_follows_its_single_run_in_float64(corpus):
    arms = [dict(intervention=name) for name in INTERVENTIONS if name != "none"] + [
        dict(intervention="freeze_k", intervention_mode="no_grad"), dict(intervention="k_clamp", intervention_optimizer_state="reset")]
    common = {**dataclasses.asdict(SMALL), "n_layers": 2, "epochs": 10, "intervention_every": 7, "intervention_at_epoch": 2}
    configs = [InterventionConfig(**common | arm | {"seed": 7 + i}) for i, arm in enumerate(arms)]
    alone, stacked = ([start(c.training, corpus, c.callbacks(), torch.float64) for c in configs] for _ in range(2))
    together = Ensemble(stacked)
    for step in range(50):
        for run in alone: training_step(run, watch=step == 49)
        ensemble_step(together, watch=step == 49)
    for arm, a, b in zip(arms, alone, stacked):
        assert (weights(a) - weights(b)).abs().max() < 1e-8, arm
        first, second = (receipts(run.callbacks).to_pandas() for run in (a, b))
        pd.testing.assert_frame_equal(first.drop(columns=["sigma_before", "sigma_after"]), second.drop(columns=["sigma_before", "sigma_after"]), rtol=1e-4, atol=1e-6)
        for mine, other in zip(b.last.pop("layers"), a.last.pop("layers")): assert mine == pytest.approx(other, rel=1e-6, nan_ok=True)
        assert b.last == pytest.approx(a.last, rel=1e-6)


def test_a_member_that_is_lost_spoils_nobody_else(corpus):
    class Spoil(Callback):
        def on_loss(self, run, loss): return loss * float("nan")
    class Nothing(Callback): pass
    bad, good = (Ensemble([Run(c, corpus, [kind()]) for c, kind in zip(PAIR, kinds)]) for kinds in ((Nothing, Spoil), (Nothing, Nothing)))
    for _ in range(4): ensemble_step(bad), ensemble_step(good)
    assert torch.equal(weights(bad.runs[0]), weights(good.runs[0]))
    assert not weights(bad.runs[1]).isfinite().any() and weights(good.runs[1]).isfinite().all()


def test_nothing_is_waited_for_between_snapshots(corpus):
    together = Ensemble([Run(c, corpus) for c in PAIR])
    with without_waiting():
        for _ in range(3): ensemble_step(together)
    with pytest.raises(RuntimeError, match="wait"), without_waiting(): ensemble_step(together, watch=True)


def test_mixed_precision_stays_close_to_a_single_run(corpus):
    configs = [dataclasses.replace(c, precision="bf16") for c in PAIR]
    together = train_ensemble(configs, corpus, progress=False, batched=True)
    for config, run in zip(configs, together): assert run.summary["val_loss"] == pytest.approx(train(config, corpus, progress=False).summary["val_loss"], rel=1e-2)


def test_a_compiler_sees_one_graph(corpus):
    plain, traced = (Ensemble([Run(c, corpus) for c in PAIR]) for _ in range(2))
    traced.forward = torch.compile(traced.losses, backend="eager", fullgraph=True)
    for _ in range(2): ensemble_step(plain), ensemble_step(traced)
    for a, b in zip(plain.runs, traced.runs): torch.testing.assert_close(weights(a), weights(b), atol=1e-6, rtol=0)


@pytest.mark.parametrize("writes", [1, 2, 3, 4, 5])
def test_killed_before_any_checkpoint_file(tmp_path, corpus, monkeypatch, writes):
    whole, real, outs, left = train_ensemble(PAIR, corpus, progress=False, batched=True), module.save_checkpoint, [tmp_path / "a", tmp_path / "b"], iter(range(writes))
    def save(run, path):
        if next(left, None) is None: raise KeyboardInterrupt
        real(run, path)
    monkeypatch.setattr(module, "save_checkpoint", save)
    with pytest.raises(KeyboardInterrupt): train_ensemble(PAIR, corpus, outs=outs, progress=False, batched=True)
    steps = [set(checkpoints(out)) for out in outs]
    assert (set.intersection(*steps) or {0}) >= {writes // 2 * 5} if writes > 1 else not steps[1]
    monkeypatch.setattr(module, "save_checkpoint", real)
    for a, b in zip(whole, train_ensemble(PAIR, corpus, outs=outs, progress=False, batched=True)):
        pd.testing.assert_frame_equal(a.rows, b.rows, check_exact=True)
        assert torch.equal(weights(a), weights(b))


def test_a_member_goes_on_alone(tmp_path, corpus):
    class Cut(Callback):
        def on_step(self, run):
            if run.step == 11: raise KeyboardInterrupt
    outs = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(KeyboardInterrupt): train_ensemble(PAIR, corpus, [[Cut()], [Cut()]], outs, False, batched=True)
    class Plain(Callback): pass
    run = train(PAIR[1], corpus, [Plain()], out=outs[1], progress=False)
    torch.testing.assert_close(weights(run), weights(train(PAIR[1], corpus, progress=False)), atol=1e-4, rtol=0)


def test_a_grid_in_jobs_of_two_gives_the_bytes_of_single_cells(tmp_path):
    tables = {}
    for n in (1, 2):
        path = tmp_path / f"{n}.toml"
        path.write_text(f'notebook = "{NOTEBOOK}"\nconfig = "qk_geometry.interventions:InterventionConfig"\nseeds_per_process = {n}\n[scientific]\nintervention = ["k_shrink_random"]\n[nuisance]\nseed = [7, 37]\n'
                        "[fixed]\nn_chars = 50000\nn_layers = 1\nd_model = 16\nn_ctx = 16\nepochs = 4\nsteps_per_epoch = 10\nintervention_every = 10\n")
        grid = Grid.load(path, results=tmp_path / f"results{n}")
        assert run_grid(grid) == {}
        assert all(map(is_done, grid.cells()))
        tables[n] = [[c.file(name).read_bytes() for name in ("rows.parquet", "receipts.parquet")] for c in grid.cells()]
        assert [set(read_rows(c.file("rows.parquet"))["cell"]) for c in grid.cells()] == [{c.id} for c in grid.cells()]
    assert tables[1] == tables[2]
