"""Random changes to the files of a checkpoint folder after which they contradict one another.

Each change returns the words by which a warning would speak of it: keys, and the texts of tokens.
"""

from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

from .checkpoints import PROMPT, Files

Change = Callable[[Random, Files], set[str]]

TOKENS = ("<|im_end|>", "<|x|>", "<s>", "</s>", "<pad>", "hello", "ello", "[MASK]", "[SEP]", "world", "a token")
"""Texts of tokens: new ones, those of the vocabularies, words, and one of two words"""
FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")
ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token", "sep_token", "cls_token", "image_token")
IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
MOST = 4
"""Changes of one folder"""


def contradict(rng: Random, files: Files) -> tuple[Files, set[str]]:
    """A copy with 1 to `MOST` changes, and the words of all of them."""
    changed, words = deepcopy(files), set()
    area = rng.choice(AREAS)
    for change in rng.choices(list(area), list(area.values()), k=rng.randint(1, MOST)):
        words |= change(rng, changed)
    stored = changed.objects.get("generation_config")
    if stored is not None and stored.get("eos_token_id") is None:
        # Then the text ends here at config.json's, and in transformers nowhere.
        stored["eos_token_id"] = changed.config.get("eos_token_id")
    return changed, words


def _token(rng: Random, text: str) -> Any:
    """A token as text, or as an object with some flags."""
    if rng.random() < 0.5:
        return text
    flags = {name: rng.random() < 0.4 for name in FLAGS if rng.random() < 0.7}
    return {"__type": "AddedToken", "content": text, **flags}


def _added_tokens_decoder(rng: Random, files: Files) -> set[str]:
    table = files.settings.setdefault("added_tokens_decoder", {})
    tokens = rng.sample(TOKENS, rng.randint(1, 3))
    for text in tokens:
        token_id = rng.choice([_own_id(files, text), _own_id(files, text), files.some_id(rng), files.rows - 14])
        flags = {name: rng.random() < 0.4 for name in FLAGS}
        table[str(token_id if isinstance(token_id, int) else 0)] = {"content": text, **flags}
    return {"added_tokens_decoder", *tokens}


def _own_id(files: Files, text: str) -> int:
    """The id that a tokenizer.json gives a token, or the next free one."""
    vocab = files.objects.get("tokenizer", {}).get("model", {}).get("vocab", {})
    return int(vocab.get(text, len(vocab) or 266))


def _added_tokens(rng: Random, files: Files) -> set[str]:
    tokens = rng.sample(TOKENS, rng.randint(1, 3))
    first = _own_id(files, "")
    table = {text: rng.choice([_own_id(files, text), first + i]) for i, text in enumerate(tokens)}
    files.objects["added_tokens"] = table
    return {"added_tokens", "added tokens", *tokens}


def _further_tokens(rng: Random, files: Files) -> set[str]:
    name = rng.choice(["extra_special_tokens", "extra_special_tokens", "additional_special_tokens"])
    where = files.settings if rng.random() < 0.8 else files.objects.setdefault("special_tokens_map", {})
    tokens = rng.sample(TOKENS, rng.randint(1, 3))
    listed = [_token(rng, text) for text in tokens]
    where[name] = {f"x{i}_token": token for i, token in enumerate(listed)} if rng.random() < 0.3 else listed
    return {name, *tokens}


def _role(rng: Random, files: Files) -> set[str]:
    name, text = rng.choice(ROLES), rng.choice(TOKENS)
    where = files.settings if rng.random() < 0.5 else files.objects.setdefault("special_tokens_map", {})
    where[name] = None if rng.random() < 0.1 else _token(rng, text)
    return {name, text}


SETTINGS: dict[str, list[Any]] = {
    "do_lower_case": [True, False],
    "strip_accents": [True, False, None],
    "tokenize_chinese_chars": [True, False],
    "add_prefix_space": [True, False],
    "split_special_tokens": [True, True, False],
    "add_bos_token": [True, False],
    "add_eos_token": [True, False],
    "clean_up_tokenization_spaces": [True, False],
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": [True],
    "model_max_length": [len(PROMPT), 512, 10**30],
    "truncation_side": ["left", "right"],
    "padding_side": ["left", "right"],
    "model_input_names": [["input_ids"], ["input_ids", "token_type_ids", "attention_mask"]],
    "legacy": [True, False],
    "unk_token": [None, "<unk>"],
    "never_split": [["hello"]],
    "errors": ["strict", "ignore"],
    "spaces_between_special_tokens": [True, False],
    "max_length": [3],
    "truncation": [True],
    "pad_token_id": [7],
    "bos_token_id": [5],
    "eos_token_id": [5],
    "vocab_size": [3],
}


