"Every known fault of a series of checkpoints is found by its name, in folders and through a hub, and a clean series passes."
import json
import shutil

import pytest
import torch
from hub import redirect, serve
from safetensors.torch import save_file

from qk_geometry.audit import FAULTS, audit_series, step_of
from qk_geometry.cli import main

STEPS = (0, 1, 2, 4, 8, 16, 32)
LAYERS = 4


def revision(folder, weights):
    "One revision in two shards with an index, two layers in each, as a Llama is stored."
    folder.mkdir(parents=True)
    names = {f"model.layers.{i}.self_attn.{p}_proj.weight": f"model-0000{1 + i // 2}-of-00002.safetensors" for i in range(LAYERS) for p in "qk"}
    for file in set(names.values()): save_file({n: weights[n].contiguous() for n, f in names.items() if f == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 16}))
    return folder


def walk(seed, steps=STEPS):
    "Weights along one run: independent steps from one start."
    g = torch.Generator().manual_seed(seed)
    w = {f"model.layers.{i}.self_attn.{p}_proj.weight": torch.randn(16, 16, generator=g) for i in range(LAYERS) for p in "qk"}
    for step in steps:
        yield step, w
        w = {name: x + 0.2 * torch.randn(16, 16, generator=g) for name, x in w.items()}


@pytest.fixture
def series(tmp_path):
    folder = tmp_path / "hub/own/tiny"
    for step, w in walk(0): revision(folder / f"step{step}", w)
    return folder


def shard(folder, i=1): return folder / f"model-0000{i}-of-00002.safetensors"


def copy(series, a, b, shards=(1, 2)):
    for i in shards: shutil.copy(shard(series / a, i), shard(series / b, i))


def resave(series, step, seed):
    "Weights of another run at a step."
    weights = dict(walk(seed))[int(step.removeprefix("step"))]
    shutil.rmtree(series / step)
    revision(series / step, weights)


def add_main(series, step): shutil.copytree(series / step, series / "main")


PLANTED = {  # what is done -> what must be found, and nothing else
    "final_early": (lambda s: copy(s, "step32", "step2"), {("step2", "final_early")}, False),
    "duplicate": (lambda s: copy(s, "step0", "step1"), {("step0", "duplicate"), ("step1", "duplicate")}, False),
    "mixed_shards": (lambda s: copy(s, "step16", "step4", [1]), {("step4", "mixed_shards"), ("step16", "mixed_shards")}, False),
    "missing shard": (lambda s: shard(s / "step8", 2).unlink(), {("step8", "missing_weights")}, False),
    "no weights": (lambda s: [shard(s / "step8", i).unlink() for i in (1, 2)], {("step8", "missing_weights")}, False),
    "main last as text": (lambda s: add_main(s, "step8"), {("main", "text_order")}, False),
    "main in between": (lambda s: add_main(s, "step4"), {("main", "main_not_last")}, False),
    "not_continued": (lambda s: resave(s, "step0", 1), {("step0", "not_continued")}, True),
    "out_of_place": (lambda s: resave(s, "step4", 1), {("step4", "out_of_place")}, True),
    "unreadable": (lambda s: [shard(s / "step4", i).write_bytes(b"\x08" + bytes(7) + b"not json") for i in (1, 2)], {("step4", "unreadable")}, True),
    "not finite": (lambda s: (shutil.rmtree(s / "step4"), revision(s / "step4", {n: x / 0 for n, x in dict(walk(0))[4].items()})), {("step4", "unreadable")}, True),
}


def found(audit): return set(audit.findings[["revision", "kind"]].itertuples(index=False, name=None))


