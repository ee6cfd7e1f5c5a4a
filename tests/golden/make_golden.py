#!/usr/bin/env python3
"""Make the golden models: tiny seeded random checkpoints and what Hugging Face
transformers computes from them.

Each case becomes a folder beside this script:

    <case>/config.json, generation_config.json   as written by save_pretrained
    <case>/model*.safetensors (+ index)          as written by save_pretrained
    <case>/golden.safetensors                    tensors, see below

golden.safetensors holds, all computed in float32 on the CPU with eager
attention and without a KV cache, from the weights *as saved* (16-bit weights
are loaded back and upcast):

    prompt       i64 [T]         prompt tokens
    logits       f32 [T, vocab]  logits at every prompt position
    greedy       i64 [64]        greedy continuation (eos is ignored)
    last_logits  f32 [vocab]     the logits that chose the last greedy token
    rows         i64 [R]         some positions of prompt and continuation
    <variant>    f32 [R, vocab]  logits at these positions, for each variant

A variant rounds what the engine rounds, and computes in float32 too: keys and
values to 16 bits (kv_f16, kv_bf16), weights to 8 bits (q8), or both
(q8_kv_bf16). So the engine must agree with a variant as closely as with the
rest, except where an element of the keys or values lies so near the middle of
two 16-bit numbers that the last bit of float32 decides. `flipped` measures
what such elements do to the logits; the test's tolerances follow from it.

Its metadata key `golden` is JSON with the library versions, the seed and the
smallest relative top1-top2 gap of the greedy steps. A seed is only accepted if every greedy step
is clear of near ties (GAP) and the continuation is varied (MIN_DISTINCT), so a
correct engine with another summation order must give the same tokens.

Run:  python make_golden.py [case ...]
Made with transformers 5.23.0, torch 2.15.0 (see README.md).
"""

import copy
import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

HERE = Path(__file__).resolve().parent
PROMPT_LEN = 48
GREEDY_LEN = 64
GAP = 1e-3  # least (top1 - top2) / max|logit| in any greedy step
MIN_DISTINCT = 24  # least number of different tokens in the continuation
ROW_STEP = 16  # distance of the positions whose logits a variant keeps
NOISE = 6e-8  # about the rounding of one float32 operation
NOISE_SEEDS = 20
Q8_BLOCK = 32  # inputs that share a scale
LAST_RESERVED = 2  # ids 0..2 (pad, bos, eos) do not occur in prompts


@dataclass
class Case:
    """One golden model: its configuration and how it is saved."""

    name: str
    config: object
    dtype: torch.dtype = torch.float32
    weight_std: float = 0.25
    save_args: dict = field(default_factory=dict)


