#!/usr/bin/env python3
"""Train larder-tiny from Debian packages and write the model folder.

    pip install torch transformers tokenizers safetensors numpy jinja2
    python train.py --work /tmp/larder-tiny --minutes 60

`--work` receives the packages; the model files are written beside this script
(or to `--out`). The learning rate follows a cosine over the time budget; with
`--steps A,B,C` it follows the given number of steps of each phase instead,
which makes a run repeatable. `--init FOLDER` continues from an exported model.
"""

import argparse
import json
import math
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import corpus

SEED = 20
SPECIAL = ["<|pad|>", corpus.BOS, corpus.EOS, corpus.SYSTEM, corpus.USER,
           corpus.ASSISTANT]
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
VOCAB = 4096
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTER = 192, 6, 6, 2, 32, 448
EPS, MAX_POSITIONS = 1e-5, 4096

TOKENS_PER_STEP = 4096
# Phases: (share of the run, sequence length).
PHASES = "0.76:512,0.16:2048,0.08:4096"
PEAK_LR, FINAL_LR, WARMUP, DECAY = 3e-3, 1e-4, 150, 0.1
EMA = 0.995

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


# ---------------------------------------------------------------- tokenizer


def train_tokenizer(texts):
    """A byte-level BPE of VOCAB tokens, special tokens first."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    tok.post_processor = processors.TemplateProcessing(
        single=f"{corpus.BOS} $A",
        pair=f"{corpus.BOS} $A $B:1",
        special_tokens=[(corpus.BOS, BOS_ID)],
    )
    return tok


def encode(tok, documents):
    """Token ids of each document."""
    done = tok.encode_batch(documents, add_special_tokens=False)
    return [np.array(e.ids, dtype=np.int32) for e in done]


# ---------------------------------------------------------------- model


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x, cos, sin):
        """Causal attention over x [batch, time, hidden]."""
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, HEADS, HEAD_DIM).transpose(1, 2)
        k = self.k_proj(x).view(b, t, KV_HEADS, HEAD_DIM).transpose(1, 2)
        v = self.v_proj(x).view(b, t, KV_HEADS, HEAD_DIM).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k = k.repeat_interleave(HEADS // KV_HEADS, dim=1)
        v = v.repeat_interleave(HEADS // KV_HEADS, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, HEADS * HEAD_DIM))


class Mlp(nn.Module):
    """The gated SiLU feed-forward block."""

    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTER, bias=False)
        self.down_proj = nn.Linear(INTER, HIDDEN, bias=False)

    def forward(self, x):
        """Apply the block."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, eps=EPS)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, eps=EPS)
        self.mlp = Mlp()

    def forward(self, x, cos, sin):
        """Attention and feed-forward with residuals."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A Llama with tied embeddings; parameter names as in transformers."""

    def __init__(self, theta):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, eps=EPS)
        cos, sin = rope_tables(MAX_POSITIONS, theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(self._init)

    @staticmethod
    def _init(module):
        """Small normal weights, smaller still where blocks write back."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.04)
        if isinstance(module, Attention):
            nn.init.normal_(module.o_proj.weight, std=0.04 / math.sqrt(2 * LAYERS))
        if isinstance(module, Mlp):
            nn.init.normal_(module.down_proj.weight, std=0.04 / math.sqrt(2 * LAYERS))

    def forward(self, ids, targets):
        """Mean cross-entropy of predicting `targets` from `ids`."""
        t = ids.shape[1]
        cos, sin = self.cos[:t], self.sin[:t]
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = F.linear(self.norm(x), self.embed_tokens.weight)
        return F.cross_entropy(logits.view(-1, VOCAB).float(), targets.reshape(-1))


def rope_tables(length, theta):
    """Cosines and sines [length, HEAD_DIM] in the half-split layout."""
    freq = theta ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    angle = torch.outer(torch.arange(length).float(), freq)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Rotate query or key vectors to their positions."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x * cos + turned * sin


# ---------------------------------------------------------------- data


def batches(tok, texts, plain_ids, length_of, epoch=0):
    """Endless (epoch, ids, targets): documents shuffled anew every epoch, with
    newly drawn chats, laid end to end and cut to the current length."""
    rest = np.zeros(0, dtype=np.int32)
    while True:
        chats = encode(tok, texts.chats(SEED + epoch))
        documents = plain_ids + chats
        random.Random(SEED + epoch).shuffle(documents)
        stream = np.concatenate([rest, *documents])
        at = 0
        while at + TOKENS_PER_STEP + 1 <= len(stream):
            length = length_of()
            cut = torch.from_numpy(stream[at:at + TOKENS_PER_STEP + 1].astype(np.int64))
            yield epoch, cut[:-1].view(-1, length), cut[1:].view(-1, length)
            at += TOKENS_PER_STEP
        rest, epoch = stream[at:], epoch + 1


def validation_batches(tok, texts, length=512, count=12):
    """A fixed set of held-out batches."""
    stream = np.concatenate(encode(tok, texts.validation())).astype(np.int64)
    need = length * 8
    made = []
    for i in range(min(count, (len(stream) - 1) // need)):
        cut = torch.from_numpy(stream[i * need:(i + 1) * need + 1])
        made.append((cut[:-1].view(-1, length), cut[1:].view(-1, length)))
    return made


# ---------------------------------------------------------------- schedule


class Schedule:
    """Progress of the run, by time or by steps, and what follows from it."""

    def __init__(self, args):
        self.start, self.minutes, self.steps = time.time(), args.minutes, args.steps
        self.shares, self.lengths = zip(*args.phases)
        self.peak, self.warmup = args.lr, args.warmup
        self.step, self.phase_steps = 0, [0] * len(args.phases)

    def elapsed(self):
        """Minutes since the start."""
        return (time.time() - self.start) / 60

    def progress(self):
        """Part of the run that is done, 0 to 1."""
        if self.steps:
            return min(self.step / sum(self.steps), 1.0)
        return min(self.elapsed() / self.minutes, 1.0)

    def phase(self):
        """Index of the current phase."""
        done = self.step if self.steps else self.progress()
        bounds = np.cumsum(self.steps or self.shares)
        return min(int(np.searchsorted(bounds, done, side="right")), len(bounds) - 1)

    def length(self):
        """Current sequence length."""
        return self.lengths[self.phase()]

    def rate(self):
        """Current learning rate: linear warm-up, then cosine."""
        cosine = 0.5 * (1 + math.cos(math.pi * self.progress()))
        rate = FINAL_LR + (self.peak - FINAL_LR) * cosine
        return rate * min(1.0, (self.step + 1) / self.warmup)

    def advance(self):
        """Count one step."""
        self.phase_steps[self.phase()] += 1
        self.step += 1


# ---------------------------------------------------------------- export


def config_json(theta):
    """config.json of the model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.04,
        "intermediate_size": INTER,
        "max_position_embeddings": MAX_POSITIONS,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": EPS,
        "rope_scaling": None,
        "rope_theta": theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": VOCAB,
    }


