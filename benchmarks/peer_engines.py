"""The engines that `against_peers.py` measures, behind the interface `Peer`. All decode greedily.

A format is named as minillm names it ("float32", "float16", "bfloat16", "int8", "int4"); `peer_plans.py` says what each
engine calls it. An engine imports its library when it is created, and stays loaded.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from harness import BenchmarkError
from numpy.typing import NDArray

now: Callable[[], float] = time.perf_counter
"""The seconds that are measured; `peer_process.py` takes those of the processor if it is told to"""


class Decoded(NamedTuple):
    """Result of a burst of decoding."""

    tokens: int
    """Number of generated tokens of all prompts, except the first of each"""
    seconds: float


class Peer(Protocol):
    """An engine under measurement."""

    def decode(self, prompts: list[list[int]], new_tokens: int, limit: float) -> Decoded:
        """Generate `new_tokens` for each prompt, or fewer when `limit` seconds have passed after the first ones."""

    def prefill(self, prompt: list[int]) -> float:
        """Seconds from a prompt to its first generated token."""

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        """Logits of every position. [T] -> [T, V]"""


def timed(step: Callable[[], object], prompts: int, new_tokens: int, limit: float) -> Decoded:
    """Time the steps after the first token; each gives one token to each prompt."""
    began = now()
    seconds, taken = 0.0, 0
    while taken < new_tokens - 1 and seconds <= limit:
        step()
        taken += 1
        seconds = now() - began
    return Decoded(prompts * taken, seconds)


class Minillm:
    """minillm, set up as by its command line, on one of its backends; `rounding`: activations are of bfloat16."""

    def __init__(self, backend: str, form: str, folder: str, threads: int, *, rounding: bool = False) -> None:
        self._settings: dict[str, Any] = {"backend": backend, "dtype": form, "threads": threads}
        self._settings["compute_dtype"] = "bfloat16" if rounding else "float32"
        self._folder, self._size = folder, 0
        self._engine_of(1 if backend == "numpy" else 8)

    def _engine_of(self, size: int) -> Any:
        """The engine, recreated for a larger batch; on NumPy for any other, which decides the layout of weights."""
        from minillm import Engine

        if size > self._size or (size < self._size and self._settings["backend"] == "numpy"):
            self._engine = None  # frees its memory before the next one is loaded
            settings: dict[str, Any] = {"max_batch_size": size, "prefix_cache": False, **self._settings}
            self._engine, self._size = Engine(self._folder, **settings), size
        return self._engine

    def decode(self, prompts: list[list[int]], new_tokens: int, limit: float) -> Decoded:
        engine = self._engine_of(len(prompts))
        most = new_tokens + len(prompts)  # the first ones decode already while the last prompts are read
        requests = [engine.add(prompt, max_new_tokens=most, eos_token_id=()) for prompt in prompts]
        waiting = set(requests)
        while waiting:
            waiting -= {event.request_id for event in engine.step() if event.token_ids}

        def step() -> None:
            if (count := sum(len(event.token_ids) for event in engine.step())) != len(prompts):
                raise BenchmarkError(f"a step of {len(prompts)} sequences brought {count} tokens")

        result = timed(step, len(prompts), new_tokens, limit)
        for request in requests:
            engine.abort(request)
        engine.step()
        return result

    def prefill(self, prompt: list[int]) -> float:
        engine = self._engine_of(1)
        began = now()
        engine.generate(prompt, max_new_tokens=1, eos_token_id=())
        return now() - began

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self._engine_of(1).forward(ids)
        return logits


class Transformers:
    """Hugging Face transformers on torch, eager, with a dynamic cache, in a loop without generate()'s overhead."""

    def __init__(self, form: str, folder: str, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self._torch = torch
        loader: Any = transformers.AutoModelForCausalLM
        path = Path(folder)
        where: dict[str, Any] = {"pretrained_model_name_or_path": path}
        if path.is_file():
            where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        self._model = loader.from_pretrained(**where, dtype=getattr(torch, form)).eval()

    def _step(self, ids: Any, past: Any) -> tuple[Any, Any]:
        """One forward pass: the most likely next token of each row [N, 1], and the cache."""
        output = self._model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].argmax(-1, keepdim=True), output.past_key_values

    def decode(self, prompts: list[list[int]], new_tokens: int, limit: float) -> Decoded:
        ids, past = self._step(self._torch.tensor(prompts), None)

        def step() -> None:
            nonlocal ids, past
            ids, past = self._step(ids, past)

        return timed(step, len(prompts), new_tokens, limit)

    def prefill(self, prompt: list[int]) -> float:
        began = now()
        self._step(self._torch.tensor([prompt]), None)[0].tolist()
        return now() - began

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self._model(input_ids=self._torch.tensor([ids])).logits[0].float().numpy()
        return logits


