"""The `Translation` of each architecture that has one; loaded with the first file that is read or written."""

from .latent import DeepSeekTranslation, MiniCPM3Translation
from .translation import Translation

TRANSLATIONS: dict[str, Translation] = {
    "deepseek2": DeepSeekTranslation(),
    "minicpm3": MiniCPM3Translation(),
}
"""By `general.architecture`"""


def translation_of(architecture: str) -> Translation:
    """The rules of an architecture beside its tables."""
    return TRANSLATIONS.get(architecture, Translation())
