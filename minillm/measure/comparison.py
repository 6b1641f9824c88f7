"""Comparison of decoding strategies on one prompt, and the search tree of beam search."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..backends import working_time
from ..decoding.prompts import Prompt
from ..decoding.strategy import Candidate
from ..engine.engine import Engine
from ..engine.loop import StepLoop
from ..engine.scheduler import Limits
from ..progress import showing, work
from ..text.display import grid_html, picture_html
from ..text.tokenizer import Tokenizer
from .pictures import tree_svg

__all__ = ["BeamTree", "Comparison", "Outcome", "Variant", "beam_tree", "compare"]


class Variant(NamedTuple):
    """A strategy to compare: its name, and the fields of `GenerationConfig` that select it."""

    name: str
    fields: Mapping[str, Any]

    @property
    def settings(self) -> str:
        """The fields in one line, without do_sample, which the name implies."""
        return ", ".join(f"{name}={value}" for name, value in self.fields.items() if name != "do_sample")


STRATEGIES = (
    Variant("greedy search", {"do_sample": False}),
    Variant("sampling", {"do_sample": True, "top_k": 0}),
    Variant("cooler sampling", {"do_sample": True, "top_k": 0, "temperature": 0.5}),
    Variant("top-k sampling", {"do_sample": True, "top_k": 10}),
    Variant("nucleus sampling", {"do_sample": True, "top_k": 0, "top_p": 0.9}),
    Variant("min-p sampling", {"do_sample": True, "top_k": 0, "min_p": 0.1}),
    Variant("typical sampling", {"do_sample": True, "top_k": 0, "typical_p": 0.9}),
    Variant("Mirostat 2.0", {"do_sample": True, "mirostat": 2, "mirostat_tau": 2.0}),
    Variant("prompt lookup", {"do_sample": False, "prompt_lookup_num_tokens": 4}),
    Variant("lookahead", {"do_sample": False, "lookahead_window": 5}),
    Variant("contrastive search", {"do_sample": False, "penalty_alpha": 0.6, "top_k": 4}),
    Variant(
        "diverse beam search", {"do_sample": False, "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}
    ),
    Variant("beam search", {"do_sample": False, "num_beams": 4}),
)
BEAM_SEARCH = STRATEGIES[-1]


@dataclass(frozen=True)
class Outcome:
    """Result of one strategy."""

    variant: Variant
    text: str
    token_ids: list[int]
    finish_reason: str | None
    log_prob: float
    """Natural logarithm of the continuation's probability under the model"""
    steps: int
    """Forward passes, the prompt's included"""
    seconds: float

    @property
    def log_prob_per_token(self) -> float:
        """Mean over the tokens."""
        return self.log_prob / len(self.token_ids)

    @property
    def mean_probability(self) -> float:
        """Geometric mean of the tokens' probabilities."""
        return math.exp(self.log_prob_per_token)


@dataclass
class BeamTree:
    """All candidates that beam search considered."""

    steps: list[list[Candidate]] = field(default_factory=list)
    """The candidates of each step, best first"""
    best: list[int] = field(default_factory=list)
    """Tokens of the result"""
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)
    """Names the tokens of the picture that a notebook shows"""

    def best_ranks(self) -> list[int]:
        """The rank of the result's token among each step's candidates."""
        ranks: list[int] = []
        for step, token in zip(self.steps, self.best, strict=False):
            parent = self.steps[len(ranks) - 1][ranks[-1]].beam if ranks else 0
            ranks.append(next(i for i, c in enumerate(step) if (c.parent, c.token) == (parent, token)))
        return ranks

    head = ("step", "candidates, best first: token (summed log-probability)")

    def rows(self) -> list[list[str]]:
        """The candidates as text, a row for each step; those that are kept are marked with +."""
        named = self.tokenizer.token if self.tokenizer is not None else "#{}".format
        return [
            [
                str(number),
                ", ".join(
                    f"{'+' if candidate.beam is not None else ''}{named(candidate.token)!r} ({candidate.log_prob:.2f})"
                    for candidate in step
                ),
            ]
            for number, step in enumerate(self.steps, 1)
        ]

    def _repr_html_(self) -> str:
        note = "summed log-probabilities; blue: the result's way; dashed: ended; faint: pruned"
        return picture_html("tree of the beams", tree_svg(self, self.tokenizer), note)


