"""A third count: a whole model on numbers that count what is done with them, in the full-square convention.

The reference computes hidden scores before it hides them, so one tile of queries makes the full square. NumPy adds n
numbers with n - 1 additions where the convention says n, and hiding adds minus infinity: both are said below.
"""

from typing import Any

import numpy as np
import pytest

from minillm.backends.memory import Memory
from minillm.backends.operations import Backend
from minillm.backends.storage import Experts
from minillm.batch import TokenSequence
from minillm.cache import PagedCache, new_cache
from minillm.config import ModelConfig
from minillm.measure.accounting import Conventions, Part, Step, operations
from minillm.models import build_model, family_of, tensor_shapes
from minillm.models.building import random_tensors
from minillm.runner.runner import Runner

from ...families import CASES, CONFIGS
from ...reference.test_cost import Module, Number
from ...shapes import BASE, VARIANTS
from .components import Attend, Component, DeltaRule, ExpertLinear, HeadLinear, Linear, Norm, Outline, Route, Scan
from .outlines import has_outline, outline_of

SIZES = {"hidden_size": 6, "num_attention_heads": 2, "ffn_dim": 5, "vocab_size": 7, "num_hidden_layers": 2}


class Scalars(Module):
    """NumPy whose new arrays hold `Number`s."""

    float32 = object

    @staticmethod
    def empty(shape: Any, dtype: Any = None) -> Any:
        return np.empty(shape, object)

    @staticmethod
    def minimum(x: Any, limit: Any, **options: Any) -> Any:
        return np.minimum(x, numbers(limit), **options)  # what is clipped counts on

    @staticmethod
    def maximum(x: Any, limit: Any, **options: Any) -> Any:
        return np.maximum(x, limit if x.dtype != object else numbers(limit), **options)


def counted(raw: dict[str, Any], lengths: list[tuple[int, int]], rows: int) -> ModelConfig:
    """Count one forward pass over sequences of (new tokens, context). Returns the model's configuration."""
    config = family_of(raw).read_config(raw)
    backend = Backend(memory=Memory(Scalars()))
    backend.memory.arena.take = lambda shape, dtype=None: np.empty(shape, object)  # type: ignore[method-assign]
    plain = Backend()
    model = build_model(config, random_tensors(tensor_shapes(config), 0, 0.3, plain), plain)
    runner = Runner(model, plain, new_cache(PagedCache, config, plain, 8, 16))
    sequences = [TokenSequence([1 + i % 5 for i in range(context)]) for _, context in lengths]
    for sequence, (new, context) in zip(sequences, lengths, strict=True):
        if context > new:
            runner.forward([sequence], [context - new])
    turn_to_numbers(model)
    runner.backend = backend
    pages = runner.cache.storage
    pages.keys, pages.values = numbers(pages.keys), numbers(pages.values)
    vars(pages).pop("layers", None)  # views of what they were
    if pages.states is not None:
        pages.states._layers = {i: tuple(map(numbers, arrays)) for i, arrays in pages.states._layers.items()}
    backend.sampler.finite = lambda logits: True  # type: ignore[method-assign]
    Number.arithmetic = Number.comparisons = 0
    T = sum(new for new, _ in lengths)
    runner.forward(sequences, [new for new, _ in lengths], rows=range(T - rows, T))
    return config


def numbers(array: Any) -> Any:
    return np.vectorize(lambda value: Number(float(value)), otypes=[object])(array)


def turn_to_numbers(part: Any) -> None:
    """Every weight of a model, in place; what several parts share once."""
    for value in vars(part).values():
        for one in value if isinstance(value, tuple) else (value,):
            if type(one).__name__ == "Weight":
                if isinstance(one.data, Experts):
                    object.__setattr__(one, "data", Experts(tuple(map(numbers, one.data.matrices))))
                for name in ("data", "bias")[isinstance(one.data, Experts) :]:
                    if getattr(one, name) is not None and getattr(one, name).dtype != object:
                        object.__setattr__(one, name, numbers(getattr(one, name)))
            elif hasattr(one, "__dataclass_fields__") and not isinstance(one, ModelConfig):
                turn_to_numbers(one)


