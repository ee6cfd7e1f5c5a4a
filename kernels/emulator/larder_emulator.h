// CUDA's execution model on the CPU, for the sources in kernels/cuda.
//
// A source is compiled behind this header as C++17. LARDER_KERNELS at its end lists its kernels.
//
// Model:
// - The threads of a block are fibers on one thread of the host, and run one after the other up to the next
//   barrier or warp operation. Even and odd blocks run them in opposite orders, so that a missing barrier shows.
// - Static shared memory belongs to the host thread, so blocks on several host threads do not share it.
// - A barrier without some threads of the block, a warp operation without some of its lanes, an index outside
//   an array, an address that is not aligned for its type, and writes behind dynamic shared memory end the launch
//   with an error.
// - An asynchronous copy runs when its thread waits for it, so that a missing wait shows. In odd blocks it runs at
//   once, so that a buffer that is still in use shows.
// Limits: a kernel that spins on memory never ends. Races inside a block are not found.
#pragma once
#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define LARDER_EMULATOR 1

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ thread_local
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __grid_constant__

struct uint3 { unsigned int x, y, z; };
struct dim3 { unsigned int x, y, z; };

#define LARDER_VECTOR2(name, type, bytes) \
    struct __attribute__((aligned(bytes))) name { type x, y; }; \
    static inline name make_##name(type x, type y) { return name{x, y}; }
#define LARDER_VECTOR4(name, type, bytes) \
    struct __attribute__((aligned(bytes))) name { type x, y, z, w; }; \
    static inline name make_##name(type x, type y, type z, type w) { return name{x, y, z, w}; }
LARDER_VECTOR2(char2, signed char, 2)
LARDER_VECTOR2(uchar2, unsigned char, 2)
LARDER_VECTOR2(short2, short, 4)
LARDER_VECTOR2(ushort2, unsigned short, 4)
LARDER_VECTOR2(int2, int, 8)
LARDER_VECTOR2(uint2, unsigned int, 8)
LARDER_VECTOR2(float2, float, 8)
LARDER_VECTOR2(longlong2, long long, 16)
LARDER_VECTOR2(ulonglong2, unsigned long long, 16)
LARDER_VECTOR2(double2, double, 16)
LARDER_VECTOR4(char4, signed char, 4)
LARDER_VECTOR4(uchar4, unsigned char, 4)
LARDER_VECTOR4(short4, short, 8)
LARDER_VECTOR4(ushort4, unsigned short, 8)
LARDER_VECTOR4(int4, int, 16)
LARDER_VECTOR4(uint4, unsigned int, 16)
LARDER_VECTOR4(float4, float, 16)

