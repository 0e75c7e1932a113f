"Interventions: they survive restarts, touch nothing but their projection, work on models of other shapes and precisions, and refuse what cannot work."
import dataclasses
import os
import random
import signal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from toy import Runner, qk, wait_for
from torch import nn

from qk_geometry.attention import Tap, Weight, per_head, split_heads
from qk_geometry.data import CharCorpus
from qk_geometry.grid import Grid, check, is_done
from qk_geometry.init import init_qk
from qk_geometry.interventions import INTERVENTIONS, RECEIPT, Loop, memory, receipts
from qk_geometry.model import GPT, GPTConfig
from qk_geometry.spectra import singular_values
from qk_geometry.surgery import logit_std, matrix
from qk_geometry.tracker import capture
from qk_geometry.train import Callback, Run, TrainConfig, train
from qk_geometry.watch import WatchConfig

ROOT = Path(__file__).parent.parent
TINY = TrainConfig(n_chars=50_000, n_layers=2, n_heads=2, d_model=16, n_ctx=16, batch_size=4, epochs=4, steps_per_epoch=6, warmup_steps=4, n_eval=8, n_probe=4, dropout=0.1)
STEERING = [name for name in INTERVENTIONS if name != "none"]
SURGERIES = ["k_clamp", "k_contract", "q_clamp", "q_contract", "k_shrink_random", "k_clamp_logit_matched", "k_contract_logit_matched"]


@pytest.fixture(scope="module")
def corpus(): return CharCorpus.load("builtin", n_chars=50_000)


def make(name, **options): return INTERVENTIONS[name](every=4, **options)


class Stop(Callback):
    "Ends a run as a power cut would."
    def __init__(self, after): self.after = after
    def on_step(self, run):
        if run.step == self.after: raise KeyboardInterrupt


def weights(model): return [p.detach().clone() for p in model.parameters()]
def same(a, b): return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("names", [*([name] for name in STEERING), ["freeze_q", "k_contract"], ["decouple", "k_clamp", "align"]], ids="+".join)
def test_stopped_and_resumed_to_the_bit(names, corpus, tmp_path):
    def run(stop, out): return [make(name) for name in names] + [Stop(stop)], out
    def go(callbacks, out): return train(TINY, corpus, callbacks, out=out, progress=False), receipts(callbacks)
    whole, notes = go(*run(-1, None))
    with pytest.raises(KeyboardInterrupt): go(*run(15, tmp_path))
    resumed, again = go(*run(-1, tmp_path))
    assert same(weights(whole.model), weights(resumed.model)) and notes.equals(again) and len(notes)
    pd.testing.assert_frame_equal(whole.rows, resumed.rows, check_exact=True)
    assert notes.schema == RECEIPT and (notes["cell"].to_pandas() == "").all()


def test_a_checkpoint_under_other_options_is_refused(corpus, tmp_path):
    with pytest.raises(KeyboardInterrupt): train(TINY, corpus, [make("k_contract"), Stop(7)], out=tmp_path, progress=False)
    with pytest.raises(ValueError, match="rank_fraction = 0.125, and here rank_fraction = 0.25"):
        train(TINY, corpus, [make("k_contract", rank_fraction=0.25), Stop(-1)], out=tmp_path, progress=False)
    with pytest.raises(ValueError, match="name = 'k_contract', and here name = 'k_clamp'"):
        train(TINY, corpus, [make("k_clamp"), Stop(-1)], out=tmp_path, progress=False)


