"""lm-evaluation-harness on an engine in this process: its model "minillm" (extra `eval`).

    python -m minillm.lm_eval --model minillm --model_args model=PATH --tasks hellaswag

is the command `lm_eval` of that package with one model more, and takes all its options. In Python:

    lm_eval.simple_evaluate(model=minillm.lm_eval.MinillmLM(engine), tasks=["hellaswag"])

The figures are those of its model "hf" (`HFLM`), whose rules this file follows. Importing it imports lm-eval; neither
needs torch.

Source: https://github.com/EleutherAI/lm-evaluation-harness, 0.4.13: `lm_eval/api/model.py`, `models/huggingface.py`
"""

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .backends.cuda.compiling import CupyLauncher
from .decoding.prompts import need_tokenizer
from .decoding.searches import NO_FILTER
from .engine.arguments import refuse_task
from .engine.engine import Engine
from .errors import DeviceError, MinillmError, ParameterError, PromptError, TaskError, install
from .reference.philox import fold_in

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    _MISSING = f"minillm.lm_eval needs lm-eval 0.4.13 or newer ({error}): {install('eval')}"
    raise (SystemExit(_MISSING) if __name__ == "__main__" else ImportError(_MISSING)) from None

from tqdm import tqdm

CONTEXTS = 256
"""Contexts scored by one call; after it their results are in lm-eval's cache (`use_cache`)"""
NEW_TOKENS = 256
"""Tokens of a generated text where the task sets no limit, as in `HFLM`"""
GREEDY = ("do_sample", "temperature", *NO_FILTER, "seed")
"""Generation fields without effect on greedy search, which tasks set all the same"""


