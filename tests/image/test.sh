#!/usr/bin/env bash
# Build the image for a CPU and train in it: as a user that it does not know, with everything but /work, /cache and
# /tmp read-only, and without network. The adapters must have the bytes of those that PYTHON trains outside, where it has
# the image's versions of torch and transformers.
#
#   tests/image/test.sh PYTHON      docker, podman or buildah, whichever works here; buildah needs root
#   CUDA=1                          the image for a GPU instead, with the Dockerfile's own BASE and locked packages; no
#                                   GPU is needed, and the chain of a recipe for a card is rehearsed in it; 20 GB of disk
#   TWICE=1                         also build a second time from nothing and compare every installed file; needs buildah
#   BASE=debian:bookworm            another base; for a CPU its Python must be PYTHON's, for a GPU 3.12 or 3.13
#   PIP_ARGS=...                    more arguments for pip inside, for example the index of torch without CUDA
#   PIP_FIND_LINKS=DIR              a folder of wheels to install from (buildah)
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$(realpath -s "${1:?usage: tests/image/test.sh PYTHON}")
cuda=''
if [ "${CUDA:-}" = 1 ]; then cuda=1; fi
tag=localhost/rlhf-test:${cuda:+cuda-}image
release=bookworm
if [ -n "$cuda" ]; then release=trixie; fi

say() { echo "test-image: $*" >&2; }

engines=(docker podman buildah)
if [ -n "${TWICE:-}" ]; then engines=(buildah); fi # the only one whose images' files are looked at
engine=
for name in "${engines[@]}"; do
    if command -v "$name" >/dev/null && "$name" info >/dev/null 2>&1; then engine=$name && break; fi
done
[ -n "$engine" ] || { say "none works here: ${engines[*]}; install one${TWICE:+, or leave out TWICE}"; exit 1; }
if [ "$engine" = buildah ]; then
    export STORAGE_DRIVER="${STORAGE_DRIVER:-vfs}" BUILDAH_ISOLATION="${BUILDAH_ISOLATION:-chroot}"
fi

work=$(mktemp -d)
mkdir "$work/inside" "$work/outside"
chmod 0777 "$work" "$work/inside"
containers=()
cleanup() {
    for container in "${containers[@]}"; do buildah rm "$container" >/dev/null || true; done
    # Files of the container's user; with buildah the caller is root, who may remove them.
    if [ "$engine" != buildah ]; then entry="find" inside /work -mindepth 1 -delete >/dev/null 2>&1 || true; fi
    rm -rf "$work"
}
trap cleanup EXIT

base() { # without a registry: Debian's packages make one
    if [ -n "${BASE:-}" ] || [ "$engine" != buildah ]; then
        if [ -n "$cuda" ]; then echo "${BASE:-}"; else echo "${BASE:-debian:$release}"; fi
        return
    fi
    local name=localhost/rlhf-test-base:$release root container
    if ! buildah inspect --type image "$name" >/dev/null 2>&1; then
        say "making a Debian base, $release"
        root=$work/base
        debootstrap --variant=minbase --include=ca-certificates "$release" "$root" >&2
        container=$(buildah from scratch)
        buildah add -q "$container" "$root" / >/dev/null
        buildah commit -q --rm "$container" "$name" >/dev/null
        rm -rf "$root"
    fi
    echo "$name"
}

build() { # build EXTRA...
    local command=("$engine" build) pip_args=${PIP_ARGS:-} base
    if [ "$engine" = buildah ]; then # which, unlike the others, keeps no layers unless it is told to
        command=(buildah bud --layers --network host -v /etc/ssl/certs:/etc/ssl/certs:ro)
        if [ -n "${PIP_FIND_LINKS:-}" ]; then
            command+=(-v "$PIP_FIND_LINKS:$PIP_FIND_LINKS:ro")
            pip_args+=" --find-links $PIP_FIND_LINKS"
        fi
    fi
    base=$(base)
    if [ -n "$base" ]; then command+=(--build-arg BASE="$base"); fi
    if [ -z "$cuda" ]; then
        command+=(--build-arg PIP_INSTALL='-c requirements/cpu.txt .[gpu,math,serve,tracking]'
            --build-arg PIP_ARGS="$pip_args")
    fi
    command+=(--build-arg COMMIT="$(git rev-parse HEAD 2>/dev/null || echo unknown)" -t "$tag" "$@" .)
    "${command[@]}" >"$work/build.log" 2>&1 || { tail -30 "$work/build.log" >&2; return 1; }
}

root_of() { # a directory with the image's files (buildah)
    local container
    container=$(buildah from "$tag")
    containers+=("$container")
    buildah mount "$container"
}

# inside ARGUMENTS...: what `docker run IMAGE ARGUMENTS` does, without network and as a user that /etc/passwd lacks;
# `entry=PROGRAM inside ARGUMENTS...` takes another entry point than the image's
inside() {
    if [ "$engine" != buildah ]; then
        $engine run --rm --network none --read-only --tmpfs /tmp:exec --tmpfs /cache:exec,mode=0777 --user 12345:0 \
            -v "$work/inside:/work" ${entry:+--entrypoint "$entry"} "$tag" "$@"
        return
    fi
    local environment entrypoint
    mapfile -t environment < <(buildah inspect --type image -f '{{range .OCIv1.Config.Env}}{{println .}}{{end}}' "$tag" | grep '=')
    mapfile -t entrypoint < <(buildah inspect --type image -f '{{range .OCIv1.Config.Entrypoint}}{{println .}}{{end}}' "$tag" | grep .)
    if [ -n "${entry:-}" ]; then entrypoint=("$entry"); fi
    # shellcheck disable=SC2016
    unshare --mount --net --pid --fork bash -euc '
        root=$1 work=$2; shift 2
        mount --bind "$root" "$root"; mount -o remount,ro,bind "$root"
        mount -t proc proc "$root/proc"; mount --rbind /dev "$root/dev"
        mount -t tmpfs tmpfs "$root/tmp"; mount -t tmpfs -o mode=0777 tmpfs "$root/cache"
        mount --bind "$work" "$root/work"
        exec chroot --userspec=12345:0 "$root" /usr/bin/env -i -C /work "$@"
    ' bash "$root" "$work/inside" "${environment[@]}" "${entrypoint[@]}" "$@"
}

