# ruff: noqa: RUF009 - the defaults of dataclass fields are made by a function that calls `dataclasses.field`
"""Generation fields, each declared once: `GenerationConfig` as the user sets it, `Settings` with every field resolved.

A declaration in `Fields` has the type of a field, its default, its reader, the field without which it has no effect,
its flag on the command line, and its explanation. The constructor, its docstring, the resolved settings, the refusals
and the flags with their help follow from it.

Names, defaults and meanings are those of transformers' GenerationConfig; presence_penalty, frequency_penalty, logprobs,
top_logprobs and echo are OpenAI's; seed and include_stop are our own. `resolving` decides each field by the first that
sets it: the user, the checkpoint (generation_config.json, or config.json without one), the default.

Two kinds of field are never silently ignored: unsupported ones, and those without effect given the other fields (a
temperature without sampling). If the user sets one, that is an error. If it comes from the checkpoint, the first kind
is reported once as a warning when the file is read, the second falls back to its default.
"""

import inspect
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Never, Self, TypeVar, Unpack, get_args

from ..errors import ParameterError, listed, shown
from .foreign import PYTHON, TRANSFORMERS, WORDS, ignored, refused
from .keywords import GenerationFields
from .values import (
    LARGE,
    ByIdentity,
    Reader,
    biases,
    decay,
    flag,
    function,
    mirostat_version,
    number,
    phrases,
    positive,
    schema,
    sequence,
    stopping_rule,
    text,
    text_or_ids,
    texts,
    token_ids,
    whole,
)

Unset = TypeVar("Unset")
"""The type of a field that is not set: None in `GenerationConfig`, Never in `Settings`, where every field is set."""


class Setting(NamedTuple):
    """The declaration of a field."""

    group: str
    default: Any
    read: Reader[Any]
    help: str
    """The effect of the field; of a switch that is on by default, the effect of switching it off"""
    notes: str = ""
    """Further explanation for the docstring"""
    needs: str | None = None
    """The field or the additional model without which it has no effect"""
    flag: str | None = None
    """Name and value of its flag on the command line; without a value, it sets the opposite of the default"""
    advice: str | None = None
    """Second half of the error about a value that it cannot have"""
    aliases: tuple[str, ...] = ()
    """Other names of the flag, as other programs have them"""
    common: bool = False
    """True if the flag is in the short help"""


class Group(NamedTuple):
    """A group of fields, as the docstring and the command line's help show them."""

    name: str
    about: str = ""

    def field(self, default: Any, read: Reader[Any], *, help: str, expected: str | None = None, **more: Any) -> Any:
        """A dataclass field with a `Setting`. `expected` describes its values better than the reader's own words."""
        help = help.replace("{default}", f"{default:g}" if isinstance(default, float) else str(default))
        read = read if expected is None else replace(read, expected=expected)
        return field(default=None, metadata={"setting": Setting(self.name, default, read, help, **more)})


TEXT = Group("text")
SAMPLING = Group("sampling", "Greedy search by default. Each of these but the penalties turns sampling on.")
SEARCH = Group("search")
GUIDED = Group("guided", "Only text of a given form; needs the extra 'guided'.")
SPECULATION = Group("speculation", "The same distribution in fewer forward passes.")
OUTPUT = Group("output", "Log-probabilities are shown with --json.")
GROUPS = (TEXT, SAMPLING, SEARCH, GUIDED, SPECULATION, OUTPUT)

MODELS = ("draft", "amateur", "encoder")
"""Additional models that an engine may have, and the encoder of an encoder-decoder."""

