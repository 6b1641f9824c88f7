"""Whisper on two ranks: frames travel with the encoder's pass, and the texts are those of one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.encoder_input import AudioFeatures
from minillm.parallel import Parallel

from ..whisper import CONFIGS, frames_for
from .ranks import on_ranks

FOLDER = Path(__file__).parents[1] / "golden_speech" / "whisper"


def transcripts(engine: Engine) -> list[Any]:
    sounds = [AudioFeatures(frames_for(CONFIGS["base"], seed)) for seed in range(2)]
    answers = engine.generate(sounds, max_new_tokens=8, no_repeat_ngram_size=2)
    return [[answer.token_ids for answer in answers], engine.forward([2, 9, 7], source=sounds[0])]


@pytest.mark.slow
def test_transcripts_are_those_of_one_process() -> None:
    tokens, logits = on_ranks(Parallel(tensor=2), transcripts, FOLDER).result
    alone = transcripts(Engine(FOLDER, backend="numpy"))
    assert tokens == alone[0] and tokens[0] != tokens[1]
    np.testing.assert_allclose(logits, alone[1], rtol=0, atol=1e-4)