def test_a_clean_series_passes_with_and_without_weights(series):
    add_main(series, "step32")
    for weights in (False, True):
        audit = audit_series(series, weights=weights, progress=False)
        assert audit.clean and not audit.revisions["tainted"].any()
        assert audit.revisions["step"].dropna().tolist() == list(STEPS)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_by_its_name_and_taints(series, name):
    plant, expected, needs_weights = PLANTED[name]
    plant(series)
    if needs_weights and name not in ("unreadable",): assert audit_series(series, progress=False).clean
    audit = audit_series(series, weights=needs_weights, progress=False)
    assert found(audit) == expected
    tainted = {r for r, kind in expected if FAULTS[kind][0]}
    assert set(audit.revisions.loc[audit.revisions["tainted"], "revision"]) == tainted


def test_equal_queries_and_keys_in_other_files_are_duplicates(series):
    weights = dict(walk(0))[2]
    shutil.rmtree(series / "step4")
    revision(series / "step4", weights)
    for i in (1, 2):                                                        # the same tensors, other bytes
        path = shard(series / "step4", i)
        tensors = {n: weights[n].contiguous() for n in weights if int(n.split(".")[2]) // 2 + 1 == i}
        save_file(tensors, path, {"note": "saved again"})
    assert audit_series(series, progress=False).clean
    assert found(audit_series(series, weights=True, progress=False)) == {("step2", "duplicate"), ("step4", "duplicate")}


def test_revisions_given_in_the_order_of_text(series):
    names = sorted(p.name for p in series.iterdir())
    assert names != sorted(names, key=step_of)
    audit = audit_series(series, names, progress=False)
    assert found(audit) == {("", "text_order")} and audit.revisions["step"].tolist() == list(STEPS)
    assert audit_series(series, sorted(names, key=step_of), progress=False).clean


def test_a_revision_that_is_not_there_is_a_finding_and_no_stop(series):
    assert found(audit_series(series, ["step0", "step1", "step3"], progress=False)) == {("step3", "missing_revision")}


@pytest.fixture
def hub(series, tmp_path, monkeypatch):
    with serve(tmp_path / "hub") as (url, server):
        redirect(monkeypatch, url, tmp_path / "cache")
        yield server


def test_the_hub_is_audited_without_fetching_weights(series, hub):
    assert audit_series("own/tiny", progress=False).clean
    copy(series, "step32", "step2")
    assert found(audit_series("own/tiny", progress=False)) == {("step2", "final_early")}
    assert not [r for r in hub.requests if "/resolve/" in r]


def test_fingerprints_through_the_hub_read_only_queries_and_keys(series, hub):
    resave(series, "step0", 1)
    audit = audit_series("own/tiny", weights=True, progress=False)
    assert found(audit) == {("step0", "not_continued")} and audit.revisions["change"].notna().sum() == len(STEPS) - 1
    assert set(audit.revisions["commit"].dropna()) == {hub.find("own/tiny", f"step{s}")[0] for s in STEPS}


def test_a_commit_that_is_not_the_one_asked_for(series, hub, monkeypatch):
    commit = hub.find("own/tiny", "step4")[0]
    find = hub.find
    monkeypatch.setattr(hub, "find", lambda repo, revision: find(repo, "main" if revision == commit else revision))      # the pin is ignored
    assert found(audit_series("own/tiny", [commit], progress=False)) == {(commit, "commit")}


def test_a_source_that_cannot_be_listed(series, hub, tmp_path):
    for source, error in (("own/none", FileNotFoundError), ("no series", FileNotFoundError), (str(tmp_path), FileNotFoundError)):
        with pytest.raises(error): audit_series(source, progress=False)


@pytest.mark.parametrize("plant, code", [(lambda s: None, 0), (lambda s: copy(s, "step32", "step2"), 1)])
def test_the_command_says_what_it_found(series, tmp_path, capsys, plant, code):
    plant(series)
    with pytest.raises(SystemExit) as exit: main(["audit", str(series), "--out", str(tmp_path / "report")])
    said = capsys.readouterr()
    assert exit.value.code == code and ("final_early" in said.out) == bool(code)
    assert (tmp_path / "report/revisions.csv").is_file() and (tmp_path / "report/findings.csv").is_file()
