"""An HTTP server with OpenAI's API: `make_app` makes it of engines, `minillm serve` runs it.

README.md beside this file says what it does, and in which order to read it.
"""

from .app import make_app
from .limits import Limits

__all__ = ["Limits", "make_app"]
