"""Tasks by the names of transformers: `pipeline(task, model)`, called with a text or a list of texts.

Results have the form of transformers' pipelines, the sampling and lengths that neither the call nor the checkpoint sets
too. transformers 5 has no text2text-generation, translation and summarization; theirs is the form of transformers 4.57,
with the parameters that config.json names for a task (T5's prefixes, beams and lengths) in `task_specific_params`.

Source: transformers 5.23, `transformers.pipelines`; transformers 4.57, `pipelines/text2text_generation.py`.
"""

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, ClassVar, Self

from .decoding.foreign import PIPELINE, WORDS
from .decoding.prompts import encode_text, need_tokenizer
from .decoding.settings import GenerationConfig, refuse_unknown
from .engine.engine import Engine
from .engine.results import Generation
from .errors import ParameterError, PromptError, TaskError, listed, shown
from .files import read_optional_json
from .text.tokenizer import Tokenizer, fitting

_DIRECTION = re.compile(r"translation_([A-Za-z_]+?)_to_([A-Za-z_]+)")
_LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z]{2}|[a-z]{3}_[A-Z][a-z]{3}|__[a-z]{2,3}__")
"""A token that names a language: en_XX (mBART), eng_Latn (NLLB), __en__ (M2M100)"""


def pipeline(task: str, model: str | os.PathLike[str] | Engine | None = None, **options: Any) -> "Pipeline":
    """A model made ready for a task, as `transformers.pipeline` does it.

    Args:
        task: "text-generation"; "text2text-generation", "summarization", "translation" or "translation_en_to_fr" for an
            encoder-decoder; "text-classification" (also "sentiment-analysis"); "feature-extraction"
        model: a checkpoint folder, a GGUF file or a hub id; or an engine, which several pipelines may share
        **options: arguments of `Engine`, unless `model` is one; and arguments of the pipeline's calls, for all of them

    Raises:
        ParameterError: the task or an option is unknown.
        TaskError: the model does not fit the task.
        ModelError, DeviceError: as `Engine`.

    Example:
        >>> write = pipeline("text-generation", engine, do_sample=False, max_new_tokens=4)
        >>> write("A list of colors: red,")
        [{'generated_text': 'A list of colors: red, orange, yellow,'}]
    """
    kind = _kind_of(task)
    known = [name for name in inspect.signature(Engine).parameters if name != "model"]
    placement = {name: options.pop(name) for name in known if name in options}
    kind.check(options)  # before the model is loaded
    if isinstance(model, Engine):
        if placement:
            raise ParameterError(f"{min(placement)} is an argument of Engine, and the model is an engine: set it there")
        return kind(task, model, **options)
    engine = Engine(model, **placement)
    try:
        return kind(task, engine, **options)
    except BaseException:
        engine.close()
        raise


def _kind_of(task: str) -> "type[Pipeline]":
    if not isinstance(task, str):
        raise ParameterError(f"task should be text, found {shown(task)}")
    if task in TASKS:
        return TASKS[task]
    if _DIRECTION.fullmatch(task):
        return Translation
    near = get_close_matches(task, TASKS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"expected {listed((*TASKS, 'translation_xx_to_yy'), 300)}"
    raise ParameterError(f"task {shown(task)} is not known: {hint}")


def tasks_of(engine: Engine) -> list[str]:
    """Names of the tasks that an engine's model fits."""
    return [name for name, kind in TASKS.items() if kind.fits(engine)]


class Pipeline:
    """A model and its task. Call it with a text, or a list of texts, whose results come in the same order.

    A list that takes long shows a bar on a terminal or in a notebook, unless `progress=False`. `close()` or a `with`
    block closes the engine.
    """

    OPTIONS: ClassVar[frozenset[str]] = frozenset()
    """Arguments of a call"""

    def __init__(self, task: str, engine: Engine, **options: Any) -> None:
        """Use `pipeline` instead."""
        if not self.fits(engine):
            fitting = ", ".join(tasks_of(engine)) or "none"
            family = engine.config.model_type
            raise TaskError(
                f"{engine.name}, a model of the family {family}, does not fit the task {task}: its tasks are {fitting}"
            )
        self.task, self.engine, self.options = task, engine, options

    @classmethod
    def fits(cls, engine: Engine) -> bool:
        """Whether an engine's model has what the task needs."""
        raise NotImplementedError

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Refuse what is no argument of a call.

        Raises:
            ParameterError: one is unknown; the message says what to do.
        """
        for name in options:
            if name in WORDS[PIPELINE] and name not in cls.OPTIONS:
                raise ParameterError(f"{name} is not offered: {WORDS[PIPELINE][name].advice}")
            if not cls.takes(name):
                near = get_close_matches(name, cls.OPTIONS, n=1)
                hint = f"did you mean {near[0]}?" if near else f"expected one of {listed(sorted(cls.OPTIONS))}"
                raise ParameterError(f"there is no argument {shown(name)} of this task: {hint}")

    @classmethod
    def takes(cls, name: str) -> bool:
        """Whether a call has an argument of this name."""
        return name in cls.OPTIONS

    def __call__(self, inputs: Any, *, progress: bool = True, **options: Any) -> Any:
        """Run the task; the classes say what of.

        Raises:
            ParameterError: an option is unknown or impossible.
            PromptError: an input is not text, or too long.
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}(task={self.task!r}, model={self.engine.name!r})"

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