def tokenizer_config_json():
    """tokenizer_config.json, with the chat template."""
    added = {
        str(i): {"content": s, "lstrip": False, "normalized": False,
                 "rstrip": False, "single_word": False, "special": True}
        for i, s in enumerate(SPECIAL)
    }
    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "added_tokens_decoder": added,
        "bos_token": corpus.BOS,
        "eos_token": corpus.EOS,
        "pad_token": SPECIAL[PAD_ID],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def generation_config_json():
    """generation_config.json: mild sampling by default."""
    return {
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
    }


def write_atomically(path, write):
    """Call `write(temporary path)`, then rename it to `path`."""
    temporary = path.with_name(f".{path.name}.tmp")
    write(temporary)
    temporary.chmod(0o644)
    os.replace(temporary, path)


def write_json(path, value):
    """Write pretty JSON atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, lambda p: p.write_text(text, encoding="utf-8"))


def export(out, tok, weights, theta):
    """Write the model folder from weights by transformers name."""
    tensors = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in weights.items()}
    write_json(out / "config.json", config_json(theta))
    write_json(out / "tokenizer_config.json", tokenizer_config_json())
    write_json(out / "generation_config.json", generation_config_json())
    write_atomically(out / "tokenizer.json",
                     lambda p: p.write_text(tok.to_str(pretty=False), encoding="utf-8"))
    write_atomically(out / "model.safetensors",
                     lambda p: save_file(tensors, p, metadata={"format": "pt"}))


# ---------------------------------------------------------------- training


def optimizer_for(model):
    """AdamW, with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": DECAY},
              {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.95), fused=True)