def test_every_application_has_a_receipt(corpus):
    for name, steps in (("k_clamp", [8, 12, 16, 20, 24]), ("freeze_k", [4, 8, 12, 16, 20, 24]), ("decouple", [0, 18]), ("identical_start", [0]), ("align", [4, 8, 12, 16, 20, 24])):
        callback = make(name)
        train(TINY, corpus, [callback], progress=False)
        table = receipts([callback], "c").to_pandas()
        assert list(table.groupby("step").size()) == [2] * len(steps) and sorted(set(table["step"])) == steps and set(table["layer"]) == {0, 1}
        assert set(table["applications"]) == ({4} if name in ("freeze_k", "align") else {1}) and set(table["cell"]) == {"c"}
        for side in ("before", "after"):
            np.testing.assert_allclose(table[f"frobenius_{side}"], [np.linalg.norm(s) for s in table[f"sigma_{side}"]], rtol=1e-5)      # 16 wide: all are listed
            np.testing.assert_allclose(table[f"spectral_{side}"], [s[0] for s in table[f"sigma_{side}"]])


def small(seed=0, dtype=torch.float32):
    "A small model of ours and a loop around it."
    model = init_qk(GPT(GPTConfig(n_layers=2, n_heads=2, d_model=16, n_ctx=16, d_vocab=40), seed=seed), "independent", seed=seed).to(dtype)
    return model, torch.randint(40, (6, 17), generator=torch.Generator().manual_seed(seed))


def learn(model, tokens, optimizer, steering, steps=12, taps=None, loss_of=None):
    "Somebody else's loop: no clipping, no schedule, nothing of `train`."
    loop = Loop(model, tokens[:, :-1], optimizer, steps_per_epoch=4, taps=taps)
    for c in steering: c.on_start(loop)
    for _ in range(steps):
        loss = loss_of(model, tokens) if loss_of else model(tokens[:, :-1], tokens[:, 1:])
        for c in steering: loss = loss if (new := c.on_loss(loop, loss)) is None else new
        optimizer.zero_grad()
        loss.backward()
        for c in steering: c.on_backward(loop)
        optimizer.step()
        loop.step += 1
        for c in steering: c.on_step(loop)
    return loop


OPTIMIZERS = {"adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3), "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1)}