# --- texts out --------------------------------------------------------------------------------------------------------


class _Generating(Pipeline):
    """The part that tasks which generate text share. Calls also take generation fields and `generation_config`."""

    OPTIONS = frozenset({"generation_config", "stop_sequence", "truncation", "max_length", "return_tensors"})
    DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    """Generation fields that neither the call nor the checkpoint sets"""

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Refuse what is neither an argument of a call nor a generation field."""
        super().check(options)
        refuse_unknown({name: options[name] for name in options if name not in cls.OPTIONS | {"priority", "timeout"}})

    @classmethod
    def takes(cls, name: str) -> bool:
        """Generation fields are checked apart."""
        return True

    def _generate(
        self, prompts: list[Any], options: dict[str, Any], progress: bool, **fixed: Any
    ) -> "list[Generation]":
        """Run prompts with the options that are left: generation fields. `fixed` are defaults of the task's own."""
        config = options.pop("generation_config", None)
        if config is not None and not isinstance(config, GenerationConfig):
            raise ParameterError(f"generation_config should be a minillm.GenerationConfig, found {shown(config)}")
        if (stop := options.pop("stop_sequence", None)) is not None:
            options["stop_strings"] = stop
        if options.get("stop_strings") is not None:
            options.setdefault("include_stop", True)  # as transformers, which ends after them
        defaults = {**self.DEFAULTS, **self.engine.generation_defaults, **fixed}
        if defaults.get("max_length") is not None:
            defaults.pop("max_new_tokens", None)
        results: list[Generation] = self.engine.generate(
            prompts, config, progress=progress, defaults=defaults, **options
        )
        return results

    def _limit(self, options: Mapping[str, Any]) -> int | None:
        """Tokens to which texts are cut; None without truncation."""
        return longest_input(self.engine) if _truncates(options) else None