class CTranslate2:
    """CTranslate2's generator; its tokens are words: t0, t1 ... in the checkpoint's tokenizer."""

    def __init__(self, form: str, folder: str, threads: int) -> None:
        import ctranslate2

        self._generator = ctranslate2.Generator(
            str(Path(folder) / "ctranslate2"), compute_type=CTRANSLATE2_TYPES[form], inter_threads=1,
            intra_threads=threads,
        )  # fmt: skip

    def _generate(self, prompts: list[list[int]], new_tokens: int) -> list[float]:
        """Decode greedily. Returns the time of each token, of all prompts in turn."""
        moments: list[float] = []

        def note(_: Any) -> bool:
            moments.append(now())
            return False  # go on

        words = [[f"t{i}" for i in prompt] for prompt in prompts]
        self._generator.generate_batch(
            words, max_length=new_tokens, min_length=new_tokens, sampling_topk=1, include_prompt_in_result=False,
            callback=note,
        )  # fmt: skip
        if len(moments) != len(prompts) * new_tokens:
            raise RuntimeError(f"{len(prompts) * new_tokens} tokens were asked for and {len(moments)} came")
        return moments

    def decode(self, prompts: list[list[int]], new_tokens: int, limit: float) -> Decoded:
        """As in `Peer`, but the limit is ignored: this engine never reaches it."""
        moments = self._generate(prompts, new_tokens)
        return Decoded(len(prompts) * (new_tokens - 1), moments[-1] - moments[len(prompts) - 1])

    def prefill(self, prompt: list[int]) -> float:
        began = now()
        return self._generate([prompt], 1)[-1] - began

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = np.array(self._generator.forward_batch([[f"t{i}" for i in ids]]))[0]
        return logits


CTRANSLATE2_TYPES = {"float32": "float32", "int8": "int8_float32"}


