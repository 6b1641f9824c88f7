"""Makes the golden files: tiny random checkpoints of every family, with the results of transformers.

    python scripts/make_golden.py             # needs the reference extra; rewrites tests/golden/
    python scripts/make_golden.py llama       # one family of it

Each folder under tests/golden/<family>/ is a checkpoint as saved by transformers (fp32), with `expected.json`
(prompts, greedy tokens, beams and their scores, and in "made_by" the versions and the seed) and `expected.safetensors`
(logits and hidden states of one prompt, all positions). Those of encoder-decoders are under
tests/golden_encoder_decoders/; their prompts are sources, and the logits those of a decoder's text after one. Whisper's
is tests/golden_speech/whisper; it reads random frames.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests import huggingface, seq2seq, whisper  # noqa: E402
from tests.families import CONFIGS, GOLDEN_CASES  # noqa: E402
from tests.models.test_whisper import CONFIG  # noqa: E402
from tests.tiny import NO_REPEATS, random_prompts  # noqa: E402

SEED = 1
NEW_TOKENS = 30
BEAMS: list[dict[str, Any]] = [
    {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 12},
    {
        "num_beams": 3,
        "num_return_sequences": 2,
        "max_new_tokens": 12,
        "length_penalty": -0.5,
        "eos_token_id": [22, 24, 28, 35, 62],
    },
    {
        "num_beams": 3,
        "num_return_sequences": 3,
        "max_new_tokens": 12,
        "early_stopping": True,
        "eos_token_id": list(range(40, 60, 3)),
    },
]


def main() -> None:
    """Write all of them, or those of the families that are named."""
    kinds = ("golden", CONFIGS, GOLDEN_CASES), ("golden_encoder_decoders", seq2seq.CONFIGS, seq2seq.GOLDEN_CASES)
    for place, configs, cases in kinds:
        folder, wanted = ROOT / "tests" / place, sys.argv[1:] or list(configs)
        for family in wanted:
            shutil.rmtree(folder / family, ignore_errors=True)
        for family, name in cases:
            if family in wanted:
                write(folder / family / name.replace(",", "").replace(" ", "-"), configs[family][name])
    if "whisper" in (sys.argv[1:] or ["whisper"]):
        write_speech(ROOT / "tests" / "golden_speech" / "whisper", CONFIG)


def write_speech(folder: Path, raw: dict[str, Any]) -> None:
    """The folder of a model that reads sound."""
    model = huggingface.build_model(raw, SEED)
    huggingface.save(model, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    line = [raw["decoder_start_token_id"], *np.random.default_rng(SEED).integers(3, raw["vocab_size"], 20).tolist()]
    sounds = [torch.tensor(whisper.frames_for(raw, seed).T[None]) for seed in range(3)]
    config = transformers.GenerationConfig(
        decoder_start_token_id=line[0], pad_token_id=0, max_new_tokens=NEW_TOKENS, **NO_REPEATS
    )
    with torch.no_grad():
        logits = model(input_features=sounds[0], decoder_input_ids=torch.tensor([line])).logits[0].numpy()
        lines = [
            transformers.GenerationMixin.generate(model, input_features=sound, generation_config=config)[0, 1:].tolist()
            for sound in sounds
        ]
    save_file({"logits": logits}, folder / "expected.safetensors")
    made_by = {"script": "scripts/make_golden.py", "seed": SEED, "transformers": transformers.__version__}
    expected = {"made_by": made_by, "token_ids": line, "greedy": lines}
    (folder / "expected.json").write_text(json.dumps(expected) + "\n", encoding="utf-8")
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)


def write(folder: Path, raw: dict[str, Any]) -> None:
    """One configuration's folder."""
    model = huggingface.build_model(raw, SEED)
    huggingface.save(model, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)  # without seeds and defaults of the installed version
    prompts = random_prompts(8, seed=SEED)
    line = np.random.default_rng(SEED).integers(0, model.config.vocab_size, 40).tolist()
    if model.config.is_encoder_decoder:
        ids = [model.config.decoder_start_token_id, *line[:20]]
        expected_arrays = {"logits": huggingface.decoder_logits(model, line, ids)}
    else:
        expected_arrays = {"logits": huggingface.logits(model, line), "hidden": huggingface.hidden(model, line)}
    save_file(expected_arrays, folder / "expected.safetensors")
    expected = {
        "made_by": {
            "script": "scripts/make_golden.py",
            "seed": SEED,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "token_ids": line,
        "prompts": prompts,
        "greedy": [greedy(model, prompt) for prompt in prompts],
        "beams": [beams(model, prompts[:3], fields) for fields in BEAMS],
    }
    parts = ",\n".join(f'"{name}": {json.dumps(value)}' for name, value in expected.items())
    (folder / "expected.json").write_text("{\n" + parts + "\n}\n", encoding="utf-8")
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)


def greedy(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    """The tokens of greedy search."""
    lines: list[list[int]] = huggingface.generate(model, prompt, max_new_tokens=NEW_TOKENS, **NO_REPEATS)[0]
    return lines[0]


def beams(model: transformers.PreTrainedModel, prompts: list[list[int]], fields: dict[str, Any]) -> dict[str, Any]:
    """The results of beam search with these fields, for each prompt."""
    results = [huggingface.generate(model, prompt, **fields) for prompt in prompts]
    return {"fields": fields, "sequences": [tokens for tokens, _ in results], "scores": [s for _, s in results]}


if __name__ == "__main__":
    main()
