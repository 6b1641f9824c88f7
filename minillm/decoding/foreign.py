"""Words of other programs: the name that minillm has instead, or why a word is ignored or refused.

Each entry of the table is one decision about one reader of words. Where the reader is a server, a word with a name of
ours takes the value as it is; in Python and on the command line, the error names it. A word without a name of ours and
without advice is ignored: leaving it out gives an answer that its sender can take for the same (labels, hints about
speed, storing, billing, how a server runs). A word is refused if the answer would visibly be another: other media, a
search, tokens forbidden, a prompt cut. What stands nowhere is refused too, with the name that may have been meant.

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
"""Fields of that API at one endpoint, before `API`'s"""
MESSAGES = "messages"
"""Fields of Anthropic's Messages API, before `API`'s"""
OLLAMA, OLLAMA_OPTIONS = "ollama", "ollama options"
"""Fields of Ollama's API, and those within `options`"""
INFILL = "infill"
"""Fields of llama.cpp's /infill, before `API`'s"""
COMMANDS = "commands"
"""Commands of a command line"""


class Word(NamedTuple):
    """A word, or several of the same fate, as one reader takes it."""

    reader: str
    names: str
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
_MEDIA = "minillm reads and writes text only"
_TOOLS = "/v1/chat/completions has tools"
_OUT = "leave it out"

