# minillm serve on CPUs: docker build -t minillm . && docker run -p 8000:8000 minillm --model HuggingFaceTB/SmolLM2-135M-Instruct
# minillm/server/DEPLOYMENT.md says what to set; scripts/run_dockerfile.py runs these commands without Docker.
FROM python:3.12-slim AS build
WORKDIR /src
COPY . .
RUN python -m pip wheel --quiet --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
COPY --from=build /wheels /wheels
# The C kernels are compiled at the first start, for the processor that runs them: the extra `fast` has the compiler.
RUN python -m pip install --quiet --no-cache-dir "$(ls /wheels/*.whl)[serve,gguf,fast]"
RUN useradd --create-home --uid 1000 minillm
USER minillm
WORKDIR /home/minillm
RUN mkdir -m 700 .cache
ENV HF_HOME=/home/minillm/.cache/huggingface MINILLM_HOST=0.0.0.0 MINILLM_PORT=8000
# Compiled kernels and fetched models, kept over restarts
VOLUME /home/minillm/.cache
EXPOSE 8000
HEALTHCHECK --interval=10s --start-period=120s CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(f'http://127.0.0.1:{os.environ[\"MINILLM_PORT\"]}/health')"]
ENTRYPOINT ["python", "-m", "minillm", "serve"]
