#!/usr/bin/env python3
"""Measures prefill and decode of Larder beside llama.cpp, OpenBLAS and the speed of memory, in one run.

    benches/models/run.py [--format bf16|q8] [--geometry qwen3-0.6b] [--prompt TOKENS] [--rounds N] [--prepare]

Needs a Rust toolchain and python3 with venv. Everything else goes to target/models: a model folder with random weights,
a Python environment in which llama.cpp is built from source (10 minutes), and the model as GGUF. `--prepare` stops
there. Systems alternate from round to round, and the median counts. Their threads are all those of the machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "target/models"
EXAMPLES = ROOT / "target/release/examples"
LARDER = ROOT / "target/release/larder"
PACKAGES = ["llama-cpp-python==0.3.36", "gguf==0.19.0", "numpy==2.4.6", "safetensors==0.8.0"]
# One chunk of the engine's prefill.
CHUNK_ROWS = 256


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=["bf16", "q8"], default="bf16", help="weights; q8 is q8_0 for llama.cpp")
    parser.add_argument("--geometry", default="qwen3-0.6b", help="one of those of larder bench random-model")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=CACHE, help="place for the environment and the models")
    parser.add_argument("--python", type=Path, help="python with the packages already installed")
    parser.add_argument("--prepare", action="store_true", help="build everything, measure nothing")
    return parser.parse_args()


def prepare(options):
    """Makes what is missing. Returns the model folder, the GGUF and the Python to use."""
    options.folder.mkdir(parents=True, exist_ok=True)
    # Also if they exist: programs of an earlier build may lack options and figures.
    build = ["cargo", "build", "--release", "--quiet", "--workspace", "--bin", "larder", "--example", "measure"]
    subprocess.run(build, cwd=ROOT, check=True)
    python = options.python or options.folder / "python/bin/python"
    if not python.exists():
        venv.create(options.folder / "python", with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    model = options.folder / options.geometry
    if not (model / "model.safetensors").exists():
        subprocess.run([LARDER, "bench", "random-model", options.geometry, model], check=True)
    gguf = options.folder / f"{options.geometry}-{options.format}.gguf"
    if not gguf.exists():
        script = [python, Path(__file__).with_name("write_gguf.py"), model, gguf, options.format]
        subprocess.run(script, check=True)
    return model, gguf, python


def last_json(command):
    """Runs a program and returns the JSON on its last line."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(options, model, gguf, python):
    """Figures of each system, round by round."""
    here = Path(__file__).parent
    prompt = str(options.prompt)
    larder = [EXAMPLES / "measure", model, "--prompt", prompt, "--repeats", "3", "--sequences", "1", "--json"]
    systems = {
        "larder": larder + (["--q8"] if options.format == "q8" else []),
        "llama.cpp": [python, here / "llama.py", gguf, prompt],
        "openblas": [python, here / "openblas.py", model, str(CHUNK_ROWS)],
    }
    rounds = {name: [] for name in systems}
    for index in range(options.rounds):
        names = list(systems)
        # Another order in each round, so that no system always follows the same one.
        for name in names[index % len(names) :] + names[: index % len(names)]:
            rounds[name].append(last_json(systems[name]))
    return rounds


def report(options, rounds):
    """Prints medians, ratios and the figures of each round."""

    def median(system, figure):
        return statistics.median(r[figure] for r in rounds[system])

    bandwidth = median("larder", "bandwidth")
    weights, kv = median("larder", "weight_bytes"), median("larder", "kv_bytes")
    prefill, decode = median("larder", "prefill"), median("larder", "decode")
    allowed = bandwidth / (weights + kv)
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if "model name" in line), "unknown")
    print(f"{options.geometry}, {options.format}, prompt of {options.prompt} tokens, median of {options.rounds} rounds;")
    print(f"{os.cpu_count()} × {cpu}; memory reads {bandwidth / 1e9:.1f} GB/s")
    print(f"A token reads {weights / 1e9:.3f} GB of weights and {kv / 1e9:.3f} GB of KV.\n")
    print("| | prefill, tokens/s | decode, tokens/s |\n| --- | --- | --- |")
    print(f"| Larder | {prefill:.1f} | {decode:.1f} |")
    print(f"| llama.cpp | {median('llama.cpp', 'prefill'):.1f} | {median('llama.cpp', 'decode'):.1f} |")
    print(f"| allowed by OpenBLAS' sgemm ({median('openblas', 'flops') / 1e9:.0f} GFLOP/s), by memory "
          f"| {median('openblas', 'prefill'):.1f} | {allowed:.1f} |\n")
    print("| ratio | target | measured |\n| --- | --- | --- |")
    # Memory is measured right before and after each decode, because its speed changes on a shared machine.
    print(f"| decode / allowed by memory | 0.8 | {median('larder', 'share_of_bandwidth'):.2f} |")
    print(f"| prefill / allowed by OpenBLAS | 0.6 | {prefill / median('openblas', 'prefill'):.2f} |")
    print(f"| prefill / llama.cpp | 1.2 | {prefill / median('llama.cpp', 'prefill'):.2f} |")
    print(f"| decode / llama.cpp | 1.0 | {decode / median('llama.cpp', 'decode'):.2f} |\n")
    for system, figures in rounds.items():
        for name in ["prefill", "decode", "bandwidth", "share_of_bandwidth", "flops"]:
            if name in figures[0]:
                scale = 1e9 if name in ["bandwidth", "flops"] else 1
                print(f"{system} {name}: {', '.join(f'{r[name] / scale:.2f}' for r in figures)}")


def main():
    options = arguments()
    model, gguf, python = prepare(options)
    if not options.prepare:
        report(options, measure(options, model, gguf, python))


if __name__ == "__main__":
    main()
