"Attention-only models: the block, what it costs, the optimizer of its matrices, and the tables made of it."
import dataclasses
import math
import re

import pytest
import torch

from qk_geometry import data
from qk_geometry.causality import assert_causal
from qk_geometry.model import GPT, GPTConfig, n_parameters
from qk_geometry.recall import answers, recall_line, recall_text, write_recall
from qk_geometry.san import ZCN, block_costs, matched_depth, spectrum_lines
from qk_geometry.tracker import Tracker, capture
from qk_geometry.train import Callback, TrainConfig, make_optimizer, train

SHAPE = dict(n_layers=3, n_heads=4, d_model=32, n_ctx=32, d_vocab=40)


@pytest.fixture(scope="module")
def text():
    "A small corpus."
    return data.CharCorpus.load("builtin", n_chars=60_000)


@pytest.fixture
def tokens():
    "Two windows of random characters."
    return torch.randint(40, (2, 32), generator=torch.Generator().manual_seed(0))


def san(options="", mlp="none"):
    "A small untrained model."
    return GPT(GPTConfig(attention="san" + options, mlp=mlp, **SHAPE), seed=7)


@pytest.mark.parametrize("options", ["", ":n_kv_heads=2", ":n_kv_heads=1,qk_norm=false", ":gate=false"])
@pytest.mark.parametrize("mlp", ["none", "swiglu"])
def test_passes_the_gate_and_is_tracked(options, mlp, tokens):
    model = san(options, mlp)
    assert_causal(model, tokens[:1])
    rows = Tracker(model, tokens).snapshot(0)
    assert len(rows) == 1 + 3 * (1 + 4) and (rows["status"] == "ok").all()


@pytest.mark.parametrize("options, words", [(":n_kv_heads=3", "does not divide n_heads = 4"), (":heads=2", "has no option 'heads'"), (":qk_norm=yes", "must be true or false")])
def test_options_that_cannot_work(options, words):
    with pytest.raises(ValueError, match=words): san(options)


def test_odd_heads_cannot_be_rotated():
    with pytest.raises(ValueError, match="even d_head"): GPTConfig(attention="san", n_heads=2, d_model=6)


def test_logits_see_only_distance_and_direction(tokens):
    model = san(":n_kv_heads=2")
    q, k = capture(model, tokens, model.taps()[:1])[0]
    assert (q.square().mean(-1) - 1).abs().max() < 1e-3 and (q @ k.repeat_interleave(2, 1).mT).abs().max() <= 8 + 1e-3
    same = tokens[:, :1].expand(2, 32)                                      # one character everywhere: logits depend on distance alone
    q, k = capture(model, same, model.taps()[:1])[0]
    logits = q @ k.repeat_interleave(2, 1).mT
    assert torch.allclose(logits[..., 5, 2], logits[..., 30, 27], atol=1e-4) and not torch.allclose(logits[..., 5, 2], logits[..., 5, 4], atol=1e-2)


def test_scale_of_the_weights_matters_only_without_the_norm(tokens):
    for options, same in ((":qk_norm=true", True), (":qk_norm=false", False)):
        model = san(options)
        before = model(tokens)
        for tap in model.taps(): tap.W_K.heads.mul_(30)
        assert torch.allclose(before, model(tokens), atol=1e-3) == same


def test_gates_start_half_open_and_close(tokens):
    gated, open_ = san(), san(":gate=false")
    x = gated.residual(tokens)
    assert torch.allclose(gated.blocks[0].attention(x), open_.blocks[0].attention(x) / 2, atol=1e-6)
    with torch.no_grad(): gated.blocks[0].attention.gate.g.fill_(-200)
    assert torch.equal(gated.blocks[0](x), x)


def test_gain_starts_at_one_and_is_not_decayed():
    model = san(mlp="swiglu")
    decay = {id(p): g["weight_decay"] for g in make_optimizer(model, TrainConfig()).param_groups for p in g["params"]}
    assert all(decay[id(p)] == 0 and (p == 0).all() for name, p in model.named_parameters() if name.endswith((".gamma", ".g")))
    assert sum(name.endswith(".g") for name, _ in model.named_parameters()) == 6
    assert torch.allclose(ZCN(4)(torch.full((4,), 5.0)), torch.ones(4))


def test_costs_are_those_of_the_models_that_are_built():
    ours = GPTConfig(attention="san:n_kv_heads=2", mlp="none", **{**SHAPE, "n_layers": 10})
    theirs = dataclasses.replace(ours, mlp="swiglu")
    for config in (ours, theirs):
        model, cost = GPT(config), block_costs(config)
        assert config.n_layers * cost["parameters"] == n_parameters(model.blocks)
    assert block_costs(ours)["flops"] == 2 * 3 * 32 ** 2 + 2 * 32 * 33       # 3 d^2 weights, and d channels against 16.5 keys, twice
    for by in ("parameters", "flops", "depth"):
        found = matched_depth(ours, theirs, by)
        if by == "depth": assert found["theirs, layers"] == 10
        else: assert all(abs(found[f"ours, {by}"] - found[f"theirs, {by}"]) <= abs(found[f"ours, {by}"] - n * block_costs(theirs)[by]) for n in range(1, 11))
    with pytest.raises(ValueError, match="by = 'time' is unknown"): matched_depth(ours, theirs, "time")


