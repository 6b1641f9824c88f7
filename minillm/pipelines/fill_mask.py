"""fill-mask: the tokens that may stand in the place of a mask."""

from typing import Any

from ..engine.engine import Engine
from .base import Pipeline
from .inputs import listed_inputs


class FillMask(Pipeline):
    """fill-mask: the likeliest tokens for the mask of a text, a list of {"score", "token", "token_str", "sequence"}.

    A text with several masks gives such a list for each; a list of several texts one result for each of them.

    Arguments of a call: top_k (5), targets (texts among which to choose).
    """

    OPTIONS = frozenset({"top_k", "targets"})

    @classmethod
    def fits(cls, engine: Engine) -> bool:
        """Masked language models do."""
        return engine.config.fills_masks

    def __call__(self, inputs: Any, *, progress: bool = True, **options: Any) -> Any:
        """Fill the masks of one text, or of each of a list.

        Raises:
            ParameterError: an option is unknown or impossible.
            PromptError: an input is not text, or has no mask.
        """
        self.check(options)
        options = self.options | options
        top_k = options.get("top_k")
        outputs: list[Any] = []
        for text in listed_inputs([inputs] if isinstance(inputs, str) else inputs, "texts"):
            masks = self.engine.fill_masks(
                text, top_k=5 if top_k is None else top_k, targets=options.get("targets"), progress=progress
            )
            records = [
                [
                    {
                        "score": filling.score,
                        "token": filling.token_id,
                        "token_str": filling.token,
                        "sequence": filling.text,
                    }
                    for filling in fillings
                ]
                for fillings in masks
            ]
            outputs.append(records[0] if len(records) == 1 else records)
        return outputs[0] if len(outputs) == 1 else outputs
