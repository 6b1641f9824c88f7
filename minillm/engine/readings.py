"""Calls that read a model instead of generating: logits and scores, attention, and the points inside it."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from ..decoding.fields import GenerationFields
from ..decoding.given_texts import text_and_source, with_continuations
from ..decoding.hooks import Hook, Hooks
from ..decoding.prompts import Prompt, encode_prompt, is_prompt
from ..decoding.request import check_lora
from ..decoding.settings import GenerationConfig
from ..decoding.strategy import Request
from ..errors import EngineStateError, ParameterError, PromptError, shown
from ..progress import showing
from ..runner.runner import Runner
from .arguments import read, refuse_task
from .arrays import handed_over, on_device
from .given_embeddings import check_lengths, embedded_requests, placeholders, read_embeddings
from .inspect import Score, all_logits, last_attention, score_tokens
from .text_readings import EngineTextReadings

if TYPE_CHECKING:
    from .continuations import ContinuationScore
    from .explain import Explanation


class EngineReadings(EngineTextReadings):
    """The readings of an engine, beside the texts that `Engine` generates."""

    # --- logits, scores, attention -------------------------------------------------------------------------------

    @overload
    def forward(
        self,
        prompt: Prompt | None = None,
        *,
        source: Prompt | None = None,
        inputs_embeds: Any = None,
        lora: str | None = None,
        like: Literal["numpy"] = "numpy",
        progress: bool = True,
    ) -> NDArray[np.float32]: ...

    @overload
    def forward(
        self,
        prompt: Prompt | None = None,
        *,
        source: Prompt | None = None,
        inputs_embeds: Any = None,
        lora: str | None = None,
        like: Literal["torch", "cupy"],
        progress: bool = True,
    ) -> Any: ...

    def forward(
        self,
        prompt: Prompt | None = None,
        *,
        source: Prompt | None = None,
        inputs_embeds: Any = None,
        lora: str | None = None,
        like: str = "numpy",
        progress: bool = True,
    ) -> Any:
        """The logits of every position. [T] -> [T, V] float32

        Row i holds the next-token logits after tokens 0 to i. Text is encoded as in `generate`. Of an encoder-decoder
        `source` is what the encoder reads, and the prompt the decoder's text; its start token precedes it, so there
        is a row more. `lora` names one of the engine's adapters; `progress` shows a bar on a terminal or in a notebook.

        `inputs_embeds` are vectors in the place of the embeddings of the prompt's tokens, [T, E], as in `generate`.

        `like` is the library of the result: a NumPy array on the host, a tensor of "torch", or an array of "cupy". The
        last two stay where the engine computes, the GPU or the host, and share their memory by DLPack: no copy is made.

        Raises:
            PromptError: the prompt is empty, too long, not a single prompt, or has ids outside the vocabulary.
            ParameterError: there is no adapter of this name; or a source without an encoder, or none with one; `like`
                is another library, "cupy" on a CPU, or not installed.
            NumericalError: the logits contain NaN or infinity.

        Example:
            >>> logits = engine.forward("A list of colors: red,")
            >>> logits.shape, engine.tokenizer.token(logits[-1].argmax())
            ((8, 2048), ' orange')
        """
        refuse_task(self.config, "tokens", "forward")
        rows = None
        if inputs_embeds is not None:
            rows = read_embeddings(inputs_embeds, self.config, self._embedding_width)
            prompt = placeholders(rows, self.config) if prompt is None else prompt
        if prompt is None:
            raise PromptError("there is no prompt: give text, token ids or inputs_embeds")
        ids, encoder_input = text_and_source(self._maker, prompt, source)
        if rows is not None:
            check_lengths(ids, rows)
        check_lora(lora, self._maker.adapters)
        runner = self._open_runner
        stays = on_device(like, runner.backend.xp)
        with showing(read("progress", progress)):
            logits = all_logits(runner, ids, self._driver.turn, lora, encoder_input, rows, host=not stays)
        return handed_over(logits, like)

    def score(
        self, prompt: Prompt, *, source: Prompt | None = None, lora: str | None = None, progress: bool = True
    ) -> Score:
        """Log-probability of each token given the tokens before it; arguments as of `forward`.

        Raises:
            MinillmError: as `forward`.

        Example:
            >>> score = engine.score("A list of colors: red, orange")
            >>> f"{score.perplexity:.3f} {score.logprobs[-1]:.3f}"
            '2.278 -0.045'
        """
        refuse_task(self.config, "tokens", "score")
        ids, encoder_input = text_and_source(self._maker, prompt, source)
        check_lora(lora, self._maker.adapters)
        with showing(read("progress", progress)):
            logprobs = score_tokens(self._open_runner, ids, self._driver.turn, lora, encoder_input)
        return Score(ids, logprobs, [] if self.tokenizer is None else [*map(self.tokenizer.token_bytes, ids)])

    def score_continuations(
        self,
        prefixes: Prompt | Sequence[Prompt],
        continuations: Sequence[Prompt] | Sequence[Sequence[Prompt]],
        *,
        lora: str | None = None,
        progress: bool = True,
    ) -> "list[ContinuationScore] | list[list[ContinuationScore]]":
        """Log-probabilities of several continuations of a text, or of each of a list of texts.

        Each text is computed once, and many of them side by side. Text and continuation are encoded together, as
        lm-evaluation-harness does it: the continuation's tokens are those after as many as the text alone has.

        Args:
            prefixes: a text or token ids, or a list of such
            continuations: a list of continuations; of a list of prefixes one for each
            lora: name of one of the engine's adapters
            progress: show a bar on a terminal or in a notebook

        Raises:
            TaskError: the model generates no text.
            PromptError: a prompt is empty, too long with a continuation, or has ids outside the vocabulary.
            ParameterError: the lists differ in length, the model has an encoder, or there is no such adapter.
            NumericalError: the logits contain NaN or infinity.

        Example:
            >>> scores = engine.score_continuations("A list of colors: red,", [" orange", " pink", " seven"])
            >>> [f"{score.total:.2f}" for score in scores], scores[0].greedy
            (['-0.04', '-4.51', '-16.72'], True)
        """
        from .continuations import score_continuations  # loaded when it is needed, as `explain` is

        refuse_task(self.config, "tokens", "score_continuations")
        if self.config.encoder_layers:
            raise ParameterError("score_continuations is not offered with an encoder-decoder: score each by `score`")
        check_lora(lora, self._maker.adapters)
        single = is_prompt(prefixes)
        texts: Any = [prefixes] if single else prefixes
        endings: Any = [continuations] if single else continuations
        if len(texts) != len(endings) or any(is_prompt(ending) for ending in endings):
            raise ParameterError(
                f"continuations should be a list for {'the prefix' if single else f'each of the {len(texts)} prefixes'}"
            )
        cases = [with_continuations(self._maker, text, ending) for text, ending in zip(texts, endings, strict=True)]
        with showing(read("progress", progress)):
            scores = score_continuations(self._open_runner, cases, self._driver.turn, lora)
        return scores[0] if single else scores

    def explain(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        progress: bool = True,
        **fields: Unpack[GenerationFields],
    ) -> "Explanation":
        """The distribution of the next token, before and after each processor and filter that the fields ask for.

        `config` and `fields` are as in `generate`, `progress` as in `forward`. A notebook shows a table.

        Raises:
            PromptError, NumericalError: as `forward`.
            ParameterError: a field is impossible, asks for another strategy than greedy search and sampling, or leaves
                no token.

        Example:
            >>> explanation = engine.explain("A list of colors:", do_sample=True, top_k=0, top_p=0.9)
            >>> [(step.name, step.tokens_left) for step in explanation.steps]
            [('model', 2048), ('top_p 0.9', 9)]
        """
        from .explain import explain

        refuse_task(self.config, "tokens", "explain")
        generation_config = GenerationConfig.from_dict(fields) if config is None else config.merged(**fields)
        request = self._maker.make(prompt, generation_config)
        with showing(read("progress", progress)):
            return explain(self._open_runner, request, self.tokenizer, self._driver.turn)

    def attention(
        self,
        prompt: Prompt,
        layers: Collection[int] | None = None,
        *,
        lora: str | None = None,
        progress: bool = True,
    ) -> NDArray[np.float32]:
        """The attention weights of the prompt's last token over all its tokens. [T] -> [len(layers), H, T] float32

        The weights of each head sum to 1. `layers` are by default all that have attention; `lora` and `progress` as in
        `forward`. They are those before `hooks` at `attention.pattern`.

        Raises:
            PromptError: as `forward`.
            ParameterError: there is no such layer, or no adapter of this name.
            NumericalError: as `forward`.

        Example:
            >>> weights = engine.attention("A list of colors: red,", layers=[0, 5])
            >>> weights.shape, weights.sum(axis=-1).round(3).min()
            ((2, 6, 8), np.float32(1.0))
        """
        refuse_task(self.config, "tokens", "attention")
        if self.config.encoder_layers:
            raise ParameterError("attention is not offered with an encoder-decoder, which has three kinds of it")
        ids = encode_prompt(prompt, self.tokenizer, self.config, begin=False)
        check_lora(lora, self._maker.adapters)
        count = self.config.num_layers
        attending = self.config.layers_with_keys()
        layers = attending if layers is None else layers
        outside = next((layer for layer in layers if layer not in range(count)), None)
        if outside is not None:
            raise ParameterError(f"layer {shown(outside)}: the model's layers are 0 to {count - 1}")
        without = next((layer for layer in layers if layer not in attending), None)
        if without is not None:
            raise ParameterError(f"layer {without} has no attention: expected layers of {attending}")
        with showing(read("progress", progress)):
            return last_attention(self._open_runner, ids, layers, self._driver.turn, lora)

    # --- points inside the model ---------------------------------------------------------------------------------

    def names(self) -> dict[str, tuple[int | str, ...]]:
        """The points inside the model for `watch` and `hooks`: name -> shape of its array, in the computation's order.

        "T" and "S" stand for numbers of tokens: computed ones, and those of the context. `minillm.models.points` says
        what is at each.

        Raises:
            EngineStateError: the engine is closed, or another rank leads.

        Example:
            >>> engine.names()["blocks.0.attention.z"]
            ('T', 6, 32)
        """
        return self._target.hooks.shapes

    @contextmanager
    def hooks(self, functions: Mapping[str, Hook]) -> Iterator[None]:
        """Change what the model computes inside a `with` block, in all requests and calls; others begin after it.

        Args:
            functions: names of points (`names`; `*` stands for any one part of a name, `**` for any) and functions
                `function(array, place)`. Each gets a copy of the rows of one text, on a GPU in its memory, and the
                `Place`; it returns an array of the same shape, or None to leave them as they are. A position may be
                computed again, after a preemption or a guess that was wrong.

        Texts that run meanwhile share no pages of the K/V cache with others, as those of requests with `watch` or
        `hooks` never do. Gradients are not offered.

        Raises:
            ParameterError: a name is of no point.
            EngineStateError: the engine is closed, or another rank leads.

        Example:
            >>> with engine.hooks({"blocks.*.mlp.out": lambda array, place: array * 0}):
            ...     answer = engine.generate("Monday,", max_new_tokens=4)
        """
        runner = self._target
        active, added = runner.hooks.functions, runner.hooks.read((), functions).functions
        with self._driver.turn():
            active.update({name: (*active.get(name, ()), *own) for name, own in added.items()})
            runner.share_pages()
        try:
            yield
        finally:
            if not self._driver.closed:
                with self._driver.turn():  # other threads may have added some meanwhile
                    for name, own in added.items():
                        left = [*active.pop(name)]
                        for hook in own:
                            left.remove(hook)
                        active.update({name: tuple(left)} if left else {})
                    runner.share_pages()

    def _hooks_of(self, watch: object, functions: object) -> Hooks:
        return self._target.hooks.read(watch, functions)

    def _embedded(
        self,
        prompts: Sequence[Prompt | None] | None,
        inputs_embeds: object,
        make: Callable[..., Request],
        hooks: Hooks | None,
    ) -> list[Request]:
        """Requests whose prompts are given by vectors."""
        return embedded_requests(prompts, inputs_embeds, make, hooks, self.config, self._embedding_width)

    @property
    def _embedding_width(self) -> int:
        """Numbers in the vector of a token, W.

        Raises:
            ParameterError: several processes share the model.
        """
        if self.ranks is not None:
            raise ParameterError("inputs_embeds is not offered where several processes share the model: use one")
        model: Any = self._target.model
        return int(model.embedding.tokens.shape[1])

    @property
    def _target(self) -> Runner:
        """The runner, without waiting for a turn.

        Raises:
            EngineStateError: the engine is closed, or another rank leads.
        """
        runner = self._driver.loop.runners.get("target")
        if runner is None:
            raise EngineStateError("the engine is closed" if not self.rank else f"rank {self.rank} takes no calls")
        return runner

    @property
    def _open_runner(self) -> Runner:
        with self._driver.turn():
            return self.runner
