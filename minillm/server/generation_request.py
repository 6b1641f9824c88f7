"""Bodies of requests as generation fields of the engine, and the engine's errors in the request's own names.

A field of a body is one of five:

- one that the server reads: a field of the structs below;
- a generation field of the engine under its own name, from its one declaration in `decoding.settings`;
- another program's word, which `decoding.foreign` renames, ignores or refuses;
- anything else, which is refused with the name that may have been meant.

As in OpenAI's API, null is as good as leaving a field out, also of one that is unknown, since clients send what later
versions of the API have; and a temperature or a top_p of 0 is greedy search, whatever else shapes the sampling.
"""

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Struct

from ..decoding import foreign
from ..decoding.fields import FIELDS
from ..decoding.foreign import API, WORDS, Word
from ..decoding.resolving import read_field
from ..decoding.sampler_order import unnamed
from ..decoding.searches import NO_FILTER
from ..decoding.values import LARGE
from ..errors import EngineStateError, MinillmError, ParameterError, UsageError, listed, shown
from .http_json import ApiError, shutting_down


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """OpenAI pads its chunks against eavesdroppers; without effect here"""
    continuous_usage_stats: Literal[False] | None = None
    """vLLM counts in every chunk; not done here, so True is refused"""


class GenerationRequest(Struct, kw_only=True):
    """The fields that completions and chat have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    """A label for the operator; it never changes an answer"""
    ignore_eos: bool | None = None
    """vLLM, and all below: an end-of-sequence token does not end the text"""
    stop_token_ids: list[int] | None = None
    """Further tokens that end it"""
    use_beam_search: bool | None = None
    """Beam search of width n"""
    priority: int | None = None
    """Waiting requests with smaller numbers run first"""
    timeout: float | None = None
    """Ours: seconds after which the answer ends with what there is and the finish_reason "timeout\""""
    logits_processors: str | list[str] | None = None
    """Names of logits processors that the server was started with"""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """In log-probabilities, "token_id:5" for the text of token 5"""


class CompletionRequest(GenerationRequest, kw_only=True):
    """/v1/completions."""

    prompt: Any
    """A text, a list of texts, token ids, or a list of lists of token ids"""
    best_of: int | None = None
    logprobs: int | None = None
    suffix: str | None = None
    """Text after the one that is generated, for models with tokens for it (`text/infill.py`)"""
    add_special_tokens: bool | None = None
    """vLLM: whether to add the tokens that the model expects around a prompt; by default True"""


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """The form of a chat's answer."""

    type: str
    json_schema: dict[str, Any] | None = None
    schema: dict[str, Any] | None = None
    """The schema alone, as servers had it before OpenAI's `json_schema`"""


class ChatRequest(GenerationRequest, kw_only=True):
    """/v1/chat/completions."""

    messages: list[Any]
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    add_generation_prompt: bool | None = None
    """vLLM, like the next two: begin an answer; by default unless the last message is continued"""
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    """A variable of the template, like the next two, if it uses them"""
    verbosity: str | None = None
    enable_thinking: bool | None = None
    include_reasoning: Any = None
    """vLLM and OpenRouter: false leaves the thoughts out of the answer"""
    reasoning_format: Any = None
    """llama.cpp and Groq: "none" or "raw" leaves thoughts in the content, "hidden" leaves them out"""


# --- the fields of an endpoint ----------------------------------------------------------------------------------------

FUNCTIONS = {"logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria", "constraints", "potential"}
"""Generation fields that take functions or objects, which no JSON holds; those of other packages are the server's"""

ADVICE = {
    "messages": "use /v1/completions",
    "temperature": "0 is greedy decoding",
    "num_return_sequences": "raise num_beams, or set a temperature above 0 and leave num_beams out",
    "max_new_tokens": "raise it; /v1/completions with echo gives the prompt alone",
}
"""Generation field -> what to do, where the engine has advice in the words of Python's calls."""

SWITCHED_OFF = {"dry_multiplier", "xtc_probability"}
"""Fields that llama.cpp's clients set to 0 beside those that refine them, which then count for nothing"""

BUDGETS = {"thinking": "budget_tokens", "reasoning": "max_tokens"}
"""Anthropic's and OpenRouter's objects about thoughts -> the key of their budget"""

R = TypeVar("R", bound=GenerationRequest)