@pytest.mark.parametrize("mode", ["restore", "no_grad"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("which", ["q", "k"])
def test_frozen_is_bit_equal_under_decay_and_momentum(which, optimizer, mode):
    model, tokens = small()
    frozen, other = ([getattr(tap, f"W_{x}") for tap in model.taps()] for x in ("Q", "K")[:: 1 if which == "q" else -1])
    before, elsewhere = [w.heads.clone() for w in frozen], [w.heads.clone() for w in other]
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    learn(model, tokens, optimizer, [make(f"freeze_{which}", mode=mode)])
    assert same(before, [w.heads for w in frozen]) and not any(torch.equal(a, w.heads) for a, w in zip(elsewhere, other))


def test_the_two_ways_to_freeze_differ_by_the_clip_alone(corpus):
    def end(clip, mode): return weights(train(dataclasses.replace(TINY, grad_clip=clip), corpus, [make("freeze_k", mode=mode)], progress=False).model)
    assert same(end(1e9, "restore"), end(1e9, "no_grad"))
    assert not same(end(0.05, "restore"), end(0.05, "no_grad"))


@pytest.mark.parametrize("name", STEERING)
def test_only_its_projection_changes_and_no_random_state(name):
    model, tokens = small()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    callback, loop = make(name, **({"at_epoch": 1} if name == "decouple" else {})), Loop(model, tokens[:, :-1], optimizer, steps_per_epoch=4)
    callback.on_start(loop)
    learn(model, tokens, optimizer, [])
    loop.step = 4
    before, state = {n: p.detach().clone() for n, p in model.named_parameters()}, {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    dice = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    modes, hooks = [m.training for m in model.modules()], [len(m._forward_hooks) for m in model.modules()]
    callback.on_backward(loop)
    callback.on_step(loop)
    assert torch.equal(dice[0], torch.get_rng_state()) and dice[1] == random.getstate() and (dice[2] == np.random.get_state()[1]).all()
    assert modes == [m.training for m in model.modules()] and hooks == [len(m._forward_hooks) for m in model.modules()]
    changed = {n for n, p in model.named_parameters() if not torch.equal(before[n], p)}
    assert changed == (set() if name in ("sham", "align", "identical_start") else {f"blocks.{i}.attention.{callback.weight}.weight" for i in (0, 1)})
    assert all(torch.equal(v, optimizer.state[p][k]) for p, s in state.items() for k, v in s.items())
    assert callback.receipts


@pytest.mark.parametrize("name", ["k_contract", "sham"])
def test_resetting_the_optimizer_is_for_the_projection_alone(name):
    model, tokens = small()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    callback = make(name, optimizer_state="reset")
    learn(model, tokens, optimizer, [callback], steps=8)
    for tap in model.taps():
        assert all((m == 0).all() for m in memory(optimizer, tap.W_K)) and len(memory(optimizer, tap.W_K)) == 2
        assert all((m != 0).any() for m in memory(optimizer, tap.W_Q))
    assert {line["optimizer_state"] for line in callback.receipts} == {"reset"}
    keep = make(name)
    learn(*(lambda m, t: (m, t, OPTIMIZERS["adamw"](m.parameters())))(*small()), [keep], steps=8)
    assert {line["optimizer_state"] for line in keep.receipts} == {"kept"}


def test_composed_in_order(corpus):
    steering = [make("k_contract"), make("freeze_q")]
    run = train(TINY, corpus, steering, progress=False)
    start = Run(TINY, corpus)
    assert all(torch.equal(a.W_Q.heads, b.W_Q.heads) for a, b in zip(run.tracker.taps, start.tracker.taps))
    assert all(singular_values(matrix(tap.W_K))[2] < 0.2 * singular_values(matrix(tap.W_K))[1] for tap in run.tracker.taps)
    assert set(receipts(steering).to_pandas()["intervention"]) == {"k_contract", "freeze_q"}


@pytest.mark.parametrize("name", STEERING)
def test_bfloat16_weights(name):
    model, tokens = small(dtype=torch.bfloat16)
    start = [(tap.W_Q.heads.clone(), tap.W_K.heads.clone(), singular_values(matrix(tap.W_K))) for tap in model.taps()]
    callback = make(name, **({"at_epoch": 2} if name == "decouple" else {}))
    learn(model, tokens, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), [callback], steps=8)
    assert all(p.dtype == torch.bfloat16 and torch.isfinite(p).all() for p in model.parameters())
    table = receipts([callback]).to_pandas()
    for tap, (Q, K, sigma) in zip(model.taps(), start):
        if name == "k_clamp": assert torch.allclose(singular_values(matrix(tap.W_K)), sigma, atol=0.01 * sigma[0].item())            # as near as 8 bits come
        if name.startswith("freeze"): assert torch.equal(*((tap.W_Q.heads, Q) if name == "freeze_q" else (tap.W_K.heads, K)))
    if name in ("k_contract", "q_contract", "k_shrink_random"): np.testing.assert_allclose(table["frobenius_after"], table["frobenius_before"], rtol=2e-3)
    if name.endswith("matched"): np.testing.assert_allclose(table["logit_std_after"], table["logit_std_before"], rtol=1e-3)


@pytest.fixture
def gpt2():
    "A GPT-2 of transformers, small and random, with its taps: Conv1D stores [in, out], q, k and v in one parameter, with biases."
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    for block in model.transformer.h: nn.init.normal_(block.attn.c_attn.bias, std=0.3)
    def part(i): return lambda w: w[:, 16 * i:16 * (i + 1)].unflatten(-1, (2, -1)).transpose(0, 1)
    def read(qkv): return tuple(split_heads(x, 2) for x in qkv.split(16, -1)[:2])
    taps = [Tap(i, Weight(b.attn.c_attn.weight, part(0)), Weight(b.attn.c_attn.weight, part(1)), (b.attn.c_attn,), read) for i, b in enumerate(model.transformer.h)]
    return model, torch.randint(40, (6, 17)), taps


def gpt2_loss(model, tokens): return nn.functional.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("name", STEERING)
def test_gpt2_of_transformers(name, gpt2):
    model, tokens, taps = gpt2
    start = [tap.W_K.parameter.detach().clone() for tap in taps]
    sigma = [singular_values(matrix(getattr(tap, "W_Q" if name == "q_clamp" else "W_K"))) for tap in taps]
    callback = make(name, **({"at_epoch": 3} if name == "decouple" else {}))
    learn(model, tokens, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.3), [callback], taps=taps, loss_of=gpt2_loss)
    table = receipts([callback]).to_pandas()
    assert len(table) and set(table["layer"]) == {0, 1}
    for i, (tap, old) in enumerate(zip(taps, start)):
        new = tap.W_K.parameter
        q, k, v = (torch.equal(a, b) for a, b in zip(old.split(16, 1), new.split(16, 1)))
        assert (q, k, v) == (name == "freeze_q", name == "freeze_k", False)
        if name in ("k_clamp", "q_clamp"): assert torch.allclose(singular_values(matrix(getattr(tap, callback.weight))), sigma[i], rtol=1e-5, atol=1e-6)
    if name in ("k_contract", "q_contract", "k_shrink_random"): np.testing.assert_allclose(table["frobenius_after"], table["frobenius_before"], rtol=1e-5)
    if name.endswith("matched"):                                                              # a key bias is not scaled, and still the deviation fits
        np.testing.assert_allclose(table["logit_std_after"], table["logit_std_before"], rtol=1e-4)
        now = [logit_std(*qk) for qk in capture(model, tokens[:, :-1], taps)]                 # the last application came after the last step
        np.testing.assert_allclose(now, table["logit_std_after"][-2:], rtol=1e-4)


def test_a_fused_slice_is_all_that_a_reset_forgets(gpt2):
    model, tokens, taps = gpt2
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    learn(model, tokens, optimizer, [make("k_contract", optimizer_state="reset")], taps=taps, loss_of=gpt2_loss, steps=8)
    for tap in taps:
        q, k, v = optimizer.state[tap.W_K.parameter]["exp_avg"].split(16, 1)
        assert (k == 0).all() and (q != 0).any() and (v != 0).any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", STEERING)
def test_on_a_gpu(name, corpus, tmp_path):
    config = dataclasses.replace(TINY, device="cuda")
    with pytest.raises(KeyboardInterrupt): train(config, corpus, [make(name), Stop(15)], out=tmp_path, progress=False)
    callback = make(name)
    run = train(config, corpus, [callback, Stop(-1)], out=tmp_path, progress=False)
    assert callback.receipts and all(p.is_cuda and torch.isfinite(p).all() for p in run.model.parameters())


def test_what_cannot_work_is_refused():
    model, tokens = small()
    loop = Loop(model, tokens[:, :-1], torch.optim.SGD(model.parameters(), lr=0.1), steps_per_epoch=4)
    keyless = [Tap(0, model.taps()[0].W_Q, None, (), None)]
    with pytest.raises(ValueError, match="k_clamp: layer 0 has no key projection"): INTERVENTIONS["k_clamp"]().check(keyless)
    INTERVENTIONS["q_clamp"]().check(keyless)
    with pytest.raises(ValueError, match="align: layer 0 has no key projection"): INTERVENTIONS["align"]().check(keyless)
    grouped = nn.Linear(16, 8, bias=False)
    taps = [Tap(3, model.taps()[0].W_Q, Weight(grouped.weight, lambda w: per_head(w, 1)), (), None)]
    with pytest.raises(ValueError, match="layer 3 has 2 query heads and 1 key heads"): INTERVENTIONS["decouple"]().check(taps)
    with pytest.raises(ValueError, match="keeps 0 of 8"): INTERVENTIONS["k_contract"](rank_fraction=0.05).check(taps)
    with pytest.raises(TypeError, match="tail"): INTERVENTIONS["k_clamp"](tail=0.1)
    broken = INTERVENTIONS["k_clamp"](every=4)
    broken.on_start(loop)
    with torch.no_grad(): model.taps()[1].W_K.heads[0, 0, 0] = float("nan")
    before, loop.step = weights(model), 4
    with pytest.raises(ValueError, match="k_clamp, step 4: W_K of layer 1 holds 1 non-finite"): broken.on_step(loop)
    assert not broken.receipts and all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, model.parameters()))


