"""An extension of griffe for the site: `Example:` in a docstring begins what griffe calls `Examples:`."""

import re
from typing import Any

from griffe import Extension, Object


class Examples(Extension):  # type: ignore[misc,unused-ignore]  # where griffe is not installed
    """Renames the section, so that its lines are shown as Python's."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """After an object of the package was read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
