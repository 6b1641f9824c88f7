"""The documentation of `GenerationConfig`, made from the table of fields: its docstring and its signature."""

import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, get_type_hints

from .fields import FIELDS, GROUPS, NEEDS, GenerationFields, Group


def document() -> str:
    """The docstring, with a section for each group of fields."""
    sections = "\n".join(line for group in GROUPS for line in _section(group))
    return f"""Generation parameters as the user set them; None means unset.

Values are checked when a request is made, once the model and its vocabulary are known.

{sections}
Raises:
    ParameterError: an unknown field.

Example:
    >>> config = GenerationConfig(temperature=0.8, top_p=0.9, seed=7)
    >>> config
    GenerationConfig(temperature=0.8, top_p=0.9, seed=7)
    >>> engine.generate("Once upon a time", config, do_sample=True, max_new_tokens=4).text
    ' there was a kind'
"""


def _section(group: Group) -> Iterator[str]:
    """The section of a group."""
    yield f"{group.name.capitalize()}:"
    for name, setting in FIELDS.items():
        if setting.group == group.name:
            opposite = "False: " if setting.default is True else ""
            needs = f"; needs {NEEDS.get(setting.needs, setting.needs)}" if setting.needs else ""
            text = f"{name}: {opposite}{setting.help}{needs}. {setting.notes}".rstrip()
            indents: dict[str, Any] = {"initial_indent": "    ", "subsequent_indent": "        "}
            yield textwrap.fill(text, 116, break_on_hyphens=False, **indents)
    yield ""


def signature() -> inspect.Signature:
    """The signature: every field by its name, None by default."""
    return inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in get_type_hints(GenerationFields).items()
        ]
    )
