"""Options of an engine, each declared once: type, default, reader, its flag on the command line, and its explanation.

As in `decoding.fields`, a typed keyword is the declaration itself: an entry of a `TypedDict` whose `Annotated` type
carries an `Option`. The checks, the docstring of `Engine`, and the flags of the commands with their help follow.
"""

import os
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ForwardRef, NamedTuple, TypedDict

from ..decoding.keywords import Method, default_of, with_fields
from ..decoding.values import Reader, flag, text, whole
from ..distributed.communicator import Communicator
from ..errors import ParameterError, listed, shown
from ..parallel import Parallel
from .arguments import named_paths, optional, path, read, tokenizer_or_path

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer as TokenizerType
else:  # the command line reads this table, and needs no tokenizer to show its help
    TokenizerType = ForwardRef("Tokenizer", module="minillm.text.tokenizer")

AS_GIVEN: Reader[Any] = Reader("", lambda value: value)
"""Takes any value: `choose_backend` checks the words of `Placement`, `joined` the processes"""
HELPERS = ("draft", "amateur")
"""Additional models"""


class Option(NamedTuple):
    """The declaration of an option."""

    read: Reader[Any]
    help: str
    """Its values or effect; of a switch that is on by default, the effect of switching it off"""
    notes: str = ""
    """Further explanation for the docstring"""
    flag: str | None = None
    """Name and value of its flag on the command line; without a value, it sets the opposite of the default"""
    aliases: tuple[str, ...] = ()
    """Other names of the flag"""
    common: bool = False
    """True if the flag is in the short help"""


class ModelKeywords(TypedDict, total=False):
    """Options that only a loaded model has: what goes with it, and whether texts share their beginnings."""

    # fmt: off
    revision: Annotated[str | None, Option(optional(replace(text, expected="a branch, tag or commit as text")),
        "branch, tag or commit on the hub", flag="--revision REVISION")]
    tokenizer: Annotated[str | os.PathLike[str] | TokenizerType | None, Option(optional(tokenizer_or_path),
        "tokenizer folder, tokenizer.json or hub id (default: the model's)", flag="--tokenizer PATH",
        notes="A GGUF file or a `minillm.text.tokenizer.Tokenizer` is taken too, and a chat template in the folder is "
        "used. Without a tokenizer prompts are token ids.")]
    draft: Annotated[str | os.PathLike[str] | None, Option(optional(path),
        "a smaller draft model with the same vocabulary", flag="--draft MODEL", common=True,
        notes="For speculative decoding.")]
    amateur: Annotated[str | os.PathLike[str] | None, Option(optional(path),
        "contrastive decoding: a weaker model with the same vocabulary", flag="--amateur MODEL")]
    adapter: Annotated[str | os.PathLike[str] | None, Option(optional(path),
        "LoRA adapter to merge into the weights: folder or hub id", flag="--adapter PATH",
        notes='A folder is as PEFT has written it. The sum is formed in float32, then converted to `dtype`; "auto" '
        "rounds it to the 16 bits of the checkpoint, and keeps it in float32 where the checkpoint is quantised.")]
    adapters: Annotated[Mapping[str, str | os.PathLike[str]] | None, Option(optional(named_paths),
        "LoRA adapters, chosen by {lora}; not merged", flag="--adapters NAME=PATH [NAME=PATH ...]",
        notes="Requests with different ones, or none, share a batch.")]
    prefix_cache: Annotated[bool, True, Option(flag, "compute prompts with a known beginning anew",
        flag="--no-prefix-cache",
        notes="By default prompts take over the K/V of all texts, running or finished, that begin with the same "
        "tokens, as long as their memory is not needed; False to measure, or to keep finished texts out of memory.")]
    prefix_store: Annotated[str | os.PathLike[str] | None, Option(optional(replace(path, expected="a folder")),
        "folder that keeps the K/V of long texts, for later prompts and after a restart", flag="--prefix-store FOLDER",
        notes="Texts of at least 256 tokens are written when they end, in whole pages, by a thread of their own; a "
        "prompt that begins with their tokens reads them. The folder should be yours, and nobody else may write to it; "
        "several processes may share it.")]
    prefix_store_bytes: Annotated[int | None, Option(optional(whole(1)),
        "bytes of this folder (default: 8 GiB)", flag="--prefix-store-bytes N",
        notes="The pages that were used longest ago are removed.")]
    # fmt: on


