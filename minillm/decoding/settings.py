"""Generation parameters: `GenerationConfig` as the user sets them, `Settings` with every field resolved.

`fields` declares each. `resolving` decides each by the first that sets it: the user, the checkpoint
(generation_config.json, or config.json without one), the default.

Two kinds of field are never silently ignored: unsupported ones, and those without effect given the other fields (a
temperature without sampling). If the user sets one, that is an error. If it comes from the checkpoint, the first kind
is reported once as a warning when the file is read, the second falls back to its default.
"""

from collections.abc import Iterable, Mapping
from dataclasses import field, make_dataclass, replace
from typing import Any, Unpack

from ..errors import ParameterError, listed, shown
from .documentation import document, signature
from .fields import FIELDS, GUIDES, OFF, GenerationFields
from .foreign import PYTHON, TRANSFORMERS, WORDS

_UNSAID = {"__doc__": "Fields of the table."}  # without a docstring a dataclass makes one of its signature, for 5 ms
_GIVEN = [(name, Any, None) for name in FIELDS]
_Given: Any = make_dataclass("_Given", _GIVEN, namespace=_UNSAID, frozen=True, kw_only=True)


class GenerationConfig(_Given):  # type: ignore[misc]  # its attributes are the table's
    """Generation parameters as the user set them; None means unset."""

    def __init__(self, *positional: object, **given: Unpack[GenerationFields]) -> None:
        if positional:
            raise ParameterError(f"GenerationConfig takes fields by name, found {shown(positional[0])} without one")
        refuse_unknown(given)
        super().__init__(**{name: value for name, value in given.items() if value is not None})

    def __repr__(self) -> str:
        return f"GenerationConfig({', '.join(f'{name}={value!r}' for name, value in self._given().items())})"

    def _repr_html_(self) -> str:
        from ..text.display import table_html

        return table_html("GenerationConfig", {name: repr(value) for name, value in self._given().items()})

    def _given(self) -> dict[str, Any]:
        """The fields that are set."""
        return {name: value for name in FIELDS if (value := getattr(self, name)) is not None}

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "GenerationConfig":
        """A configuration from a dict of fields; None means unset, as in a transformers configuration file.

        Example:
            >>> GenerationConfig.from_dict({"max_new_tokens": 8, "top_k": None})
            GenerationConfig(max_new_tokens=8)
        """
        if not isinstance(mapping, Mapping):
            raise ParameterError(f"generation fields should be a dict of names and values, found {shown(mapping)}")
        refuse_unknown(mapping)
        return cls(**mapping)

    def merged(self, **given: Unpack[GenerationFields]) -> "GenerationConfig":
        """A copy with the given fields replaced; None leaves a field as it is.

        Example:
            >>> GenerationConfig(num_beams=4).merged(max_new_tokens=8)
            GenerationConfig(max_new_tokens=8, num_beams=4)
        """
        refuse_unknown(given)
        return replace(self, **{name: value for name, value in given.items() if value is not None})


GenerationConfig.__doc__ = document()
GenerationConfig.__signature__ = signature()
_EXPLICIT: Any = field(default=frozenset(), compare=False, repr=False)
_RESOLVED: list[Any] = [*FIELDS, "amateur", ("explicit", Any, _EXPLICIT)]
_Resolved: Any = make_dataclass("_Resolved", _RESOLVED, namespace=_UNSAID, frozen=True, kw_only=True)


class Settings(_Resolved):  # type: ignore[misc]  # its attributes are the table's
    """Resolved generation parameters. Hashable; the attributes are GenerationConfig's, as their readers return them.

    Exactly one of `max_new_tokens` and `max_length` is a number: see `resolving.new_token_limit`. `seed` is always one:
    fresh if none was set, 0 without sampling. `num_assistant_tokens` is 0 without a draft model. `amateur` is True if
    the engine has an amateur model; `explicit` names the fields that the user set.
    """

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a sequence."""
        ids: tuple[int, ...] = self.eos_token_id
        return ids

    def has_defaults(self, names: Iterable[str]) -> bool:
        """Whether all of these fields are at their defaults."""
        return not [name for name in names if getattr(self, name) != FIELDS[name].default]

    @property
    def guide(self) -> tuple[str, Any] | None:
        """Name and value of the `guided_...` field that is set, if any."""
        return next(((name, value) for name in GUIDES if (value := getattr(self, name)) is not None), None)


def refuse_unknown(given: Mapping[str, object]) -> None:
    """Raise ParameterError for an unknown name, or a transformers field that minillm does not support.

    A name of another engine is told ours, a misspelt one the nearest. Unsupported fields are accepted with the value
    None, which means unset: a full configuration written by transformers has many of them.
    """
    of_transformers, of_others = WORDS[TRANSFORMERS], WORDS[PYTHON]
    for name, value in given.items():
        if name in FIELDS or (value is None and name in of_transformers):
            continue
        if name in of_transformers:
            advice = of_transformers[name].advice
            effect = "has no effect in minillm" if advice is None else "minillm does not support"
            raise ParameterError(f"{name} is a field of transformers that {effect}: {advice or 'leave it out'}")
        if name in of_others:
            raise ParameterError(f"unknown generation field {shown(name)}: use {of_others[name].ours}")
        import difflib  # only needed here

        nearest = difflib.get_close_matches(name, FIELDS, n=1) if isinstance(name, str) else []
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"expected one of {listed(FIELDS)}"
        raise ParameterError(f"unknown generation field {shown(name)}: {hint}")


def is_on(name: str, value: Any) -> bool:
    """True if a value of a field, or of whether a model is loaded, switches something on."""
    return value != OFF[name] if name in OFF else bool(value)