files() { # path, mode and hash of what was installed
    (cd "$1" && find opt/venv app -type f -printf '%p %m ' -exec sha256sum {} \; | awk '{print $1, $2, $3}' | sort)
}

say "building with $engine"
began=$SECONDS
build
say "built in $((SECONDS - began)) s"
root=
if [ "$engine" = buildah ]; then
    root=$(root_of)
    say "size: $(du -sh --apparent-size "$root" | cut -f1)"
fi

said=$(entry=python inside -m pip check) || { say "pip check: $said"; exit 1; }
said=$(entry=python inside -c 'import sys, torch
print(sys.version.split()[0], torch.__version__, torch.version.cuda, torch.backends.cudnn.version())')
say "Python, torch, its CUDA and cuDNN inside: $said"
if [ -n "$cuda" ]; then [[ $said == *+cu* ]] || { say 'torch has no CUDA'; exit 1; }; fi

versions='import torch, transformers; print(torch.__version__.partition("+")[0], transformers.__version__)'
compared=''
if [ "$(entry=python inside -c "$versions")" = "$("$python" -c "$versions")" ]; then compared=1; fi

say "training inside${compared:+ and outside}"
settings=$("$python" -c '
from rlhf.recipe import as_yaml
from tests.helpers import SMALL
for key, value in SMALL.items(): print("--set", f"{key}={as_yaml(value)}", sep="\n")')
mapfile -t small <<<"$settings"
for stage in pretrain sft rm ppo dpo evaluate merge; do
    inside run "$stage" --recipe /app/recipes/cpu-tiny/v1 --out /work/runs "${small[@]}" >"$work/inside.log" 2>&1 || { cat "$work/inside.log" >&2; exit 1; }
    [ -z "$compared" ] || "$python" -m rlhf.cli run "$stage" --recipe recipes/cpu-tiny/v1 --out "$work/outside/runs" "${small[@]}" >/dev/null
done
if [ -n "$compared" ]; then
    for result in pretrain/model/model.safetensors {sft,rm,ppo,dpo}/adapter/adapter_model.safetensors merge/model/model.safetensors; do
        cmp "$work/inside/runs/cpu-tiny/v1/$result" "$work/outside/runs/cpu-tiny/v1/$result"
    done
    say 'every adapter has the same bytes inside and outside'
else
    say "$python has other versions of torch and transformers: no bytes were compared"
fi

entry=bash inside -c 'rlhf --version' >/dev/null # as `make shell` has it
mkdir -m 0777 "$work/inside/results" # as the caller's checkout has it
entry=python inside -m bench --hw cpu --stage sft --steps 2 --save >"$work/inside.log" 2>&1 || { cat "$work/inside.log" >&2; exit 1; }
record=$(find "$work/inside/results/cpu-tiny" -name '*_steps.json')
grep -q "\"commit\": \"$(git rev-parse HEAD)\"" "$record"
say "the benchmark runs inside and leaves its record outside: results${record#*/results}"

grep -q '"commit": "[0-9a-f]\{40\}' "$work/inside/runs/cpu-tiny/v1/ppo/manifest.json"
if [ "$engine" = buildah ]; then [ "$(stat -c %u "$work/inside/runs")" = 12345 ]; fi
said=$(inside run sft --hw 4090 2>&1) && { say 'a run without a GPU did not fail'; exit 1; }
[[ $said == *'the recipe needs CUDA'* ]] || { say "no GPU: $said"; exit 1; }
said=$(inside run pretrain --hw cpu --out /app/runs 2>&1) && { say 'the code could be written to'; exit 1; }
[[ $said == *'/app/runs'* && $said != *Traceback* ]] || { say "read-only folder: $said"; exit 1; }
say 'without a GPU, and with a folder that cannot be written, it says so'

if [ -n "$cuda" ]; then
    say 'a recipe for a card, inside: planned, rehearsed with the model that was just trained, and the GPU benchmark dry'
    steps=(
        'python -m rlhf.cli plan --hw 4090'
        'python -m rlhf.cli rehearse --hw 4090 --weights /work/runs/cpu-tiny/v1/merge/model --out /work/runs'
        'python -m bench.gpu --dry-run --no-predict --only device --only training'
    )
    for step in "${steps[@]}"; do
        began=$SECONDS
        entry=bash inside -c "$step" >"$work/inside.log" 2>&1 || { cat "$work/inside.log" >&2; exit 1; }
        say "$step: $((SECONDS - began)) s"
    done
fi

if [ -n "${TWICE:-}" ]; then
    files "$root" >"$work/first"
    say 'building again, from nothing'
    build --no-cache
    files "$(root_of)" >"$work/second"
    diff "$work/first" "$work/second" >&2
    say "the two builds have the same $(wc -l <"$work/first") files"
fi
say passed
