"""Text to token ids and back.

encoding.py       Tokenizer, StreamDecoder: encoding, decoding, decoding token by token
fitting.py        texts and pairs with token types, cut to a number of tokens
aligned.py        the same with the place of each token, in windows
settings.py       what stands beside a vocabulary: which keys count, and what they change
added_tokens.py   the tokens that it adds
turn_ends.py      which tokens end a turn of a conversation
cleaning.py       decoded text without the spaces before punctuation
layouts.py        the files of a checkpoint folder -> an object of the `tokenizers` library, which encodes and decodes
sentencepiece.py  a SentencePiece tokenizer.model -> the same, with the `sentencepiece` package
partial.py        a tokenizer of a large vocabulary, of which a short text gets the part that it needs
seq2seq.py        mBART, Pegasus, MarianMT: SentencePiece models whose pieces the checkpoint numbers anew; languages
wordpiece.py      the vocab.txt of BERT -> the same
guarded.py        errors of the `tokenizers` library in one line
hazards.py        refuses files that would end the process inside it
"""

from .encoding import StreamDecoder, Tokenizer
from .fitting import EncodedText, encode_texts
from .layouts import LAYOUTS

__all__ = ["LAYOUTS", "EncodedText", "StreamDecoder", "Tokenizer", "encode_texts"]