class TextGeneration(_Generating):
    """text-generation: continue a text, or answer a conversation, a list of messages.

    The result of a text is a list with a dict for each of `num_return_sequences`: {"generated_text": ...}, the prompt
    included unless `return_full_text` is False. That of a conversation has the messages with the answer after them, or
    the answer alone. Without other settings it samples at a temperature of 0.7, 256 tokens, as in transformers.

    Arguments of a call besides generation fields: return_full_text, return_text, return_tensors (token ids), prefix
    (before each text), stop_sequence, truncation, add_special_tokens, continue_final_message, tools, generation_config.
    """

    OPTIONS = _Generating.OPTIONS | {
        *("return_full_text", "return_text", "prefix", "add_special_tokens", "continue_final_message", "tools"),
    }
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"max_new_tokens": 256, "do_sample": True, "temperature": 0.7}

    @classmethod
    def fits(cls, engine: Engine) -> bool:
        """Decoders with a language model head do."""
        config = engine.config
        return config.output == "tokens" and not config.encoder_layers and not config.bidirectional

    def __call__(self, inputs: Any, *, progress: bool = True, **options: Any) -> Any:
        """Continue one text or conversation, or each of a list of them: a list of results, or one for each.

        Raises:
            ParameterError: an option is unknown, impossible or contradicts another.
            PromptError: an input is neither a text nor a conversation, or does not fit into the context.
        """
        self.check(options)
        options = self.options | options
        single = isinstance(inputs, str) or _is_chat(inputs)
        texts = _texts([inputs] if single else inputs, "texts or conversations", lambda value: _is_chat(value))
        full, as_ids = options.pop("return_full_text", None), bool(options.pop("return_tensors", None))
        as_text = options.pop("return_text", None)
        if (full is not None and (as_ids or as_text is not None)) or (as_ids and as_text):
            raise ParameterError("return_full_text, return_text and return_tensors exclude each other: give one")
        limit, prefix = self._limit(options), options.pop("prefix", None) or self._configured_prefix()
        limit = None if limit is None else min(limit, self.engine.context - 1)  # room for a token
        options.pop("truncation", None)
        special = options.pop("add_special_tokens", None)
        continued, tools = options.pop("continue_final_message", None), options.pop("tools", None)
        if (continued is not None or tools) and not all(map(_is_chat, texts)):
            name = "tools" if tools else "continue_final_message"
            raise ParameterError(f"{name} is for conversations: leave it out for a text")
        prompts: list[Any] = []
        for text in texts:
            if isinstance(text, str):
                text, added = prefix + text, special is not False
            else:
                text = self._rendered(text, continued, tools)
                added = False  # the template has written the special tokens
            prompts.append(text if added and limit is None else self._encoded(text, added, limit))
        results = self._generate(prompts, options, progress)
        outputs = []
        for text, generation in zip(texts, results, strict=True):
            records: list[dict[str, Any]] = []
            for completion in generation.completions:
                if as_ids:
                    records.append({"generated_token_ids": generation.prompt_token_ids + completion.token_ids})
                elif full is False:
                    records.append({"generated_text": completion.text})
                elif isinstance(text, str):
                    records.append({"generated_text": text + completion.text})
                else:
                    records.append({"generated_text": _with_answer(text, completion.text, continued)})
            outputs.append(records)
        return outputs[0] if single else outputs

    def _configured_prefix(self) -> str:
        prefix = _config_json(self.engine).get("prefix")
        return prefix if isinstance(prefix, str) else ""

    def _rendered(self, messages: Any, continued: bool | None, tools: Any) -> str:
        ends = _continues(messages, continued)
        return self.engine.render_chat(
            list(messages), tools=tools, add_generation_prompt=not ends, continue_final_message=ends
        )

    def _encoded(self, text: str, added: bool, limit: int | None) -> list[int]:
        if limit is not None:
            return truncated(self.engine, text, limit, add_special_tokens=added)
        return encode_text(text, self.engine.tokenizer, self.engine.config, add_special_tokens=False)


def _is_chat(value: Any) -> bool:
    """Whether a value is a conversation: a list of messages, each a mapping with a role."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(message, Mapping) for message in value)


def _continues(messages: Sequence[Mapping[str, Any]], continued: bool | None) -> bool:
    """Whether the answer continues the last message; by default if that is the assistant's."""
    return messages[-1].get("role") == "assistant" if continued is None else continued


def _with_answer(messages: Sequence[Mapping[str, Any]], answer: str, continued: bool | None) -> list[Mapping[str, Any]]:
    if not _continues(messages, continued):
        return [*messages, {"role": "assistant", "content": answer}]
    *before, last = messages
    return [*before, {"role": last["role"], "content": last["content"] + answer}]


