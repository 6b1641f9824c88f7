"""minillm translate: texts through an encoder-decoder into another language, a line for each."""

from .options import add_text_options
from .parser import Parser
from .summarize import add_other_options, run

__all__ = ["DESCRIPTION", "EPILOG", "add_options", "run"]

DESCRIPTION = "Translate texts with an encoder-decoder, such as T5 or mBART: a line for each."
EPILOG = """examples:
  minillm translate -m google/flan-t5-small --source en --target fr "Thank you."
  minillm translate -m Helsinki-NLP/opus-mt-en-de --file english.txt > de.txt
"""


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    texts = add_text_options(parser)
    texts.add_argument("--source", metavar="LANGUAGE", help="of the texts, such as en or en_XX, if the model needs it")
    texts.add_argument("--target", metavar="LANGUAGE", help="of the translations, likewise")
    add_other_options(parser, task="translation", key="translation_text", doing="translating")
