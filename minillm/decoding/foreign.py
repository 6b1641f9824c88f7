"""Words of other programs: the name that minillm has instead, or why a word is ignored or refused.

Each row is one decision about one reader of words. Where the reader is a server, a word with a name of ours takes the
value as it is; in Python and on the command line, the error names it. A word without a name of ours and without advice
is ignored: leaving it out gives an answer that its sender can take for the same (labels, hints about speed, storing,
billing, how a server runs). A word is refused if the answer would visibly be another: other media, a search, tokens
forbidden, a prompt cut. What stands nowhere is refused too, with the name that may have been meant.

Sources: transformers' GenerationConfig and pipelines; OpenAI's API reference (chat, completions, responses); the
references of vLLM's, llama.cpp's and Ollama's servers; what LiteLLM, OpenRouter's clients and coding agents add.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

PYTHON = "python"
"""Generation fields of calls in Python, and flags of the command line"""
TRANSFORMERS = "transformers"
"""Fields of transformers' GenerationConfig, in calls and in checkpoints"""
PIPELINE = "pipeline"
"""Arguments of transformers' pipelines"""
API = "api"
"""Fields of OpenAI's API, at every endpoint that generates text"""
COMPLETIONS, CHAT, RESPONSES = "completions", "chat", "responses"
"""Fields of that API at one endpoint, before those of `API`"""
OLLAMA, OLLAMA_OPTIONS = "ollama", "ollama options"
"""Fields of Ollama's API, and those within `options`"""
COMMANDS = "commands"
"""Commands of a command line"""


class Row(NamedTuple):
    """The decision about some words."""

    reader: str
    words: str
    """Separated by spaces"""
    ours: str | None = None
    """Name that minillm has instead"""
    advice: str | None = None
    """Why the words are refused, or what to do"""
    neutral: tuple[Any, ...] = ()
    """Values that ask for nothing, besides empty and false ones"""

    def asks_nothing(self, value: Any) -> bool:
        """True if a word with this value has no effect, though others would be refused."""
        return not value or any(value == other and type(value) is type(other) for other in self.neutral)


_STORED = "nothing is stored: give the conversation as input"
_ONE = "there is one response: ask several times"
_MEDIA = "minillm reads and writes text only"
_CHAT = "/v1/chat/completions has it"
_TOOLS = "/v1/chat/completions has tools"
_OUT = "leave it out"