class Text2Text(_Generating):
    """text2text-generation: what an encoder-decoder writes for a text, {"generated_text": ...} each.

    One text gives a list; a list of texts one dict for each, or a list of them with `num_return_sequences`. Without
    other settings it takes beam search of width 4 and at most 256 tokens, as in transformers.

    Arguments of a call besides generation fields: truncation, stop_sequence, generation_config.
    """

    OPTIONS = _Generating.OPTIONS - {"return_tensors"}
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"max_new_tokens": 256, "num_beams": 4}
    KEY: ClassVar[str] = "generated_text"

    @classmethod
    def fits(cls, engine: Engine) -> bool:
        """Encoder-decoders do."""
        return engine.config.encoder_layers > 0

    def __call__(self, inputs: Any, *, progress: bool = True, **options: Any) -> Any:
        """Write what the task asks for, of one text or of each of a list.

        Raises:
            ParameterError: an option is unknown, impossible or contradicts another.
            PromptError: an input is not text, or is too long; `truncation=True` cuts it.
        """
        self.check(options)
        options = self.options | options
        single = isinstance(inputs, str)
        texts = _texts([inputs] if single else inputs, "texts")
        limit = self._limit(options)
        options.pop("truncation", None)
        encode, configured = self._reader(options, limit)
        prompts = [encode(text) for text in texts]
        results = self._generate(prompts, options, progress, **configured)
        outputs = [[{self.KEY: completion.text} for completion in result.completions] for result in results]
        if single:
            return outputs[0]
        return [records[0] for records in outputs] if all(len(records) == 1 for records in outputs) else outputs

    def _reader(
        self, options: dict[str, Any], limit: int | None
    ) -> tuple[Callable[[str], str | list[int]], dict[str, Any]]:
        """A function from a text to a prompt, and the generation fields that the checkpoint sets for the task."""
        configured = self._configured(self.task)
        prefix = str(configured.pop("prefix", None) or _config_json(self.engine).get("prefix") or "")

        def encode(text: str) -> str | list[int]:
            return prefix + text if limit is None else truncated(self.engine, prefix + text, limit)

        return encode, configured

    def _configured(self, task: str) -> dict[str, Any]:
        """The fields that config.json has for a task."""
        tasks = _config_json(self.engine).get("task_specific_params")
        options = tasks.get(task) if isinstance(tasks, dict) else None
        return dict(options) if isinstance(options, dict) else {}


class Summarization(Text2Text):
    """summarization: {"summary_text": ...} for a text; else as `Text2Text`."""

    KEY = "summary_text"


class Translation(Text2Text):
    """translation: {"translation_text": ...} for a text; else as `Text2Text`.

    The languages are those of the task (translation_en_to_fr), or `src_lang` and `tgt_lang`. How a model is told them
    differs: T5 by a prefix that config.json names, mBART by tokens of the languages ("en_XX", "en" if there is one such
    language), Marian models of several languages by a token before the text. A model that knows one direction, as most
    of Marian's, and one without a prefix is not told: then the text is given as it is, as in transformers.
    """

    KEY = "translation_text"
    OPTIONS = Text2Text.OPTIONS | {"src_lang", "tgt_lang"}

    def _reader(
        self, options: dict[str, Any], limit: int | None
    ) -> tuple[Callable[[str], str | list[int]], dict[str, Any]]:
        named = _DIRECTION.fullmatch(self.task)
        explicit = [options.pop(name, None) for name in ("src_lang", "tgt_lang")]
        source, target = named.groups() if named and explicit == [None, None] else explicit
        for language in (source, target):
            if language is not None and not isinstance(language, str):
                raise ParameterError(f"src_lang and tgt_lang should be names of languages, found {shown(language)}")
        tokenizer = need_tokenizer(self.engine.tokenizer)
        languages = _languages(tokenizer)
        if languages and (source or target or "forced_bos_token_id" not in self.engine.generation_defaults):
            return self._between_tokens(languages, source, target, limit)
        if source or target:
            mark = f">>{target}<<"
            if [tokenizer.token(i) for i in tokenizer.encode(mark, add_special_tokens=False)] == [mark]:
                return lambda text: self._cut(f"{mark} {text}", limit), self._configured(self.task)
            if not (source and target):
                raise ParameterError("src_lang and tgt_lang belong together here: give both, or neither")
            direction = f"translation_{source}_to_{target}"
            if configured := self._configured(direction):
                prefix = str(configured.pop("prefix", None) or "")
                return lambda text: self._cut(prefix + text, limit), configured
            if explicit != [None, None]:
                raise ParameterError(self._unknown(direction))
        return super()._reader(options, limit)

    def _between_tokens(
        self, languages: Mapping[str, int], source: str | None, target: str | None, limit: int | None
    ) -> tuple[Callable[[str], str | list[int]], dict[str, Any]]:
        """The languages as tokens: the source's beside the text, the target's first in the translation (mBART)."""
        if not (source and target):
            raise ParameterError("this model needs src_lang and tgt_lang: it has " + listed(languages, 300))
        of, to = _language(source, languages), _language(target, languages)
        known = set(languages.values())

        def encode(text: str) -> list[int]:
            before, inside, after = framed(self.engine, text, limit)
            before, after = ([of if token in known else token for token in side] for side in (before, after))
            return [*before, *inside, *after]

        return encode, self._configured(self.task) | {"forced_bos_token_id": to}

    def _cut(self, text: str, limit: int | None) -> str | list[int]:
        return text if limit is None else truncated(self.engine, text, limit)

    def _unknown(self, direction: str) -> str:
        tasks = _config_json(self.engine).get("task_specific_params")
        named = [name for name in tasks if _DIRECTION.fullmatch(name)] if isinstance(tasks, dict) else []
        if named:
            return f"config.json names no prefix for {direction}: it has {listed(named)}; or write it into the text"
        return f"{direction}: this model is not told languages; leave src_lang and tgt_lang out"