// The anonymous namespace keeps the state of each loaded library apart.
namespace {
namespace larder {

constexpr unsigned WARP = 32;
// Not a power of two, so that the stacks do not compete for the same sets of the caches.
constexpr size_t STACK_BYTES = (128 << 10) + 33 * 64;
constexpr size_t GUARD_BYTES = 64;
constexpr unsigned char GUARD = 0xA5;
constexpr size_t ERROR_BYTES = 512;
constexpr unsigned MAX_THREADS = 1024;

enum class State { Ready, Barrier, Warp, Ended };
enum class Vote { None, Count, And, Or };
enum class Operation { Sync, Shuffle, Ballot, Any, All, Match };

// An asynchronous copy that its thread has not waited for.
struct Copy {
    void *to;
    // Null for zeros.
    const void *from;
    unsigned bytes;
    unsigned group;
};
constexpr unsigned MAX_COPIES = 160;

struct Thread {
    void *stack_pointer;
#if !defined(__x86_64__)
    ucontext_t context;
#endif
    uint3 index;
    unsigned number;
    State state;
    int line;
    // Barrier.
    Vote vote;
    int predicate;
    int result;
    // Warp operation.
    Operation operation;
    unsigned mask;
    unsigned source;
    uint64_t value;
    uint64_t answer;
    // Copies in the order of their start, and the number of groups that have ended.
    unsigned copies;
    unsigned groups;
    Copy copy[MAX_COPIES];
};

using Body = void (*)(void **);

struct Block {
    uint3 index;
    uint3 size;
    dim3 grid;
    unsigned threads;
    Thread *thread;
    void *scheduler;
#if !defined(__x86_64__)
    ucontext_t scheduler_context;
#endif
    Body body;
    void **args;
    unsigned char *shared;
    bool copies_at_once;
    bool failed;
    char error[ERROR_BYTES];
};

// State of a host thread. Constant initialisation makes each access cheap. The stacks are mapped once, and take
// memory when they are touched.
struct Host {
    Block block;
    Thread *threads;
    unsigned thread_count;
    unsigned char *shared;
    size_t shared_bytes;
    unsigned char *stacks;
    Thread *current;
};
thread_local Host host;

// Frees the state when the host thread ends.
struct Cleaner {
    ~Cleaner() {
        if (host.stacks) munmap(host.stacks, STACK_BYTES * MAX_THREADS);
        free(host.threads);
        free(host.shared);
        host = Host{};
    }
};
thread_local Cleaner cleaner;

#if defined(__x86_64__)
// Saves the registers that a call preserves (System V ABI for x86-64, section 3.2.1), and the stack pointer.
__attribute__((naked, noinline)) void switch_stack(void **, void *) {
    __asm__(
        "pushq %rbp\n\tpushq %rbx\n\tpushq %r12\n\tpushq %r13\n\tpushq %r14\n\tpushq %r15\n\t"
        "movq %rsp, (%rdi)\n\tmovq %rsi, %rsp\n\t"
        "popq %r15\n\tpopq %r14\n\tpopq %r13\n\tpopq %r12\n\tpopq %rbx\n\tpopq %rbp\n\tret");
}
inline void leave() { switch_stack(&host.current->stack_pointer, host.block.scheduler); }
inline void enter(Thread &thread) { switch_stack(&host.block.scheduler, thread.stack_pointer); }
#else
inline void leave() { swapcontext(&host.current->context, &host.block.scheduler_context); }
inline void enter(Thread &thread) { swapcontext(&host.block.scheduler_context, &thread.context); }
#endif

inline void describe(const char *format, ...) {
    if (host.block.failed) return;
    host.block.failed = true;
    const uint3 at = host.block.index;
    const int length = snprintf(host.block.error, ERROR_BYTES, "block (%u, %u, %u): ", at.x, at.y, at.z);
    va_list values;
    va_start(values, format);
    vsnprintf(host.block.error + length, ERROR_BYTES - length, format, values);
    va_end(values);
}

// Ends the calling fiber, and with it the launch.
[[noreturn]] inline void stop() {
    for (;;) leave();
}

void fiber() {
    host.block.body(host.block.args);
    host.current->state = State::Ended;
    for (;;) leave();
}

inline unsigned char *stack_of(unsigned number) { return host.stacks + STACK_BYTES * number; }

inline void prepare(Thread &thread) {
    unsigned char *low = stack_of(thread.number);
#if defined(__x86_64__)
    // The first switch pops six registers and returns to `fiber`, with the stack as after a call.
    void **top = reinterpret_cast<void **>(low + STACK_BYTES);
    *--top = nullptr;
    *--top = reinterpret_cast<void *>(&fiber);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    thread.stack_pointer = top;
#else
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = low;
    thread.context.uc_stack.ss_size = STACK_BYTES;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, fiber, 0);
#endif
}

inline bool guard_is_whole(const unsigned char *guard) {
    for (size_t i = 0; i < GUARD_BYTES; i++) {
        if (guard[i] != GUARD) return false;
    }
    return true;
}

inline const char *name(Operation operation) {
    switch (operation) {
        case Operation::Sync: return "__syncwarp";
        case Operation::Shuffle: return "__shfl_sync";
        case Operation::Ballot: return "__ballot_sync";
        case Operation::Any: return "__any_sync";
        case Operation::All: return "__all_sync";
        case Operation::Match: return "__match_any_sync";
    }
    return "warp operation";
}

// Called when no fiber can run. Releases a complete barrier, or describes why there is none.
inline void release_barrier() {
    Block &block = host.block;
    unsigned waiting = 0, ended = 0;
    int line = 0;
    for (unsigned i = 0; i < block.threads; i++) {
        const Thread &thread = block.thread[i];
        if (thread.state == State::Warp) {
            return describe("line %d: thread %u waits in %s for lanes %#x, and some of them do not come",
                            thread.line, i, name(thread.operation), thread.mask);
        }
        if (thread.state == State::Ended) ended++;
        if (thread.state != State::Barrier) continue;
        if (waiting > 0 && thread.line != line) {
            return describe("threads wait at different barriers, in lines %d and %d", line, thread.line);
        }
        line = thread.line;
        waiting++;
    }
    if (ended > 0) {
        return describe("line %d: %u of %u threads wait at a barrier, %u have ended", line, waiting, block.threads, ended);
    }
    int count = 0;
    for (unsigned i = 0; i < block.threads; i++) count += block.thread[i].predicate != 0;
    for (unsigned i = 0; i < block.threads; i++) {
        Thread &thread = block.thread[i];
        const int all = count == (int)block.threads;
        thread.result = thread.vote == Vote::Count ? count : thread.vote == Vote::And ? all : count > 0;
        thread.state = State::Ready;
    }
}

inline void run_threads(bool backwards) {
    Block &block = host.block;
    unsigned left = block.threads;
    while (left > 0) {
        bool ran = false;
        for (unsigned i = 0; i < block.threads; i++) {
            Thread &thread = block.thread[backwards ? block.threads - 1 - i : i];
            if (thread.state != State::Ready) continue;
            ran = true;
            host.current = &thread;
            enter(thread);
            if (block.failed) return;
            if (thread.state == State::Ended) left--;
        }
        if (!ran) release_barrier();
        if (block.failed) return;
    }
}

inline bool run_block(uint64_t number, bool backwards, size_t shared_bytes) {
    Block &block = host.block;
    block.index.x = (unsigned)(number % block.grid.x);
    block.index.y = (unsigned)(number / block.grid.x % block.grid.y);
    block.index.z = (unsigned)(number / block.grid.x / block.grid.y);
    for (unsigned i = 0; i < block.threads; i++) {
        Thread &thread = block.thread[i];
        thread.number = i;
        thread.index = {i % block.size.x, i / block.size.x % block.size.y, i / block.size.x / block.size.y};
        thread.state = State::Ready;
        thread.copies = 0;
        thread.groups = 0;
        prepare(thread);
    }
    // NaN in most formats: new shared memory has no defined content.
    memset(block.shared, 0xFF, shared_bytes);
    memset(block.shared + shared_bytes, GUARD, GUARD_BYTES);
    block.copies_at_once = backwards;
    run_threads(backwards);
    if (!block.failed && !guard_is_whole(block.shared + shared_bytes)) {
        describe("a thread has written behind the %zu bytes of dynamic shared memory", shared_bytes);
    }
    for (unsigned i = 0; !block.failed && i < block.threads; i++) {
        if (guard_is_whole(stack_of(i))) continue;
        describe("thread %u has used more than %zu bytes of stack", i, STACK_BYTES);
        memset(stack_of(i), GUARD, GUARD_BYTES);
    }
    return !block.failed;
}

inline int barrier(int line, Vote vote, int predicate) {
    Thread &thread = *host.current;
    thread.line = line;
    thread.vote = vote;
    thread.predicate = predicate;
    thread.state = State::Barrier;
    leave();
    return thread.result;
}

inline uint64_t answer(const Thread *warp, unsigned lane) {
    const Thread &thread = warp[lane];
    if (thread.operation == Operation::Shuffle) return warp[thread.source].value;
    unsigned votes = 0;
    for (unsigned i = 0; i < WARP; i++) {
        if (!(thread.mask >> i & 1)) continue;
        const bool yes = thread.operation == Operation::Match ? warp[i].value == thread.value : warp[i].value != 0;
        votes |= (unsigned)yes << i;
    }
    switch (thread.operation) {
        case Operation::Any: return votes != 0;
        case Operation::All: return votes == thread.mask;
        default: return votes;
    }
}

// Waits for the lanes of `mask`. The lane that comes last computes the answers of all.
inline uint64_t warp(int line, Operation operation, unsigned mask, uint64_t value, unsigned source) {
    Thread &thread = *host.current;
    const unsigned first = thread.number / WARP * WARP, lane = thread.number % WARP;
    const unsigned lanes = std::min(WARP, host.block.threads - first);
    Thread *const all = host.block.thread + first;
    if (!(mask >> lane & 1)) {
        describe("line %d: thread %u calls %s with lanes %#x, without its own", line, thread.number, name(operation), mask);
        stop();
    }
    // A mask of 32 lanes is usual in a last warp that is not full.
    const unsigned present = lanes == WARP ? ~0u : (1u << lanes) - 1;
    const unsigned wanted = mask == ~0u ? present : mask;
    if ((wanted & ~present) || (operation == Operation::Shuffle && !(wanted >> source & 1))) {
        describe("line %d: thread %u calls %s with lanes %#x, and reads a lane outside", line, thread.number,
                 name(operation), mask);
        stop();
    }
    thread.line = line;
    thread.operation = operation;
    thread.mask = wanted;
    thread.source = source;
    thread.value = value;
    thread.state = State::Warp;
    for (unsigned i = 0; i < lanes; i++) {
        if (!(wanted >> i & 1)) continue;
        if (all[i].state != State::Warp) {
            leave();
            return thread.answer;
        }
        if (all[i].operation != operation || all[i].mask != wanted) {
            describe("threads %u and %u of a warp meet in different operations, in lines %d and %d", first + i,
                     thread.number, all[i].line, line);
            stop();
        }
    }
    for (unsigned i = 0; i < lanes; i++) {
        if (wanted >> i & 1) all[i].answer = answer(all, i);
    }
    for (unsigned i = 0; i < lanes; i++) {
        if (wanted >> i & 1) all[i].state = State::Ready;
    }
    return thread.answer;
}

struct Here {
    int line;
    void syncwarp(unsigned mask = ~0u) const { warp(line, Operation::Sync, mask, 0, 0); }
};

template <typename T> inline uint64_t pack(T value) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    return bits;
}

