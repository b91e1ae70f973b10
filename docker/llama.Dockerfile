# llama.cpp's server. BACKEND=cpu: the package xllamacpp from the lock file; BACKEND=cuda: on top of the official image of
# the pinned build. Entry, flags, port, mounts, user and health check are the same.
ARG BASE
ARG BACKEND=cpu

FROM ${BASE} AS packages
COPY packages.lock /tmp/packages.lock
RUN --mount=type=bind,source=wheels,target=/wheels \
    python3.11 -m venv --without-pip /opt/venv \
    && python3.11 -m pip --python /opt/venv/bin/python install -q --no-cache-dir --no-compile --no-index \
       --find-links /wheels --no-deps --require-hashes -r /tmp/packages.lock \
    && PYTHONHASHSEED=0 /opt/venv/bin/python -B -m compileall -qq --invalidation-mode unchecked-hash /opt/venv/lib

FROM ${BASE} AS cpu
COPY --from=packages /opt/venv /opt/venv
COPY server_main.py /app/server_main.py
COPY llama-cpu.sh /app/llama-server

FROM ${BASE} AS cuda

FROM ${BACKEND}
COPY llama-serve.sh /app/serve
COPY llama-healthy.sh /app/healthy
WORKDIR /app
ENV LLAMA_ARG_HOST=0.0.0.0 LLAMA_ARG_PORT=8080 HOME=/tmp
EXPOSE 8080
USER 1000:1000
ENTRYPOINT ["/app/serve"]
CMD []
HEALTHCHECK --interval=2s --timeout=4s --start-period=600s --retries=5 CMD ["/app/healthy"]