def _languages(tokenizer: Tokenizer) -> Mapping[str, int]:
    """The tokens of an mBART's languages, by their codes; empty if there are none."""
    codes = tokenizer.languages
    return codes or {token: i for token, i in tokenizer.added_ids.items() if _LANGUAGE.fullmatch(token)}


def _language(name: str, codes: Mapping[str, int]) -> int:
    """The token of a language: its own name, or the only one that begins with it."""
    matches = [name] if name in codes else [code for code in codes if code.strip("_").split("_")[0] == name]
    if len(matches) == 1:
        return codes[matches[0]]
    hint = f"it has {listed(matches or codes, 300)}"
    raise ParameterError(f"language {shown(name)} is not one of this model's: {hint}")


# --- numbers out ------------------------------------------------------------------------------------------------------


class TextClassification(Pipeline):
    """text-classification, also called sentiment-analysis: the labels of a text, {"label": ..., "score": ...}.

    One text gives a list with its best label, a list of texts one dict each. With `top_k` each text gives a list of its
    best labels, of all for None. A pair of texts is a dict {"text": ..., "text_pair": ...}.

    Arguments of a call: top_k, function_to_apply ("softmax", "sigmoid", "none"; by default what the model's config
    implies), return_all_scores (all labels in the model's order), truncation.
    """

    OPTIONS = frozenset({"top_k", "function_to_apply", "return_all_scores", "truncation"})

    @classmethod
    def fits(cls, engine: Engine) -> bool:
        """Models with a classification head do."""
        return engine.config.output == "labels"

    def __call__(self, inputs: Any, *, progress: bool = True, **options: Any) -> Any:
        """Label one text or pair, or each of a list.

        Raises:
            ParameterError: an option is unknown or impossible.
            PromptError: an input is not text, or is too long; `truncation=True` cuts it.
        """
        self.check(options)
        in_call = "top_k" in options
        options = self.options | options
        function = options.get("function_to_apply")
        chosen: Any = function.lower() if isinstance(function, str) else function
        all_scores = options.get("return_all_scores")
        if all_scores and options.get("top_k") is not None:
            raise ParameterError("return_all_scores and top_k exclude each other: give one")
        single = isinstance(inputs, str | Mapping)
        texts = [inputs] if single else _texts(inputs, 'texts, or of {"text", "text_pair"}', _is_pair)
        classifications = self.engine.classify(
            [text if isinstance(text, str) else _pair(text) for text in texts],
            top_k=1 if "top_k" not in options and not all_scores else options.get("top_k"),
            function=chosen,
            truncate=_truncates(options),
            progress=progress,
        )
        assert isinstance(classifications, list)
        records: list[Any] = []
        for result in classifications:
            labels = sorted(result.labels, key=lambda label: label.index) if all_scores else result.labels
            records.append([{"label": label.label, "score": label.score} for label in labels])
        if "top_k" not in options and not all_scores:
            records = [record[0] for record in records]
        # of one text a list, of one pair not, and none around the labels that a call asks for: as transformers has it
        return records[0] if single and (in_call or not isinstance(inputs, str)) else records


def _is_pair(value: Any) -> bool:
    return isinstance(value, Mapping) and "text" in value and value.keys() <= {"text", "text_pair"}


def _pair(value: Any) -> str | tuple[str, str]:
    """A text or a pair of texts from a dict."""
    if not _is_pair(value):
        raise PromptError(f'a pair should be a dict with "text" and "text_pair", found {shown(value)}')
    return value["text"] if value.get("text_pair") is None else (value["text"], value["text_pair"])


