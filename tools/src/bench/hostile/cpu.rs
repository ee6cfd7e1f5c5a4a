//! Processor time of the servers and the attackers, and a load without attacks that takes as much
//! time as the attackers' own threads.
//!
//! The attackers share the processors with the servers. Honest clients beside that load show the
//! price of sharing alone.

use super::super::overload::{Priority, TICKS_PER_SECOND};
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

/// Interval of the recorded processor times. Shorter than the work of one attack with a large body.
const SLOT: Duration = Duration::from_millis(20);

/// Processor time of a process and of its children, in seconds.
pub fn seconds(process: u32) -> Result<f64> {
    let path = format!("/proc/{process}/stat");
    let stat = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    // The name of the program may contain blanks. It is in brackets, before all numbers.
    let (_, fields) = stat.rsplit_once(')').with_context(|| format!("{path} has another form"))?;
    // User and system time, of the process and of its children that have ended.
    let ticks = fields.split_whitespace().skip(11).take(4).map(|ticks| ticks.parse::<f64>());
    let ticks: f64 = ticks.sum::<Result<f64, _>>().with_context(|| format!("{path} has another form"))?;
    Ok(ticks / TICKS_PER_SECOND)
}

/// Time for which each thread of a process has waited for a processor, by its number.
pub type Waits = BTreeMap<OsString, Duration>;

pub fn waits(process: u32) -> Result<Waits> {
    let tasks = format!("/proc/{process}/task");
    let mut waits = Waits::new();
    for task in std::fs::read_dir(&tasks).with_context(|| format!("cannot read {tasks}"))? {
        let task = task?;
        waits.insert(task.file_name(), schedstat(&task.path().join("schedstat"), 1));
    }
    Ok(waits)
}

/// Time for which the threads waited between two looks, in seconds. Lacks that of threads that
/// ended meanwhile.
pub fn waited(before: &Waits, after: &Waits) -> f64 {
    let since = |(thread, wait): (&OsString, &Duration)| {
        // Saturates: a new thread may have the number of one that ended.
        wait.saturating_sub(before.get(thread).copied().unwrap_or_default()).as_secs_f64()
    };
    after.iter().map(since).sum()
}

/// Threads of this process with one name.
#[derive(Debug, Clone)]
pub struct Threads {
    /// File with the processor time of each thread, in nanoseconds.
    paths: Vec<PathBuf>,
}

impl Threads {
    pub fn named(name: &str) -> Result<Threads> {
        let mut paths = Vec::new();
        for task in std::fs::read_dir("/proc/self/task")? {
            let task = task?.path();
            // The thread may have ended by now.
            if std::fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim_end() == name) {
                paths.push(task.join("schedstat"));
            }
        }
        Ok(Threads { paths })
    }

    /// Processor time of each thread since its start.
    fn times(&self) -> Vec<Duration> {
        self.paths.iter().map(|path| time_in(path)).collect()
    }

    /// Records the threads' processor time until `stop`.
    pub fn record(self, stop: CancellationToken) -> AbortOnDropHandle<Recording> {
        AbortOnDropHandle::new(tokio::spawn(async move {
            let mut before = self.times();
            let mut slots = vec![Vec::new(); before.len()];
            let begin = tokio::time::Instant::now();
            for slot in 1.. {
                if stop.run_until_cancelled(tokio::time::sleep_until(begin + SLOT * slot)).await.is_none() {
                    break;
                }
                let now = self.times();
                for ((slots, now), before) in slots.iter_mut().zip(&now).zip(before) {
                    slots.push(now.saturating_sub(before));
                }
                before = now;
            }
            Recording { slots }
        }))
    }
}

/// Processor time of several threads, by thread and slot.
#[derive(Debug)]
pub struct Recording {
    slots: Vec<Vec<Duration>>,
}

impl Recording {
    pub fn seconds(&self) -> f64 {
        self.slots.iter().flatten().map(Duration::as_secs_f64).sum()
    }

    /// Takes the recorded processor time again, on as many threads, until `stop`.
    pub fn replay(&self, priority: Priority, stop: &CancellationToken) -> Result<Replay> {
        let thread = |(number, slots): (usize, &Vec<Duration>)| {
            let (slots, stop) = (slots.clone(), stop.clone());
            let name = format!("replay-{number}");
            Ok(std::thread::Builder::new().name(name).spawn(move || burn(&slots, priority, &stop))?)
        };
        Ok(Replay { threads: self.slots.iter().enumerate().map(thread).collect::<Result<_>>()? })
    }
}

