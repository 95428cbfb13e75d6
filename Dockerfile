# The environment of a run on an NVIDIA card: Debian, Python, locked packages, code. `make image` builds it.
#
# torch's wheels bring CUDA, cuDNN and NCCL, and the container toolkit the driver's libraries: nothing of NVIDIA's is in
# the base. Without a registry `debootstrap --variant=minbase trixie` makes one; `make test-image CUDA=1` builds and tests
# the image on it. Any Debian or Ubuntu will do whose Python is 3.12 or 3.13, which the lock is for; bookworm has 3.11
# and fails. The digest stands for the tag beside it; it comes from public files and was not compared with a registry's.
#
# For a CPU, and for the tests, Python 3.11 will do as well:
#
#   --build-arg BASE=debian:bookworm --build-arg PIP_INSTALL="-c requirements/cpu.txt .[gpu,math,serve,tracking]"
ARG BASE=debian:trixie-20261005-slim@sha256:a29215f6a35e51e22adffa17f89e9d2ef06214e64a2bad10d765c46aea49f11f

FROM ${BASE} AS python
ENV DEBIAN_FRONTEND=noninteractive LANG=C.UTF-8
# gcc and Python's headers: triton compiles its launchers when a kernel first runs.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log /var/cache/ldconfig/aux-cache

# The packages, before the code: a change of it reinstalls nothing. `pip install .` needs the version; what it puts
# beside the packages stands behind /app on the path.
FROM python AS packages
ARG PIP_INSTALL="--require-hashes -r requirements/image.txt"
ARG PIP_ARGS=""
# Compiled files then hold a hash of their source instead of its time, and two builds have the same bytes.
ARG SOURCE_DATE_EPOCH=0
WORKDIR /build
COPY pyproject.toml ./
COPY requirements/ requirements/
COPY rlhf/__init__.py rlhf/
RUN touch README.md LICENSE && python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir ${PIP_ARGS} ${PIP_INSTALL} \
    && /opt/venv/bin/pip check

FROM python AS runtime
# Any user of group 0 may write here, so that files that a run leaves belong to the one who started it.
RUN useradd --uid 10001 --gid 0 --create-home --home-dir /home/rlhf --shell /usr/sbin/nologin rlhf \
    && mkdir -p /cache/rlhf /work && chmod -R g=u /cache /work /home/rlhf
COPY --from=packages /opt/venv /opt/venv
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
    RLHF_INSIDE=1 RLHF_COMMIT=${COMMIT} USER=rlhf HOME=/home/rlhf HF_HOME=/cache/huggingface XDG_CACHE_HOME=/cache \
    TRITON_CACHE_DIR=/cache/rlhf/triton TORCHINDUCTOR_CACHE_DIR=/cache/rlhf/inductor HF_HUB_DISABLE_TELEMETRY=1 \
    PYTORCH_ALLOC_CONF=expandable_segments:True \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility NVIDIA_REQUIRE_CUDA="cuda>=13.0"
WORKDIR /work
USER 10001:0
ENTRYPOINT ["python", "-m", "rlhf.cli"]