class FeatureExtraction(Pipeline):
    """feature-extraction: the last hidden state of each token of a text, as nested lists [1, T, E].

    One text gives one such list, a list of texts one for each. Arguments of a call: truncation, return_tensors (NumPy
    arrays in place of lists).
    """

    OPTIONS = frozenset({"truncation", "return_tensors"})

    @classmethod
    def fits(cls, engine: Engine) -> bool:
        """Decoders and encoders do, with any head or none."""
        return not engine.config.encoder_layers

    def __call__(self, inputs: Any, *, progress: bool = True, **options: Any) -> Any:
        """The hidden states of one text, or of each of a list; their lengths may differ.

        Raises:
            ParameterError: an option is unknown or impossible.
            PromptError: an input is not text, or is too long; `truncation=True` cuts it.
        """
        self.check(options)
        options = self.options | options
        single = isinstance(inputs, str)
        texts = _texts([inputs] if single else inputs, "texts")
        states = self.engine.hidden_states(texts, truncate=_truncates(options), progress=progress)
        arrays = [state[None] for state in states]  # [T, E] -> [1, T, E]
        outputs = arrays if options.get("return_tensors") else [array.tolist() for array in arrays]
        return outputs[0] if single else outputs


TASKS: dict[str, type[Pipeline]] = {
    "text-generation": TextGeneration,
    "text2text-generation": Text2Text,
    "translation": Translation,
    "summarization": Summarization,
    "text-classification": TextClassification,
    "sentiment-analysis": TextClassification,
    "feature-extraction": FeatureExtraction,
}
"""Tasks by name; also translation_xx_to_yy."""


# --- texts in ---------------------------------------------------------------------------------------------------------


def _texts(inputs: Any, expected: str, also: Callable[[Any], bool] = lambda value: False) -> list[Any]:
    """The members of a list of inputs.

    Raises:
        PromptError: it is no list, or has a member that is neither text nor what `also` accepts.
    """
    if not isinstance(inputs, list | tuple):
        raise PromptError(f"expected a text or a list of {expected}, found {shown(inputs)}")
    for member in inputs:
        if not (isinstance(member, str) or also(member)):
            raise PromptError(f"expected a list of {expected}, found {shown(member)} in it")
    return list(inputs)


def _truncates(options: Mapping[str, Any]) -> bool:
    """Whether texts that are too long are cut, in transformers' words.

    Raises:
        ParameterError: `truncation` is none of these.
    """
    truncation = options.get("truncation")
    if not isinstance(truncation, bool | None) and truncation not in ("longest_first", "only_first", "do_not_truncate"):
        raise ParameterError(f"truncation should be True or False, found {shown(truncation)}")
    return truncation not in (None, False, "do_not_truncate")


def framed(engine: Engine, text: str, limit: int | None = None) -> tuple[list[int], list[int], list[int]]:
    """`Tokenizer.framed`, with the text's own tokens cut, so that there are `limit` in all."""
    tokenizer = need_tokenizer(engine.tokenizer)
    before, inside, after = fitting.framed(tokenizer, text)
    return before, inside if limit is None else fitting.cut(tokenizer, inside, limit - len(before) - len(after)), after


def truncated(engine: Engine, text: str, limit: int, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text, cut to `limit` tokens; special tokens stay. As transformers' truncation=True."""
    before, inside, after = framed(engine, text, limit)
    return [*before, *inside, *after] if add_special_tokens else inside


def longest_input(engine: Engine) -> int:
    """Tokens to which `truncation` cuts: the model's positions, or fewer if its tokenizer's model_max_length is."""
    path, config = engine.path, engine.config
    most = config.max_source_positions if config.encoder_layers else engine.context
    settings = read_optional_json(path / "tokenizer_config.json") if path is not None and path.is_dir() else {}
    length = settings.get("model_max_length")
    return min(most, int(length)) if isinstance(length, int | float) and length >= 1 else most


def _config_json(engine: Engine) -> dict[str, Any]:
    """The checkpoint's config.json; empty of a GGUF file or of random weights."""
    path = engine.path
    return read_optional_json(path / "config.json") if path is not None and path.is_dir() else {}