/// Threads that repeat a [`Recording`].
pub struct Replay {
    threads: Vec<std::thread::JoinHandle<f64>>,
}

impl Replay {
    /// Waits for the threads' end, which needs their stop. Returns the processor time that they
    /// took, in seconds.
    pub fn join(self) -> f64 {
        self.threads.into_iter().filter_map(|thread| thread.join().ok()).sum()
    }
}

/// Takes the processor time of each slot, as soon as possible from its begin. Returns the time
/// taken in seconds.
fn burn(slots: &[Duration], priority: Priority, stop: &CancellationToken) -> f64 {
    priority.apply();
    let own = Path::new("/proc/thread-self/schedstat");
    let begin = Instant::now();
    let first = time_in(own);
    let mut goal = first;
    for (slot, time) in (1u32..).zip(slots) {
        goal += *time;
        let end = begin + SLOT * slot;
        // Exact after a sleep only. A thread that got no processor owes the time to the next slot,
        // as an attacker does.
        let stop_at = end.min(Instant::now() + goal.saturating_sub(time_in(own)));
        while Instant::now() < stop_at {
            std::hint::spin_loop();
        }
        std::thread::sleep(end.saturating_duration_since(Instant::now()));
        if stop.is_cancelled() {
            break;
        }
    }
    (time_in(own) - first).as_secs_f64()
}

/// Processor time in a `schedstat` file. Zero if its thread has ended.
fn time_in(path: &Path) -> Duration {
    schedstat(path, 0)
}

/// One of the two times in a `schedstat` file: on a processor, and waiting for one. Zero if its
/// thread has ended. The format is in the kernel's `Documentation/scheduler/sched-stats.rst`.
fn schedstat(path: &Path, field: usize) -> Duration {
    let stat = std::fs::read_to_string(path).unwrap_or_default();
    let nanoseconds = stat.split(' ').nth(field).and_then(|number| number.parse().ok());
    nanoseconds.map_or(Duration::ZERO, Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replay_takes_the_recorded_processor_time() {
        let recording = Recording { slots: vec![vec![Duration::from_millis(10); 5], vec![Duration::ZERO; 5]] };
        assert!((recording.seconds() - 0.05).abs() < 1e-9);
        let taken = recording.replay(Priority::Nice(0), &CancellationToken::new()).unwrap().join();
        // A busy machine may give it less, but a thread never takes much more.
        assert!(taken < 0.06, "{taken}");
        assert!(taken > 0.0, "{taken}");
    }

    #[test]
    fn waits_between_two_looks_are_those_of_all_threads_of_the_second() {
        let ms = Duration::from_millis;
        let waits =
            |times: &[(&str, u64)]| -> Waits { times.iter().map(|&(name, time)| (name.into(), ms(time))).collect() };
        let before = waits(&[("1", 100), ("2", 200), ("3", 900)]);
        // Thread 2 has ended. Thread 3 has, too, and another one has its number.
        let after = waits(&[("1", 150), ("3", 40), ("4", 30)]);
        assert!((waited(&before, &after) - 0.08).abs() < 1e-9);
        let process = std::process::id();
        let of_this = super::waits(process).unwrap();
        assert!(of_this.contains_key(std::ffi::OsStr::new(&process.to_string())), "the main thread");
    }

    #[tokio::test]
    async fn recording_has_the_processor_time_of_the_named_threads_only() {
        let (stop, end) = (CancellationToken::new(), CancellationToken::new());
        let begun = std::sync::Arc::new(std::sync::Barrier::new(3));
        let spawn = |name: &str, milliseconds| {
            let (begun, end) = (begun.clone(), end.clone());
            let slots = vec![Duration::from_millis(milliseconds); 5];
            let thread = move || {
                begun.wait();
                burn(&slots, Priority::Nice(0), &CancellationToken::new());
                while !end.is_cancelled() {
                    std::thread::sleep(Duration::from_millis(1));
                }
            };
            std::thread::Builder::new().name(name.into()).spawn(thread).unwrap()
        };
        let threads = [spawn("recorded", 2), spawn("other", 20)];
        begun.wait();
        let recorded = Threads::named("recorded").unwrap();
        assert_eq!(recorded.paths.len(), 1);
        let recording = recorded.record(stop.clone());
        tokio::time::sleep(SLOT * 8).await;
        stop.cancel();
        let seconds = recording.await.unwrap().seconds();
        end.cancel();
        for thread in threads {
            thread.join().unwrap();
        }
        // The other thread takes 100 ms.
        assert!(seconds < 0.05, "{seconds}");
    }
}
