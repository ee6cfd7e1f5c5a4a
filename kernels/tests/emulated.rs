//! The emulator finds errors of kernels and races between streams, and runs correct ones.

use larder_kernels::cuda::KernelSource;
use larder_kernels::device::emulated::Emulator;
use larder_kernels::device::{Arg, Device, DeviceError, Launch, Place, download, host, upload};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

const CONTENT: &str = r#"
extern "C" __global__ void sum_rows(const float *x, unsigned int width, float *out) {
    extern __shared__ float partial[];
    float sum = 0.0f;
    for (unsigned int i = threadIdx.x; i < width; i += blockDim.x) sum += x[blockIdx.x * width + i];
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (unsigned int i = 1; i < blockDim.x / 32; i++) sum += partial[i];
    out[blockIdx.x] = sum;
}
extern "C" __global__ void count_all(unsigned int *counter, unsigned int *votes) {
    atomicAdd(counter, 1u);
    const unsigned int odd = __ballot_sync(~0u, threadIdx.x & 1);
    const int up = __shfl_up_sync(~0u, (int)threadIdx.x, 1);
    if (threadIdx.x == 5) votes[blockIdx.x] = odd + (unsigned int)up;
}
extern "C" __global__ void barrier_of_some(unsigned int *out) {
    if (threadIdx.x < 40) __syncthreads();
    out[threadIdx.x] = 1;
}
extern "C" __global__ void two_barriers(unsigned int *out) {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    out[threadIdx.x] = 1;
}
extern "C" __global__ void shuffle_of_some(unsigned int *out) {
    if (threadIdx.x == 3) return;
    out[threadIdx.x] = __shfl_down_sync(~0u, threadIdx.x, 1);
}
extern "C" __global__ void index_outside(unsigned int *out, unsigned int at) {
    __shared__ unsigned int tile[64];
    tile[threadIdx.x + at] = 1;
    out[threadIdx.x] = tile[threadIdx.x];
}
extern "C" __global__ void behind_shared(unsigned int *out) {
    extern __shared__ unsigned int words[];
    words[threadIdx.x] = 1;
    out[threadIdx.x] = words[threadIdx.x];
}
extern "C" __global__ void behind_argument(unsigned int *out, unsigned int count) { out[count] = 1; }
extern "C" __global__ void reverse(unsigned int *out, unsigned int waits) {
    __shared__ unsigned int words[64];
    words[threadIdx.x] = blockIdx.x + threadIdx.x;
    if (waits) __syncthreads();
    out[64 * blockIdx.x + threadIdx.x] = words[63 - threadIdx.x];
}
struct alignas(16) Four { unsigned int words[4]; };
extern "C" __global__ void load_four(unsigned int *out, unsigned int at) {
    const Four four = *(const Four *)(out + at);
    out[0] = four.words[3];
}
extern "C" __global__ void deep_stack(unsigned int *out, unsigned int depth) {
    volatile unsigned char bytes[100000];
    bytes[depth] = 1;
    out[threadIdx.x] = bytes[depth];
}
"#;

const SOURCE: KernelSource = KernelSource {
    file: "cases.cu",
    kernels: &[
        "sum_rows",
        "count_all",
        "barrier_of_some",
        "two_barriers",
        "shuffle_of_some",
        "index_outside",
        "behind_shared",
        "behind_argument",
        "reverse",
        "load_four",
        "deep_stack",
    ],
    content: CONTENT,
};