NEEDS = {
    "do_sample": "do_sample=True",
    "num_beams": "num_beams above 1",
    "num_beam_groups": "num_beam_groups above 1",
    "mirostat": "mirostat=2",
    "draft": "a draft model: Engine(..., draft=...)",
    "amateur": "an amateur model: Engine(..., amateur=...)",
    "encoder": "an encoder-decoder, such as T5",
}
"""How to say what `Setting.needs` names, where its name is not enough."""


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Fields(Generic[Unset]):
    """The declarations, with the types that a user may give; `Settings` narrows those that a reader converts."""

    # fmt: off
    max_new_tokens: int | None = TEXT.field(None, whole(0), flag="--max-new-tokens N", common=True,
        aliases=("-n", "--max-tokens"), help="tokens to generate at most (default: the checkpoint's limit; without "
        "one 20, on the command line the end of the text)",
        notes="0 together with echo computes the prompt alone, for its log-probabilities.")
    max_length: int | None = TEXT.field(None, whole(1),
        help="the same with the prompt counted; conflicts with max_new_tokens")
    min_new_tokens: int | Unset = TEXT.field(0, whole(0), flag="--min-new-tokens N",
        help="tokens to generate before an end-of-sequence token is allowed")
    min_length: int | Unset = TEXT.field(0, whole(0),
        help="the same with the prompt counted; conflicts with min_new_tokens")
    decoder_prompt: str | Sequence[int] | None = TEXT.field(None, text_or_ids, needs="encoder",
        flag="--decoder-prompt TEXT", help="what the decoder's text begins with; the prompt is the encoder's text",
        notes="A text, without special tokens, or token ids. The token decoder_start_token_id precedes it.")
    decoder_start_token_id: int | None = TEXT.field(None, whole(0), needs="encoder", expected="a token id",
        flag="--decoder-start-token-id ID", help="the token before the decoder's text (default: the checkpoint's)")
    eos_token_id: int | Sequence[int] | Unset = TEXT.field((), token_ids(-math.inf),
        help="the token or tokens that end a sequence; an empty sequence means none")
    stop_strings: str | Sequence[str] | Unset = TEXT.field((), texts(), flag="--stop TEXT", common=True,
        help="stop before this text",
        notes="One or several, up to 10,000, of 100,000 characters in total. They are matched against the returned "
        "text, without special tokens; one that spells a special token in full adds that token to eos_token_id.")
    include_stop: bool | Unset = TEXT.field(False, flag, needs="stop_strings", flag="--include-stop",
        help="keep the stop string at the end of the text")
    num_return_sequences: int | Unset = TEXT.field(1, whole(1), flag="--num-return-sequences N",
        help="results for each prompt, sampled or beams (default: {default})",
        notes="More than 1 needs do_sample or as many beams. Beam search returns fewer, but at least one, if a guide, "
        "processors or the vocabulary do not allow so many.")
    no_repeat_ngram_size: int | Unset = TEXT.field(0, whole(0), flag="--no-repeat-ngram-size N",
        help="never repeat a sequence of this many tokens, prompt included (0: no limit)")
    encoder_no_repeat_ngram_size: int | Unset = TEXT.field(0, whole(0), flag="--encoder-no-repeat-ngram-size N",
        help="never repeat a sequence of this many tokens of the prompt (0: no limit)",
        notes="Of an encoder-decoder the encoder's.")
    suppress_tokens: Sequence[int] | Unset = TEXT.field((), token_ids(), flag="--suppress-tokens ID [ID ...]",
        help="never generate these tokens")
    begin_suppress_tokens: Sequence[int] | Unset = TEXT.field((), token_ids(),
        flag="--begin-suppress-tokens ID [ID ...]", help="never begin with these tokens")
    bad_words_ids: Sequence[Sequence[int]] | Unset = TEXT.field((), phrases, help="forbidden token sequences")
    sequence_bias: Mapping[Sequence[int], float] | Sequence[Sequence[Any]] | Unset = TEXT.field((), biases,
        help="add to the score of the token that completes a sequence: [[token ids, bias], ...] or "
        "{token ids: bias}; -inf forbids")
    forced_bos_token_id: int | None = TEXT.field(None, whole(0), expected="a token id",
        flag="--forced-bos-token-id ID", help="the token that follows a prompt of one token",
        notes="Of an encoder-decoder that of the decoder: the language of mBART's translation.")
    forced_eos_token_id: int | Sequence[int] | Unset = TEXT.field((), token_ids(), flag="--forced-eos-token-id ID",
        help="the token allowed at the last position before the length limit")
    exponential_decay_length_penalty: tuple[int, float] | None = TEXT.field(None, decay,
        help="(start, factor): after `start` new tokens the end becomes more likely by this factor with each token")
    prefix_allowed_tokens_fn: Callable[[int, Any], Sequence[int]] | None = TEXT.field(None,
        function("a function (batch_id, token_ids) -> allowed token ids", 2),
        help="(index of the prompt in the list, token ids so far) -> allowed next ids")
    logits_processor: Sequence[Callable[..., Any]] | Unset = TEXT.field((),
        sequence("a sequence of functions (history, logits, xp) -> logits or (input_ids, scores) -> scores",
            function("", 3, 2)),
        help="your own processors, each (history, logits [N, V], xp) -> logits; see `processors`",
        notes="Or transformers', each (input_ids [N, T], scores [N, V]) -> scores; see `functions`. The N sequences "
        "are those of one request.")
    stopping_criteria: Sequence[Callable[[Any, Any], Any]] | Unset = TEXT.field((),
        sequence("a sequence of functions (input_ids, scores) -> bool", function("", 2)),
        help="your own reasons to stop, as transformers': each (input_ids [1, T], None) -> bool, or a tensor of one",
        notes="They are asked after each token, which stays; prompt included. See `functions`.")
    lora: str | None = TEXT.field(None, text, flag="--lora NAME", expected="the name of an adapter, as text",
        help="apply this one of the engine's LoRA adapters",
        notes="Engine(..., adapters={name: folder}) has them; helper models run without.")
    use_cache: bool | Unset = TEXT.field(True, flag, flag="--no-cache",
        help="recompute the whole sequence for each token")

    do_sample: bool | Unset = SAMPLING.field(False, flag, flag="--sample",
        help="sample tokens instead of taking the most likely one")
    temperature: float | Unset = SAMPLING.field(1.0, positive, needs="do_sample", flag="--temperature T", common=True,
        aliases=("--temp",),
        advice="for greedy decoding set do_sample=False and no temperature",
        help="divide the logits by this: above 1 flattens")
    top_k: int | Unset = SAMPLING.field(50, whole(0), needs="do_sample", flag="--top-k K", common=True,
        expected="a whole number of at least 1, or 0 for no limit",
        help="keep this many of the best (default: {default}; 0: all)",
        notes="Also the candidates of contrastive search.")
    top_p: float | Unset = SAMPLING.field(1.0, number(0, 1, above=True), needs="do_sample", flag="--top-p P",
        common=True, help="keep the best that together reach this probability")
    min_p: float | Unset = SAMPLING.field(0.0, number(0, 1), needs="do_sample", flag="--min-p P",
        help="keep tokens at least this many times as likely as the best (0: all)")
    seed: int | Unset = SAMPLING.field(None, whole(0, 2**64), needs="do_sample", flag="--seed SEED", common=True,
        expected="a whole number from 0 to 2**64 - 1",
        help="seed of the random draws (default: a fresh one)",
        notes="A prompt draws the same whatever runs beside it. The prompts of a list with one seed draw differently, "
        "each by the seed and its index.")
    typical_p: float | Unset = SAMPLING.field(1.0, number(0, 1, above=True), needs="do_sample", flag="--typical-p P",
        help="keep those of the most typical surprise that together reach this probability")
    epsilon_cutoff: float | Unset = SAMPLING.field(0.0, number(0, 1, below=True), needs="do_sample",
        flag="--epsilon-cutoff P", help="keep tokens of at least this probability (0: all)")
    eta_cutoff: float | Unset = SAMPLING.field(0.0, number(0, 1, below=True), needs="do_sample",
        flag="--eta-cutoff P", help="as epsilon_cutoff, with a threshold that falls with the entropy (0: all)")
    top_h: float | None = SAMPLING.field(None, number(0, 1, above=True), needs="do_sample", flag="--top-h H",
        help="keep the best that hold this share of the entropy of the best 100")
    top_n_sigma: float | Unset = SAMPLING.field(0.0, number(0, LARGE), needs="do_sample", flag="--top-n-sigma N",
        expected="a number above 0, or 0 for no limit",
        help="keep logits within this many standard deviations of the largest (0: all)")
    mirostat: int | Unset = SAMPLING.field(0, mirostat_version, needs="do_sample", flag="--mirostat 2",
        help="2 for Mirostat 2.0, which holds the surprise at a target; it replaces all filters but temperature")
    mirostat_tau: float | Unset = SAMPLING.field(5.0, number(0, LARGE, above=True), needs="mirostat",
        flag="--mirostat-tau BITS", help="Mirostat's target surprise in bits per token (default: {default})")
    mirostat_eta: float | Unset = SAMPLING.field(0.1, number(0, LARGE, above=True), needs="mirostat",
        flag="--mirostat-eta X", help="Mirostat's learning rate (default: {default})")
    repetition_penalty: float | Unset = SAMPLING.field(1.0, positive, flag="--repetition-penalty X",
        help="above 1 makes tokens seen in prompt or output less likely, once per distinct token")
    encoder_repetition_penalty: float | Unset = SAMPLING.field(1.0, positive, flag="--encoder-repetition-penalty X",
        help="above 1 makes tokens of the prompt more likely, once per distinct token",
        notes="Of an encoder-decoder the encoder's.")
    presence_penalty: float | Unset = SAMPLING.field(0.0, number(-LARGE, LARGE), flag="--presence-penalty X",
        help="subtract this from the logit of every token generated so far")
    frequency_penalty: float | Unset = SAMPLING.field(0.0, number(-LARGE, LARGE), flag="--frequency-penalty X",
        help="subtract this from the logit of every token generated so far, times its count")

    num_beams: int | Unset = SEARCH.field(1, whole(1), flag="--num-beams N", common=True,
        help="width of beam search (default: {default}, no beam search)")
    length_penalty: float | Unset = SEARCH.field(1.0, number(-50, 50), needs="num_beams", flag="--length-penalty X",
        help="exponent of the length that a beam's score is divided by; above 0 favours long ones")
    early_stopping: bool | Literal["never"] | Unset = SEARCH.field(False, stopping_rule, needs="num_beams",
        flag="--early-stopping WHEN",
        help="end with num_beams results (yes, True), once better ones are unlikely (no, False) or impossible (never)")
    renormalize_logits: bool | Unset = SEARCH.field(False, flag, needs="num_beams",
        help="renormalise the processed scores to log-probabilities")
    num_beam_groups: int | Unset = SEARCH.field(1, whole(1), flag="--num-beam-groups N",
        help="groups of diverse beam search, which avoid each other's tokens; must divide num_beams")
    diversity_penalty: float | Unset = SEARCH.field(0.0, number(0, LARGE), needs="num_beam_groups",
        flag="--diversity-penalty X", help="subtract this from a token's score for each earlier group that chose it")
    penalty_alpha: float | Unset = SEARCH.field(0.0, number(0, 1), flag="--penalty-alpha A",
        help="contrastive search among top_k tokens: weight of dissimilarity to the context (0: off)")
    contrastive_alpha: float | Unset = SEARCH.field(0.1, number(0, 1), needs="amateur", flag="--contrastive-alpha A",
        help="tokens considered are at least this many times as likely as the best (default: {default})")
    amateur_temperature: float | Unset = SEARCH.field(1.0, positive, needs="amateur", flag="--amateur-temperature T",
        help="divide the amateur model's logits by this (default: {default})")

    guided_json: Mapping[str, Any] | str | None = GUIDED.field(None, schema, flag="--guided-json JSON|FILE",
        common=True, help="a JSON schema that the text satisfies",
        notes="A dict or its text. At most one of these four, of at most 100,000 characters; limits: see `guided`.")
    guided_regex: str | None = GUIDED.field(None, text, flag="--guided-regex REGEX", common=True,
        expected="a regular expression, as a text that is not empty",
        help="a regular expression that the whole text matches", notes="In Rust's notation.")
    guided_grammar: str | None = GUIDED.field(None, text, flag="--guided-grammar FILE",
        expected="a grammar in Lark's notation, as a text that is not empty",
        help="a context-free grammar in Lark's notation that the text follows", notes="As llguidance reads it.")
    guided_choice: str | Sequence[str] | None = GUIDED.field(None, texts(1), flag="--guided-choice TEXT", common=True,
        help="a text to choose from", notes="Up to 10,000.")

    num_assistant_tokens: int | Unset = SPECULATION.field(5, whole(0), needs="draft", flag="--num-assistant-tokens N",
        expected="a whole number of at least 1, or 0 to leave the draft model out",
        help="tokens that the draft model guesses (default: {default}; 0: none)")
    prompt_lookup_num_tokens: int | Unset = SPECULATION.field(0, whole(0), flag="--prompt-lookup-num-tokens N",
        expected="a whole number of at least 1, or 0 for none",
        help="guess this many tokens by looking back in the text (0: none)")
    max_matching_ngram_size: int | Unset = SPECULATION.field(2, whole(1), needs="prompt_lookup_num_tokens",
        flag="--max-matching-ngram-size N", help="longest n-gram that prompt lookup searches for (default: {default})")
    lookahead_window: int | Unset = SPECULATION.field(0, whole(0), flag="--lookahead-window W",
        expected="a whole number of at least 1, or 0 for none",
        help="guess by Jacobi iteration this many positions ahead (0: none)")
    lookahead_ngram_size: int | Unset = SPECULATION.field(3, whole(2), needs="lookahead_window",
        flag="--lookahead-ngram-size N", help="length of lookahead's n-grams (default: {default})",
        notes="The newest token is included.")
    lookahead_guesses: int | Unset = SPECULATION.field(5, whole(1), needs="lookahead_window",
        flag="--lookahead-guesses G", help="n-grams that lookahead verifies at once (default: {default})")

    echo: bool | Unset = OUTPUT.field(False, flag, flag="--echo", common=True,
        help="prepend the prompt to the text",
        notes="With logprobs, also its tokens' log-probabilities to the others.")
    skip_special_tokens: bool | Unset = OUTPUT.field(True, flag, flag="--keep-special-tokens",
        help="write special tokens out in the text, except the one that ends it")
    logprobs: bool | Unset = OUTPUT.field(False, flag, flag="--logprobs",
        expected="True or False; for alternatives set top_logprobs",
        help="return the log-probability of each chosen token")
    top_logprobs: int | Unset = OUTPUT.field(0, whole(0), flag="--top-logprobs N",
        help="return also those of this many best tokens", notes="Above 0 implies logprobs.")
    # fmt: on


