"""Hooks inside a model that ranks share: what is watched and changed is what one process sees and computes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.formats import open_model
from minillm.measure.inside import ablate_heads
from minillm.parallel import Parallel

from ..families import GOLDEN_CASES
from ..task_models import BERT, T5, write_task_model
from .processes import MPIEXEC, output
from .ranks import DEGREES, NAMES, on_all_degrees, on_ranks

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = sorted({family: (family, name) for family, name in GOLDEN_CASES}.values())
PROMPT = [5, 9, 17, 33, 4, 60, 21]
TEXT = "A list of colors: red,"


def larger(array: Any, place: Any) -> Any:
    return array * 1.01


def other_heads(array: Any, place: Any) -> Any:
    """A change that depends on all heads at once."""
    return array[:, ::-1] if place.layer else array.cumsum(axis=1) * 0.9


def on_one(call: Callable[[Engine], Any], *arguments: Any) -> Any:
    with Engine(*arguments, backend="numpy", cache_bytes=1 << 24) as engine:
        return call(engine)


def assert_same(ours: Any, theirs: Any) -> None:
    """Tokens and watched rows of two generations."""
    assert ours.token_ids == theirs.token_ids
    assert list(ours.watched) == list(theirs.watched)
    for name, rows in theirs.watched.items():
        np.testing.assert_allclose(ours.watched[name], rows, atol=1e-4 * max(1, abs(rows).max()), err_msg=name)


@pytest.mark.longer
@pytest.mark.sampled(3)
@pytest.mark.parametrize("parallel", DEGREES[::-1], ids=NAMES[::-1])
def test_every_point_is_watched_and_changed_as_in_one_process(parallel: Parallel) -> None:
    """In a batch with a stranger, whose tokens stay as they are."""
    changes = {"blocks.*.attention.z": other_heads, "blocks.*.mlp.hidden": larger, "blocks.*.residual": larger}
    changes |= {"blocks.5.attention.pattern": other_heads, "blocks.4.attention.k": larger, "blocks.3.mlp.out": larger}
    changes |= {"embedding": larger, "final": larger, "logits": other_heads}

    def run(engine: Engine) -> Any:
        looked = engine.generate(TEXT, max_new_tokens=3, watch="**")
        changing = engine.request(TEXT, max_new_tokens=3, watch="**", hooks=changes)
        changed, stranger = engine.run([changing, engine.request(TEXT, max_new_tokens=5)])
        beams = engine.generate(TEXT, max_new_tokens=3, num_beams=2, watch=["blocks.5.attention.q"])
        return [*engine.names().items()], looked, changed, beams, stranger.token_ids

    ours, theirs = on_ranks(parallel, run).result, on_one(run)
    assert ours[0] == theirs[0] and ours[4] == theirs[4]
    for one, other in zip(ours[1:4], theirs[1:4], strict=True):
        assert_same(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name", "parallel"), on_all_degrees(FAMILIES, [family for family, _ in FAMILIES][::3])
)
def test_every_family(family: str, name: str, parallel: Parallel) -> None:
    """One in three: on ranks test_generation.py has every family, and on one process test_live_hooks.py."""
    folder = GOLDEN / family / name.replace(" ", "-")
    if parallel.pipeline > 1 and open_model(folder).config.per_layer_width:
        pytest.skip("stages do not share per-layer embeddings")

    def run(engine: Engine) -> Any:
        changes = {point: larger for point in engine.names() if not point.endswith(("pattern", "probabilities"))}
        looked = engine.generate(PROMPT, max_new_tokens=2, watch="**")
        return looked, engine.generate(PROMPT, max_new_tokens=2, watch="**", hooks=changes)

    for ours, theirs in zip(on_ranks(parallel, run, folder).result, on_one(run, folder), strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("raw", [T5], ids=["t5"])
def test_an_encoder_and_its_decoder(raw: dict[str, Any], tmp_path: Path) -> None:
    folder = write_task_model(tmp_path / "model", raw)

    def run(engine: Engine) -> Any:
        changes = {"encoder.blocks.*.attention.z": other_heads, "blocks.*.cross.pattern": other_heads}
        return engine.generate("the cat sat on a red house", max_new_tokens=3, watch="**", hooks=changes)

    assert_same(on_ranks(DEGREES[0], run, folder).result, on_one(run, folder))


@pytest.mark.longer
@pytest.mark.sampled(2)
@pytest.mark.parametrize("parallel", DEGREES[:2], ids=NAMES[:2])
def test_hooks_for_all_requests_reach_texts_and_their_errors_leave_the_engine_whole(parallel: Parallel) -> None:
    def run(engine: Engine) -> Any:
        before = engine.generate(TEXT, max_new_tokens=4).text
        with engine.hooks({"blocks.5.mlp.in": larger}):
            inside = engine.embed(TEXT), engine.forward(TEXT), engine.generate(TEXT, max_new_tokens=4).text
        for layer in (1, 4):
            with engine.hooks({f"blocks.{layer}.mlp.in": lambda array, place: 1 / 0}), pytest.raises(ZeroDivisionError):
                engine.generate(TEXT, max_new_tokens=4)
            failing = {f"blocks.{layer}.mlp.in": lambda array, place: array[:0]}
            with pytest.raises(Exception, match=r"the hook .* should return None or an array"):
                engine.generate(TEXT, max_new_tokens=4, hooks=failing)
        assert engine.generate(TEXT, max_new_tokens=4).text == before
        return inside

    (vector, logits, text), theirs = on_ranks(parallel, run).result, on_one(run)
    np.testing.assert_allclose(vector, theirs[0], atol=1e-5)
    np.testing.assert_allclose(logits, theirs[1], atol=1e-3)
    assert text == theirs[2]


@pytest.mark.longer
def test_an_encoder_alone(tmp_path: Path) -> None:
    folder = write_task_model(tmp_path / "model", BERT)

    def run(engine: Engine) -> Any:
        plain = engine.embed("the cat sat")
        with engine.hooks({"blocks.*.attention.pattern": other_heads, "blocks.*.mlp.hidden": larger}):
            return plain, engine.embed("the cat sat")

    for parallel in DEGREES:
        ours, theirs = on_ranks(parallel, run, folder).result, on_one(run, folder)
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
        assert abs(theirs[0] - theirs[1]).max() > 1e-3


@pytest.mark.slow
@pytest.mark.skipif(MPIEXEC is None, reason="there is no mpiexec")
def test_processes() -> None:
    """Heads of all layers are ablated by functions of rank 0."""
    pytest.importorskip("mpi4py")
    code = (
        "from minillm import Engine\n"
        "from minillm.measure.inside import ablate_heads\n"
        "from minillm.parallel import Parallel\n"
        "with Engine(threads=1, parallel=Parallel(tensor=2, pipeline=2)) as engine:\n"
        f"    if not engine.rank: print(ablate_heads(engine, {TEXT!r})[1].tolist())\n"
    )
    _, expected = on_one(lambda engine: ablate_heads(engine, TEXT))
    assert np.array(json.loads(output(4, code=code))) == pytest.approx(expected, abs=1e-3)
