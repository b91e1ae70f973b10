# The system image with a C++ compiler, for llama-quantize. Like that one it may need a network, and is no part of what
# runs.
ARG BASE
FROM ${BASE}
RUN --mount=type=secret,id=extra_ca \
    [ ! -s /run/secrets/extra_ca ] || ca="-oAcquire::https::CaInfo=/run/secrets/extra_ca"; \
    apt-get $ca update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get $ca install -y -qq --no-install-recommends g++ cmake ninja-build >/dev/null
