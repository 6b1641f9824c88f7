"""The choice of a token on the device, run by the emulator, against `reference.sample` and exact distributions."""

import itertools
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm.backends.cuda.emulator import Emulator
from minillm.backends.cuda.kernels import Kernels
from minillm.backends.cuda.sampling import MOST_TOKENS, Draws, Workspace, argmax
from minillm.backends.cuda.sampling import sample as sample_on_device
from minillm.errors import DeviceError
from minillm.reference.philox import philox4x32, uniform
from minillm.reference.sampling import sample
from tests.comparing import UNIFORM
from tests.reference.chi_square import p_value
from tests.reference.test_sampling import SMALL, exact_distribution, shapes_of_logits

from .launchers import exhaustive

# Random numbers


@pytest.fixture
def philox(emulator: Emulator) -> Any:
    """A module of two kernels that store what philox.cuh gives."""
    return emulator.module(Path(__file__).with_name("philox.cu"))


def words_of_any_kind(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """32-bit words, every few of them 0 or all ones. [*shape]"""
    words = rng.integers(0, 2**32, shape, np.uint32)
    words[rng.random(shape) < 0.2] = 0
    words[rng.random(shape) < 0.2] = 0xFFFFFFFF
    return words


def test_the_words_of_philox_are_those_of_numpy(philox: Any) -> None:
    rng = np.random.default_rng(0)
    counters, keys = words_of_any_kind(rng, 1024, 4), words_of_any_kind(rng, 1024, 2)
    out = np.zeros_like(counters)
    philox.get_function("words")((8,), (128,), (out, counters, keys))
    np.testing.assert_array_equal(out, philox4x32(counters, keys))


def test_the_uniform_numbers_are_those_of_numpy(philox: Any) -> None:
    rng = np.random.default_rng(1)
    seeds = words_of_any_kind(rng, 1024, 2).view(np.uint64)[:, 0]
    sequences, positions, purposes = words_of_any_kind(rng, 3, 1024)
    out = np.zeros(1024, np.uint32)
    philox.get_function("uniforms")((8,), (128,), (out, seeds, sequences, positions, purposes))
    np.testing.assert_array_equal(out / 2**24, uniform(seeds, sequences, positions, purposes))


# The likeliest token


def likeliest(launcher: Emulator, logits: np.ndarray) -> tuple[list[int], list[int]]:
    ids, not_finite = np.full((2, len(logits)), -7, np.int32)
    workspace = Workspace.allocate(np, len(logits), logits.shape[1])
    argmax(Kernels(launcher, "float32"), logits, workspace, ids, not_finite)
    return ids.tolist(), not_finite.tolist()


@pytest.mark.parametrize("V", [1, 2049, 7, 1000, 2048, 9001])
@pytest.mark.parametrize("R", [0, 1, 5])
def test_argmax_is_that_of_numpy(any_emulator: Emulator, R: int, V: int) -> None:
    logits = np.random.default_rng(V).standard_normal((R, V)).astype(np.float32) - 3
    assert likeliest(any_emulator, logits) == (logits.argmax(-1).tolist(), [0] * R)


def test_of_equal_logits_the_smallest_id_is_taken(any_emulator: Emulator) -> None:
    logits = np.full((6, 6000), -1.0, np.float32)
    logits[1, [5999, 4100, 2047]] = 3
    logits[2, [31, 32, 33]] = 1e-30
    logits[3, [8, 9]] = -0.0, 0.0  # equal: neither is larger
    logits[4] = -np.inf
    logits[5] = -np.inf
    logits[5, 5000] = -3e38
    assert likeliest(any_emulator, logits) == ([0, 2047, 31, 8, 0, 5000], [0] * 6)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 3000])
def test_argmax_marks_a_row_that_is_not_finite(emulator: Emulator, bad: float, place: int) -> None:
    logits = np.random.default_rng(0).standard_normal((3, 3001)).astype(np.float32)
    logits[2, 7] = -np.inf
    expected = logits.argmax(-1)
    logits[1, place] = bad
    assert likeliest(emulator, logits) == ([expected[0], place, expected[2]], [0, 1, 0])


