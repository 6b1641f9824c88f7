"""The `Translation` of each architecture that has one; loaded with the first file that is read or written."""

from .delta_nets import DeltaNetTranslation
from .encoders import EmbeddingGemmaTranslation, EncoderTranslation, JinaBertTranslation, ModernBertTranslation
from .experts import (
    Dots1Translation,
    ErnieExpertTranslation,
    GraniteExpertTranslation,
    MiniMaxTranslation,
    SharedGateTranslation,
    SigmoidExpertTranslation,
)
from .gemma4 import Gemma4Translation
from .latent import DeepSeekTranslation, MiniCPM3Translation
from .lfm2_moe import Lfm2MoeTranslation
from .mamba import FalconTranslation, GraniteHybridTranslation, NemotronTranslation
from .mistral4 import Mistral4Translation
from .rotations import Glm4Translation, Ministral3Translation
from .translation import Translation
from .windows import Exaone4Translation, Olmo2Translation

TRANSLATIONS: dict[str, Translation] = {
    "bert": EncoderTranslation(),
    "deepseek2": DeepSeekTranslation(),
    "dots1": Dots1Translation(),
    "ernie4_5-moe": ErnieExpertTranslation(),
    "exaone4": Exaone4Translation(),
    "falcon-h1": FalconTranslation(),
    "gemma-embedding": EmbeddingGemmaTranslation(),
    "gemma4": Gemma4Translation(),
    "glm4": Glm4Translation(),
    "glm4moe": SigmoidExpertTranslation(),
    "granitemoe": GraniteExpertTranslation(),
    "granitehybrid": GraniteHybridTranslation(),
    "jina-bert-v2": JinaBertTranslation(),
    "lfm2moe": Lfm2MoeTranslation(),
    "mistral3": Ministral3Translation(),
    "minimax-m2": MiniMaxTranslation(),
    "mistral4": Mistral4Translation(),
    "minicpm3": MiniCPM3Translation(),
    "nemotron_h": NemotronTranslation(),
    "nemotron_h_moe": NemotronTranslation(),
    "modern-bert": ModernBertTranslation(),
    "nomic-bert": EncoderTranslation(),
    "olmo2": Olmo2Translation(),
    "qwen2moe": SharedGateTranslation(),
    "qwen3next": DeltaNetTranslation(in_turn=False),
    "qwen35": DeltaNetTranslation(in_turn=True),
    "qwen35moe": DeltaNetTranslation(in_turn=True),
}
"""By `general.architecture`"""


def translation_of(architecture: str) -> Translation:
    """The rules of an architecture beside its tables."""
    return TRANSLATIONS.get(architecture, Translation())
