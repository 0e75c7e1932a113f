"""Keyless attention against a plain float64 computation, its cache, its queries in one matrix, and its tap."""
import math
import re

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qk_geometry.attention import ATTENTION, QKVAttention, make, parse
from qk_geometry.conversion import convert, routing_for
from qk_geometry.data import CharCorpus
from qk_geometry.generate import LayerCache, fused, generate, new_cache, read_on
from qk_geometry.grid import cell_id
from qk_geometry.model import GPT, GPTConfig
from qk_geometry.tracker import Tracker, capture
from qk_geometry.train import TrainConfig, train

SHAPE = dict(n_layers=2, n_heads=4, d_model=32, n_ctx=20, d_vocab=30)
TOKENS = torch.randint(30, (3, 20), generator=torch.Generator().manual_seed(5))
SPECS = [f"keyless:depth={m},n_kv_heads={g},positions={p}{r}" for m in (2, 3, 4) for g in (0, 2, 1) for p in ("learned", "rope")
         for r in ("", ",routing=per_head") if m > 2 or not r]
STANDARD = [f"qkv:n_kv_heads={g},positions={p},query_factors={f}" for g in (0, 1) for p in ("learned", "rope") for f in (1, 2)]


def build(attention, **options): return GPT(GPTConfig(attention=attention, **SHAPE | options), seed=11)