FIELDS: dict[str, Setting] = {one.name: one.metadata["setting"] for one in fields(Fields)}
"""Name of a field -> its declaration."""
GUIDES = tuple(name for name, setting in FIELDS.items() if setting.group == "guided")
"""Fields that set a guide; a request has at most one of them."""


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(Fields[None]):
    """Generation parameters as the user set them; None means unset."""

    __signature__: ClassVar[inspect.Signature]

    def __new__(cls, *positional: object, **given: Unpack[GenerationFields]) -> Self:
        if positional:
            raise ParameterError(f"GenerationConfig takes fields by name, found {shown(positional[0])} without one")
        refuse_unknown(given)  # before __init__, whose TypeError has no suggestion or explanation
        return super().__new__(cls)

    def __repr__(self) -> str:
        return f"GenerationConfig({', '.join(f'{name}={value!r}' for name, value in self._given().items())})"

    def _repr_html_(self) -> str:
        from ..text.display import table_html

        return table_html("GenerationConfig", {name: repr(value) for name, value in self._given().items()})

    def _given(self) -> dict[str, Any]:
        """The fields that are set."""
        return {name: value for name in FIELDS if (value := getattr(self, name)) is not None}

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "GenerationConfig":
        """A configuration from a dict of fields; None means unset, as in a transformers configuration file.

        Example:
            >>> GenerationConfig.from_dict({"max_new_tokens": 8, "top_k": None})
            GenerationConfig(max_new_tokens=8)
        """
        if not isinstance(mapping, Mapping):
            raise ParameterError(f"generation fields should be a dict of names and values, found {shown(mapping)}")
        refuse_unknown(mapping)
        return cls(**{name: value for name, value in mapping.items() if value is not None})

    def merged(self, **given: Unpack[GenerationFields]) -> "GenerationConfig":
        """A copy with the given fields replaced; None leaves a field as it is.

        Example:
            >>> GenerationConfig(num_beams=4).merged(max_new_tokens=8)
            GenerationConfig(max_new_tokens=8, num_beams=4)
        """
        refuse_unknown(given)
        values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return replace(self, **values)