BAD = {'intervention = ["k_clam"]': "intervention = 'k_clam' is unknown", 'intervention = ["none", "k_clamp"]\nintervention_every = [0]': "k_clamp: every = 0 must be at least 1",
       'intervention = ["k_contract"]\nintervention_rank_fraction = [1.0]': "keeps 32 of 32 singular values", 'intervention = ["k_clamp"]\nintervention_every = [1000]': "never due in 10 epochs of 15 steps"}


@pytest.mark.parametrize("axes", BAD)
def test_a_grid_refuses_before_anything_starts(axes, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(f'notebook = "{ROOT / "nbs/runs/train.ipynb"}"\nconfig = "qk_geometry.interventions:InterventionConfig"\n[scientific]\n{axes}\n')
    answer = qk("grid", "run", path, "--results", tmp_path / "results")
    assert answer.returncode == 1 and answer.stderr.count("\n") == 1 and BAD[axes] in answer.stderr and not (tmp_path / "results").exists()


def test_the_grids_have_every_arm(tmp_path):
    for scale, seeds, depth in (("smoke", [7, 37], 2), ("cpu", [7, 37, 42, 105, 210], 4), ("paper", [7, 37, 42, 105, 210], 4)):
        grid = Grid.load(ROOT / f"grids/{scale}/interventions.toml")
        assert grid.axes == {"intervention": list(INTERVENTIONS), "seed": seeds} and grid.fixed["n_layers"] == depth
        for cell in grid.cells(): WatchConfig(**cell.parameters).validate()
        twin = Grid.load(ROOT / f"grids/{scale}/characters.toml").fixed
        assert {k for k, v in twin.items() if grid.fixed.get(k) != v} <= {"intervention", "intervention_every"}     # trained like the main grid


GRIDS = [p for p in sorted(ROOT.glob("results/*/*/cells.csv")) if p.parts[-3] != "models"]        # single models are probed one by one, without a grid


@pytest.mark.parametrize("path", GRIDS, ids=lambda p: "-".join(p.parts[-3:-1]))
def test_committed_results_belong_to_the_committed_grids(path):
    cells = Grid.load(ROOT / "grids" / path.parts[-3] / f"{path.parts[-2]}.toml").cells()
    assert list(pd.read_csv(path)["cell"]) == [c.id for c in cells]


def test_killed_in_steering_and_resumed(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(f'notebook = "{ROOT / "nbs/runs/train.ipynb"}"\nconfig = "qk_geometry.interventions:InterventionConfig"\n[scientific]\nintervention = ["k_contract_logit_matched"]\n'
                    "[fixed]\nn_chars = 100000\nn_layers = 1\nd_model = 16\nn_ctx = 16\nepochs = 8\nsteps_per_epoch = 40\nintervention_every = 20\n")
    grid = Grid.load(path, results=tmp_path / "results")
    check(grid)
    cell, = grid.cells()
    runner = Runner("grid", "run", path, "--results", grid.results)
    assert wait_for(cell.file("checkpoint.safetensors").exists), runner.process.stderr.read()
    os.killpg(runner.process.pid, signal.SIGKILL)
    assert runner.process.wait(10) == -signal.SIGKILL and runner.gone() and not is_done(cell)
    answer = qk("grid", "run", path, "--results", grid.results)
    assert answer.returncode == 0, answer.stderr
    config = WatchConfig(**cell.parameters)
    callbacks = config.callbacks()
    train(config.training, callbacks=callbacks, progress=False)
    assert pq.read_table(grid.results / "receipts.parquet").equals(receipts(callbacks, cell.id)) and len(callbacks[0].receipts) == 15