@dataclass(frozen=True)
class Endpoint(Generic[R]):
    """The fields of one endpoint."""

    request: type[R]
    reader: str
    """Reader of other programs' words, as `decoding.foreign` has them"""
    names: Mapping[str, str]
    """Generation field -> the name that an error gives it, if the request has not used another"""

    def word(self, name: str) -> Word | None:
        """The entry of another program's word."""
        return WORDS[self.reader].get(name) or WORDS[API].get(name)


NAMES = {"max_new_tokens": "max_tokens", "num_return_sequences": "n", "stop_strings": "stop"}
COMPLETIONS = Endpoint(CompletionRequest, foreign.COMPLETIONS, NAMES | {"top_logprobs": "logprobs"})
CHAT = Endpoint(ChatRequest, foreign.CHAT, NAMES)


@dataclass(frozen=True)
class Translated(Generic[R]):
    """A request as the server and the engine read it."""

    body: R
    """The fields that the server reads"""
    fields: dict[str, Any]
    """Generation fields"""
    names: dict[str, str]
    """Generation field -> its name in the request, or in the API"""
    given: Sequence[str]
    """The names in the body"""
    n: int
    """Results for each prompt"""
    capped: bool = False
    """The limit of new tokens is a cap: more than the context holds after the prompt is no error"""

    def limit(self, field: str, most: int) -> None:
        """Refuse a field above a limit of this server.

        Raises:
            ApiError: it is above.
        """
        value = self.fields.get(field)
        if isinstance(value, int) and value > most:
            name = self.names.get(field, field)
            raise ApiError(f"{name}={shown(value)}: this server allows at most {most}", param=name)

    def error(self, error: MinillmError) -> ApiError:
        """An error that refused the request, with the request's own names."""
        if isinstance(error, EngineStateError):
            return shutting_down(str(error))
        message = str(error)
        if isinstance(error, UsageError) and error.advice is not None and error.field in ADVICE:
            message = f"{error.problem}: {ADVICE[error.field]}"
        message = re.sub(r"\w+", lambda word: self.names.get(word[0], word[0]), message)
        return refused(message, self.given)


def refused(message: str, given: Collection[str]) -> ApiError:
    """An error of the first field that its message names, of those that a request has."""
    param = next((word for word in re.findall(r"\w+", message) if word in given), None)
    return ApiError(message, param=param, code="context_length_exceeded" if "the context holds" in message else None)


def translate(body: Mapping[str, Any], endpoint: Endpoint[R], known: Mapping[str, str] | None = None) -> Translated[R]:
    """Sort the fields of a body, and convert those that the engine has in another form.

    `known`: names that the caller's request has for some of them.

    Raises:
        ApiError: a field is unknown, not done, of the wrong type, or two are names of one thing.
    """
    own = set(endpoint.request.__struct_fields__)
    read: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, value in body.items():
        if value is None:
            continue
        word = endpoint.word(name)
        field = word.ours if word is not None else name if name in FIELDS and name not in FUNCTIONS else None
        if name in own and name not in WORDS[endpoint.reader]:
            read[name] = value
        elif field is not None:
            _set(fields, names, field, value, (known or {}).get(name, name))
        elif word is None:
            raise _unknown(name, own)
        elif word.advice is not None and not word.asks_nothing(value):
            raise ApiError(f"{name} is not offered: {word.advice}", param=name, code="unsupported_parameter")
    n = fields.get("num_return_sequences", 1)
    request = convert(read, endpoint.request)
    _convert_common(request, fields, names)
    if isinstance(request, CompletionRequest):
        _convert_completion(request, fields, names)
    elif isinstance(request, ChatRequest):
        convert_chat(request, fields, names)
    _limit_thoughts(body, own, fields)
    _order_samplers(fields)
    _decide_sampling(fields, names)
    _drop_defaults(fields)
    return Translated(request, fields, {**endpoint.names, **names}, tuple(body), n if isinstance(n, int) else 1)


S = TypeVar("S")


def convert(body: Mapping[str, Any], kind: type[S]) -> S:
    """A struct from a body.

    Raises:
        ApiError: a field is missing, unknown or of the wrong type.
    """
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        param = path.rstrip("`").replace("[...]", "") or None  # which key of an object, msgspec does not say
        field = re.search(r"unknown field `(.*)`|required field `(.*)`", message)
        if field is not None:
            param = ".".join(filter(None, (param, field[1] or field[2])))
            message = "unknown field" if field[1] else "it is required"
        where = f"{param}: " if param else ""
        raise ApiError(f"{where}{message[0].lower()}{message[1:]}", param=param) from None


