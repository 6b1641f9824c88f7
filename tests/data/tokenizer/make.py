"""Makes the small vocabulary beside this file and the golden encodings that transformers gives for it.

    python tests/data/tokenizer/make.py        # needs the reference extra; rewrites every .json and .txt beside it

The folder has the layout of the published OPT checkpoints: vocab.json, merges.txt and a tokenizer_config.json that
names `</s>` as BOS and EOS, `<pad>` as padding, and asks for BOS in front of a prompt. `<s>` and `<unk>` have ids and
are not special, as there.
"""

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]
VOCABULARY_SIZE = 512

CORPUS = [
    "A list of colors: red, green, blue, yellow, orange, purple, black, white.",
    "A list of fruits: apple, pear, plum, cherry, orange, lemon, fig, quince.",
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind; it's asleep.",
    "Once upon a time there was a king who counted to ten: one, two, three, four, five, six, seven, eight, nine, ten.",
    "He said: “I can't go, I won't go, and they'd better not ask.” She'll ask, they're sure, I've heard.",
    "Le café est à côté de la forêt; le garçon préfère le thé. Ça coûte 12 €, peut-être 15 €.",
    "Die Straße führt über die Brücke, und die Mädchen hören schöne Lieder.",
    "В начале было слово, и слово было на стене. Слово осталось.",
    "日本語の文章です。日本の天気はいいです。日本語はむずかしい。",
    "Smile 😀 and smile 😀 again, then laugh 😂 and laugh 😂.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))  # 3\n",
    '{"name": "Ada", "age": 36, "tags": ["math", "code"]}\n',
]

TEXTS = [
    "",
    " ",
    "A list of colors: red",
    "A list of colors: red,",
    " leading space",
    "trailing space ",
    "two  spaces,   three,          many",
    "line\nbreaks\n\nand\r\nothers\n",
    "\ttabs\t\tand \t mixtures \n \n",
    "don't can't we'll they've I'M IT'S",
    "numbers 3.14159, 1,000,000 and 0x1F; CamelCase, snake_case, kebab-case",
    "le café à 12 €, naïve, Straße",
    "cafe\u0301 and caf\u00e9 are spelled differently",
    "слово и дело",
    "日本語と中文 한국어",
    "smile 😀 family 👨\u200d👩\u200d👧 flag 🇨🇭 thumb 👍🏽",
    "math: ∀x∈ℝ ⌈x⌉ ≥ x, 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "عربي and עברית",
    "non-breaking\u00a0space, zero\u200bwidth, \ufeffmark, \u0085next line, \u2028separator",
    "\x00\x01\x7f control characters \ufffd replacement",
    "</s>",
    "before</s>after",
    "before </s> after</s></s>",
    "<pad> <s> <unk> </s",
    "<s>A list</s><pad><pad>",
    "Ġ and ▁ and <0x41> and <|endoftext|> are text here",
    "a" * 60,
    "!?" * 20 + "..." * 7,
    '{"name": "Ada", "tags": ["x"]}',
    "def f(x):\n    return x\n",
]


def train() -> None:
    """vocab.json and merges.txt: byte-level BPE, special tokens first, then the 256 byte symbols, then the merges."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.model.save(str(HERE))


def write_settings() -> None:
    """tokenizer_config.json, with the fields of the published OPT checkpoints."""

    def added(content: str) -> dict[str, object]:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
        return {"content": content, **flags, "__type": "AddedToken"}

    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "errors": "replace",
        "bos_token": added("</s>"),
        "eos_token": added("</s>"),
        "unk_token": added("</s>"),
        "pad_token": added("<pad>"),
        "add_prefix_space": False,
        "add_bos_token": True,
    }
    (HERE / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def write_golden() -> None:
    """golden.json: ids of each text, and texts of ids drawn at random, most of them broken UTF-8."""
    import tokenizers
    import transformers

    reference = transformers.GPT2Tokenizer.from_pretrained(HERE)
    draw = random.Random(0)
    drawn = [[draw.randrange(VOCABULARY_SIZE) for _ in range(draw.randrange(1, 12))] for _ in range(40)]
    golden = {
        "made_by": {
            "script": "tests/data/tokenizer/make.py",
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "encode": [
            {
                "text": text,
                "ids": reference(text)["input_ids"],
                "bare": reference.encode(text, add_special_tokens=False),
            }
            for text in TEXTS
        ],
        "decode": [
            {"ids": ids, "text": reference.decode(ids, skip_special_tokens=True), "with_special": reference.decode(ids)}
            for ids in drawn
        ],
    }
    # One case a line: a change shows as a changed line.
    parts = [f'"made_by": {json.dumps(golden["made_by"])}']
    parts += [f'"{name}": [\n{_one_per_line(golden[name])}\n]' for name in ("encode", "decode")]
    (HERE / "golden.json").write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def _one_per_line(cases: list[dict[str, object]]) -> str:
    return ",\n".join(json.dumps(case) for case in cases)


if __name__ == "__main__":
    train()
    write_settings()
    write_golden()
