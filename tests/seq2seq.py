"""Tiny encoder-decoders of every family: what `test_<family>.py` beside the models' tests lists as its `CONFIGS`."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from minillm.batch import TokenSequence
from minillm.decoding.strategy import Request
from minillm.encoder_input import EncoderInput
from minillm.models import ENCODER_DECODERS
from minillm.runner.runner import Runner

from . import tiny
from .tiny import TOKENIZER, loop_of, run, runner_of, tiny_tensors

CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    family: import_module(f"tests.models.test_{family}").CONFIGS for family in ENCODER_DECODERS
}
"""Family -> name of a configuration -> its config.json, with which transformers builds the same model"""

PARAMETERS: dict[str, int] = {
    shape: count
    for family in ENCODER_DECODERS
    for shape, count in import_module(f"tests.models.test_{family}").PARAMETERS.items()
}
"""Published shape -> numbers of its checkpoint"""

CASES = [(family, name) for family, configs in CONFIGS.items() for name in configs]
GOLDEN_CASES = [(family, next(iter(configs))) for family, configs in CONFIGS.items()]
"""Those with a folder in tests/golden: the first of each family."""


def write_checkpoint(folder: Path, family: str = "t5", name: str = "", **fields: Any) -> Path:
    """A checkpoint folder with the small tokenizer, whose 512 tokens the model has unless `fields` say otherwise."""
    raw = CONFIGS[family][name or next(iter(CONFIGS[family]))] | {"vocab_size": 512} | fields
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file({name: tensor.load() for name, tensor in tiny_tensors(raw).items()}, folder / "model.safetensors")
    for file in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / file, folder / file)
    return folder


def request_for(source: Sequence[int], *, start: int = 0, decoder_prompt: Sequence[int] = (), **fields: Any) -> Request:
    """A request without text."""
    request = tiny.request_for([start, *decoder_prompt], **fields)
    return replace(request, source_ids=list(source))


def generate(runner: Runner, sources: Sequence[Sequence[int]], *, chunk: int = 512, **fields: Any) -> list[list[int]]:
    """The first continuation's tokens of each source, all run side by side."""
    config = runner.model.config
    options = {"vocab_size": config.vocab_size, "start": config.decoder_start_token_id} | fields
    requests = [request_for(source, **options) for source in sources]
    return [results[0].token_ids for results in run(loop_of(target=runner, chunk=chunk), requests)]


def logits_of(runner: Runner, source: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
    """The logits of every position of the decoder's tokens, in one pass with a cache of its own. [T] -> [T, V]"""
    P = runner.cache.page_size
    pages = -(-len(source) // P) + -(-len(tokens) // P)
    apart = runner_of(runner.model, backend=runner.backend, pages=pages, page_size=P)
    sequence = TokenSequence(list(tokens), encoder_input=EncoderInput(list(source)), private=True)
    return apart.forward([sequence], [len(tokens)], rows=range(len(tokens))).logits.copy()
