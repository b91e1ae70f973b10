# The train image with the pinned llama.cpp: its converter, and llama-quantize compiled from the same source.
ARG BASE
ARG COMPILER
FROM ${COMPILER} AS quantize
COPY llama.cpp /src
ARG BUILD_NUMBER
ARG BUILD_COMMIT
# The time goes into reading the source, not into the programs: -O1 for what only moves data about; the quantizing loops
# are C and keep -O3. Nothing is fetched, and nothing is tuned to the processor that compiles.
RUN cmake -S /src -B /build -G Ninja -DCMAKE_BUILD_TYPE=Release "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG" \
      -DBUILD_SHARED_LIBS=OFF -DCMAKE_EXE_LINKER_FLAGS=-static-libstdc++ -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF \
      -DGGML_LLAMAFILE=OFF -DGGML_CPU_REPACK=OFF \
      -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF \
      -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF \
      -DLLAMA_BUILD_NUMBER=${BUILD_NUMBER} -DLLAMA_BUILD_COMMIT=${BUILD_COMMIT} >/dev/null \
    && cmake --build /build --target llama-quantize \
    && strip /build/bin/llama-quantize

FROM ${BASE}
ARG PIN
COPY llama.cpp/convert_hf_to_gguf.py llama.cpp/convert_lora_to_gguf.py llama.cpp/LICENSE llama.cpp/manifest.json /app/llama.cpp/${PIN}/
COPY llama.cpp/conversion /app/llama.cpp/${PIN}/conversion
COPY llama.cpp/gguf-py /app/llama.cpp/${PIN}/gguf-py
COPY --from=quantize /build/bin/llama-quantize /app/llama-quantize
ENV LLAMA_CPP=/app/llama.cpp
