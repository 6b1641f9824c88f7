"""Whisper (Radford et al., arXiv 2212.04356): an encoder of sound, and a decoder that writes what is said.

    x = gelu(conv(gelu(conv(frames)))) + positions[i]
    x = x + attention(norm(x));  x = x + mlp(norm(x))                                          in the encoder
    y = tokens[ids] + positions[i]
    y = y + attention(norm(y));  y = y + cross(norm(y), norm(x));  y = y + mlp(norm(y))        in the decoder
    logits = norm(y) W_tokens

The layers are BART's with pre-norm, and projections of keys without a bias. The encoder reads frames of a log-mel
spectrogram (`tasks/log_mel.py`), two for each position; its positions are sinusoidal, and stored.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..backends.operations import Backend
from ..config import Fields
from ..errors import UnsupportedModelError
from ..layers.audio import WIDTH, AudioEmbedding
from ..layers.embedding import Embedding, LMHead
from .bart import NORM_EPSILON, BartConfig, decoder_layer, encoder_layer, read
from .encoder_decoder import Encoder, EncoderDecoder
from .parameters import Weights
from .tensor_names import Names

ARCHITECTURES = ("WhisperForConditionalGeneration", "WhisperModel")
"""The architectures that are run; others label sounds, or are a decoder alone"""


def read_config(raw: Mapping[str, Any]) -> BartConfig:
    """Whisper's configuration from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: another architecture than `ARCHITECTURES`; or as of `bart.read_config`.
    """
    fields = Fields(raw)
    for name in fields.get("architectures", []):
        if name not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"config.json: architectures is {name!r:.80}; of this family minillm runs {ARCHITECTURES[0]}"
            )
    special = {"bos_token_id": 50256, "eos_token_id": 50256, "decoder_start_token_id": 50257}
    switches = {"pre_norm": True, "embedding_norm": False, "learned_positions": True, "final_norm": True}
    length = fields.size("max_target_positions", 448)
    unscaled = {**raw, "max_position_embeddings": length, "scale_embedding": False}  # which transformers does not read
    config = read(unscaled, "whisper", special, **switches)
    return replace(
        config,
        max_source_positions=fields.size("max_source_positions", 1500),
        frame_width=fields.size("num_mel_bins", 80),
        median_filter_width=fields.size("median_filter_width", 7),
        biased=("q_proj", "v_proj"),
    )


NAMES = Names(prefixes=("model.",), embedding="decoder.embed_tokens.weight", head="proj_out.weight")
"""Tensors of checkpoints: model.encoder.conv1.weight, model.decoder.layers.0.encoder_attn.q_proj.weight, ..."""


def build(config: BartConfig, weights: Weights, backend: Backend) -> EncoderDecoder:
    """Build the model."""
    E, V, M = config.hidden_size, config.vocab_size, config.frame_width
    encoder, decoder = weights.at("encoder"), weights.at("decoder")
    tokens = decoder.table("embed_tokens", V, E, "vocabulary")
    return EncoderDecoder(
        config=config.sharded(weights.ranks),
        embedding=Embedding(
            tokens,
            decoder.table("embed_positions", config.max_positions, E, "positions"),
        ),
        layers=tuple(decoder_layer(config, decoder.at(f"layers.{i}"), i) for i in range(config.num_layers)),
        final_norm=decoder.layer_norm("layer_norm", E, NORM_EPSILON),
        head=LMHead(tokens),
        encoder=Encoder(
            AudioEmbedding(
                encoder.convolution("conv1", E, WIDTH, inputs=M),
                encoder.convolution("conv2", E, WIDTH, inputs=E),
                encoder.table("embed_positions", config.max_source_positions, E, "positions"),
            ),
            tuple(encoder_layer(config, encoder.at(f"layers.{i}")) for i in range(config.encoder_layers)),
            encoder.layer_norm("layer_norm", E, NORM_EPSILON),
        ),
    )