TABLE = (
    # --- Python: names of OpenAI's API, vLLM, llama.cpp, Ollama and transformers
    Word(PYTHON, "stop stop_sequences stop_words", "stop_strings"),
    Word(PYTHON, "max_tokens max_completion_tokens max_output_tokens num_predict n_predict", "max_new_tokens"),
    Word(PYTHON, "min_tokens", "min_new_tokens"),
    Word(PYTHON, "thinking_token_budget thinking_budget reasoning_budget", "max_thinking_tokens"),
    Word(PYTHON, "n best_of num_samples num_completions", "num_return_sequences"),
    Word(PYTHON, "stop_token_ids stop_token", "eos_token_id"),
    Word(PYTHON, "ignore_eos", "eos_token_id=[]"),
    Word(PYTHON, "include_stop_str_in_output", "include_stop"),
    Word(PYTHON, "return_full_text", "echo"),
    Word(PYTHON, "prompt_logprobs", "echo and top_logprobs"),
    Word(PYTHON, "top_n_tokens n_probs num_logprobs", "top_logprobs"),
    Word(PYTHON, "keep_special_tokens", "skip_special_tokens=False"),
    Word(PYTHON, "logit_bias", "sequence_bias"),
    Word(PYTHON, "bad_words", "bad_words_ids"),
    Word(PYTHON, "allowed_token_ids", "prefix_allowed_tokens_fn"),
    Word(PYTHON, "logits_processors", "logits_processor"),
    Word(PYTHON, "repeat_penalty", "repetition_penalty"),
    Word(PYTHON, "use_beam_search beam_width beam_size", "num_beams"),
    Word(PYTHON, "typical", "typical_p"),
    Word(PYTHON, "mirostat_mode", "mirostat"),
    Word(PYTHON, "cfg_scale", "guidance_scale"),
    Word(PYTHON, "negative_prompt_ids", "negative_prompt"),
    Word(PYTHON, "random_seed generator", "seed"),
    Word(PYTHON, "n_particles particles", "num_particles"),
    Word(PYTHON, "critic condition", "potential"),
    Word(PYTHON, "greedy", "do_sample=False"),
    Word(PYTHON, "response_format json_schema schema format structured_outputs guided_decoding", "guided_json"),
    Word(PYTHON, "regex", "guided_regex"),
    Word(PYTHON, "grammar", "guided_grammar"),
    Word(PYTHON, "choices", "guided_choice"),
    Word(PYTHON, "lora_request adapter", "lora"),
    Word(PYTHON, "sampling_params generation_config", "a GenerationConfig"),
    Word(PYTHON, "stream streaming streamer", "`stream` or `stream_chat`"),
    Word(PYTHON, "messages system tools add_generation_prompt", "`chat`"),
    Word(PYTHON, "prompt input_ids inputs", "the first argument"),
    Word(PYTHON, "assistant_model draft_model speculative_config", "Engine(draft=...)"),
    Word(PYTHON, "tokenizer", "Engine(tokenizer=...)"),
    Word(PYTHON, "model device dtype", "Engine(model, ...)"),
    # --- transformers: fields that change the result, with the value without effect
    Word(TRANSFORMERS, "max_time", advice="use timeout"),
    Word(TRANSFORMERS, "remove_invalid_values token_healing use_mtp", advice=_OUT, neutral=(False,)),
    Word(TRANSFORMERS, "assistant_early_exit assistant_ensemble_weight speculation_type", advice=_OUT),
    # fields that never change the tokens: padding, return format, execution
    Word(TRANSFORMERS, "pad_token_id bos_token_id transformers_version _from_model_config _commit_hash"),
    Word(TRANSFORMERS, "max_cache_len cache_implementation cache_config low_memory prefill_chunk_size"),
    Word(TRANSFORMERS, "compile_config disable_compile continuous_batching_config return_dict_in_generate"),
    Word(TRANSFORMERS, "output_attentions output_hidden_states output_scores output_logits is_assistant"),
    Word(TRANSFORMERS, "num_assistant_tokens_schedule assistant_confidence_threshold"),
    Word(TRANSFORMERS, "assistant_lookbehind target_lookbehind"),
    # fields of Whisper, which `Engine.transcribe` reads
    Word(TRANSFORMERS, "lang_to_id task_to_id language task is_multilingual forced_decoder_ids return_timestamps"),
    Word(TRANSFORMERS, "no_timestamps_token_id prev_sot_token_id max_initial_timestamp_index alignment_heads"),
    Word(TRANSFORMERS, "compression_ratio_threshold logprob_threshold no_speech_threshold condition_on_prev_tokens"),
    # --- pipelines
    Word(PIPELINE, "batch_size", advice="requests share a batch anyway; Engine's max_batch_size bounds it"),
    Word(PIPELINE, "num_workers", advice="texts are encoded as they are needed"),
    Word(PIPELINE, "padding", advice="texts of a batch are not padded"),
    Word(PIPELINE, "handle_long_generation", advice="set truncation=True"),
    Word(PIPELINE, "clean_up_tokenization_spaces", advice="decoded text is left as it is"),
    Word(PIPELINE, "tokenizer_encode_kwargs", advice="set truncation, max_length or add_special_tokens"),
    Word(PIPELINE, "tokenize_kwargs", advice="set truncation"),
    Word(PIPELINE, "documents", advice="put their text into a message"),
    Word(PIPELINE, "return_type", advice="set return_full_text or return_tensors"),
    Word(PIPELINE, "framework", advice="minillm computes by itself"),
    Word(PIPELINE, "device_map", advice="set device"),
    Word(PIPELINE, "torch_dtype", advice="set dtype"),
    Word(PIPELINE, "model_kwargs", advice="give them as arguments of their own"),
    Word(PIPELINE, "trust_remote_code", advice="minillm runs no code of checkpoints"),
    Word(PIPELINE, "use_fast", advice="there is one tokenizer"),
    Word(PIPELINE, "tokenizer_kwargs", advice="long texts are cut"),
    Word(PIPELINE, "is_split_into_words delimiter offset_mapping", advice="join the words to a text"),
    Word(PIPELINE, "grouped_entities ignore_subwords", advice="set aggregation_strategy"),
    Word(PIPELINE, "topk", advice="set top_k"),
    Word(PIPELINE, "max_question_len", advice="questions are not cut"),
    Word(PIPELINE, "binary_output", advice="pickle the result yourself"),
    # --- OpenAI's API: names of generation fields
    Word(API, "max_tokens max_completion_tokens", "max_new_tokens"),
    Word(API, "n", "num_return_sequences"),
    Word(API, "stop", "stop_strings"),
    Word(API, "min_tokens", "min_new_tokens"),
    Word(API, "thinking_token_budget thinking_budget thinking_budget_tokens reasoning_budget", "max_thinking_tokens"),
    Word(API, "include_stop_str_in_output", "include_stop"),
    # ignored
    Word(API, "metadata store service_tier safety_identifier client_metadata session_id request_id"),
    Word(API, "prompt_cache_key prompt_cache_options prompt_cache_retention prediction max_tool_calls"),
    Word(API, "truncation context_management background_options access_programs stream_tool_calls"),
    # ignored, of vLLM, llama.cpp and others: how they run, and thoughts told from the answer
    Word(API, "mm_processor_kwargs vllm_xargs guided_decoding_backend spaces_between_special_tokens"),
    Word(API, "include_reasoning reasoning_format parse_tool_calls"),
    Word(API, "cache_prompt id_slot slot_id timings_per_token return_progress keep_alive num_ctx"),
    Word(API, "dynatemp_exponent"),  # refines a refused one
    # ignored, of OpenRouter and LiteLLM
    Word(API, "reasoning thinking provider route models transforms usage litellm_session_id"),
    # refused
    Word(API, "suffix", advice="/v1/completions inserts text"),
    Word(API, "modalities", advice=_MEDIA, neutral=(["text"],)),
    Word(API, "audio image", advice=_MEDIA),
    Word(API, "moderation", advice="nothing is moderated"),
    Word(API, "web_search_options", advice="minillm does not search the web"),
    Word(API, "functions", advice="give them as tools"),
    Word(API, "function_call", advice="give it as tool_choice", neutral=("none", "auto")),
    Word(API, "tools", advice=_TOOLS),
    Word(API, "tool_choice", advice=_TOOLS, neutral=("none", "auto")),
    Word(API, "parallel_tool_calls", advice=_TOOLS, neutral=(True,)),
    Word(API, "documents", advice="put their text into a message"),
    Word(API, "chat_template", advice="the model's own template is used"),
    Word(API, "prompt_logprobs", advice="set echo and logprobs of /v1/completions"),
    Word(API, "truncate_prompt_tokens", advice="shorten the prompt"),
    Word(API, "bad_words", advice="give their tokens as bad_words_ids"),
    Word(API, "allowed_token_ids", advice="forbid the others by suppress_tokens, or set a guided_... field"),
    Word(API, "structured_outputs", advice="set guided_json, guided_regex, guided_choice or guided_grammar"),
    Word(API, "json_schema", advice="its name here is guided_json"),
    Word(API, "grammar", advice="give it as guided_grammar, in the form of llguidance"),
    Word(API, "cache_salt", advice="prefixes are shared by all requests"),
    Word(API, "kv_transfer_params", advice="one server computes the whole answer"),
    Word(API, "hooks", advice="it takes functions, which cannot be sent"),
    Word(API, "watch", advice="rows inside the model are returned to calls in Python, as Engine.generate(watch=...)"),
    Word(API, "extra_body", advice="give its fields beside the others"),
    Word(
        API,
        "max_repetition_pattern_size min_repetition_pattern_size repetition_min_count",
        advice="set no_repeat_ngram_size or repetition_penalty",
    ),
    Word(API, "dynatemp_range", advice="set temperature"),
    Word(COMPLETIONS, "top_logprobs", advice="give their number as logprobs"),
    Word(CHAT, "echo", advice="/v1/completions has it"),
    Word(CHAT, "add_special_tokens", advice="the chat template writes them"),
    Word(RESPONSES, "previous_response_id conversation", advice=_STORED),
    Word(RESPONSES, "prompt", advice="nothing is stored: give the text as instructions or input"),
    Word(RESPONSES, "background", advice="nothing is stored: keep the connection"),
    Word(RESPONSES, "n num_return_sequences", advice="there is one response: ask several times", neutral=(1,)),
    Word(RESPONSES, "use_beam_search", advice="set num_beams"),
    Word(
        RESPONSES,
        "max_tokens max_completion_tokens max_new_tokens",
        advice="its name here is max_output_tokens",
    ),
    Word(RESPONSES, "response_format", advice="its name here is text.format"),
    Word(RESPONSES, "echo", advice="/v1/completions has it"),
    Word(RESPONSES, "return_token_ids return_tokens_as_token_ids", advice="/v1/chat/completions has it"),
    # --- Anthropic's Messages API
    Word(MESSAGES, "stop_sequences", "stop_strings"),
    Word(MESSAGES, "stop", advice="its name here is stop_sequences"),
    Word(MESSAGES, "n num_return_sequences", advice="there is one message: ask several times", neutral=(1,)),
    Word(MESSAGES, "use_beam_search", advice="set num_beams"),
    Word(MESSAGES, "response_format", advice="its name here is output_config.format"),
    Word(MESSAGES, "echo logprobs top_logprobs", advice="/v1/completions has it"),
    Word(MESSAGES, "return_token_ids return_tokens_as_token_ids", advice="/v1/chat/completions has it"),
    # ignored: how Anthropic runs, stores and bills
    Word(MESSAGES, "cache_control container mcp_servers inference_geo speed diagnostics betas billing_policy"),
    Word(MESSAGES, "user_profile_id workspace_id compaction fallbacks fallback_credit_token thread"),
    # --- llama.cpp's /infill
    Word(INFILL, "n_predict", "max_new_tokens"),
    Word(INFILL, "repeat_penalty", "repetition_penalty"),
    Word(INFILL, "samplers n_indent response_fields t_max_prompt_ms t_max_predict_ms n_keep n_cache_reuse"),  # ignored
    Word(INFILL, "suffix", advice="its name here is input_suffix"),
    Word(INFILL, "echo", advice="the prompt is no text alone"),
    # --- Ollama's API
    Word(OLLAMA, "keep_alive truncate shift"),  # the server reads the first; what is too long is refused
    Word(OLLAMA, "template", advice="the model's own template is used; raw takes a prompt as it is"),
    Word(OLLAMA, "context", advice="use /api/chat, and give the messages"),
    Word(OLLAMA, "images width height steps", advice=_MEDIA),
    Word(OLLAMA_OPTIONS, "repeat_penalty", "repetition_penalty", neutral=(1,)),
    Word(OLLAMA_OPTIONS, "temperature", "temperature"),
    Word(OLLAMA_OPTIONS, "top_k", "top_k"),
    Word(OLLAMA_OPTIONS, "top_p", "top_p"),
    Word(OLLAMA_OPTIONS, "min_p", "min_p", neutral=(0,)),
    Word(OLLAMA_OPTIONS, "typical_p", "typical_p", neutral=(1,)),
    Word(OLLAMA_OPTIONS, "seed", "seed", neutral=(-1,)),
    Word(OLLAMA_OPTIONS, "stop", "stop"),
    Word(OLLAMA_OPTIONS, "presence_penalty", "presence_penalty"),
    Word(OLLAMA_OPTIONS, "frequency_penalty", "frequency_penalty"),
    Word(OLLAMA_OPTIONS, "mirostat", "mirostat", neutral=(0,)),
    Word(OLLAMA_OPTIONS, "mirostat_tau", "mirostat_tau"),
    Word(OLLAMA_OPTIONS, "mirostat_eta", "mirostat_eta"),
    # ignored: how Ollama loads and runs a model; tfs_z has no effect in Ollama either
    Word(OLLAMA_OPTIONS, "num_keep num_batch num_gpu main_gpu num_thread numa low_vram f16_kv vocab_only"),
    Word(OLLAMA_OPTIONS, "use_mmap use_mlock logits_all embedding_only penalize_newline num_gqa tfs_z"),
    # --- the command line
    Word(COMMANDS, "complete", "generate"),
    Word(COMMANDS, "convert", "quantize"),
    Word(COMMANDS, "download", "pull"),
    Word(COMMANDS, "help", "--help"),
    Word(COMMANDS, "list ls", "models"),
    Word(COMMANDS, "run", "chat"),
)

WORDS: dict[str, dict[str, Word]] = {}
"""Reader -> word -> its entry"""
for _entry in TABLE:
    WORDS.setdefault(_entry.reader, {}).update(dict.fromkeys(_entry.names.split(), _entry))


@cache
def renamed(reader: str) -> Mapping[str, str]:
    """Words of a reader -> what minillm has instead."""
    return {name: word.ours for name, word in WORDS[reader].items() if word.ours is not None}


@cache
def refused(reader: str) -> Mapping[str, str]:
    """Words that a reader refuses -> the advice."""
    return {name: word.advice for name, word in WORDS[reader].items() if word.advice is not None}


@cache
def ignored(reader: str) -> frozenset[str]:
    """Words without effect for a reader."""
    return frozenset(name for name, word in WORDS[reader].items() if word.ours is word.advice is None)