def _document(group: Group) -> Iterator[str]:
    """The section of a group in GenerationConfig's docstring."""
    yield f"{group.name.capitalize()}:"
    for name, setting in FIELDS.items():
        if setting.group == group.name:
            opposite = "False: " if setting.default is True else ""
            needs = f"; needs {NEEDS.get(setting.needs, setting.needs)}" if setting.needs else ""
            text = f"{name}: {opposite}{setting.help}{needs}. {setting.notes}".rstrip()
            indents: dict[str, Any] = {"initial_indent": "    ", "subsequent_indent": "        "}
            yield textwrap.fill(text, 116, break_on_hyphens=False, **indents)
    yield ""


_SECTIONS = "\n".join(line for group in GROUPS for line in _document(group))
GenerationConfig.__doc__ = f"""Generation parameters as the user set them; None means unset.

Values are checked when a request is made, once the model and its vocabulary are known.

{_SECTIONS}
Raises:
    ParameterError: an unknown field.

Example:
    >>> config = GenerationConfig(temperature=0.8, top_p=0.9, seed=7)
    >>> config
    GenerationConfig(temperature=0.8, top_p=0.9, seed=7)
    >>> engine.generate("Once upon a time", config, do_sample=True, max_new_tokens=4).text
    ' there was a kind'
"""
GenerationConfig.__signature__ = inspect.Signature(
    [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
        for name, kind in Fields.__annotations__.items()
        for hint in [kind[None] if Unset in get_args(kind) else kind]
    ]
)


