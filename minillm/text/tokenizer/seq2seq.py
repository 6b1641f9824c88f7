"""SentencePiece models beside which the checkpoint has tokens of its own, or whose pieces it numbers anew.

| files | ids | around a text |
|---|---|---|
| mBART: `sentencepiece.bpe.model` | 4 special tokens, pieces from the third on, languages, `<mask>` | `A </s> en_XX` |
| mBART-50: the same, with 52 languages | the same | `en_XX A </s>` |
| XLM-RoBERTa: `sentencepiece.bpe.model` | mBART's without languages | `<s> A </s>` |
| DeBERTa v2, v3: `spm.model` | pieces, then `[MASK]` | `[CLS] A [SEP]` |
| T5, mT5: `spiece.model` | pieces, then `extra_ids` tokens `<extra_id_99>` to `<extra_id_0>` | `A </s>` |
| Pegasus: `spiece.model` | `<pad>`, `</s>`, 103 tokens of pre-training, pieces from the second on | `A </s>` |
| MarianMT: `source.spm`, `target.spm`, `vocab.json` | those of vocab.json; other pieces are unknown | `A </s>` |

The ids are those of fairseq (Liu et al., arXiv 2001.08210, Tang et al., arXiv 2008.00401, Conneau et al., arXiv
1911.02116), of T5 (Raffel et al., arXiv 1910.10683), of Pegasus (Zhang et al., arXiv 1912.08777) and of Marian
(Junczys-Dowmunt et al., arXiv 1804.00344), as transformers reads them. A text of
MarianMT may begin with the language to translate into, `>>fra<<`, where the vocabulary has such tokens.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import CheckpointError, ParameterError, UnsupportedModelError, listed, shown
from ...files import read_json
from .hazards import check_ids

if TYPE_CHECKING:
    import tokenizers

BPE_FILE, PIECES_FILE, MARIAN_FILE = "sentencepiece.bpe.model", "spiece.model", "source.spm"
DEBERTA_FILE = "spm.model"

# fmt: off
MBART_CODES = (
    "ar_AR", "cs_CZ", "de_DE", "en_XX", "es_XX", "et_EE", "fi_FI", "fr_XX", "gu_IN", "hi_IN", "it_IT", "ja_XX", "kk_KZ",
    "ko_KR", "lt_LT", "lv_LV", "my_MM", "ne_NP", "nl_XX", "ro_RO", "ru_RU", "si_LK", "tr_TR", "vi_VN", "zh_CN",
)
"""mBART's languages, in the order of their ids."""
MBART50_CODES = (
    *MBART_CODES, "af_ZA", "az_AZ", "bn_IN", "fa_IR", "he_IL", "hr_HR", "id_ID", "ka_GE", "km_KH", "mk_MK", "ml_IN",
    "mn_MN", "mr_IN", "pl_PL", "ps_AF", "pt_XX", "sv_SE", "sw_KE", "ta_IN", "te_IN", "th_TH", "tl_XX", "uk_UA", "ur_PK",
    "xh_ZA", "gl_ES", "sl_SI",
)
# fmt: on
CODES = {"MBartTokenizer": MBART_CODES, "MBart50Tokenizer": MBART50_CODES}
"""Tokenizer class -> its languages"""
DEFAULT_LANGUAGE = "en_XX"
"""mBART's source language if tokenizer_config.json has no `src_lang`"""

MOST_EXTRA = 2**16
"""Sentinels of a T5 at most"""
PEGASUS_OFFSET = 103
"""Tokens of pre-training: `<mask_1>`, `<mask_2>`, `<unk_2>` to `<unk_102>`"""


