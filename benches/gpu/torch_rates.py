"""Rates of torch on this GPU, beside those of bench-gpu: a bf16 matrix product, and prefill attention at 8 k tokens.

The product is a second ceiling: on Hopper it uses instructions that are faster than `mma` from registers.
"""

import statistics

import torch

ROUNDS = 7
TOKENS, HEADS, HEAD_DIM = 8192, 32, 128
SIDE = 8192


def median_seconds(work) -> float:
    work()
    torch.cuda.synchronize()
    times = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def tensor(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def main() -> None:
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, medians of {ROUNDS} rounds")
    print("\n| figure | TFLOP/s |\n|---|---|")
    a, b = tensor(SIDE, SIDE), tensor(SIDE, SIDE)
    seconds = median_seconds(lambda: a @ b)
    print(f"| bf16 product, {SIDE} × {SIDE} × {SIDE} | {2 * SIDE**3 / seconds / 1e12:.1f} |")
    # Keys and values of every query head: not every version takes grouped heads.
    q, k, v = (tensor(1, HEADS, TOKENS, HEAD_DIM) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    seconds = median_seconds(lambda: attend(q, k, v, is_causal=True))
    operations = 4 * HEADS * HEAD_DIM * TOKENS * (TOKENS + 1) / 2
    print(f"| scaled_dot_product_attention, causal, 1 × {TOKENS} tokens | {operations / seconds / 1e12:.1f} |")


if __name__ == "__main__":
    main()
