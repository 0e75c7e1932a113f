"""Text from files, folders and the hub; and files that are written whole or not at all."""
import errno
import gzip
import hashlib
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from qk_geometry import data
from qk_geometry.data import CharCorpus, batch, windows, write_atomic

REAL = os.environ.get("QK_DATA", "")  # before the fixture hides it
PROSE = "the quick brown fox jumps over the lazy dog. " * 200


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QK_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("QK_DATA", raising=False)


def folder(path, **files):
    path.mkdir(parents=True)
    for name, text in files.items():
        raw = text.encode()
        (path / name.replace("__", ".")).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    return path


def decoded(corpus, split): return "".join(corpus.chars[i] for i in corpus.splits[split])


def test_folder_with_parts_and_gzip_reads_in_order(tmp_path):
    where = folder(tmp_path / "wiki", train_01__txt__gz=PROSE[500:], train_00__txt__gz=PROSE[:500], valid__tokens=PROSE[:900], test__txt=PROSE[:300])
    corpus = CharCorpus.load(str(where))
    assert decoded(corpus, "train") == PROSE and decoded(corpus, "valid") == PROSE[:900] and len(corpus.splits["test"]) == 300
    short = CharCorpus.load(str(where), n_chars=700)                       # the limit crosses the edge of the first part
    assert decoded(short, "train") == PROSE[:700] and "first 700" in short.label and short.sha256 != corpus.sha256
    assert isinstance(corpus.splits["train"], np.memmap) and corpus.splits["train"].dtype == np.uint16


def test_one_file_is_split_without_overlap(tmp_path):
    (tmp_path / "book.txt").write_text("".join(chr(97 + i % 26) for i in range(10_000)) , encoding="utf-8")
    corpus = CharCorpus.load(str(tmp_path / "book.txt"))
    assert decoded(corpus, "train") + decoded(corpus, "valid") == (tmp_path / "book.txt").read_text()
    x, y = windows(corpus, 50, 32)
    assert len(x) == 31 and (x[:, 1:] == y[:, :-1]).all()                  # 1000 characters hold 31 windows of 32


def test_line_ends_and_hash_are_those_of_the_file(tmp_path):
    raw = (PROSE + "\r\nend\r\n").encode()
    where = folder(tmp_path / "c", train__txt="", valid__txt=PROSE)
    (where / "train.txt").write_bytes(raw)
    corpus = CharCorpus.load(str(where))
    assert decoded(corpus, "train").encode() == raw and corpus.sha256 == hashlib.sha256(raw + PROSE.encode()).hexdigest()


def test_unknown_characters_are_counted_and_bounded(tmp_path):
    where = folder(tmp_path / "c", train__txt=PROSE, valid__txt=PROSE[:995] + "éàüßø")
    corpus = CharCorpus.load(str(where))
    assert corpus.unknown["valid"] == 0.005 and corpus.chars[0] == data.UNKNOWN
    with pytest.raises(ValueError, match="0.5% of the validation characters.*ßàéøü"): CharCorpus.load(str(where), max_unknown=0.001)
    rare = CharCorpus.load(str(where), min_count=300, max_unknown=1.0)
    assert 0 < rare.unknown["train"] and "q" not in rare.chars              # 200 times in the text


def test_batches_depend_on_seed_and_step_alone(tmp_path):
    (tmp_path / "book.txt").write_text(PROSE)
    corpus = CharCorpus.load(str(tmp_path / "book.txt"))
    first = batch(corpus, 5, 8, 16, seed=1)[0]
    batch(corpus, 9, 8, 16, seed=2)
    assert (batch(corpus, 5, 8, 16, seed=1)[0] == first).all()
    assert (batch(corpus, 6, 8, 16, seed=1)[0] != first).any() and (batch(corpus, 5, 8, 16, seed=2)[0] != first).any()
    with pytest.raises(ValueError, match="n_ctx = 900 needs 901 characters; the valid split of book has 900"): batch(corpus, 0, 1, 900, 1, "valid")


def test_names_below_qk_data(tmp_path, monkeypatch):
    folder(tmp_path / "texts" / "mine", train__txt=PROSE, valid__txt=PROSE)
    for root in ("texts", "texts/mine"):
        monkeypatch.setenv("QK_DATA", str(tmp_path / root))
        assert CharCorpus.load("mine").name == "mine"
    with pytest.raises(FileNotFoundError, match="no corpus 'yours'"): CharCorpus.load("yours")


def test_wikitext_is_fetched_once_at_its_pinned_revision(monkeypatch):
    datasets = pytest.importorskip("datasets")
    calls = []
    def stand_in(**kwargs):
        calls.append(kwargs)
        lines = [" \n", " = Title = \n", " Some prose , tokenised . \n"] * 40
        return {"train": {"text": lines}, "validation": {"text": lines[:30]}, "test": {"text": lines[:9]}}
    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    first = CharCorpus.load("wikitext-103")
    def no_network(**kwargs): raise ConnectionError("offline")
    monkeypatch.setattr(datasets, "load_dataset", no_network)
    assert CharCorpus.load("wikitext-103").sha256 == first.sha256           # prepared once, then without a network
    assert len(calls) == 1 and calls[0]["path"] == "Salesforce/wikitext" and len(calls[0]["revision"]) == 40
    sums = (data.cache_folder() / "wikitext-103/SHA256SUMS").read_text().splitlines()
    for line in sums:
        digest, name = line.split()
        assert hashlib.sha256((data.cache_folder() / "wikitext-103" / name).read_bytes()).hexdigest() == digest


def test_without_a_network_the_hub_gives_one_clear_line(monkeypatch):
    datasets = pytest.importorskip("datasets")
    def no_network(**kwargs): raise ConnectionError("Name or service not known\nmany\nlines")
    monkeypatch.setattr(datasets, "load_dataset", no_network)
    with pytest.raises(ConnectionError, match="set QK_DATA") as error: CharCorpus.load("wikitext-103")
    assert "\n" not in str(error.value) and not (data.cache_folder() / "wikitext-103").exists()


def test_a_disk_that_fills_up_leaves_the_old_file_and_no_other(tmp_path):
    target = tmp_path / "rows.bin"
    write_atomic(target, b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))            # the system refuses to write more than 4 kB
    try:
        with pytest.raises(OSError, match="cannot write.*rows.bin"): write_atomic(target, b"x" * 100_000)
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert target.read_bytes() == b"old" and os.listdir(tmp_path) == ["rows.bin"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "occupied").write_text("a file")
    with pytest.raises(OSError, match="occupied") as error: write_atomic(tmp_path / "occupied" / "rows.parquet", b"x")
    assert error.value.errno in (errno.ENOTDIR, errno.EEXIST)


def test_the_real_text_when_it_is_there():
    place = next((p for p in (Path(REAL), Path(REAL, "wikitext-103")) if REAL and p.name == "wikitext-103" and p.is_dir()), None)
    if place is None: pytest.skip("needs QK_DATA: a folder wikitext-103 with the real text, or the folder above it")
    corpus = CharCorpus.load(str(place), n_chars=2_878_542, min_count=10)
    assert len(corpus.splits["train"]) == 2_878_542 and len(corpus.chars) == 119 and corpus.unknown["valid"] < 2e-4
