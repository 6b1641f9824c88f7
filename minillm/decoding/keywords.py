"""Keyword arguments of the engine's methods as typed dictionaries: editors complete them, mypy finds a misspelt one.

`GenerationConfig` has the explanations of the fields. Type checkers read a class only as it is written, so names and
types stand here a second time; `tests/test_keywords.py` holds them equal to the declarations in `settings`.

Source: PEP 692, "Using TypedDict for more precise **kwargs typing".
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, get_args

Method = TypeVar("Method", bound=Callable[..., Any])


class GenerationFields(TypedDict, total=False):
    """The fields of `GenerationConfig`; None means unset."""

    max_new_tokens: int | None
    max_length: int | None
    min_new_tokens: int | None
    min_length: int | None
    decoder_prompt: str | Sequence[int] | None
    decoder_start_token_id: int | None
    eos_token_id: int | Sequence[int] | None
    stop_strings: str | Sequence[str] | None
    include_stop: bool | None
    num_return_sequences: int | None
    no_repeat_ngram_size: int | None
    encoder_no_repeat_ngram_size: int | None
    suppress_tokens: Sequence[int] | None
    begin_suppress_tokens: Sequence[int] | None
    bad_words_ids: Sequence[Sequence[int]] | None
    sequence_bias: Mapping[Sequence[int], float] | Sequence[Sequence[Any]] | None
    forced_bos_token_id: int | None
    forced_eos_token_id: int | Sequence[int] | None
    exponential_decay_length_penalty: tuple[int, float] | None
    prefix_allowed_tokens_fn: Callable[[int, Any], Sequence[int]] | None
    logits_processor: Sequence[Callable[..., Any]] | None
    stopping_criteria: Sequence[Callable[[Any, Any], Any]] | None
    lora: str | None
    use_cache: bool | None

    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    top_h: float | None
    top_n_sigma: float | None
    mirostat: int | None
    mirostat_tau: float | None
    mirostat_eta: float | None
    repetition_penalty: float | None
    encoder_repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None

    num_beams: int | None
    length_penalty: float | None
    early_stopping: bool | Literal["never"] | None
    renormalize_logits: bool | None
    num_beam_groups: int | None
    diversity_penalty: float | None
    penalty_alpha: float | None
    contrastive_alpha: float | None
    amateur_temperature: float | None

    guided_json: Mapping[str, Any] | str | None
    guided_regex: str | None
    guided_grammar: str | None
    guided_choice: str | Sequence[str] | None

    num_assistant_tokens: int | None
    prompt_lookup_num_tokens: int | None
    max_matching_ngram_size: int | None
    lookahead_window: int | None
    lookahead_ngram_size: int | None
    lookahead_guesses: int | None

    echo: bool | None
    skip_special_tokens: bool | None
    logprobs: bool | None
    top_logprobs: int | None


class RequestFields(GenerationFields, total=False):
    """Those of a request: also its place in the queue and its limit in time, as in `Engine.generate`."""

    priority: int
    timeout: float | None
    defaults: Mapping[str, Any] | None


class ChatFields(RequestFields, total=False):
    """Those of a conversation: also the arguments of `Engine.render_chat`."""

    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any] | None


def with_fields(method: Method) -> Method:
    """Give a method that takes `**fields: Unpack[...]` a signature with each field, by which notebooks complete them.

    It is for those who ask at run time, IPython and `help`; type checkers read the annotation itself.
    """
    signature = inspect.signature(method)
    *own, fields = signature.parameters.values()
    [kind] = get_args(fields.annotation)
    named = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if type(None) in get_args(hint) else inspect.Parameter.empty,
            annotation=hint,
        )
        for name, hint in kind.__annotations__.items()
    ]
    method.__signature__ = signature.replace(parameters=[*own, *named])  # type: ignore[attr-defined]
    return method