@dataclass(frozen=True, kw_only=True)
class Settings(Fields[Never]):
    """Resolved generation parameters. Hashable; the attributes are those of GenerationConfig.

    Exactly one of `max_new_tokens` and `max_length` is a number: see `resolving.new_token_limit`. `seed` is always one:
    fresh if none was set, 0 without sampling. `num_assistant_tokens` is 0 without a draft model.
    """

    decoder_prompt: str | tuple[int, ...] | None
    eos_token_id: tuple[int, ...]
    stop_strings: tuple[str, ...]
    guided_json: str | None
    guided_choice: tuple[str, ...] | None
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...]
    bad_words_ids: tuple[tuple[int, ...], ...]
    suppress_tokens: tuple[int, ...]
    begin_suppress_tokens: tuple[int, ...]
    forced_eos_token_id: tuple[int, ...]
    prefix_allowed_tokens_fn: ByIdentity | None
    logits_processor: tuple[ByIdentity, ...]
    stopping_criteria: tuple[ByIdentity, ...]
    amateur: bool
    """True if the engine has an amateur model"""
    explicit: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    """The fields that the user set"""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a sequence."""
        return self.eos_token_id

    @property
    def guide(self) -> tuple[str, Any] | None:
        """Name and value of the `guided_...` field that is set, if any."""
        return next(((name, value) for name in GUIDES if (value := getattr(self, name)) is not None), None)


# fmt: off
OWN_FIELDS = frozenset({
    "decoder_prompt", "include_stop", "prefix_allowed_tokens_fn", "logits_processor", "stopping_criteria", "lora",
    "seed", "top_n_sigma", "mirostat", "mirostat_tau", "mirostat_eta", "presence_penalty", "frequency_penalty",
    "contrastive_alpha", "amateur_temperature", *GUIDES, "lookahead_window", "lookahead_ngram_size",
    "lookahead_guesses", "echo", "skip_special_tokens", "logprobs", "top_logprobs",
})
# fmt: on
"""Fields that transformers' GenerationConfig does not have."""


