"""One prompt under every strategy: the numbers shown are those of the library, and the tree is the search's own."""

import pytest

from minillm import Engine
from minillm.measure.comparison import STRATEGIES, beam_tree, compare

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(max_batch_size=4)


@pytest.mark.longer
def test_each_strategy_gives_what_generate_gives_and_score_scores(engine: Engine) -> None:
    outcomes = compare(engine, PROMPT, seed=3, max_new_tokens=8)
    assert [outcome.variant for outcome in outcomes] == list(STRATEGIES)
    for outcome in outcomes:
        fields = {"seed": 3} if outcome.variant.fields["do_sample"] else {}
        before = engine.stats.steps
        generation = engine.generate(PROMPT, max_new_tokens=8, logprobs=True, **outcome.variant.fields, **fields)
        (completion,) = generation.completions
        assert (outcome.text, outcome.token_ids) == (completion.text, completion.token_ids)
        assert completion.logprobs is not None
        assert outcome.log_prob == pytest.approx(sum(completion.logprobs), abs=1e-3)
        assert outcome.log_prob_per_token == pytest.approx(outcome.log_prob / len(completion.token_ids))
        assert outcome.steps == engine.stats.steps - before
        guesses = outcome.variant.name in ("prompt lookup", "lookahead", "contrastive search")
        assert guesses or outcome.steps == len(completion.token_ids)
        assert outcome.seconds > 0


def test_the_tree_holds_each_step_of_the_search_and_leads_to_its_result(engine: Engine) -> None:
    fields = {"num_beams": 4, "max_new_tokens": 60}
    tree = beam_tree(engine, "A list of colors: red,", **fields)
    generation = engine.generate("A list of colors: red,", logprobs=True, **fields)
    (completion,) = generation.completions
    assert tree.best == completion.token_ids
    assert completion.finish_reason == "stop"
    ranks = tree.best_ranks()
    assert len(ranks) == len(tree.best)
    assert completion.logprobs is not None
    for i, (step, rank) in enumerate(zip(tree.steps, ranks, strict=False)):
        assert step[rank].log_prob == pytest.approx(sum(completion.logprobs[: i + 1]), abs=1e-3)
        assert [c.log_prob for c in step] == sorted((c.log_prob for c in step), reverse=True)
        assert sorted(c.beam for c in step if c.beam is not None) == [0, 1, 2, 3]
        assert not any(c.finished and c.beam is not None for c in step)
        assert all(c.parent == 0 for c in step) == (i == 0)
    assert tree.steps[len(ranks) - 1][ranks[-1]].finished
