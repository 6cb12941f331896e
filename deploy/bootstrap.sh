#!/usr/bin/env bash
# Makes .venv from the lock: one command, again a no-op when nothing changed, safe to interrupt and to run twice at once.
#
#   deploy/bootstrap.sh            PYTHON=/path/to/python3.11 chooses the interpreter
#
# What pip is told on this machine (find-links, indexes, certificate) is passed on to uv, which does not read it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv
readonly STAMP=$VENV/.nightshift-stamp
readonly UV_VERSION=0.13.8
readonly LOCK=requirements/cpu.txt
readonly CUDA_LOCK=requirements/torch-cuda.txt

say() { printf 'set-up: %s\n' "$*" >&2; }
die() { printf 'set-up failed: %s\n' "$*" >&2; exit 1; }

wanted_stamp() { cat "$LOCK" "$CUDA_LOCK" pyproject.toml deploy/bootstrap.sh | sha256sum | cut -d' ' -f1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3.12 python3; do
        # python3.12 works too, but the lock was resolved for 3.11
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    die "no Python 3.11 or 3.12 found; on Debian 12: apt install python3 python3-venv. PYTHON=... names another one."
}

make_venv() {
    if "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then return; fi
    local python
    python=$(find_python)
    "$python" -c 'import ensurepip' 2>/dev/null || die "$python cannot make virtual environments; on Debian: apt install python3-venv"
    rm -rf "$VENV"
    say "making $VENV with $python"
    "$python" -m venv "$VENV" || die "$python -m venv $VENV did not succeed (disk full, or no rights to write here?)"
}

install_uv() {
    if [[ "$("$VENV/bin/uv" --version 2>/dev/null)" == "uv $UV_VERSION"* ]]; then return; fi
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$UV_VERSION" \
        || die "pip could not install uv==$UV_VERSION; is the package index reachable? (pip config list shows which one is used)"
}

pip_setting() { # name -> value as pip sees it, environment before files, on one line
    local environment="PIP_${1//-/_}" value
    environment=${environment^^}
    value=${!environment:-$("$VENV/bin/python" -m pip config get "global.$1" 2>/dev/null || true)}
    printf '%s' "$value" | tr -s ' \n' ' '
}

pass_pip_settings_to_uv() {
    local value
    value=$(pip_setting find-links);      if [[ -n $value && -z ${UV_FIND_LINKS:-} ]]; then export UV_FIND_LINKS=${value// /,}; fi
    value=$(pip_setting index-url);       if [[ -n $value && -z ${UV_DEFAULT_INDEX:-} ]]; then export UV_DEFAULT_INDEX=$value; fi
    value=$(pip_setting cert);            if [[ -n $value && -z ${SSL_CERT_FILE:-} ]]; then export SSL_CERT_FILE=$value; fi
    value=$(pip_setting extra-index-url)
    if [[ -n $value && -z ${UV_INDEX:-}${UV_EXTRA_INDEX_URL:-} ]]; then
        # every version is pinned, so the index it comes from decides nothing
        export UV_INDEX=$value UV_INDEX_STRATEGY=unsafe-best-match
    fi
}

uv_install() { env -u PYTHONDONTWRITEBYTECODE "$VENV/bin/uv" pip install --python "$VENV/bin/python" --prerelease allow --no-deps "$@"; }

torch_build() { # prints the arguments that choose the build of torch
    local torch plan
    torch=$(grep -E '^torch==' "$LOCK")
    # read to its end: under pipefail a `grep -q` that leaves early would turn its match into a failure of uv
    plan=$(uv_install --dry-run --reinstall "$torch" 2>&1 || true)
    if [[ $plan == *+cpu* ]]; then return; fi
    if UV_HTTP_TIMEOUT=10 UV_HTTP_RETRIES=0 timeout 30 \
        "$VENV/bin/uv" pip install --python "$VENV/bin/python" --no-deps --dry-run --reinstall --torch-backend cpu "$torch" >/dev/null 2>&1; then
        echo --torch-backend cpu
        return
    fi
    say "no CPU build of $torch is offered here, so the index's own build and its CUDA libraries (some 5 GB) are installed."
    say "it works as well on a CPU; to offer a smaller one: PIP_FIND_LINKS=/folder/with/torch+cpu.whl make ... (after rm -rf $VENV)"
    echo -r "$CUDA_LOCK"
}

main() {
    local stamp
    stamp=$(wanted_stamp)
    if [[ -f $STAMP && $(<"$STAMP") == "$stamp" ]]; then return; fi
    exec 9>.venv.lock
    flock 9
    if [[ -f $STAMP && $(<"$STAMP") == "$stamp" ]]; then return; fi
    command -v gcc >/dev/null || die "gcc is missing (vLLM compiles small kernels at run time); on Debian: apt install gcc"
    local began=$SECONDS
    rm -f "$STAMP"
    make_venv
    install_uv
    pass_pip_settings_to_uv
    local build
    build=$(torch_build)
    # shellcheck disable=SC2086
    uv_install --compile-bytecode -r "$LOCK" $build || die "a package could not be installed; run the same command again, finished ones are kept"
    uv_install --quiet --no-build-isolation --editable . || die "the project itself could not be installed"
    printf '%s' "$stamp" >"$STAMP"
    say "done in $((SECONDS - began)) s"
}

main "$@"
