"""Attention statistics against a dense float64 computation, and no look into the future."""
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qk_geometry.metrics import attention_statistics
from qk_geometry.model import GPT, GPTConfig


def dense(q, k, causal):
    "The definitions, with the whole pattern in memory, in float64 numpy-style steps."
    q, k = q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    n, T = q.shape[-2], k.shape[-2]
    visible = torch.ones(n, T, dtype=torch.bool).tril() if causal else torch.ones(n, T, dtype=torch.bool)
    logits = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~visible, -math.inf)
    p = logits.softmax(-1)
    entropy = -(p * logits.log_softmax(-1).masked_fill(~visible, 0.0)).sum(-1)
    count = visible.sum(-1)
    top = torch.cat([p.sort(-1, descending=True).values, torch.zeros(*p.shape[:-1], 5)], -1)
    cells = logits[..., visible]
    return {"entropy": entropy.mean(-1), "entropy_normalised": (entropy[..., count > 1] / count[count > 1].double().log()).mean(-1), "top1_mass": top[..., 0].mean(-1),
            "top5_mass": top[..., :5].sum(-1).mean(-1), "gap": (top[..., 0] - top[..., 1]).mean(-1), "sink_mass": p[..., 0].mean(-1),
            "logit_mean": cells.mean(-1), "logit_var": cells.var(-1, correction=0), "logit_std": cells.std(-1, correction=0), "logit_max": cells.amax(-1)}


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]), st.integers(2, 70), st.integers(1, 16), st.booleans(),
       st.sampled_from([None, 1, 3, 64]), st.sampled_from([0.0, 1.0, 30.0]), st.integers(0, 99))
def test_equal_to_dense(batch, heads, T, d, causal, block, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = (scale * torch.randn(batch, h, T, d, generator=generator, dtype=torch.float64) for h in heads)
    got, expected = attention_statistics(q, k, causal, block), dense(q, k, causal)
    assert got.keys() == expected.keys()
    for name in expected: torch.testing.assert_close(got[name], expected[name], rtol=1e-9, atol=1e-9, msg=name)


def test_float32_and_bfloat16_inputs_are_computed_in_float32():
    q, k = torch.randn(2, 4, 128, 32), torch.randn(2, 4, 128, 32)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-6)):
        a, b = q.to(dtype), k.to(dtype)
        got, expected = attention_statistics(a, b), dense(a, b, True)
        for name in expected: torch.testing.assert_close(got[name].double(), expected[name], rtol=5 * tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("block", [None, 7])
def test_gradients_are_those_of_the_dense_computation(block):
    q, k = (torch.randn(2, 3, 20, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
    got, expected = attention_statistics(q, k, block=block), dense(q, k, True)
    for name in expected:
        ours, theirs = (torch.autograd.grad(values[name].sum(), (q, k), retain_graph=True) for values in (got, expected))
        for a, b in zip(ours, theirs): torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, msg=name)


def test_an_offset_of_all_logits_costs_the_variance_few_digits():
    q, k = torch.randn(1, 2, 200, 16), torch.randn(1, 2, 200, 16)
    q[..., 0], k[..., 0] = 1.0, 4000.0                                      # every logit 1,000 higher, in float32
    got, expected = attention_statistics(q, k), dense(q, k, True)
    for name in ("logit_var", "entropy", "top5_mass"): torch.testing.assert_close(got[name].double(), expected[name], rtol=1e-3, atol=1e-3, msg=name)


def test_leading_dimensions_are_kept():
    q, k = torch.randn(3, 2, 4, 24, 8), torch.randn(3, 2, 2, 24, 8)
    together = attention_statistics(q, k)
    for name, value in attention_statistics(q[1], k[1]).items(): torch.testing.assert_close(together[name][1], value, rtol=1e-6, atol=1e-6)
    assert attention_statistics(q[0, 0], k[0, 0])["entropy"].shape == (4,)


@pytest.mark.parametrize("size", [1e5, 1e30])
def test_extreme_logits_stay_finite(size):
    q = (size * torch.randn(1, 2, 40, 4)).requires_grad_()
    k = torch.randn(1, 2, 40, 4)
    statistics = attention_statistics(q, k)
    finite = [name for name in statistics if name not in ("logit_var", "logit_std")] if size > 1e10 else list(statistics)
    assert all(torch.isfinite(statistics[name]).all() for name in finite)
    statistics["entropy"].sum().backward()
    assert torch.isfinite(q.grad).all()


def test_repeated_logits_keep_their_ties():
    statistics = attention_statistics(torch.zeros(1, 1, 300, 4), torch.randn(1, 1, 300, 4))
    expected = dense(torch.zeros(1, 1, 300, 4), torch.zeros(1, 1, 300, 4), True)
    for name in ("top1_mass", "top5_mass", "gap"): torch.testing.assert_close(statistics[name].double(), expected[name], rtol=1e-5, atol=1e-6)


def test_a_nan_head_stays_nan_and_alone():
    q, k = torch.randn(1, 3, 20, 4), torch.randn(1, 3, 20, 4)
    k[0, 1, 4, 0] = math.nan
    for name, value in attention_statistics(q, k).items(): assert value.isnan().tolist() == [[False, True, False]], name


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc")
def test_memory_at_8192_positions_stays_small():
    import subprocess
    import sys
    code = ("import re, torch; from qk_geometry.metrics import attention_statistics as f; torch.set_num_threads(1)\n"
            "peak = lambda: int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]) / 1024\n"
            "q, k = torch.randn(1, 8, 8192, 64), torch.randn(1, 8, 8192, 64); f(q[..., :64, :], k[..., :64, :])\n"
            "before = peak(); f(q, k); ours = peak() - before\n"
            "before = peak(); (q[:, :1] @ k[:, :1].mT).softmax(-1); print(ours, peak() - before)")
    ours, one_dense_head = map(float, subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())
    assert ours < 256 < one_dense_head, f"{ours:.0f} MB, and a single dense pattern {one_dense_head:.0f} MB"


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="as many queries as keys"): attention_statistics(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 6, 4))
    with pytest.raises(ValueError, match="3 query heads cannot share 2"): attention_statistics(torch.randn(1, 3, 5, 4), torch.randn(1, 2, 5, 4))


@pytest.mark.parametrize("mlp", ["gelu", "none"])
def test_no_logit_depends_on_a_later_character(mlp):
    model = GPT(GPTConfig(n_layers=3, n_heads=2, d_model=32, n_ctx=24, d_vocab=50, mlp=mlp), seed=1).double()
    tokens = torch.randint(50, (3, 24), generator=torch.Generator().manual_seed(0))
    logits = model(tokens)
    for prefix in (1, 7, 23):
        changed = tokens.clone()
        changed[:, prefix:] = (changed[:, prefix:] + 17) % 50
        torch.testing.assert_close(model(changed)[:, :prefix], logits[:, :prefix], rtol=0, atol=1e-12)
        assert (model(changed)[:, prefix:] - logits[:, prefix:]).abs().max() > 1e-3


def test_compiles_as_one_graph():
    q, k = torch.randn(1, 2, 48, 8), torch.randn(1, 2, 48, 8)
    compiled = torch.compile(attention_statistics, backend="aot_eager", fullgraph=True)
    for name, value in attention_statistics(q, k).items(): torch.testing.assert_close(compiled(q, k)[name], value, msg=name)
