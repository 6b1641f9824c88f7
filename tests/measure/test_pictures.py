"""Pictures for notebooks: block tables say what the cache does; drawings are well-formed and have each part."""

from xml.etree import ElementTree

import pytest

from minillm import Engine
from minillm.measure.comparison import STRATEGIES, beam_tree, compare
from minillm.measure.pictures import BlockTables, PageUse

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
