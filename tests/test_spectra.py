"""Spectra against full float64 decompositions, on every kind of matrix that has broken such code before."""
import math
import multiprocessing
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qk_geometry.metrics import principal_angles
from qk_geometry.spectra import (Covariance, SequenceMoments, corrected_participation_ratio, covariance_participation_ratio, effective_rank, eigenvalues,
                                 gram, logit_singular_values, one_thread_each, participation_ratio, product_singular_values, qk_singular_values, singular_values, stable_rank)

KINDS = ("random", "low rank", "repeated", "tail", "zero", "one row", "large", "small")
TALL = tuple(kind for kind in KINDS if kind != "one row")


def matrix(kind, rows, columns, seed, dtype=torch.float64):
    "A matrix of one kind; `tail` has singular values from 1 down to 1e-12."
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    if kind == "low rank": a = draw(rows, 2) @ draw(2, columns)
    elif kind == "repeated": a = torch.linalg.qr(draw(max(rows, columns), max(rows, columns))).Q[:rows, :columns] * 3
    elif kind == "tail":
        n = min(rows, columns)
        a = torch.linalg.qr(draw(rows, n)).Q * torch.logspace(0, -12, n, dtype=torch.float64) @ torch.linalg.qr(draw(columns, n)).Q.T
    elif kind == "zero": a = torch.zeros(rows, columns)
    elif kind == "one row": a = draw(1, columns)
    else: a = draw(rows, columns) * {"random": 1.0, "large": 1e8, "small": 1e-8}[kind]
    return a.to(dtype)


def close(got, expected, relative=1e-8):
    "Every value within `relative` of the largest true one."
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= relative * expected.max() + 1e-300


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(KINDS), st.sampled_from(KINDS), st.integers(1, 60), st.integers(1, 60), st.integers(1, 12), st.integers(0, 99),
       st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_product_spectrum_equals_the_full_decomposition(kind_a, kind_b, n, m, d, seed, dtype):
    a, b = matrix(kind_a, n, d, seed, dtype), matrix(kind_b, m, d, seed + 100, dtype)
    full = torch.linalg.svdvals(a.double() @ b.double().mT)
    close(product_singular_values(a, b), full[: min(len(a), len(b), d)])
    assert full[min(len(a), len(b), d):].sum() <= 1e-8 * full.max() + 1e-300


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 60), st.integers(1, 60), st.integers(0, 99), st.sampled_from([torch.float64, torch.bfloat16]))
def test_singular_values_equal_the_full_decomposition(kind, n, m, seed, dtype):
    a = matrix(kind, n, m, seed, dtype)
    close(singular_values(a), torch.linalg.svdvals(a.double()))


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(TALL), st.sampled_from(TALL), st.integers(1, 60), st.integers(1, 12), st.integers(0, 99))
def test_known_gram_matrices_change_nothing(kind_a, kind_b, n, d, seed):
    a, b = (torch.stack([matrix(kind, n, d, seed + i), matrix("random", n, d, seed + i + 1)]) for i, kind in ((0, kind_a), (100, kind_b)))
    expected, calls = product_singular_values(a, b), []
    def later(x): return lambda: calls.append(1) or x                       # the matrix itself, only when digits need it
    got = product_singular_values(later(a), later(b), gram_a=gram(a), gram_b=gram(b))
    close(got[..., :expected.shape[-1]], expected)
    assert got[..., expected.shape[-1]:].abs().sum() <= 1e-8 * expected.max()
    if kind_a == kind_b == "random" and n >= 4 * d: assert not calls        # nobody asks for matrices that are far from singular
    close(singular_values(a, known=gram(a)), singular_values(a))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(TALL), st.integers(3, 60), st.integers(1, 12), st.integers(0, 99))
def test_principal_angles_are_those_of_orthonormal_bases(kind, n, d, seed):
    W_Q, W_K = matrix("random", n, d, seed), matrix(kind, n, d, seed + 1)
    cosines = torch.linalg.svdvals(torch.linalg.qr(W_Q).Q.mT @ torch.linalg.qr(W_K).Q).clamp(max=1.0)
    expected = torch.rad2deg(cosines.acos())
    for known in ({}, {"gram_Q": gram(W_Q), "gram_K": gram(W_K)}):
        got = principal_angles(W_Q, W_K, **known)
        if kind in ("random", "repeated", "large", "small"): assert (got - expected).abs().max() < 1e-4
        assert got.shape == (min(n, d),) and ((got >= 0) & (got <= 90 + 1e-9)).all()


