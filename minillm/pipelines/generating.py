"""The part that tasks which generate text share: settings, defaults, the run."""

from collections.abc import Mapping
from typing import Any, ClassVar

from ..decoding.settings import GenerationConfig, refuse_unknown
from ..engine.results import Generation
from ..errors import ParameterError, shown
from .base import Pipeline
from .inputs import longest_input, truncates


class Generating(Pipeline):
    """The part that tasks which generate text share. Calls also take generation fields and `generation_config`."""

    OPTIONS = frozenset({"generation_config", "stop_sequence", "truncation", "max_length", "return_tensors"})
    DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    """Generation fields that neither the call nor the checkpoint sets"""

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Refuse what is neither an argument of a call nor a generation field."""
        super().check(options)
        refuse_unknown({name: options[name] for name in options if name not in cls.OPTIONS | {"priority", "timeout"}})

    @classmethod
    def takes(cls, name: str) -> bool:
        """Generation fields are checked apart."""
        return True

    def _generate(
        self, prompts: list[Any], options: dict[str, Any], progress: bool, **fixed: Any
    ) -> "list[Generation]":
        """Run prompts with the options that are left: generation fields. `fixed` are defaults of the task's own."""
        config = options.pop("generation_config", None)
        if config is not None and not isinstance(config, GenerationConfig):
            raise ParameterError(f"generation_config should be a minillm.GenerationConfig, found {shown(config)}")
        if (stop := options.pop("stop_sequence", None)) is not None:
            options["stop_strings"] = stop
        if options.get("stop_strings") is not None:
            options.setdefault("include_stop", True)  # as transformers, which ends after them
        defaults = {**self.DEFAULTS, **self.engine.generation_defaults, **fixed}
        if defaults.get("max_length") is not None:
            defaults.pop("max_new_tokens", None)
        results: list[Generation] = self.engine.generate(
            prompts, config, progress=progress, defaults=defaults, **options
        )
        return results

    def _limit(self, options: Mapping[str, Any]) -> int | None:
        """Tokens to which texts are cut; None without truncation."""
        return longest_input(self.engine) if truncates(options) else None
