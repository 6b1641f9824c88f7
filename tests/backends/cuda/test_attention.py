"""The attention kernels against the reference in float64, with a cache whose every unused number is NaN."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minillm.backends.cuda import attention
from minillm.backends.cuda.attention import (
    SPLIT,
    PrefillTile,
    Workspace,
    attend,
    count_singles,
    group_of,
    has_kernel,
    has_variant,
    partials_size,
    staged_bytes,
)
from minillm.backends.cuda.emulator import Emulator, LaunchError
from minillm.backends.cuda.kernels import Kernels
from minillm.reference.attention import AttentionSpec

from .attention_cases import PADDED, STORAGE, Case, Lengths
from .launchers import ON_GPU, exhaustive, launcher

SOON = ["float16", exhaustive("float32"), exhaustive("bfloat16")]


@pytest.fixture(autouse=True)
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few processors a block computes several heads together, as it does of many sequences or long contexts."""
    monkeypatch.setattr(Kernels, "processors", 4)


DECODE: dict[str, Lengths] = {
    "one token": [(0, 1)],
    "around a split": [(SPLIT - 2, 1), (SPLIT - 1, 1), (SPLIT, 1), (2 * SPLIT - 1, 1), (2 * SPLIT, 1)],
    "several splits, padded": [(5 * SPLIT + 5, 1), (0, 1), PADDED, (SPLIT + 40, 1), PADDED],
}
PREFILL: dict[str, Lengths] = {
    "two tokens": [(0, 2)],
    "around a tile": [(0, 63), (0, 64), (0, 65)],
    "chunked": [(70, 30), (1, 129), (62, 3)],
    "mixed with decode, padded": [(33, 1), (0, 70), PADDED, (129, 1), (5, 3), PADDED],
}
EVERY = [*DECODE, *PREFILL]


@pytest.mark.parametrize("lengths", EVERY)
@pytest.mark.parametrize("storage", STORAGE)
def test_attention_is_the_reference(emulator: Emulator, storage: str, lengths: str) -> None:
    case = Case(storage, (DECODE | PREFILL)[lengths], rows=1 if lengths in DECODE else 0)
    case.check(case.run(emulator))


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("lengths", ["several splits, padded", "mixed with decode, padded"])
def test_the_order_of_threads_is_nothing(any_emulator: Emulator, storage: str, lengths: str) -> None:
    case = Case(storage, (DECODE | PREFILL)[lengths], rows=1, K=1)
    out = case.run(any_emulator, debug=True)
    case.check(out)
    assert (out == case.run(launcher(), debug=True)).all()


@pytest.mark.parametrize(
    ("H", "K"),
    [(4, 2), (8, 1), (11, 1), *(exhaustive(*heads) for heads in ((4, 1), (6, 2), (16, 1)))],
)
@pytest.mark.parametrize("lengths", [[(30, 1), (140, 1)], [(3, 18)]], ids=["decode", "prefill"])
def test_query_heads_share_keys(emulator: Emulator, H: int, K: int, lengths: Lengths) -> None:
    case = Case("float16", lengths, H=H, K=K, D=16)
    case.check(case.run(emulator))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("storage", "D"),
    [
        ("float32", 128),
        *(("float16", D) for D in (72, 256)),
        *(exhaustive("float32", D) for D in (4, 16, 80, 96, 256)),
        *(exhaustive("float16", D) for D in (8, 16, 80, 96, 128, 192)),
    ],
)
@pytest.mark.parametrize("lengths", [[(30, 1), (140, 1)], [(3, 77)]], ids=["decode", "prefill"])
def test_any_width_of_heads(emulator: Emulator, storage: str, D: int, lengths: Lengths) -> None:
    assert has_kernel(storage, D)
    case = Case(storage, lengths, H=2, K=1, D=D)
    case.check(case.run(emulator))


