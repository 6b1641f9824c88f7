"""Tiny random models in transformers, and what they say. Needs the reference extra."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from .tiny import std_of, tiny_config

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)


BIASES = ("final_logits_bias", "e_score_correction_bias", "expert_bias", "layer_scalar")
"""Endings of names of what is stored, though it is not trained"""


GAINS = (".weight", "layer_scalar", "router.scale", "per_expert_scale")
"""Endings of names of vectors that are drawn around 1"""


def stores_gains_less_one(raw: dict[str, Any]) -> bool:
    """Whether the gains of a model's norms are numbers around 0: Gemma's, but for Gemma 4's."""
    return raw["model_type"].startswith("gemma") and raw["model_type"] != "gemma4_text"


def tolerance(config: Any) -> float:
    """How near logits and hidden states are to transformers': twice as far with delta nets, which divide by norms."""
    return 1e-4 * (1 + hasattr(config, "linear"))


def build(variant: str = "pre-norm", seed: int = 0, **fields: Any) -> transformers.PreTrainedModel:
    """A variant of OPT with random weights, biases and norms."""
    return build_model(tiny_config(variant, **fields), seed)


def class_of(raw: dict[str, Any]) -> Any:
    """The class of a decoder with an LM head: the list of all, but of Mistral 4, which it lacks."""
    return transformers.Mistral4ForCausalLM if raw["model_type"] == "mistral4" else transformers.AutoModelForCausalLM


def build_model(raw: dict[str, Any], seed: int = 0) -> transformers.PreTrainedModel:
    """A model of any family, from its config.json, with random weights, biases and norms."""
    raw = copy.deepcopy(raw)  # transformers writes into nested tables
    config = transformers.AutoConfig.for_model(**raw)
    kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else class_of(raw)
    kind = transformers.AutoModelForSpeechSeq2Seq if config.model_type == "whisper" else kind
    make = kind.from_config if hasattr(kind, "from_config") else kind._from_config
    model = make(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(BIASES)]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *biases]:
            if not parameter.requires_grad and not name.endswith(BIASES):
                continue  # sinusoidal positions
            parameter.normal_(0, std_of(name, raw), generator=generator)
            if parameter.ndim == 1 and name.endswith(GAINS) and not stores_gains_less_one(raw):
                parameter.add_(1)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model


def save(model: transformers.PreTrainedModel, folder: Path, **options: Any) -> Path:
    """A checkpoint folder as transformers writes it."""
    model.save_pretrained(folder, **options)
    return folder


@torch.no_grad()
def logits(model: transformers.PreTrainedModel, token_ids: Sequence[int]) -> np.ndarray:
    """[T] -> [T, V]"""
    return model(torch.tensor([list(token_ids)])).logits[0].float().numpy()


@torch.no_grad()
def decoder_logits(model: transformers.PreTrainedModel, source: Sequence[int], token_ids: Sequence[int]) -> np.ndarray:
    """Those of an encoder-decoder after a source. [T] -> [T, V]"""
    inputs = {"input_ids": torch.tensor([list(source)]), "decoder_input_ids": torch.tensor([list(token_ids)])}
    return model(**inputs).logits[0].float().numpy()


@torch.no_grad()
def hidden(model: transformers.PreTrainedModel, token_ids: Sequence[int]) -> np.ndarray:
    """The states that the head multiplies. [T] -> [T, W]"""
    return model.base_model(torch.tensor([list(token_ids)])).last_hidden_state[0].numpy()


@torch.no_grad()
def generate(
    model: transformers.PreTrainedModel, token_ids: Sequence[int], **fields: Any
) -> tuple[list[list[int]], list[float]]:
    """Each returned sequence's new tokens, without padding, and its score where it has one."""
    options = {"eos_token_id": None, "do_sample": False} | fields
    allowed = options.pop("prefix_allowed_tokens_fn", None)
    given, more = len(token_ids), {}
    if (negative := options.pop("negative_prompt", None)) is not None:
        more = {"negative_prompt_ids": torch.tensor([list(negative)])}
    processors = options.pop("logits_processor", None)
    if model.config.is_encoder_decoder:
        start = options.setdefault("decoder_start_token_id", model.config.decoder_start_token_id)
        decoder_ids = [start, *options.pop("decoder_prompt", ())]
        given, more = len(decoder_ids), {"decoder_input_ids": torch.tensor([decoder_ids])}
    out = model.generate(
        torch.tensor([list(token_ids)]),
        generation_config=transformers.GenerationConfig(
            pad_token_id=0, output_scores=True, return_dict_in_generate=True, **options
        ),
        prefix_allowed_tokens_fn=allowed,
        logits_processor=processors,
        **more,
    )
    new = out.sequences[:, given:].tolist()
    scores = getattr(out, "sequences_scores", None)
    return [_unpadded(line, options["eos_token_id"] or []) for line in new], [] if scores is None else scores.tolist()


def _unpadded(line: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    ends = [i for i, token in enumerate(line) if token in eos_token_ids]
    return line[: ends[0] + 1] if ends else line


def build_encoder(raw: dict[str, Any], seed: int = 0, *, labels: bool | None = None) -> transformers.PreTrainedModel:
    """A model from its config.json with a head of labels, or without; by default as `architectures` says."""
    if labels is None:
        labels = any("SequenceClassification" in each for each in raw.get("architectures", []))
    known = copy.deepcopy({name: value for name, value in raw.items() if name not in ("architectures", "num_labels")})
    config = transformers.AutoConfig.for_model(**known)
    if raw.get("num_labels"):
        config.num_labels = raw["num_labels"]
    kind = transformers.AutoModelForSequenceClassification if labels else transformers.AutoModel
    model = kind.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, std_of(name, raw), generator=generator)
            if parameter.ndim == 1 and name.endswith(GAINS) and not stores_gains_less_one(raw):
                parameter.add_(1)
    return model