def evaluate(model, average, held_out):
    """Held-out loss of the averaged weights."""
    own = {k: p.detach().clone() for k, p in model.named_parameters()}
    load(model, average)
    with torch.no_grad():
        losses = [float(model(*pair)) for pair in held_out]
    load(model, own)
    return sum(losses) / len(losses)


def load(model, weights):
    """Copy weights by name into the model."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])


def exported_weights(folder):
    """The weights of an exported model, in float32, by our names."""
    tensors = load_file(Path(folder) / "model.safetensors")
    return {k.removeprefix("model."): v.float() for k, v in tensors.items()}


def named(weights):
    """Weights under their names in transformers."""
    return {f"model.{name}": value for name, value in weights.items()}


def train(args):
    """The whole run; returns a summary."""
    torch.manual_seed(SEED)
    torch.set_num_threads(args.threads)
    texts = corpus.load(Path(args.work) / "packages")
    plain = texts.plain()
    tok = train_tokenizer(plain + texts.chats(SEED))
    plain_ids, held_out = encode(tok, plain), validation_batches(tok, texts)
    out = Path(args.out)
    model = Llama(args.theta)
    if args.init:
        load(model, exported_weights(args.init))
    run = torch.compile(model, dynamic=False) if args.compile else model
    optimizer = optimizer_for(model)
    average = {k: p.detach().clone() for k, p in model.named_parameters()}
    schedule = Schedule(args)
    recent, exported = [], 0.0
    print(f"parameters {sum(p.numel() for p in model.parameters())}, plain tokens "
          f"{sum(map(len, plain_ids))}", flush=True)
    stream = batches(tok, texts, plain_ids, schedule.length, args.first_epoch)
    for epoch, ids, targets in stream:
        if schedule.progress() >= 1.0:
            break
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate()
        loss = run(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        keep = min(EMA, (schedule.step + 1) / (schedule.step + 10))
        with torch.no_grad():
            for name, p in model.named_parameters():
                average[name].lerp_(p, 1 - keep)
        schedule.advance()
        recent = [*recent[-199:], loss.item()]
        if schedule.step % 50 == 0:
            print(f"step {schedule.step} epoch {epoch} len {ids.shape[1]} loss "
                  f"{sum(recent) / len(recent):.3f} lr {schedule.rate():.2e} "
                  f"{schedule.elapsed():.1f} min", flush=True)
        if schedule.elapsed() - exported >= args.export_every:
            exported = schedule.elapsed()
            held = evaluate(model, average, held_out)
            export(out, tok, named(average), args.theta)
            print(f"export at step {schedule.step}: held-out {held:.3f}", flush=True)
    export(out, tok, named(average), args.theta)
    return {
        "steps": schedule.phase_steps,
        "tokens": schedule.step * TOKENS_PER_STEP,
        "minutes": round(schedule.elapsed(), 1),
        "train_loss": round(sum(recent) / len(recent), 4),
        "held_out_loss": round(evaluate(model, average, held_out), 4),
    }


def parse_phases(text):
    """Phases as (share of the run, sequence length) from "share:length,..."."""
    pairs = [part.split(":") for part in text.split(",")]
    return [(float(share), int(length)) for share, length in pairs]


def parse_steps(text):
    """Comma-separated step counts."""
    return [int(part) for part in text.split(",")]


def arguments():
    """Command line."""
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--work", required=True, help="folder for the packages")
    add("--out", default=here, help="model folder")
    add("--minutes", type=float, default=60.0, help="time budget")
    add("--steps", type=parse_steps, help="steps of each phase, instead of --minutes")
    add("--phases", type=parse_phases, default=PHASES, help="share:length,...")
    add("--lr", type=float, default=PEAK_LR, help="peak learning rate")
    add("--warmup", type=int, default=WARMUP, help="warm-up steps")
    add("--init", help="exported model to continue from")
    add("--first-epoch", type=int, default=0, help="first epoch, which seeds the order")
    add("--theta", type=float, default=10000.0, help="base of the rotary positions")
    add("--threads", type=int, default=2)
    add("--export-every", type=float, default=5.0, help="minutes between exports")
    add("--compile", action="store_true", help="use torch.compile (needs a C++ compiler)")
    return parser.parse_args()


if __name__ == "__main__":
    print(json.dumps(train(arguments())))