fn device() -> Arc<dyn Device> {
    static EMULATOR: OnceLock<Emulator> = OnceLock::new();
    let compile = || Emulator::compile(&[SOURCE]).expect("the machine has a C++ compiler");
    EMULATOR.get_or_init(compile).device(64 << 20)
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Runs one launch on `out`, 256 bytes of device memory, and returns its words.
fn run(launch: impl FnOnce(Arg) -> Launch) -> Result<Vec<u32>, DeviceError> {
    let device = device();
    let stream = device.stream("test")?;
    let out = device.allocate(Place::Device, 256)?;
    let launch = launch(Arg::write(&out.all()));
    // SAFETY: the kernels write words of their thread inside 256 bytes, or the emulator stops them.
    unsafe { stream.launch(&launch) }?;
    download(&*device, &*stream, &out.all(), soon())
}

fn reason(result: Result<Vec<u32>, DeviceError>, expected_kernel: &str) -> String {
    match result {
        Err(DeviceError::Kernel { kernel, reason }) if kernel == expected_kernel => reason,
        other => panic!("expected an error of {expected_kernel}, found {other:?}"),
    }
}

#[test]
fn shuffles_barriers_and_dynamic_shared_memory_sum_rows() {
    let (device, rows, width) = (device(), 9, 1000);
    let stream = device.stream("test").unwrap();
    let values: Vec<f32> = (0..rows * width).map(|i| (i % 17) as f32).collect();
    let x = upload(&*device, &*stream, &values, soon()).unwrap();
    let out = device.allocate(Place::Device, 4 * rows).unwrap();
    let launch = Launch::new("sum_rows", rows as u32, 128)
        .shared(16)
        .arg(Arg::read(&x.all()))
        .arg(width as u32)
        .arg(Arg::write(&out.all()));
    // SAFETY: block `r` reads row `r` and writes word `r`. 16 bytes hold a sum of each of 4 warps.
    unsafe { stream.launch(&launch) }.unwrap();
    let found: Vec<f32> = download(&*device, &*stream, &out.all(), soon()).unwrap();
    let expected: Vec<f32> = values.chunks(width).map(|row| row.iter().sum()).collect();
    assert_eq!(found, expected);
}

#[test]
fn atomics_and_votes_work_across_blocks() {
    let device = device();
    let stream = device.stream("test").unwrap();
    let memory = device.allocate(Place::Pinned, 4 + 4 * 100).unwrap();
    memory.all().write(&[0; 404]).unwrap();
    let (counter, votes) = (memory.slice(0..4).unwrap(), memory.slice(4..404).unwrap());
    let launch = Launch::new("count_all", 100, 64).arg(Arg::read_write(&counter)).arg(Arg::write(&votes));
    // SAFETY: each block writes its word of `votes`.
    unsafe { stream.launch(&launch) }.unwrap();
    stream.wait(soon()).unwrap();
    let mut bytes = [0; 404];
    memory.all().read(&mut bytes).unwrap();
    let words: Vec<u32> = bytes.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect();
    assert_eq!(words[0], 6400);
    assert!(words[1..].iter().all(|&word| word == 0xAAAA_AAAA + 4), "{words:x?}");
}

#[test]
fn barriers_without_all_threads_are_errors_with_the_kernels_name() {
    let text = reason(run(|out| Launch::new("barrier_of_some", 1, 64).arg(out)), "barrier_of_some");
    assert!(text.contains("40 of 64 threads wait"), "{text}");
    let text = reason(run(|out| Launch::new("two_barriers", 1, 64).arg(out)), "two_barriers");
    assert!(text.contains("different barriers"), "{text}");
}

#[test]
fn shuffles_without_a_named_lane_are_errors() {
    let text = reason(run(|out| Launch::new("shuffle_of_some", 1, 32).arg(out)), "shuffle_of_some");
    assert!(text.contains("__shfl_sync"), "{text}");
}

#[test]
fn accesses_outside_shared_memory_are_errors() {
    assert!(run(|out| Launch::new("index_outside", 1, 64).arg(out).arg(0_u32)).is_ok());
    let text = reason(run(|out| Launch::new("index_outside", 1, 64).arg(out).arg(1_u32)), "index_outside");
    assert!(text.contains("the index 64"), "{text}");
    assert!(run(|out| Launch::new("behind_shared", 1, 64).shared(256).arg(out)).is_ok());
    let text = reason(run(|out| Launch::new("behind_shared", 1, 64).shared(252).arg(out)), "behind_shared");
    assert!(text.contains("252 bytes of dynamic shared memory"), "{text}");
}

#[test]
fn writes_behind_an_argument_are_errors() {
    assert!(run(|out| Launch::new("behind_argument", 1, 1).arg(out).arg(63_u32)).is_ok());
    let text = reason(run(|out| Launch::new("behind_argument", 1, 1).arg(out).arg(64_u32)), "behind_argument");
    assert!(text.contains("behind the 256 bytes"), "{text}");
}

#[test]
fn addresses_that_are_not_aligned_for_their_type_are_errors() {
    assert!(run(|out| Launch::new("load_four", 1, 1).arg(out).arg(4_u32)).is_ok());
    let text = reason(run(|out| Launch::new("load_four", 1, 1).arg(out).arg(6_u32)), "load_four");
    assert!(text.contains("not a multiple of 16"), "{text}");
}

#[test]
fn a_missing_barrier_shows_in_even_or_odd_blocks() {
    let device = device();
    let stream = device.stream("test").unwrap();
    let out = device.allocate(Place::Device, 512).unwrap();
    let expected: Vec<u32> = (0..2).flat_map(|block| (0..64).map(move |thread| block + 63 - thread)).collect();
    for (waits, correct) in [(1_u32, true), (0, false)] {
        let launch = Launch::new("reverse", 2, 64).arg(Arg::write(&out.all())).arg(waits);
        // SAFETY: block `b` writes 64 words from word 64 b on.
        unsafe { stream.launch(&launch) }.unwrap();
        let found: Vec<u32> = download(&*device, &*stream, &out.all(), soon()).unwrap();
        assert_eq!(found == expected, correct);
    }
}

#[test]
fn stacks_hold_large_local_arrays() {
    let words = run(|out| Launch::new("deep_stack", 1, 64).arg(out).arg(99_999_u32)).unwrap();
    assert_eq!(words, [1; 64]);
}

#[test]
fn an_error_stays_for_later_calls_and_other_streams() {
    let device = device();
    let (stream, other) = (device.stream("a").unwrap(), device.stream("b").unwrap());
    let out = device.allocate(Place::Device, 256).unwrap();
    let launch = Launch::new("barrier_of_some", 1, 64).arg(Arg::write(&out.all()));
    // SAFETY: the emulator stops the kernel.
    unsafe { stream.launch(&launch) }.unwrap();
    let error = stream.wait(soon()).unwrap_err();
    assert!(matches!(error, DeviceError::Kernel { .. }));
    assert_eq!(other.fill(&out.all(), 0), Err(error));
}

#[test]
fn launches_that_do_not_fit_their_kernel_are_refused() {
    let refused = |launch: fn(Arg) -> Launch| match run(launch) {
        Err(DeviceError::Launch { kernel, .. }) => kernel,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(|_| Launch::new("reverse", 1, 64)), "reverse");
    assert_eq!(refused(|out| Launch::new("reverse", 1, 64).arg(out).arg(1.0_f32)), "reverse");
    assert_eq!(refused(|out| Launch::new("reverse", 1, 64).arg(out).arg(1_i32)), "reverse");
    assert_eq!(refused(|out| Launch::new("reverse", 0, 64).arg(out).arg(1_u32)), "reverse");
    assert_eq!(refused(|out| Launch::new("reverse", 1, 1025).arg(out).arg(1_u32)), "reverse");
    assert_eq!(refused(|out| Launch::new("sum_rows", 1, 32).arg(out.clone()).arg(1_u32).arg(out)), "sum_rows");
    let unknown = run(|out| Launch::new("no_such_kernel", 1, 1).arg(out));
    assert_eq!(unknown, Err(DeviceError::NoKernel("no_such_kernel".to_string())));
}

#[test]
fn races_between_streams_are_reported_and_events_prevent_them() {
    let device = device();
    let (load, compute) = (device.stream("load").unwrap(), device.stream("compute").unwrap());
    let out = device.allocate(Place::Device, 512).unwrap();
    let launch = Launch::new("reverse", 2, 64).arg(Arg::write(&out.all())).arg(1_u32);
    load.fill(&out.all(), 0).unwrap();
    // SAFETY: block `b` writes 64 words from word 64 b on.
    let racing = unsafe { compute.launch(&launch) }.unwrap_err().to_string();
    assert!(
        racing.contains("a fill on stream load") && racing.contains("kernel reverse on stream compute"),
        "{racing}"
    );
    let loaded = load.record().unwrap();
    compute.wait_for(&*loaded).unwrap();
    // SAFETY: as above.
    unsafe { compute.launch(&launch) }.unwrap();
    assert!(load.fill(&out.slice(508..512).unwrap(), 1).is_err());
    let computed = compute.record().unwrap();
    computed.wait(soon()).unwrap();
    assert!(computed.since(&*loaded).unwrap() < Duration::from_secs(60));
    load.fill(&out.slice(508..512).unwrap(), 1).unwrap();
    load.wait(soon()).unwrap();
}

#[test]
fn declared_ranges_of_an_argument_do_not_race_with_others() {
    let device = device();
    let (a, b) = (device.stream("a").unwrap(), device.stream("b").unwrap());
    let out = device.allocate(Place::Device, 512).unwrap();
    let part = |range| Launch::new("reverse", 1, 64).arg(Arg::write(&out.all()).within(vec![range])).arg(1_u32);
    // SAFETY: one block writes the first 256 bytes.
    unsafe { a.launch(&part(0..256)) }.unwrap();
    b.fill(&out.slice(256..512).unwrap(), 1).unwrap();
    assert!(b.fill(&out.slice(255..256).unwrap(), 1).is_err());
    a.wait(soon()).unwrap();
    b.wait(soon()).unwrap();
}

#[test]
fn graphs_replay_their_operations_and_keep_their_memory() {
    let device = device();
    let stream = device.stream("graph").unwrap();
    let pinned = device.allocate(Place::Pinned, 256).unwrap();
    let graph = {
        let out = device.allocate(Place::Device, 256).unwrap();
        stream.begin_graph().unwrap();
        assert!(matches!(stream.record(), Err(DeviceError::Recording(_))));
        let launch = Launch::new("reverse", 1, 64).arg(Arg::write(&out.all())).arg(1_u32);
        // SAFETY: one block writes 256 bytes.
        unsafe { stream.launch(&launch) }.unwrap();
        stream.copy(&pinned.all(), &out.all()).unwrap();
        stream.end_graph().unwrap()
    };
    assert_eq!(graph.operations(), 2);
    for _ in 0..3 {
        pinned.all().write(&[0; 256]).unwrap();
        stream.replay(&*graph).unwrap();
        stream.wait(soon()).unwrap();
        let mut bytes = [0; 256];
        pinned.all().read(&mut bytes).unwrap();
        assert_eq!((bytes[0], bytes[252]), (63, 0));
    }
    assert!(matches!(stream.end_graph(), Err(DeviceError::NotRecording)));
}

#[test]
fn memory_returns_to_the_device_after_its_last_use() {
    let device = device();
    let stream = device.stream("test").unwrap();
    let free = device.free_bytes().unwrap();
    let memory = device.allocate(Place::Device, 32 << 20).unwrap();
    assert!(matches!(device.allocate(Place::Device, 40 << 20), Err(DeviceError::OutOfMemory { .. })));
    for byte in 0..20 {
        stream.fill(&memory.all(), byte).unwrap();
    }
    drop(memory);
    stream.wait(soon()).unwrap();
    assert_eq!(device.free_bytes().unwrap(), free);
    assert!(device.allocate(Place::Device, 40 << 20).is_ok());
}

#[test]
fn the_host_cannot_access_pinned_memory_that_a_stream_uses() {
    let device = host::open(256 << 20);
    let stream = device.stream("test").unwrap();
    let memory = device.allocate(Place::Pinned, 64 << 20).unwrap();
    let (low, high) = (memory.slice(0..32 << 20).unwrap(), memory.slice(32 << 20..64 << 20).unwrap());
    for _ in 0..50 {
        stream.copy(&high, &low).unwrap();
    }
    assert_eq!(memory.slice(0..1).unwrap().write(&[1]), Err(DeviceError::InUse));
    stream.wait(soon()).unwrap();
    memory.slice(0..1).unwrap().write(&[1]).unwrap();
    assert!(stream.copy(&low, &memory.slice(1..(32 << 20) + 1).unwrap()).is_err());
    let device_memory = device.allocate(Place::Device, 8).unwrap();
    assert_eq!(device_memory.all().write(&[0; 8]), Err(DeviceError::NotHostMemory));
}

#[test]
fn the_host_device_copies_and_runs_no_kernels() {
    let device = host::open(1 << 20);
    let stream = device.stream("test").unwrap();
    let values: Vec<u32> = (0..1000).collect();
    let memory = upload(&*device, &*stream, &values, soon()).unwrap();
    let found: Vec<u32> = download(&*device, &*stream, &memory.all(), soon()).unwrap();
    assert_eq!(found, values);
    let launch = Launch::new("reverse", 1, 64).arg(Arg::write(&memory.all())).arg(1_u32);
    // SAFETY: the device refuses the launch.
    assert_eq!(unsafe { stream.launch(&launch) }, Err(DeviceError::RunsNoKernels("host")));
}

#[test]
fn a_wait_ends_at_its_deadline() {
    let device = host::open(1 << 30);
    let stream = device.stream("slow").unwrap();
    let memory = device.allocate(Place::Device, 128 << 20).unwrap();
    let ends_early = || {
        for byte in 0..4 {
            stream.fill(&memory.all(), byte).unwrap();
        }
        let result = stream.wait(Instant::now() + Duration::from_millis(1));
        assert!(matches!(result, Ok(()) | Err(DeviceError::Deadline { .. })), "{result:?}");
        stream.wait(soon()).unwrap();
        result.is_err()
    };
    // While this thread is stopped, the fills may end.
    assert!((0..20).any(|_| ends_early()), "each wait has lasted until the end of the fills");
}

#[test]
fn rejected_sources_are_errors_with_the_compilers_message() {
    let source = KernelSource { file: "broken.cu", kernels: &[], content: "int f() { return no_such_name; }\n" };
    let error = Emulator::compile(&[source]).unwrap_err().to_string();
    assert!(error.contains("broken.cu") && error.contains("no_such_name"), "{error}");
}

#[test]
fn streams_are_shared_by_threads() {
    let device = host::open(1 << 20);
    let stream = device.stream("test").unwrap();
    let memory = device.allocate(Place::Device, 64).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..100).for_each(|byte| stream.fill(&memory.all(), byte).unwrap()));
        }
    });
    stream.wait(soon()).unwrap();
}

/// Prints the time of a block with 256 threads, 5 shuffles and a barrier.
#[test]
#[ignore = "a measurement, for docs/decisions/0074-fibers.md"]
fn measure_blocks() {
    let (device, rows, width) = (device(), 4000_usize, 1000_usize);
    let stream = device.stream("test").unwrap();
    let x = upload(&*device, &*stream, &vec![1.0_f32; rows * width], soon()).unwrap();
    let out = device.allocate(Place::Device, 4 * rows).unwrap();
    let launch = Launch::new("sum_rows", rows as u32, 256)
        .shared(32)
        .arg(Arg::read(&x.all()))
        .arg(width as u32)
        .arg(Arg::write(&out.all()));
    let start = stream.record().unwrap();
    // SAFETY: block `r` reads row `r` and writes word `r`. 32 bytes hold a sum of each of 8 warps.
    unsafe { stream.launch(&launch) }.unwrap();
    let end = stream.record().unwrap();
    end.wait(soon()).unwrap();
    let micros = end.since(&*start).unwrap().as_secs_f64() * 1e6;
    let threads = device.info().multiprocessors;
    println!("{:.1} µs per block, {threads} host threads", micros * f64::from(threads) / rows as f64);
}