def cases():
    """All golden cases; small shapes chosen to exercise one feature each."""
    common = dict(
        vocab_size=320,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    return [
        Case(
            "llama-gqa-untied-f32",
            LlamaConfig(
                **common,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                rms_norm_eps=1e-5,
                rope_theta=10000.0,
                tie_word_embeddings=False,
            ),
        ),
        Case(
            "llama3-rope-tied-bf16",
            LlamaConfig(
                **common,
                hidden_size=64,
                intermediate_size=112,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=1,
                rms_norm_eps=1e-5,
                rope_theta=10000.0,
                rope_scaling={
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
                tie_word_embeddings=True,
            ),
            dtype=torch.bfloat16,
        ),
        Case(
            "mistral-f32",
            MistralConfig(
                **common,
                hidden_size=48,
                intermediate_size=96,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=24,
                rms_norm_eps=1e-5,
                rope_theta=1000000.0,
                sliding_window=None,
                tie_word_embeddings=False,
            ),
            weight_std=0.3,
        ),
        Case(
            "qwen2-f16",
            Qwen2Config(
                **common,
                hidden_size=64,
                intermediate_size=112,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                rms_norm_eps=1e-6,
                rope_theta=1000000.0,
                use_sliding_window=False,
                tie_word_embeddings=True,
            ),
            dtype=torch.float16,
        ),
        Case(
            "qwen3-sharded-f32",
            Qwen3Config(
                **common,
                hidden_size=48,
                intermediate_size=80,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=32,
                rms_norm_eps=1e-6,
                rope_theta=1000000.0,
                tie_word_embeddings=False,
            ),
            weight_std=0.3,
            save_args={"max_shard_size": "100KB"},
        ),
        Case(
            "llama-mha-bias",
            LlamaConfig(
                **common,
                hidden_size=48,
                intermediate_size=96,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=4,
                rms_norm_eps=1e-6,
                rope_theta=500000.0,
                attention_bias=True,
                mlp_bias=True,
                tie_word_embeddings=False,
            ),
            weight_std=0.3,
        ),
    ]


def randomise(model, std, generator):
    """Fill every parameter from `generator`: norms around 1, biases and
    matrices around 0."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if name.endswith("norm.weight") or "layernorm" in name:
                p.copy_(1.0 + 0.2 * noise)
            elif name.endswith(".bias"):
                p.copy_(0.3 * noise)
            else:
                p.copy_(std * noise)


def forward(model, tokens):
    """Logits [T, vocab] of a token list, computed from scratch."""
    with torch.no_grad():
        out = model(input_ids=torch.tensor([tokens]), use_cache=False)
    return out.logits[0]


def relative_gap(logits):
    """(top1 - top2) / max|logit| of one logit vector."""
    top = torch.topk(logits, 2).values
    return float((top[0] - top[1]) / logits.abs().max())


def golden_of(model, prompt):
    """Golden tensors of a loaded float32 model, and the smallest gap."""
    tokens = list(prompt)
    logits = forward(model, tokens)
    last, worst, greedy = logits[-1], float("inf"), []
    for step in range(GREEDY_LEN):
        if step:
            last = forward(model, tokens)[-1]
        worst = min(worst, relative_gap(last))
        greedy.append(int(last.argmax()))
        tokens.append(greedy[-1])
    tensors = {
        "prompt": torch.tensor(prompt, dtype=torch.int64),
        "logits": logits.contiguous().float(),
        "greedy": torch.tensor(greedy, dtype=torch.int64),
        "last_logits": last.contiguous().float(),
    }
    return tensors, worst


def round_q8(weight):
    """Weights [outputs, inputs] rounded as `--weights q8` does: per output and
    block of inputs, the scale is the largest weight / 127, rounded up to
    bfloat16. A weight becomes the nearest multiple of the scale, and the one
    further from 0 of two."""
    outputs, inputs = weight.shape
    padding = -inputs % Q8_BLOCK
    blocks = torch.nn.functional.pad(weight, (0, padding))
    blocks = blocks.reshape(outputs, -1, Q8_BLOCK)
    exact = blocks.abs().amax(-1, keepdim=True) / 127.0
    cut = exact.view(torch.int32) >> 16 << 16
    above = torch.where(cut.view(torch.float32) < exact, cut + (1 << 16), cut)
    scale = above.view(torch.float32)
    inverse = torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale))
    # The sum is exact in float64. In float32, 0.49999997 + 0.5 is 1.
    scaled = (blocks * inverse).double()
    steps = scaled.sign() * (scaled.abs() + 0.5).floor()
    steps = steps.clamp(-128, 127).float()
    return (steps * scale).reshape(outputs, -1)[:, :inputs]


def rounded_attention(dtype, noise=0.0):
    """Eager attention over keys and values rounded to `dtype`. Before, each
    element changes by about `noise` of itself."""

    def stored(x, groups):
        x = x * (1.0 + noise * torch.randn(x.shape)) if noise else x
        return x.to(dtype).float().repeat_interleave(groups, 1)

    def attend(module, query, key, value, _mask, scaling, **_options):
        groups = module.num_key_value_groups
        key, value = stored(key, groups), stored(value, groups)
        scores = query @ key.transpose(2, 3) * scaling
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    return attend


VARIANTS = {
    "kv_f16": (torch.float16, False),
    "kv_bf16": (torch.bfloat16, False),
    "q8": (torch.float32, True),
    "q8_kv_bf16": (torch.bfloat16, True),
}


def variant_logits(model, variant, tokens, noise=0.0):
    """Logits [T, vocab] of `tokens` in a variant. Biases and norms are not
    rounded; embedding and output matrix are."""
    dtype, rounds_weights = VARIANTS[variant]
    model = copy.deepcopy(model)
    AttentionInterface.register("rounded", rounded_attention(dtype, noise))
    model.set_attn_implementation("rounded")
    if rounds_weights:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.copy_(round_q8(parameter))
    return forward(model, tokens)


def relative_difference(found, expected):
    """Largest difference, relative to the largest logit of its row."""
    difference = (found - expected).abs().amax(-1)
    return float((difference / expected.abs().amax(-1)).max())


def variants_of(model, tensors):
    """Tensors of the variants, and per variant: how far it is from the rest,
    and how far noise of float32 can move it."""
    tokens = tensors["prompt"].tolist() + tensors["greedy"].tolist()[:-1]
    exact = forward(model, tokens)
    rows = list(range(ROW_STEP - 1, len(tokens), ROW_STEP)) + [len(tokens) - 1]
    out, notes = {"rows": torch.tensor(sorted(set(rows)))}, {}
    for variant in VARIANTS:
        logits = variant_logits(model, variant, tokens)
        flipped = []
        for seed in range(NOISE_SEEDS):
            torch.manual_seed(seed)
            noisy = variant_logits(model, variant, tokens, NOISE)
            flipped.append(relative_difference(noisy, logits))
        out[variant] = logits[out["rows"]].contiguous()
        notes[variant] = {
            "distance": float(f"{relative_difference(logits, exact):.1e}"),
            "flipped": float(f"{max(flipped):.1e}"),
        }
    return out, notes


def save_model(case, seed, folder):
    """Save the randomised model of `seed` into a fresh `folder`."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(case.config).float()
    randomise(model, case.weight_std, generator)
    shutil.rmtree(folder, ignore_errors=True)
    model.to(case.dtype).save_pretrained(folder, **case.save_args)
    low, high = LAST_RESERVED + 1, case.config.vocab_size
    return torch.randint(low, high, (PROMPT_LEN,), generator=generator).tolist()


def load_model(folder):
    """Load a saved model as the goldens use it."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.float().eval()


def make(case):
    """Write one case, trying seeds until the greedy run has no near tie."""
    folder = HERE / case.name
    for seed in range(1, 1000):
        prompt = save_model(case, seed, folder)
        tensors, gap = golden_of(load_model(folder), prompt)
        distinct = len(set(tensors["greedy"].tolist()))
        if gap > GAP and distinct >= MIN_DISTINCT:
            break
    assert gap > GAP, f"{case.name}: no seed without near ties"
    assert distinct >= MIN_DISTINCT, f"{case.name}: no seed with varied text"
    assert torch.isfinite(tensors["logits"]).all()
    variants, variant_notes = variants_of(load_model(folder), tensors)
    tensors |= variants
    notes = {
        "variants": variant_notes,
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
        "seed": seed,
        "min_gap": float(f"{gap:.3e}"),
    }
    # One key only: safetensors does not keep the order of metadata keys.
    save_file(
        tensors,
        folder / "golden.safetensors",
        metadata={"golden": json.dumps(notes)},
    )
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)
    spread = float(tensors["logits"].std())
    print(f"{case.name}: {variant_notes}")
    print(f"{case.name}: seed {seed}, gap {gap:.2e}, distinct {distinct}, "
          f"logit std {spread:.2f}")


def write_old_config(case):
    """Write the same configuration in the shape of older releases:
    `rope_theta`, `rope_scaling` and `torch_dtype` at the top level."""
    config = json.loads((HERE / case.name / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["torch_dtype"] = config.pop("dtype")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["transformers_version"] = "4.46.0"
    config["pretraining_tp"] = 1
    folder = HERE / f"{case.name}-oldconfig"
    folder.mkdir(exist_ok=True)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text)


def main():
    """Make all cases, or those named on the command line."""
    torch.set_num_threads(1)
    wanted = set(sys.argv[1:])
    for case in cases():
        if wanted and case.name not in wanted:
            continue
        make(case)
        if case.name == "llama3-rope-tied-bf16":
            write_old_config(case)


if __name__ == "__main__":
    main()
