"""Calls that turn texts into vectors, labels and scores, and sounds into texts."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..config import ScoreFunction
from ..decoding.fields import GenerationFields
from ..decoding.request import check_lora
from ..errors import ParameterError, PromptError, TaskError, shown
from ..progress import showing
from ..tasks.embedding import Classification, Pair, Text, is_one_text, listed_texts
from ..tasks.late_interaction import ROLES, Role, role_prompt
from ..tasks.pooling import Pooling
from ..tasks.sparse_vectors import SparseVector
from ..tasks.transcription import Transcript
from ..text.tokenizer import EncodedText
from .arguments import read, refuse_task
from .token_readings import EngineTokenReadings


class EngineTextReadings(EngineTokenReadings):
    """The readings of whole texts and sounds."""

    # --- vectors and labels ----------------------------------------------------------------------------------------

    @property
    def embedding_prompts(self) -> Mapping[str, str]:
        """Texts that the checkpoint has for `embed` to put before others, by name, such as "query".

        Raises:
            TaskError, EngineStateError: as `embed`.
        """
        return self._passes("embedding_prompts").settings.prompts

    def embed(
        self,
        texts: Text | Sequence[Text],
        *,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        pooling: Pooling | None = None,
        truncate: bool = True,
        lora: str | None = None,
        progress: bool = True,
    ) -> NDArray[np.float32]:
        """The vectors of one text or of several, as sentence-transformers computes them: [E], or [N, E], float32.

        Any model embeds texts. How is said by the files of sentence-transformers in its folder; without them an encoder
        takes the mean of all tokens' hidden states, and a decoder the last token's (see `minillm.tasks.pooling`).

        Texts are computed beside the requests that generate, in pages of their own: `max_batch_size` and `cache_bytes`
        do not bound them. A pass has as many tokens as a step of prompts alone, or one longer text of an encoder.

        Args:
            texts: a text, or a list; token ids or what `encode` returns are taken too, and used as they are
            normalize: divide each vector by its length; by default as the checkpoint says
            dimensions: only so many leading numbers of each vector, for models that were trained for it (Matryoshka)
            prompt: goes before each text
            prompt_name: name of one of the checkpoint's prompts, such as "query"; by default its default one, if any
            pooling: "mean", "cls" (the first token), "last", "max", "mean_sqrt_len" or "weightedmean"; by default as
                the checkpoint says
            truncate: cut texts that are longer than the model reads, which a warning tells once; False: refuse them
            lora: name of one of the engine's adapters
            progress: show a bar on a terminal or in a notebook

        Raises:
            TaskError: the model is an encoder-decoder.
            PromptError: a text is empty, too long, not a text, or has ids outside the vocabulary.
            ParameterError: an argument is impossible.
            NumericalError: the hidden states contain NaN or infinity.
        """
        passes, single = self._passes("embed"), is_one_text(texts, pairs=False)
        check_lora(lora, self._maker.adapters)
        encoded = self.encode(
            listed_texts(texts, single=single), prompt=prompt, prompt_name=prompt_name, truncate=truncate
        )
        with showing(read("progress", progress)):
            vectors = passes.embed(encoded, pooling=pooling, normalize=normalize, dimensions=dimensions, lora=lora)
        return vectors[0] if single else vectors

    def embed_sparse(
        self,
        texts: Text | Sequence[Text],
        *,
        most: int | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate: bool = True,
        lora: str | None = None,
        progress: bool = True,
    ) -> SparseVector | list[SparseVector]:
        """The sparse vector of a text, by a SPLADE checkpoint or any masked language model; a list for several texts.

        A weight for each token of the vocabulary, as sentence-transformers' SparseEncoder. `embed` gives the same with
        the zeros, [N, V], of checkpoints with sentence-transformers' SpladePooling.

        Args:
            texts: a text, or a list
            most: tokens of a vector at most, the heaviest; by default as the checkpoint says
            prompt: as in `embed`
            prompt_name: as in `embed`
            truncate: as in `embed`
            lora: as in `embed`
            progress: as in `embed`

        Raises:
            TaskError: the model is no masked language model.
            PromptError, ParameterError, NumericalError: as `embed`.

        Example:
            vector = engine.embed_sparse("A man is eating food.", most=3)
            print(dict(zip(vector.tokens, vector.weights)))
        """
        passes, single = self._passes("embed_sparse"), is_one_text(texts, pairs=False)
        check_lora(lora, self._maker.adapters)
        members = listed_texts(texts, single=single)
        encoded = self.encode(members, prompt=prompt, prompt_name=prompt_name, truncate=truncate)
        with showing(read("progress", progress)):
            vectors = passes.embed_sparse(encoded, most=most, lora=lora)
        return vectors[0] if single else vectors

    def embed_tokens(
        self,
        texts: Text | Sequence[Text],
        role: Role = "document",
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate: bool = True,
        lora: str | None = None,
        progress: bool = True,
    ) -> NDArray[np.float32] | list[NDArray[np.float32]]:
        """The vectors of a text's tokens, by a late-interaction checkpoint (ColBERT); a list of such for several texts.

        They are projected and normalised as the checkpoint says, without the tokens that it leaves out. `score_pairs`
        compares them.

        Args:
            texts: a text, or a list
            role: "query" or "document", which have other prompts, markers and lengths
            prompt: goes before each text; by default the role's, if the checkpoint has one
            prompt_name: as in `embed`
            truncate: as in `embed`
            lora: as in `embed`
            progress: as in `embed`

        Returns:
            [k, W] float32 of a text.

        Raises:
            TaskError: the checkpoint is not made for late interaction.
            PromptError, ParameterError, NumericalError: as `embed`.
        """
        passes, single = self._passes("embed_tokens"), is_one_text(texts, pairs=False)
        check_lora(lora, self._maker.adapters)
        members = listed_texts(texts, single=single)
        encoded = self.encode(members, prompt=prompt, prompt_name=prompt_name, truncate=truncate, role=role)
        with showing(read("progress", progress)):
            vectors = passes.embed_tokens(encoded, role, lora=lora)
        return vectors[0] if single else vectors

    def hidden_states(
        self,
        texts: Text | Sequence[Text],
        *,
        truncate: bool = True,
        lora: str | None = None,
        progress: bool = True,
    ) -> NDArray[np.float32] | list[NDArray[np.float32]]:
        """The hidden states of every token of a text [T, E] float32, after the final norm; a list of such for several.

        Arguments and errors as of `embed`.
        """
        passes, single = self._passes("hidden_states"), is_one_text(texts, pairs=False)
        check_lora(lora, self._maker.adapters)
        encoded = [passes.encode(text, truncate=truncate) for text in listed_texts(texts, single=single)]
        with showing(read("progress", progress)):
            states = passes.hidden_states(encoded, lora=lora)
        return states[0] if single else states

    def classify(
        self,
        texts: Text | Pair | Sequence[Text | Pair],
        *,
        top_k: int | None = None,
        function: ScoreFunction | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate: bool = True,
        lora: str | None = None,
        progress: bool = True,
    ) -> "Classification | list[Classification]":
        """The labels of one text or of several, by a checkpoint for sequence classification or a reranker.

        A reranker may be a causal LM that sentence-transformers scores by two logits (its module LogitScore); it
        generates text besides.

        Args:
            texts: a text, a pair `(query, document)`, or a list of such; token ids or what `encode` returns are taken
                too
            top_k: only so many labels, the best; by default all
            function: turns logits into scores: "softmax", "sigmoid" or "none". By default what the checkpoint says:
                sentence-transformers' function of a reranker, else as transformers' pipeline does: "none" for
                regression, "sigmoid" for several labels at once or a single one, else "softmax"
            prompt: as in `embed`; where the chat template writes texts, it is the system's message
            prompt_name: as in `embed`
            truncate: as in `embed`
            lora: as in `embed`
            progress: as in `embed`

        Returns:
            A `Classification`, or a list of them in the order of the texts.

        Raises:
            TaskError: the model has no labels.
            PromptError, ParameterError, NumericalError: as `embed`.
        """
        if not self.labels:
            self.embedding.check()
            refuse_task(self.config, "labels", "classify")
        passes, single = self._passes("classify"), is_one_text(texts, pairs=True)
        check_lora(lora, self._maker.adapters)
        members = listed_texts(texts, single=single)
        if self.embedding.rerank_prompt is not None and any(isinstance(text, str) for text in members):
            raise PromptError("this reranker scores pairs (query, document), found one text: give two")
        encoded = self.encode(members, prompt=prompt, prompt_name=prompt_name, truncate=truncate)
        with showing(read("progress", progress)):
            classifications = passes.classify(encoded, top_k=top_k, function=function, lora=lora)
        return classifications[0] if single else classifications

    def score_pairs(
        self,
        query: str | Sequence[str],
        documents: Sequence[str],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate: bool = True,
        lora: str | None = None,
        progress: bool = True,
    ) -> NDArray[np.float32]:
        """How much each document has to do with a query, the larger the more. [N] float32

        A cross-encoder or a causal reranker reads both texts at once, and the score is that of `classify`; any other
        model compares their vectors as the checkpoint says (`EmbeddingSettings.compare`), or those of their tokens
        (`LateInteraction.compare`).

        Args:
            query: one for all documents, or a list of as many
            documents: N texts
            prompt: of a reranker the task, as in `classify`; else goes before the query
            prompt_name: likewise, one of the checkpoint's prompts
            truncate: as in `embed`
            lora: as in `embed`
            progress: as in `embed`

        Raises:
            TaskError: the model is an encoder-decoder, or classifies texts by several labels.
            PromptError, ParameterError, NumericalError: as `embed`.
        """
        queries = [query] * len(documents) if isinstance(query, str) else list(query)
        if isinstance(documents, str) or len(queries) != len(documents):
            given = "one text" if isinstance(documents, str) else f"{len(queries)} queries for {len(documents)}"
            raise ParameterError(f"documents should be a list of texts, with one query or as many, found {given}")
        options: dict[str, Any] = {"prompt": prompt, "prompt_name": prompt_name}
        shared: dict[str, Any] = {"truncate": truncate, "lora": lora, "progress": progress}
        if len(self.labels) > 1:
            raise TaskError(f"score_pairs needs a reranker; this model has {len(self.labels)} labels: use classify")
        if self.labels:
            results: Any = self.classify(list(zip(queries, documents, strict=True)), **options, **shared)
            return np.array([result.score for result in results], np.float32)
        distinct, late = list(dict.fromkeys(queries)), self.embedding.late
        compare: Any = self.embedding.compare if late is None else late.compare
        if late is None:
            of_queries: Any = self.embed(distinct, **options, **shared)
            of_documents: Any = self.embed(list(documents), **shared)
        else:
            of_queries = self.embed_tokens(distinct, "query", **options, **shared)
            of_documents = self.embed_tokens(list(documents), "document", **shared)
        vectors = dict(zip(distinct, of_queries, strict=True))
        pairs = zip(queries, of_documents, strict=True)
        return np.array([compare(vectors[text], vector) for text, vector in pairs], np.float32)

    def encode(
        self,
        texts: Sequence[Text | Pair],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate: bool = True,
        role: Role | None = None,
    ) -> list[EncodedText]:
        """Encode texts as `embed` and `classify` do, to count their tokens or to check them beforehand.

        `role` is for late interaction, as in `embed_tokens`. Other arguments and errors as of `embed`.
        """
        if role is not None and role not in ROLES:
            raise ParameterError(f"role {shown(role)} is not known: expected query or document")
        passes = self._passes("encode")
        if isinstance(texts, str):
            raise PromptError("encode takes a list of texts, found one: put it into a list")
        if role is not None and prompt is None and prompt_name is None:
            before = role_prompt(passes.settings.prompts, role)
        else:
            before = passes.settings.prompt_text(prompt, prompt_name)
        return [passes.encode(text, prompt=before, truncate=truncate, role=role) for text in texts]

    # --- sound ---------------------------------------------------------------------------------------------------

    def transcribe(
        self,
        samples: ArrayLike,
        *,
        language: str | None = None,
        task: str = "transcribe",
        timestamps: bool | Literal["word"] | None = None,
        prompt: str | None = None,
        condition_on_prev_tokens: bool | None = None,
        temperatures: Sequence[float] | None = None,
        compression_ratio_threshold: float | None = None,
        logprob_threshold: float | None = None,
        no_speech_threshold: float | None = None,
        progress: bool = True,
        **fields: Unpack[GenerationFields],
    ) -> Transcript:
        """Transcribe what is said in a sound, by a model of the family whisper.

        Args:
            samples: one channel, 16,000 numbers per second between -1 and 1, of any length, such as `read_wav` of
                `minillm.tasks.sound_files` reads from a file
            language: its code or English name, such as "de" or "German"; None: it is detected in the first 30 seconds
            task: "transcribe", or "translate" into English
            timestamps: whether the transcript is divided into segments with times; None: where the sound is longer than
                the model reads at once, 30 seconds, and needs them;
                "word": words have times too
            prompt: text that was said before, or shows how names are spelled
            condition_on_prev_tokens: whether each window is also told the text of those before it; None: as the
                checkpoint says, as for the thresholds
            temperatures: tried for each window, one after the other, until its text is not doubtful; 0: the likeliest
            compression_ratio_threshold: a text is doubtful that compresses more, such as 1.35
            logprob_threshold: a text is doubtful whose tokens' mean log-probability is lower, such as -1.0
            no_speech_threshold: such a text is left out where silence is likelier than this, such as 0.6
            progress: show a bar on a terminal or in a notebook
            **fields: fields of `GenerationConfig` for each window; with `temperature` also `do_sample=True`

        Raises:
            TaskError: the model does not read sound.
            PromptError: the samples are not one channel of finite numbers, or there is no tokenizer.
            ParameterError: an argument is impossible or without effect.
            MinillmError: as `generate`.

        Example:
            transcript = engine.transcribe(read_wav("talk.wav"), language="en", timestamps=True)
            print(transcript.text, transcript.segments[0].start)
        """
        from .transcribing import transcribe  # seldom needed

        options: dict[str, Any] = {"language": language, "task": task, "timestamps": timestamps, "prompt": prompt}
        fallback = {
            "temperatures": temperatures,
            "compression_ratio_threshold": compression_ratio_threshold,
            "logprob_threshold": logprob_threshold,
            "no_speech_threshold": no_speech_threshold,
        }
        options |= {"condition_on_prev_tokens": condition_on_prev_tokens, "fallback": fallback}
        return transcribe(self, samples, **options, progress=progress, fields={**fields})
