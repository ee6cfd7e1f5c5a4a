#!/usr/bin/env python3
"""Measures the time to the first token of a long prompt: computed, found in L2, and found in L3 after a restart.

    benches/models/hits.py MODEL_FOLDER [--tokens TOKENS] [--repeats N] [--larder PATH] [--data-dir DIRECTORY]

Starts `larder up` with the folder, and stops it at the end. All requests share a prefix and differ in a short suffix. They
use the store but not L1 (`x-larder-cache: store`). Each answer tells how many tokens came from the store, and the
program fails if they are not those of the prefix. Each repetition has a prefix and a data directory of its own. The
median counts. Needs python3 only.
"""

import argparse
import http.client
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUFFIX_TOKENS = 16
# All tokenizers have more tokens.
TOKEN_IDS = range(16, 2000)
START_SECONDS = 120
STOP_SECONDS = 120
REQUEST_SECONDS = 600
# Target of each tier: how many times sooner than by computation.
TARGETS = {"L2": 10, "L3": 5}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="model folder")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the shared prefix")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--larder", type=Path, default=ROOT / "target/release/larder")
    parser.add_argument("--data-dir", type=Path, help="place for the data directories; default: the system's")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


class Up:
    """A running `larder up`. Leaving the context stops it and waits until it has flushed its pages."""

    def __init__(self, options, data):
        command = [options.larder, "up", "--model", options.model, "--listen", "127.0.0.1:0", "--data-dir", data]
        self.log = tempfile.TemporaryFile(mode="w+")
        self.process = subprocess.Popen(
            [*map(str, command), "--l3-bytes", "4GiB"], stdout=self.log, stderr=subprocess.STDOUT, text=True
        )

    def __enter__(self):
        deadline = time.monotonic() + START_SECONDS
        while not (found := re.search(r"larder is up .*: http://([^/]+)/v1 serves (\S+)", self.text())):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                sys.exit(f"larder did not start:\n{self.text()}")
            time.sleep(0.1)
        self.address, self.model = found.groups()
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            sys.exit(f"larder did not stop:\n{self.text()}")

    def text(self):
        self.log.seek(0)
        return self.log.read()

    def ask(self, prompt):
        """Seconds to the first token, and the prompt tokens that were not computed."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        connection = http.client.HTTPConnection(self.address, timeout=REQUEST_SECONDS)
        headers = {"content-type": "application/json", "x-larder-cache": "store"}
        started = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            sys.exit(f"status {response.status}: {response.read().decode()}")
        first, cached = None, 0
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if not data.startswith("{"):
                continue
            event = json.loads(data)
            if "error" in event:
                sys.exit(f"the answer failed: {event['error']}")
            if first is None and event.get("choices"):
                first = time.monotonic() - started
            if usage := event.get("usage"):
                cached = usage["prompt_tokens_details"]["cached_tokens"]
        connection.close()
        return first, cached


def measure(options, data, repetition):
    """Seconds to the first token by tier."""
    chosen = random.Random(options.seed * 1000 + repetition)

    def tokens(count):
        return [chosen.choice(TOKEN_IDS) for _ in range(count)]

    prefix = tokens(options.tokens)

    def ask(up, expected):
        seconds, cached = up.ask(prefix + tokens(SUFFIX_TOKENS))
        if cached != expected:
            sys.exit(f"{cached} tokens came from the store instead of {expected}")
        return seconds

    with Up(options, data) as up:
        # The first pass of a process is slower than the others.
        up.ask(tokens(200))
        found = {"computed": ask(up, 0), "L2": ask(up, options.tokens)}
    # L2 is empty after a restart.
    with Up(options, data) as up:
        up.ask(tokens(200))
        found["L3"] = ask(up, options.tokens)
    return found


def main():
    options = arguments()
    rounds = []
    for repetition in range(options.repeats):
        with tempfile.TemporaryDirectory(dir=options.data_dir) as data:
            rounds.append(measure(options, data, repetition))
    computed = statistics.median(r["computed"] for r in rounds)
    print(f"{options.model.name}, prefix of {options.tokens} tokens and {SUFFIX_TOKENS} more, {os.cpu_count()} CPUs")
    print("\n| prompt | time to first token, s | ratio | target |\n| --- | --- | --- | --- |")
    print(f"| computed | {computed:.2f} | | |")
    for tier, target in TARGETS.items():
        seconds = statistics.median(r[tier] for r in rounds)
        print(f"| from {tier} | {seconds:.2f} | {computed / seconds:.1f} | {target} |")
    for tier in rounds[0]:
        print(f"{tier}: {', '.join(f'{r[tier]:.3f}' for r in rounds)} s")


if __name__ == "__main__":
    main()