def test_rows_of_logits_may_lie_apart(emulator: Emulator) -> None:
    whole = np.random.default_rng(0).standard_normal((4, 100)).astype(np.float32)
    logits = whole[::2, :77]
    assert likeliest(emulator, logits)[0] == logits.argmax(-1).tolist()
    ids, _, uniforms = draw(emulator, logits, settings_of_rows(2))
    assert ids == sample(logits, uniforms, **PLAIN, xp=np).tolist()


# Draws

PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
SHARE = 1e-6
"""Largest distance of a filter's share from its threshold at which another token is accepted."""
LOWEST, HIGHEST = (27, 183_203), (66, 24_046)
"""Seed and position of the smallest and of the largest uniform number there is."""


def settings_of_rows(R: int, **settings: Any) -> dict[str, Any]:
    """The same settings for each of R rows."""
    return {name: [value] * R for name, value in (PLAIN | settings).items()}


def draws(settings: dict[str, Any], seeds: np.ndarray, positions: np.ndarray) -> Draws:
    return Draws(
        np.asarray(settings["temperature"], np.float32),
        np.asarray(settings["top_k"], np.int32),
        np.asarray(settings["top_p"], np.float64),
        np.asarray(settings["min_p"], np.float32),
        np.asarray(seeds, np.uint64),
        np.arange(len(seeds), dtype=np.int32) % 3 * (np.asarray(seeds) > 100),
        np.asarray(positions, np.int32),
    )


