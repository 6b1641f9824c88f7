"""Generation parameters: `GenerationConfig` as the user set it, and `Settings` with every field resolved.

Names, defaults and meanings are those of transformers' GenerationConfig; presence_penalty, frequency_penalty, logprobs,
top_logprobs and echo are OpenAI's; seed and include_stop are our own. `resolving` decides each field by the first that
sets it: the user, the checkpoint's generation_config.json, transformers' defaults.

Two kinds of field are never silently ignored: unsupported ones, and those without effect given the other fields (a
temperature without sampling). If the user sets one, that is an error. If it comes from the checkpoint, the first kind
is reported once as a warning when the file is read, the second falls back to its default.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from ..errors import ParameterError, shown
from .fields import refuse_unknown
from .guided import GUIDES
from .readers import ByIdentity


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Generation parameters as the user set them; None means unset.

    Values are checked by `resolve`, once the model and its vocabulary are known.

    Attributes:
        max_new_tokens: tokens to generate at most (20 if neither this nor max_length is given).
        max_length: the same with the prompt counted; conflicts with max_new_tokens.
        min_new_tokens: tokens to generate before an end-of-sequence token is allowed.
        min_length: the same with the prompt counted; conflicts with min_new_tokens.
        do_sample: sample the tokens instead of taking the most likely one.
        temperature: divides the logits, > 0; needs do_sample, like the next four.
        top_k: sample from the k best (default 50; 0 means from all); candidates of contrastive search.
        top_p: sample from the best that together reach this probability, in (0, 1].
        min_p: sample from tokens at least this many times as likely as the best, in [0, 1].
        seed: of the random draws, in [0, 2**64); without one each request gets a fresh seed.
        repetition_penalty: > 0; above 1 makes tokens seen in prompt or output less likely, once per distinct token.
        presence_penalty: subtracted from the logit of every token generated so far.
        frequency_penalty: subtracted from the logit of each generated token, times its count.
        guided_json: a JSON schema, as a dict or as text, that the generated text satisfies (limits: see `guided.py`).
        guided_regex: a regular expression (Rust's notation) that the whole generated text matches.
        guided_grammar: a context-free grammar (Lark's notation, as llguidance reads it) that the text follows.
        guided_choice: up to 10,000 texts to choose from. At most one of these four, of at most 100,000 characters.
        num_return_sequences: completions per prompt; more than 1 needs do_sample or as many beams. Beam search
            returns fewer, but at least one, if a guide, processors or the vocabulary do not allow so many.
        eos_token_id: the token or tokens that end a sequence; an empty sequence means none.
        stop_strings: the text or texts that end a sequence; up to 10,000, of 100,000 characters in total. They are
            matched against the returned text, without special tokens; one that spells a special token in full
            adds that token to eos_token_id.
        include_stop: keep the stop string at the end of the text; needs stop_strings.
        num_beams: width of beam search; 1 means no beam search.
        length_penalty: exponent of the length that beam scores are divided by; needs num_beams > 1.
        early_stopping: True, False or "never", as in transformers; needs num_beams > 1.
        num_beam_groups: groups of diverse beam search, which avoid each other's tokens; must divide num_beams.
        diversity_penalty: subtracted for each choice of the token by an earlier group; needs num_beam_groups > 1.
        penalty_alpha: weight, up to 1, of dissimilarity to the context against probability in contrastive search among
            the top_k most likely tokens; needs top_k.
        use_cache: False recomputes the whole sequence for each token.
        logprobs: return the log-probability of each chosen token.
        top_logprobs: also return the log-probabilities of this many best tokens; above 0 implies logprobs.
        prompt_lookup_num_tokens: guess this many tokens by prompt lookup; 0 switches it off.
        max_matching_ngram_size: longest n-gram that prompt lookup searches for (default 2); needs the above.
        lookahead_window: number of positions ahead in the window of lookahead decoding; 0 switches it off.
        lookahead_ngram_size: length of its n-grams, the newest token included (default 3); needs the above.
        lookahead_guesses: n-grams verified at once (default 5); needs lookahead_window.
        num_assistant_tokens: tokens that the engine's draft model guesses (default 5; 0 leaves it out).
        contrastive_alpha: share of the best token's probability that makes a token eligible for contrastive decoding,
            in [0, 1] (default 0.1); needs an engine with an amateur model.
        amateur_temperature: divides the amateur's logits, > 0; likewise.
        echo: prepend the prompt to the text, and its tokens' log-probabilities to the others.

        top_h: sample from the best that hold this share of the top 100's entropy, in (0, 1]; needs do_sample, like the
            next five.
        top_n_sigma: sample from tokens at most this many standard deviations of the logits below the best; 0: no limit.
        typical_p: sample from the tokens of the most typical surprise that together reach this probability, in (0, 1].
        epsilon_cutoff: sample from tokens with at least this probability, in [0, 1).
        eta_cutoff: the same with a threshold that falls with the entropy, in [0, 1).
        mirostat: 2 samples by Mirostat 2.0, which replaces all filters but temperature; 0 switches it off.
        mirostat_tau: Mirostat's target surprise in bits per token (default 5); needs mirostat.
        mirostat_eta: Mirostat's learning rate (default 0.1); needs mirostat.

        sequence_bias: added to the score of the token that completes a sequence: [[token ids, bias], ...] or
            {token ids: bias}; -inf forbids.
        no_repeat_ngram_size: no n-gram of this size occurs twice, prompt included; 0: no limit.
        bad_words_ids: forbidden token sequences.
        prefix_allowed_tokens_fn: (index of the prompt in the list, token ids so far) -> allowed next ids.
        forced_bos_token_id: the token that follows a prompt of one token.
        forced_eos_token_id: the token or tokens allowed at the last position before the length limit.
        exponential_decay_length_penalty: (start, factor): after `start` new tokens the end becomes more likely by
            this factor with each token.
        suppress_tokens: forbidden tokens.
        begin_suppress_tokens: tokens forbidden at the first position.
        logits_processor: your own processors, each (history, logits [N, V], xp) -> logits; see `processors`.
        renormalize_logits: renormalise the processed scores to log-probabilities; needs num_beams > 1.

    Raises:
        ParameterError: an unknown field.
    """

    max_new_tokens: int | None = None
    max_length: int | None = None
    min_new_tokens: int | None = None
    min_length: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    guided_json: Mapping[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: str | Sequence[str] | None = None
    num_return_sequences: int | None = None
    eos_token_id: int | Sequence[int] | None = None
    stop_strings: str | Sequence[str] | None = None
    include_stop: bool | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    num_beam_groups: int | None = None
    diversity_penalty: float | None = None
    penalty_alpha: float | None = None
    use_cache: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int | None = None
    lookahead_window: int | None = None
    lookahead_ngram_size: int | None = None
    lookahead_guesses: int | None = None
    num_assistant_tokens: int | None = None
    contrastive_alpha: float | None = None
    amateur_temperature: float | None = None

    top_h: float | None = None
    top_n_sigma: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None

    sequence_bias: Mapping[Sequence[int], float] | Sequence[Sequence[Any]] | None = None
    no_repeat_ngram_size: int | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    prefix_allowed_tokens_fn: Callable[[int, Any], Sequence[int]] | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | Sequence[int] | None = None
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: Sequence[int] | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    logits_processor: Sequence[Callable[..., Any]] | None = None
    renormalize_logits: bool | None = None

    def __new__(cls, *positional: object, **fields: object) -> Self:
        if positional:
            raise ParameterError(f"GenerationConfig takes fields by name, found {shown(positional[0])} without one")
        refuse_unknown(fields)  # before __init__, whose TypeError has no suggestion or explanation
        return super().__new__(cls)

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "GenerationConfig":
        """A configuration from a dict of fields; None means unset, as in a transformers configuration file."""
        if not isinstance(mapping, Mapping):
            raise ParameterError(f"generation fields should be a dict of names and values, found {shown(mapping)}")
        refuse_unknown(mapping)
        return cls(**{name: value for name, value in mapping.items() if value is not None})

    def merged(self, **fields: Any) -> "GenerationConfig":
        """A copy with the given fields replaced; None leaves a field as it is."""
        refuse_unknown(fields)
        return replace(self, **{name: value for name, value in fields.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Resolved generation parameters. Hashable; the attributes are those of GenerationConfig.

    Exactly one of `max_new_tokens` and `max_length` is a number: see `new_token_limit`. `seed` is always one: fresh if
    none was set, 0 without sampling. `num_assistant_tokens` is 0 without a draft model, `amateur` is True if there is
    an amateur model. `explicit` names the fields that the user set.
    """

    max_new_tokens: int | None
    max_length: int | None
    min_new_tokens: int
    min_length: int
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    guided_json: str | None
    guided_regex: str | None
    guided_grammar: str | None
    guided_choice: tuple[str, ...] | None
    num_return_sequences: int
    eos_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    include_stop: bool
    num_beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    num_beam_groups: int
    diversity_penalty: float
    penalty_alpha: float
    use_cache: bool
    logprobs: bool
    top_logprobs: int
    echo: bool

    top_h: float | None
    top_n_sigma: float
    typical_p: float
    epsilon_cutoff: float
    eta_cutoff: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float

    sequence_bias: tuple[tuple[tuple[int, ...], float], ...]
    no_repeat_ngram_size: int
    bad_words_ids: tuple[tuple[int, ...], ...]
    prefix_allowed_tokens_fn: ByIdentity | None
    forced_bos_token_id: int | None
    forced_eos_token_id: tuple[int, ...]
    exponential_decay_length_penalty: tuple[int, float] | None
    suppress_tokens: tuple[int, ...]
    begin_suppress_tokens: tuple[int, ...]
    logits_processor: tuple[ByIdentity, ...]
    renormalize_logits: bool

    prompt_lookup_num_tokens: int
    max_matching_ngram_size: int
    lookahead_window: int
    lookahead_ngram_size: int
    lookahead_guesses: int
    num_assistant_tokens: int
    contrastive_alpha: float
    amateur_temperature: float
    amateur: bool
    explicit: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    @property
    def guide(self) -> tuple[str, Any] | None:
        """Name and value of the `guided_...` field that is set, if any."""
        return next(((name, value) for name in GUIDES if (value := getattr(self, name)) is not None), None)

    def new_token_limit(self, prompt_length: int) -> int:
        """Maximum number of tokens generated after a prompt of `prompt_length` tokens.

        Raises:
            ParameterError: max_length leaves no room for any, or a minimum that the user set cannot be reached.
        """
        if self.max_new_tokens is not None:
            name, limit = f"max_new_tokens={self.max_new_tokens}", self.max_new_tokens
        else:
            assert self.max_length is not None
            name, limit = f"max_length={self.max_length}", self.max_length - prompt_length
        if limit < 1:
            raise ParameterError(
                f"{name} leaves no room for new tokens: the prompt has {prompt_length}; raise it, or set max_new_tokens"
            )
        for minimum, least in (
            (f"min_new_tokens={self.min_new_tokens}", self.min_new_tokens),
            (f"min_length={self.min_length}", self.min_length - prompt_length),
        ):
            if least > limit and minimum.partition("=")[0] in self.explicit:
                raise ParameterError(
                    f"{minimum} cannot be reached: {name} allows {limit} new tokens after a prompt of {prompt_length}"
                )
        return limit