def test_moments_lose_no_digits_far_from_zero():
    x = torch.randn(6, 40, 5, dtype=torch.float64)
    far = SequenceMoments.of((x + 1e3).float())
    expected = torch.cov((x + 1e3).float().double().flatten(0, 1).T)
    assert torch.allclose(far.total.cov, expected, rtol=1e-9)
    assert torch.allclose(far.raw_seconds, ((x + 1e3).float().double().mT @ (x + 1e3).float().double()), rtol=1e-12)
    bfloat = SequenceMoments.of((x + 100).bfloat16())                       # its mean is coarse; the moments are not
    assert torch.allclose(bfloat.total.cov, torch.cov((x + 100).bfloat16().double().flatten(0, 1).T), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("lead", [(), (1,), (1, 1), (3,), (2, 3)])
def test_leading_dimensions(lead):
    W_Q, W_K = torch.randn(*lead, 4, 32, 8), torch.randn(*lead, 2, 32, 8)
    assert qk_singular_values(W_Q, W_K).shape == (*lead, 4, 8)
    q, k = torch.randn(*lead, 4, 20, 8), torch.randn(*lead, 2, 20, 8)
    spectrum = logit_singular_values(q, k)
    assert spectrum.shape == (*lead, 4, 8)
    head3 = (q[..., 3, :, :] @ k[..., 1, :, :].mT).double() / math.sqrt(8)              # query head 3 of 4 uses key head 1 of 2
    assert torch.allclose(spectrum[..., 3, :], torch.linalg.svdvals(head3)[..., :8], rtol=1e-3, atol=1e-4)


def test_one_bad_matrix_harms_no_other():
    a, b = torch.randn(5, 40, 6), torch.randn(5, 40, 6)
    expected = product_singular_values(a, b)
    a[1, 3, 2], b[4, 0, 0] = math.nan, math.inf
    got = product_singular_values(a, b, nan_ok=True)
    assert got.isnan().all(-1).tolist() == [False, True, False, False, True]
    assert torch.equal(got[[0, 2, 3]], expected[[0, 2, 3]])
    for f in (lambda: product_singular_values(a, b), lambda: singular_values(a), lambda: eigenvalues(a[:, :6]), lambda: qk_singular_values(a, a)):
        with pytest.raises(ValueError, match="non-finite"): f()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
def test_functionals_stay_within_their_range(values):
    x = torch.tensor(values, dtype=torch.float64)
    for f in (participation_ratio, effective_rank, stable_rank):
        value = f(x).item()
        assert math.isnan(value) if x.sum() == 0 else 1 - 1e-9 <= value <= len(values) + 1e-9


@pytest.mark.parametrize("d", [1, 2, 64])
def test_closed_forms(d):
    flat, single = torch.full((d,), 0.3), torch.eye(d)[0]
    for f in (participation_ratio, effective_rank, stable_rank):
        assert abs(f(flat) - d) < 1e-9 and abs(f(single) - 1) < 1e-9
        assert abs(f(torch.tensor([3.0, 1.0])) - {participation_ratio: 1.6, stable_rank: 10 / 9}.get(f, math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25)))) < 1e-7


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.floats(-1e4, 1e4), st.integers(0, 99))
def test_covariance_does_not_depend_on_how_it_was_fed(sizes, offset, seed):
    x = torch.randn(sum(sizes), 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + offset
    streamed, merged = Covariance(), Covariance()
    for part in x.split(sizes):
        streamed.update(part)
        merged.merge(Covariance().update(part))
    for c in (streamed, merged):
        assert c.n == len(x) and torch.allclose(c.mean, x.mean(0))
        if len(x) > 1: assert torch.allclose(c.cov, torch.cov(x.T), rtol=1e-9, atol=1e-10)
        else: assert c.cov.isnan().all()


def test_plug_in_is_biased_and_the_correction_is_not():
    covs = Covariance().update(torch.randn(60, 256, 64, generator=torch.Generator().manual_seed(0))).cov
    assert abs(covariance_participation_ratio(covs).mean() - 51.2) < 0.5
    assert abs(corrected_participation_ratio(covs, 256).mean() - 64) < 0.5
    assert corrected_participation_ratio(torch.eye(3), 2).isnan()


@pytest.fixture
def two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def test_threads_share_heads_and_change_nothing(two_threads):
    W_Q, W_K = torch.randn(5, 512, 64), torch.randn(5, 512, 64)
    W_K[3, :, 1] = W_K[3, :, 0]                                             # one head goes the long way
    shared = qk_singular_values(W_Q, W_K)
    torch.set_num_threads(1)
    assert torch.equal(shared, qk_singular_values(W_Q, W_K))
    torch.set_num_threads(2)
    W_K[4, 0, 0] = math.nan
    with pytest.raises(ValueError, match=f"right factor holds 1 non-finite values of {W_K.numel()}"): qk_singular_values(W_Q, W_K)
    assert qk_singular_values(W_Q, W_K, nan_ok=True).isnan().any(-1).tolist() == [False] * 4 + [True]


def test_an_error_of_any_thread_is_raised(two_threads):
    def fail(i):
        if i == 3: raise KeyError(i)
        return i
    with pytest.raises(KeyError): one_thread_each(fail, range(6))
    assert torch.get_num_threads() == 2 and one_thread_each(fail, [0, 1, 2]) == [0, 1, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_finds_threads_of_its_own(two_threads):
    one_thread_each(abs, range(4))                                          # the parent's threads exist
    child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(one_thread_each(abs, [-1, -2, -3]) != [1, 2, 3]))
    child.start()
    child.join(30)
    assert child.exitcode == 0
