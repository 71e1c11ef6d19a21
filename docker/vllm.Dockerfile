# A worker with vLLM, based on the engine's image. Needs the wheel that docker/Dockerfile builds:
#
#   docker build -f docker/Dockerfile --target wheel -t lmpool-wheel:0.2.0 .
#   docker build -f docker/vllm.Dockerfile -t lmpool-vllm:0.2.0 docker
#
# To use your own package index, add `--secret id=pip_conf,src=pip.conf`. No layer contains the secret.
ARG WHEEL=lmpool-wheel:0.2.0
ARG BASE=docker.io/vllm/vllm-openai:v0.32.0

FROM ${WHEEL} AS wheel

FROM ${BASE}
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="lmpool-vllm" \
      org.opencontainers.image.description="A worker of lmpool with vLLM" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
USER 0:0
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Use the installed packages as constraints, so that pip does not change the engine's packages.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    python3 -m pip freeze --exclude-editable | grep '==' > /tmp/engine.txt \
    && python3 -m pip install --no-cache-dir --constraint /tmp/engine.txt "$(echo /wheels/lmpool-*.whl)[worker]" \
    && rm /tmp/engine.txt \
    && groupadd --gid 10001 lmpool \
    && useradd --uid 10001 --gid 10001 --create-home lmpool \
    && install -d -o 10001 -g 10001 /models /run/lmpool
# Engines and their compilers write caches to the home folder (.cache, .triton, .nv, …), so it must not lie on a read-only
# root file system. Do not mount /tmp with noexec: engines load compiled code from there.
ENV PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    HF_HOME=/models \
    LMPOOL_SHM_DIR=/run/lmpool
WORKDIR /home/lmpool
EXPOSE 9100
# SIGTERM drains a worker: it finishes and publishes its prompts, then exits with 0. A second SIGTERM ends it at once.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=60m --retries=3 \
    CMD ["python3", "-IS", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:9100/readyz', timeout=4)"]
USER 10001:10001
ENTRYPOINT ["lmpool", "worker", "--backend", "vllm", "--metrics-port", "9100", "--metrics-host", "0.0.0.0", "--log-format", "json"]
CMD ["--help"]