def draw(
    launcher: Emulator, logits: np.ndarray, settings: dict[str, Any], seed: int = 1 << 40, spare_rows: int = 0
) -> tuple[list[int], list[int], np.ndarray]:
    """Ids, flags and the uniform numbers behind them. The last two rows get the lowest and the highest."""
    R, V = logits.shape
    keys = [(seed + r // 7, r) for r in range(R - 2)] + [LOWEST, HIGHEST][-R:]
    chosen = draws(settings, *np.array(keys).T)
    workspace = Workspace.allocate(np, R + spare_rows, V)
    for field in fields(workspace):
        getattr(workspace, field.name)[...] = 99  # whatever was there before
    ids, flags = np.full((2, R), -7, np.int32)
    sample_on_device(Kernels(launcher, "float32"), logits, chosen, workspace, ids, flags)
    return ids.tolist(), flags.tolist(), uniform(chosen.seeds, chosen.sequences, chosen.positions)


def assert_same_draw(token: int, logits: np.ndarray, u: float, settings: dict[str, float]) -> bool:
    """Whether `token` is the one that `reference.sample` draws from `logits` [V]; fails where it cannot be excused.

    It is excused where rounding decides: where u, moved by at most UNIFORM, and the shares of top-p and min-p, by at
    most SHARE of themselves, would have chosen it. Then it stands, in the order of the candidates, between the first
    and the last that they choose.
    """
    if token == sample(logits[None], np.array([u]), **settings, xp=np)[0]:
        return True
    order = np.argsort(-(logits / np.float32(settings["temperature"])), kind="stable").tolist()
    nearby = np.clip([u - UNIFORM, u + UNIFORM], 2**-24, 1 - 2**-24)
    ranks = []
    for p, min_p in itertools.product((1 - SHARE, 1 + SHARE), repeat=2):
        moved = settings | {"min_p": settings["min_p"] * min_p}
        if settings["top_p"] < 1.0:
            moved["top_p"] = settings["top_p"] * p
        ranks += [order.index(i) for i in sample(np.stack([logits] * 2), nearby, **moved, xp=np)]
    rank = order.index(token)
    assert min(ranks) <= rank <= max(ranks), f"token of rank {rank} drawn, of ranks {set(ranks)} expected; u = {u}"
    return False


def assert_same_draws(ids: list[int], logits: np.ndarray, uniforms: np.ndarray, settings: dict[str, Any]) -> None:
    rows = [dict(zip(settings, values, strict=True)) for values in zip(*settings.values(), strict=True)]
    same = [assert_same_draw(*row) for row in zip(ids, logits, uniforms, rows, strict=True)]
    assert np.count_nonzero(~np.array(same)) <= len(ids) / 100


def test_the_comparison_excuses_neighbours_only_and_only_at_their_edge() -> None:
    logits = np.log(np.array([0.2, 0.5, 0.3], np.float32))
    assert assert_same_draw(1, logits, 0.499, PLAIN)
    assert not assert_same_draw(2, logits, 0.499_995, PLAIN)
    for token, u in [(2, 0.4999), (0, 0.499_995), (0, 0.7999), (1, 0.999)]:
        with pytest.raises(AssertionError, match=r"of rank \d drawn, of ranks"):
            assert_same_draw(token, logits, u, PLAIN)


def every_setting(V: int) -> list[dict[str, float]]:
    product = itertools.product(
        [1.0, 0.3, 1e-3, 30.0], sorted({0, 1, 5, max(V - 1, 0), V + 1}), [1.0, 0.9, 0.5, 1e-6], [0.0, 0.05, 1.0]
    )
    return [dict(zip(PLAIN, values, strict=True)) for values in product]


def rows_and_settings(V: int, seed: int = 0) -> tuple[np.ndarray, dict[str, list[float]]]:
    """Every shape of logits under every setting, a row each. [R, V]"""
    rows, settings = [], []
    for i, setting in enumerate(every_setting(V)):
        shapes = shapes_of_logits(np.random.default_rng(seed + i), V).values()
        rows += shapes
        settings += [setting] * len(shapes)
    return np.stack(rows), {name: [setting[name] for setting in settings] for name in PLAIN}


@pytest.mark.parametrize("V", [1, 7, 1000])
@pytest.mark.slow
def test_draws_are_those_of_the_reference(emulator: Emulator, V: int) -> None:
    logits, settings = rows_and_settings(V)
    before = logits.copy()
    ids, flags, uniforms = draw(emulator, logits, settings)
    assert not any(flags)
    assert_same_draws(ids, logits, uniforms, settings)
    np.testing.assert_array_equal(logits, before)
    assert uniforms[-2] == 2**-24
    assert uniforms[-1] == np.float32(1 - 2**-24)


def test_draws_over_several_chunks_are_those_of_the_reference_in_any_order_of_threads(any_emulator: Emulator) -> None:
    rng = np.random.default_rng(4)
    logits = np.stack([row for _ in range(3) for row in shapes_of_logits(rng, 4500).values()])
    settings = settings_of_rows(len(logits), temperature=0.8, top_k=900, top_p=0.95, min_p=0.001)
    ids, _, uniforms = draw(any_emulator, logits, settings, spare_rows=2)
    assert_same_draws(ids, logits, uniforms, settings)


@pytest.mark.slow
@pytest.mark.parametrize("V", [50_272, exhaustive(262_144)])
def test_draws_from_a_whole_vocabulary_are_those_of_the_reference(emulator: Emulator, V: int) -> None:
    rng = np.random.default_rng(V)
    shapes = list(shapes_of_logits(rng, V).values())
    logits = np.concatenate([shapes, (rng.standard_normal((len(shapes), V)) * 3).astype(np.float32)])
    for setting in [
        PLAIN,
        PLAIN | {"temperature": 0.7, "top_p": 0.95},
        {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
        PLAIN | {"temperature": 5.0, "top_k": V - 1},
    ]:
        settings = settings_of_rows(len(logits), **setting)
        ids, _, uniforms = draw(emulator, logits, settings)
        assert_same_draws(ids, logits, uniforms, settings)
        assert likeliest(emulator, logits)[0] == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "spread", [1 / 64, 3.0, 200.0], ids=["all in one bin", "over some hundred bins", "most without mass"]
)
def test_the_masses_of_the_bins_add_up_exactly(any_emulator: Emulator, spread: float) -> None:
    """To that of the row, which is summed apart; and each is the sum of its candidates' whole numbers, to the bit."""
    logits = np.random.default_rng(8).uniform(-spread, 0, (1, 4500)).astype(np.float32)
    logits[0, 77] = 0
    settings = draws(settings_of_rows(1), np.ones(1), np.zeros(1))
    workspace = Workspace.allocate(np, 1, logits.shape[1])
    ids, flags = np.zeros((2, 1), np.int32)
    sample_on_device(Kernels(any_emulator, "float32"), logits, settings, workspace, ids, flags)
    *bins, of_row, kept = workspace.masses[0].tolist()
    assert sum(bins) == of_row == kept > 0
    masses = (np.exp(logits[0]).astype(np.float32) * np.float32(2**44)).astype(np.uint64)
    expected = np.zeros(len(bins))
    np.add.at(expected, np.minimum(-logits[0] * np.float32(64), len(bins) - 1).astype(int), masses.astype(float))
    np.testing.assert_allclose(bins, expected, rtol=1e-6, atol=5000)  # exp is rounded otherwise


LISTED = 1536
"""Candidates that `draw` lists: LISTED of `candidates.cuh`. Of more it reads the logits again."""


def crowded(rng: np.random.Generator, V: int, best: float, others: int) -> np.ndarray:
    """A row: one candidate at `best`, `others` within a bin of 1/64 nat around 0, all different, the rest far below."""
    row = np.full(V, -40.0, np.float32)
    row[rng.permutation(V)[:others]] = rng.permutation(others) / others * np.float32(0.014)
    row[rng.choice(np.flatnonzero(row == -40.0))] = best
    return row


@pytest.mark.parametrize("others", [31, LISTED, 2500, 2, 32, 33, 500, LISTED - 2, LISTED - 1, LISTED + 1])
def test_bins_of_any_number_of_candidates_are_searched(emulator: Emulator, others: int) -> None:
    """Few for a warp, more, as many as the list holds, and too many for it."""
    rng = np.random.default_rng(others)
    logits = np.stack([crowded(rng, 2603, best, others) for best in (0.0155, 3.0, 6.0) for _ in range(8)])
    for setting in (PLAIN, PLAIN | {"top_k": others // 2 + 1}, PLAIN | {"top_p": 0.7}, PLAIN | {"min_p": 0.0025}):
        settings = settings_of_rows(len(logits), **setting)
        ids, flags, uniforms = draw(emulator, logits, settings)
        assert not any(flags)
        assert_same_draws(ids, logits, uniforms, settings)


@pytest.mark.parametrize("V", [33, 1537, 4099])
def test_each_of_equal_logits_is_drawn_where_its_uniform_number_falls(any_emulator: Emulator, V: int) -> None:
    logits = np.full((24, V), -1.5, np.float32)
    logits[12:, ::3] = -np.inf
    settings = settings_of_rows(len(logits), temperature=0.7, top_k=2, top_p=0.8)
    ids, _, uniforms = draw(any_emulator, logits, settings)
    for row, token, u in zip(logits, ids, uniforms, strict=True):
        allowed = np.flatnonzero(row > -np.inf).tolist()
        assert abs(allowed.index(token) + 1 - np.ceil(u * np.ceil(0.8 * len(allowed)))) <= 1


@pytest.mark.parametrize("filters", [{}, {"top_k": 300, "top_p": 0.9, "min_p": 0.001}], ids=["plain", "filtered"])
def test_coarse_logits_have_many_equals_and_are_drawn_in_order_of_ids(
    any_emulator: Emulator, filters: dict[str, float]
) -> None:
    """As those that were rounded to 16 bits."""
    logits = (np.random.default_rng(5).standard_normal((40, 5003)) * 3).astype(np.float16).astype(np.float32)
    logits = np.round(logits * 4) / 4
    settings = settings_of_rows(len(logits), temperature=0.8, **filters)
    ids, _, uniforms = draw(any_emulator, logits, settings)
    assert_same_draws(ids, logits, uniforms, settings)


@pytest.mark.parametrize("rows", [1, 200, 3, 600])
def test_blocks_that_count_several_chunks_miss_none(emulator: Emulator, rows: int) -> None:
    """Of 200 rows two blocks count three chunks each; of 600 one counts them all."""
    logits = np.random.default_rng(rows).standard_normal((rows, 4101)).astype(np.float32)
    settings = settings_of_rows(rows, top_k=40)
    ids, _, uniforms = draw(emulator, logits, settings)
    assert_same_draws(ids, logits, uniforms, settings)


def test_rows_that_do_not_begin_at_16_bytes_are_drawn_from(any_emulator: Emulator) -> None:
    whole = np.random.default_rng(0).standard_normal((6, 2501)).astype(np.float32)
    logits = whole[:, 1:2400]
    ids, _, uniforms = draw(any_emulator, logits, settings_of_rows(6))
    assert_same_draws(ids, logits, uniforms, settings_of_rows(6))


def test_top_p_keeps_as_many_equal_scores_as_the_reference(emulator: Emulator) -> None:
    """The share falls on a candidate exactly, and float32 would keep one more: float32(0.8) > 0.8."""
    shares = np.repeat(np.arange(1, 10) / 10, 40)
    settings = settings_of_rows(len(shares)) | {"top_p": shares.tolist()}
    ids, _, _ = draw(emulator, np.zeros((len(shares), 10), np.float32), settings)
    for share in np.unique(shares):
        assert max(np.array(ids)[shares == share]) == round(share * 10) - 1


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": 2.5},
        {"temperature": 0.6, "top_k": 4},  # two candidates are equal at the edge
        {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.15},
    ],
    ids=["temperature", "top-k", "all"],
)
@pytest.mark.slow
def test_tokens_are_drawn_with_their_exact_probabilities(emulator: Emulator, setting: dict[str, float]) -> None:
    R = 2000
    logits = np.broadcast_to(np.array(SMALL, np.float32), (R, len(SMALL)))
    ids, _, _ = draw(emulator, logits, settings_of_rows(R, **setting), seed=2024)
    expected = R * np.array(exact_distribution(SMALL, **(PLAIN | setting)))
    assert p_value(np.bincount(ids, minlength=len(SMALL)), expected) > 1e-3


def test_a_temperature_of_0_takes_the_likeliest_whatever_the_filters(emulator: Emulator) -> None:
    logits = np.random.default_rng(0).integers(0, 5, (30, 400)).astype(np.float32)  # many equals
    settings = settings_of_rows(30, top_k=3, top_p=0.4, min_p=0.1) | {"temperature": [0.0, 1.0] * 15}
    ids, flags, uniforms = draw(emulator, logits, settings)
    assert ids[::2] == logits[::2].argmax(-1).tolist()
    others = {name: values[1::2] for name, values in settings.items()}
    assert_same_draws(ids[1::2], logits[1::2], uniforms[1::2], others)
    assert not any(flags)


@pytest.mark.parametrize(
    ("bad", "temperature"),
    [
        ([0.0, np.nan, 1.0], 1.0),
        ([-np.inf, -np.nan, -np.inf], 1.0),
        ([0.0, np.inf, np.inf], 1.0),
        ([-np.inf, -np.inf, -np.inf], 1.0),
        ([0.0, np.nan, 1.0], 0.0),
        ([1e38, 0.0, 0.0], 1e-3),
    ],
    ids=["NaN", "-NaN", "+inf", "nothing allowed", "NaN and greedy", "overflow"],
)
def test_a_row_that_is_no_distribution_is_marked_and_harms_no_other(
    any_emulator: Emulator, bad: list[float], temperature: float
) -> None:
    logits = np.array([[0.0, 1.0, 2.0], bad, [-np.inf, 3.0, -np.inf], bad, [0.0, -np.inf, 0.0]], np.float32)
    settings = settings_of_rows(5, top_p=0.99) | {"temperature": [1.0, temperature, 1.0, temperature, 1.0]}
    ids, flags, _ = draw(any_emulator, logits, settings)
    assert flags == [0, 1, 0, 1, 0]
    assert ids[1:4] == [0, 1, 0]
    assert ids[4] in (0, 2)


@pytest.mark.parametrize("choose", [likeliest, draw])
def test_a_vocabulary_too_large_for_64_bits_is_refused(emulator: Emulator, choose: Callable[..., Any]) -> None:
    with pytest.raises(DeviceError, match="up to 524,288 tokens, not 524,289"):
        choose(emulator, np.zeros((1, MOST_TOKENS + 1), np.float32), *[settings_of_rows(1)][: choose is draw])