def test_the_control_is_a_gated_linear_unit(tokens):
    mlp, x = san(mlp="swiglu").blocks[0].mlp, torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    inside = torch.sigmoid(a := x @ mlp.W_G.weight.T) * a * (x @ mlp.W_in.weight.T)
    assert torch.allclose(mlp(x), inside @ mlp.W_out.weight.T / 2, atol=1e-6) and mlp.W_in.weight.shape == (128, 32)


def test_spectra_of_four_matrices():
    lines = spectrum_lines(san(":n_kv_heads=2"))
    assert [(line["layer"], line["weight"]) for line in lines[:5]] == [(0, "W_Q"), (0, "W_K"), (0, "W_V"), (0, "W_O"), (1, "W_Q")] and len(lines) == 12
    W = san(":n_kv_heads=2").blocks[1].attention.W_Q.weight.detach().double()
    sigma = torch.linalg.svdvals(W)
    assert lines[4]["stable_rank"] == pytest.approx((sigma.square().sum() / sigma[0] ** 2).item()) and lines[4]["spectral"] == pytest.approx(sigma[0].item())


class Stop(Callback):
    "Ends a run after some steps."
    def __init__(self, after): self.after = after
    def on_step(self, run):
        if run.step == self.after: raise KeyboardInterrupt


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_steps_the_matrices_of_blocks_and_resumes_to_the_bit(text, tmp_path):
    config = TrainConfig(attention="san:n_kv_heads=1", mlp="none", n_chars=60_000, epochs=2, muon="blocks").validate()
    adamw, muon = make_optimizer(GPT(GPTConfig(attention="san", **SHAPE)), config).parts
    assert all(p.dim() == 2 for g in muon.param_groups for p in g["params"]) and sum(p.numel() for g in adamw.param_groups for p in g["params"] if p.dim() == 2) == 40 * 32
    whole = train(config, text, progress=False)
    assert whole.summary["optimizer"] == "AdamW, Muon"
    with pytest.raises(KeyboardInterrupt): train(config, text, [Stop(20)], out=tmp_path, progress=False)
    resumed = train(config, text, [Stop(-1)], out=tmp_path, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters()))
    plain = train(dataclasses.replace(config, muon="none"), text, progress=False)
    assert "optimizer" not in plain.summary and not torch.equal(plain.model.blocks[0].attention.W_Q.weight, whole.model.blocks[0].attention.W_Q.weight)


@pytest.mark.parametrize("value", ["all", ""])
def test_an_unknown_choice_for_muon(value):
    with pytest.raises(ValueError, match="muon = .* is unknown"): TrainConfig(muon=value).validate()


def test_without_muon_a_warning_and_adamw(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.warns(UserWarning, match="has no Muon: AdamW steps every parameter"): optimizer = make_optimizer(san(), TrainConfig(muon="blocks"))
    assert isinstance(optimizer, torch.optim.AdamW)


def test_twenty_layers_start_near_the_uniform_guess(tokens):
    model = GPT(GPTConfig(attention="san:n_kv_heads=2", mlp="none", **{**SHAPE, "n_layers": 20}), seed=7)
    assert abs(model(tokens[:, :-1], tokens[:, 1:]).item() - math.log(40)) < 1.0


@pytest.mark.parametrize("kind", ["context", "weights"])
def test_every_answer_is_found_and_nothing_else(kind):
    text = recall_text(kind, 50, seed=3)
    chars = "\ufffd" + "".join(sorted(set(text)))
    tokens = torch.tensor([[chars.index(c) for c in text]])
    found = answers(tokens[:, :-1], tokens[:, 1:], chars)[0].nonzero().flatten() + 1
    wanted = [m.end() - 1 for m in re.finditer(r"\?[a-z]{1,2}\d", text)]
    assert found.tolist() == wanted and len(wanted) == 50 * (3 if kind == "context" else 6)
    for line in text.splitlines():
        if kind == "context": assert sorted(re.findall(r"[a-z]\d", line[:6])) == sorted(re.findall(r"\?([a-z]\d)", line[6:]))


def test_facts_are_the_same_in_both_splits_and_for_every_seed(tmp_path):
    facts = lambda text: dict(re.findall(r"\?([a-z]{2})(\d)", text))
    context, weights = write_recall(tmp_path, n_lines=1000)
    train_, valid = (facts((weights / f"{split}.txt").read_text()) for split in ("train", "valid"))
    assert len(train_) > 600 and all(train_.get(k, v) == v for k, v in valid.items()) and facts(recall_text("weights", 1000, seed=9)).items() <= {**facts(recall_text("weights", 9000)), **train_}.items()
    assert (context / "train.txt").read_text() != recall_text("context", 1000, seed=2)
    with pytest.raises(ValueError, match="kind = 'both' is unknown"): recall_text("both", 1)


def test_a_text_without_questions_has_no_recall(tokens):
    with pytest.raises(ValueError, match="no questions"): recall_line(san(), tokens, tokens, "\ufffd" + "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLM")