template <typename T> inline T unpack(uint64_t bits) {
    T value;
    memcpy(&value, &bits, sizeof(T));
    return value;
}

inline unsigned lane() { return host.current->number % WARP; }

// The lane that a shuffle reads. Groups of `width` lanes exchange values; outside its group a lane reads itself.
template <typename T> inline T shuffle(int line, unsigned mask, T value, long source, unsigned width) {
    const unsigned own = lane(), group = own / width * width;
    const bool inside = source >= (long)group && source < (long)(group + width);
    return unpack<T>(warp(line, Operation::Shuffle, mask, pack(value), inside ? (unsigned)source : own));
}
template <typename T> inline T shfl(int line, unsigned mask, T value, int source, unsigned width = WARP) {
    return shuffle(line, mask, value, (long)(lane() / width * width + (unsigned)source % width), width);
}
template <typename T> inline T shfl_up(int line, unsigned mask, T value, unsigned delta, unsigned width = WARP) {
    return shuffle(line, mask, value, (long)lane() - (long)delta, width);
}
template <typename T> inline T shfl_down(int line, unsigned mask, T value, unsigned delta, unsigned width = WARP) {
    return shuffle(line, mask, value, (long)lane() + (long)delta, width);
}
template <typename T> inline T shfl_xor(int line, unsigned mask, T value, int bits, unsigned width = WARP) {
    return shuffle(line, mask, value, (long)(lane() ^ (unsigned)bits), width);
}

