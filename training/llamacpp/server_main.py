"""The child process of a local server: llama.cpp's own HTTP server, as the package `xllamacpp` brings it.

Started by `training.llamacpp.server` and by nothing else. Every setting that llama.cpp would choose by itself (context,
slots, threads, fitting to free memory) is given, so that two measurements are one experiment. It listens on loopback.
Exit status: 0 after SIGTERM or SIGINT, 1 when the model could not be served, with the reason in the last line.
Source of the settings: llama.cpp `common/common.h`, struct `common_params`.
"""

import argparse
import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.llamacpp.server_main")
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ctx-size", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--token", required=True, help="marks this very start in the list of processes")
    parser.add_argument("--parent", type=int, help="die with this process; without it the server outlives its starter")
    return parser.parse_args()


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
    params.hostnames = ["127.0.0.1"]
    params.port = args.port
    params.reuse_port = False
    params.n_ctx = args.ctx_size * args.slots
    params.n_parallel = args.slots
    params.kv_unified = False
    params.cpuparams.n_threads = args.threads
    params.cpuparams_batch.n_threads = args.threads
    params.sampling.seed = args.seed
    params.fit_params = False
    params.ui = False
    params.cors_origins = "localhost"
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
