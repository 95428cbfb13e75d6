# The environment of a run on an NVIDIA card: Debian, Python, locked packages, code. `make image` builds it.
#
# torch's wheels bring CUDA, cuDNN and NCCL, and the container toolkit the driver's libraries: nothing of NVIDIA's is in
# the base. Without a registry `debootstrap --variant=minbase trixie` makes one; `make test-image CUDA=1` builds and tests
# the image on it. Any Debian or Ubuntu will do whose Python is 3.12 or 3.13, which the lock is for; bookworm has 3.11
# and fails. The digest stands for the tag beside it; it comes from public files and was not compared with a registry's.
#
# For a CPU, and for the tests, Python 3.11 will do as well:
#
#   --build-arg BASE=debian:bookworm --build-arg PIP_INSTALL="-c requirements/cpu.txt -r requirements/direct.txt"
ARG BASE=debian:trixie-20261005-slim@sha256:a29215f6a35e51e22adffa17f89e9d2ef06214e64a2bad10d765c46aea49f11f

FROM ${BASE} AS python
ENV DEBIAN_FRONTEND=noninteractive LANG=C.UTF-8
# gcc and Python's headers: triton compiles its launchers when a kernel first runs.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log /var/cache/ldconfig/aux-cache

# The packages, before any code: a change of the code reinstalls nothing.
FROM python AS packages
ARG PIP_INSTALL="--require-hashes -r requirements/image.txt"
ARG PIP_ARGS=""
# Compiled files then hold a hash of their source instead of its time, and two builds have the same bytes.
ARG SOURCE_DATE_EPOCH=0
WORKDIR /build
COPY requirements/ requirements/
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir ${PIP_ARGS} ${PIP_INSTALL} \
    && /opt/venv/bin/pip check

# FLASH_ATTN=1 compiles flash-attn for FLASH_ATTN_ARCHS; it needs a BASE with the nvcc of torch's CUDA, such as
# nvidia/cuda:13.0.2-devel-ubuntu24.04, and hours of CPU time. It was never built whole, nor tried on a GPU. Without it
# attention is torch's own, which has the same algorithm.
FROM packages AS attention
ARG FLASH_ATTN=0
ARG FLASH_ATTN_VERSION=2.8.3.post2
ARG FLASH_ATTN_ARCHS="80;90"
ARG MAX_JOBS=4
RUN if [ "${FLASH_ATTN}" = 1 ]; then \
        /opt/venv/bin/pip install --no-cache-dir ninja packaging psutil setuptools wheel \
        && FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTN_CUDA_ARCHS="${FLASH_ATTN_ARCHS}" MAX_JOBS="${MAX_JOBS}" \
           /opt/venv/bin/pip install --no-cache-dir --no-build-isolation "flash-attn==${FLASH_ATTN_VERSION}"; \
    fi

FROM python AS runtime
# Any user of group 0 may write here, so that files that a run leaves belong to the one who started it.
RUN useradd --uid 10001 --gid 0 --create-home --home-dir /home/rlhf --shell /usr/sbin/nologin rlhf \
    && mkdir -p /cache/rlhf /work && chmod -R g=u /cache /work /home/rlhf
COPY --from=attention /opt/venv /opt/venv
COPY --chmod=0444 pyproject.toml /app/
COPY --chmod=0555 bench/ /app/bench/
COPY --chmod=0555 peakmem/ /app/peakmem/
COPY --chmod=0555 recipes/ /app/recipes/
COPY --chmod=0555 rlhf/ /app/rlhf/
RUN printf '#!/bin/sh\nexec python -m rlhf.cli "$@"\n' >/usr/local/bin/rlhf && chmod 0555 /usr/local/bin/rlhf
ARG VERSION=unknown
ARG COMMIT=unknown
LABEL org.opencontainers.image.title="rlhf-one-gpu" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${COMMIT}" \
      org.opencontainers.image.licenses="Apache-2.0"
# USER and the caches are named because a container's user need not be in /etc/passwd.
# Sequences of many lengths fragment torch's default segments; expandable ones grow in place.
# NVIDIA_*: what a base of NVIDIA's would set. The toolkit gives the card, and refuses a driver too old for torch's CUDA.
ENV PATH=/opt/venv/bin:${PATH} PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    RLHF_COMMIT=${COMMIT} USER=rlhf HOME=/home/rlhf HF_HOME=/cache/huggingface XDG_CACHE_HOME=/cache \
    TRITON_CACHE_DIR=/cache/rlhf/triton TORCHINDUCTOR_CACHE_DIR=/cache/rlhf/inductor HF_HUB_DISABLE_TELEMETRY=1 \
    PYTORCH_ALLOC_CONF=expandable_segments:True \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility NVIDIA_REQUIRE_CUDA="cuda>=13.0"
WORKDIR /work
USER 10001:0
ENTRYPOINT ["python", "-m", "rlhf.cli"]
