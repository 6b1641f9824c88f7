"""The fields of requests that this server does not do: those without effect, and those refused with the reason.

Sources: OpenAI's API reference (chat, completions, responses), the references of vLLM's, llama.cpp's and Ollama's
servers, and what LiteLLM, OpenRouter's clients and coding agents add. A field is ignored if leaving it out gives an
answer that its sender can take for the same: labels, hints about speed, storing, billing, how a server runs. It is
refused if the answer would visibly be another: other media, a search, tokens forbidden, a prompt cut. Fields that
nobody documents are refused too, with the name that may have been meant.
"""

from typing import Any

IGNORED = frozenset(
    {"metadata", "store", "service_tier", "safety_identifier", "client_metadata", "session_id", "request_id"}
    | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "prediction", "max_tool_calls"}
    | {"truncation", "context_management", "background_options", "access_programs", "stream_tool_calls"}
    # vLLM, llama.cpp and others: how they run, and thoughts told from the answer
    | {"mm_processor_kwargs", "vllm_xargs", "guided_decoding_backend", "spaces_between_special_tokens"}
    | {"include_reasoning", "thinking_token_budget", "thinking_budget", "reasoning_format", "parse_tool_calls"}
    | {"cache_prompt", "id_slot", "slot_id", "timings_per_token", "return_progress", "keep_alive", "num_ctx"}
    | {"dry_base", "dry_allowed_length", "dry_penalty_last_n", "xtc_threshold", "dynatemp_exponent"}  # see REFUSED
    # OpenRouter, LiteLLM
    | {"reasoning", "thinking", "provider", "route", "models", "transforms", "usage", "litellm_session_id"}
)
"""Fields without effect, whatever their value"""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "function_call": ("none", "auto"),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "n": (1,),
    "num_return_sequences": (1,),
}
"""Fields that are refused -> the values, besides empty and false ones, that ask for what happens anyway"""

_TOOLS = "/v1/chat/completions has tools"
REFUSED = {
    "suffix": "minillm does not insert text: give what stands before as the prompt",
    "modalities": "minillm reads and writes text only",
    "audio": "minillm reads and writes text only",
    "image": "minillm reads and writes text only",
    "moderation": "nothing is moderated",
    "web_search_options": "minillm does not search the web",
    "functions": "give them as tools",
    "function_call": "give it as tool_choice",
    "tools": _TOOLS,
    "tool_choice": _TOOLS,
    "parallel_tool_calls": _TOOLS,
    "documents": "put their text into a message",
    "chat_template": "the model's own template is used",
    "prompt_logprobs": "set echo and logprobs of /v1/completions",
    "truncate_prompt_tokens": "shorten the prompt",
    "bad_words": "give their tokens as bad_words_ids",
    "allowed_token_ids": "forbid the others by suppress_tokens, or set a guided_... field",
    "structured_outputs": "set guided_json, guided_regex, guided_choice or guided_grammar",
    "json_schema": "its name here is guided_json",
    "grammar": "give it as guided_grammar, in the form of llguidance",
    "cache_salt": "prefixes are shared by all requests",
    "kv_transfer_params": "one server computes the whole answer",
    "logits_processors": "it takes functions, which cannot be sent",
    "extra_body": "give its fields beside the others",
    **dict.fromkeys(
        ("max_repetition_pattern_size", "min_repetition_pattern_size", "repetition_min_count"),
        "set no_repeat_ngram_size or repetition_penalty",
    ),
    **dict.fromkeys(
        ("dry_multiplier", "xtc_probability", "dynatemp_range", "samplers"),
        "the sampling fields are those of transformers",
    ),
}
"""Fields that are not done -> the reason; one that is empty or false asks for nothing"""

_STORED = "nothing is stored: give the conversation as input"
_ONE = "there is one response: ask several times"
_LENGTH = "its name here is max_output_tokens"
_CHAT = "/v1/chat/completions has it"
REFUSED_IN_RESPONSES = {
    "previous_response_id": _STORED,
    "conversation": _STORED,
    "prompt": "nothing is stored: give the text as instructions or input",
    "background": "nothing is stored: keep the connection",
    "n": _ONE,
    "num_return_sequences": _ONE,
    "use_beam_search": "set num_beams",
    "max_tokens": _LENGTH,
    "max_completion_tokens": _LENGTH,
    "max_new_tokens": _LENGTH,
    "response_format": "its name here is text.format",
    "echo": "/v1/completions has it",
    "return_token_ids": _CHAT,
    "return_tokens_as_token_ids": _CHAT,
}
"""Further fields that /v1/responses does not do"""


def is_neutral(name: str, value: Any) -> bool:
    """True if a field with this value asks for nothing, though others would be refused."""
    return not value or any(value == one and type(value) is type(one) for one in NEUTRAL.get(name, ()))
