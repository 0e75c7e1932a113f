"Every family, every way of storing it, and every way of being wrong."
import dataclasses
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hub import redirect, serve
from torch import nn

from qk_geometry.attention import split_heads
from qk_geometry.checkpoints import LAYOUTS, Layout, layout_taps, read_qk
from qk_geometry.model import GPT, GPTConfig
from qk_geometry.proof import at_stage, measure_layers, prove, watch
from qk_geometry.storage import Traffic, open_safetensors
from qk_geometry.tracker import Tracker, capture, undisturbed

transformers = pytest.importorskip("transformers")
logging.getLogger("transformers").setLevel(logging.ERROR)
transformers.utils.logging.disable_progress_bar()

SEEDS = st.integers(0, 2**16)
FAMILIES = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
GROUPED = FAMILIES[2:]


def tiny(family, n_heads=4, n_kv=2, d_head=8, bias=False, seed=0, kernel="sdpa", **more):
    "A randomly initialised model of a family, every parameter shaken so that no bias is zero and no gain is one."
    torch.manual_seed(seed)
    if family == "gpt2": config = transformers.GPT2Config(vocab_size=50, n_embd=n_heads * d_head, n_layer=2, n_head=n_heads, n_positions=64, bos_token_id=0, eos_token_id=0, **more)
    else:
        shape = dict(vocab_size=50, hidden_size=n_heads * d_head, num_hidden_layers=2, num_attention_heads=n_heads, intermediate_size=32, max_position_embeddings=64, pad_token_id=0, bos_token_id=0, eos_token_id=0)
        if family == "gpt_neox": shape |= dict(attention_bias=bias)
        else: shape |= dict(num_key_value_heads=n_kv, head_dim=d_head) | ({} if family in ("mistral", "qwen2") else dict(attention_bias=bias))
        config = transformers.AutoConfig.for_model(family, **shape, **more)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager" if family == "gemma2" else kernel).eval()      # Gemma 2 has no other
    with torch.no_grad():
        for p in model.parameters(): p.add_(0.2 * torch.randn_like(p))
    return model


def of(model, **more):
    "`read_qk` of a live model, with its configuration as a checkpoint would state it."
    from qk_geometry.checkpoints import assemble
    from qk_geometry.storage import from_tensors
    traffic = Traffic()
    layout = more.pop("layout", None)
    return assemble(from_tensors(model.state_dict(), "memory", traffic), model.config.to_dict(), "memory", layout, traffic=traffic)


HEADS = st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (6, 2), (6, 3), (3, 3)])
quick = settings(max_examples=24, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)


@quick
@given(family=st.sampled_from(FAMILIES), heads=HEADS, bias=st.booleans(), kernel=st.sampled_from(["sdpa", "eager"]), seed=SEEDS)
def test_the_right_layout_is_proved_for_every_family_grouping_and_bias(family, heads, bias, kernel, seed):
    proof = prove(of(tiny(family, *heads, bias=bias, kernel=kernel, seed=seed)), tiny(family, *heads, bias=bias, kernel=kernel, seed=seed))
    assert proof.stage == "attended" and proof.n_layers == 2 and set(proof.errors) >= {"attended", "output"}
    assert ("normalised" in proof.errors) == (family in ("qwen3", "gemma3_text"))


def refused(qk, model, stage, **more):
    "The proof fails at the given stage and names the layout."
    with pytest.raises(ValueError, match=f"{stage}.*layout tried: {qk.layout.name}"): prove(qk, model, **more)


@quick
@given(heads=st.sampled_from([2, 3, 4]), seed=SEEDS, family=st.sampled_from(["gpt2", "gpt_neox"]))
def test_a_fused_layer_cut_the_other_way_is_refused(heads, seed, family):
    model, right = tiny(family, heads, bias=True, seed=seed), LAYOUTS[family]
    wrong = dataclasses.replace(right, name="cut the other way", split={"blocks": "heads", "heads": "blocks"}[right.split])
    assert of(model, layout=wrong)[0].W_Q.shape == of(model)[0].W_Q.shape       # no shape check can see it
    refused(of(model, layout=wrong), model, "attended")


@quick
@given(family=st.sampled_from(GROUPED), seed=SEEDS)
def test_a_square_projection_read_the_wrong_way_round_is_refused(family, seed):
    model = tiny(family, 4, 4, seed=seed)
    wrong = dataclasses.replace(of(model).layout, name="transposed", transposed=True)
    refused(of(model, layout=wrong), model, "projected")


