"""The tracker on models that are not ours: grouped key heads, compiled, failing; and numbers against direct computations."""
import math

import numpy as np
import pytest
import torch
from torch import nn

from qk_geometry.attention import linear_tap, split_heads
from qk_geometry.columns import check_rows, level
from qk_geometry.metrics import attention_statistics
from qk_geometry.model import GPT, GPTConfig
from qk_geometry.spectra import SequenceMoments, effective_rank, one_thread_each, openblas, participation_ratio, singular_values
from qk_geometry.tracker import VALUES_TOGETHER, Tracker, capture, groups, measure, measure_alike


class Grouped(nn.Module):
    "One layer with four query heads that share two key heads."
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.q, self.k = nn.Embedding(30, 16), nn.Linear(16, 16), nn.Linear(16, 8)
    def forward(self, tokens):
        x = self.embed(tokens)
        return split_heads(self.q(x), 4) @ split_heads(self.k(x), 2).repeat_interleave(2, 1).mT
    def taps(self): return [linear_tap(0, self.q, self.k, 4, 2)]


TOKENS = torch.randint(30, (6, 20), generator=torch.Generator().manual_seed(1))


def test_grouped_keys_count_once_in_the_layer_and_per_query_head():
    model = Grouped()
    rows = check_rows(Tracker(model, TOKENS).snapshot(0, cell="gqa"))
    layer, heads = rows[level(rows) == "layer"].iloc[0], rows[level(rows) == "head"].set_index("head")
    q, k = capture(model, TOKENS, model.taps())[0]
    assert len(heads) == 4 and (rows["status"] == "ok").all()
    assert layer["W_K_frobenius"] == pytest.approx(model.k.weight.norm().item(), rel=1e-6)
    assert layer["k_l2"] == pytest.approx(k.transpose(1, 2).flatten(-2).norm(dim=-1).mean().item(), rel=1e-5)
    own = [c for c in rows if c.startswith(("k_", "W_K_")) and heads[c].notna().all()]
    for a, b in ((0, 1), (2, 3)): np.testing.assert_array_equal(heads.loc[a, own].astype(float), heads.loc[b, own].astype(float))
    assert (heads.loc[0, own] != heads.loc[2, own]).any()
    W_Q, W_K = model.taps()[0].W_Q.heads, model.taps()[0].W_K.heads
    assert heads.loc[3, "qk_erank_sv"] == pytest.approx(effective_rank(singular_values(W_Q[3] @ W_K[1].T)[:4]).item(), rel=1e-5)


def test_numbers_equal_direct_computations():
    model = GPT(GPTConfig(n_layers=2, n_heads=4, d_model=32, n_ctx=20, d_vocab=30), seed=3)
    rows = Tracker(model, TOKENS).snapshot(0, cell="direct")
    for layer, (q, k) in enumerate(capture(model, TOKENS, model.taps())):
        row, heads = (rows[(rows["layer"] == layer) & flag] for flag in (rows["head"].isna(), rows["head"].notna()))
        for name, x in (("q", q), ("k", k)):
            flat = x.double().transpose(1, 2).flatten(-2).flatten(0, 1)
            assert row[f"{name}_pr_cov"].item() == pytest.approx(participation_ratio(torch.linalg.eigvalsh(torch.cov(flat.T)).clamp(min=0)).item(), rel=1e-5)
            raw = torch.linalg.eigvalsh(x[:, 2].double().flatten(0, 1).T @ x[:, 2].double().flatten(0, 1)).clamp(min=0)
            assert heads[f"{name}_pr_cov_raw"].iloc[2] == pytest.approx(participation_ratio(raw).item(), rel=1e-5)
            assert row[f"{name}_rms"].item() == pytest.approx(flat.square().mean().sqrt().item(), rel=1e-5)
        logits = torch.linalg.svdvals((q @ k.mT).double() / math.sqrt(8))[..., :8]
        assert heads["logit_erank_sv"].iloc[1] == pytest.approx(effective_rank(logits)[:, 1].mean().item(), rel=1e-4)
        assert row["attention_entropy"].item() == pytest.approx(attention_statistics(q, k)["entropy"].mean().item(), rel=1e-6)


def test_layers_measured_together_read_as_each_alone():
    generator = torch.Generator().manual_seed(4)
    def layer(H, n_kv, d=8): return tuple(torch.randn(*shape, generator=generator) for shape in ((3, H, 12, d), (3, n_kv, 12, d), (H, 16, d), (n_kv, 16, d)))
    layers = [layer(4, 2), layer(4, 4), layer(4, 2), layer(4, 2, d=4), layer(4, 2)]
    layers[2][1][:, 1] = 5.0                                                # a constant key head
    layers[4][2][3, 0, 0] = math.nan
    assert sorted(map(sorted, groups(layers))) == [[0, 2, 4], [1], [3]]
    together = dict(zip((0, 2, 4), measure_alike([layers[i] for i in (0, 2, 4)])))
    for i, levels in together.items():
        for ours, alone in zip(levels, measure(*layers[i])):
            assert ours["status"] == alone["status"]
            for name in set(ours) - {"status"}: np.testing.assert_allclose(ours[name], alone[name], rtol=1e-9, err_msg=name)
    assert together[2][1]["status"] == ["ok", "ok", "constant k", "constant k"] and together[4][0]["status"] == "non-finite W_Q"