@pytest.mark.parametrize(
    ("storage", "D", "V"),
    [
        ("float16", 24, 16),
        *(pytest.param("float16", D, V, marks=pytest.mark.slow) for D, V in ((576, 512), (288, 256))),
        pytest.param("float32", 576, 512, marks=pytest.mark.slow),
        *(exhaustive("bfloat16", D, V) for D, V in ((24, 16), (576, 512))),
        *(exhaustive("float32", D, V) for D, V in ((24, 16), (20, 12), (288, 256))),
    ],
)
@pytest.mark.parametrize("lengths", [[(30, 1), (140, 1), PADDED], [(3, 77), (20, 1)]], ids=["decode", "prefill"])
def test_values_within_keys(emulator: Emulator, storage: str, D: int, V: int, lengths: Lengths) -> None:
    """Latent attention: 576 numbers are a key for all heads, and the last 512 of them its value."""
    assert has_kernel(storage, D, V)
    case = Case(storage, lengths, H=4, K=1, D=D, V=V, rows=1)
    case.check(case.run(emulator))


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["float32", "float16", exhaustive("bfloat16")])
@pytest.mark.parametrize("D", [512, exhaustive(384)])
def test_a_decode_step_takes_wider_heads_than_a_prompt(emulator: Emulator, storage: str, D: int) -> None:
    assert has_kernel(storage, D, decodes=True) and not has_kernel(storage, D)
    assert not has_kernel(storage, 520, decodes=True)
    case = Case(storage, [(30, 1), (140, 1)], H=8, K=1, D=D)
    case.check(case.run(emulator))


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[(300, 1), (15, 1)], [(250, 70), (0, 16)]], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("storage", "P"),
    [
        ("bfloat16", 3),
        ("float32", 256),
        *(exhaustive("bfloat16", P) for P in (1, 256)),
        *(exhaustive("float32", P) for P in (1, 3)),
    ],
)
def test_any_size_of_page(emulator: Emulator, storage: str, P: int, lengths: Lengths) -> None:
    case = Case(storage, lengths, H=1, K=1, D=16, P=P)
    case.check(case.run(emulator))


@pytest.mark.parametrize("storage", STORAGE)
def test_prefill_computes_a_decode_step_too(emulator: Emulator, storage: str) -> None:
    case = Case(storage, DECODE["several splits, padded"], rows=1)
    case.check(case.run(emulator, max_queries=2))


def test_one_split_is_finished_by_its_block_alone(any_emulator: Emulator) -> None:
    """It writes no partial result and does not count itself: no fence, no atomic addition."""
    case = Case("float16", [(SPLIT - 1, 1), (30, 1), PADDED], H=4, rows=1)
    case.check(case.run(any_emulator, arrived=7))
    assert np.isnan(case.workspace.partials).all()


