#!/bin/bash
# Healthy: /health answers 200, which it does once the model is loaded. Bash alone: not every base has curl or Python.
exec 3<>"/dev/tcp/127.0.0.1/${LLAMA_ARG_PORT:-8080}" || exit 1
printf 'GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n' >&3
read -r -t 3 _ status _ <&3
[ "$status" = 200 ]