// One letter per parameter of a kernel: r and w are pointers to const and to mutable memory.
template <typename T> struct Letter;
template <typename T> struct Letter<const T *> { static constexpr char value = 'r'; };
template <typename T> struct Letter<T *> { static constexpr char value = 'w'; };
template <> struct Letter<unsigned int> { static constexpr char value = 'u'; };
template <> struct Letter<int> { static constexpr char value = 'i'; };
template <> struct Letter<unsigned long> { static constexpr char value = 'U'; };
template <> struct Letter<unsigned long long> { static constexpr char value = 'U'; };
template <> struct Letter<float> { static constexpr char value = 'f'; };

template <auto function> struct Thunk;
template <typename... T, void (*function)(T...)> struct Thunk<function> {
    static constexpr char signature[sizeof...(T) + 1] = {Letter<T>::value..., 0};
    template <size_t... I> static void call(void **args, std::index_sequence<I...>) {
        function(*static_cast<T *>(args[I])...);
    }
    static void body(void **args) { call(args, std::index_sequence_for<T...>{}); }
};

struct Kernel {
    const char *name;
    const char *signature;
    Body body;
};

inline unsigned char *dynamic_shared() { return host.block.shared; }

inline bool reserve(unsigned threads, size_t shared_bytes) {
    (void)&cleaner;
    if (!host.stacks) {
        void *const stacks = mmap(nullptr, STACK_BYTES * MAX_THREADS, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stacks == MAP_FAILED) return false;
        host.stacks = static_cast<unsigned char *>(stacks);
        for (unsigned i = 0; i < MAX_THREADS; i++) memset(stack_of(i), GUARD, GUARD_BYTES);
    }
    if (host.thread_count < threads) {
        free(host.threads);
        host.threads = static_cast<Thread *>(calloc(threads, sizeof(Thread)));
        host.thread_count = host.threads ? threads : 0;
    }
    if (!host.shared || host.shared_bytes < shared_bytes) {
        free(host.shared);
        host.shared = static_cast<unsigned char *>(aligned_alloc(256, (shared_bytes + GUARD_BYTES + 255) / 256 * 256));
        host.shared_bytes = host.shared ? shared_bytes : 0;
    }
    return host.threads && host.shared;
}

