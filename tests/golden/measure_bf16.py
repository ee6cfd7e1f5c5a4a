#!/usr/bin/env python3
"""Measure how far bf16 results lie apart: Hugging Face transformers in bf16
with eager and with SDPA attention, the engine, and transformers in float32.

    cargo build --release -p larder-model --examples
    python measure_bf16.py FOLDER [TOKENS]

The prompt is the English text of this repository's README files if the
folder's tokenizer covers its vocabulary, and random tokens otherwise. The
differences are relative to the largest logit of a row: the mean and the
largest over all rows, of the root mean square and of the maximum in a row.
`same token` counts the rows whose largest logit belongs to the same token.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
LOGITS = ROOT / "target/release/examples/logits"
BUNDLED = ROOT / "engine/models/larder-tiny"
TOKENS = 512


def prompt(folder, count):
    """Token numbers, and where they are from."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json")
    )
    if len(tokenizer) >= config["vocab_size"]:
        files = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"]
        text = "\n".join((ROOT / file).read_text() for file in files)
        return tokenizer.encode(text)[:count], "text"
    generator = torch.Generator().manual_seed(1)
    high = config["vocab_size"]
    tokens = torch.randint(3, high, (count,), generator=generator)
    return tokens.tolist(), "random tokens"


def of_transformers(folder, tokens, dtype, attention):
    """Logits [T, vocab] in float32."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention
    ).eval()
    with torch.no_grad():
        out = model(input_ids=torch.tensor([tokens]), use_cache=False)
    return out.logits[0].float()


def of_engine(folder, tokens, *choices):
    """Logits [T, vocab] of the engine."""
    with tempfile.TemporaryDirectory() as scratch:
        file, out = Path(scratch) / "tokens", Path(scratch) / "logits"
        file.write_text(" ".join(map(str, tokens)))
        command = [LOGITS, folder, file, out, *choices]
        subprocess.run(command, check=True)
        logits = np.fromfile(out, dtype="<f4")
    return torch.from_numpy(logits.reshape(len(tokens), -1))


def row_of(name, found, expected):
    """One line of the table."""
    scale = expected.abs().amax(-1)
    difference = found - expected
    largest = difference.abs().amax(-1) / scale
    square = difference.pow(2).mean(-1).sqrt() / scale
    same = (found.argmax(-1) == expected.argmax(-1)).float().mean()
    return (
        f"| {name} | {square.mean():.1e} | {square.max():.1e} "
        f"| {largest.mean():.1e} | {largest.max():.1e} | {same:.1%} |"
    )


def main():
    """Print the table of one model folder."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else BUNDLED).resolve()
    count = int(sys.argv[2]) if len(sys.argv) > 2 else TOKENS
    tokens, source = prompt(folder, count)
    results = {
        "eager": of_transformers(folder, tokens, torch.bfloat16, "eager"),
        "sdpa": of_transformers(folder, tokens, torch.bfloat16, "sdpa"),
        "larder": of_engine(folder, tokens),
        "f32": of_transformers(folder, tokens, torch.float32, "eager"),
        "larder, KV f32": of_engine(folder, tokens, "f32"),
        # Activations in bf16 where the processor multiplies them faster.
        "larder, narrow": of_engine(folder, tokens, "narrow"),
    }
    pairs = [
        ("eager", "sdpa"),
        ("larder", "eager"),
        ("larder", "sdpa"),
        ("eager", "f32"),
        ("sdpa", "f32"),
        ("larder", "f32"),
        ("larder, KV f32", "f32"),
        ("larder, narrow", "eager"),
        ("larder, narrow", "sdpa"),
        ("larder, narrow", "f32"),
    ]
    print(f"{folder.name}, {len(tokens)} tokens ({source})\n")
    print("| pair | RMS, mean | RMS, worst row | maximum, mean "
          "| maximum, worst row | same token |")
    print("| --- | --- | --- | --- | --- | --- |")
    for one, other in pairs:
        name = f"{one} – {other}"
        print(row_of(name, results[one], results[other]), flush=True)


if __name__ == "__main__":
    main()