@pytest.mark.parametrize(("storage", "D"), [("float16", 64), ("float32", 128)])
def test_a_block_takes_one_split_after_the_other(
    any_emulator: Emulator, storage: str, D: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of one lie where the keys of the next are copied to; and float32 takes a split in two parts."""
    case = Case(storage, [(2 * SPLIT + 33, 1), (SPLIT + 5, 1)], D=D)
    bits = case.run(any_emulator)
    case.check(bits)
    monkeypatch.setattr(Kernels, "processors", 1)
    monkeypatch.setattr(attention, "DECODE_BLOCKS", 1)
    np.testing.assert_array_equal(case.run(any_emulator), bits)


def test_a_sequence_has_the_same_bits_in_any_batch(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [(5 * SPLIT + 3, 1), (40, 1), (2 * SPLIT, 1)]
    case = Case("float16", lengths)
    together = case.run(emulator)
    monkeypatch.setattr(Kernels, "processors", 1)
    for blocks in (1, 14):  # each block takes all splits of its sequence, or every second
        monkeypatch.setattr(attention, "DECODE_BLOCKS", blocks)
        assert (case.run(emulator) == together).all()
    for n in range(len(lengths)):
        alone = SimpleNamespace(
            query_starts=case.query_starts[:2],
            context_lens=case.context_lens[n : n + 1],
            block_table=case.block_table[n : n + 1],
        )
        case_out = np.empty_like(together[:1])
        workspace = Workspace(np.empty(partials_size(1, 2, 64, 2000), np.float32), np.zeros(2, np.int32))
        kernels = Kernels(emulator, "float16")
        attend(
            kernels,
            case.q[n : n + 1],
            *case.cache,
            alone,
            case_out,
            workspace,
            AttentionSpec(case.scale),
            max_queries=1,
        )
        assert (case_out == together[n : n + 1]).all()


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("lengths", [[(200, 1)], [(100, 80)]], ids=["decode", "prefill"])
def test_scores_of_any_size_do_not_overflow(emulator: Emulator, storage: str, lengths: Lengths) -> None:
    case = Case(storage, lengths)
    case.scale = 1e3
    np.testing.assert_allclose(case.run(emulator).astype(np.float64), case.exact(), rtol=0.02, atol=0.02)


# --- windows, slopes, caps and sinks ----------------------------------------------------------------------------------

MASKS: dict[str, dict[str, Any]] = {
    "window": {"window": 70},
    "slopes": {"biased": True},
    "both": {"window": 130, "biased": True},
    "cap": {"softcap": 0.8},
    "window and cap": {"window": 130, "softcap": 1.5},
    "sinks": {"sunk": True},
    "window and sinks": {"window": 130, "sunk": True},
    "distances": {"most": 60},
}
BACK: dict[str, Lengths] = {
    "decode": [(68, 1), (69, 1), (70, 1), (129, 1), (0, 1), (70 + 2 * SPLIT, 1), PADDED],
    "prefill": [(0, 70), (0, 150), (60, 90), (400, 3), PADDED, (200, 1)],
}


@pytest.mark.parametrize("storage", SOON)
@pytest.mark.parametrize("mask", [*MASKS])
@pytest.mark.parametrize("lengths", BACK)
def test_windows_slopes_caps_and_sinks_are_the_reference(
    emulator: Emulator, storage: str, mask: str, lengths: str
) -> None:
    case = Case(storage, BACK[lengths], rows=1, D=16, **MASKS[mask])
    case.check(case.run(emulator))


def test_heads_of_a_group_have_each_their_bias_by_distance(emulator: Emulator) -> None:
    case = Case("float16", BACK["decode"], rows=1, D=16, H=4, K=1, **MASKS["distances"])
    case.check(case.run(emulator))


@pytest.mark.parametrize("window", [2, 3, 15, 63, 64, 65, SPLIT, SPLIT + 1, 200, 1000])
@pytest.mark.parametrize("storage", SOON[:2])
def test_a_window_of_any_width(emulator: Emulator, storage: str, window: int) -> None:
    for lengths in [[(SPLIT + 30, 1), (0, 1), (2 * SPLIT - 1, 1)], [(0, 140), (130, 20)]]:
        case = Case(storage, lengths, D=16, K=1, window=window)
        case.check(case.run(emulator))


@pytest.mark.slow
@pytest.mark.parametrize("storage", [exhaustive("float32"), "float16"])
@pytest.mark.parametrize("mask", ["both", "window and cap"])
@pytest.mark.parametrize("lengths", BACK)
def test_masks_in_any_order_of_threads(any_emulator: Emulator, storage: str, mask: str, lengths: str) -> None:
    case = Case(storage, BACK[lengths], rows=1, D=16, K=1, **MASKS[mask])
    out = case.run(any_emulator, debug=True)
    case.check(out)
    assert (out == case.run(launcher(), debug=True)).all()


@pytest.mark.parametrize("storage", SOON[:2])
@pytest.mark.parametrize("lengths", [[(600, 1)], [(600, 5)]], ids=["decode", "prefill"])
def test_pages_before_the_window_are_not_looked_at(emulator: Emulator, storage: str, lengths: Lengths) -> None:
    """They belong to nobody: their numbers are NaN, and a debug build would refuse to go there."""
    case = Case(storage, lengths, D=16, window=70)
    expected, first = case.run(emulator), (601 - 70) // 64 * 64 // 16
    case.block_table[0, :first] = -5
    assert (case.run(emulator, debug=True) == expected).all()


def test_a_window_that_no_context_outgrows_is_the_plain_kernel(emulator: Emulator) -> None:
    compiled: list[dict[str, int]] = []

    class Noting(Kernels):
        def get(self, module: str, kernel: str, *, shared_mem: int = 0, **constants: int) -> Any:
            compiled.append(constants)
            return super().get(module, kernel, shared_mem=shared_mem, **constants)

    for lengths in [[(30, 1)], [(3, 18)]]:
        plain, wide = (Case("float16", lengths, D=16, window=window) for window in (None, 5000))
        assert (plain.run(emulator) == wide.run(emulator)).all()
        T, H, D = wide.q.shape
        out, room = np.empty((T, H, D), np.float16), np.zeros(10_000, np.float32)
        workspace = Workspace(room, np.zeros(H, np.int32))
        kernels = Noting(emulator, "float16")
        attend(kernels, wide.q, *wide.cache, wide, out, workspace, AttentionSpec(1.0, window=5000), max_queries=T)
    assert not any("WINDOWED" in constants for constants in compiled)


# --- trees of guesses -------------------------------------------------------------------------------------------------

BUSH = (-1, 0, -1, 2, 0, 4, 4)
WIDE = tuple(int(np.random.default_rng(i).integers(-1, i)) if i else -1 for i in range(75))
"""More nodes than two words have bits, and than a tile has queries"""
FOREST: dict[str, tuple[Lengths, dict[int, Sequence[int]]]] = {
    "beside lines": ([(90, 1), (40, 8), (3, 18), PADDED, (130, 7)], {1: BUSH, 4: BUSH}),
    "wide": ([(100, 80), (0, 75)], {0: WIDE, 1: WIDE}),
}


@pytest.mark.parametrize("storage", SOON)
@pytest.mark.parametrize(
    "mask", ["none", "both", *(pytest.param(mask, marks=pytest.mark.exhaustive) for mask in ("cap", "window", "sinks"))]
)
@pytest.mark.parametrize("forest", FOREST)
def test_a_node_of_a_tree_sees_the_line_before_it_and_its_ancestors(
    emulator: Emulator, storage: str, mask: str, forest: str
) -> None:
    lengths, parents = FOREST[forest]
    given = MASKS.get(mask, {}) | ({"window": 35} if mask == "both" else {})
    case = Case(storage, lengths, rows=1, D=16, parents=parents, **given)
    for singles in range(1 + (lengths[0][1] == 1)):
        case.check(case.run(emulator, singles=singles))


@pytest.mark.slow
def test_trees_in_any_order_of_threads(any_emulator: Emulator) -> None:
    lengths, parents = FOREST["wide"]
    case = Case("float16", lengths, D=16, K=1, H=1, window=35, parents=parents)
    out = case.run(any_emulator, debug=True)
    case.check(out)
    assert (out == case.run(launcher(), debug=True)).all()


def test_a_tree_that_is_a_line_has_the_bits_of_a_line(emulator: Emulator) -> None:
    lengths = [(2 * SPLIT + 33, 1), (40, 9), (70, 70)]
    plain = Case("float16", lengths, D=16)
    trees = Case("float16", lengths, D=16, parents={1: range(-1, 8), 2: range(-1, 69)})
    assert (plain.run(emulator, singles=1) == trees.run(emulator, singles=1)).all()


# --- both ways, and over sources --------------------------------------------------------------------------------------

WHOLE: Lengths = [(0, 3), (0, 63), PADDED, (0, 150), (20, 9), (0, 64), (0, 1)]
"""Texts, the rows of one of which are followed by others"""
BOTH_WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "slopes": {"biased": True},
    "distances": {"most": 30},
    "window and slopes": {"window": 70, "biased": True},
    "sinks": {"sunk": True},
}


@pytest.mark.parametrize("storage", SOON)
@pytest.mark.parametrize("mask", BOTH_WAYS)
def test_both_ways_a_query_sees_what_follows(emulator: Emulator, storage: str, mask: str) -> None:
    case = Case(storage, WHOLE, rows=1, D=16, causal=False, beyond={4: 12}, **BOTH_WAYS[mask])
    case.check(case.run(emulator))


@pytest.mark.parametrize("storage", SOON[:2])
def test_single_tokens_both_ways(emulator: Emulator, storage: str) -> None:
    """By the decode kernel, unless their places count: one sees a context that it is not the last of."""
    lengths = [(0, 1), (9, 1), PADDED, (200, 1)]
    for more in ({}, {"beyond": {1: 4}, "window": 9}):
        case = Case(storage, lengths, rows=1, D=16, causal=False, **more)
        case.check(case.run(emulator))


@pytest.mark.parametrize("storage", SOON)
@pytest.mark.parametrize("counts", [(1, 1, 1), (70, 2, 1), (1, 5, 64)], ids=["decode", "prefill", "mixed"])
def test_queries_see_all_of_their_source(emulator: Emulator, storage: str, counts: tuple[int, ...]) -> None:
    """Longer or shorter than they are many."""
    lengths = [(0, 3), (0, 2 * SPLIT + 9), (0, 64)]
    case = Case(storage, lengths, D=16, causal=False, queries=dict(enumerate(counts)))
    case.check(case.run(emulator, singles=count_singles(counts) if max(counts) > 1 else 0))


@pytest.mark.slow
def test_both_ways_in_any_order_of_threads(any_emulator: Emulator) -> None:
    case = Case("float16", WHOLE, rows=1, D=16, K=1, H=1, causal=False, window=70, most=30)
    out = case.run(any_emulator, debug=True)
    case.check(out)
    assert (out == case.run(launcher(), debug=True)).all()


def test_variants_without_a_kernel() -> None:
    bias, slopes = np.zeros((2, 3), np.float32), np.zeros(2, np.float32)
    known: list[dict[str, Any]] = [
        {},
        {"bias": bias},
        {"slopes": slopes, "window": 3},
        {"causal": False, "cross": True},
    ]
    assert all(has_variant(AttentionSpec(1.0, **terms)) for terms in known)
    positions: Any = object()
    unknown: list[dict[str, Any]] = [{"bias": bias, "slopes": slopes}, {"softcap": 1.0, "slopes": slopes}]
    unknown += [{"causal": False, "relative": positions}, {"causal": False, "cross": True, "window": 4}]
    assert not any(has_variant(AttentionSpec(1.0, **terms)) for terms in unknown)


@pytest.mark.skipif(ON_GPU, reason="ends the process on a GPU")
@pytest.mark.parametrize("storage", [exhaustive("float32"), "float16"])
@pytest.mark.parametrize("lengths", [[(0, 1), (40, 1)], [(0, 5), (30, 11)]], ids=["decode", "prefill"])
@pytest.mark.parametrize("page", [-1, 5])
def test_a_debug_build_refuses_a_page_that_is_not_there(
    emulator: Emulator, storage: str, lengths: Lengths, page: int
) -> None:
    case = Case(storage, lengths, D=16)
    assert len(case.keys) == 5
    case.block_table[1, 1] = page
    with pytest.raises(LaunchError, match=rf"paged\.cuh:\d+: page is {page}, should be from 0 to below 5"):
        case.run(emulator, debug=True)


def test_no_tokens_are_no_launch(emulator: Emulator) -> None:
    assert Case("float32", [PADDED]).run(emulator).shape == (0, 2, 64)  # an empty grid would be refused


def test_rows_beyond_the_last_sequence_are_left_alone(emulator: Emulator) -> None:
    case = Case("float16", [(0, 5), (2, 3)])
    case.query_starts[-1] -= 2
    case.context_lens[-1] -= 2
    out = case.run(emulator, max_queries=5)
    assert np.isnan(out[-2:]).all() and np.isfinite(out[:-2]).all()


@pytest.mark.parametrize("storage", STORAGE)
def test_a_tile_fits_into_shared_memory_everywhere(storage: str) -> None:
    widths = [D for D in range(1, 300) if has_kernel(storage, D)]
    assert (max(widths) == 256 and 100 not in widths) or storage == "float32"
    assert max(PrefillTile.of(storage, D).shared_bytes for D in widths) <= 99 * 1024
    wide = [D for D in range(1, 600) if has_kernel(storage, D, decodes=True)]
    assert max(wide) == 512
    assert max(staged_bytes(D, np.dtype(STORAGE[storage]).itemsize) for D in wide) <= 64 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("storage", SOON)
@pytest.mark.parametrize("lengths", [[(1999, 1), (700, 1)], [(0, 700)], [(600, 300), (900, 1)]])
def test_contexts_as_in_use(emulator: Emulator, storage: str, lengths: Lengths) -> None:
    case = Case(storage, lengths, H=4, K=2, D=128, P=16)
    case.check(case.run(emulator))


def test_heads_are_computed_together_where_no_processor_is_idle_for_it() -> None:
    """On 132 of them: of Llama 3.2 1B (8 K/V heads, 4 queries of each), Qwen2.5 1.5B (2, 6), TinyLlama (4, 8)."""
    for K, G, of_one, of_eight, of_many, long in ((8, 4, 1, 1, 4, 4), (2, 6, 1, 1, 6, 2), (4, 8, 1, 1, 8, 4)):
        chosen = [group_of(G, 8, N * K * splits, 132) for N, splits in ((1, 2), (8, 1), (128, 2), (1, 32))]
        assert chosen == [of_one, of_eight, of_many, long], (K, G)
    assert group_of(16, 8, 10**6, 132) == 8
    assert group_of(5, 4, 10**6, 132) == 1


@pytest.mark.parametrize("storage", ["float16", "float32"])
def test_a_head_has_the_same_bits_in_any_group(
    emulator: Emulator, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(storage, [(2 * SPLIT + 33, 1), (40, 1)], H=8, K=2)
    bits = []
    for processors in 1, 8, 10**6:  # four heads together, two, one
        monkeypatch.setattr(Kernels, "processors", processors)
        bits.append(case.run(emulator))
    case.check(bits[0])
    assert (bits[0] == bits[1]).all() and (bits[0] == bits[2]).all()


@pytest.mark.parametrize("storage", ["float16", "float32"])
def test_sequences_that_decode_beside_prompts_have_the_bits_of_a_decode_step(emulator: Emulator, storage: str) -> None:
    """And prompts those of a pass without them."""
    lengths = [(2 * SPLIT + 33, 1), (40, 1), (0, 37), (50, 70)]
    case = Case(storage, lengths, H=8, K=2)
    mixed = case.run(emulator, singles=2)
    case.check(mixed)
    plain = case.run(emulator)
    assert (mixed[2:] == plain[2:]).all()
    kernels, spec = Kernels(emulator, storage), case.spec
    alone = SimpleNamespace(
        query_starts=case.query_starts[:3], context_lens=case.context_lens[:2], block_table=case.block_table[:2]
    )
    decoded = np.full_like(mixed[:2], np.nan)
    attention.attend(kernels, case.q[:2], *case.cache, alone, decoded, case.workspace, spec, max_queries=1)
    assert (mixed[:2] == decoded).all()


def test_the_sequences_of_one_query_before_the_first_prompt() -> None:
    assert [count_singles(counts) for counts in ([1, 1, 5, 1], [5, 1], [1], [])] == [2, 0, 1, 0]
