"""The page at /, on which people see the model think: static files, without a build step and without other hosts.

index.html      its structure
colours.css     its colours, light and dark, which the command line's pages share
style.css       its looks, on a desktop and a phone; `tokens.css` of `display` has the shade of a token
app.js          what happens when something is clicked, sent, streamed or stopped
api.js          the server's endpoints, the API key, the bytes of tokens
tree.js         what was said, as a tree with branches
transcript.js   the path through the tree, token by token; the tree, drawn
tokens.js       a token, its alternatives, the card that shows them
inspector.js    one token: probability, alternatives, attention
settings.js     a strategy and its fields
keeping.js      what was said, kept over a reload, copied and saved
compare.js      one prompt under two strategies

It uses /v1/completions with token ids, so a branch continues exactly what was said, /tokenize, and `inspection`.
"""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...text.display import TOKENS_CSS

FOLDER = Path(__file__).parent

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The browser's restrictions on the page (https://www.w3.org/TR/CSP3/): this server alone, no script in its text."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """The page at / and its files below /page/. They are read now."""
    files = {path.name: path for path in (*FOLDER.iterdir(), TOKENS_CSS) if path.suffix in TYPES}
    places = {"/" if name == "index.html" else f"/page/{name}": path for name, path in sorted(files.items())}
    return [_route(place, path.read_bytes(), TYPES[path.suffix]) for place, path in places.items()]


def _route(place: str, content: bytes, kind: str) -> Route:
    async def file(request: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=kind)

    return Route(place, file)