inline bool run(const Kernel &kernel, void **args, const unsigned *grid, const unsigned *size, size_t shared_bytes,
                uint64_t first, uint64_t count, uint64_t order, char *error) {
    Block &block = host.block;
    block.grid = {grid[0], grid[1], grid[2]};
    block.size = {size[0], size[1], size[2]};
    block.threads = size[0] * size[1] * size[2];
    block.failed = false;
    block.body = kernel.body;
    block.args = args;
    if (!reserve(block.threads, shared_bytes)) {
        snprintf(error, ERROR_BYTES, "the host has no memory for the threads of a block");
        return false;
    }
    block.thread = host.threads;
    block.shared = host.shared;
    for (uint64_t number = first; number < first + count; number++) {
        if (run_block(number, (number + order) & 1, shared_bytes)) continue;
        memcpy(error, block.error, ERROR_BYTES);
        return false;
    }
    return true;
}

template <typename T, typename F> inline T update(T *at, F compute) {
    T old = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(at, &old, compute(old), true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return old;
}

}  // namespace larder
}  // namespace

// -fsanitize=bounds calls these for an index outside an array of known length. The record begins with the file's
// name, the line and the column (compiler-rt, lib/ubsan/ubsan_handlers.h).
extern "C" __attribute__((visibility("hidden"), used)) inline void __ubsan_handle_out_of_bounds_abort(void *record, uintptr_t index) {
    struct Place { const char *file; uint32_t line, column; };
    larder::describe("line %u: the index %ld is outside its array", static_cast<Place *>(record)->line, (long)index);
    larder::stop();
}
extern "C" __attribute__((visibility("hidden"), used)) inline void __ubsan_handle_out_of_bounds(void *record, uintptr_t index) {
    __ubsan_handle_out_of_bounds_abort(record, index);
}

// The same for an address that is not a multiple of its type's alignment, at which a GPU faults. Behind the place,
// the record has a pointer to the type and the logarithm of the alignment.
extern "C" __attribute__((visibility("hidden"), used)) inline void __ubsan_handle_type_mismatch_v1_abort(void *record, uintptr_t at) {
    struct Access { const char *file; uint32_t line, column; void *type; unsigned char log_alignment; };
    const Access &access = *static_cast<Access *>(record);
    larder::describe("line %u: the address %#lx is not a multiple of %u", access.line, (unsigned long)at, 1u << access.log_alignment);
    larder::stop();
}
extern "C" __attribute__((visibility("hidden"), used)) inline void __ubsan_handle_type_mismatch_v1(void *record, uintptr_t at) {
    __ubsan_handle_type_mismatch_v1_abort(record, at);
}

#define threadIdx (::larder::host.current->index)
#define blockIdx (::larder::host.block.index)
#define blockDim (::larder::host.block.size)
#define gridDim (::larder::host.block.grid)
#define warpSize 32

