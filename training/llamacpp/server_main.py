"""llama.cpp's own HTTP server as the package `xllamacpp` brings it, under the flags of `llama-server`.

It is the child process of a local server (`training.llamacpp.server`) and `/app/llama-server` of the server image
without a GPU; it runs as a plain script too. Every setting that llama.cpp would choose by itself (context, slots,
threads, batches, fitting to free memory) is given, so that two measurements are one experiment; a flag that it does not
know is refused. Like llama-server it reads `LLAMA_ARG_*`, and a flag wins; unlike it, it never runs without a model.
Exit status: 0 after SIGTERM or SIGINT, 1 when the model could not be served, with the reason in the last line, 2 for
wrong arguments.
Source: llama.cpp `common/arg.cpp` (flags and variables), `common/common.h`, struct `common_params` (settings).
"""

import argparse
import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1
_FLASH_ATTENTION = {
    word: f"LLAMA_FLASH_ATTN_TYPE_{name}"
    for word, name in (("auto", "AUTO"), ("on", "ENABLED"), ("off", "DISABLED"))
}  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="llama-server", allow_abbrev=False)

    def add(flag: str, variable: str, default: str | None = None, **options: object) -> None:
        value = os.environ.get(f"LLAMA_ARG_{variable}") or default
        parser.add_argument(flag, default=value, required=value is None, **options)

    add("--model", "MODEL")
    add("--host", "HOST", "127.0.0.1")
    add("--port", "PORT", type=int)
    add("--ctx-size", "CTX_SIZE", type=int, help="tokens of context of all slots together")
    add("--parallel", "N_PARALLEL", type=int)
    add("--threads", "THREADS", type=int)
    add("--batch-size", "BATCH", type=int)
    add("--ubatch-size", "UBATCH", type=int)
    add("--n-gpu-layers", "N_GPU_LAYERS", "0", type=int)
    add("--flash-attn", "FLASH_ATTN", "auto", choices=["auto", "on", "off"])
    add("--cache-type-k", "CACHE_TYPE_K", "f16", choices=["f16", "f32"])
    add("--cache-type-v", "CACHE_TYPE_V", "f16", choices=["f16", "f32"])
    add("--fit", "FIT", "off", choices=["off"])
    parser.add_argument("--lora", help="an adapter's GGUF, served beside the model and not merged into it")
    add("--cors-origins", "CORS_ORIGINS", "localhost")
    parser.add_argument("--no-ui", action="store_true", help="there is none here")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--token", help="marks this very start in the list of processes")
    parser.add_argument("--service", help="marks whatever serves under one name")
    parser.add_argument("--parent", type=int, help="die with this process; without it the server outlives its starter")
    args = parser.parse_args()
    if not args.model:
        parser.error("no model is named")
    return args


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the parent dies, even by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the parent died before the server started")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides when to stop


def _parameters(args: argparse.Namespace) -> object:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.hostnames = [args.host]
    params.port = args.port
    params.reuse_port = False
    params.n_ctx = args.ctx_size
    params.n_parallel = args.parallel
    params.n_batch = args.batch_size
    params.n_ubatch = args.ubatch_size
    params.n_gpu_layers = args.n_gpu_layers
    types, attention = xllamacpp.ggml_type, xllamacpp.llama_flash_attn_type
    params.cache_type_k = getattr(types, f"GGML_TYPE_{args.cache_type_k.upper()}")
    params.cache_type_v = getattr(types, f"GGML_TYPE_{args.cache_type_v.upper()}")
    params.flash_attn_type = getattr(attention, _FLASH_ATTENTION[args.flash_attn])
    params.kv_unified = False
    params.cpuparams.n_threads = args.threads
    params.cpuparams_batch.n_threads = args.threads
    params.sampling.seed = args.seed
    params.fit_params = False
    params.ui = False
    if args.lora:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(args.lora, 1.0)]
    params.cors_origins = args.cors_origins
    params.cors_credentials = False
    return params


def main() -> int:
    args = _arguments()
    if args.parent is not None:
        _die_with(args.parent)
    import xllamacpp

    params = _parameters(args)
    try:
        # Signals keep their default action while it loads: the call does not return to Python before it is done.
        server = xllamacpp.Server(params)
    except Exception as error:
        print(f"server: cannot serve {args.model}: {error}", file=sys.stderr, flush=True)
        return 1
    told_to_stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told_to_stop.set())
    if args.parent is None:
        signal.signal(signal.SIGINT, lambda *_: told_to_stop.set())
    print(f"server: serving {args.model} at {server.listening_address}", file=sys.stderr, flush=True)
    told_to_stop.wait()
    del server  # waits for the server's threads
    print("server: stopped", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
