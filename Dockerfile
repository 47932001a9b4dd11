# Trains, evaluates and serves, with `grpo-pl` as its command:
#
#   docker build -t grpo_pl .
#   docker run --rm -v $PWD/runs:/work/runs grpo_pl fit --config configs/quickstart.yaml
#
# For GPUs, build with --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 and run with --gpus all --ipc host.
# Extras come with --build-arg EXTRAS=[lora,environments].
FROM python:3.12-slim AS build

# the decode kernel is C; the image that runs it needs no compiler
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE ./
COPY configs configs
COPY grpo_pl grpo_pl
COPY serve serve
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=
RUN pip install --no-cache-dir --index-url ${TORCH_INDEX} "torch>=2.11,<2.14"
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)${EXTRAS}"

WORKDIR /work
ENTRYPOINT ["grpo-pl"]