def _setting(rng: Random, files: Files) -> set[str]:
    name = rng.choice(list(SETTINGS))
    files.settings[name] = rng.choice(SETTINGS[name])
    return {name}


def _class(rng: Random, files: Files) -> set[str]:
    """Name the general class.

    Others, and the family's own that stands for none, build their tokenizer.json anew, with the tokens that the class
    usually has: what is known of these is in `minillm.text.tokenizer.layouts`.
    """
    if "tokenizer" in files.objects:
        files.settings["tokenizer_class"] = rng.choice(["PreTrainedTokenizerFast", "TokenizersBackend"])
    return {"tokenizer_class"}


def _tokenizer_json(rng: Random, files: Files) -> set[str]:
    """Other flags of its added tokens, and frames, cuts and padding that a text does not get."""
    tokenizer = files.objects.get("tokenizer")
    if tokenizer is None:
        return set()
    match rng.randrange(4):
        case 0:
            tokenizer["post_processor"] = None
        case 1:
            cut = {"direction": rng.choice(["Left", "Right"]), "max_length": 4, "strategy": "LongestFirst", "stride": 0}
            tokenizer["truncation"] = cut
        case 2:
            tokenizer["padding"] = {"strategy": {"Fixed": 20}, "direction": "Right", "pad_to_multiple_of": None}
            tokenizer["padding"] |= {"pad_id": 2, "pad_type_id": 0, "pad_token": "<pad>"}
        case _:
            token = rng.choice(tokenizer["added_tokens"])
            name = rng.choice(FLAGS)
            token[name] = not token[name]
            return {token["content"], name}
    return {"truncation", "padding", "post_processor"}


def _special_id(rng: Random, files: Files) -> set[str]:
    """A special token's id in one of the two files that name it."""
    name, value = rng.choice(IDS), files.some_id(rng)
    if name == "eos_token_id" and rng.random() < 0.4:
        value = [value, files.some_id(rng)]
        value = [token_id for token_id in value if token_id is not None] or None
    where = files.config if rng.random() < 0.5 else files.generation
    where[name] = value
    return {name}


GENERATION: dict[str, list[Any]] = {
    "no_repeat_ngram_size": [0, 1, 3],
    "num_beams": [1, 2, 3],
    "repetition_penalty": [1.0, 1.5, 0.5],
    "min_length": [0, 9, 12],
    "min_new_tokens": [0, 4],
    "max_length": [8, 10, 20],
    "max_new_tokens": [2, 30],
    "length_penalty": [2.0, 0.0],
    "early_stopping": [True, False],
    "do_sample": [True, False],
    "temperature": [0.3, 1.0],
    "top_k": [1, 5],
    "top_p": [0.5],
    "use_cache": [True, False],
    "num_return_sequences": [1],
    "encoder_no_repeat_ngram_size": [1, 2],
    "renormalize_logits": [True],
}
TOKENS_OF_GENERATION = ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens")


def _generation(rng: Random, files: Files) -> set[str]:
    """A field of generation in one of the two files that have it, or in both with different values."""
    if rng.random() < 0.25:
        files.objects.pop("generation_config", None)
    files_named = [files.config] if rng.random() < 0.5 else [files.generation]
    if rng.random() < 0.2:
        files_named = [files.config, files.generation]
    name = rng.choice([*GENERATION, *TOKENS_OF_GENERATION])
    for where in files_named:
        if name in GENERATION:
            where[name] = rng.choice(GENERATION[name])
        elif name.startswith("forced"):
            where[name] = files.some_id(rng)
        else:
            where[name] = [token_id for token_id in [files.some_id(rng), 5] if token_id is not None]
    return {name}


