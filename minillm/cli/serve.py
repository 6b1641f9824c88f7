"""minillm serve: an HTTP server with OpenAI's API."""

import argparse
import dataclasses
import json
import logging
import math
import shlex
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.options import HELPERS
from ..errors import MinillmError, ParameterError, UsageError, install, listed
from ..plugins import load
from ..text.chat import FORMATS, REASONING_FORMATS
from . import logs
from .options import add_engine_flag, add_model_options, decode, has_ranks, leads, make_engine
from .parser import Parser

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..server import Limits
    from ..server.model_pool import StoredModel

DESCRIPTION = """Serve models over HTTP: /v1/chat/completions, /v1/completions and more,
as OpenAI's clients expect them. Ctrl-C or SIGTERM lets what runs finish, a
second one ends it.

Each flag may also stand in the file of --config, in TOML (max-batch-size = 8),
and in the environment (MINILLM_MAX_BATCH_SIZE=8; several values with commas).
The command line counts before the environment, and that before the file."""

EPILOG = """examples:
  minillm serve
  minillm serve --model HuggingFaceTB/SmolLM2-135M-Instruct --port 8080
  minillm serve --model small=models/smol.gguf --model large=models/llama
  minillm serve --models ~/models --idle-timeout 600
"""

logger = logging.getLogger("minillm.server")

KEY_VARIABLE = "MINILLM_API_KEY"
MAX_BATCH_SIZE = 32
"""Sequences that run at once"""
CACHE_DTYPE = "weights"
"""16 bits if the weights have no more: `placement.AS_WEIGHTS`, without NumPy that it imports"""

LIMITS: Mapping[str, tuple[type, str, str]] = {
    "max_body_bytes": (int, "N", "bytes of a request's body (default: 8388608)"),
    "max_prompt_tokens": (int, "N", "tokens of a prompt (default: as many as the context holds)"),
    "max_prompts": (int, "N", "prompts in one request (default: 256)"),
    "max_n": (int, "N", "results for each prompt: n, best_of, num_beams (default: 128)"),
    "max_logprobs": (int, "N", "alternatives of each token (default: 20)"),
    "request_timeout": (
        float,
        "SECONDS",
        "time for one request, in the queue too; then it ends with what there is (default: no limit)",
    ),
    "send_timeout": (
        float,
        "SECONDS",
        "time for a client to send its request, and to take each part of its answer (default: 60)",
    ),
    "keep_alive_interval": (
        float,
        "SECONDS",
        "silence after which a stream sends a comment, as while a prompt is computed (default: 1)",
    ),
}
"""Fields of `Limits` -> type, placeholder and help of their flags."""

