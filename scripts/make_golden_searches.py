"""Makes the golden files of the searches that transformers moved out: what release 4.55.4, the last with all, finds.

    python -m venv env && env/bin/pip install torch==2.13.0 transformers==4.55.4
    env/bin/python scripts/make_golden_searches.py [NAME ...]     # rewrites files of tests/golden_searches/

The models are the checkpoints under tests/golden/. Each file holds random configurations of one search on them, each
with a prompt, the new tokens of every returned sequence and their scores; "made_by" names versions, seed and models.

transformers pads a group of beams that is done and lets the groups after it avoid the padding as if it had been chosen
(a slip: the paper penalises what a group chose). And beams that advance by alternatives of one constraint share what
they have of it. Configurations whose result depends on which token pads, or on that sharing, are left out and counted
in "left_out". Prompts hold no token of a phrase, so that it does not matter whether one there counts.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.generation.beam_constraints import DisjunctiveConstraint

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

SEED = 4
V = 96
FORCED = 64
"""The first token of phrases that a text has to contain"""
DIVERSE_VARIANTS = ("pre-norm", "post-norm", "galactica")
CONTRASTIVE_VARIANTS = ("pre-norm", "untied", "galactica", "no-final-norm", "post-norm")
"""post-norm last: the other cases stay as they were drawn"""
DOLA_VARIANTS = ("pre-norm", "untied", "galactica", "no-final-norm")
"""post-norm has hidden states of another width than its head reads: there transformers fails"""


def main() -> None:
    """Write the files, or those that the command line names."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    files: dict[str, tuple[tuple[str, ...], int, Any, int]] = {
        "diverse": (DIVERSE_VARIANTS, 150, diverse_fields, V),
        "contrastive": (CONTRASTIVE_VARIANTS, 75, contrastive_fields, V),
        "constrained": (DIVERSE_VARIANTS, 150, constrained_fields, FORCED),
        "dola": (DOLA_VARIANTS, 60, dola_fields, V),
    }
    for name in sys.argv[1:] or files:
        write(name, *files[name])


def diverse_fields(rng: np.random.Generator) -> dict[str, Any]:
    """A configuration of diverse beam search; in most of them the end is likely."""
    groups, size = int(rng.integers(2, 5)), int(rng.integers(1, 4))
    fields: dict[str, Any] = {
        "num_beams": groups * size,
        "num_beam_groups": groups,
        "diversity_penalty": float(rng.choice([0.2, 0.7, 1.5, 10.0])),
        "num_return_sequences": int(rng.integers(1, groups * size + 1)),
        "max_new_tokens": int(rng.choice([2, 3, 4, 6, 9, 13])),
        "early_stopping": [True, False, "never"][rng.integers(3)],
        "length_penalty": float(rng.choice([-1.0, 0.0, 0.7, 1.0, 2.0])),
    }
    ends = int(rng.choice([0, 3, 15, 30]))
    if ends:
        fields["eos_token_id"] = rng.choice(V, ends, replace=False).tolist()
    if rng.random() < 0.25:
        fields["repetition_penalty"] = float(rng.choice([0.8, 1.3]))
    return fields


def contrastive_fields(rng: np.random.Generator) -> dict[str, Any]:
    """A configuration of contrastive search."""
    fields: dict[str, Any] = {
        "penalty_alpha": float(rng.choice([0.1, 0.4, 0.6, 0.9, 1.0])),
        "top_k": int(rng.integers(2, 9)),
        "max_new_tokens": int(rng.integers(5, 30)),
    }
    ends = int(rng.choice([0, 1, 5]))
    if ends:
        fields["eos_token_id"] = rng.choice(V, ends, replace=False).tolist()
    if rng.random() < 0.25:
        fields["repetition_penalty"] = float(rng.choice([0.8, 1.3]))
    return fields


def dola_fields(rng: np.random.Generator) -> dict[str, Any]:
    """A configuration of DoLa on models of two layers."""
    layers: Any = [[0], [1], [0, 1], "low", "high"][rng.integers(5)]
    fields: dict[str, Any] = {"dola_layers": layers, "max_new_tokens": int(rng.integers(5, 25))}
    ends = int(rng.choice([0, 1, 5]))
    if ends:
        fields["eos_token_id"] = rng.choice(V, ends, replace=False).tolist()
    if rng.random() < 0.5:
        fields["repetition_penalty"] = float(rng.choice([0.8, 1.2]))
    return fields