def _rope(rng: Random, files: Files) -> set[str]:
    kind = rng.choice(["default", "linear", "dynamic", "yarn", "llama3"])
    table: dict[str, Any] = {rng.choice(["rope_type", "type"]): kind, "factor": rng.choice([2.0, 4.0])}
    if kind == "llama3":
        table |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    if rng.random() < 0.3:
        table["original_max_position_embeddings"] = rng.choice([16, 32])
    if rng.random() < 0.4:
        table["rope_theta"] = rng.choice([10000.0, 500.0])
    name = rng.choice(["rope_parameters", "rope_scaling"])
    files.config[name] = table
    match rng.randrange(4):
        case 0:
            files.config["rope_theta"] = rng.choice([10000.0, 500.0])
        case 1:
            files.config["original_max_position_embeddings"] = rng.choice([16, 32])
        case 2:
            files.config.pop("rope_parameters", None)
            files.config["rope_scaling"] = table
    return {name, "rope_theta", "original_max_position_embeddings"}


def _shape(rng: Random, files: Files) -> set[str]:
    """A size that the weights do not have, or have anyhow."""
    values: dict[str, list[Any]] = {
        "vocab_size": [files.rows - 1, files.rows + 1, 266, 31],
        "num_key_value_heads": [1, 2, 4, None],
        "head_dim": [4, 8, 16, None],
        "num_attention_heads": [2, 8],
        "num_hidden_layers": [2],
        "max_position_embeddings": [32, 65],
        "intermediate_size": [40, 41],
        "attention_bias": [True, False],
        "mlp_bias": [True, False],
        "num_local_experts": [1, 4],
        "sliding_window": [None, 3],
        "hidden_act": ["gelu", "silu"],
    }
    if files.kind == "bart":  # here encoder_layers counts, which the tensors confirm; there the last of the two
        del values["num_hidden_layers"]
    name = rng.choice(list(values))
    files.config[name] = rng.choice(values[name])
    return {name}


def _head(rng: Random, files: Files) -> set[str]:
    if rng.random() < 0.7:
        files.config["tie_word_embeddings"] = rng.choice([True, False])
    files.weights = rng.choice(["usual", "without head", "tied head", "another head"])
    return {"tie_word_embeddings", "lm_head.weight"}


def _dtype(rng: Random, files: Files) -> set[str]:
    files.config[rng.choice(["torch_dtype", "dtype"])] = rng.choice(["float16", "bfloat16", "float32", None])
    files.weights = rng.choice(["usual", "float16"])
    return {"dtype"}


def _architecture(rng: Random, files: Files) -> set[str]:
    match rng.randrange(3):
        case 0:
            files.config["architectures"] = rng.choice([None, [], ["OPTForCausalLM"], ["LlamaModel"]])
        case 1:
            files.config["is_decoder"] = rng.choice([True, False])
        case _:
            files.config["tokenizer_class"] = "PreTrainedTokenizerFast"
    return {"architectures", "tokenizer_class"}


def _quantization(rng: Random, files: Files) -> set[str]:
    method = rng.choice(["gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors", None])
    table = {"quant_method": method, "bits": 4, "group_size": 128} if method else {}
    files.config["quantization_config"] = table | ({"load_in_4bit": True} if method == "bitsandbytes" else {})
    return {"quantization_config"}


def _index(rng: Random, files: Files) -> set[str]:
    """An index that lists more tensors than the files hold, or fewer."""
    index = dict(files.index)
    match rng.randrange(4):
        case 0:
            del index[rng.choice(list(index))]
        case 1:
            index[rng.choice(["lm_head.weight", "model.layers.9.weight", "more"])] = next(iter(index.values()))
        case 2:
            name = rng.choice(list(index))
            index[name] = next(file for file in index.values() if file != index[name])
    files.weights = "shards"
    files.objects["model.safetensors.index"] = {"metadata": {"total_size": rng.choice([1, 10**6])}, "weight_map": index}
    return {"index", "lm_head.weight"}


TEXT: dict[Change, int] = {
    _added_tokens_decoder: 6,
    _added_tokens: 2,
    _further_tokens: 4,
    _role: 5,
    _setting: 6,
    _class: 1,
    _tokenizer_json: 3,
}
"""Changes of the tokenizer's files, and how often each is drawn"""
MODEL: dict[Change, int] = {
    _special_id: 7,
    _generation: 7,
    _rope: 3,
    _shape: 2,
    _head: 3,
    _dtype: 2,
    _architecture: 1,
    _quantization: 1,
    _index: 2,
}
"""The same of the model's"""
AREAS = (TEXT, TEXT, MODEL, TEXT | MODEL)
"""Half of the folders have a model without contradictions, whose results need not be computed again"""
