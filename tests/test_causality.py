"""The gate lets causal models through and nothing else, and leaves no trace in a run."""
import math

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qk_geometry.attention import ATTENTION, Attention, QKVAttention, rotary_table, rotate, split_heads
from qk_geometry.causality import assert_causal, future_leak
from qk_geometry.columns import read_rows, write_rows
from qk_geometry.data import CharCorpus
from qk_geometry.model import GPT, GPTConfig
from qk_geometry.train import Run, TrainConfig, train

SHAPE = dict(n_layers=2, n_heads=4, d_model=32, n_ctx=24, d_vocab=50)
TOKENS = torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(3))


class Masked(QKVAttention):
    "Attention under a mask that a subclass gives."
    def mask(self, n): return torch.ones(n, n, dtype=torch.bool).tril()
    def filter(self, x): return x
    def forward(self, x):
        q, k, v = (split_heads(w(x), self.n_heads) for w in (self.W_Q, self.W_K, self.W_V))
        z = F.scaled_dot_product_attention(self.filter(q), self.filter(k), v, attn_mask=self.mask(x.shape[1]))
        return self.W_O(z.transpose(1, 2).flatten(-2))


class OffByOne(Masked):
    def mask(self, n): return torch.ones(n, n, dtype=torch.bool).tril(1)


class OnlyInTraining(Masked):
    def mask(self, n): return torch.ones(n, n, dtype=torch.bool).tril(0 if self.training else 1)


class OnlyInEvaluation(Masked):
    def mask(self, n): return torch.ones(n, n, dtype=torch.bool).tril(1 if self.training else 0)


class OnlyAtFullLength(Masked):
    def mask(self, n): return torch.ones(n, n, dtype=torch.bool).tril(0 if n == 24 else 1)


class OnlyWhenShort(Masked):
    def mask(self, n): return torch.ones(n, n, dtype=torch.bool).tril(0 if n < 24 else 1)


