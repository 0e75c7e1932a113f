"A series is probed from a folder and through a hub alike; what goes wrong with one revision stays with it."
import gc
import shutil
import tempfile
import weakref
from pathlib import Path

import pytest
from hub import redirect, serve

from qk_geometry import probes
from qk_geometry.columns import METRICS, check_rows, level
from qk_geometry.data import CharCorpus
from qk_geometry.probes import ProbeConfig, probe_series
from qk_geometry.series import SeriesConfig, train_series

TINY = dict(n_ctx=16, n_probe=4, n_eval=4, n_boot=5, tokens_per_step=64)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    "A Llama with shared key heads, revisions at steps 0, 1, 2, 3."
    folder = tmp_path_factory.mktemp("trained") / "hub/own/tiny"
    config = SeriesConfig(family="llama", n_kv_heads=2, n_heads=4, d_model=16, n_ctx=16, n_layers=2, batch_size=4, epochs=1, steps_per_epoch=3, n_eval=4)
    train_series(config, folder, CharCorpus.load("builtin", 20_000), progress=False)
    (folder / "checkpoint.safetensors").unlink()
    return folder


@pytest.fixture(scope="module")
def measured(trained): return probe_series(ProbeConfig(str(trained), **TINY), progress=False)


@pytest.fixture
def series(trained, tmp_path): return Path(shutil.copytree(trained, tmp_path / "hub/own/tiny"))


