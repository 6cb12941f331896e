#!/usr/bin/env bash
# Resolves pyproject.toml into requirements/: cpu.txt is what set-up installs, torch-cuda.txt what the index's own build of torch
# needs beside it. Neither names an address, and torch carries no local label: the installer prefers a CPU build where one is offered.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly CUDA='^(nvidia-|cuda-)'
resolved=$(mktemp)
trap 'rm -f "$resolved"' EXIT

env -u UV_FIND_LINKS .venv/bin/uv pip compile --quiet pyproject.toml requirements/tools.in --extra cpu --extra dev --extra peer \
    --override requirements/overrides.txt --prerelease allow --python-version 3.11 \
    --no-header --no-annotate --no-emit-index-url --no-emit-find-links --output-file "$resolved" "$@"

{ echo "# Made by make lock: do not edit."; grep -Ev "$CUDA" "$resolved"; } >requirements/cpu.txt
{ echo "# Made by make lock: libraries of torch's CUDA build."; grep -E "$CUDA" "$resolved"; } >requirements/torch-cuda.txt
