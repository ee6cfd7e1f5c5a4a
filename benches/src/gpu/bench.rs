//! The device under measurement: memory, and times of its operations.

use crate::check::Checker;
use anyhow::Result;
use bytemuck::{NoUninit, Pod};
use larder_kernels::device::{self, Device, Memory, Place, Slice, Stream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest wait for the device.
const DEADLINE: Duration = Duration::from_secs(120);
/// Length of a fill that keeps the device busy while the host submits the next operation.
const SPACER_BYTES: usize = 256 << 20;
const SPACERS_MAX: u32 = 256;
/// Time beyond twice the submission that fills must cover.
const SPACER_MARGIN: Duration = Duration::from_micros(200);

pub fn soon() -> Instant {
    Instant::now() + DEADLINE
}

/// Times of equal work, sorted. There is at least one, and none is zero.
#[derive(Debug, Clone)]
pub struct Times(Vec<Duration>);

impl Times {
    pub fn new(mut times: Vec<Duration>) -> Times {
        times.iter_mut().for_each(|time| *time = (*time).max(Duration::from_nanos(1)));
        times.sort_unstable();
        if times.is_empty() {
            times.push(Duration::MAX);
        }
        Times(times)
    }

    pub fn median(&self) -> Duration {
        self.0[self.0.len() / 2]
    }

    pub fn fastest(&self) -> Duration {
        self.0[0]
    }

    pub fn slowest(&self) -> Duration {
        self.0[self.0.len() - 1]
    }
}

/// Memory whose fill takes a known time.
#[derive(Debug)]
struct Spacer {
    memory: Memory,
    time: Duration,
}

/// A device with one stream.
#[derive(Debug)]
pub struct Bench {
    pub device: Arc<dyn Device>,
    pub stream: Arc<dyn Stream>,
    pub checker: Checker,
    pub rounds: usize,
    /// For a GPU, which runs while the host submits.
    spacer: Option<Spacer>,
}

impl Bench {
    pub fn new(device: Arc<dyn Device>, rounds: usize, checker: Checker) -> Result<Bench> {
        let stream = device.stream("bench")?;
        let mut bench = Bench { device, stream, checker, rounds, spacer: None };
        if bench.device.info().kind == "cuda" {
            let memory = bench.device.allocate(Place::Device, SPACER_BYTES)?;
            let times = bench.submission_and_device_time(&|| Ok(bench.stream.fill(&memory.all(), 0)?))?;
            bench.spacer = Some(Spacer { memory, time: times.fastest() });
        }
        Ok(bench)
    }

    pub fn multiprocessors(&self) -> u32 {
        self.device.info().multiprocessors
    }

    pub fn wait(&self) -> Result<()> {
        Ok(self.stream.wait(soon())?)
    }

    pub fn allocate(&self, bytes: usize) -> Result<Slice> {
        Ok(self.device.allocate(Place::Device, bytes)?.slice(0..bytes)?)
    }

    /// Copies `values` to new device memory of the same length.
    pub fn upload<T: NoUninit>(&self, values: &[T]) -> Result<Slice> {
        let memory = device::upload(&*self.device, &*self.stream, values, soon())?;
        Ok(memory.slice(0..size_of_val(values))?)
    }

    pub fn download<T: Pod>(&self, slice: &Slice) -> Result<Vec<T>> {
        Ok(device::download(&*self.device, &*self.stream, slice, soon())?)
    }

    /// Allocates `bytes` of device memory with copies of `tile`, one after the other.
    pub fn tiled<T: NoUninit>(&self, bytes: usize, tile: &[T]) -> Result<Slice> {
        let memory = self.allocate(bytes)?;
        let source = self.upload(tile)?;
        for start in (0..bytes).step_by(source.bytes().max(1)) {
            let length = source.bytes().min(bytes - start);
            self.stream.copy(&memory.slice(start..start + length)?, &source.slice(0..length)?)?;
        }
        self.wait()?;
        Ok(memory)
    }

    /// Measures `work` on the device alone. The host submits it while the device is still busy with
    /// a fill.
    pub fn device_time(&self, work: &dyn Fn() -> Result<()>) -> Result<Times> {
        self.measure(work, true)
    }

    /// Measures `work` from its submission by the host to its end on the device.
    pub fn submission_and_device_time(&self, work: &dyn Fn() -> Result<()>) -> Result<Times> {
        self.measure(work, false)
    }

    fn measure(&self, work: &dyn Fn() -> Result<()>, behind_fill: bool) -> Result<Times> {
        // The first call may load code, so the second tells the time of the submission.
        let mut submission = Duration::ZERO;
        for _ in 0..2 {
            let start = Instant::now();
            work()?;
            submission = start.elapsed();
            self.wait()?;
        }
        let mut times = Vec::with_capacity(self.rounds);
        for _ in 0..self.rounds {
            if behind_fill {
                self.keep_busy(2 * submission + SPACER_MARGIN)?;
            }
            let start = self.stream.record()?;
            work()?;
            let end = self.stream.record()?;
            end.wait(soon())?;
            times.push(end.since(&*start)?);
        }
        Ok(Times::new(times))
    }

    fn keep_busy(&self, time: Duration) -> Result<()> {
        let Some(spacer) = &self.spacer else { return Ok(()) };
        let fills = (time.as_secs_f64() / spacer.time.as_secs_f64()).ceil() as u32;
        for _ in 0..fills.min(SPACERS_MAX) {
            self.stream.fill(&spacer.memory.all(), 0)?;
        }
        Ok(())
    }
}

/// Random numbers of a fixed sequence (xorshift64*, <https://arxiv.org/abs/1402.6246>).
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// `bytes` bytes, rounded up to a multiple of 8.
    pub fn bytes(&mut self, bytes: usize) -> Vec<u8> {
        (0..bytes.div_ceil(8)).flat_map(|_| self.bits().to_le_bytes()).collect()
    }

    /// Multiples of 1/128 from −1 to 1, without 1. Each is exact in bf16.
    pub fn numbers(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| ((self.bits() >> 56) as f32 - 128.0) / 128.0).collect()
    }

    pub fn shuffle<T>(&mut self, values: &mut [T]) {
        for end in (1..values.len()).rev() {
            values.swap(end, (self.bits() >> 33) as usize % (end + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn median_lies_between_the_extremes() {
        let times = Times::new([30, 10, 20].map(Duration::from_millis).to_vec());
        let found = [times.fastest(), times.median(), times.slowest()].map(|time| time.as_millis());
        assert_eq!(found, [10, 20, 30]);
    }

    #[test]
    fn numbers_are_exact_in_bf16() {
        let numbers = Random::new(1).numbers(1000);
        assert!(numbers.iter().all(|&x| bf16::from_f32(x).to_f32() == x && (-1.0..1.0).contains(&x)));
        assert!(numbers.iter().any(|&x| x < 0.0) && numbers.iter().any(|&x| x > 0.5));
    }
}
