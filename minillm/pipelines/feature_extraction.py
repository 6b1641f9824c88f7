"""feature-extraction: the hidden states of texts."""

from typing import Any

from ..engine.engine import Engine
from .base import Pipeline
from .inputs import listed_inputs, truncates


class FeatureExtraction(Pipeline):
    """feature-extraction: the last hidden state of each token of a text, as nested lists [1, T, E].

    One text gives one such list, a list of texts one for each. Arguments of a call: truncation, return_tensors (NumPy
    arrays in place of lists).
    """

    OPTIONS = frozenset({"truncation", "return_tensors"})

    @classmethod
    def fits(cls, engine: Engine) -> bool:
        """Decoders and encoders do, with any head or none."""
        return not engine.config.encoder_layers

    def __call__(self, inputs: Any, *, progress: bool = True, **options: Any) -> Any:
        """The hidden states of one text, or of each of a list; their lengths may differ.

        Raises:
            ParameterError: an option is unknown or impossible.
            PromptError: an input is not text, or is too long; `truncation=True` cuts it.
        """
        self.check(options)
        options = self.options | options
        single = isinstance(inputs, str)
        texts = listed_inputs([inputs] if single else inputs, "texts")
        states = self.engine.hidden_states(texts, truncate=truncates(options), progress=progress)
        arrays = [state[None] for state in states]  # [T, E] -> [1, T, E]
        outputs = arrays if options.get("return_tensors") else [array.tolist() for array in arrays]
        return outputs[0] if single else outputs
