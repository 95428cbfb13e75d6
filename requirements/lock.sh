#!/usr/bin/env bash
# Write the locks from the ranges in pyproject.toml:
#
#   cpu.txt      the versions that `make` installs, on a CPU or a GPU
#   image.txt    the same versions with the hash of every file, CUDA's libraries too: what the container image installs
#
# Of torch and transformers cpu.txt has the oldest version that pyproject.toml allows and image.txt the newest, so that
# the tests and the image try both ends of the range.
#
#   requirements/lock.sh                        after a change in pyproject.toml; pins that still fit stay as they are
#   requirements/lock.sh --upgrade              take the newest version of everything that the ranges allow
#   requirements/lock.sh --upgrade-package trl  the same for one package; any other option goes to uv as well
#
# It needs uv (`make lock` puts it into .venv) and a package index. Only metadata is read: it takes seconds and no wheel
# is downloaded. uv does not read pip's configuration; to point it at another index or at a folder of wheels, set
# UV_DEFAULT_INDEX or UV_FIND_LINKS. Neither is written into the file.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PATH:$PWD/.venv/bin"

lock=requirements/cpu.txt

command -v uv >/dev/null || { echo "requirements/lock.sh: no uv here; 'make lock' installs it" >&2; exit 1; }

new=$(mktemp) held=$(mktemp)
trap 'rm -f "$new" "$held"' EXIT
if [ -f "$lock" ]; then cp "$lock" "$new"; fi # uv keeps the pins it finds in its output file

sed -nE 's/^ *"(torch|transformers)>=([0-9.]+),.*/\1==\2.*/p' pyproject.toml >"$held" # the oldest of these two
# --universal: one file for Python 3.11 to 3.13; where they need different versions (numpy), a marker tells them apart.
uv pip compile pyproject.toml --all-extras --constraint "$held" --universal --python-version 3.11 \
    --no-header --annotation-style line --quiet --output-file "$new" "$@" >/dev/null

{
    cat <<'HEADER'
# Made by requirements/lock.sh from pyproject.toml: change that, then run `make lock`.
#
# A constraints file: it names versions and installs nothing by itself.
#
#     pip install -c requirements/cpu.txt -e '.[gpu,math,serve,tracking]'
#
# Left out are the CUDA libraries and triton. torch's CUDA wheel asks for their exact versions itself, the CPU-only
# wheel has no use for them, and torch==2.13.0 below admits both wheels: the file serves a GPU as well as a CPU.
#
# No hashes, on purpose. The CPU-only and the CUDA wheel are different files of one version, so with hashes the file
# would serve only one of them; with both sets listed, pip prefers the wheel whose link carries a hash and fetches the
# CUDA one although a CPU-only one is at hand. A single hash here would also demand one for everything else installed.

HEADER
    # Drop the CUDA packages, and the local part of a version (torch==2.13.0+cpu, from a folder with CPU-only wheels).
    sed -E -e "s|, -c $held||" -e '/^(nvidia-[^m]|cuda-|triton)/d' -e '/^#/d' -e '/^$/d' -e 's/^([a-z0-9._-]+==[^+ ]+)\+[a-z0-9.]+/\1/' "$new"
} >"$lock"

echo "$lock: $(grep -c == "$lock") pins"

image=requirements/image.txt
if [ -f "$image" ]; then cp "$image" "$new"; else : >"$new"; fi
grep -vE '^(torch|transformers)==' "$lock" >"$held" # the newest of these two: see above
uv pip compile pyproject.toml --extra gpu --extra tracking --extra wandb --extra trackio --extra serve --extra math --extra tasks --constraint "$held" --generate-hashes \
    --upgrade-package torch --upgrade-package transformers --python-platform x86_64-unknown-linux-gnu --python-version 3.12 \
    --no-header --annotation-style line --quiet --output-file "$new" >/dev/null
{
    echo '# Made by requirements/lock.sh: what the container image installs, for Python 3.12 on Linux with CUDA.'
    sed "s|$held|$lock|" "$new"
} >"$image"
echo "$image: $(grep -c == "$image") pins"