EXAMPLES = {
    "/v1/completions": '{"prompt": "A list of colors: red,", "temperature": 0}',
    "/v1/embeddings": '{"input": "How are you?"}',
    "/classify": '{"input": "A fine film."}',
    "/rerank": '{"query": "How are you?", "documents": ["I am well.", "It rains."]}',
}
"""The first endpoint that a model has -> a request to it"""


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    add_model_options(parser, several=True, parallel=True, chosen="a request's model", cache_dtype=CACHE_DTYPE)
    group = parser.add_argument_group("engine")
    for name in HELPERS:
        add_engine_flag(group, name)
    group.add_argument("--alias", metavar="NAME", help="name of the model in requests (default: that of its file)")
    add_engine_flag(group, "max_batch_size", default=MAX_BATCH_SIZE)
    for name in ("max_batched_tokens", "cache_bytes", "prefix_cache", "prefix_store", "prefix_store_bytes"):
        add_engine_flag(group, name)
    group.add_argument(
        "--sampling-defaults",
        choices=("openai", "checkpoint"),
        default="openai",
        help="of temperature, top_p etc., where a request leaves them out: OpenAI's (temperature 1; default), or those "
        "of the checkpoint's generation_config.json",
    )
    group.add_argument(
        "--tool-parser",
        choices=FORMATS,
        metavar="FORMAT",
        help=f"how the models write tool calls: {', '.join(FORMATS)} (default: as each model's chat template says)",
    )
    group.add_argument(
        "--reasoning-format",
        choices=("auto", "none", *REASONING_FORMATS),
        default="auto",
        metavar="FORMAT",
        help=f"how the models write thoughts, which are told from answers: {', '.join(REASONING_FORMATS)}, or none, "
        "which leaves them in the content (default: as each model's chat template says)",
    )
    group.add_argument(
        "--logits-processor",
        action="append",
        metavar="NAME",
        help="a logits processor of another package that requests may name in logits_processors; may be repeated",
    )
    group = parser.add_argument_group("models on request")
    group.add_argument(
        "--models",
        type=Path,
        metavar="DIR",
        help="a folder of models, each loaded when a request names it; --model ones stay loaded",
    )
    group.add_argument(
        "--idle-timeout",
        type=float,
        metavar="SECONDS",
        help="time without requests after which a model of --models is unloaded (default: 300; inf: "
        "only when memory is short)",
    )
    group.add_argument(
        "--max-loaded", type=int, metavar="N", help="models of --models in memory (default: as many as it holds)"
    )
    group = parser.add_argument_group("address")
    group.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine alone)")
    group.add_argument("--port", type=int, default=8000, help="port (default: %(default)s; 0: a free one)")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="private key for TLS")
    group.add_argument("--ssl-certfile", metavar="FILE", help="certificate for TLS")
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"key that requests need; may be repeated; other users see it here, but not in {KEY_VARIABLE}",
    )
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="such keys, one a line")
    group.add_argument(
        "--cors-origin", action="append", metavar="URL", help="site whose pages may use it in a browser; * for all"
    )
    group = parser.add_argument_group("limits")
    group.add_argument(
        "--max-waiting",
        type=int,
        default=1024,
        metavar="N",
        help="requests in the queue; further ones get status 429 (default: %(default)s)",
    )
    group.add_argument(
        "--max-connections",
        type=int,
        metavar="N",
        help="connections, idle ones too; requests on further ones get status 503 (default: no limit)",
    )
    for name, (kind, placeholder, words) in LIMITS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=placeholder, help=words)
    group.add_argument(
        "--drain-timeout", type=float, metavar="SECONDS", help="time for what runs to finish (default: no limit)"
    )
    group = parser.add_argument_group("log")
    group.add_argument("--quiet", action="store_true", help="no line of log for each request")
    group.add_argument("--log-level", choices=tuple(logs.LEVELS), default="info", help="least that is logged: debug "
        "(probes of /health and /metrics too), info (default), warning, error")  # fmt: skip
    group.add_argument(
        "--log-format", choices=logs.FORMATS, default="text", help="lines of text (default), or a JSON object a line"
    )
    group.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="collector of OpenTelemetry that gets a trace of each request, such as http://localhost:4318",
    )
    parser.take_configuration()


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    try:
        from ..server import make_app
        from ..server.process import Binding, serve
        from ..server.tracing import otlp_tracing
    except ImportError as error:
        raise MinillmError(f"serving needs {error.name}: {install('serve')}") from None
    logs.serve(args.log_level, args.log_format, quiet=args.quiet)
    limits, keys = _limits(args), _keys(args)
    if args.max_connections is not None and args.max_connections < 1:
        raise ParameterError(f"--max-connections should be a number above 0, found {args.max_connections}")
    address = {field.name: getattr(args, field.name) for field in dataclasses.fields(Binding)}
    binding = Binding(**address | {"send_timeout": limits.send_timeout})
    binding.check()
    tracing = None if args.otlp_endpoint is None else otlp_tracing(args.otlp_endpoint)
    names, stored, lifetimes = _names(args), _stored(args), _lifetimes(args)
    if has_ranks(args):
        from ..distributed.mpi import check_threads

        check_threads(len(names))
    if not leads(args):  # computes its share, and has no socket
        follow_all([make_engine(args, model=model) for model in names.values()])
        return
    with binding.bind() as bound:
        if not keys and not binding.is_local(bound):
            logger.warning(
                "everyone who reaches %s may use this server: give --api-key, or leave --host out", args.host
            )
        engines = {name: make_engine(args, model=model) for name, model in names.items()}

        def load(path: Path) -> "Engine":
            return make_engine(args, model=str(path), progress=False)

        app = make_app(
            engines,
            limits=limits,
            max_waiting=args.max_waiting,
            sampling=args.sampling_defaults,
            keys=keys,
            cors_origins=args.cors_origin or (),
            tool_parser=args.tool_parser,
            reasoning_format=args.reasoning_format,
            stored=stored,
            load=load,
            **lifetimes,
            tracing=tracing,
        )
        url = binding.url(bound)

        def started() -> None:
            for name, engine in engines.items():
                logger.info("%s", _about(name, engine))
            if stored:
                logger.info("loaded on request: %s", listed(stored))
            logger.info("listening at %s", url)
            models = [*app.state.server.models.values()]
            endpoint = models[0].endpoints[0] if models else "/v1/completions"
            name = "" if models else next(iter(stored))
            logger.info("%s", _example(url, endpoint, name, keyed=bool(keys), tls=binding.ssl_certfile is not None))

        serve(app, binding, bound, drain_timeout=args.drain_timeout, started=started)


def _names(args: argparse.Namespace) -> dict[str, str | None]:
    """The models by their names in requests."""
    named: dict[str, str | None] = {}
    words: list[str | None] = args.model or ([None] if args.models is None else [])
    if len(words) != 1 or args.models is not None:
        for option in ("alias", "revision", "adapter", "adapters", "tokenizer", *HELPERS):
            if getattr(args, option) is not None:
                others = "" if args.models is None else " and --models"
                raise UsageError(f"--{option} goes with one --model, found {len(words)}{others}")
    for word in words:
        name, path = _split(word)
        name = args.alias or name
        if name in named:
            raise UsageError(f"two models are called {name!r:.100}: name them with --model NAME=PATH")
        named[name] = path
    return named