class Comparison(list[Outcome]):
    """The outcomes of several strategies. A notebook shows them as a table."""

    head = ("strategy", "log p", "per token", "tokens", "steps", "text")

    def rows(self) -> list[list[str]]:
        """The cells of the table."""
        return [
            [
                outcome.variant.name,
                f"{outcome.log_prob:.2f}",
                f"{outcome.log_prob_per_token:.3f}",
                str(len(outcome.token_ids)),
                str(outcome.steps),
                outcome.text,
            ]
            for outcome in self
        ]

    def _repr_html_(self) -> str:
        return grid_html("strategies", self.head, self.rows(), "log p: of the whole continuation, under the model")


def compare(
    engine: Engine,
    prompt: Prompt,
    variants: Sequence[Variant] = STRATEGIES,
    *,
    seed: int = 0,
    progress: bool = True,
    **fields: Any,
) -> Comparison:
    """Continue one prompt under each strategy, one after the other.

    Args:
        engine: with a batch size large enough for the widest strategy
        prompt: text or token ids
        variants: the strategies
        seed: the sampling strategies' seed
        progress: show a bar on a terminal or in a notebook
        **fields: fields of `GenerationConfig`, for all of them

    Raises:
        MinillmError: as `Engine.generate`.
    """
    outcomes = Comparison()
    with showing(progress), work("comparing", len(variants), "strategies") as comparing:
        engine.generate(prompt, max_new_tokens=1)  # warm-up: the first run of a process allocates memory
        for variant in variants:
            comparing.note = variant.name
            comparing.advance(0)
            variant_fields = fields | dict(variant.fields) | ({"seed": seed} if variant.fields.get("do_sample") else {})
            outcomes.append(_outcome(engine, prompt, variant, variant_fields))
            comparing.advance()
    return outcomes


def _outcome(engine: Engine, prompt: Prompt, variant: Variant, fields: Mapping[str, Any]) -> Outcome:
    """The result of one strategy."""
    steps, began = engine.stats.steps, working_time()
    generation = engine.generate(prompt, **fields)
    seconds = working_time() - began
    completion = generation.completions[0]
    request = engine.request(prompt, **fields)
    text = request.prompt_ids + completion.token_ids
    scores = engine.score(text, source=request.source_ids, lora=request.settings.lora).logprobs
    log_prob = math.fsum(score for score in scores[len(request.prompt_ids) :] if score is not None)
    return Outcome(
        variant,
        completion.text,
        completion.token_ids,
        completion.finish_reason,
        log_prob,
        engine.stats.steps - steps,
        seconds,
    )


def beam_tree(engine: Engine, prompt: Prompt, *, progress: bool = True, **fields: Any) -> BeamTree:
    """Run beam search and record its candidates.

    Args:
        engine: not busy
        prompt: text or token ids
        progress: show a bar on a terminal or in a notebook
        **fields: fields of `GenerationConfig`, num_beams above 1 among them
    """
    tree = BeamTree(tokenizer=engine.tokenizer)
    request = replace(engine.request(prompt, **fields), watch=tree.steps.append)
    limits = Limits.of(engine.runner.backend.memory, request.strategy.max_sequences)
    loop = StepLoop({"target": engine.runner}, limits)
    loop.add(request)
    with showing(progress), work("searching", request.max_new_tokens, "steps") as searching:
        while loop.busy:
            for event in loop.step_or_raise():
                if event.index == 0:
                    tree.best += event.token_ids
            searching.advance()
    return tree
