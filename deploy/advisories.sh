#!/usr/bin/env bash
# Looks the locked versions up in PyPI's advisories. Exits 0 also where it could not, and says "not checked" then: a machine
# without a way out has not failed. 1 where a version has an advisory.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly SERVICE=${ADVISORY_SERVICE:-https://pypi.org/pypi/pip/json}
python=${PYTHON:-.venv/bin/python}

not_checked() {
    echo "not checked: $1"
    exit 0
}

"$python" -c 'import pip_audit' 2>/dev/null ||
    not_checked "pip-audit is not in $python's environment; .venv/bin/uv pip install pip-audit puts it there"
"$python" - "$SERVICE" 2>/dev/null <<'PYTHON' || not_checked "the advisory service does not answer ($SERVICE)"
import sys
import urllib.request

urllib.request.urlopen(sys.argv[1], timeout=10).read(1)
PYTHON
exec "$python" -m pip_audit --requirement requirements/cpu.txt --no-deps --disable-pip
