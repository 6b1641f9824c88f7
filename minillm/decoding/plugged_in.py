"""A strategy of another package: it runs as one of minillm's own, and its errors say whose they are."""

from collections.abc import Sequence
from typing import Any

from ..backends.token_sampler import TokenSampler
from ..errors import MinillmError, ParameterError, shown
from ..plugins import load, with_name
from .fields import FIELDS, GUIDES
from .settings import Settings
from .strategy import Feed, Request, Rows, State, Strategy

GROUP = "minillm.strategies"
APART = frozenset((
    *("strategy", "strategy_options", "max_new_tokens", "max_length", "eos_token_id", "stop_strings", "include_stop"),
    *("stopping_criteria", "skip_special_tokens", "lora", "use_cache", "decoder_prompt", "decoder_start_token_id"),
))  # fmt: skip
"""Fields that have their effect whatever the strategy does"""


class PluggedIn(Strategy):
    """A strategy object of another package, for one request."""

    guided = True  # if the other is: it is asked below

    def __init__(self, settings: Settings) -> None:
        """Make the strategy that the settings name: its class is called with these and `strategy_options`.

        Raises:
            ParameterError: there is no strategy of this name, it is not a `Strategy`, or it refuses the options.
        """
        super().__init__(settings)
        self.name, options = settings.strategy, dict(settings.strategy_options)
        kind = load(GROUP, self.name)
        if not (isinstance(kind, type) and issubclass(kind, Strategy)):
            raise ParameterError(f"the strategy {self.name!r} should be a subclass of Strategy, found {shown(kind)}")
        try:
            self.inner = kind(settings, **options)
        except MinillmError:
            raise
        except Exception as error:
            raise ParameterError(f"strategy_options: the strategy {self.name!r} refuses {options}: {error}") from error
        self.extra_positions = self.inner.extra_positions
        idle = [name for name in FIELDS if name in settings.explicit - APART - kind.obeys]
        idle = [name for name in idle if getattr(settings, name) != FIELDS[name].default]
        if idle and not (kind.guided and idle[0] in GUIDES):
            raise ParameterError(f"{idle[0]} has no effect on the strategy {self.name!r}: leave one of them out")

    @property
    def on_device(self) -> bool:
        """As the strategy says."""
        return self.inner.on_device

    @property
    def max_sequences(self) -> int:
        """As the strategy says."""
        return self.inner.max_sequences

    def begin(self, request: Request) -> tuple[State, list[Feed]]:
        """The strategy's beginning."""
        return self._called("begin", request)  # type: ignore[no-any-return]

    def give_up(self, state: State) -> None:
        """As the strategy does it."""
        self._called("give_up", state)

    def step(self, sampler: TokenSampler, states: Sequence[State], rows: Rows) -> list[list[Feed]]:
        """The strategy's step."""
        return self._called("step", sampler, states, rows)  # type: ignore[no-any-return]

    def _called(self, method: str, *arguments: Any) -> Any:
        """A method's result.

        Raises:
            PluginError: the strategy raised an error that is none of minillm's.
        """
        return with_name(getattr(self.inner, method), f"strategy {self.name!r}")(*arguments)