class Bilateral(Masked):
    def filter(self, x):
        n = x.shape[-2]
        weight = torch.randn(n // 2 + 1, 1, generator=torch.Generator().manual_seed(0)).to(x)
        return torch.fft.irfft(torch.fft.rfft(x, dim=-2) * weight, n=n, dim=-2)


class OneSided(Masked):
    def filter(self, x):
        n, taps = x.shape[-2], torch.tensor([0.5, 0.3, 0.2]).to(x)
        spectrum = torch.fft.rfft(x, n=2 * n, dim=-2) * torch.fft.rfft(taps, n=2 * n)[:, None]
        return torch.fft.irfft(spectrum, n=2 * n, dim=-2)[..., :n, :]


class NotANumber(Masked):
    def forward(self, x): return super().forward(x) * math.nan


class Broken(Masked):
    def forward(self, x): raise RuntimeError("no such kernel")


class Constant(Masked):
    def forward(self, x): return torch.zeros_like(x)


class Peek(Masked):
    "A leak of one part in a hundred."
    def forward(self, x): return super().forward(x) + 0.01 * x.mean(1, keepdim=True)


class Gain(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(d))
    def forward(self, x): return (1 + self.gamma) * F.rms_norm(x, x.shape[-1:])


class NormedAndGated(Attention):
    "The essentials of an attention-only block: norms on q and k, rotary positions, a gate that starts half open."
    norm, positions, embedding_scale = Gain, "rope", 4.0
    def __init__(self, config):
        super().__init__()
        d, self.H = config.d_model, config.n_heads
        self.W_Q, self.W_K, self.W_V, self.W_O = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.norm_q, self.norm_k, self.gate = Gain(d // self.H), Gain(d // self.H), nn.Parameter(torch.zeros(d))
        self.register_buffer("rope", rotary_table(config.n_ctx, d // self.H), persistent=False)
    def forward(self, x):
        q, k, v = (split_heads(w(x), self.H) for w in (self.W_Q, self.W_K, self.W_V))
        q, k = rotate(self.norm_q(q), self.rope), rotate(self.norm_k(k), self.rope)
        return self.gate.sigmoid() * self.W_O(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


@pytest.fixture
def build(monkeypatch):
    "A model around an attention class that is registered for the length of a test."
    def model(attention, **options):
        if isinstance(attention, type):
            monkeypatch.setitem(ATTENTION, "toy", attention)
            attention = "toy"
        return GPT(GPTConfig(attention=attention, **SHAPE | options), seed=7)
    return model


@pytest.mark.parametrize("attention", ["qkv", "qkv:n_kv_heads=2,positions=rope,query_factors=2", "keyless:depth=2", "keyless", "keyless:depth=4,routing=per_head",
                                       "keyless:n_kv_heads=1,positions=rope", Masked, OneSided, NormedAndGated])
@pytest.mark.parametrize("options", [{}, {"mlp": "none"}, {"dropout": 0.3}], ids=str)
def test_causal_models_pass(build, attention, options):
    table = assert_causal(build(attention, **options), TOKENS)
    assert len(table) == 6 and (table.past > 0.001).all()


@pytest.mark.parametrize("attention", [OffByOne, Bilateral, Peek])
def test_models_that_see_the_future_fail(build, attention):
    with pytest.raises(ValueError, match="the model may see the future: in evaluation mode at 24 positions, .* by [0-9.]+% of their standard deviation"):
        assert_causal(build(attention), TOKENS)


@pytest.mark.parametrize("attention, where", [(OnlyInTraining, "in evaluation mode at 24"), (OnlyInEvaluation, "in training mode at 24"),
                                              (OnlyAtFullLength, "in evaluation mode at 12"), (OnlyWhenShort, "in evaluation mode at 24")])
def test_causal_in_one_place_only_is_not_causal(build, attention, where):
    with pytest.raises(ValueError, match=where): assert_causal(build(attention), TOKENS)


@pytest.mark.parametrize("attention, finding", [(NotANumber, "nan%"), (Broken, "could not be judged: RuntimeError: no such kernel"), (Constant, "depends on no earlier position")])
def test_the_gate_fails_closed(build, attention, finding):
    with pytest.raises(ValueError, match=finding): assert_causal(build(attention), TOKENS)


def test_the_figure_of_the_bilateral_filter_does_not_depend_on_units(build):
    model = build(Bilateral)
    leak = future_leak(model, TOKENS)
    half = leak[(leak["mode"] == "evaluation") & (leak.prefix == 12)]
    assert len(half) == 1 and 0.2 < half.change.item() < 1.0
    with torch.no_grad(): model.norm.weight *= 100
    assert future_leak(model, TOKENS).change.tolist() == pytest.approx(leak.change.tolist(), rel=1e-4)


def test_the_gradient_alone_finds_a_leak_that_this_change_cannot_show(build):
    class Rare(Masked):
        "Sees the next position through a channel that is constant in these tokens."
        def forward(self, x): return super().forward(x) + (x.roll(-1, 1) - x.roll(-1, 1).detach())
    table = future_leak(build(Rare), TOKENS)
    assert (table.change == 0).all() and (table.future > 0.01).all()


def test_too_little_to_judge(build):
    with pytest.raises(ValueError, match="could not be judged.*between 3 and the 2 positions"): assert_causal(build("qkv"), TOKENS[:, :2])
    with pytest.raises(ValueError, match="could not be judged.*no other token"): assert_causal(build("qkv", d_vocab=1), torch.zeros(1, 24, dtype=torch.long))


def test_a_model_is_left_as_it_was(build):
    model = build("qkv", dropout=0.5)
    model.blocks[0].eval()
    model.register_buffer("seen", torch.zeros(()))
    model.blocks[1].register_forward_hook(lambda *_: model.seen.add_(1) and None)
    state, weights = torch.get_rng_state(), [p.detach().clone() for p in model.parameters()]
    assert_causal(model, TOKENS)
    with pytest.raises(ValueError): assert_causal(build(Broken), TOKENS)
    assert torch.equal(state, torch.get_rng_state()) and all(torch.equal(a, b) for a, b in zip(weights, model.parameters()))
    assert model.training and not model.blocks[0].training and model.seen == 0
    assert all(p.grad is None for p in model.parameters()) and not model.embed._forward_hooks


CONFIG = TrainConfig(n_chars=20_000, epochs=1, steps_per_epoch=3, warmup_steps=1, n_eval=4, n_probe=4)


@pytest.fixture(scope="module")
def corpus(): return CharCorpus.load("builtin", n_chars=20_000)


def test_a_run_that_leaks_is_refused_or_marked(monkeypatch, corpus, tmp_path, capsys):
    import dataclasses
    monkeypatch.setitem(ATTENTION, "toy", OffByOne)
    config = dataclasses.replace(CONFIG, attention="toy")
    with pytest.raises(ValueError, match="see the future.*allow_leak=True marks them so"): train(config, corpus, out=tmp_path)
    assert "loss" not in "".join(capsys.readouterr()).replace("losses would mean nothing", "") and not list(tmp_path.iterdir())
    run = train(config, corpus, out=tmp_path, progress=False, allow_leak=True, cell="c")
    assert (run.rows.status == "leaky").all() and run.summary["leaky"] is True
    assert (read_rows(write_rows(run.rows, tmp_path / "rows.parquet")).status == "leaky").all()
    with pytest.raises(ValueError, match="see the future"): train(config, corpus, out=tmp_path, progress=False)
    monkeypatch.setattr(OffByOne, "allow_leak", True)
    assert (train(config, corpus, progress=False).rows.status == "leaky").all()


def test_permission_does_not_mark_a_causal_model(corpus):
    run = train(CONFIG, corpus, progress=False, allow_leak=True)
    assert (run.rows.status == "ok").all() and "leaky" not in run.summary


def test_the_gate_changes_no_bit_of_a_run(monkeypatch, corpus):
    import dataclasses
    config = dataclasses.replace(CONFIG, dropout=0.2)
    gated = train(config, corpus, progress=False)
    monkeypatch.setattr("qk_geometry.train.passes_gate", lambda *_: True)
    pd.testing.assert_frame_equal(gated.rows, train(config, corpus, progress=False).rows, check_exact=True)


def test_a_reason_stays_beside_the_mark(monkeypatch, corpus):
    import dataclasses
    monkeypatch.setitem(ATTENTION, "toy", NotANumber)
    run = train(dataclasses.replace(CONFIG, attention="toy"), corpus, progress=False, allow_leak=True)
    model = run.rows[run.rows.layer.isna()]
    assert model.status.str.startswith("leaky; non-finite").all()
    with pytest.raises(ValueError, match="nan%"): Run(dataclasses.replace(CONFIG, attention="toy"), corpus)
