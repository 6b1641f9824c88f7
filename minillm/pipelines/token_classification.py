"""token-classification: labels of tokens, and the entities that they make."""

from typing import Any

from ..engine.engine import Engine
from .base import Pipeline
from .inputs import listed_inputs


class TokenClassification(Pipeline):
    """token-classification, also called ner: a dict for each token or entity of a text, in its order.

    A token has {"entity", "score", "index", "word", "start", "end"}; with an `aggregation_strategy` an entity has
    {"entity_group", "score", "word", "start", "end"}. One text gives a list, a list of texts one for each.

    Arguments of a call: aggregation_strategy ("none", "simple", "first", "average", "max"), ignore_labels (["O"]),
    stride (tokens that the windows of a long text share; without it a long text is cut).
    """

    OPTIONS = frozenset({"aggregation_strategy", "ignore_labels", "stride"})

    @classmethod
    def fits(cls, engine: Engine) -> bool:
        """Models with a head of labels of tokens do."""
        return engine.config.output == "token_labels"

    def __call__(self, inputs: Any, *, progress: bool = True, **options: Any) -> Any:
        """Label the tokens of one text, or of each of a list.

        Raises:
            ParameterError: an option is unknown or impossible.
            PromptError: an input is not text, or empty.
        """
        self.check(options)
        options = self.options | options
        single = isinstance(inputs, str)
        strategy, ignored = options.get("aggregation_strategy"), options.get("ignore_labels")
        texts = self.engine.classify_tokens(
            listed_inputs([inputs] if single else inputs, "texts"),
            aggregation="none" if strategy is None else strategy,
            ignore_labels=("O",) if ignored is None else ignored,
            stride=options.get("stride"),
            progress=progress,
        )
        records: list[Any] = []
        for entities in texts:
            assert isinstance(entities, list)
            records.append(
                [
                    {
                        "entity" if entity.index is not None else "entity_group": entity.label,
                        "score": entity.score,
                        **({} if entity.index is None else {"index": entity.index}),
                        "word": entity.word,
                        "start": entity.start,
                        "end": entity.end,
                    }
                    for entity in entities
                ]
            )
        return records[0] if single else records