ROWS = (
    # --- Python: names of OpenAI's API, vLLM, llama.cpp, Ollama and transformers
    Row(PYTHON, "stop stop_sequences stop_words", "stop_strings"),
    Row(PYTHON, "max_tokens max_completion_tokens max_output_tokens num_predict n_predict", "max_new_tokens"),
    Row(PYTHON, "min_tokens", "min_new_tokens"),
    Row(PYTHON, "n best_of num_samples num_completions", "num_return_sequences"),
    Row(PYTHON, "stop_token_ids stop_token", "eos_token_id"),
    Row(PYTHON, "ignore_eos", "eos_token_id=[]"),
    Row(PYTHON, "include_stop_str_in_output", "include_stop"),
    Row(PYTHON, "return_full_text", "echo"),
    Row(PYTHON, "prompt_logprobs", "echo and top_logprobs"),
    Row(PYTHON, "top_n_tokens n_probs num_logprobs", "top_logprobs"),
    Row(PYTHON, "keep_special_tokens", "skip_special_tokens=False"),
    Row(PYTHON, "logit_bias", "sequence_bias"),
    Row(PYTHON, "bad_words", "bad_words_ids"),
    Row(PYTHON, "allowed_token_ids", "prefix_allowed_tokens_fn"),
    Row(PYTHON, "logits_processors", "logits_processor"),
    Row(PYTHON, "repeat_penalty", "repetition_penalty"),
    Row(PYTHON, "use_beam_search beam_width beam_size", "num_beams"),
    Row(PYTHON, "typical", "typical_p"),
    Row(PYTHON, "mirostat_mode", "mirostat"),
    Row(PYTHON, "random_seed generator", "seed"),
    Row(PYTHON, "greedy", "do_sample=False"),
    Row(PYTHON, "response_format json_schema schema format structured_outputs guided_decoding", "guided_json"),
    Row(PYTHON, "regex", "guided_regex"),
    Row(PYTHON, "grammar", "guided_grammar"),
    Row(PYTHON, "choices", "guided_choice"),
    Row(PYTHON, "lora_request adapter", "lora"),
    Row(PYTHON, "sampling_params generation_config", "a GenerationConfig"),
    Row(PYTHON, "stream streaming streamer", "`stream` or `stream_chat`"),
    Row(PYTHON, "messages system tools add_generation_prompt", "`chat`"),
    Row(PYTHON, "prompt input_ids inputs", "the first argument"),
    Row(PYTHON, "assistant_model draft_model speculative_config", "Engine(draft=...)"),
    Row(PYTHON, "tokenizer", "Engine(tokenizer=...)"),
    Row(PYTHON, "model device dtype", "Engine(model, ...)"),
    # --- transformers: fields that change the result, with the value without effect
    Row(TRANSFORMERS, "guidance_scale", advice=_OUT, neutral=(1,)),
    Row(TRANSFORMERS, "max_time", advice="use timeout"),
    Row(TRANSFORMERS, "remove_invalid_values token_healing use_mtp", advice=_OUT, neutral=(False,)),
    Row(TRANSFORMERS, "dola_layers watermarking_config constraints force_words_ids", advice=_OUT),
    Row(TRANSFORMERS, "assistant_early_exit assistant_ensemble_weight speculation_type", advice=_OUT),
    # fields that never change the tokens: padding, return format, execution
    Row(TRANSFORMERS, "pad_token_id bos_token_id transformers_version _from_model_config _commit_hash"),
    Row(TRANSFORMERS, "max_cache_len cache_implementation cache_config low_memory prefill_chunk_size"),
    Row(TRANSFORMERS, "compile_config disable_compile continuous_batching_config return_dict_in_generate"),
    Row(TRANSFORMERS, "output_attentions output_hidden_states output_scores output_logits is_assistant"),
    Row(TRANSFORMERS, "num_assistant_tokens_schedule assistant_confidence_threshold"),
    Row(TRANSFORMERS, "assistant_lookbehind target_lookbehind"),
    # --- pipelines
    Row(PIPELINE, "batch_size", advice="requests share a batch anyway; Engine's max_batch_size bounds it"),
    Row(PIPELINE, "num_workers", advice="texts are encoded as they are needed"),
    Row(PIPELINE, "padding", advice="texts of a batch are not padded"),
    Row(PIPELINE, "handle_long_generation", advice="set truncation=True"),
    Row(PIPELINE, "clean_up_tokenization_spaces", advice="decoded text is left as it is"),
    Row(PIPELINE, "tokenizer_encode_kwargs", advice="set truncation, max_length or add_special_tokens"),
    Row(PIPELINE, "tokenize_kwargs", advice="set truncation"),
    Row(PIPELINE, "documents", advice="put their text into a message"),
    Row(PIPELINE, "return_type", advice="set return_full_text or return_tensors"),
    Row(PIPELINE, "framework", advice="minillm computes by itself"),
    Row(PIPELINE, "device_map", advice="set device"),
    Row(PIPELINE, "torch_dtype", advice="set dtype"),
    Row(PIPELINE, "model_kwargs", advice="give them as arguments of their own"),
    Row(PIPELINE, "trust_remote_code", advice="minillm runs no code of checkpoints"),
    Row(PIPELINE, "use_fast", advice="there is one tokenizer"),
    Row(PIPELINE, "binary_output", advice="pickle the result yourself"),
    # --- OpenAI's API: names of generation fields
    Row(API, "max_tokens max_completion_tokens", "max_new_tokens"),
    Row(API, "n", "num_return_sequences"),
    Row(API, "stop", "stop_strings"),
    Row(API, "min_tokens", "min_new_tokens"),
    Row(API, "include_stop_str_in_output", "include_stop"),
    # ignored
    Row(API, "metadata store service_tier safety_identifier client_metadata session_id request_id"),
    Row(API, "prompt_cache_key prompt_cache_options prompt_cache_retention prediction max_tool_calls"),
    Row(API, "truncation context_management background_options access_programs stream_tool_calls"),
    # ignored, of vLLM, llama.cpp and others: how they run, and thoughts told from the answer
    Row(API, "mm_processor_kwargs vllm_xargs guided_decoding_backend spaces_between_special_tokens"),
    Row(API, "include_reasoning thinking_token_budget thinking_budget reasoning_format parse_tool_calls"),
    Row(API, "cache_prompt id_slot slot_id timings_per_token return_progress keep_alive num_ctx"),
    Row(API, "dry_base dry_allowed_length dry_penalty_last_n xtc_threshold dynatemp_exponent"),  # refine refused ones
    # ignored, of OpenRouter and LiteLLM
    Row(API, "reasoning thinking provider route models transforms usage litellm_session_id"),
    # refused
    Row(API, "suffix", advice="minillm does not insert text: give what stands before as the prompt"),
    Row(API, "modalities", advice=_MEDIA, neutral=(["text"],)),
    Row(API, "audio image", advice=_MEDIA),
    Row(API, "moderation", advice="nothing is moderated"),
    Row(API, "web_search_options", advice="minillm does not search the web"),
    Row(API, "functions", advice="give them as tools"),
    Row(API, "function_call", advice="give it as tool_choice", neutral=("none", "auto")),
    Row(API, "tools", advice=_TOOLS),
    Row(API, "tool_choice", advice=_TOOLS, neutral=("none", "auto")),
    Row(API, "parallel_tool_calls", advice=_TOOLS, neutral=(True,)),
    Row(API, "documents", advice="put their text into a message"),
    Row(API, "chat_template", advice="the model's own template is used"),
    Row(API, "prompt_logprobs", advice="set echo and logprobs of /v1/completions"),
    Row(API, "truncate_prompt_tokens", advice="shorten the prompt"),
    Row(API, "bad_words", advice="give their tokens as bad_words_ids"),
    Row(API, "allowed_token_ids", advice="forbid the others by suppress_tokens, or set a guided_... field"),
    Row(API, "structured_outputs", advice="set guided_json, guided_regex, guided_choice or guided_grammar"),
    Row(API, "json_schema", advice="its name here is guided_json"),
    Row(API, "grammar", advice="give it as guided_grammar, in the form of llguidance"),
    Row(API, "cache_salt", advice="prefixes are shared by all requests"),
    Row(API, "kv_transfer_params", advice="one server computes the whole answer"),
    Row(API, "logits_processors", advice="it takes functions, which cannot be sent"),
    Row(API, "extra_body", advice="give its fields beside the others"),
    Row(
        API,
        "max_repetition_pattern_size min_repetition_pattern_size repetition_min_count",
        advice="set no_repeat_ngram_size or repetition_penalty",
    ),
    Row(
        API,
        "dry_multiplier xtc_probability dynatemp_range samplers",
        advice="the sampling fields are those of transformers",
    ),
    Row(COMPLETIONS, "top_logprobs", advice="give their number as logprobs"),
    Row(CHAT, "echo", advice="/v1/completions has it"),
    Row(CHAT, "add_special_tokens", advice="the chat template writes them"),
    Row(RESPONSES, "previous_response_id conversation", advice=_STORED),
    Row(RESPONSES, "prompt", advice="nothing is stored: give the text as instructions or input"),
    Row(RESPONSES, "background", advice="nothing is stored: keep the connection"),
    Row(RESPONSES, "n num_return_sequences", advice=_ONE, neutral=(1,)),
    Row(RESPONSES, "use_beam_search", advice="set num_beams"),
    Row(
        RESPONSES,
        "max_tokens max_completion_tokens max_new_tokens",
        advice="its name here is max_output_tokens",
    ),
    Row(RESPONSES, "response_format", advice="its name here is text.format"),
    Row(RESPONSES, "echo", advice="/v1/completions has it"),
    Row(RESPONSES, "return_token_ids return_tokens_as_token_ids", advice=_CHAT),
    # --- Ollama's API
    Row(OLLAMA, "keep_alive truncate shift"),  # a model stays loaded; what is too long is refused
    Row(OLLAMA, "suffix", advice="minillm does not insert text"),
    Row(OLLAMA, "template", advice="the model's own template is used; raw takes a prompt as it is"),
    Row(OLLAMA, "context", advice="use /api/chat, and give the messages"),
    Row(OLLAMA, "images width height steps", advice=_MEDIA),
    Row(OLLAMA_OPTIONS, "repeat_penalty", "repetition_penalty", neutral=(1,)),
    Row(OLLAMA_OPTIONS, "temperature", "temperature"),
    Row(OLLAMA_OPTIONS, "top_k", "top_k"),
    Row(OLLAMA_OPTIONS, "top_p", "top_p"),
    Row(OLLAMA_OPTIONS, "min_p", "min_p", neutral=(0,)),
    Row(OLLAMA_OPTIONS, "typical_p", "typical_p", neutral=(1,)),
    Row(OLLAMA_OPTIONS, "seed", "seed", neutral=(-1,)),
    Row(OLLAMA_OPTIONS, "stop", "stop"),
    Row(OLLAMA_OPTIONS, "presence_penalty", "presence_penalty"),
    Row(OLLAMA_OPTIONS, "frequency_penalty", "frequency_penalty"),
    Row(OLLAMA_OPTIONS, "mirostat", "mirostat", neutral=(0,)),
    Row(OLLAMA_OPTIONS, "mirostat_tau", "mirostat_tau"),
    Row(OLLAMA_OPTIONS, "mirostat_eta", "mirostat_eta"),
    # ignored: how Ollama loads and runs a model; tfs_z has no effect in Ollama either
    Row(OLLAMA_OPTIONS, "num_keep num_batch num_gpu main_gpu num_thread numa low_vram f16_kv vocab_only"),
    Row(OLLAMA_OPTIONS, "use_mmap use_mlock logits_all embedding_only penalize_newline num_gqa tfs_z"),
    # --- the command line
    Row(COMMANDS, "complete", "generate"),
    Row(COMMANDS, "convert", "quantize"),
    Row(COMMANDS, "download", "pull"),
    Row(COMMANDS, "help", "--help"),
    Row(COMMANDS, "list ls", "models"),
    Row(COMMANDS, "run", "chat"),
)

WORDS: dict[str, dict[str, Row]] = {}
"""Reader -> word -> the decision about it"""
for _row in ROWS:
    WORDS.setdefault(_row.reader, {}).update(dict.fromkeys(_row.words.split(), _row))


@cache
def renamed(reader: str) -> Mapping[str, str]:
    """Words of a reader -> what minillm has instead."""
    return {word: row.ours for word, row in WORDS[reader].items() if row.ours is not None}


@cache
def refused(reader: str) -> Mapping[str, str]:
    """Words that a reader refuses -> the advice."""
    return {word: row.advice for word, row in WORDS[reader].items() if row.advice is not None}


@cache
def ignored(reader: str) -> frozenset[str]:
    """Words without effect for a reader."""
    return frozenset(word for word, row in WORDS[reader].items() if row.ours is row.advice is None)
