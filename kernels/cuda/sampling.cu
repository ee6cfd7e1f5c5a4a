// Selection of tokens from logits: the largest, or a sample with temperature, top-k, top-p and min-p.
//
// Invariants:
// - The result of a row depends on its logits, its parameters and its random number only.
// - A sample is that of the CPU for the same random number (larder_kernels::cpu::sample_token), up to rounding:
//   weights are multiples of 2^-45 here, so that sums do not depend on their order. With 2^18 tokens the
//   probability of another token is below 10^-8 per sample.
//
// One block per row. Order of tokens: by descending logit, then ascending id. The searches for the top-k, top-p
// and sampled tokens take eight bits of the logit at a time (radix select).

#include "element.cuh"

namespace sampling {

constexpr u32 THREADS = 256;
constexpr u32 WARPS = THREADS / WARP;
constexpr u32 NONE = 0xFFFFFFFFu;
constexpr double ONE = 35184372088832.0; // 2^45
constexpr u64 KEPT = 1ull << 63;

// Numbers in the order of the logits, without NaN: 0 comes before all of them.
__device__ __forceinline__ u32 key_of(float x) {
    const u32 bits = __float_as_uint(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float logit_of(u32 key) { return __uint_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key); }

struct Shared {
    u64 bins[THREADS];
    u64 before;
    u32 found;
    float warp_values[WARPS];
    u32 warp_ids[WARPS];
};

// Index of the largest value, the lowest among equals, in every thread. NONE if all are NaN. Starts with a barrier.
template <class T> __device__ u32 largest(Shared &shared, const T *logits, u32 vocab) {
    float best = -infinite();
    u32 id = NONE;
    for (u32 i = threadIdx.x; i < vocab; i += THREADS) {
        const float x = to_float(logits[i]);
        // The ids of a thread ascend, so the first of equal values stays.
        if (x > best || (x == best && id == NONE)) {
            best = x;
            id = i;
        }
    }
    for (u32 step = WARP / 2; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, best, step);
        const u32 other_id = __shfl_xor_sync(ALL_LANES, id, step);
        if (other > best || (other == best && other_id < id)) {
            best = other;
            id = other_id;
        }
    }
    __syncthreads();
    if (threadIdx.x % WARP == 0) {
        shared.warp_values[threadIdx.x / WARP] = best;
        shared.warp_ids[threadIdx.x / WARP] = id;
    }
    __syncthreads();
    for (u32 warp = 0; warp < WARPS; warp++) {
        const float other = shared.warp_values[warp];
        const u32 other_id = shared.warp_ids[warp];
        if (other > best || (other == best && other_id < id)) {
            best = other;
            id = other_id;
        }
    }
    return id;
}

// Replaces bins by their sums over [0, i] (or over [i, THREADS) if BACKWARDS). Starts and ends with a barrier.
template <bool BACKWARDS> __device__ void scan(Shared &shared) {
#pragma unroll 1
    for (u32 step = 1; step < THREADS; step *= 2) {
        __syncthreads();
        u64 sum = shared.bins[threadIdx.x];
        if (BACKWARDS) {
            if (threadIdx.x + step < THREADS) sum += shared.bins[threadIdx.x + step];
        } else {
            if (threadIdx.x >= step) sum += shared.bins[threadIdx.x - step];
        }
        __syncthreads();
        shared.bins[threadIdx.x] = sum;
    }
    __syncthreads();
}

// Finds the bin at which the running sum exceeds `target`, and subtracts the sum before it from `target`. Every
// thread returns it, or NONE if the sum of all bins does not exceed the target. The bins hold sums already.
template <bool BACKWARDS> __device__ u32 crossing(Shared &shared, u64 &target) {
    if (threadIdx.x == 0) shared.found = NONE;
    __syncthreads();
    u64 before = 0;
    if (BACKWARDS) {
        if (threadIdx.x + 1 < THREADS) before = shared.bins[threadIdx.x + 1];
    } else {
        if (threadIdx.x > 0) before = shared.bins[threadIdx.x - 1];
    }
    // Sums never decrease, so one thread at most finds its bin.
    if (before <= target && shared.bins[threadIdx.x] > target) {
        shared.found = threadIdx.x;
        shared.before = before;
    }
    __syncthreads();
    const u32 found = shared.found;
    if (found != NONE) target -= shared.before;
    return found;
}

// One row: logits, and per token KEPT | weight, or 0 for a token that min_p drops and for NaN.
template <class T> struct Row {
    const T *logits;
    u64 *weights;
    u32 vocab;
    float max;
    float temperature;

    __device__ u64 weight_of(float x, float min_p) const {
        if (is_nan(x)) return 0;
        // Equal infinities have no difference.
        const double p = x == max ? 1.0 : exp(((double)(x - max)) / (double)temperature);
        if (min_p > 0.0f && !(p >= (double)min_p)) return 0;
        return KEPT | (u64)(p * ONE + 0.5);
    }
};

// The best tokens: those with larger keys, and the first `ties` of those with an equal key.
struct Cut {
    u32 key;
    u64 ties;
};

// Measures of a token: 1 each, or its weight.
__device__ __forceinline__ u64 measure(u64 weight, bool counts) {
    return counts ? weight >> 63 : weight & ~KEPT;
}

// Finds the first token, best first, at which the running measure of the tokens in the cut exceeds `target`. The
// sum of all must exceed it. Returns its key, and its number among those with an equal key.
template <class T>
__device__ Cut descend(Shared &shared, const Row<T> &row, Cut cut, u64 cut_weight, bool counts, u64 target) {
    u32 prefix = 0, mask = 0;
#pragma unroll 1
    for (u32 shift = 24;; shift -= 8) {
        __syncthreads();
        shared.bins[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll 1
        for (u32 i = threadIdx.x; i < row.vocab; i += THREADS) {
            const u64 amount = measure(row.weights[i], counts);
            const u32 key = key_of(to_float(row.logits[i]));
            if (amount == 0 || key <= cut.key || (key & mask) != prefix) continue;
            atomicAdd(&shared.bins[key >> shift & 0xFFu], amount);
        }
        if (threadIdx.x == 0 && cut.ties > 0 && (cut.key & mask) == prefix) {
            atomicAdd(&shared.bins[cut.key >> shift & 0xFFu], cut.ties * measure(cut_weight, counts));
        }
        scan<true>(shared);
        const u32 bin = crossing<true>(shared, target);
        prefix |= (bin == NONE ? 0 : bin) << shift;
        mask |= 0xFFu << shift;
        if (shift == 0) break;
    }
    Cut found;
    found.key = prefix;
    // All tokens of this key have one weight.
    const u64 each = counts ? 1 : measure(row.weight_of(logit_of(prefix), 0.0f), false);
    found.ties = each == 0 ? 0 : target / each;
    return found;
}

// Sum of the weights in the cut, in every thread.
template <class T> __device__ u64 total(Shared &shared, const Row<T> &row, Cut cut, u64 cut_weight) {
    u64 sum = 0;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < row.vocab; i += THREADS) {
        if (key_of(to_float(row.logits[i])) > cut.key) sum += measure(row.weights[i], false);
    }
    __syncthreads();
    shared.bins[threadIdx.x] = sum;
    scan<false>(shared);
    return shared.bins[THREADS - 1] + cut.ties * measure(cut_weight, false);
}

// Finds the first token, by id, at which the running measure exceeds `target`: the weight, or with `ties` 1 for
// each kept token of key `key`. NONE if there is none.
template <class T> __device__ u32 find_by_id(Shared &shared, const Row<T> &row, bool ties, u32 key, u64 target) {
    u32 start = 0, end = row.vocab;
    for (;;) {
        // Equal segments, each summed by the lanes of a warp.
        const u32 length = (end - start + THREADS - 1) / THREADS;
        __syncthreads();
#pragma unroll 1
        for (u32 segment = threadIdx.x / WARP; segment < THREADS; segment += WARPS) {
            const u64 from = start + (u64)segment * length;
            u64 sum = 0;
#pragma unroll 1
            for (u64 i = from + threadIdx.x % WARP; i < from + length && i < end; i += WARP) {
                if (!ties || key_of(to_float(row.logits[i])) == key) sum += measure(row.weights[i], ties);
            }
            sum = warp_sum(sum);
            if (threadIdx.x % WARP == 0) shared.bins[segment] = sum;
        }
        scan<false>(shared);
        const u32 segment = crossing<false>(shared, target);
        if (segment == NONE) return NONE;
        start += segment * length;
        if (length == 1) return start;
        end = start + length < end ? start + length : end;
    }
}

// Parameters of a row. The host struct SampleRow has the same layout.
struct Params {
    // Random number from 0 to 1, without 1.
    double uniform;
    // 0 or NaN selects the largest logit.
    float temperature;
    // From 1 on (or NaN) there is no cut.
    float top_p;
    // Up to 0 there is no cut.
    float min_p;
    // 0 for no cut.
    u32 top_k;
};

template <class T> __device__ u32 sample(Shared &shared, const T *logits, u32 vocab, Params params, u64 *weights) {
    const u32 best = largest(shared, logits, vocab);
    if (best == NONE) return 0;
    const bool is_greedy = !(params.temperature > 0.0f && params.temperature < infinite()) || params.top_k == 1;
    if (is_greedy) return best;
    const Row<T> row = {logits, weights, vocab, to_float(logits[best]), params.temperature};
    u64 kept = 0;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < vocab; i += THREADS) {
        const u64 weight = row.weight_of(to_float(logits[i]), params.min_p);
        weights[i] = weight;
        kept += weight >> 63;
    }
    __syncthreads();
    shared.bins[threadIdx.x] = kept;
    scan<false>(shared);
    kept = shared.bins[THREADS - 1];
    if (kept == 0) return 0;
    Cut cut = {0, 0};
    u64 cut_weight = 0;
    if (params.top_k > 0 && params.top_k < kept) {
        cut = descend(shared, row, cut, cut_weight, true, params.top_k - 1);
        cut.ties += 1;
        cut_weight = row.weight_of(logit_of(cut.key), params.min_p);
    }
    const bool has_top_p = params.top_p < 1.0f;
    u64 sum = total(shared, row, cut, cut_weight);
    if (has_top_p) {
        const double threshold = ceil((double)params.top_p * (double)sum);
        cut = descend(shared, row, cut, cut_weight, false, threshold >= 1.0 ? (u64)threshold - 1 : 0);
        cut.ties += 1;
        cut_weight = row.weight_of(logit_of(cut.key), params.min_p);
        sum = total(shared, row, cut, cut_weight);
    }
    u64 target = (u64)(params.uniform * (double)sum);
    if (target >= sum) target = sum - 1;
    if (!has_top_p && params.top_k == 0) return find_by_id(shared, row, false, 0, target);
    const Cut drawn = descend(shared, row, cut, cut_weight, false, target);
    return find_by_id(shared, row, true, drawn.key, drawn.ties);
}

} // namespace sampling

