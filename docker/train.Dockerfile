# Everything that touches torch: the packages of the lock file and the program itself, under /app/trainyard.
ARG BASE
FROM ${BASE} AS built
# Compiled once here, since nothing can be written where it runs; by content, so that the same sources give the same
# bytes. Some packages carry test files of a later Python, which do not compile and are never imported.
COPY packages.lock /tmp/packages.lock
RUN --mount=type=bind,source=wheels,target=/wheels \
    python3.11 -m venv --without-pip /opt/venv \
    && python3.11 -m pip --python /opt/venv/bin/python install -q --no-cache-dir --no-compile --no-index \
       --find-links /wheels --no-deps --require-hashes -r /tmp/packages.lock \
    && (PYTHONHASHSEED=0 /opt/venv/bin/python -B -m compileall -qq --invalidation-mode unchecked-hash /opt/venv/lib || true)

FROM ${BASE}
COPY --from=built /opt/venv /opt/venv
COPY trainyard /app/trainyard
# The root is read-only when it runs: what torch and its friends would cache goes to /tmp.
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app/trainyard PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    HOME=/tmp USER=trainyard XDG_CACHE_HOME=/tmp/.cache HF_HOME=/tmp/.cache/huggingface HF_HUB_OFFLINE=1 MPLCONFIGDIR=/tmp/.cache/matplotlib
ARG COMMIT
ENV TRAINYARD_COMMIT=${COMMIT}
USER 1000:1000
ENTRYPOINT ["/opt/venv/bin/python", "-m", "training"]
CMD ["--help"]