@quick
@given(family=st.sampled_from(GROUPED), heads=st.sampled_from([(4, 2), (6, 2), (6, 3)]), seed=SEEDS)
def test_key_heads_dealt_out_in_turn_are_refused(family, heads, seed):
    model = tiny(family, *heads, seed=seed)
    refused(of(model), model, "output", group=lambda k, n: k.repeat(1, n // k.shape[1], 1, 1))      # h % n_kv in place of h // (n / n_kv)


@quick
@given(family=st.sampled_from(["gpt2", "gpt_neox", "llama", "qwen2", "qwen3", "gemma", "gemma3_text"]), which=st.sampled_from(["b_Q", "b_K"]), seed=SEEDS)
def test_a_forgotten_bias_is_refused(family, which, seed):
    model = tiny(family, bias=True, seed=seed)
    qk = of(model)
    forgetful = type("Forgetful", (type(qk),), {"__getitem__": lambda self, i: dataclasses.replace(type(qk).__getitem__(self, i), **{which: None})})
    refused(forgetful(**{f.name: getattr(qk, f.name) for f in dataclasses.fields(qk)}), model, "projected|attended")


@quick
@given(family=st.sampled_from(["qwen3", "gemma3_text"]), seed=SEEDS)
def test_a_gain_off_by_one_is_refused(family, seed):
    model = tiny(family, seed=seed)
    wrong = dataclasses.replace(of(model).layout, name="gain", norm_offset=1.0 - of(model).layout.norm_offset)
    refused(of(model, layout=wrong), model, "normalised")


@quick
@given(heads=st.sampled_from([(4, 2), (4, 4), (2, 1)]), seed=SEEDS)
def test_rows_in_the_order_of_llama_cpp_are_refused(heads, seed):
    model = tiny("llama", *heads, seed=seed)
    permuted = {name: cpp_order(w, heads[0] if "q_proj" in name else heads[1]) if "q_proj" in name or "k_proj" in name else w for name, w in model.state_dict().items()}
    refused(read_qk(permuted, layout="llama", n_heads=heads[0]), model, "projected", tokens=torch.randint(50, (2, 16)))


def cpp_order(w, n_heads):
    "Rows of a projection as llama.cpp stores them: the two of a rotated pair side by side."
    return w.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).reshape(w.shape)


def test_half_precision_models_pass_and_wrong_ones_do_not():
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        for family in ("gpt_neox", "qwen3"):
            model = tiny(family).to(dtype)
            prove(of(model), model)
    model = tiny("gpt_neox", 4).to(torch.bfloat16)
    refused(of(model, layout=dataclasses.replace(LAYOUTS["gpt_neox"], name="blocks", split="blocks")), model, "attended")


def test_rope_scaling_partial_rotation_softcaps_and_windows_are_part_of_the_proof():
    scaled = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    for model in (tiny("llama", rope_parameters=scaled), tiny("gpt_neox", rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
                  tiny("gemma2", kernel="eager", attn_logit_softcapping=2.0, query_pre_attn_scalar=5), tiny("mistral", sliding_window=4)):
        assert prove(of(model), model).errors["output"] < 1e-5


def test_a_compiled_model_is_proved_and_measured_as_written():
    for compile in (lambda m: torch.compile(m, backend="eager"), lambda m: m.compile(backend="eager") or m):
        model = compile(tiny("llama"))
        tokens = torch.randint(50, (3, 12), generator=torch.Generator().manual_seed(0))
        with torch.no_grad(): model(tokens), model(tokens)
        inner = getattr(model, "_orig_mod", model)
        assert prove(of(inner), model).stage == "attended"
        taps = layout_taps(inner, "llama", 4, 2)
        fresh = tiny("llama")
        assert all(torch.equal(a, b) for x, y in zip(capture(inner, tokens, taps), capture(fresh, tokens, layout_taps(fresh, "llama", 4, 2))) for a, b in zip(x, y))


class NanoGPT(nn.Module):
    "Fused attention by hand, in a container, as many teaching repositories have it."
    def __init__(self, d=32, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(50, d), "h": nn.ModuleList(_Block(d, bias) for _ in range(3))})
    def forward(self, tokens):
        x = self.transformer["wte"](tokens)
        for block in self.transformer["h"]: x = block(x)
        return x


class _Block(nn.Module):
    def __init__(self, d, bias):
        super().__init__()
        self.attn = _Attention(d, bias)
    def forward(self, x): return x + self.attn(x)


class _Attention(nn.Module):
    def __init__(self, d, bias):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d, bias=bias), nn.Linear(d, d)
    def forward(self, x):
        q, k, v = (split_heads(t, 4) for t in self.c_attn(x).chunk(3, -1))
        return self.c_proj(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


TOKENS = torch.randint(50, (4, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compiled", ["", "whole", "in place", "one block"])
def test_a_nanogpt_state_dict_is_read_proved_and_tracked_also_when_compiled(bias, compiled, tmp_path):
    model = plain = NanoGPT(bias=bias)
    if compiled == "whole": model = torch.compile(plain, backend="eager")
    if compiled == "in place": model.compile(backend="eager")
    if compiled == "one block": plain.transformer["h"][1] = torch.compile(plain.transformer["h"][1], backend="eager")
    with torch.no_grad(): model.eval()(TOKENS), model(TOKENS)                 # compiled code exists before any hook
    torch.save({"model": model.state_dict(), "model_args": {"n_head": 4, "n_layer": 3}, "iter_num": 7}, tmp_path / "ckpt.pt")
    qk = read_qk(tmp_path / "ckpt.pt")
    assert qk.layout.name == "nanogpt" and list(qk) == [0, 1, 2] and (qk[0].b_Q is not None) == bias
    assert prove(qk, model, TOKENS).stage == "attended"
    with pytest.raises(ValueError, match="layout tried: by head"): prove(read_qk(tmp_path / "ckpt.pt", layout=Layout("by head", "h.{}.attn.c_attn", "h.{}.attn.c_attn", "heads")), model, TOKENS)
    rows = Tracker(model, TOKENS, layout_taps(plain, "nanogpt", 4)).snapshot(0)
    fresh = NanoGPT(bias=bias)
    assert rows.equals(Tracker(fresh, TOKENS, layout_taps(fresh, "nanogpt", 4)).snapshot(0)) and (rows["status"] == "ok").all()


def test_our_own_checkpoints_are_read_from_the_trainers_file_and_from_a_state_dict(tmp_path):
    from qk_geometry.train import TrainConfig, train
    run = train(TrainConfig(n_layers=2, epochs=1, steps_per_epoch=2, warmup_steps=1, n_eval=4, n_probe=4), out=tmp_path, progress=False)
    for qk in (read_qk(tmp_path), read_qk(tmp_path / "checkpoint.safetensors"), read_qk(run.model.state_dict(), n_heads=2)):
        assert all(torch.equal(qk[tap.layer].W_Q, tap.W_Q.heads) and torch.equal(qk[tap.layer].W_K, tap.W_K.heads) for tap in run.model.taps())
        assert prove(qk, run.model, torch.randint(20, (2, 16))).errors.keys() == {"projected", "attended", "output"}
    assert read_qk(tmp_path).traffic.data == 0                                # nothing is read before it is asked for


# ---- storage

def save(model, folder, **more):
    model.save_pretrained(folder, **more)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_files_give_what_the_model_holds_and_only_q_and_k_are_read(family, tmp_path):
    model = tiny(family, bias=True)
    single, shards = save(model, tmp_path / "a"), save(model, tmp_path / "b", max_shard_size="20KB")
    assert len(list(shards.glob("*.safetensors"))) > 1
    for folder in (single, shards):
        qk, live = read_qk(folder), of(model)
        for layer in live:
            for name in ("W_Q", "W_K", "b_Q", "b_K", "q_norm", "k_norm"):
                a, b = getattr(qk[layer], name), getattr(live[layer], name)
                assert (a is None and b is None) or torch.equal(a, b), name
        limit = 1.5 if family == "gpt2" else 1.0                              # q and k are pieces of every row of a Conv1D
        assert qk.traffic.data <= limit * qk.traffic.wanted
    assert prove(read_qk(shards), model)


def test_a_remote_repository_costs_the_bytes_of_q_and_k(tmp_path, monkeypatch):
    import huggingface_hub.constants
    for revision in ("step1", "main"):
        for family in ("llama", "gpt_neox", "gpt2"): save(tiny(family, d_head=32, seed=len(revision)), tmp_path / "lab" / family / revision, **({"max_shard_size": "60KB"} if family == "llama" else {}))
    with serve(tmp_path) as (address, hub):
        redirect(monkeypatch, address, tmp_path / "cache")
        for family, limit in (("llama", 1.1), ("gpt_neox", 1.1), ("gpt2", 1.5)):
            hub.requests.clear(), hub.bytes.clear()
            qk, commit = read_qk(f"lab/{family}", revision="step1"), hub.find(f"lab/{family}", "step1")[0]
            here = read_qk(tmp_path / "lab" / family / "step1")
            assert qk.commit == commit and all(torch.equal(a.W_Q, b.W_Q) and torch.equal(a.W_K, b.W_K) for a, b in zip(qk.values(), here.values()))
            sent = sum(n for name, n in hub.bytes.items() if name.endswith(".safetensors"))
            assert sent == qk.traffic.data + qk.traffic.headers and qk.traffic.data <= limit * qk.traffic.wanted
            assert all(commit in r for r in hub.requests if "/resolve/" in r)               # a branch that moves cannot mix two models
        assert not torch.equal(read_qk("lab/llama")[0].W_Q, qk[0].W_Q)
        with pytest.raises(FileNotFoundError, match="no lab/llama at step2"): read_qk("lab/llama", revision="step2")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ConnectionError, match="did not answer for lab/llama"): read_qk("lab/llama")


def test_a_commit_that_resolves_to_another_is_refused(tmp_path, monkeypatch):
    asked = "c" * 40
    save(tiny("llama"), tmp_path / "lab" / "llama" / "main")
    with serve(tmp_path) as (address, hub):
        redirect(monkeypatch, address, tmp_path / "cache")
        given, find = hub.find("lab/llama", "main")[0], hub.find
        monkeypatch.setattr(hub, "find", lambda repo, revision: find(repo, "main" if revision == asked else revision))
        with pytest.raises(ValueError, match=f"commit {asked} was asked for, and {given} given"): read_qk("lab/llama", revision=asked)


def edit(path, change):
    "Change a json file."
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def faults():
    "Name -> (what to do to a sharded llama folder, what the refusal says)."
    def shard(folder, n): return sorted(folder.glob("model-*.safetensors"))[n]
    def other(weights): return next(f for f in set(weights.values()) if f != weights["model.layers.0.self_attn.q_proj.weight"])
    index, config = "model.safetensors.index.json", "config.json"
    return {
        "missing shard": (lambda f: shard(f, 0).unlink(), "lacks the shard model-00001"),
        "name in the index only": (lambda f: edit(f / index, lambda i: i["weight_map"].update({"model.layers.9.self_attn.q_proj.weight": shard(f, 0).name})), "stale: it puts model.layers.9"),
        "name in a file only": (lambda f: edit(f / index, lambda i: i["weight_map"].pop("model.layers.0.self_attn.q_proj.weight")), "stale.*model.layers.0.self_attn.q_proj"),
        "file that the index does not know": (lambda f: shutil.copy(shard(f, 0), f / "model-00099-of-00099.safetensors"), "does not name model-00099"),
        "cut off": (lambda f: [p.write_bytes(p.read_bytes()[:-4000]) for p in f.glob("model-*.safetensors")], "cut off"),
        "no header": (lambda f: [p.write_bytes(b"<html>not found</html>" * 9) for p in f.glob("model-*.safetensors")], "no safetensors header"),
        "quantised": (lambda f: edit(f / config, lambda c: c.update(quantization_config={"quant_method": "gptq"})), "quantised \\(gptq\\)"),
        "rope scaling": (lambda f: edit(f / config, lambda c: c.update(rope_scaling={"type": "spiral", "factor": 2})), "unknown type 'spiral'"),
        "nested rope parameters": (lambda f: edit(f / config, lambda c: c.update(rope_parameters={"full_attention": {"rope_type": "helix"}})), "unknown type 'helix'"),
        "model type": (lambda f: edit(f / config, lambda c: c.update(model_type="unheard")), "no layout knows model_type 'unheard'"),
        "heads": (lambda f: edit(f / config, lambda c: c.update(num_attention_heads=3)), "do not divide into heads|wide"),
        "key heads": (lambda f: edit(f / config, lambda c: c.update(num_key_value_heads=4)), "2 key heads, its configuration says 4"),
        "width of a head": (lambda f: edit(f / config, lambda c: c.update(head_dim=16)), "wide, its configuration says 16"),
        "layers": (lambda f: edit(f / config, lambda c: c.update(num_hidden_layers=5)), "2 layers with queries and keys, its configuration says 5"),
    }


@pytest.mark.parametrize("fault", faults())
def test_a_checkpoint_that_is_not_what_it_says_is_refused_by_name(fault, tmp_path):
    folder = save(tiny("llama"), tmp_path / "m", max_shard_size="20KB")
    list(read_qk(folder).values())
    damage, message = faults()[fault]
    damage(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught: list(read_qk(folder).values())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_numbers_that_are_no_weights_are_refused(dtype, tmp_path):
    state = {name: w.to(dtype) if "k_proj" in name else w for name, w in tiny("llama").state_dict().items()}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="query or key tensor as"): read_qk(tmp_path, layout="llama", n_heads=4)
    with pytest.raises(ValueError, match="query or key tensor as"): read_qk(state, layout="llama", n_heads=4)


def test_layers_are_known_by_number_and_never_by_order():
    state = {f"model.layers.{i}.self_attn.{p}_proj.weight": torch.full((8, 8), float(i)) for i in (10, 2, 0, 11, 1, 3, 4, 5, 6, 7, 8, 9) for p in "kq"}
    qk = read_qk(state, layout="llama", n_heads=2)
    assert [(i, qk[i].W_Q[0, 0, 0].item()) for i in qk] == [(i, float(i)) for i in range(12)]
    with pytest.raises(KeyError, match="no layer 12"): qk[12]
    with pytest.raises(ValueError, match="some projections have a bias"): read_qk({**state, "model.layers.7.self_attn.q_proj.bias": torch.zeros(8)}, layout="llama", n_heads=2)
    del state["model.layers.7.self_attn.k_proj.weight"]
    with pytest.raises(ValueError, match="layer 7 has no tensor layers.7.self_attn.k_proj.weight"): read_qk(state, layout="llama", n_heads=2)


def test_pickles_are_opened_without_running_code_and_mapped(tmp_path):
    model = tiny("gpt2")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert prove(read_qk(tmp_path), model)
    for bad in (lambda p: torch.save(nn.Linear(2, 2), p), lambda p: torch.save(model.state_dict(), p, _use_new_zipfile_serialization=False)):
        bad(tmp_path / "pytorch_model.bin")
        with pytest.raises(ValueError, match="pytorch_model.bin does not open with weights_only and mmap") as caught: read_qk(tmp_path)
        assert "\n" not in str(caught.value)


def test_a_local_revision_is_a_folder_and_never_ignored(tmp_path):
    for i in (0, 1): save(tiny("llama", seed=i), tmp_path / f"step{i}")
    assert not torch.equal(read_qk(tmp_path, "step0")[0].W_Q, read_qk(tmp_path, "step1")[0].W_Q)
    with pytest.raises(FileNotFoundError, match="no folder 'step2'"): read_qk(tmp_path, "step2")
    with pytest.raises(FileNotFoundError, match="no file, no folder"): read_qk(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="has no weights"): read_qk(tmp_path)


def test_our_reader_agrees_with_the_library(tmp_path):
    tensors = {"a": torch.randn(5, 3), "b": torch.randn(4).half(), "c": torch.randn(2, 3, 4).bfloat16()}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors", {"note": "kept"})
    read = lambda file, first, last: Path(file).read_bytes()[first:last]
    stored, metadata = open_safetensors(tmp_path / "x.safetensors", read, Traffic())
    assert metadata == {"note": "kept"} and all(torch.equal(stored[n].read([(0, len(x))]), x) for n, x in safetensors.torch.load_file(tmp_path / "x.safetensors").items())


def test_rope_types_are_those_of_transformers():
    from qk_geometry.checkpoints import ROPE_TYPES
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    assert set(ROPE_INIT_FUNCTIONS) <= ROPE_TYPES


def test_gguf_rows_come_back_in_the_order_of_the_model(tmp_path):
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    model = tiny("llama", 4, 2)
    config, w = model.config, gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    w.add_context_length(64), w.add_embedding_length(32), w.add_block_count(2), w.add_feed_forward_length(32), w.add_head_count(4), w.add_head_count_kv(2)
    w.add_layer_norm_rms_eps(config.rms_norm_eps), w.add_rope_freq_base(10000.0), w.add_vocab_size(50), w.add_rope_dimension_count(8)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"} | {f"model.layers.{i}.{a}": f"blk.{i}.{b}" for i in range(2) for a, b in (
        ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output"), ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"), ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"))}
    for name, x in model.state_dict().items():
        stem = name.removesuffix(".weight")
        heads = 4 if "q_proj" in name else 2 if "k_proj" in name else None
        w.add_tensor(f"{names[stem]}.weight", np.ascontiguousarray((cpp_order(x, heads) if heads else x).numpy()))
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
    qk = read_qk(tmp_path / "m.gguf")
    assert all(torch.equal(a.W_Q, b.W_Q) and torch.equal(a.W_K, b.W_K) for a, b in zip(qk.values(), of(model).values()))
    assert prove(qk, model).stage == "attended"


# ---- at a stage, and while the model runs

def test_stages_are_what_the_model_used():
    model = tiny("qwen3", 4, 2)
    taps = layout_taps(model, "qwen3", 4, 2)
    raw, normed, turned = capture(model, TOKENS, taps), at_stage("qwen3", "normalised")(model, TOKENS, taps), at_stage("qwen3", "attended")(model, TOKENS, taps)
    for (q, k), (q1, k1), (q2, k2) in zip(raw, normed, turned):
        assert q.shape == q1.shape == q2.shape == (4, 4, 20, 8) and k.shape == k1.shape == k2.shape == (4, 2, 20, 8)
        assert torch.allclose(q1.norm(dim=-1), q2.norm(dim=-1), rtol=1e-5) and not torch.allclose(q1, q2) and not torch.allclose(q, q1)
    with pytest.raises(ValueError, match="has no stage 'normalised'"): at_stage("llama", "normalised")(tiny("llama"), TOKENS, layout_taps(tiny("llama"), "llama", 4, 2))
    with pytest.raises(ValueError, match="none of normalised, attended"): at_stage("gpt2", "projected")
    with pytest.raises(ValueError, match="cannot be told apart"): at_stage("qwen3", "normalised")(model, TOKENS[:, :4], taps)


def test_projections_that_lie_in_no_attention_module_are_seen_too():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.h = nn.Embedding(50, 32), nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        def forward(self, tokens):
            x = self.wte(tokens)
            for c_attn in self.h:
                q, k, v = (split_heads(t, 4) for t in c_attn(x).chunk(3, -1))
                x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
            return x
    model, layout = Bare(), Layout("bare", "h.{}", "h.{}", "blocks")
    assert prove(read_qk(model.state_dict(), layout=layout, n_heads=4), model, TOKENS).n_layers == 2
    with pytest.raises(ValueError, match="layout tried: bare"): prove(read_qk(model.state_dict(), layout=dataclasses.replace(layout, split="heads"), n_heads=4), model, TOKENS)


def test_nothing_is_left_behind_also_after_a_failure():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as table
    for kernel in ("sdpa", "eager"):
        model, before = tiny("llama", kernel=kernel).train(), dict(table)
        for tokens in (TOKENS, TOKENS + 1000):
            try: measure_layers(of(model), model, tokens)
            except IndexError: assert tokens is not TOKENS
            assert dict(table) == before and model.training and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_dot_products_that_a_family_scales_otherwise_are_measured_as_used():
    model, twin = tiny("gemma2", query_pre_attn_scalar=32, attn_logit_softcapping=None), tiny("gemma2", query_pre_attn_scalar=8, attn_logit_softcapping=None)
    assert measure_layers(of(model), model, TOKENS)[0][0]["logit_std"].item() == pytest.approx(measure_layers(of(twin), twin, TOKENS)[0][0]["logit_std"].item() / 2, rel=1e-4)
    with pytest.raises(ValueError, match="attends to 8 positions"): measure_layers(of(tiny("mistral", sliding_window=8)), tiny("mistral", sliding_window=8), TOKENS)


def test_memory_stays_flat_over_a_hundred_probes():
    import psutil
    model = tiny("llama")
    qk, sizes = of(model), []
    for i in range(110):
        measure_layers(qk, model, TOKENS, n_boot=2)
        if i >= 10: sizes.append(psutil.Process().memory_info().rss)
    assert max(sizes[50:]) - max(sizes[:50]) < 4 * 2**20, "grew by more than 4 MiB"