// The line tells barriers apart, even where the compiler copies a call.
#define __syncthreads() ((void)::larder::barrier(__LINE__, ::larder::Vote::None, 0))
#define __syncthreads_count(p) ::larder::barrier(__LINE__, ::larder::Vote::Count, (p) != 0)
#define __syncthreads_and(p) ::larder::barrier(__LINE__, ::larder::Vote::And, (p) != 0)
#define __syncthreads_or(p) ::larder::barrier(__LINE__, ::larder::Vote::Or, (p) != 0)
#define __syncwarp(...) ::larder::Here{__LINE__}.syncwarp(__VA_ARGS__)
#define __shfl_sync(...) ::larder::shfl(__LINE__, __VA_ARGS__)
#define __shfl_up_sync(...) ::larder::shfl_up(__LINE__, __VA_ARGS__)
#define __shfl_down_sync(...) ::larder::shfl_down(__LINE__, __VA_ARGS__)
#define __shfl_xor_sync(...) ::larder::shfl_xor(__LINE__, __VA_ARGS__)
#define __ballot_sync(mask, p) ((unsigned)::larder::warp(__LINE__, ::larder::Operation::Ballot, mask, (p) != 0, 0))
#define __any_sync(mask, p) ((int)::larder::warp(__LINE__, ::larder::Operation::Any, mask, (p) != 0, 0))
#define __all_sync(mask, p) ((int)::larder::warp(__LINE__, ::larder::Operation::All, mask, (p) != 0, 0))
#define __match_any_sync(mask, v) \
    ((unsigned)::larder::warp(__LINE__, ::larder::Operation::Match, mask, ::larder::pack(v), 0))

// Functions of CUDA that C++ does not have. They follow the CUDA C++ Programming Guide and the CUDA Math API.
static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
template <typename T> static inline T __ldg(const T *at) { return *at; }
template <typename T> static inline T __ldcs(const T *at) { return *at; }
template <typename T> static inline T __ldcg(const T *at) { return *at; }
template <typename T> static inline T __ldcv(const T *at) { return *at; }
template <typename T> static inline void __stcs(T *at, T value) { *at = value; }
template <typename T> static inline void __stcg(T *at, T value) { *at = value; }
template <typename T> static inline void __stwt(T *at, T value) { *at = value; }

template <typename T> static inline T larder_number_add(T *at, T value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }
static inline int atomicAdd(int *at, int value) { return larder_number_add(at, value); }
static inline unsigned atomicAdd(unsigned *at, unsigned value) { return larder_number_add(at, value); }
static inline unsigned long long atomicAdd(unsigned long long *at, unsigned long long value) { return larder_number_add(at, value); }
static inline float atomicAdd(float *at, float value) {
    const auto sum = [value](unsigned bits) { return larder::unpack<unsigned>(larder::pack(larder::unpack<float>(bits) + value)); };
    return larder::unpack<float>(larder::update(reinterpret_cast<unsigned *>(at), sum));
}
template <typename T> static inline T atomicSub(T *at, T value) { return __atomic_fetch_sub(at, value, __ATOMIC_RELAXED); }
template <typename T> static inline T atomicMax(T *at, T value) { return larder::update(at, [value](T old) { return std::max(old, value); }); }
template <typename T> static inline T atomicMin(T *at, T value) { return larder::update(at, [value](T old) { return std::min(old, value); }); }
template <typename T> static inline T atomicExch(T *at, T value) { return larder::update(at, [value](T) { return value; }); }
template <typename T> static inline T atomicAnd(T *at, T value) { return __atomic_fetch_and(at, value, __ATOMIC_RELAXED); }
template <typename T> static inline T atomicOr(T *at, T value) { return __atomic_fetch_or(at, value, __ATOMIC_RELAXED); }
template <typename T> static inline T atomicXor(T *at, T value) { return __atomic_fetch_xor(at, value, __ATOMIC_RELAXED); }
template <typename T> static inline T atomicCAS(T *at, T expected, T value) {
    __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}