def _stored(args: argparse.Namespace) -> Mapping[str, "StoredModel"]:
    """The models that are loaded on request, by their names in requests."""
    from ..server.model_pool import stored_models

    if args.models is None:
        for option in ("idle_timeout", "max_loaded"):
            if getattr(args, option) is not None:
                raise UsageError(f"--{option.replace('_', '-')} has no effect without --models")
        return {}
    if has_ranks(args):
        raise UsageError("--models goes with one process: give each model as --model")
    return stored_models(args.models)


def _lifetimes(args: argparse.Namespace) -> dict[str, Any]:
    """How long models of --models stay loaded, and how many, as `make_app` takes them."""
    given = {name: getattr(args, name) for name in ("idle_timeout", "max_loaded") if getattr(args, name) is not None}
    if not given.get("idle_timeout", 0) >= 0:
        raise ParameterError(f"--idle-timeout should be a number of at least 0, found {args.idle_timeout:g}")
    if given.get("max_loaded", 1) < 1:
        raise ParameterError(f"--max-loaded should be a number above 0, found {args.max_loaded}")
    return given


def _split(word: str | None) -> tuple[str, str | None]:
    """Name and path of NAME=PATH; without a name, the file's or folder's name or the hub id."""
    if word is None:
        return "minillm", None
    name, equals, path = word.partition("=")
    if equals and name and path and not Path(word).exists():
        return name, path
    checkpoint = Path(word)
    if not checkpoint.exists():
        return word, word
    return checkpoint.resolve().stem if checkpoint.suffix == ".gguf" else checkpoint.resolve().name, word


def follow_all(engines: Sequence["Engine"]) -> None:
    """Compute this rank's share of several models, each in a thread, until rank 0 has closed them all.

    Ctrl-C and SIGTERM are left to rank 0, which lets what runs finish.
    """
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)
    threads = [threading.Thread(target=engine.follow) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _limits(args: argparse.Namespace) -> "Limits":
    from ..server import Limits

    given = {name: value for name in LIMITS if (value := getattr(args, name)) is not None}
    for name, value in given.items():
        if not 0 < value < 1e15:
            raise ParameterError(f"--{name.replace('_', '-')} should be a number above 0, found {value:g}")
    for name in (processors := tuple(args.logits_processor or ())):
        load("minillm.processors", name)  # what is not there is said at the start
    return dataclasses.replace(Limits(), logits_processors=processors, **given)


def _keys(args: argparse.Namespace) -> list[str]:
    """The API keys of the flags, and of the file that they name."""
    keys = list(args.api_key or ())
    if args.api_key_file is not None:
        lines = decode(args.api_key_file.read_bytes, str(args.api_key_file)).splitlines()
        stored_keys = [line.strip() for line in lines if line.strip()]
        if not stored_keys:
            raise UsageError(f"{args.api_key_file} has no API key: expected one a line")
        keys += stored_keys
    if any(not key.isascii() or not key.isprintable() or not key.strip() for key in keys):
        raise UsageError("an API key should be of printable ASCII characters")
    return keys


def _about(name: str, engine: "Engine") -> str:
    from ..models.base import weights_of

    cache = engine.runner.cache
    matrices = [weight.data for weight in weights_of(engine.runner.model) if weight.data is not None]
    size = sum(matrix.nbytes for matrix in matrices)
    bits = 8 * size / sum(math.prod(matrix.shape) for matrix in matrices)
    capacity = (
        ""
        if engine.config.bidirectional
        else f", KV cache {cache.num_pages * cache.page_size} tokens, {cache.max_bytes / 2**20:.0f} MiB, "
        f"{engine.runner.backend.memory.cache.name}"
    )
    return (
        f"{name}: {engine.config.model_type}, weights {size / 2**20:.0f} MiB ({bits:.3g} bits each), "
        f"context {engine.context} tokens{capacity}"
    )


def _example(url: str, endpoint: str, model: str, *, keyed: bool, tls: bool) -> str:
    """A command to try; `model`: the name that it has to give, or ""."""
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if keyed else ""
    options = f"{' -k' if tls else ''} {url}{endpoint}"
    if endpoint not in EXAMPLES:  # a form with a sound
        named = f" -F model={shlex.quote(model)}" if model else ""
        return f"try: curl{options}{key} -F file=@sound.wav{named}"
    body = EXAMPLES[endpoint]
    body = body if not model else f'{{"model": {json.dumps(model)}, {body[1:]}'
    return f"try: curl{options} -H 'Content-Type: application/json'{key} -d '{body}'"