@register_model("minillm")
class MinillmLM(TemplateLM):  # type: ignore[misc]  # mypy reads no lm-eval
    """A model of lm-eval: an engine that scores and continues its texts, many at once.

    The continuations of one context, such as the answers to a question, share its keys and values.

    Example:
        results = lm_eval.simple_evaluate(model=MinillmLM(engine), tasks=["hellaswag"])
    """

    def __init__(
        self,
        model: Engine | str | os.PathLike[str] | None = None,
        *,
        pretrained: str | os.PathLike[str] | None = None,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        """Load a model, or take an engine, which stays open.

        Args:
            model: an engine, or what `Engine` loads
            pretrained: the same, as lm-eval's other models name it
            max_length: tokens of a context and its continuation; by default as many as the model reads
            add_bos_token: whether the tokenizer adds its special tokens; by default as the checkpoint says
            prefix_token_id: precedes a text without context; by default the tokenizer's BOS token, else its EOS token
            think_end_token: text that ends the reasoning before an answer, such as "</think>": both are cut off
            chat_template_kwargs: further variables of the chat template, such as Qwen3's "enable_thinking"
            lora: name of one of the engine's adapters
            batch_size: lm-eval's option: `max_batch_size` of the engine, unless it is "auto" or lm-eval's default, 1
            max_batch_size: as of `Engine`
            device: as of `Engine`; "cuda:0", lm-eval's default, is a GPU if there is one, else the CPU
            **options: further arguments of `Engine`

        Raises:
            TaskError: the model generates no text, or has an encoder.
            PromptError: there is no tokenizer.
            ParameterError: an argument is impossible.
            ModelError, DeviceError: as `Engine`.
        """
        super().__init__()
        if model is not None and pretrained is not None:
            raise ParameterError("model and pretrained are two names for one thing: leave out pretrained")
        source = pretrained if model is None else model
        if max_batch_size is None and batch_size not in (None, "auto", 1, "1"):
            max_batch_size = _batch_size(batch_size)
        options |= {"max_batch_size": max_batch_size, "device": _device(device)}
        given = {name: value for name, value in options.items() if value is not None}
        if isinstance(source, Engine):
            if given:
                raise ParameterError(f"{min(given)} is an argument of Engine, and there is an engine: set it there")
            engine = source
        else:
            engine = Engine(source, **given)
        refuse_task(engine.config, "tokens", "minillm.lm_eval")
        if engine.config.encoder_layers:
            raise TaskError("minillm.lm_eval takes models without an encoder: an encoder-decoder is not offered")
        self.engine, self._tokenizer = engine, need_tokenizer(engine.tokenizer)
        context = engine.config.max_positions
        if max_length is not None and (type(max_length) is not int or not 2 <= max_length <= context):
            raise ParameterError(f"max_length should be a whole number from 2 to {context}, found {max_length!r}")
        self.max_length: int = max_length or context
        self.add_bos_token, self.think_end_token, self.lora = add_bos_token, think_end_token, lora
        self.chat_template_kwargs = chat_template_kwargs
        self._prefix = prefix_token_id

    # --- tokens and conversations --------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text.

        Raises:
            PromptError: the tokenizer has none.
        """
        ends = (self._tokenizer.eos_token_id, *self.engine.eos_token_ids)
        token = next((token for token in ends if token is not None), None)
        if token is None:
            raise PromptError("the tokenizer has no end-of-sequence token: set prefix_token_id")
        return token

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        if self._prefix is not None:
            return self._prefix
        bos = self._tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text; without further special tokens if it begins with the prefix token's text."""
        if add_special_tokens is None:
            begun = string.startswith(self._tokenizer.decode([self.prefix_token_id], skip_special_tokens=False))
            add_special_tokens = not begun and self.add_bos_token is not False
        return self._tokenizer.encode(string, add_special_tokens=add_special_tokens)

    @property
    def tokenizer_name(self) -> str:
        """The model's name, by which lm-eval tells its stored requests apart."""
        return self.engine.name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the checkpoint's template, for lm-eval's records."""
        template = self.engine.chat_template
        return None if chat_template is False or template is None else template.source

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text. If the template refuses a system's message, one without, as in `HFLM`.

        Raises:
            As `Engine.render_chat`.
        """
        arguments: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        try:
            return self.engine.render_chat(chat_history, **arguments)
        except PromptError:
            others = [message for message in chat_history if message["role"] != "system"]
            if self.engine.chat_template is None or len(others) == len(chat_history):
                raise
            return self.engine.render_chat(others, **arguments)

    def get_model_info(self) -> dict[str, Any]:
        """Facts about the model, which lm-eval notes beside its results."""
        return {"model_num_parameters": self.engine.summary()["parameters"]}

    # --- log-probabilities ---------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether greedy search finds it.

        Args:
            requests: text and continuation, or None; the context's tokens, and the continuation's
            disable_tqdm: show no bar
        """
        groups: dict[tuple[int, ...], list[int]] = {}  # a context -> the requests that have it
        for i, (_, given, continuation) in enumerate(requests):
            room = self.max_length + 1 - len(continuation)  # the last token is predicted, not read
            if room < 1:
                raise PromptError(
                    f"a continuation has {len(continuation)} tokens, more than max_length={self.max_length}"
                )
            groups.setdefault(tuple(given[-room:]), []).append(i)
        answers: list[tuple[float, bool]] = [(math.nan, False)] * len(requests)
        contexts = sorted(groups)
        with tqdm(total=len(requests), desc="Running loglikelihood requests", disable=disable_tqdm) as bar:
            for first in range(0, len(contexts), CONTEXTS):
                chosen = contexts[first : first + CONTEXTS]
                endings = [[requests[i][2] for i in groups[context]] for context in chosen]
                scores: Any = self.engine.score_continuations(chosen, endings, lora=self.lora, progress=False)
                for context, row in zip(chosen, scores, strict=True):
                    for i, score in zip(groups[context], row, strict=True):
                        answers[i] = score.total, score.greedy
                        if requests[i][0] is not None:
                            self.cache_hook.add_partial("loglikelihood", requests[i][0], answers[i])
                    bar.update(len(row))
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each text, in windows of `max_length` tokens, each of which is predicted once."""
        windows, texts = [], []
        for i, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                texts.append(i)
        totals = [0.0] * len(requests)
        for i, (total, _) in zip(texts, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[i] += total
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # --- texts ---------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context, up to the first of its stop strings.

        `gen_kwargs` are generation fields of minillm, besides lm-eval's `until` and `max_gen_toks`.

        Raises:
            ParameterError: a field is unknown or impossible.
        """
        eos = self._tokenizer.token(self.eot_token_id)
        made, stops = [], []
        for i, request in enumerate(requests):
            fields = dict(normalize_gen_kwargs(request.args[1], NEW_TOKENS))
            stops.append([stop for stop in handle_stop_sequences(fields.pop("until"), eos=eos) if stop])
            ids, fields = self._prompt_and_fields(request.args[0], fields, i)
            fields["stopping_criteria"] = [self._criterion(len(ids), stops[-1])]
            made.append(self.engine.request(ids, lora=self.lora, **fields))
        texts = []
        answers = self.engine.run(made)
        for request, answer, until in zip(requests, answers, stops, strict=True):
            texts.append(postprocess_generated_text(answer.text, until, self.think_end_token))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _prompt_and_fields(self, text: str, fields: dict[str, Any], number: int) -> tuple[list[int], dict[str, Any]]:
        """A context's tokens, cut on the left to leave room for the answer, and generation fields.

        `number` tells apart what requests with one seed draw.
        """
        fields["max_new_tokens"] = limit = fields.pop("max_gen_toks")
        if limit >= self.max_length:
            raise ParameterError(f"max_gen_toks should be less than max_length, {self.max_length}, found {limit}")
        if fields["do_sample"] is False:
            without_effect = {*GREEDY} - ({"top_k"} if fields.get("penalty_alpha") else set())
            fields = {name: value for name, value in fields.items() if name not in without_effect}
            fields["do_sample"] = False
        elif fields.get("seed") is not None:
            fields["seed"] = fold_in(fields["seed"], number)
        return self.tok_encode(text)[-(self.max_length - limit) :], fields

    def _criterion(self, prompt_tokens: int, stops: Sequence[str]) -> Callable[[Any, Any], bool]:
        """A criterion that ends a text once its last tokens contain a stop string; the prompt's end is no part of it.

        The end of the text, up to which it is decoded, is never shorter than the longest stop string.
        """
        reach = max((len(stop.encode()) for stop in stops), default=0) + 2

        def stop_string(input_ids: Any, _: Any) -> bool:
            end = input_ids[0, max(prompt_tokens, input_ids.shape[1] - reach) :].tolist()
            text = self._tokenizer.decode(end, skip_special_tokens=False)
            return any(stop in text for stop in stops)

        return stop_string


def _batch_size(value: object) -> int:
    """lm-eval's `batch_size` as a number."""
    try:
        return int(str(value))
    except ValueError:
        raise ParameterError(f'batch_size should be a whole number or "auto", found {value!r}') from None


def _device(name: str | None) -> str | None:
    """lm-eval's `device` in the words of `Engine`."""
    if name != "cuda:0":
        return name
    try:
        CupyLauncher()
    except DeviceError:
        return None
    return "cuda"


def main() -> int:
    """Run lm-eval's command line. Returns the exit code."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except MinillmError as error:
        print(f"minillm.lm_eval: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