static inline unsigned __float_as_uint(float value) { return larder::unpack<unsigned>(larder::pack(value)); }
static inline int __float_as_int(float value) { return larder::unpack<int>(larder::pack(value)); }
static inline float __uint_as_float(unsigned bits) { return larder::unpack<float>(bits); }
static inline float __int_as_float(int bits) { return larder::unpack<float>((unsigned)bits); }
static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
static inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
static inline int __clz(int bits) { return bits ? __builtin_clz((unsigned)bits) : 32; }
static inline int __clzll(long long bits) { return bits ? __builtin_clzll((unsigned long long)bits) : 64; }
static inline int __ffs(int bits) { return __builtin_ffs(bits); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static inline unsigned __brev(unsigned bits) {
    unsigned result = 0;
    for (int i = 0; i < 32; i++) result |= (bits >> i & 1) << (31 - i);
    return result;
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    return result;
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)((((uint64_t)high << 32 | low) << (shift & 31)) >> 32);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31));
}
static inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float value) { return sqrtf(value); }
static inline float __frsqrt_rn(float value) { return rsqrtf(value); }
static inline float __saturatef(float value) { return value > 0.0f ? (value < 1.0f ? value : 1.0f) : 0.0f; }
static inline int __float2int_rn(float value) { return (int)rintf(value); }
static inline int __float2int_rd(float value) { return (int)floorf(value); }
static inline int __float2int_rz(float value) { return (int)value; }
static inline float __int2float_rn(int value) { return (float)value; }
static inline float __uint2float_rn(unsigned value) { return (float)value; }
// glibc declares functions of these names, so they are macros.
#define __expf(value) expf(value)
#define __exp10f(value) powf(10.0f, value)
#define __logf(value) logf(value)
#define __log2f(value) log2f(value)
#define __powf(base, exponent) powf(base, exponent)
#define __sinf(value) sinf(value)
#define __cosf(value) cosf(value)
using std::max;
using std::min;
static inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
static inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
static inline unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
static inline unsigned max(int a, unsigned b) { return max((unsigned)a, b); }

// Plain twins of cp.async and cp.async.bulk: a copy of 16 bytes or a multiple, the end of a group, and the wait for all
// groups but the last `later`. `from` is null for zeros.
static inline void larder_run_copy(const larder::Copy &copy) {
    if (copy.from) {
        memcpy(copy.to, copy.from, copy.bytes);
    } else {
        memset(copy.to, 0, copy.bytes);
    }
}
static inline void larder_copy_async(void *to, const void *from, unsigned bytes) {
    larder::Thread &thread = *larder::host.current;
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16 != 0) {
        larder::describe("thread %u starts a copy of %u bytes that is not aligned", thread.number, bytes);
        larder::stop();
    }
    if (thread.copies == larder::MAX_COPIES) {
        larder::describe("thread %u waits for none of %u copies", thread.number, larder::MAX_COPIES);
        larder::stop();
    }
    const larder::Copy copy = {to, from, bytes, thread.groups};
    if (larder::host.block.copies_at_once) return larder_run_copy(copy);
    thread.copy[thread.copies++] = copy;
}
static inline void larder_commit_async() { larder::host.current->groups++; }
static inline void larder_wait_async(unsigned later) {
    larder::Thread &thread = *larder::host.current;
    unsigned left = 0;
    for (unsigned i = 0; i < thread.copies; i++) {
        const larder::Copy copy = thread.copy[i];
        if (copy.group + later >= thread.groups) {
            thread.copy[left++] = copy;
        } else {
            larder_run_copy(copy);
        }
    }
    thread.copies = left;
}

// The interface of the library.
#define LARDER_KERNEL(function) {#function, ::larder::Thunk<&function>::signature, &::larder::Thunk<&function>::body}
#define LARDER_KERNELS(...) \
    extern "C" __attribute__((visibility("default"))) const ::larder::Kernel larder_kernels[] = {__VA_ARGS__}; \
    extern "C" __attribute__((visibility("default"))) unsigned larder_kernel_count() { \
        return sizeof(larder_kernels) / sizeof(larder_kernels[0]); \
    } \
    extern "C" __attribute__((visibility("default"))) const char *larder_kernel_name(unsigned kernel) { \
        return larder_kernels[kernel].name; \
    } \
    extern "C" __attribute__((visibility("default"))) const char *larder_kernel_signature(unsigned kernel) { \
        return larder_kernels[kernel].signature; \
    } \
    extern "C" __attribute__((visibility("default"))) int larder_run( \
        unsigned kernel, void **args, const unsigned *grid, const unsigned *block, size_t shared_bytes, \
        uint64_t first, uint64_t count, uint64_t order, char *error) { \
        return ::larder::run(larder_kernels[kernel], args, grid, block, shared_bytes, first, count, order, error); \
    }
