// Device kernels of Larder. nvrtc compiles them at run time. Tests compare each with its CPU reference.
//
// Invariant: the result for one row does not depend on the other rows of the launch.

// Computes out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight.
// Shapes: x and out [gridDim.x][width], weight [width].
// One block per row. blockDim.x is a power of two, for the tree reduction.
// The launch provides blockDim.x floats of shared memory.
extern "C" __global__ void rms_norm(const float *x, const float *weight, float eps, int width, float *out) {
    extern __shared__ float partial[];
    const float *row = x + (size_t)blockIdx.x * width;
    float *target = out + (size_t)blockIdx.x * width;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum = fmaf(row[i], row[i], sum);
    partial[threadIdx.x] = sum;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
        __syncthreads();
    }
    const float scale = 1.0f / sqrtf(partial[0] / width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) target[i] = row[i] * scale * weight[i];
}

// Gathers the keys (or values) of one head from the pages of a sequence into out [tokens][head_dim].
// pool holds pages of page_elements floats. page_of[p] is the index of the sequence's page p in pool.
// In a page, token t of the head begins at start + t * stride. One block per token.
extern "C" __global__ void gather_head(const float *pool, const unsigned int *page_of, size_t page_elements,
                                       int page_tokens, int start, int stride, int head_dim, float *out) {
    const int token = blockIdx.x;
    const float *page = pool + (size_t)page_of[token / page_tokens] * page_elements;
    const float *source = page + start + (size_t)(token % page_tokens) * stride;
    for (int i = threadIdx.x; i < head_dim; i += blockDim.x) out[(size_t)token * head_dim + i] = source[i];
}