def _unknown(name: str, own: set[str]) -> ApiError:
    if name in FUNCTIONS:
        reason = "it takes functions, which cannot be sent"
        if name == "logits_processor":
            reason += "; logits_processors takes the names of those that the server allows"
        return ApiError(f"{name} is not offered: {reason}", param=name, code="unsupported_parameter")
    known = [*own, *foreign.renamed(API), *(field for field in FIELDS if field not in FUNCTIONS)]
    nearest = difflib.get_close_matches(name[:100], known, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {listed(known)}"
    return ApiError(f"unknown field {shown(name)}: {hint}", param=name[:100], code="unknown_parameter")


def _check(field: str, value: Any, name: str) -> None:
    """Refuse a value that a generation field cannot have.

    Raises:
        ApiError: it cannot.
    """
    try:
        read_field(field, value)
    except ParameterError as error:
        raise ApiError(str(error).replace(field, name, 1), param=name) from None


def _set(fields: dict[str, Any], names: dict[str, str], field: str, value: Any, name: str) -> None:
    """Set a generation field from the request's field `name`."""
    if field in fields:
        both = f"{names[field]} and {name}"
        raise ApiError(f"{both} set the same: leave one of them out", param=name)
    fields[field], names[field] = value, name


def _convert_common(request: GenerationRequest, fields: dict[str, Any], names: dict[str, str]) -> None:
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options has no effect without stream=true: leave it out", param="stream_options")
    if request.logit_bias:
        pairs = [[[_token(token)], _bias(token, bias)] for token, bias in request.logit_bias.items()]
        _set(fields, names, "sequence_bias", pairs, "logit_bias")
    if request.ignore_eos:
        _set(fields, names, "eos_token_id", list(request.stop_token_ids or ()), "ignore_eos")
        if request.stop_token_ids:
            names["eos_token_id"] = "stop_token_ids"
    if request.use_beam_search:
        width = getattr(request, "best_of", None) or fields.get("num_return_sequences", 1)
        _set(fields, names, "num_beams", width, "use_beam_search")
    if request.timeout is not None and not 0 < request.timeout <= 1e9:
        raise ApiError(f"timeout={request.timeout:g}: expected seconds, above 0 and at most 1e9", param="timeout")
    if request.priority is not None and abs(request.priority) >= 2**63:
        raise ApiError(f"priority={shown(request.priority)}: expected a number within 64 bits", param="priority")
    seed = fields.get("seed")
    if isinstance(seed, int) and not isinstance(seed, bool) and -(2**63) <= seed < 0:
        fields["seed"] = seed + 2**64  # OpenAI's are signed


def _token(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise ApiError(f"logit_bias: the key {shown(text)} is no token id", param="logit_bias")
    return int(text)


def _bias(token: str, bias: float) -> float:
    if not abs(bias) <= LARGE:
        raise ApiError(f"logit_bias: the bias of {token} is {bias:g}, beyond {LARGE:g}", param="logit_bias")
    return bias


def _convert_completion(request: CompletionRequest, fields: dict[str, Any], names: dict[str, str]) -> None:
    if request.logprobs is not None:
        if request.logprobs < 0:
            raise ApiError(f"logprobs={request.logprobs}: expected a number of at least 0", param="logprobs")
        fields |= {"logprobs": True, "top_logprobs": request.logprobs}
    if request.best_of is not None:
        n = fields.get("num_return_sequences", 1)
        if isinstance(n, int) and request.best_of < n:
            raise ApiError(f"best_of={request.best_of} is less than n={n}", param="best_of")
        if request.best_of > 1 and request.stream:
            raise ApiError("best_of cannot be streamed: which are best is known at the end", param="best_of")
        fields["num_return_sequences"], names["num_return_sequences"] = request.best_of, "best_of"
        fields["logprobs"] = True


def convert_chat(
    body: ChatRequest,
    fields: dict[str, Any],
    names: dict[str, str],
    name: str = "response_format",
    schema_name: str = "response_format.json_schema",
) -> None:
    """Set the guide that `response_format` asks for; `name` and `schema_name` are the API's.

    Raises:
        ApiError: it is malformed, or another guide is set.
    """
    form = body.response_format
    if form is None:
        return
    if form.type not in ("text", "json_object", "json_schema"):
        expected = 'expected "text", "json_object" or "json_schema"'
        raise ApiError(f"{name}.type={shown(form.type)}: {expected}", param=f"{name}.type")
    if form.schema is not None and (form.type == "text" or form.json_schema is not None):
        raise ApiError(f"{name}.schema goes with the type json_object, alone", param=name)
    if (form.type == "json_schema" and form.schema is None) != (form.json_schema is not None):
        raise ApiError(f"{schema_name} goes with the type json_schema", param=name)
    if form.type == "json_object" or form.schema is not None:
        _set(fields, names, "guided_json", {"type": "object"} | (form.schema or {}), name)
    elif form.json_schema is not None:
        wrong = form.json_schema.keys() - {"name", "description", "schema", "strict"}
        if wrong or not isinstance(form.json_schema.get("schema"), dict):
            problem = f"unknown field {shown(min(wrong))}" if wrong else "a schema, an object, is required"
            raise ApiError(f"{schema_name}: {problem}", param=schema_name)
        _set(fields, names, "guided_json", form.json_schema["schema"], name)


def _limit_thoughts(body: Mapping[str, Any], own: Collection[str], fields: dict[str, Any]) -> None:
    """The budget of thoughts within another field's object; -1, in other servers, is none."""
    for name, key in BUDGETS.items():
        value = body.get(name)
        if isinstance(value, Mapping) and name not in own and value.get(key) is not None:
            fields.setdefault("max_thinking_tokens", value[key])
    if _is_number(fields.get("max_thinking_tokens"), -1):
        del fields["max_thinking_tokens"]


def _order_samplers(fields: dict[str, Any]) -> None:
    """As in llama.cpp's server, a sampler that the order does not name is left out; so is XTC beyond one half."""
    if _is_number(fields.get("xtc_probability"), 0) or _above(fields.get("xtc_threshold"), 0.5):
        fields.pop("xtc_probability", None)
    if "samplers" in fields:
        _check("samplers", fields["samplers"], "samplers")
        order = read_field("samplers", fields.pop("samplers"))
        if order:
            fields["samplers"] = order
            for field, _ in unnamed(order):
                fields.pop(field, None)


def _decide_sampling(fields: dict[str, Any], names: dict[str, str]) -> None:
    """Greedy search at temperature or top_p 0; beam search without sampling, unless the request asks for it.

    As in vLLM, a top_k of -1 is no limit.
    """
    if _is_number(fields.get("top_k"), -1):
        fields["top_k"] = 0
    beams = fields.get("num_beams")
    if _is_number(fields.get("temperature"), 0) or _is_number(fields.get("top_p"), 0):
        for name in ("temperature", "top_p"):
            if _is_number(fields.get(name), 0):
                del fields[name]
        for name in ("do_sample", "temperature", *NO_FILTER, "seed"):  # without effect on the most likely token
            if name in fields and (name != "top_k" or not fields.get("penalty_alpha")):
                _check(name, fields.pop(name), names.get(name, name))
        fields["do_sample"] = False
        results = fields.get("num_return_sequences", 1)
        others = fields.get("penalty_alpha") or fields.get("mirostat")
        if isinstance(results, int) and results > 1 and beams in (None, 1) and not others:
            # the same text each time, as in OpenAI's API; of equal logits the first
            fields |= {"do_sample": True, "top_k": 1, "top_p": 1e-6}
    elif isinstance(beams, int) and beams > 1 and "temperature" not in fields:
        fields.setdefault("do_sample", False)
        if fields["do_sample"] is False and "seed" in fields:
            _check("seed", fields.pop("seed"), "seed")


def _drop_defaults(fields: dict[str, Any]) -> None:
    """Drop fields that ask for nothing: the default of something that refines what the request does not ask for.

    Clients of llama.cpp's server send DRY's with every request.
    """
    for name in [*fields]:
        need, default, value = FIELDS[name].needs, FIELDS[name].default, fields[name]
        if need in SWITCHED_OFF and not fields.get(need):
            del fields[name]
            continue
        if need is None or value != default or isinstance(value, bool) != isinstance(default, bool):
            continue
        asked = fields.get(need, need == "do_sample")
        if not asked or (need in ("num_beams", "num_beam_groups") and _is_number(asked, 1)):
            del fields[name]


def _above(value: Any, number: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > number


def _is_number(value: Any, number: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == number
