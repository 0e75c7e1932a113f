"Filters along time: which of them read the future, what the gate says to each, and what a run stores of a leaky one."
import dataclasses
import math

import numpy as np
import pytest
import torch

from qk_geometry import data
from qk_geometry.causality import assert_causal, future_leak
from qk_geometry.fourier import CAUSAL, FourierAttention, bump, causal_taps, filter_by_fft, filter_the_past, sampling_loss
from qk_geometry.model import GPT, GPTConfig
from qk_geometry.train import make_optimizer, train
from qk_geometry.watch import WatchConfig, shuffled_windows, watch_tables

HONEST = ("orthogonal", "nonorthogonal", *CAUSAL)
SHAPE = dict(n_layers=2, n_heads=2, d_model=32, n_ctx=32, d_vocab=40)


def model(filter, **options):
    "A small untrained model with one filter."
    return GPT(GPTConfig(attention="fourier:" + ",".join(f"{k}={v}" for k, v in {"filter": filter, **options}.items()), **SHAPE), seed=7)


@pytest.fixture(scope="module")
def text():
    "A small corpus."
    return data.CharCorpus.load("builtin", n_chars=60_000)


@pytest.mark.parametrize("filter", HONEST)
def test_filters_that_read_the_past_pass_the_gate(filter):
    table = assert_causal(model(filter), torch.randint(40, (1, 32), generator=torch.Generator().manual_seed(0)))
    assert table["change"].max() < 1e-6


@pytest.mark.parametrize("filter, options", [("random", {}), ("gaussian", {}), ("gaussian", {"count": 4})])
def test_bilateral_filters_do_not(filter, options):
    with pytest.raises(ValueError, match="may see the future"): assert_causal(model(filter, **options), torch.randint(40, (1, 32), generator=torch.Generator().manual_seed(0)))
    with pytest.raises(ValueError, match="may see the future"): train(WatchConfig(attention=f"fourier:filter={filter}", n_chars=60_000, epochs=1).training, progress=False)


def test_filter_by_fft_is_a_circular_convolution():
    x, w = torch.randn(2, 3, 16, 4, generator=torch.Generator().manual_seed(1)), torch.rand(3, 2, 9, generator=torch.Generator().manual_seed(2))
    h = torch.fft.irfft(w, n=16)
    lag = (torch.arange(16)[:, None] - torch.arange(16)) % 16
    assert torch.allclose(filter_by_fft(x, w, 16), torch.einsum("hfts,bhsd->bhftd", h[..., lag], x), atol=1e-5)
    short = torch.cat([x[:, :, :5], torch.zeros(2, 3, 11, 4)], 2)
    assert torch.allclose(filter_by_fft(x[:, :, :5], w, 16), filter_by_fft(short, w, 16)[:, :, :, :5], atol=1e-6)
    with pytest.raises(ValueError, match="16 positions do not fit into n_ctx = 8"): filter_by_fft(x, w[..., :5], 8)


@pytest.mark.parametrize("shape", CAUSAL)
def test_causal_taps_pass_their_frequency(shape):
    h = causal_taps(shape, torch.tensor([8.0]), 256)
    response = torch.fft.rfft(h, n=256).abs()[0]
    assert h.norm().item() == pytest.approx(1) and abs(response.argmax().item() - 8) <= 2 and response[60:].max() < 0.5 * response.max()


def test_filter_the_past_is_a_padded_convolution():
    x, h = torch.randn(1, 1, 20, 3, generator=torch.Generator().manual_seed(3)), torch.randn(1, 1, 6, generator=torch.Generator().manual_seed(4))
    padded = torch.nn.functional.pad(x[0, 0].T[:, None], (5, 0))
    assert torch.allclose(filter_the_past(x, h)[0, 0, 0], torch.nn.functional.conv1d(padded, h.flip(-1)).squeeze(1).T, atol=1e-5)


def test_a_frequency_that_left_the_spectrum_still_filters():
    f = torch.tensor([1e6], requires_grad=True)
    w = bump(f, 17)
    w[0, 3].backward()
    assert torch.isfinite(w).all() and w.norm().item() == pytest.approx(1) and torch.isfinite(f.grad).all()


def test_frequencies_are_learned_without_decay_and_part():
    net = model("gaussian", count=4)
    groups = make_optimizer(net, WatchConfig()).param_groups
    decay = {id(p): g["weight_decay"] for g in groups for p in g["params"]}
    assert all(decay[id(b.attention.log_f)] == 0 for b in net.blocks)
    start = net.blocks[0].attention.frequencies
    assert torch.allclose(start[0], torch.tensor([4, 4 * 2 ** (1 / 3), 4 * 2 ** (2 / 3), 8.0])) and torch.equal(start[0], start[1])
    tokens = torch.randint(40, (4, 33), generator=torch.Generator().manual_seed(5))
    net(tokens[:, :-1], tokens[:, 1:]).backward()
    assert len(set(net.blocks[0].attention.log_f.grad.tolist())) == 8