def test_groups_are_even_and_not_too_large():
    layer = lambda n: (torch.zeros(1, 1, n, 4), torch.zeros(1, 1, n, 4), torch.zeros(1, 4, 4), torch.zeros(1, 4, 4))
    assert [len(g) for g in groups([layer(8)] * 9)] == [3, 3, 3]
    assert [len(g) for g in groups([layer(VALUES_TOGETHER // 8)] * 4)] == [2, 2]
    assert [len(g) for g in groups([layer(VALUES_TOGETHER)] * 2)] == [1, 1]


def test_a_pass_ends_with_the_last_taps_of_a_model_that_names_them():
    model, ran = GPT(GPTConfig(n_layers=2, n_heads=2, d_model=16, n_ctx=20, d_vocab=30), seed=3), []
    handles = [module.register_forward_hook(lambda *_, i=i: ran.append(i)) for i, module in enumerate(model.blocks)]
    theirs = Tracker(model, TOKENS, taps=model.taps()).snapshot(0)
    assert ran == [0, 1]                                                    # a stranger's hooks after the last layer see their turn
    assert Tracker(model, TOKENS).snapshot(0).equals(theirs) and ran == [0, 1, 0]
    for handle in handles: handle.remove()


def test_the_number_of_threads_does_not_change_a_measurement():
    model, threads, tables = GPT(GPTConfig(n_layers=3, n_heads=2, d_model=32, n_ctx=20, d_vocab=30), seed=3), torch.get_num_threads(), []
    caught = capture(model, TOKENS, model.taps())
    tracker = Tracker(model, TOKENS)
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            tracker.model = _Replay(model, caught)
            tables.append(tracker.snapshot(0))
            assert torch.get_num_threads() == n
    finally: torch.set_num_threads(threads)
    assert tables[0].equals(tables[1])


def test_parallel_measurements_do_not_share_the_threads_of_numpy():
    threads, numpys = torch.get_num_threads(), lambda *_: [library.num_threads for library in openblas().lib_controllers]
    torch.set_num_threads(2)
    try:
        with openblas().limit(limits=2): inside, after = one_thread_each(numpys, range(4)), numpys()
    finally: torch.set_num_threads(threads)
    assert inside and all(n == 1 for counts in inside for n in counts) and set(after) == {2}


class _Replay(nn.Module):
    "Plays queries and keys that were caught before into the hooks of a model's projections."
    def __init__(self, model, caught):
        super().__init__()
        self.inner, self.caught = model, caught
    def forward(self, tokens):
        for tap, pair in zip(self.inner.taps(), self.caught):
            for module, x in zip(tap.modules, pair):
                for hook in module._forward_hooks.values(): hook(module, (), x.transpose(1, 2).flatten(-2))


def test_a_compiled_model_is_measured_through_its_original():
    model = GPT(GPTConfig(n_layers=1, n_heads=2, d_model=16, n_ctx=20, d_vocab=30), seed=3)
    compiled = torch.compile(model, backend="eager")
    assert Tracker(compiled, TOKENS).snapshot(0).equals(Tracker(model, TOKENS).snapshot(0))


def test_a_tap_whose_module_never_runs_is_named():
    model = GPT(GPTConfig(n_layers=1, n_heads=2, d_model=16, n_ctx=20, d_vocab=30), seed=3)
    idle = linear_tap(5, nn.Linear(16, 16), nn.Linear(16, 16), 2)
    with pytest.raises(RuntimeError, match="layer 5"): Tracker(model, TOKENS, [idle]).snapshot(0)
    assert all(not m._forward_hooks for m in model.modules())


def test_one_or_two_tokens_are_a_status_and_not_a_crash():
    model = GPT(GPTConfig(n_layers=1, n_heads=2, d_model=16, n_ctx=20, d_vocab=30), seed=3)
    rows = check_rows(Tracker(model, TOKENS[:1, :2]).snapshot(0, cell="short"))
    assert rows["status"].iloc[1:].str.contains("fewer than 3 tokens").all() and rows["q_pr_cov_corrected"].isna().all()


def test_moments_are_those_of_the_vectors():
    x = torch.randn(5, 7, 6)
    moments = SequenceMoments.of(x)
    assert torch.allclose(moments.total.cov, torch.cov(x.double().flatten(0, 1).T)) and moments.heads(3).repeat(2).total.mean.shape == (6, 2)
