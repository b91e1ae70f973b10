"""A server that is slow to be ready: `stub_server.py PORT MODE REFUSE_SECONDS LOADING_SECONDS LOG`.

MODE `ready` refuses, answers 503, then 200; `dies` ends with status 3 instead of listening; `never` answers 503 for
ever. `/v1/models` answers 200 all along, and every request is written to LOG with its time and status.
"""

import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

port, mode, refuse_seconds, loading_seconds, log = sys.argv[1:]
time.sleep(float(refuse_seconds))
if mode == "dies":
    print("first line\nout of memory while loading", flush=True)
    sys.exit(3)
ready_at = time.monotonic() + (float(loading_seconds) if mode == "ready" else float("inf"))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        status = 200 if self.path == "/v1/models" or time.monotonic() >= ready_at else 503
        body = b'{"status":"ok"}' if status == 200 else b'{"error":{"message":"Loading model"}}'
        with open(log, "a") as file:
            file.write(f"{self.command} {self.path} {status}\n")
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_):
        pass


ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
