#!/bin/sh
# The server of the package xllamacpp, at the place where the official image has its own.
exec /opt/venv/bin/python -P /app/server_main.py "$@"