// argmax_T: out[r] = index of the largest logit, the lowest among equals, or 0 if all are NaN.
// sample_T: out[r] = a sample of row r with the parameters rows[r]. 0 if no token remains.
// Shapes: logits [gridDim.x][vocab]; rows and out [gridDim.x]; weights [gridDim.x][vocab], working memory. At most
// 2^18 tokens. 256 threads per block.
#define SAMPLING_KERNELS(NAME, T)                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) argmax_##NAME(const T *logits, u32 vocab, u32 *out) {         \
        __shared__ sampling::Shared shared;                                                                         \
        const u32 id = sampling::largest(shared, logits + (u64)blockIdx.x * vocab, vocab);                          \
        if (threadIdx.x == 0) out[blockIdx.x] = id == sampling::NONE ? 0 : id;                                      \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256) sample_##NAME(                                                \
        const T *logits, u32 vocab, const sampling::Params *rows, u64 *weights, u32 *out) {                         \
        __shared__ sampling::Shared shared;                                                                         \
        const u64 start = (u64)blockIdx.x * vocab;                                                                  \
        const u32 id = sampling::sample(shared, logits + start, vocab, rows[blockIdx.x], weights + start);          \
        if (threadIdx.x == 0) out[blockIdx.x] = id;                                                                 \
    }

SAMPLING_KERNELS(f32, float)
SAMPLING_KERNELS(f16, f16)
SAMPLING_KERNELS(bf16, bf16)
