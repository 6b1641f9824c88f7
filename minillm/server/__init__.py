"""An HTTP server with OpenAI's API: `make_app` makes it of engines, `minillm serve` runs it.

protocol.py      requests, responses and errors, with OpenAI's field names
translate.py     their fields -> the engine's generation fields, and its errors back
served.py        a model: its engine, its name, its defaults
exchange.py      one request on its way: read, queued, counted, answered
completions.py   /v1/completions
chat.py          /v1/chat/completions
embeddings.py    /v1/embeddings
relevance.py     /classify, /score, /rerank
texts.py         one request for vectors or labels: read, computed, counted
text_queue.py    the texts of such requests that wait: several are computed together
tokens.py        /tokenize, /detokenize, /tokenizer_info
inspection.py    /inspect/...: what the page asks for beyond that
page/            the page at /
logprobs.py      log-probabilities in OpenAI's two forms
streaming.py     server-sent events; clients that leave
limits.py        sizes, counts, seconds, keys
metrics.py       /metrics
app.py           routes, errors, the log
process.py       sockets, signals, TLS: the process around it
"""

from .app import make_app
from .limits import Limits

__all__ = ["Limits", "make_app"]
