"""The tokens of texts that a model reads as they are given: to score them, and to look at its logits."""

from collections.abc import Sequence

from ..encoder_input import EncoderInput
from ..errors import ParameterError, PromptError, shown
from .encoder_prompts import decoder_ids, source_of
from .prompts import Prompt, encode_prompt, encode_text
from .request import RequestMaker
from .settings import GenerationConfig


def text_and_source(
    maker: RequestMaker, prompt: Prompt, source: Prompt | None
) -> tuple[list[int], EncoderInput | None]:
    """The tokens of a given text, and its source if the model has an encoder.

    Raises:
        PromptError: as `RequestMaker.make`; likewise ParameterError, and if there is a source without an encoder, or
            none with one.
    """
    ids = encode_prompt(prompt, maker.tokenizer, maker.config, begin=False)
    if not maker.config.encoder_layers:
        if source is not None:
            raise ParameterError("source has no effect: the model has no encoder; leave it out")
        return ids, None
    if source is None:
        raise ParameterError("source is missing: the model's encoder reads it; the prompt is the decoder's text")
    ids = decoder_ids(maker, GenerationConfig(decoder_prompt=ids), room=0)
    return ids, source_of(source, maker, begin=False)


def with_continuations(
    maker: RequestMaker, prefix: Prompt, continuations: Sequence[Prompt]
) -> tuple[list[int], list[list[int]]]:
    """The tokens of a text, and those of each continuation.

    A continuation in text is encoded together with the text: it is what follows as many tokens as that has alone.

    Raises:
        PromptError: as `RequestMaker.make`.
    """
    ids = encode_prompt(prefix, maker.tokenizer, maker.config, begin=False)
    endings = []
    for continuation in continuations:
        if isinstance(prefix, str) and isinstance(continuation, str):
            whole = encode_prompt(prefix + continuation, maker.tokenizer, maker.config, begin=False)
            ending = whole[len(ids) :]
        else:
            alone = continuation
            if isinstance(continuation, str):
                alone = encode_text(continuation, maker.tokenizer, maker.config, add_special_tokens=False)
            ending = encode_prompt(alone, maker.tokenizer, maker.config, begin=False)
        if not ending:
            raise PromptError(
                f"the continuation {shown(continuation)} adds no token to the text: it is empty, or merges with "
                "the text's last token; begin it with a space, or give token ids"
            )
        # the last token is predicted, not read; this checks the length
        encode_prompt([*ids, *ending[:-1]], maker.tokenizer, maker.config, begin=False)
        endings.append(ending)
    return ids, endings
