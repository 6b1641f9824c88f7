"""Generation fields, each declared once: type, default, reader, what it needs, its flag, and its explanation.

The typed keywords of the engine's methods are the declarations themselves: entries of a `TypedDict`, whose `Annotated`
types carry a `Setting`. The table `FIELDS` is read from them; the attributes of `GenerationConfig` and `Settings`, the
documentation, the refusals and the flags with their help follow from the table.

Names, defaults and meanings are those of transformers' GenerationConfig; presence_penalty, frequency_penalty, logprobs,
top_logprobs and echo are OpenAI's; seed and include_stop are our own.

Source: PEP 692, "Using TypedDict for more precise **kwargs typing".
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

from .field_values import (
    biases,
    constraint,
    decay,
    exit_layers,
    forced_phrases,
    forced_texts,
    function,
    markers,
    mirostat_version,
    options,
    phrases,
    potential,
    processor,
    schema,
    stopping_rule,
    text_or_ids,
    texts,
    token_ids,
)
from .sampler_order import sampler_names
from .values import LARGE, Reader, flag, number, positive, sequence, text, whole
from .watermark_config import watermarking


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

    def field(self, default: Any, read: Reader[Any], *, help: str, expected: str | None = None, **more: Any) -> Setting:
        """A declaration. `expected` describes the field's values better than the reader's own words."""
        help = help.replace("{default}", f"{default:g}" if isinstance(default, float) else str(default))
        read = read if expected is None else replace(read, expected=expected)
        return Setting(self.name, default, read, help, **more)


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
    "guidance_scale": "a guidance_scale other than 1",
    "draft": "a draft model: Engine(..., draft=...)",
    "amateur": "an amateur model: Engine(..., amateur=...)",
    "encoder": "an encoder-decoder, such as T5",
}
"""How to say what `Setting.needs` names, where its name is not enough."""


class GenerationFields(TypedDict, total=False):
    """The fields of `GenerationConfig` with the types that a user may give; None means unset."""

    # fmt: off
    max_new_tokens: Annotated[int | None, TEXT.field(None, whole(0), flag="--max-new-tokens N", common=True,
        aliases=("-n", "--max-tokens"), help="tokens to generate at most (default: the checkpoint's limit; without "
        "one 20, on the command line the end of the text)",
        notes="0 together with echo computes the prompt alone, for its log-probabilities.")]
    max_length: Annotated[int | None, TEXT.field(None, whole(1),
        help="the same with the prompt counted; conflicts with max_new_tokens")]
    min_new_tokens: Annotated[int | None, TEXT.field(0, whole(0), flag="--min-new-tokens N",
        help="tokens to generate before an end-of-sequence token is allowed")]
    min_length: Annotated[int | None, TEXT.field(0, whole(0),
        help="the same with the prompt counted; conflicts with min_new_tokens")]
    decoder_prompt: Annotated[str | Sequence[int] | None, TEXT.field(None, text_or_ids, needs="encoder",
        flag="--decoder-prompt TEXT", help="what the decoder's text begins with; the prompt is the encoder's text",
        notes="A text, without special tokens, or token ids. The token decoder_start_token_id precedes it.")]
    decoder_start_token_id: Annotated[int | None, TEXT.field(None, whole(0), needs="encoder", expected="a token id",
        flag="--decoder-start-token-id ID", help="the token before the decoder's text (default: the checkpoint's)")]
    eos_token_id: Annotated[int | Sequence[int] | None, TEXT.field((), token_ids(-math.inf),
        help="the token or tokens that end a sequence; an empty sequence means none")]
    stop_strings: Annotated[str | Sequence[str] | None, TEXT.field((), texts(), flag="--stop TEXT", common=True,
        help="stop before this text",
        notes="One or several, up to 10,000, of 100,000 characters in total. They are matched against the returned "
        "text, without special tokens; one that spells a special token in full adds that token to eos_token_id.")]
    include_stop: Annotated[bool | None, TEXT.field(False, flag, needs="stop_strings", flag="--include-stop",
        help="keep the stop string at the end of the text")]
    num_return_sequences: Annotated[int | None, TEXT.field(1, whole(1), flag="--num-return-sequences N",
        help="results for each prompt, sampled or beams (default: {default})",
        notes="More than 1 needs do_sample or as many beams. Beam search returns fewer, but at least one, if a guide, "
        "processors or the vocabulary do not allow so many.")]
    no_repeat_ngram_size: Annotated[int | None, TEXT.field(0, whole(0), flag="--no-repeat-ngram-size N",
        help="never repeat a sequence of this many tokens, prompt included (0: no limit)")]
    encoder_no_repeat_ngram_size: Annotated[int | None, TEXT.field(0, whole(0), flag="--encoder-no-repeat-ngram-size N",
        help="never repeat a sequence of this many tokens of the prompt (0: no limit)",
        notes="Of an encoder-decoder the encoder's.")]
    suppress_tokens: Annotated[Sequence[int] | None, TEXT.field((), token_ids(), flag="--suppress-tokens ID [ID ...]",
        help="never generate these tokens")]
    begin_suppress_tokens: Annotated[Sequence[int] | None, TEXT.field((), token_ids(),
        flag="--begin-suppress-tokens ID [ID ...]", help="never begin with these tokens")]
    bad_words_ids: Annotated[Sequence[Sequence[int]] | None, TEXT.field((), phrases, help="forbidden token sequences")]
    sequence_bias: Annotated[Mapping[Sequence[int], float] | Sequence[Sequence[Any]] | None, TEXT.field((), biases,
        help="add to the score of the token that completes a sequence: [[token ids, bias], ...] or "
        "{token ids: bias}; -inf forbids")]
    forced_bos_token_id: Annotated[int | None, TEXT.field(None, whole(0), expected="a token id",
        flag="--forced-bos-token-id ID", help="the token that follows a prompt of one token",
        notes="Of an encoder-decoder that of the decoder: the language of mBART's translation.")]
    forced_eos_token_id: Annotated[int | Sequence[int] | None, TEXT.field((), token_ids(),
        flag="--forced-eos-token-id ID", help="the token allowed at the last position before the length limit")]
    exponential_decay_length_penalty: Annotated[tuple[int, float] | None, TEXT.field(None, decay,
        help="(start, factor): after `start` new tokens the end becomes more likely by this factor with each token")]
    prefix_allowed_tokens_fn: Annotated[Callable[[int, Any], Sequence[int]] | None, TEXT.field(None,
        function("a function (batch_id, token_ids) -> allowed token ids", 2),
        help="(index of the prompt in the list, token ids so far) -> allowed next ids")]
    watermarking_config: Annotated[Mapping[str, Any] | None, TEXT.field(None, watermarking,
        flag="--watermarking-config NAME=VALUE [NAME=VALUE ...]",
        help="mark the text for a detector: bias=2 for green lists, ngram_len=5 and keys=[...] for SynthID",
        notes="The settings are transformers'; `measure.watermark` detects the text.")]
    logits_processor: Annotated[Sequence[Callable[..., Any]] | None, TEXT.field((),
        sequence("a sequence of functions (history, logits, xp) -> logits or (input_ids, scores) -> scores", processor,
            single=str), flag="--logits-processor NAME",
        help="logits processors of other packages, by name, or your own functions",
        notes="Each is (history, logits [N, V], xp) -> logits; see `processors`. Or transformers', each (input_ids "
        "[N, T], scores [N, V]) -> scores; see `functions`. The N sequences are those of one request.")]
    stopping_criteria: Annotated[Sequence[Callable[[Any, Any], Any]] | None, TEXT.field((),
        sequence("a sequence of functions (input_ids, scores) -> bool", function("", 2)),
        help="your own reasons to stop, as transformers': each (input_ids [1, T], None) -> bool, or a tensor of one",
        notes="They are asked after each token, which stays; prompt included. See `functions`.")]
    max_thinking_tokens: Annotated[int | None, TEXT.field(None, whole(0), flag="--max-thinking-tokens N",
        help="end a section of thoughts, such as <think>...</think>, after this many tokens",
        notes="Also one that the prompt has opened; its tokens there count.")]
    thinking_tokens: Annotated[Sequence[str | int | Sequence[int]] | None, TEXT.field(None, markers,
        needs="max_thinking_tokens", flag="--thinking-tokens TEXT [TEXT ...]",
        help="the two markers that begin and end thoughts (default: those that the vocabulary has)",
        notes="Texts, token ids or sequences of them.")]
    lora: Annotated[str | None, TEXT.field(None, text, flag="--lora NAME", expected="the name of an adapter, as text",
        help="apply this one of the engine's LoRA adapters",
        notes="Engine(..., adapters={name: folder}) has them; helper models run without.")]
    use_cache: Annotated[bool | None, TEXT.field(True, flag, flag="--no-cache",
        help="recompute the whole sequence for each token")]

    do_sample: Annotated[bool | None, SAMPLING.field(False, flag, flag="--sample",
        help="sample tokens instead of taking the most likely one")]
    temperature: Annotated[float | None, SAMPLING.field(1.0, positive, needs="do_sample", flag="--temperature T",
        common=True, aliases=("--temp",),
        advice="for greedy decoding set do_sample=False and no temperature",
        help="divide the logits by this: above 1 flattens")]
    top_k: Annotated[int | None, SAMPLING.field(50, whole(0), needs="do_sample", flag="--top-k K", common=True,
        expected="a whole number of at least 1, or 0 for no limit",
        help="keep this many of the best (default: {default}; 0: all)",
        notes="Also the candidates of contrastive search.")]
    top_p: Annotated[float | None, SAMPLING.field(1.0, number(0, 1, above=True), needs="do_sample", flag="--top-p P",
        common=True, help="keep the best that together reach this probability")]
    min_p: Annotated[float | None, SAMPLING.field(0.0, number(0, 1), needs="do_sample", flag="--min-p P",
        help="keep tokens at least this many times as likely as the best (0: all)")]
    seed: Annotated[int | None, SAMPLING.field(None, whole(0, 2**64), needs="do_sample", flag="--seed SEED",
        common=True, expected="a whole number from 0 to 2**64 - 1",
        help="seed of the random draws (default: a fresh one)",
        notes="A prompt draws the same whatever runs beside it. The prompts of a list with one seed draw differently, "
        "each by the seed and its index.")]
    typical_p: Annotated[float | None, SAMPLING.field(1.0, number(0, 1, above=True), needs="do_sample",
        flag="--typical-p P", help="keep those of the most typical surprise that together reach this probability")]
    epsilon_cutoff: Annotated[float | None, SAMPLING.field(0.0, number(0, 1, below=True), needs="do_sample",
        flag="--epsilon-cutoff P", help="keep tokens of at least this probability (0: all)")]
    eta_cutoff: Annotated[float | None, SAMPLING.field(0.0, number(0, 1, below=True), needs="do_sample",
        flag="--eta-cutoff P", help="as epsilon_cutoff, with a threshold that falls with the entropy (0: all)")]
    top_h: Annotated[float | None, SAMPLING.field(None, number(0, 1, above=True), needs="do_sample", flag="--top-h H",
        help="keep the best that hold this share of the entropy of the best 100")]
    top_n_sigma: Annotated[float | None, SAMPLING.field(0.0, number(0, LARGE), needs="do_sample",
        flag="--top-n-sigma N", expected="a number above 0, or 0 for no limit",
        help="keep logits within this many standard deviations of the largest (0: all)")]
    xtc_probability: Annotated[float | None, SAMPLING.field(0.0, number(0, 1), needs="do_sample",
        flag="--xtc-probability P",
        help="XTC: how often to drop all tokens of at least xtc_threshold but the least likely of them (0: never)")]
    xtc_threshold: Annotated[float | None, SAMPLING.field(0.1, number(0, 0.5), needs="xtc_probability",
        flag="--xtc-threshold P", help="XTC: probability from which on a token counts (default: {default})")]
    samplers: Annotated[str | Sequence[str] | None, SAMPLING.field((), sampler_names, needs="do_sample",
        flag="--samplers NAMES",
        help="order of the samplers, such as 'penalties;top_k;min_p;temperature', or that of llama.cpp, by its name",
        notes="A sequence of names, or a text; the others are dry, top_n_sigma, typ_p, top_p, xtc, top_h, "
        "epsilon_cutoff and eta_cutoff. By default transformers' order.")]
    mirostat: Annotated[int | None, SAMPLING.field(0, mirostat_version, needs="do_sample", flag="--mirostat 2",
        help="2 for Mirostat 2.0, which holds the surprise at a target; it replaces all filters but temperature")]
    mirostat_tau: Annotated[float | None, SAMPLING.field(5.0, number(0, LARGE, above=True), needs="mirostat",
        flag="--mirostat-tau BITS", help="Mirostat's target surprise in bits per token (default: {default})")]
    mirostat_eta: Annotated[float | None, SAMPLING.field(0.1, number(0, LARGE, above=True), needs="mirostat",
        flag="--mirostat-eta X", help="Mirostat's learning rate (default: {default})")]
    num_particles: Annotated[int | None, SAMPLING.field(0, whole(0), needs="do_sample", flag="--num-particles N",
        expected="a whole number of at least 1, or 0 for none",
        help="sequential Monte Carlo with this many texts, which a potential or a guide weighs (0: none)",
        notes="They come back with the logarithms of their weights as scores; fewer, by num_return_sequences, are "
        "drawn from them. See `monte_carlo`.")]
    potential: Annotated[Callable[..., Any] | Any | None, SAMPLING.field(None, potential, needs="num_particles",
        flag="--potential NAME", help="log weight of texts, -inf for those forbidden: a potential of another package, "
        "by name, or your own function",
        notes="A function (token_ids) or (token_ids, text) of what is generated, or an object with such methods "
        "`prefix` and `complete`, for texts that go on and those that have ended.")]
    ess_threshold: Annotated[float | None, SAMPLING.field(0.5, number(0, 1), needs="num_particles",
        flag="--ess-threshold X",
        help="resample the texts once their effective number is below this share of them (default: {default})")]
    repetition_penalty: Annotated[float | None, SAMPLING.field(1.0, positive, flag="--repetition-penalty X",
        help="above 1 makes tokens seen in prompt or output less likely, once per distinct token")]
    encoder_repetition_penalty: Annotated[float | None, SAMPLING.field(1.0, positive,
        flag="--encoder-repetition-penalty X",
        help="above 1 makes tokens of the prompt more likely, once per distinct token",
        notes="Of an encoder-decoder the encoder's.")]
    presence_penalty: Annotated[float | None, SAMPLING.field(0.0, number(-LARGE, LARGE), flag="--presence-penalty X",
        help="subtract this from the logit of every token generated so far")]
    frequency_penalty: Annotated[float | None, SAMPLING.field(0.0, number(-LARGE, LARGE), flag="--frequency-penalty X",
        help="subtract this from the logit of every token generated so far, times its count")]
    dry_multiplier: Annotated[float | None, SAMPLING.field(0.0, number(0, LARGE), flag="--dry-multiplier X",
        help="DRY: subtract this, times a power of dry_base, from the logit of a token that continues a repetition")]
    dry_base: Annotated[float | None, SAMPLING.field(1.75, number(1, LARGE), needs="dry_multiplier",
        flag="--dry-base X", help="DRY: growth of the penalty with each repeated token (default: {default})")]
    dry_allowed_length: Annotated[int | None, SAMPLING.field(2, whole(0), needs="dry_multiplier",
        flag="--dry-allowed-length N", help="DRY: repeated tokens from which on it counts (default: {default})")]
    dry_penalty_last_n: Annotated[int | None, SAMPLING.field(-1, whole(-1), needs="dry_multiplier",
        flag="--dry-penalty-last-n N", help="DRY: look at so many of the last tokens (default: {default}, all)",
        notes="The prompt's are among them.")]
    dry_sequence_breakers: Annotated[str | Sequence[str] | None, SAMPLING.field(("\n", ":", '"', "*"), texts(),
        needs="dry_multiplier", flag="--dry-sequence-breaker TEXT",
        help="DRY: a text that ends repetitions (default: line breaks, colons, quotes and asterisks)",
        notes="One or several; an empty sequence means none.")]

    strategy: Annotated[str | None, SEARCH.field(None, text, flag="--strategy NAME",
        expected="the name of a strategy", help="a strategy of another package (`minillm strategies` lists them)",
        notes="Its entry point is in the group minillm.strategies; see `plugins`.")]
    strategy_options: Annotated[Mapping[str, Any] | None, SEARCH.field((), options, needs="strategy",
        flag="--strategy-options NAME=VALUE [NAME=VALUE ...]", help="options of that strategy",
        notes="They are arguments of its class.")]
    num_beams: Annotated[int | None, SEARCH.field(1, whole(1), flag="--num-beams N", common=True,
        help="width of beam search (default: {default}, no beam search)")]
    length_penalty: Annotated[float | None, SEARCH.field(1.0, number(-50, 50), needs="num_beams",
        flag="--length-penalty X",
        help="exponent of the length that a beam's score is divided by; above 0 favours long ones")]
    early_stopping: Annotated[bool | Literal["never"] | None, SEARCH.field(False, stopping_rule, needs="num_beams",
        flag="--early-stopping WHEN",
        help="end with num_beams results (yes, True), once better ones are unlikely (no, False) or impossible (never)")]
    renormalize_logits: Annotated[bool | None, SEARCH.field(False, flag, needs="num_beams",
        help="renormalise the processed scores to log-probabilities")]
    num_beam_groups: Annotated[int | None, SEARCH.field(1, whole(1), flag="--num-beam-groups N",
        help="groups of diverse beam search, which avoid each other's tokens; must divide num_beams")]
    diversity_penalty: Annotated[float | None, SEARCH.field(0.0, number(0, LARGE), needs="num_beam_groups",
        flag="--diversity-penalty X", help="subtract this from a token's score for each earlier group that chose it")]
    force_words_ids: Annotated[Sequence[Sequence[int] | Sequence[Sequence[int]]] | None, SEARCH.field((),
        forced_phrases, needs="num_beams", help="phrases of token ids that the text has to contain",
        notes="A list of phrases in the place of one: any of them. See `constrained`.")]
    force_words: Annotated[str | Sequence[str | Sequence[str]] | None, SEARCH.field((), forced_texts,
        needs="num_beams", flag="--force-words TEXT", help="a text that the answer has to contain, by beam search",
        notes="With a space before it. In Python a list of texts in the place of one: any of them.")]
    constraints: Annotated[Sequence[Any] | None, SEARCH.field((),
        sequence("a sequence of PhrasalConstraint, DisjunctiveConstraint, or objects with their methods", constraint),
        needs="num_beams", help="constraints that the text has to fulfil, as transformers 4.55 had them",
        notes="See `constraints`.")]
    guidance_scale: Annotated[float | None, SEARCH.field(1.0, number(-LARGE, LARGE), flag="--guidance-scale S",
        help="classifier-free guidance: above 1 leads away from the negative prompt (1: off)",
        notes="See `classifier_free`. With greedy search, sampling and beam search; each text takes two sequences.")]
    negative_prompt: Annotated[str | Sequence[int] | None, SEARCH.field(None, text_or_ids, needs="guidance_scale",
        flag="--negative-prompt TEXT", help="what guidance leads away from (default: the last token of the prompt)",
        notes="A text or token ids, the same for all prompts of a list.")]
    dola_layers: Annotated[Literal["low", "high"] | Sequence[int] | None, SEARCH.field(None, exit_layers,
        flag="--dola-layers LAYERS", help="contrast the last layer with earlier ones: low, high, or numbers as 0,2,4",
        notes="See `dola`. With greedy search and sampling; a repetition_penalty of 1.2 is recommended.")]
    penalty_alpha: Annotated[float | None, SEARCH.field(0.0, number(0, 1), flag="--penalty-alpha A",
        help="contrastive search among top_k tokens: weight of dissimilarity to the context (0: off)")]
    contrastive_alpha: Annotated[float | None, SEARCH.field(0.1, number(0, 1), needs="amateur",
        flag="--contrastive-alpha A",
        help="tokens considered are at least this many times as likely as the best (default: {default})")]
    amateur_temperature: Annotated[float | None, SEARCH.field(1.0, positive, needs="amateur",
        flag="--amateur-temperature T", help="divide the amateur model's logits by this (default: {default})")]

    guided_json: Annotated[Mapping[str, Any] | str | None, GUIDED.field(None, schema, flag="--guided-json JSON|FILE",
        common=True, help="a JSON schema that the text satisfies",
        notes="A dict or its text. At most one of these four, of at most 100,000 characters; limits: see `guided`.")]
    guided_regex: Annotated[str | None, GUIDED.field(None, text, flag="--guided-regex REGEX", common=True,
        expected="a regular expression, as a text that is not empty",
        help="a regular expression that the whole text matches", notes="In Rust's notation.")]
    guided_grammar: Annotated[str | None, GUIDED.field(None, text, flag="--guided-grammar FILE",
        expected="a grammar in Lark's notation, as a text that is not empty",
        help="a context-free grammar in Lark's notation that the text follows", notes="As llguidance reads it.")]
    guided_choice: Annotated[str | Sequence[str] | None, GUIDED.field(None, texts(1), flag="--guided-choice TEXT",
        common=True, help="a text to choose from", notes="Up to 10,000.")]

    num_assistant_tokens: Annotated[int | None, SPECULATION.field(5, whole(0), needs="draft",
        flag="--num-assistant-tokens N", expected="a whole number of at least 1, or 0 to leave the draft model out",
        help="tokens that the draft model guesses (default: {default}; 0: none)")]
    prompt_lookup_num_tokens: Annotated[int | None, SPECULATION.field(0, whole(0), flag="--prompt-lookup-num-tokens N",
        expected="a whole number of at least 1, or 0 for none",
        help="guess this many tokens by looking back in the text (0: none)")]
    max_matching_ngram_size: Annotated[int | None, SPECULATION.field(2, whole(1), needs="prompt_lookup_num_tokens",
        flag="--max-matching-ngram-size N", help="longest n-gram that prompt lookup searches for (default: {default})")]
    lookahead_window: Annotated[int | None, SPECULATION.field(0, whole(0), flag="--lookahead-window W",
        expected="a whole number of at least 1, or 0 for none",
        help="guess by Jacobi iteration this many positions ahead (0: none)")]
    lookahead_ngram_size: Annotated[int | None, SPECULATION.field(3, whole(2), needs="lookahead_window",
        flag="--lookahead-ngram-size N", help="length of lookahead's n-grams (default: {default})",
        notes="The newest token is included.")]
    lookahead_guesses: Annotated[int | None, SPECULATION.field(5, whole(1), needs="lookahead_window",
        flag="--lookahead-guesses G", help="n-grams that lookahead verifies at once (default: {default})")]

    echo: Annotated[bool | None, OUTPUT.field(False, flag, flag="--echo", common=True,
        help="prepend the prompt to the text",
        notes="With logprobs, also its tokens' log-probabilities to the others.")]
    skip_special_tokens: Annotated[bool | None, OUTPUT.field(True, flag, flag="--keep-special-tokens",
        help="write special tokens out in the text, except the one that ends it")]
    logprobs: Annotated[bool | None, OUTPUT.field(False, flag, flag="--logprobs",
        expected="True or False; for alternatives set top_logprobs",
        help="return the log-probability of each chosen token")]
    top_logprobs: Annotated[int | None, OUTPUT.field(0, whole(0), flag="--top-logprobs N",
        help="return also those of this many best tokens", notes="Above 0 implies logprobs.")]
    # fmt: on


FIELDS: dict[str, Setting] = {name: hint.__metadata__[0] for name, hint in GenerationFields.__annotations__.items()}
"""Name of a field -> its declaration."""
GUIDES = tuple(name for name, setting in FIELDS.items() if setting.group == "guided")
"""Fields that set a guide; a request has at most one of them."""

PROCESSED = (
    *("sequence_bias", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "prefix_allowed_tokens_fn"),
    *("repetition_penalty", "encoder_repetition_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "logits_processor"),
    *("max_thinking_tokens", "watermarking_config"),
)
"""The fields that ask for a processor; with all of them at their defaults there is none"""

MASKED = (
    *("top_h", "top_n_sigma", "typical_p", "epsilon_cutoff", "eta_cutoff", "renormalize_logits"),
    *("xtc_probability", "samplers", "watermarking_config"),
)
"""The fields of filters that `reference.sample` does not apply in the draw"""

OFF = {"num_beams": 1, "num_beam_groups": 1, "guidance_scale": 1, "max_thinking_tokens": None}
"""Fields whose value without effect is not a false one -> that value."""
