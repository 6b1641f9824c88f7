"""Requests, responses and errors of OpenAI's API, with its field names.

Source: OpenAI's API reference (completions, chat, models); what is marked vLLM is from the reference of vLLM's server.
The structs of requests have the fields that the server itself reads. A request may also have any generation field of
the engine, under its own name (temperature, top_k, num_beams) or OpenAI's (max_tokens, n, stop): see `translate`.
"""

import json
import math
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ..errors import printable


class ApiError(Exception):
    """A request that cannot be answered, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        type: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(printable(message))
        self.param, self.code, self.status, self.type = param and printable(param), code, status, type
        self.headers = headers or {}

    def body(self) -> bytes:
        """The error as JSON."""
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def internal_error(error: Exception) -> ApiError:
    """The failure of one request inside the engine (a guide that nothing satisfies, NaN in the logits)."""
    return ApiError(f"the request failed: {error}", status=500, type="server_error", code="internal_error")


# --- reading ----------------------------------------------------------------------------------------------------------


def read_json(body: bytes) -> dict[str, Any]:
    """The JSON object of a request's body.

    Raises:
        ApiError: it is not UTF-8, not JSON, not an object, nested too deeply, or has a key twice, a NaN, half a
            surrogate pair, or a number that no float holds.
    """
    try:
        text = body.decode("utf-8")
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ApiError(f"the body should be UTF-8 text; byte {error.start} is not") from None
    except UnicodeEncodeError:
        raise ApiError("the body has half a surrogate pair, such as \\ud800: no text has that") from None
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ApiError(f"the body is not valid JSON: {error.msg} at character {error.pos}") from None
    except ValueError as error:  # ours, and Python's about integers of more than 4300 digits
        reason = "an integer has too many digits" if "digits" in str(error) else str(error)
        raise ApiError(f"the body is not valid JSON: {reason}") from None
    if not isinstance(found, dict):
        raise ApiError(f"the body should be a JSON object, found {type(found).__name__}")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r:.100} occurs twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text:.40} is too large")
    return value


# --- requests ---------------------------------------------------------------------------------------------------------


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
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """In log-probabilities, "token_id:5" for the text of token 5"""


class CompletionRequest(GenerationRequest, kw_only=True):
    """/v1/completions."""

    prompt: Any
    """A text, a list of texts, token ids, or a list of lists of token ids"""
    best_of: int | None = None
    logprobs: int | None = None
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


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """/tokenize (vLLM): of a text, or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool | None = None
    """By default True of a text, False of a conversation, whose template writes them"""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """/detokenize (vLLM)."""

    model: str | None = None
    tokens: list[int]


# --- responses --------------------------------------------------------------------------------------------------------


class PromptTokensDetails(Struct):
    """How much of a prompt was found in the prefix cache."""

    cached_tokens: int


class Usage(Struct):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int) -> "Usage":
        """The counts of one answer."""
        return cls(prompt, completion, prompt + completion, PromptTokensDetails(cached))


class LegacyLogprobs(Struct):
    """Log-probabilities in completions: of each token, from the same place of four lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]
    """Where each token begins in the choice's text, in characters"""


class TopLogprob(Struct):
    """One of the most likely tokens at a position of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    """A token of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int] | None
    """UTF-8; several tokens may make one character. None without a tokenizer"""
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities in a chat."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionChoice(Struct, kw_only=True):
    """One result of one prompt."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """vLLM: the stop string or token of `stop_token_ids` that ended it"""
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(Struct, kw_only=True):
    """The answer of /v1/completions."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class AssistantMessage(Struct, kw_only=True):
    """An answer in a chat."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[Any] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    """One of the n answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatResponse(Struct, kw_only=True):
    """The answer of /v1/chat/completions."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelCard(Struct, kw_only=True):
    """A model of /v1/models."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "minillm"
    root: str
    parent: str | None = None
    """The model that a LoRA adapter belongs to"""
    max_model_len: int
    """vLLM: positions of the context"""


class ModelList(Struct):
    """/v1/models."""

    data: list[ModelCard]
    object: str = "list"


class TokenizeResponse(Struct):
    """/tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(Struct):
    """/detokenize."""

    prompt: str
