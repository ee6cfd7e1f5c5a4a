"""Measures llama.cpp: `llama.py GGUF PROMPT_TOKENS`. Prints tokens per second of prefill and decode as JSON."""

import ctypes
import json
import os
import sys
import time

import llama_cpp
import numpy as np

STEPS = 12
# llama.cpp's own default for the tokens of one pass.
UBATCH = 512


def main():
    path, prompt = sys.argv[1], int(sys.argv[2])
    llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = prompt + STEPS + 16
    params.n_batch, params.n_ubatch = prompt, UBATCH
    params.n_threads = params.n_threads_batch = os.cpu_count()
    context = llama_cpp.llama_init_from_model(model, params)

    def run(tokens):
        """Computes tokens and returns the most likely next one."""
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens))):
            sys.exit("llama_decode failed")
        logits = llama_cpp.llama_get_logits_ith(context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(vocab,)).argmax())

    # Threads start and pages of the file arrive in the first pass.
    run([3])
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    started = time.perf_counter()
    token = run([(index * 7919 + 131) % vocab for index in range(prompt)])
    prefilled = time.perf_counter()
    for _ in range(STEPS):
        token = run([token])
    ended = time.perf_counter()
    print(json.dumps({"prefill": prompt / (prefilled - started), "decode": STEPS / (ended - prefilled)}))


_SILENT = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)

if __name__ == "__main__":
    main()
