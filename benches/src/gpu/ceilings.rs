//! Rates that bound all others: memory of the device, and arithmetic from registers.

use crate::bench::{Bench, Times};
use crate::check::Verified;
use crate::report::{Figure, Rate, Report};
use crate::sizes::Sizes;
use anyhow::Result;
use larder_kernels::device::{Arg, Launch, Slice};

pub const MEMORY: &str = "copy inside the device, read and written bytes";
pub const FMA: &str = "f32 fma from registers";
pub const MMA: &str = "bf16 mma from registers";

const THREADS: u32 = 256;
const WARP: u32 = 32;
const CHAINS: u32 = 8;
/// Blocks per multiprocessor. 1,024 threads hide the latency of the instructions.
const BLOCKS: u32 = 4;
const FACTOR: f32 = 0.75;
const ADDEND: f32 = 1.25;
/// Operations of one matrix instruction: a product of 16 × 16 and 16 × 8 elements.
const MMA_OPERATIONS: f64 = 4096.0;
/// Steps of the compared launch.
const CHECKED_STEPS: u32 = 7;

#[derive(Debug, Clone, Copy)]
pub struct Ceilings {
    /// Bytes read and written by a copy inside the device.
    pub memory: Rate,
    /// Fused multiply-additions of f32, two operations each.
    pub fma: Rate,
    /// Matrix products of bf16 by the warp instruction `mma`. Hopper has a faster one for groups of
    /// warps, so its matrix rate is higher.
    pub mma: Rate,
}

/// Measures and reports the ceilings.
pub fn measure(bench: &Bench, sizes: &Sizes, report: &mut Report) -> Result<Ceilings> {
    let (verified, times) = copy(bench, sizes.copy_bytes)?;
    let memory = Rate::bytes(2 * sizes.copy_bytes, &times);
    report.figure(verified, &Figure::new(MEMORY, memory))?;
    let blocks = BLOCKS * bench.multiprocessors();
    let threads = blocks * THREADS;
    let out = bench.allocate(4 * threads as usize)?;
    let steps = sizes.rate_steps;

    launch_fma(bench, blocks, CHECKED_STEPS, &out)?;
    let expected: Vec<f32> = (0..threads).map(|thread| fma_total(thread % THREADS, CHECKED_STEPS)).collect();
    let verified = bench.checker.same(FMA, &bench.download::<f32>(&out)?, &expected)?;
    let times = bench.device_time(&|| launch_fma(bench, blocks, steps, &out))?;
    let fma = Rate::operations(2.0 * f64::from(CHAINS) * f64::from(steps) * f64::from(threads), &times);
    report.figure(verified, &Figure::new(FMA, fma).blocks(blocks))?;

    launch_mma(bench, blocks, CHECKED_STEPS, &out)?;
    let expected = vec![(4 * CHAINS * CHECKED_STEPS) as f32; threads as usize];
    let verified = bench.checker.same(MMA, &bench.download::<f32>(&out)?, &expected)?;
    let times = bench.device_time(&|| launch_mma(bench, blocks, steps, &out))?;
    let instructions = f64::from(CHAINS) * f64::from(steps) * f64::from(threads / WARP);
    let mma = Rate::operations(MMA_OPERATIONS * instructions, &times);
    report.figure(verified, &Figure::new(MMA, mma).blocks(blocks))?;
    Ok(Ceilings { memory, fma, mma })
}

fn copy(bench: &Bench, bytes: usize) -> Result<(Verified, Times)> {
    let tile: Vec<u32> = (0..64 << 10).collect();
    let (source, target) = (bench.tiled(bytes, &tile)?, bench.allocate(bytes)?);
    let times = bench.device_time(&|| Ok(bench.stream.copy(&target, &source)?))?;
    let end = size_of_val(&tile[..]).min(bytes);
    let found: Vec<u32> = bench.download(&target.slice(0..end)?)?;
    let verified = bench.checker.same(MEMORY, &found, &tile[..found.len()])?;
    Ok((verified, times))
}

fn launch_fma(bench: &Bench, blocks: u32, steps: u32, out: &Slice) -> Result<()> {
    let launch = Launch::new("rate_fma_f32", blocks, THREADS).arg(steps).arg(FACTOR).arg(ADDEND).arg(Arg::write(out));
    // SAFETY: the arguments follow the kernel's parameters. `out` holds an f32 per thread.
    Ok(unsafe { bench.stream.launch(&launch) }?)
}

fn launch_mma(bench: &Bench, blocks: u32, steps: u32, out: &Slice) -> Result<()> {
    let launch = Launch::new("rate_mma_bf16", blocks, THREADS).arg(steps).arg(Arg::write(out));
    // SAFETY: as for `launch_fma`.
    Ok(unsafe { bench.stream.launch(&launch) }?)
}

/// Result of `rate_fma_f32` for a thread of a block.
fn fma_total(thread: u32, steps: u32) -> f32 {
    let end = |start: u32| (0..steps).fold(start as f32, |sum, _| sum.mul_add(FACTOR, ADDEND));
    (0..CHAINS).fold(0.0, |total, chain| total + end(thread + chain))
}
