"""Train the small OPT that ships with minillm, on the corpus of `demo_corpus.py`.

    python scripts/train_demo_model.py --seconds 1500

It builds the tokenizer, trains `transformers.OPTForCausalLM` for the given time, stores it in float16, reads it back,
measures it on the held-out texts and writes the model card with what it found. Needs the `reference` extra. An
interrupt (Ctrl-C) ends the training early; the model is stored and measured as it stands then. Where other programs
share the cores, OMP_WAIT_POLICY=PASSIVE in the environment keeps torch's threads from waiting busily for each other.
"""

import argparse
import copy
import math
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import torch
from demo_card import EOS, Measures, Training, measure, write_card
from demo_corpus import training_documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]  # ids 0 to 3, as in the published OPT
PAD = 1
VOCABULARY = 2048
POSITIONS = 512
BATCH_TOKENS = 2048
WINDOWS = (256, 256, 256, 512)  # lengths, in turn: short ones are faster, long ones train the last positions
PEAK_LEARNING_RATE = 2.5e-3
WARM_UP = 0.03  # share of the time
SAVE_EVERY = 240.0  # seconds
DEFAULT_OUT = Path(__file__).parent.parent / "minillm" / "assets" / "demo-opt"


def train_tokenizer(seed: int) -> Tokenizer:
    """Byte-level BPE over 40,000 training texts; encoding puts `</s>` in front, as OPT's tokenizer does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((d.text for d in islice(training_documents(seed), 40_000)), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"the corpus gives {tokenizer.get_vocab_size()} tokens, expected {VOCABULARY}")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A", pair="</s> $A </s> $B", special_tokens=[("</s>", EOS)]
    )
    return tokenizer


def batches(tokenizer: Tokenizer, seed: int) -> Iterator[torch.Tensor]:
    """Packed training texts, `</s>` before each; `[windows, length + 1]` of int64, the lengths by turns."""
    documents = training_documents(seed)
    stream: list[int] = []
    for length in cycle(WINDOWS):
        rows = BATCH_TOKENS // length
        size = rows * (length + 1)
        while len(stream) < size:
            texts = [document.text for document in islice(documents, 1000)]
            stream += [token for encoding in tokenizer.encode_batch(texts) for token in encoding.ids]
        yield torch.tensor(stream[:size]).view(rows, length + 1)
        del stream[:size]


def make_model(seed: int) -> OPTForCausalLM:
    """A new model of about 3.1 million parameters."""
    torch.manual_seed(seed)
    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        word_embed_proj_dim=192,
        num_hidden_layers=6,
        num_attention_heads=6,
        ffn_dim=768,
        max_position_embeddings=POSITIONS,
        dropout=0.0,
        attention_dropout=0.0,
        layerdrop=0.0,
        activation_function="relu",
        do_layer_norm_before=True,
        init_std=0.05,
        bos_token_id=EOS,
        pad_token_id=PAD,
        eos_token_id=EOS,
    )
    return OPTForCausalLM(config)


def learning_rate(done: float) -> float:
    """Linear warm-up, then a cosine down to zero; `done` is the share of the time that has passed."""
    if done < WARM_UP:
        return PEAK_LEARNING_RATE * max(done / WARM_UP, 0.02)
    return PEAK_LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * min(1.0, (done - WARM_UP) / (1 - WARM_UP))))


def make_optimizer(model: OPTForCausalLM) -> torch.optim.Optimizer:
    """AdamW; only matrices decay."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), fused=True)


def train(model: OPTForCausalLM, tokenizer: Tokenizer, training: Training, seconds: float, out: Path) -> None:
    """Train for a time, and say in `training` how far it came.

    The schedule follows the clock, so that a slow machine makes fewer steps, not a worse end.
    """
    optimizer, start, last_save, mean = make_optimizer(model), time.monotonic(), 0.0, math.nan
    model.train()
    try:
        for batch in batches(tokenizer, training.seed):
            training.seconds = time.monotonic() - start
            if training.seconds >= seconds:
                break
            rate = learning_rate(training.seconds / seconds)
            for group in optimizer.param_groups:
                group["lr"] = rate
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(input_ids=batch[:, :-1], use_cache=False).logits  # [rows, length, V]
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            training.steps += 1
            training.tokens += BATCH_TOKENS
            mean = loss.item() if math.isnan(mean) else 0.95 * mean + 0.05 * loss.item()
            if training.steps % 50 == 0:
                print(
                    f"{training.seconds:6.0f} s  step {training.steps:5d}  loss {mean:.3f}  rate {rate:.1e}", flush=True
                )
            if training.seconds - last_save > SAVE_EVERY:
                last_save = training.seconds
                save(model, tokenizer, out)
    except KeyboardInterrupt:
        print("interrupted: storing the model as it stands", flush=True)


def save(model: OPTForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Store weights in float16, configurations and tokenizer, as transformers reads them."""
    copy.deepcopy(model).half().save_pretrained(out)
    GenerationConfig(bos_token_id=EOS, eos_token_id=EOS, pad_token_id=PAD, max_new_tokens=100).save_pretrained(out)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="</s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(out)


def read_and_measure(out: Path) -> dict[str, Measures]:
    """Measures of the model as stored, computed in float32."""
    model = OPTForCausalLM.from_pretrained(out, dtype=torch.float32)
    return measure(model.eval(), Tokenizer.from_file(str(out / "tokenizer.json")))


def main() -> None:
    """Train, store, read back, measure, and write the card."""
    parser = argparse.ArgumentParser(description="Train the demo model that ships with minillm.", allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=1500, help="how long to train (default: 1500)")
    parser.add_argument("--seed", type=int, default=0, help="of the corpus and of the first weights (default: 0)")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="the folder to write (default: the package's)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = train_tokenizer(args.seed)
    model = make_model(args.seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    training = Training(args.seed, args.threads)
    train(model, tokenizer, training, args.seconds, args.out)
    save(model, tokenizer, args.out)
    write_card(args.out, training, read_and_measure(args.out))


if __name__ == "__main__":
    main()
