# Sourced by the scripts beside it: `use_environment EXTRAS` puts this checkout, with those extras, into .venv and
# leaves $venv set. A second call with nothing changed installs nothing. POLICYLANG_TORCH=2.15.0 names the torch to
# take in place of the pinned one; it gets an environment of its own, .venv-2.15.0.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
venv=$PWD/.venv${POLICYLANG_TORCH:+-$POLICYLANG_TORCH}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "policylang needs Python 3.11 or newer; name one with PYTHON=/path/to/python" >&2
    return 2
}

# EXTRAS [OPTIONS OF PIP]: nothing is done where they are installed as the project's files say now.
install_extras() {
    local extras=$1 wanted
    shift
    wanted=$(cat pyproject.toml constraints.txt | cksum)
    if [ "$(cat "$venv/installed.$extras" 2>/dev/null)" != "$wanted" ]; then
        sed -e "" ${POLICYLANG_TORCH:+-e "s/^torch==.*/torch==$POLICYLANG_TORCH/"} constraints.txt > "$venv/constraints.txt"
        echo "installing policylang with the extra $extras into $venv: minutes, the first time" >&2
        "$venv/bin/python" -m pip install --quiet "$@" --constraint "$venv/constraints.txt" --editable ".[$extras]" || return
        echo "$wanted" > "$venv/installed.$extras"
    fi
}

use_environment() {
    local python
    if [ ! -x "$venv/bin/python" ]; then
        python=$(find_python) || exit
        "$python" -m venv "$venv" || exit
    fi
    install_extras "$1" || exit
}

# The same for an extra that only some tests want and that may not install everywhere: without it these tests skip.
use_extra_where_it_installs() {
    install_extras "$1" --retries 1 --timeout 15 || echo "the extra $1 does not install here: its tests are skipped" >&2
}

# What the extension for VS Code, and the tests of its grammar, are built with.
has_node() {
    command -v npm > /dev/null && [ "$(node -p 'process.versions.node.split(".")[0]' 2>/dev/null || echo 0)" -ge 20 ]
}

# As the lock file says; nothing is done where that is installed.
install_node_packages() {
    local folder=editors/vscode wanted
    wanted=$(cksum < "$folder/package-lock.json")
    if [ "$(cat "$folder/node_modules/installed" 2>/dev/null)" != "$wanted" ]; then
        npm ci --prefix "$folder" --silent --no-audit --no-fund --ignore-scripts "$@" || return
        echo "$wanted" > "$folder/node_modules/installed"
    fi
}

use_node_packages_where_they_install() {
    has_node || { echo "node 20 is not here: the tests of the editors' files are skipped" >&2; return; }
    install_node_packages --fetch-retries 1 --fetch-retry-mintimeout 1000 --fetch-timeout 15000 ||
        echo "the packages of editors/vscode do not install here: their tests are skipped" >&2
}