def reference(attention, x):
    "One head and one pair of positions at a time, in float64, rotation as complex multiplication."
    a, x, (batch, n, d) = attention, x.double(), x.shape
    H, G = a.n_heads, a.n_kv_heads
    w = d // H
    q = x @ a.W_Q.weight.double().T
    for factor in a.factors: q = q @ (factor.weight.double().T if factor.weight.dim() == 2 else torch.block_diag(*factor.weight.double()))
    v = x @ a.W_V.weight.double().T
    k = x @ a.W_K.weight.double().T if hasattr(a, "W_K") else v
    def turned(y, i):
        if a.positions != "rope": return y
        plane = torch.complex(y[..., :w // 2], y[..., w // 2:]) * torch.exp(1j * i * 10000.0 ** (-2 * torch.arange(w // 2, dtype=torch.float64) / w))
        return torch.cat([plane.real, plane.imag], -1)
    z = torch.zeros(batch, n, d, dtype=torch.float64)
    for h in range(H):
        own, shared = slice(h * w, h * w + w), slice(h // (H // G) * w, h // (H // G) * w + w)
        for i in range(n):
            scores = torch.stack([(turned(q[:, i, own], i) * turned(k[:, j, shared], j)).sum(-1) / math.sqrt(w) for j in range(i + 1)], -1)
            z[:, i, own] = torch.einsum("bj,bjw->bw", scores.softmax(-1), v[:, :i + 1, shared])
    return z @ a.W_O.weight.double().T


@pytest.mark.parametrize("spec", SPECS + STANDARD)
def test_equal_to_the_plain_computation(spec):
    attention, x = build(spec).blocks[0].attention, torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(): torch.testing.assert_close(attention(x).double(), reference(attention, x), rtol=1e-4, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(SPECS + STANDARD), st.lists(st.integers(1, 8), min_size=1, max_size=20))
def test_cached_logits_equal_the_whole_pass(spec, pieces):
    model = build(spec).eval()
    pieces = [p for i, p in enumerate(pieces) if sum(pieces[:i + 1]) <= 20]
    n, cache = sum(pieces), new_cache(model)
    with torch.no_grad():
        expected = model(TOKENS[:, :n])
        got = torch.cat([read_on(model, piece, cache) for piece in TOKENS[:, :n].split(pieces, 1)], 1)
        with fused(model): once = torch.cat([read_on(model, piece, fresh) for fresh in [new_cache(model)] for piece in TOKENS[:, :n].split(pieces, 1)], 1)
    assert (got - expected).abs().max() < 1e-5 and (once - expected).abs().max() < 1e-5


@pytest.mark.parametrize("spec", ["qkv", "keyless", "keyless:depth=4,positions=rope,n_kv_heads=2", "qkv:positions=rope"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generation_does_not_depend_on_the_cache(spec, temperature):
    model = build(spec, dropout=0.5)
    state = torch.get_rng_state()
    cached, whole = (generate(model, TOKENS[:, :4], 16, temperature, seed=3, cache=c) for c in (True, False))
    assert torch.equal(cached, whole) and torch.equal(cached[:, :4], TOKENS[:, :4]) and torch.equal(state, torch.get_rng_state()) and model.training
    assert all(block.attention.fused is None for block in model.blocks)


@pytest.mark.parametrize("groups", [0, 2, 1])
@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_a_keyless_cache_is_exactly_half(groups, positions):
    sizes = []
    for name in ("qkv", "keyless"):
        cache = new_cache(model := build(f"{name}:n_kv_heads={groups},positions={positions}"))
        with torch.no_grad(): read_on(model, TOKENS, cache)
        sizes.append(sum(tensor.untyped_storage().nbytes() for layer in cache for tensor in layer.stored))
    assert sizes[0] == 2 * sizes[1] == 2 * 2 * 3 * (groups or 4) * 20 * 8 * 4


def test_a_cache_that_is_full_or_impossible_says_so(monkeypatch):
    cache = LayerCache(3)
    cache.extend(torch.zeros(1, 1, 3, 2))
    with pytest.raises(ValueError, match="3 positions has no room for position 4"): cache.extend(torch.zeros(1, 1, 1, 2))
    monkeypatch.setitem(ATTENTION, "toy", type("Toy", (QKVAttention,), {"stores": ()}))
    with pytest.raises(ValueError, match="layer 0: Toy has no cache"): generate(build("toy"), TOKENS[:, :2], 2)
    assert generate(build("toy"), TOKENS[:, :2], 2, cache=False).shape == (3, 4)
    with pytest.raises(ValueError, match="18 . 3 characters are more than the context, 20"): generate(build("qkv"), TOKENS[:, :18], 3)


@pytest.mark.parametrize("spec", ["keyless:depth=4", "keyless:routing=per_head", "qkv:query_factors=3"])
def test_every_factor_learns_and_the_product_is_gone_after_an_error(spec):
    model = build(spec)
    model(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    factors = model.blocks[1].attention.factors
    assert len(factors) and all(f.weight.grad.abs().max() > 0 for f in factors)
    with pytest.raises(KeyError), fused(model): raise KeyError
    assert all(block.attention.fused is None for block in model.blocks)


@pytest.mark.parametrize("spec", SPECS[::3] + STANDARD)
def test_the_tap_reads_what_meets_in_the_score(spec):
    model, seen = build(spec).eval(), []
    def spy(q, k, v, **options):
        seen.append((q, k))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
    for block in model.blocks: block.attention.sdpa = spy
    caught = capture(model, TOKENS, model.taps())
    assert len(seen) == len(model.blocks)
    for (q, k), (a, b) in zip(seen, caught, strict=True): assert torch.equal(q, a) and torch.equal(k, b)


def test_the_tracker_measures_the_whole_query_map():
    model = build("keyless:depth=4")
    rows = Tracker(model, TOKENS).snapshot(0)
    a = model.blocks[1].attention
    product = a.W_Q.weight.double().T @ a.factors[0].weight.double().T @ a.factors[1].weight.double().T
    row = rows[(rows.layer == 1) & rows["head"].isna()].iloc[0]
    assert row.status == "ok" and row.W_Q_frobenius == pytest.approx(product.norm().item(), rel=1e-5) and row.W_K_frobenius == pytest.approx(a.W_V.weight.norm().item(), rel=1e-5)
    sigma = torch.linalg.svdvals(product @ a.W_V.weight.double())
    assert row.qk_spectral == pytest.approx(sigma[0].item(), rel=1e-5)


@pytest.mark.parametrize("spec", ["qkv", "qkv:query_factors=2", "keyless:depth=2", "keyless:depth=3", "keyless:depth=4", "keyless:routing=per_head", "keyless:n_kv_heads=1"])
@pytest.mark.parametrize("d_model", [32, 64, 256])
def test_matched_models_count_alike(spec, d_model):
    count = lambda attention, mlp: sum(p.numel() for p in build(attention, d_model=d_model, mlp=mlp).parameters())
    assert abs(count(spec, "gelu:match=qkv") - count("qkv", "gelu")) <= SHAPE["n_layers"] * (2 * d_model + 1) / 2


def test_more_than_the_mlp_can_give_is_refused():
    with pytest.raises(ValueError, match=r"mlp = 'gelu:match=qkv:n_kv_heads=1': match = .* leaves no parameter"):
        build("qkv:query_factors=20", mlp="gelu:match=qkv:n_kv_heads=1")


@pytest.mark.parametrize("spec, finding", [("keyless:depth=1", "depth = 1 must be at least 2"), ("keyless:deep=3", "keyless has no option 'deep'; it has: depth, routing, n_kv_heads, positions"),
                                           ("keyless:depth=3.0", "depth = '3.0' must be of type int"), ("keyless:routing=half", "routing = 'half' must be one of full, per_head"),
                                           ("keyless:n_kv_heads=-1", "n_kv_heads = -1 does not divide n_heads = 2"), ("keyless:depth=3,depth=4", "depth is set twice"),
                                           ("keyless:,", "no option ''"), ("Keyless", "is unknown; there are: ")])
def test_a_bad_specification_is_named_at_validate(spec, finding):
    with pytest.raises(ValueError, match=re.escape(finding)) as caught: TrainConfig(attention=spec).validate()
    assert str(caught.value).startswith(f"attention = {spec!r}") and "\n" not in str(caught.value)


def test_types_of_options():
    class Toy(QKVAttention):
        def __init__(self, config, *, flag: bool = False, rate: float = 0.5, name: str = "a"): super().__init__(config)
    registry = {"toy": Toy}
    assert parse("toy:flag=true,rate=2,name=b", registry) == (Toy, {"flag": True, "rate": 2.0, "name": "b"}) and parse("toy", registry) == (Toy, {})
    for bad in ("flag=1", "rate=nan", "rate=inf", "rate=", "flag"):
        with pytest.raises(ValueError, match=f"'toy:{bad}'"): parse(f"toy:{bad}", registry)
    with pytest.raises(ValueError, match="mlp = 'none:x=1': none has no option 'x'"): parse("none:x=1", {"none": None}, "mlp")


def test_specifications_make_readable_cell_ids():
    spec = "keyless:depth=2,routing=per_head,n_kv_heads=2,positions=rope"
    name = cell_id({"attention": spec, "seed": 7}, {"attention": spec, "seed": 7})
    assert re.fullmatch(r"attention=keyless_depth=2_routing=per_head_n_kv_heads=2_positions=rope-seed=7-[0-9a-f]{8}", name)


def test_odd_heads_cannot_turn():
    with pytest.raises(ValueError, match="an even d_head, not 5"): build("keyless:positions=rope", d_model=20)
    config = GPTConfig(**SHAPE)
    before = torch.get_rng_state()
    GPTConfig(attention="keyless:depth=4", **SHAPE)
    assert torch.equal(before, torch.get_rng_state()) and make("none", {"none": None}, config, "mlp") is None


def test_a_keyless_run_trains_and_resumes_to_the_bit(tmp_path):
    from qk_geometry.train import Callback
    class Stop(Callback):
        def on_step(self, run):
            if run.step == 7: raise KeyboardInterrupt
    corpus = CharCorpus.load("builtin", n_chars=20_000)
    config = TrainConfig(n_chars=20_000, attention="keyless:depth=4,routing=per_head,positions=rope", mlp="gelu:match=qkv", epochs=2, steps_per_epoch=5, warmup_steps=2, n_eval=8, n_probe=8)
    whole = train(config, corpus, progress=False)
    assert (whole.rows.status == "ok").all() and whole.rows.val_loss.dropna().iloc[-1] < whole.rows.val_loss.dropna().iloc[0]
    assert {"W_Q_grad_norm", "W_K_update_ratio"} <= set(whole.rows.dropna(axis=1, how="all"))
    with pytest.raises(KeyboardInterrupt): train(config, corpus, [Stop()], out=tmp_path, progress=False)
    resumed = train(config, corpus, [Callback()], out=tmp_path, progress=False)
    pd.testing.assert_frame_equal(whole.rows, resumed.rows, check_exact=True)


@pytest.mark.parametrize("groups", [0, 2])
def test_conversion_is_exact_where_it_can_be(groups):
    standard = build(f"qkv:n_kv_heads={groups}")
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for block in standard.blocks:
            a = block.attention
            V = a.W_V.weight.view(a.n_kv_heads, 8, 32)
            a.W_K.weight.copy_((torch.randn(a.n_kv_heads, 8, 8, generator=generator) @ V).flatten(0, 1))
        for tokens in (None, TOKENS.repeat(4, 1)):
            keyless, table = convert(standard, tokens)
            assert table.residual.max() < 1e-5 and len(table) == 2 * (groups or 4)
            torch.testing.assert_close(keyless(TOKENS), standard(TOKENS), rtol=1e-3, atol=1e-4)
        for block in standard.blocks: block.attention.W_K.weight.add_(0.2 * torch.randn(block.attention.W_K.weight.shape, generator=generator))
        keyless, table = convert(standard)
        assert table.residual.min() > 0.1 and not torch.allclose(keyless(TOKENS), standard(TOKENS), atol=1e-3)


def test_routing_is_the_best_one():
    K, V = torch.randn(2, 30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    R, left = routing_for(K, V)
    error = lambda M: ((K - V @ M.T).norm() / K.norm()).item()
    assert error(R) == pytest.approx(left.item())
    assert all(error(R + 1e-3 * torch.randn(4, 4, dtype=torch.float64)) > left.item() for _ in range(20))
    with pytest.raises(ValueError, match="3 rows cannot determine 4 columns"): routing_for(K[:3], V[:3])
    with pytest.raises(ValueError, match="cannot be converted"): convert(build("keyless"))
