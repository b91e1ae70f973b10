#!/bin/bash
# The entry of the server image. llama-server without a model starts as a router, healthy and empty: refuse that.
model=${LLAMA_ARG_MODEL-}
arguments=("$@")
for ((i = 0; i < $#; i++)); do
  case ${arguments[i]} in
    -m | --model) model=${arguments[i + 1]-} ;;
    --help | --version) model=none ;;
  esac
done
if [ -z "$model" ]; then
  echo "server: no model is named; expected --model /app/models/... or LLAMA_ARG_MODEL" >&2
  exit 1
fi
exec /app/llama-server "$@"
