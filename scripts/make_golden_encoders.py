"""Makes the golden files of encoders: tiny random checkpoints, with what transformers computes of them.

    python scripts/make_golden_encoders.py          # needs the reference extra; rewrites tests/golden_encoders/
    python scripts/make_golden_encoders.py electra  # this configuration's alone

Each folder is a checkpoint as saved by transformers (fp32), with expected.json (texts as token ids, their token types,
the versions and the seed) and expected.safetensors (hidden states of every token of each text; logits of the labels).
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.encoders import CONFIGS, OF_TRANSFORMERS, texts  # noqa: E402
from tests.huggingface import build_encoder  # noqa: E402

SEED = 1


def main() -> None:
    """Write those that the command line names, or all of them."""
    folder = ROOT / "tests" / "golden_encoders"
    if not sys.argv[1:]:
        shutil.rmtree(folder, ignore_errors=True)
    torch.set_grad_enabled(False)
    for name in sys.argv[1:] or OF_TRANSFORMERS:
        write(folder / name.replace(", ", "-"), name)


def write(folder: Path, name: str) -> None:
    """One configuration's folder."""
    model = build_encoder(CONFIGS[name], SEED)
    model.save_pretrained(folder)
    arrays, types, lines = {}, [], texts(3, seed=SEED, longest=20)
    for i, line in enumerate(lines):
        pairs = getattr(model.config, "type_vocab_size", 0) > 1
        of_line = [int(k >= len(line) // 2) for k in range(len(line))] if pairs else []
        given = {"input_ids": torch.tensor([line])} | ({"token_type_ids": torch.tensor([of_line])} if of_line else {})
        arrays[f"hidden.{i}"] = model.base_model(**given).last_hidden_state[0].numpy()
        if hasattr(model, "num_labels") and "SequenceClassification" in type(model).__name__:
            arrays[f"logits.{i}"] = model(**given).logits[0].numpy()
        types.append(of_line)
    save_file({key: np.ascontiguousarray(value) for key, value in arrays.items()}, folder / "expected.safetensors")
    made_by = {"script": "scripts/make_golden_encoders.py", "seed": SEED, "transformers": transformers.__version__}
    expected = {"made_by": made_by | {"torch": torch.__version__}, "texts": lines, "types": types}
    (folder / "expected.json").write_text(json.dumps(expected) + "\n", encoding="utf-8")
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)


if __name__ == "__main__":
    main()
