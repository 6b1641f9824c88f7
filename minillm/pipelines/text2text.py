"""text2text-generation and summarization: encoder-decoders."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from ..engine.engine import Engine
from .generating import Generating
from .inputs import config_json, listed_inputs, truncated


class Text2Text(Generating):
    """text2text-generation: what an encoder-decoder writes for a text, {"generated_text": ...} each.

    One text gives a list; a list of texts one dict for each, or a list of them with `num_return_sequences`. Without
    other settings it takes beam search of width 4 and at most 256 tokens, as in transformers.

    Arguments of a call besides generation fields: truncation, stop_sequence, generation_config.
    """

    OPTIONS = Generating.OPTIONS - {"return_tensors"}
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"max_new_tokens": 256, "num_beams": 4}
    KEY: ClassVar[str] = "generated_text"

    @classmethod
    def fits(cls, engine: Engine) -> bool:
        """Encoder-decoders of texts do."""
        return engine.config.encoder_layers > 0 and engine.config.output == "tokens" and not engine.config.frame_width

    def __call__(self, inputs: Any, *, progress: bool = True, **options: Any) -> Any:
        """Write what the task asks for, of one text or of each of a list.

        Raises:
            ParameterError: an option is unknown, impossible or contradicts another.
            PromptError: an input is not text, or is too long; `truncation=True` cuts it.
        """
        self.check(options)
        options = self.options | options
        single = isinstance(inputs, str)
        texts = listed_inputs([inputs] if single else inputs, "texts")
        limit = self._limit(options)
        options.pop("truncation", None)
        encode, configured = self._reader(options, limit)
        prompts = [encode(text) for text in texts]
        results = self._generate(prompts, options, progress, **configured)
        outputs = [[{self.KEY: completion.text} for completion in result.completions] for result in results]
        if single:
            return outputs[0]
        return [records[0] for records in outputs] if all(len(records) == 1 for records in outputs) else outputs

    def _reader(
        self, options: dict[str, Any], limit: int | None
    ) -> tuple[Callable[[str], str | list[int]], dict[str, Any]]:
        """A function from a text to a prompt, and the generation fields that the checkpoint sets for the task."""
        configured = self._configured(self.task)
        prefix = str(configured.pop("prefix", None) or config_json(self.engine).get("prefix") or "")

        def encode(text: str) -> str | list[int]:
            return prefix + text if limit is None else truncated(self.engine, prefix + text, limit)

        return encode, configured

    def _configured(self, task: str) -> dict[str, Any]:
        """The fields that config.json has for a task."""
        tasks = config_json(self.engine).get("task_specific_params")
        options = tasks.get(task) if isinstance(tasks, dict) else None
        return dict(options) if isinstance(options, dict) else {}


class Summarization(Text2Text):
    """summarization: {"summary_text": ...} for a text; else as `Text2Text`."""

    KEY = "summary_text"
