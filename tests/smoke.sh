#!/usr/bin/env bash
# Starts `larder up` as the README says, and uses it with curl, the packages openai, langchain-openai and
# litellm, the admin commands and the benchmark. Usage: tests/smoke.sh WORK_DIR
set -euo pipefail
cd "$(dirname "$0")/.."
work=$1
larder=target/release/larder
cargo build --release --quiet --workspace --bin larder
data=$(mktemp -d /var/tmp/larder-smoke.XXXXXX)

# The versions of .ci/run.
packages=(openai==2.54.0 langchain-openai==1.7.3 'litellm[mcp]==1.106.2' redis==8.1.0 pyzmq==27.3.0 msgspec==0.22.0)
are_there='from importlib.metadata import version; [version(name) for name in ("openai", "langchain-openai", "litellm", "mcp", "redis", "pyzmq", "msgspec")]'
if ! "$work/venv/bin/python" -c "$are_there" 2>/dev/null; then
    python3 -m venv "$work/venv"
    "$work/venv/bin/pip" install --quiet "${packages[@]}"
fi

# The bundled model has no format of tool calls.
"$larder" up --listen 127.0.0.1:0 --tool-parser hermes --data-dir "$data" >"$data/out" 2>"$data/err" &
up=$!
finish() {
    kill "$up" 2>/dev/null || true
    wait "$up" 2>/dev/null || true
    rm -rf "$data"
}
trap finish EXIT
# At most a minute, however busy the machine is.
for _ in $(seq 600); do
    grep -q 'larder is up' "$data/out" && break
    kill -0 "$up" || { cat "$data/err"; exit 1; }
    sleep 0.1
done
grep -q 'larder is up' "$data/out" || { cat "$data/err"; exit 1; }
cat "$data/out"
api=$(grep -o 'http://[0-9.:]*/v1' "$data/out" | head -n 1)

# The printed command itself is under test. The second answer must come from the cache.
ask=$(grep -A 1 '^  curl' "$data/out")
eval "$ask" && echo
eval "$ask" | tee "$data/answer" && echo
grep -q '"text"' "$data/answer"
grep -qE '"cached_tokens":[1-9]' "$data/answer"

"$work/venv/bin/python" tests/openai_client.py "$api"
"$work/venv/bin/python" tests/clients/frameworks.py "$api"

"$larder" status --data-dir "$data"
"$larder" prefix inspect --data-dir "$data" "In the beginning God created the heaven and the earth."

"$larder" bench serve --url "${api%/v1}" --groups 2 --requests 6
"$larder" bench serve --url "${api%/v1}" --groups 2 --requests 6 --json >"$data/figures"
python3 - "$data/figures" <<'P'
import json, sys
figures = {f["cache"]: f for f in map(json.loads, open(sys.argv[1]))}
# No assertion about ttft_speedup: this machine may be busy.
hits, speedup = figures["store"]["hit_rate"], figures["store"]["ttft_speedup"]
assert hits > 0.9, f"hit rate {hits}"
assert speedup > 0, f"no figure: {figures}"
P

kill -INT "$up"
wait "$up"

"$larder" store --listen 127.0.0.1:0 --redis-listen 127.0.0.1:0 --data-dir "$data/redis" \
    --kv-events-listen 127.0.0.1:0 --kv-events-replay-listen 127.0.0.1:0 >"$data/out" 2>"$data/err" &
up=$!
for _ in $(seq 600); do
    grep -q 'replays of KV events' "$data/out" && break
    kill -0 "$up" || { cat "$data/err"; exit 1; }
    sleep 0.1
done
redis=$(grep -o 'redis://[0-9.:]*' "$data/out" | cut -c9-)
mapfile -t events < <(grep -o 'tcp://[0-9.:]*' "$data/out" | cut -c7-)
"$work/venv/bin/python" tests/clients/kv_events_conformance.py "${events[@]}" "$redis"
"$work/venv/bin/python" tests/clients/redis_conformance.py "$redis"
kill -INT "$up"
wait "$up"
echo "smoke: passed"
