// Device kernels of Larder. Compiled at run time by nvrtc; each has a CPU reference it is tested against.
//
// What must always hold: the result for one row does not depend on the other rows of the launch.

// out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight. Shapes: x, out [gridDim.x][width], weight [width].
// One block per row; blockDim.x is a power of two, and the launch gives blockDim.x floats of shared memory.
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

// Collects the keys (or values) of one head from the pages of a sequence: out [tokens][head_dim].
// pool holds pages of page_elements floats; page_of[p] is where the sequence's page p lies in it. In a page, token t of
// the head begins at start + t * stride. One block per token.
extern "C" __global__ void gather_head(const float *pool, const unsigned int *page_of, size_t page_elements,
                                       int page_tokens, int start, int stride, int head_dim, float *out) {
    const int token = blockIdx.x;
    const float *page = pool + (size_t)page_of[token / page_tokens] * page_elements;
    const float *source = page + start + (size_t)(token % page_tokens) * stride;
    for (int i = threadIdx.x; i < head_dim; i += blockDim.x) out[(size_t)token * head_dim + i] = source[i];
}