class LlamaCpp:
    """llama.cpp through its C interface, with its defaults: a float16 cache, weights repacked if it chooses to."""

    def __init__(self, path: str, threads: int, fields: Mapping[str, object] | None = None) -> None:
        """Load a file. `fields`: of a context's parameters, besides those that the tasks set."""
        self._library: Any = self._import()
        self._threads, self._fields = threads, dict(fields or {})
        self._library.llama_backend_init()
        self._model = self._library.llama_model_load_from_file(path.encode(), self._model_params())
        if not self._model:
            raise RuntimeError(f"{type(self).__name__} could not load {path}")
        self._vocab_size = self._library.llama_vocab_n_tokens(self._library.llama_model_get_vocab(self._model))
        self._context: Any = None
        self._size = (0, 0)

    def _import(self) -> Any:
        """The module of the library's functions."""
        import llama_cpp

        return llama_cpp

    def _model_params(self) -> Any:
        """The parameters with which a file is loaded."""
        return self._library.llama_model_default_params()

    def _defaults(self, sequences: int) -> Any:
        """The parameters of a context for so many sequences, before the tasks set what they need."""
        return self._library.llama_context_default_params()

    def _clear(self) -> None:
        """Empty the context."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)

    def _prepare(self, sequences: int, length: int) -> None:
        """An empty context for so many sequences of at most `length` tokens."""
        library = self._library
        if self._size != (sequences, length):
            if self._context:
                library.llama_free(self._context)
            params = self._defaults(sequences)
            params.n_ctx, params.n_seq_max = sequences * length, sequences
            params.n_threads = params.n_threads_batch = self._threads
            params.n_batch, params.n_ubatch = max(512, sequences * length), max(512, length)
            for name, value in self._fields.items():
                setattr(params, name, value)
            self._context = library.llama_init_from_model(self._model, params)
            if not self._context:
                raise RuntimeError(f"{type(self).__name__} could not make a context")
            self._size = (sequences, length)
        self._clear()

    def _forward(self, new: list[list[int]], first: int, *, every: bool = False) -> NDArray[np.float32]:
        """Feed tokens to each sequence from position `first` on; logits [rows, V] of each one's last, or of all."""
        count = sum(map(len, new))
        batch = self._library.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        places = [(s, i, token) for s, tokens in enumerate(new) for i, token in enumerate(tokens)]
        for row, (sequence, i, token) in enumerate(places):
            batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, first + i, 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = every or i == len(new[sequence]) - 1
        code = self._library.llama_decode(self._context, batch)
        self._library.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama_decode gave {code}")
        rows = count if every else len(new)
        return np.ctypeslib.as_array(self._library.llama_get_logits(self._context), (rows, self._vocab_size))

    def decode(self, prompts: list[list[int]], new_tokens: int, limit: float) -> Decoded:
        length = len(prompts[0])
        self._prepare(len(prompts), _rounded(length + new_tokens))
        tokens = self._forward(prompts, 0).argmax(-1).tolist()

        def step() -> None:
            nonlocal tokens, length
            tokens = self._forward([[token] for token in tokens], length).argmax(-1).tolist()
            length += 1

        return timed(step, len(prompts), new_tokens, limit)

    def prefill(self, prompt: list[int]) -> float:
        self._prepare(1, _rounded(len(prompt) + 1))
        began = now()
        self._forward([prompt], 0).argmax(-1)
        return now() - began

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        self._prepare(1, _rounded(len(ids)))
        return self._forward([ids], 0, every=True).copy()

    def tokens(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        """Generate one by one, after a prompt in chunks of 512."""
        self._prepare(1, _rounded(len(prompt) + new_tokens))
        for first in range(0, len(prompt), 512):
            logits = self._forward([prompt[first : first + 512]], first)
        for position in range(len(prompt), len(prompt) + new_tokens):
            token = int(logits[0].argmax())
            yield token
            logits = self._forward([[token]], position)


class IkLlamaCpp(LlamaCpp):
    """ik_llama.cpp likewise: a fork whose interface is that of an older llama.cpp.

    Its flash attention, a default, cannot leave out all positions of another sequence in the cache that sequences
    share ("S > 0" fails), so several sequences run without it.
    """

    def _import(self) -> Any:
        import ctypes

        from ik_llama_cpp import _ctypes_api as library

        library = cast(Any, library)
        logits = library._lib.llama_get_logits  # the package declares what it uses itself
        logits.argtypes, logits.restype = [ctypes.c_void_p], ctypes.POINTER(ctypes.c_float)
        library.llama_get_logits = logits
        return library

    def _clear(self) -> None:
        self._library.llama_kv_cache_clear(self._context)

    def _defaults(self, sequences: int) -> Any:
        params = super()._defaults(sequences)
        params.flash_attn = sequences == 1
        return params


class IkLlamaCppRepacked(IkLlamaCpp):
    """ik_llama.cpp, told to interleave the rows of weights when it loads them (its option -rtr)."""

    def _model_params(self) -> Any:
        params = super()._model_params()
        params.repack_tensors, params.use_mmap = True, False
        return params


class OnnxRuntime:
    """ONNX Runtime GenAI's generator, on the graph that its own model builder makes for a CPU."""

    def __init__(self, form: str, folder: str, threads: int) -> None:
        import onnxruntime_genai

        self._package: Any = onnxruntime_genai
        config = onnxruntime_genai.Config(str(Path(folder) / f"onnx-{form}"))
        options = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = onnxruntime_genai.Model(config)

    def _begin(self, prompts: list[list[int]], new_tokens: int) -> Any:
        """A generator that has read the prompts."""
        params = self._package.GeneratorParams(self._model)
        length = len(prompts[0]) + new_tokens
        params.set_search_options(
            do_sample=False,
            batch_size=len(prompts),
            min_length=length,
            max_length=length,
            past_present_share_buffer=True,
        )
        generator = self._package.Generator(self._model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        return generator

    def decode(self, prompts: list[list[int]], new_tokens: int, limit: float) -> Decoded:
        generator = self._begin(prompts, new_tokens)
        generator.generate_next_token()
        return timed(generator.generate_next_token, len(prompts), new_tokens, limit)

    def prefill(self, prompt: list[int]) -> float:
        began = now()
        self._begin([prompt], 1).generate_next_token()
        return now() - began

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self._begin([ids], 1).get_output("logits")[0].astype(np.float32)
        return logits


class OpenVino:
    """OpenVINO GenAI's pipeline on a GGUF file, which it converts when it is loaded.

    It gives tokens and the times at which they came, no logits.
    """

    def __init__(self, path: str, threads: int) -> None:
        import openvino_genai

        self._package: Any = openvino_genai
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.enable_prefix_caching = False  # else a prompt that comes again costs nothing
        self._pipeline = openvino_genai.LLMPipeline(
            path, "CPU", scheduler_config=scheduling, INFERENCE_NUM_THREADS=threads
        )

    def _generate(self, prompts: list[list[int]], new_tokens: int) -> Any:
        """Decode greedily. Returns the pipeline's own measurements."""
        import openvino

        config = self._package.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new_tokens
        config.do_sample, config.ignore_eos, config.apply_chat_template = False, True, False
        ids = np.array(prompts, np.int64)
        inputs = self._package.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        return self._pipeline.generate(inputs, config).perf_metrics

    def decode(self, prompts: list[list[int]], new_tokens: int, limit: float) -> Decoded:
        """As in `Peer`, but the limit is ignored: this engine cannot be stopped."""
        measured = self._generate(prompts, new_tokens)
        seconds = (measured.get_generate_duration().mean - measured.get_ttft().mean) / 1000
        return Decoded(len(prompts) * (new_tokens - 1), seconds)

    def prefill(self, prompt: list[int]) -> float:
        began = now()
        self._generate([prompt], 1)
        return now() - began

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        raise NotImplementedError("OpenVINO GenAI does not hand out logits")


GGUF_ENGINES = {"llama.cpp": LlamaCpp, "ik_llama.cpp": IkLlamaCpp, "ik_llama.cpp-rtr": IkLlamaCppRepacked}
"""Engines that run GGUF files through llama.cpp's interface"""


def _rounded(length: int) -> int:
    """Round up to a multiple of 256, as llama.cpp's contexts."""
    return -(-length // 256) * 256


def make(engine: str, form: str, folder: str, threads: int) -> Peer:
    """Load an engine of `peer_plans.py`.

    Args:
        engine: one of `peer_plans.PACKAGES`
        form: the format, in the engine's own words for llama.cpp
        folder: what `peer_files.py` wrote, or a GGUF file
        threads: to use
    """
    path = Path(folder)
    if engine in GGUF_ENGINES:
        return GGUF_ENGINES[engine](str(path if path.is_file() else path / f"{form}.gguf"), threads)
    if engine.startswith("minillm-"):
        backend, *rounding = engine.removeprefix("minillm-").split("-")
        return Minillm(backend, form, folder, threads, rounding=bool(rounding))
    if engine == "openvino":
        return OpenVino(folder, threads)
    kinds: dict[str, Any] = {"transformers": Transformers, "ctranslate2": CTranslate2, "onnxruntime": OnnxRuntime}
    peer: Peer = kinds[engine](form, folder, threads)
    return peer
