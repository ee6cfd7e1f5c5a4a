//! Time and CPU time of a transfer, and the report of medians.

use std::time::{Duration, Instant};

/// Measures the time and the CPU time of the process since its start.
pub struct Meter {
    start: Instant,
    cpu: Duration,
}

impl Meter {
    pub fn start() -> Meter {
        Meter { start: Instant::now(), cpu: processor_time() }
    }

    /// Returns GB/s and CPU seconds per GB, for `bytes` that were moved.
    pub fn stop(self, bytes: usize) -> (f64, f64) {
        let took = self.start.elapsed();
        let used = processor_time() - self.cpu;
        let gigabytes = bytes as f64 / 1e9;
        (gigabytes / took.as_secs_f64(), used.as_secs_f64() / gigabytes)
    }
}

/// Runs `work`, which moves `bytes`. Returns GB/s and CPU seconds of the process per GB.
pub fn measured(bytes: usize, work: impl FnOnce()) -> (f64, f64) {
    let meter = Meter::start();
    work();
    meter.stop(bytes)
}

/// Prints the medians of `found`. The ratios are medians over rounds, each to `base` of its round.
pub fn report(size: usize, name: &str, found: &[(f64, f64)], base: &[(f64, f64)]) {
    let speed = median(found.iter().map(|found| found.0));
    let cpu = median(found.iter().map(|found| found.1));
    let speed_ratio = median(found.iter().zip(base).map(|(found, base)| found.0 / base.0));
    let cpu_ratio = median(found.iter().zip(base).map(|(found, base)| found.1 / base.1));
    println!(
        "{:>5} KiB {name:<18} {speed:.2} GB/s  {cpu:.4} CPU-s/GB  speed {speed_ratio:.3}  CPU {cpu_ratio:.3}",
        size >> 10
    );
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer refers to a live timespec for the duration of the call.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