def refuse_unknown(given: Mapping[str, object]) -> None:
    """Raise ParameterError for an unknown name, or a transformers field that minillm does not support.

    A name of another engine is told ours, a misspelt one the nearest. Unsupported fields are accepted with the value
    None, which means unset: a full configuration written by transformers has many of them.
    """
    of_transformers, of_others = WORDS[TRANSFORMERS], WORDS[PYTHON]
    for name, value in given.items():
        if name in FIELDS or (value is None and name in of_transformers):
            continue
        if name in of_transformers:
            advice = of_transformers[name].advice
            effect = "has no effect in minillm" if advice is None else "minillm does not support"
            raise ParameterError(f"{name} is a field of transformers that {effect}: {advice or 'leave it out'}")
        if name in of_others:
            raise ParameterError(f"unknown generation field {shown(name)}: use {of_others[name].ours}")
        import difflib  # only needed here

        nearest = difflib.get_close_matches(name, FIELDS, n=1) if isinstance(name, str) else []
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"expected one of {listed(FIELDS)}"
        raise ParameterError(f"unknown generation field {shown(name)}: {hint}")


def unsupported(checkpoint: Mapping[str, object]) -> list[str]:
    """Names of the generation fields of a checkpoint that minillm does not support."""
    return [
        name
        for name, value in checkpoint.items()
        if name not in FIELDS and name not in ignored(TRANSFORMERS) and not _has_no_effect(name, value)
    ]


def _has_no_effect(name: str, value: object) -> bool:
    word = WORDS[TRANSFORMERS].get(name)
    return value in (None, [], {}, *(() if word is None else word.neutral))


def model_config_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The generation fields in a config.json, where checkpoints of before transformers 4.26 have them.

    As transformers reads them (`GenerationConfig.from_model_config`): null counts as absent, the fields of a nested
    decoder fill in what the outer ones leave out, and `force_bos_token_to_be_generated`, of older releases of BART,
    forces the token that begins a text. Special tokens are left to the model's configuration, and `use_cache`, which
    training switches off and no text depends on, is left out.
    """
    names = (FIELDS.keys() - OWN_FIELDS - {"eos_token_id", "use_cache"}) | refused(TRANSFORMERS).keys()
    nested = next((raw[name] for name in ("decoder", "generator", "text_config") if raw.get(name)), None)
    forced = {"forced_bos_token_id": raw.get("bos_token_id")} if raw.get("force_bos_token_to_be_generated") else {}
    sources = (nested if isinstance(nested, Mapping) else {}, raw, forced)
    return {name: value for source in sources for name, value in source.items() if name in names and value is not None}
