"""Pictures for notebooks: block tables say what the cache does; drawings are well-formed and have each part."""

import base64
import io
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from minillm import Engine
from minillm.engine.inspect import masked_attention_maps
from minillm.errors import ParameterError
from minillm.measure.comparison import STRATEGIES, beam_tree, compare
from minillm.measure.inside import attention_maps
from minillm.measure.pictures import AttentionMaps, BlockTables, PageUse, opacity_png

from ..tiny import tiny_runner


def svg_of(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + 6])


def test_a_fork_shares_full_pages_and_copies_the_one_it_writes_to() -> None:
    runner = tiny_runner(pages=8, page_size=4)
    cache = runner.cache
    from minillm.batch import TokenSequence

    first = TokenSequence([5, 6, 7, 8, 9, 10])
    runner.prefill(first)
    second = cache.fork(first)
    shared = BlockTables.of(cache, {"first": first, "second": second})
    assert shared.tables["first"] == shared.tables["second"] == (PageUse(0, 4, 2), PageUse(1, 2, 2))
    second.token_ids.append(11)
    runner.prefill(second)
    apart = BlockTables.of(cache, {"first": first, "second": second})
    assert apart.tables["first"] == (PageUse(0, 4, 2), PageUse(1, 2, 1))
    assert apart.tables["second"] == (PageUse(0, 4, 2), PageUse(2, 3, 1))
    assert (apart.free_pages, apart.copied_positions) == (5, 2)
    cache.free(first)
    freed = BlockTables.of(cache, {"first": first, "second": second})
    assert freed.tables["first"] == () and freed.rows()[0] == ["first", "none"]
    assert len(svg_of(apart._repr_html_()).findall("rect")) == 8


def test_the_tree_is_drawn_with_a_box_for_each_candidate_and_the_results_way_in_blue() -> None:
    with Engine(max_batch_size=4) as engine:
        tree = beam_tree(engine, "A list of colors: red,", num_beams=3, max_new_tokens=6)
        svg = svg_of(tree._repr_html_())
        assert len(svg.findall(".//rect")) == sum(map(len, tree.steps))
        assert sum(group.get("stroke") == "#3b82c4" for group in svg.iter("g")) == len(tree.best)
        texts = [text.text for text in svg.iter("text")]
        assert "␣orange" in texts


@pytest.mark.slow
def test_a_comparison_is_a_table() -> None:
    with Engine() as engine:
        comparison = compare(engine, "Once upon a time", STRATEGIES[:2], max_new_tokens=4)
    assert [row[0] for row in comparison.rows()] == ["greedy search", "sampling"]
    assert comparison[0].text in comparison._repr_html_()


@pytest.mark.longer
def test_attention_maps_are_those_recomputed_from_queries_and_keys_and_a_picture_of_each_head() -> None:
    with Engine(backend="numpy") as engine:
        maps = attention_maps(engine, "A list of colors: red,", 0, heads=[5, 2])
        recomputed, _ = masked_attention_maps(engine.runner, maps.token_ids, 0)
        np.testing.assert_allclose(maps.probabilities, recomputed[[5, 2]], atol=1e-5)
        html = maps._repr_html_()
        assert html.count("<svg") == html.count("<image") == 2
        assert [text.text for text in svg_of(html).iter("text")][:2] == ["head 5", "</s>"]
        assert maps.head == ["token", "head 5", "head 2"]
        assert maps.rows()[-1][:2] == ['","', '"␣red" 0.88']
        for wrong in ({"layer": 6}, {"layer": 0, "heads": [6]}, {"layer": 0, "heads": []}):
            with pytest.raises(ParameterError, match=r"should be .*, found"):
                attention_maps(engine, "A", **wrong)  # type: ignore[arg-type]


def test_the_image_of_a_map_has_each_weights_opacity() -> None:
    image = pytest.importorskip("PIL.Image", reason="reads PNG with the extra plot")
    opacities = np.array([[0, 0.2, 1], [0.5, 1.5, -1]], np.float32)
    pixels = np.asarray(image.open(io.BytesIO(opacity_png(opacities, "#3b82c4"))).convert("RGBA"))
    assert pixels[..., 3].tolist() == [[0, 51, 255], [128, 255, 0]]
    assert {tuple(pixel) for pixel in pixels[..., :3].reshape(-1, 3).tolist()} == {(0x3B, 0x82, 0xC4)}


def test_a_long_text_is_drawn_with_pixels_of_several_tokens() -> None:
    image = pytest.importorskip("PIL.Image", reason="reads PNG with the extra plot")
    T = 500
    maps = AttentionMaps(0, (0,), list(range(T)), np.eye(T, dtype=np.float32)[None])
    html = maps._repr_html_()
    assert "a pixel shows the largest of 3 x 3" in html
    [content] = re.findall(r"base64,([^\"]+)", html)
    pixels = np.asarray(image.open(io.BytesIO(base64.b64decode(content))).convert("RGBA"))[..., 3]
    np.testing.assert_array_equal(pixels, 255 * np.eye(167))
    labels = [text.text for text in svg_of(html).iter("text")][1:]
    assert len(labels) < 50 and labels[:2] == ["#0", "#0"]