@pytest.mark.parametrize("spec, words", [("filter=haar", "must be one of"), ("count=0", "count = 0 must be at least 1"), ("filter=random,count=2", "has no frequencies")])
def test_options_that_cannot_work(spec, words):
    with pytest.raises(ValueError, match=words): GPTConfig(attention=f"fourier:{spec}", **SHAPE)
    with pytest.raises(ValueError, match="n_ctx = 8 is too short"): GPTConfig(attention="fourier", **{**SHAPE, "n_ctx": 8})


def test_the_orthogonal_control_is_the_standard_attention():
    standard, control = GPT(GPTConfig(**SHAPE), seed=7), model("orthogonal")
    tokens = torch.randint(40, (2, 32), generator=torch.Generator().manual_seed(6))
    assert torch.allclose(standard(tokens), control(tokens), atol=1e-5)
    assert not torch.allclose(standard(tokens), model("nonorthogonal")(tokens), atol=1e-3)


def test_sampling_loss_is_the_loss_of_a_causal_model_and_the_worse_one_of_a_leak():
    class Copies(torch.nn.Module):
        "Puts all its mass on the next character where it can see it."
        def forward(self, tokens): return 9 * torch.nn.functional.one_hot(torch.cat([tokens[:, 1:], tokens[:, -1:]], 1), 40).float()
    tokens = torch.randint(40, (2, 33), generator=torch.Generator().manual_seed(8))
    x, y = tokens[:, :-1], tokens[:, 1:]
    net = model("morlet")
    assert sampling_loss(net, x, y) == pytest.approx(net(x, y).item(), abs=1e-5)
    assert torch.nn.functional.cross_entropy(Copies()(x)[:, :-1].flatten(0, 1), y[:, :-1].flatten()) < 0.01 and sampling_loss(Copies(), x, y) > 3


def test_shuffled_windows_hold_the_same_characters(text):
    mixed = shuffled_windows(text, 10_000, 32)[0]
    plain = data.windows(text, 10_000, 32)[0]
    share = lambda x: np.bincount(x.ravel(), minlength=len(text.chars)) / x.size
    assert mixed.shape == plain.shape and np.abs(share(mixed) - share(plain)).max() < 0.005 and not np.array_equal(mixed, plain)


def test_a_leaky_run_is_marked_watched_and_resumes_with_all_its_lines(text, tmp_path):
    config = WatchConfig(attention="fourier:filter=gaussian,allow_leak=true", n_chars=60_000, epochs=2, watch="frequencies spectra losses").validate()

    class Stop(type(config.watches()[0])):
        "Ends the run in its second epoch."
        def on_step(self, run):
            super().on_step(run)
            if run.step == 20: raise KeyboardInterrupt

    def run_with(*watches, **where):
        run = train(config.training, text, watches, progress=False, cell="c", **where)
        return run, watch_tables(run, config, watches, "c")

    whole, tables = run_with(*config.watches())
    with pytest.raises(KeyboardInterrupt): run_with(Stop("frequencies"), Stop("spectra"), out=tmp_path)
    resumed, again = run_with(*config.watches(), out=tmp_path)
    assert all(tables[name].equals(again[name]) for name in tables) and set(tables) == {"frequencies", "spectra", "losses"}
    assert whole.rows["status"].str.startswith("leaky").all() and whole.summary["leaky"]
    frequencies, losses = tables["frequencies"].to_pandas(), tables["losses"].to_pandas().iloc[0]
    assert sorted(frequencies["step"].unique()) == sorted(whole.rows["step"].unique()) and len(frequencies) == frequencies["step"].nunique() * 2 * 2
    assert np.allclose(frequencies["period"] * frequencies["bin"], 32) and losses["leak"] > 1e-4
    assert losses["leak"] == pytest.approx(future_leak(whole.model, whole.windows["eval"][0][:1])["change"].max())


def test_what_is_measured_is_what_is_compared():
    attention = FourierAttention(dataclasses.make_dataclass("C", [("d_model", int, 32), ("n_heads", int, 2), ("n_ctx", int, 32), ("dropout", float, 0.0)])(), filter="random")
    x, tap = torch.randn(1, 32, 32, generator=torch.Generator().manual_seed(9)), attention.tap(0)
    q, k = tap.read(*(m(x) for m in tap.modules))
    v = attention.W_V(x).unflatten(-1, (2, 16)).transpose(1, 2)
    pattern = (q @ k.mT / 4).masked_fill(torch.ones(32, 32, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
    assert torch.allclose(attention.W_O((pattern @ v).transpose(1, 2).flatten(-2)), attention(x), atol=1e-5)
