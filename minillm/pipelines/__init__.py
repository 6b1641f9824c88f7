"""Tasks by the names of transformers: `pipeline(task, model)`, called with a text or a list of texts.

Results have the form of transformers' pipelines, the sampling and lengths that neither the call nor the checkpoint sets
too. transformers 5 has no text2text-generation, translation, summarization and question-answering; theirs is the form
of transformers 4.57, with the parameters that config.json names for a task (T5's prefixes, beams and lengths) in
`task_specific_params`.

Source: transformers 5.23, `transformers.pipelines`; transformers 4.57, `pipelines/text2text_generation.py`.

__init__.py              tasks by name, and `pipeline`
base.py                  a model and its task
inputs.py                texts in
generating.py            the part that tasks which write text share
text_generation.py       continue a text, answer a conversation
text2text.py             texts by an encoder-decoder; summaries
translation.py           languages as prefixes or tokens
text_classification.py   labels of texts
feature_extraction.py    hidden states of texts
token_classification.py  labels of tokens, entities
question_answering.py    spans of a text that answer questions
fill_mask.py             tokens in the place of masks
zero_shot_classification.py  labels that a call names
speech.py                transcripts of sounds
"""

import inspect
import os
from difflib import get_close_matches
from typing import Any

from ..engine.engine import Engine
from ..errors import ParameterError, TaskError, listed, shown
from .base import Pipeline
from .feature_extraction import FeatureExtraction
from .fill_mask import FillMask
from .question_answering import QuestionAnswering
from .speech import SpeechRecognition
from .text2text import Summarization, Text2Text
from .text_classification import TextClassification
from .text_generation import TextGeneration
from .token_classification import TokenClassification
from .translation import DIRECTION, Translation
from .zero_shot_classification import ZeroShotClassification

TASKS: dict[str, type[Pipeline]] = {
    "text-generation": TextGeneration,
    "text2text-generation": Text2Text,
    "translation": Translation,
    "summarization": Summarization,
    "text-classification": TextClassification,
    "sentiment-analysis": TextClassification,
    "zero-shot-classification": ZeroShotClassification,
    "token-classification": TokenClassification,
    "ner": TokenClassification,
    "question-answering": QuestionAnswering,
    "fill-mask": FillMask,
    "feature-extraction": FeatureExtraction,
    "automatic-speech-recognition": SpeechRecognition,
}
"""Tasks by name; also translation_xx_to_yy."""


def pipeline(task: str, model: str | os.PathLike[str] | Engine | None = None, **options: Any) -> Pipeline:
    """A model made ready for a task, as `transformers.pipeline` does it.

    Args:
        task: "text-generation"; "text2text-generation", "summarization", "translation" or "translation_en_to_fr" for an
            encoder-decoder; "text-classification" (also "sentiment-analysis"), "zero-shot-classification",
            "token-classification" (also "ner"), "question-answering", "fill-mask", "feature-extraction"
            or "automatic-speech-recognition"
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
        return _made(kind, task, model, options)
    engine = Engine(model, **placement)
    try:
        return _made(kind, task, engine, options)
    except BaseException:
        engine.close()
        raise


def _kind_of(task: str) -> type[Pipeline]:
    if not isinstance(task, str):
        raise ParameterError(f"task should be text, found {shown(task)}")
    if task in TASKS:
        return TASKS[task]
    if DIRECTION.fullmatch(task):
        return Translation
    near = get_close_matches(task, TASKS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"expected {listed((*TASKS, 'translation_xx_to_yy'), 300)}"
    raise ParameterError(f"task {shown(task)} is not known: {hint}")


def _made(kind: type[Pipeline], task: str, engine: Engine, options: dict[str, Any]) -> Pipeline:
    if not kind.fits(engine):
        fitting, family = ", ".join(tasks_of(engine)) or "none", engine.config.model_type
        raise TaskError(
            f"{engine.name}, a model of the family {family}, does not fit the task {task}: its tasks are {fitting}"
        )
    return kind(task, engine, **options)


def tasks_of(engine: Engine) -> list[str]:
    """Names of the tasks that an engine's model fits."""
    return [name for name, kind in TASKS.items() if kind.fits(engine)]