def sums(outline: Outline, step: Step) -> int:
    """One addition that NumPy does not make for each number that is a sum: results of products, means, softmaxes.

    An RMS norm's sum of squares begins at zero and makes them all.
    """

    def of(part: Component, rows: int) -> int:
        match part:
            case Linear():
                return rows * part.outputs
            case HeadLinear():
                return rows * part.heads * part.outputs
            case ExpertLinear():
                return rows * part.chosen * part.outputs
            case Route():
                return rows * (not part.sigmoid)  # a sum of chosen scores begins with a number above zero
            case Norm():
                return rows * part.mean
            case DeltaRule():  # two lengths, and two products with a matrix
                return rows * (2 * part.key_heads + 2 * part.heads * part.head_dim)
            case Scan():
                return rows * part.heads * part.head_dim
            case Attend():
                return part.heads * (step.square + rows + rows * (part.value_dim or part.head_dim))
        return 0

    bodies = [*outline.before, *outline.for_pass, *(part for layer in outline.layers for part in layer), *outline.after]
    return sum(of(part, step.tokens) for part in bodies) + sum(of(part, step.rows) for part in outline.head)


def hiding(outline: Outline, step: Step) -> int:
    """Minus infinity or zero added: to the newest scores of each sequence with more than one new token; by windows."""
    hidden = 0
    for part in (part for layer in outline.layers for part in layer if isinstance(part, Attend)):
        hidden += part.heads * sum(one.new**2 for one in step.parts if one.new > 1)
        window = part.window
        hidden += part.heads * sum(one.square for one in step.parts if window is not None and one.context > window)
    return hidden


OPT = {
    name: BASE | SIZES | {k: v for k, v in fields.items() if k not in BASE or BASE[k] != v}
    for name, fields in VARIANTS.items()
}
MODELS = OPT | {
    f"{family}, {name}": CONFIGS[family][name]
    for family, name in CASES
    if family != "opt" and has_outline(family_of(CONFIGS[family][name]).read_config(CONFIGS[family][name]))
}


FIRST = {next(iter(OPT)), *(f"{family}, {next(iter(configs))}" for family, configs in CONFIGS.items())}
LENGTHS: dict[str, Any] = {"prefill": ([(4, 4)], 1), "decode": ([(1, 5)], 1), "ragged": ([(3, 13), (1, 2)], 2)}
RUNS = [(model, how) for model in MODELS for how in LENGTHS]
FEW = [(model, "ragged") for model in MODELS if model in FIRST] + [run for run in RUNS if run[0] == next(iter(OPT))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "lengths", "rows"),
    [
        pytest.param(
            model,
            *LENGTHS[how],
            marks=[] if (model, how) in FEW else [pytest.mark.exhaustive],
            id=f"{how}-{model}",
        )
        for model, how in RUNS
    ],
)
def test_a_whole_model_on_numbers_that_count(
    model: str, lengths: list[tuple[int, int]], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = dict(MODELS[model])
    if raw.get("n_group", 1) > 1 or raw.get("routed_scaling_factor", 1) != 1:
        pytest.skip("minus infinity, for groups of experts, and float32, for factors, are no numbers that count")
    if "word_embed_proj_dim" in raw:
        raw["word_embed_proj_dim"] = 4
    for module in ("operations", "weights"):
        expand = f"minillm.backends.{module}.expand"
        monkeypatch.setattr(expand, lambda data, rows=slice(None): data[rows])  # they are no floats
    config = counted(raw, lengths, rows)
    outline = outline_of(config)
    step = Step(tuple(Part(*length) for length in lengths), rows)
    formula = sum(row.flops for row in operations(config, step, None, Conventions(full_square=True)))
    softmaxes = [part for layer in outline.layers for part in layer if isinstance(part, Attend)]
    maxima = sum(each.heads * (step.square - step.tokens * (not each.sunk)) for each in softmaxes)  # no arithmetic
    choices = (part for layer in outline.layers for part in layer if isinstance(part, Route))
    maxima += sum(step.tokens * (part.experts - 1) for part in choices if not part.sigmoid)
    scans = (part for layer in outline.layers for part in layer if isinstance(part, Scan))
    maxima += sum(step.tokens * part.heads for part in scans)
    relus = Number.comparisons - maxima
    assert formula == Number.arithmetic + relus + sums(outline, step) - hiding(outline, step)
