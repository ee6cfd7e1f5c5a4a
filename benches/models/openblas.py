"""Measures OpenBLAS: `openblas.py FOLDER ROWS`. Multiplies ROWS rows by matrices of the model's shapes, in f32.

Prints as JSON the rate, and the tokens per second of a prefill that costs only these products.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

SECONDS = 0.6


def best_seconds(rows, outputs, inputs):
    x = np.ones((rows, inputs), np.float32)
    weight = np.ones((inputs, outputs), np.float32)
    out = np.empty((rows, outputs), np.float32)
    best, ends = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < ends:
        started = time.perf_counter()
        np.matmul(x, weight, out=out)
        best = min(best, time.perf_counter() - started)
    return best


def main():
    config = json.loads((Path(sys.argv[1]) / "config.json").read_text())
    rows = int(sys.argv[2])
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = [(queries + 2 * keys, hidden), (hidden, queries), (2 * intermediate, hidden), (hidden, intermediate)]
    seconds = sum(best_seconds(rows, *shape) for shape in shapes)
    products = rows * sum(outputs * inputs for outputs, inputs in shapes)
    prefill = rows / (seconds * config["num_hidden_layers"])
    print(json.dumps({"flops": 2 * products / seconds, "prefill": prefill}))


if __name__ == "__main__":
    main()
