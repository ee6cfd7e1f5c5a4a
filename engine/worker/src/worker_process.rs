//! Processes that run [`larder_model::template_worker`], as their parent sees them.
//!
//! Invariants:
//! - Dropping a [`WorkerProcess`] kills the process.
//! - An exchange that was interrupted leaves half a frame in the socket. The caller drops the
//!   worker then.
//! - A job that takes [`FULL_PRIORITY_TIME`] of processor time goes on at a lower priority. The
//!   worker keeps it: only a privileged process could raise the priority.

use larder_model::template_worker::{Answer, BEGUN, frame_header, frame_len};
use rustix::process::{Pid, getpriority_process, setpriority_process};
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};

/// Processor time of a job at full priority. Templates and constraints in use take milliseconds.
pub const FULL_PRIORITY_TIME: Duration = Duration::from_millis(100);
/// Nice value of long work. On a busy machine it gets about a tenth of the time of a thread with
/// full priority, so an honest request still ends within its limit.
pub const NICENESS: i32 = 10;
/// Size of the buffer for an answer that is read and dropped, in bytes.
const DISCARD_BYTES: usize = 64 << 10;

/// Command that runs [`larder_model::template_worker::run`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerCommand {
    pub program: PathBuf,
    pub arguments: Vec<String>,
}

impl Default for WorkerCommand {
    /// This program, with the hidden command of `larder`. The link in /proc names the running
    /// program even after an update has replaced its file.
    fn default() -> Self {
        Self { program: "/proc/self/exe".into(), arguments: vec!["template-worker".into()] }
    }
}

/// A worker process and the socket to it.
#[derive(Debug)]
pub struct WorkerProcess {
    socket: UnixStream,
    child: Child,
    gives_way: bool,
}

/// Failure to receive the answer to a job.
#[derive(Debug)]
pub enum AnswerError {
    /// The worker ended during the job, or its answer is malformed.
    Failed,
    /// The job has taken [`FULL_PRIORITY_TIME`], and its caller does not let it go on.
    Stopped,
}

impl From<io::Error> for AnswerError {
    fn from(_: io::Error) -> Self {
        Self::Failed
    }
}

impl WorkerProcess {
    pub fn spawn(command: &WorkerCommand) -> io::Result<WorkerProcess> {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let child = Command::new(&command.program)
            .args(&command.arguments)
            .env_clear()
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C in a terminal must not end it before the jobs that it runs.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        Ok(WorkerProcess { socket: UnixStream::from_std(ours)?, child, gives_way: false })
    }

    /// Returns `true` if the worker has a lower priority, for good.
    pub fn gives_way(&self) -> bool {
        self.gives_way
    }

    /// Sends a request and waits until the worker has received it. A failed write alone would not
    /// tell whether the worker began: a process that ends closes its socket late.
    pub async fn begin(&mut self, request: &[u8]) -> io::Result<()> {
        self.socket.write_all(&frame_header(request.len())?).await?;
        self.socket.write_all(request).await?;
        match self.socket.read_u8().await? {
            BEGUN => Ok(()),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Waits for an answer of at most `bytes_max` bytes and returns its length. Lowers the priority
    /// of a worker that takes long for it, if `may_go_on` returns `true` then.
    pub async fn answer_len(
        &mut self,
        bytes_max: usize,
        mut may_go_on: impl FnMut() -> bool,
    ) -> Result<usize, AnswerError> {
        let process = self.child.id().ok_or(AnswerError::Failed)?;
        let before = processor_time(process);
        let mut header = [0; 4];
        let read = self.socket.read_exact(&mut header);
        tokio::pin!(read);
        loop {
            if let Ok(result) = tokio::time::timeout(FULL_PRIORITY_TIME, &mut read).await {
                let received = result.map(|_| header)?;
                return Ok(frame_len(received, bytes_max)?);
            }
            // By the wall's clock a busy machine would slow honest requests, too.
            let taken = processor_time(process).saturating_sub(before);
            if !self.gives_way && taken >= FULL_PRIORITY_TIME {
                if !may_go_on() {
                    return Err(AnswerError::Stopped);
                }
                self.gives_way = true;
                threads(process).for_each(|thread| give_way(Some(thread)));
            }
        }
    }

    /// Reads an answer of `bytes` bytes.
    pub async fn answer(&mut self, bytes: usize) -> io::Result<Answer> {
        let mut answer = vec![0; bytes];
        self.socket.read_exact(&mut answer).await?;
        Answer::decode(answer)
    }

    /// Reads an answer of `bytes` bytes and drops it, so that the worker can run the next job.
    /// Returns `true` if the worker asks to be replaced.
    pub async fn discard(&mut self, bytes: usize) -> io::Result<bool> {
        let mut piece = vec![0; bytes.min(DISCARD_BYTES)];
        let mut left = bytes;
        let mut is_worn = None;
        while left > 0 {
            let size = left.min(DISCARD_BYTES);
            self.socket.read_exact(&mut piece[..size]).await?;
            is_worn = is_worn.or_else(|| Answer::is_worn_in(&piece));
            left -= size;
        }
        Ok(is_worn.unwrap_or(true))
    }
}

/// Lowers the priority of a thread for good: of this one, or of one of another process. Never
/// raises it.
pub fn give_way(thread: Option<Pid>) {
    static IS_REPORTED: AtomicBool = AtomicBool::new(false);
    let current = getpriority_process(thread).unwrap_or(0);
    // The work goes on even if the system forbids it.
    if let Err(error) = setpriority_process(thread, NICENESS.max(current))
        && !IS_REPORTED.swap(true, Ordering::Relaxed)
    {
        tracing::debug!(%error, "long work keeps its priority");
    }
}

/// Threads of a process. None once it has ended.
fn threads(process: u32) -> impl Iterator<Item = Pid> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten();
    tasks.filter_map(|task| Pid::from_raw(task.ok()?.file_name().to_str()?.parse().ok()?))
}

fn processor_time(process: u32) -> Duration {
    let time = |thread: Pid| {
        let thread = thread.as_raw_nonzero();
        let stat = std::fs::read_to_string(format!("/proc/{process}/task/{thread}/schedstat")).ok()?;
        stat.split(' ').next()?.parse().ok().map(Duration::from_nanos)
    };
    threads(process).filter_map(time).sum()
}