class EngineKeywords(TypedDict, total=False):
    """How a model runs: the options that `Engine` and `Engine.random` share."""

    # fmt: off
    dtype: Annotated[str, "auto", Option(AS_GIVEN,
        "of weights: float32, float16, bfloat16, int8, int4 (default: {default})", flag="--dtype DTYPE", common=True,
        notes='"auto" is the fastest lossless one, and the stored one for a quantised checkpoint. On "cuda" it is also '
        "the format of activations and the K/V cache, by default the checkpoint's; with weights in 8 or 4 bits these "
        "have 16.")]
    device: Annotated[str, "cpu", Option(AS_GIVEN,
        "cpu (default), or cuda: an NVIDIA GPU", flag="--device DEVICE", common=True,
        notes='A GPU needs the extra "cuda13" or "cuda12".')]
    backend: Annotated[str, "auto", Option(AS_GIVEN,
        "cpu: kernels in C (default, with a C compiler); numpy", flag="--backend BACKEND",
        notes="The kernels are compiled at first use; a stored build needs no compiler. MINILLM_BACKEND in the "
        "environment names another default.")]
    cache_dtype: Annotated[str, "auto", Option(AS_GIVEN,
        "of the KV cache on a CPU: float32 (auto), bfloat16, int8, int4, or weights, which is bfloat16 with weights of "
        "at most 16 bits (default: {default})", flag="--cache-dtype CACHE_DTYPE",
        notes='"weights" is float32 with float32 weights, and on NumPy; a server has it by default.')]
    compute_dtype: Annotated[str, "float32", Option(AS_GIVEN,
        "of activations that meet bfloat16 weights on a CPU: float32 (default), bfloat16",
        flag="--compute-dtype COMPUTE_DTYPE",
        notes="Sums are float32. bfloat16 rounds activations to 8 bits, as llama.cpp does; products of many rows then "
        "take half the time on an AMD Zen 4 or 5, which multiplies bfloat16 at twice the rate, and on others what they "
        "took. For the kernels in C alone.")]
    threads: Annotated[int | None, Option(optional(whole(1)),
        "CPU threads (default: one for each core)", flag="--threads N", aliases=("-t",), common=True,
        notes="They are for the whole process.")]
    deterministic: Annotated[bool, False, Option(flag,
        "the same bits for a request in any batch, also of 16- and 32-bit weights", flag="--deterministic",
        notes="Logits and tokens then do not depend on what runs beside a request, nor on chunks, the prefix cache, "
        "preemption or threads. On x86-64 products of more than 16 rows become slower; on AArch64, and with "
        "weights in 8 or 4 bits, it is always so and costs nothing. For the kernels in C alone.")]
    max_batch_size: Annotated[int, 16, Option(whole(1),
        "sequences that run at once (default: {default})", flag="--max-batch-size N",
        notes="Further ones are queued.")]
    max_batched_tokens: Annotated[int | None, Option(optional(whole(1)),
        "tokens of a step; fewer let long prompts delay others less (default: 128, on a GPU 512)",
        flag="--max-batched-tokens N",
        notes="It is the budget of a step with running sequences: one token or more of each, and chunks of the prompts "
        "that come in. Smaller: steadier decoding, slower prefill; at least `max_batch_size`, also by default. A step "
        "without running sequences takes up to 512 tokens of prompts, or as many as this if it is more.")]
    cache_bytes: Annotated[int | None, Option(optional(whole(1)),
        "memory of the KV cache (default: what the batch needs, at most an eighth of the free memory)",
        flag="--cache-bytes N",
        notes="The batch needs `max_batch_size` full contexts; one full context may take half of the memory, and on a "
        "GPU the cache has half of the free memory. It is used up to the end before texts that have ended lose their "
        "pages. On a CPU it is taken as it is first used, and by default texts that have ended keep little: see "
        "`PrefixCache`.")]
    parallel: Annotated[Parallel | None, Option(AS_GIVEN,
        "how many processes share the model",
        notes="Each of them, started by mpiexec, makes an engine with the same arguments, and loads its share. Rank 0 "
        "takes the requests, and runs helper models alone; all others call `follow`. `cache_bytes` and `threads` are "
        "then those of each process; by default the processes of a machine share its cores and its memory evenly.")]
    communicator: Annotated[Communicator | None, Option(AS_GIVEN,
        "connects these processes (default: MPI)")]
    progress: Annotated[bool, True, Option(flag,
        "show no bars on a terminal or in a notebook: downloads, the compilation of kernels, loading")]
    # fmt: on


class LoadKeywords(ModelKeywords, EngineKeywords, total=False):
    """The options of `Engine`."""


OPTIONS: dict[str, Option] = {name: hint.__metadata__[-1] for name, hint in LoadKeywords.__annotations__.items()}
"""Name of an option -> its declaration."""
DEFAULTS: dict[str, Any] = {name: default_of(hint) for name, hint in LoadKeywords.__annotations__.items()}


def with_options(method: Method) -> Method:
    """Give a method that takes `**given: Unpack[LoadKeywords]` a signature with each option, and their explanations in
    its docstring in the place of "{options}".
    """
    document = method.__doc__ or ""  # python -OO has none
    margin = document.partition("{options}")[0].rpartition("\n")[2]  # since Python 3.13 that of the code is left out
    lines: list[str] = []
    for name, option in OPTIONS.items():
        help = option.help.format(default=DEFAULTS[name], lora="the field `lora`")
        entry = f"{name}: {'False: ' * (DEFAULTS[name] is True)}{help}. {option.notes}".rstrip()
        indents: dict[str, Any] = {"initial_indent": margin, "subsequent_indent": margin + " " * 4}
        lines.append(textwrap.fill(entry, 108 + len(margin), break_on_hyphens=False, **indents))
    if document:
        method.__doc__ = document.replace("{options}", "\n".join(lines).lstrip())
    return with_fields(method)


def read_options(kind: type, given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Check the user's options, and fill in the defaults of others.

    Args:
        kind: `LoadKeywords` or `EngineKeywords`
        given: options by name
        known: what an error lists about an unknown one: names of all arguments of the call

    Raises:
        ParameterError: an option is unknown or impossible.
    """
    names = kind.__annotations__
    if unknown := given.keys() - names.keys():
        raise ParameterError(f"there is no argument {shown(min(unknown))}: expected one of {listed(known)}")
    values = {name: read(name, given.get(name, DEFAULTS[name]), OPTIONS[name].read) for name in names}
    size, budget = values["max_batch_size"], values["max_batched_tokens"]
    if budget is not None and budget < size:
        raise ParameterError(
            f"max_batched_tokens should be at least max_batch_size, which is {size}, found {budget}: each decoding "
            "sequence takes a token of every step"
        )
    return values