class Languages(NamedTuple):
    """The languages of an mBART, and the tokens around a text in one of them."""

    ids: dict[str, int]
    """Code of each language, such as "en_XX", and its token"""
    source: str
    """The language of the texts"""
    end: int
    """The end-of-sequence token"""
    first: bool
    """Whether the language's token precedes a text (mBART-50) or follows its end (mBART)"""

    @classmethod
    def of(
        cls, kind: str, backend: "tokenizers.Tokenizer", settings: Mapping[str, Any], role_ids: Mapping[str, int]
    ) -> "Languages | None":
        """A tokenizer class's language codes, if it has some that the vocabulary has.

        Raises:
            CheckpointError: `src_lang` is none of them, or there is no end-of-sequence token.
        """
        ids = {code: token for code in CODES.get(kind, ()) if (token := backend.token_to_id(code)) is not None}
        if not ids:
            return None
        source = settings.get("src_lang") or DEFAULT_LANGUAGE
        if source not in ids:
            raise CheckpointError(f"tokenizer_config.json: src_lang is {source!r:.60}; expected one of {listed(ids)}")
        if "eos_token" not in role_ids:
            raise CheckpointError("prompts end with the EOS token, and tokenizer_config.json names none")
        return cls(ids, source, role_ids["eos_token"], first=kind == "MBart50Tokenizer")

    def read_as(self, code: str) -> "Languages":
        """The same with texts in another language.

        Raises:
            ParameterError: there is no such language; the message lists those that there are.
        """
        if code not in self.ids:
            raise ParameterError(f"language {shown(code)}: expected one of {listed(self.ids)}")
        return self._replace(source=code)

    def around(self, ids: list[int]) -> list[int]:
        """A text's token ids with the special tokens before and after them."""
        language = self.ids[self.source]
        return [language, *ids, self.end] if self.first else [*ids, self.end, language]


class Vocabulary(NamedTuple):
    """The tokens of a checkpoint whose text a SentencePiece model splits."""

    ids: dict[str, int]
    special: tuple[str, ...] = ()
    """Tokens that are not text, beside the model's own"""
    codes: re.Pattern[str] | None = None
    """A token that is not split at the beginning of a text: a language"""


def find_model(folder: Path, kind: str) -> Path | None:
    """The SentencePiece file of a folder with one of these tokenizers, None if there is none."""
    candidates = {
        PIECES_FILE: kind in ("PegasusTokenizer", "T5Tokenizer"),
        BPE_FILE: kind in CODES or kind == "XLMRobertaTokenizer",
        DEBERTA_FILE: kind == "DebertaV2Tokenizer",
        MARIAN_FILE: True,
    }
    return next((folder / name for name, fits in candidates.items() if fits and (folder / name).exists()), None)


def vocabulary_of(path: Path, kind: str, settings: Mapping[str, Any], pieces: Sequence[str]) -> Vocabulary:
    """The checkpoint's tokens for the pieces of its SentencePiece model, in the model's order.

    Raises:
        CheckpointError: vocab.json is no table of tokens and ids, or T5's `extra_ids` is no count.
        UnsupportedModelError: MarianMT with a second vocabulary for the target.
    """
    if path.name == MARIAN_FILE:
        return _read_marian(path.parent, settings)
    if path.name == DEBERTA_FILE:
        return _numbered([], pieces, ["[MASK]"])
    if path.name == BPE_FILE:
        return _numbered(["<s>", "<pad>", "</s>", "<unk>"], pieces[3:], [*CODES.get(kind, ()), "<mask>"])
    if kind == "T5Tokenizer":
        extra = settings.get("extra_ids", 100)
        if type(extra) is not int or not 0 <= extra <= MOST_EXTRA:
            raise CheckpointError(f"tokenizer_config.json: extra_ids should be 0 to {MOST_EXTRA}, found {extra!r:.60}")
        return _numbered([], pieces, [f"<extra_id_{i}>" for i in reversed(range(extra))])
    names = [f"<mask_{i}>" for i in (1, 2)] + [f"<unk_{i}>" for i in range(2, PEGASUS_OFFSET)]
    return _numbered(["<pad>", "</s>", *names], pieces[2:], [])


def _numbered(before: Sequence[str], pieces: Sequence[str], after: Sequence[str]) -> Vocabulary:
    """Special tokens, pieces and further special tokens, with ids in this order."""
    return Vocabulary({token: i for i, token in enumerate([*before, *pieces, *after])}, (*before, *after))


def _read_marian(folder: Path, settings: Mapping[str, Any]) -> Vocabulary:
    if settings.get("separate_vocabs") or (folder / "target_vocab.json").exists():
        raise UnsupportedModelError(
            f"{folder}: separate_vocabs: source and target have vocabularies of their own; minillm runs MarianMT "
            "with one for both"
        )
    path = folder / "vocab.json"
    ids = read_json(path)
    check_ids(iter(ids.values()), len(ids), str(path))
    if "<unk>" not in ids or "</s>" not in ids or sorted(ids.values()) != [*range(len(ids))]:
        raise CheckpointError(f"{path} should number its tokens from 0, `<unk>` and `</s>` among them")
    special = [name for name in ("<unk>", "</s>", "<pad>") if name in ids]
    return Vocabulary(ids, tuple(special), re.compile(">>.*?<<", re.DOTALL))