@pytest.fixture
def hub(series, tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    with serve(tmp_path / "hub") as (url, server):
        redirect(monkeypatch, url, tmp_path / "cache")
        yield server


def same(a, b): return a.drop(columns="cell").reset_index(drop=True).equals(b.drop(columns="cell").reset_index(drop=True))


def test_rows_are_those_of_every_metric_that_needs_no_training(measured):
    rows = check_rows(measured.rows)
    assert (measured.revisions["status"] == "ok").all() and (rows["status"] == "ok").all()
    assert rows.groupby("step").size().tolist() == [1 + 2 * (1 + 4)] * 4 and rows["tokens"].unique().tolist() == [0, 64, 128, 192]
    training = {"train_loss", "learning_rate", "grad_norm", *(m for m in METRICS if m.endswith(("_grad_norm", "_update_ratio")))}
    levels = level(rows)
    for name, metric in METRICS.items():
        there = rows.loc[levels.isin(metric.levels.split()), name].notna()
        if name not in training and not name.startswith("val_"): assert there[levels != "model"].all(), name


def test_through_the_hub_the_rows_are_the_same_and_nothing_stays(measured, hub, tmp_path):
    there = probe_series(ProbeConfig("own/tiny", **TINY), progress=False)
    assert same(there.rows, measured.rows)
    assert there.revisions["identity"].tolist() == [hub.find("own/tiny", f"step{s}")[0] for s in range(4)]
    assert not list((tmp_path / "scratch").iterdir())
    assert not [p for p in (tmp_path / "cache").rglob("*.safetensors")]


def test_weights_alone_fetch_only_queries_and_keys(measured, hub, series):
    alone = probe_series(ProbeConfig("own/tiny", weights_only=True, tokens_per_step=64), progress=False)
    names = [n for n in METRICS if n.startswith(("W_Q", "W_K", "qk_", "weight_cosine", "column", "row", "gram", "principal")) and alone.rows[n].notna().any()]
    assert len(names) > 15
    both = [p.rows[level(p.rows) != "model"].reset_index(drop=True)[names] for p in (alone, measured)]
    assert ((both[0] - both[1]).abs() <= 1e-5 * both[1].abs() + 1e-5).where(both[1].notna(), True).all(axis=None)
    size = (series / "step0/model.safetensors").stat().st_size
    assert hub.bytes["model.safetensors"] < 0.6 * 2 * 4 * size              # audit and probe, four revisions


def test_a_bad_revision_is_a_row_and_the_others_are_measured(measured, series):
    (series / "step1/model.safetensors").write_bytes(b"spoiled")
    (series / "step2/tokenizer.json").unlink()
    (series / "step2/tokenizer_config.json").unlink()
    found = probe_series(ProbeConfig(str(series), **TINY), progress=False)
    assert found.revisions["status"].eq("ok").tolist() == [True, False, False, True]
    assert "tokenizer" in found.revisions["status"][2] and found.revisions["tainted"].tolist() == [False, True, False, False]
    assert found.rows[found.rows["step"] == 2]["status"].tolist() == [found.revisions["status"][2]]
    for step in (0, 3): assert same(found.rows[found.rows["step"] == step], measured.rows[measured.rows["step"] == step])


def test_a_model_that_does_not_compute_what_was_read_is_refused(series, monkeypatch):
    read = probes.read_qk
    monkeypatch.setattr(probes, "read_qk", lambda *args: read(series / "step0"))
    found = probe_series(ProbeConfig(str(series), **TINY), progress=False)
    assert found.revisions["status"].eq("ok").tolist() == [True, False, False, False]
    assert found.revisions["status"][1:].str.contains("layout tried: llama").all()


def test_a_series_of_which_nothing_can_be_read_is_an_error(series):
    for place in series.iterdir(): (place / "model.safetensors").write_bytes(b"spoiled")
    with pytest.raises(ValueError, match="no revision of .* can be measured; step0"): probe_series(ProbeConfig(str(series), **TINY), progress=False)


def test_the_budget_is_kept_before_a_byte_is_fetched(hub, series):
    (series / "step2/model.safetensors").write_bytes((series / "step2/model.safetensors").read_bytes() + bytes(100_000))
    limit = (series / "step1/model.safetensors").stat().st_size + 50_000
    with pytest.raises(ValueError, match="disk budget"): probe_series(ProbeConfig("own/tiny", disk_gb=1e-6, **TINY), progress=False)
    found = probe_series(ProbeConfig("own/tiny", disk_gb=limit / 1e9, **TINY), progress=False)
    assert found.revisions["status"].str.contains("disk budget").tolist() == [False, False, True, False]


def test_an_interrupted_probe_goes_on_where_it_was(measured, series, tmp_path, monkeypatch):
    config, done, measure = ProbeConfig(str(series), **TINY), [], probes.measure_revision
    def interrupted(config, source, revision, text):
        if revision.step == 2 and len(done) < 3: raise KeyboardInterrupt
        done.append(revision.name)
        return measure(config, source, revision, text)
    monkeypatch.setattr(probes, "measure_revision", interrupted)
    with pytest.raises(KeyboardInterrupt): probe_series(config, tmp_path / "out", progress=False)
    assert done == ["step0", "step1"]
    done.append("")
    assert same(probe_series(config, tmp_path / "out", progress=False).rows, measured.rows) and done == ["step0", "step1", "", "step2", "step3"]
    shutil.copy(series / "step3/model.safetensors", series / "step1/model.safetensors")      # another model under the same name
    again = probe_series(config, tmp_path / "out", progress=False)
    assert done[-1] == "step1" and len(done) == 6 and again.revisions["findings"].tolist() == ["", "final_early", "", ""]


def test_one_model_is_alive_at_a_time(series, monkeypatch):
    load, models = probes.load_model, []
    def counted(*args):
        gc.collect()
        assert not [m for m in models if m() is not None]
        model, tokenizer = load(*args)
        models.append(weakref.ref(model))
        return model, tokenizer
    monkeypatch.setattr(probes, "load_model", counted)
    assert (probe_series(ProbeConfig(str(series), **TINY), progress=False).revisions["status"] == "ok").all() and len(models) == 4


@pytest.mark.parametrize("bad, words", [(dict(stage="rotated"), "stage"), (dict(n_probe=0), "n_probe"), (dict(disk_gb=float("nan")), "disk_gb"), (dict(repo=""), "repo")])
def test_a_bad_value_is_named(bad, words):
    with pytest.raises(ValueError, match=words): ProbeConfig(**({"repo": "x"} | bad)).validate()


def test_a_source_that_is_none_is_named():
    with pytest.raises(FileNotFoundError, match="no series 'nowhere'"): probe_series(ProbeConfig("nowhere"), progress=False)
