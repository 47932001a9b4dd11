# Two images of one build. The first trains, evaluates and exports, with `grpo-pl` as its command:
#
#   docker build -t grpo_pl .
#   docker run --rm -v $PWD/runs:/work/runs grpo_pl fit --config configs/quickstart.yaml
#
# The second serves the model that is mounted at /model:
#
#   docker build --target serve -t grpo_pl-serve .
#   docker run --rm -p 8000:8000 -v $PWD/runs/quickstart/export:/model:ro -e GRPO_PL_API_KEY=… grpo_pl-serve
#
# For GPUs, build with --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 and run with --gpus all, to train
# also with --ipc host. Extras come with --build-arg EXTRAS=[lora,environments].
FROM python:3.12-slim AS build

# our kernels are C
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE ./
COPY configs configs
COPY grpo_pl grpo_pl
COPY serve serve
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim AS installed

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=
RUN pip install --no-cache-dir --index-url ${TORCH_INDEX} "torch>=2.11,<2.14"
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)${EXTRAS}"

FROM installed AS serve

# judging answers and decoding need neither root nor anything on disk but the model
RUN useradd --create-home server
USER server
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]

# exec form: the server is process 1 and gets SIGTERM, finishes what is in flight and exits with 0; if it had to refuse
# something or lost a worker it exits with 1, so run it under --restart on-failure or an orchestrator. Without a key it
# does not start, because it listens to other machines. Where clients call it by a name, add: --allowed-host NAME
ENTRYPOINT ["python", "-m", "serve", "--model", "/model", "--host", "0.0.0.0", "--port", "8000"]

FROM installed AS train

# on a GPU Triton builds a module in C for each of its kernels, while it runs
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /work
ENTRYPOINT ["grpo-pl"]