def constrained_fields(rng: np.random.Generator) -> dict[str, Any]:
    """A configuration of constrained beam search, with room for its phrases."""
    tokens = iter(rng.permutation(np.arange(FORCED, V)).tolist())

    def phrase() -> list[int]:
        return [next(tokens) for _ in range(rng.integers(1, 4))]

    def alternatives() -> list[list[int]]:
        first, second = phrase(), phrase()
        return [first, [first[0], *second] if len(first) > 1 and rng.random() < 0.5 else second]

    words: list[Any] = [alternatives() if rng.random() < 0.4 else phrase() for _ in range(rng.integers(1, 4))]
    least = sum(max(map(len, word)) if isinstance(word[0], list) else len(word) for word in words)
    num_beams = int(rng.integers(2, 7))
    fields: dict[str, Any] = {
        "force_words_ids": words,
        "num_beams": num_beams,
        "num_return_sequences": int(rng.integers(1, num_beams + 1)),
        "max_new_tokens": least + int(rng.integers(0, 8)),
        "early_stopping": [True, False, "never"][rng.integers(3)],
        "length_penalty": float(rng.choice([-1.0, 0.0, 0.7, 1.0, 2.0])),
    }
    ends = int(rng.choice([0, 3, 15, 30]))
    if ends:
        fields["eos_token_id"] = rng.choice(FORCED, ends, replace=False).tolist()
    if rng.random() < 0.25:
        fields["repetition_penalty"] = float(rng.choice([0.8, 1.3]))
    return fields


def write(name: str, variants: tuple[str, ...], count: int, draw: Any, prompts_below: int) -> None:
    """One file."""
    rng = np.random.default_rng(SEED)
    cases, left_out, hashes = [], 0, {}
    for variant in variants:
        folder = ROOT / "tests" / "golden" / "opt" / variant
        hashes[variant] = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        model = transformers.OPTForCausalLM.from_pretrained(folder).eval()
        model.generation_config = transformers.GenerationConfig()  # its end-of-sequence token would fill in for None
        for _ in range(count // len(variants)):
            fields, prompt = draw(rng), rng.integers(3, prompts_below, rng.integers(1, 12)).tolist()
            first, *others = outcomes(model, prompt, fields)
            if all(same(first, other) for other in others):
                cases.append({"model": variant, "prompt": prompt, "fields": fields} | first)
            else:
                left_out += 1
    made_by = {
        "script": "scripts/make_golden_searches.py",
        "seed": SEED,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "sha256": hashes,
    }
    lines = ",\n".join(json.dumps(case) for case in cases)
    text = f'{{"made_by": {json.dumps(made_by)},\n"left_out": {left_out},\n"cases": [\n{lines}\n]}}\n'
    path = ROOT / "tests" / "golden_searches" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"{path.name}: {len(cases)} cases, {left_out} left out")


def outcomes(model: transformers.OPTForCausalLM, prompt: list[int], fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of transformers, and those that it would have without each of its slips."""
    pad, other = padding(fields)
    results = [run(model, prompt, fields, pad), run(model, prompt, fields, other)]
    shared = DisjunctiveConstraint.copy
    try:
        DisjunctiveConstraint.copy = apart(shared)
        return [*results, run(model, prompt, fields, pad)]
    finally:
        DisjunctiveConstraint.copy = shared


def apart(shared: Any) -> Any:
    """A method `copy` whose result has a list of its own."""

    def copy(self: DisjunctiveConstraint, stateful: bool = False) -> DisjunctiveConstraint:
        twin = shared(self, stateful)
        twin.current_seq = [*twin.current_seq]
        return twin

    return copy


def same(first: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if two outcomes are equal."""
    return first["sequences"] == other["sequences"] and np.allclose(first["scores"], other["scores"])


def padding(fields: dict[str, Any]) -> list[int]:
    """Two tokens to pad with, neither of which ends a sequence."""
    return [token for token in range(V) if token not in fields.get("eos_token_id", [])][:2]


def run(model: transformers.OPTForCausalLM, prompt: list[int], fields: dict[str, Any], pad: int) -> dict[str, Any]:
    """New tokens of each returned sequence, up to the first that ends it, and the scores where there are any."""
    ends = fields.get("eos_token_id", [])
    options = {"eos_token_id": None, "output_scores": True, "return_dict_in_generate": True} | fields
    mask = torch.ones(1, len(prompt), dtype=torch.long)
    config = transformers.GenerationConfig(pad_token_id=pad, **options)
    try:
        out = model.generate(torch.tensor([prompt]), attention_mask=mask, generation_config=config)
    except RuntimeError:  # constrained search cannot give the scores of some texts that lack a phrase
        config.output_scores = False
        out = model.generate(torch.tensor([prompt]), attention_mask=mask, generation_config=config)
    sequences = []
    for line in out.sequences[:, len(prompt) :].tolist():
        stop = next((i + 1 for i, token in enumerate(line) if token in ends), len(line))
        sequences.append(line[:stop])
    scores = getattr(out, "sequences_scores", None)
    return {"sequences": sequences, "scores": [] if scores is None else scores.tolist()}


if __name__ == "__main__":
    main()
