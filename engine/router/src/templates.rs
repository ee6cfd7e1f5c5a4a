//! Rendering of chat templates in worker processes.
//!
//! A template comes with the model folder or from an engine, so it is untrusted code. One
//! expression of it can take any time and memory. Only a process can be stopped then
//! (docs/decisions/0022).
//!
//! Invariants:
//!
//! - Each model has at most one worker, which runs one rendering at a time. A template delays no
//!   other model's chats, except while [`RENDERINGS_MAX`] templates loop at once.
//! - A rendering ends after [`RENDER_TIME_MAX`] or at the request's deadline. The worker is killed
//!   then, and the next rendering starts another one.
//! - A rendering that takes [`FULL_PRIORITY_TIME`] of processor time goes on at a lower priority.
//!   Its worker is not used again: only a privileged process could raise the priority.
//! - A worker that was interrupted is never used again: its socket may hold half a frame.
//! - Renderings that have become slow hold half of the places at most. The next one that does is
//!   stopped, and begins anew when one of these places is free. For [`SLOW_FOR`] after a slow
//!   rendering, a model needs such a place to begin. Renderings wait for one at most
//!   [`SLOW_WAIT_MAX`], and hold no other place meanwhile. So looping templates of many models do
//!   not keep the chats of others waiting.
//! - Texts of templates take at most [`TEXTS_BYTES_MAX`] until they are tokenised. Those of at most
//!   [`TEXT_BYTES_FREE`] are not counted. A short conversation can render to a long text. Peers
//!   share this room, and the places in the line of a model.

use crate::background::{self, give_way};
use crate::metrics::Metrics;
use larder_http::{PeerAddress, PeerBudget, PeerCharge, PeerShare};
use larder_model::template_worker::{Answer, BEGUN, FRAME_BYTES_MAX, RenderJob, WorkerTask, frame_header, frame_len};
use larder_model::{ChatMessage, ChatTemplateSource, RenderError, RenderOptions};
use larder_runtime::LogLimit;
use larder_runtime::lock::Mutex;
use rustix::process::Pid;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// Maximum time of a rendering, the start of its worker included. Templates in use take
/// milliseconds; the rest is for a busy machine.
pub const RENDER_TIME_MAX: Duration = Duration::from_secs(5);
/// Processor time of a rendering at full priority. Templates in use take milliseconds.
const FULL_PRIORITY_TIME: Duration = Duration::from_millis(100);
/// Maximum number of renderings at a time. With the workers' memory limit this bounds their memory
/// to 2 GiB.
pub const RENDERINGS_MAX: usize = 4;
/// Maximum number of renderings among them that have taken [`FULL_PRIORITY_TIME`].
const SLOW_RENDERINGS_MAX: usize = RENDERINGS_MAX / 2;
/// Time for which a model counts as slow after a slow rendering. It bounds how often a looping
/// template takes a place of the others.
const SLOW_FOR: Duration = Duration::from_secs(5);
/// Maximum time that a rendering waits for a place among the slow ones. In this time, each place
/// serves two that take the longest time.
const SLOW_WAIT_MAX: Duration = Duration::from_secs(10);
/// Maximum number of requests that wait for the worker of one model.
pub const WAITING_MAX: usize = 256;
/// Maximum size of all texts of templates in memory, in bytes. The tokeniser takes about a minute
/// for as much.
pub const TEXTS_BYTES_MAX: usize = 64 << 20;
/// Granularity of [`TEXTS_BYTES_MAX`].
const CHARGE_BYTES: usize = 1 << 10;
/// Maximum length of a text that does not count, in bytes. So long texts do not keep short chats
/// out.
const TEXT_BYTES_FREE: usize = 16 << 10;
/// Longest conversation that is written as JSON at full priority, in bytes.
const FULL_PRIORITY_BYTES_MAX: usize = 64 << 10;
/// Size of the buffer for a text that is read and dropped, in bytes.
const DISCARD_BYTES: usize = 64 << 10;
/// Maximum text of a template beyond the contents of the messages and the limit of a prompt: room
/// for the kind of an answer and an error message.
const ANSWER_BYTES_SPARE: usize = 64 << 10;

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

#[derive(Debug, Error)]
pub enum ChatError {
    #[error("{0}")]
    Template(RenderError),
    #[error("the chat template of the model took too much time or memory for this conversation")]
    Exceeded,
    #[error("too many chats wait for the chat template of this model or for the tokenizer; try again later")]
    Busy,
    #[error(
        "the chat template of this model takes long for this conversation, and others that do took all places for \
         them; try again later, or send a shorter conversation"
    )]
    SlowBusy,
    #[error("the request took longer than its time limit")]
    Deadline,
    #[error("cannot start the template worker: {0}")]
    Start(io::Error),
}

/// State that the workers of all models share.
#[derive(Debug)]
pub struct TemplateWorkers {
    command: WorkerCommand,
    renderings: Semaphore,
    slow_renderings: Arc<Semaphore>,
    /// One unit per [`CHARGE_BYTES`] of text.
    texts: Arc<PeerBudget>,
    metrics: Arc<Metrics>,
}

impl TemplateWorkers {
    pub fn new(command: WorkerCommand, metrics: Arc<Metrics>) -> Self {
        let renderings = Semaphore::new(RENDERINGS_MAX);
        let slow_renderings = Arc::new(Semaphore::new(SLOW_RENDERINGS_MAX));
        Self { command, renderings, slow_renderings, texts: PeerBudget::new(TEXTS_BYTES_MAX / CHARGE_BYTES), metrics }
    }
}

/// Text of a conversation.
#[derive(Debug)]
pub struct RenderedText {
    pub text: String,
    /// Keep it until the text is tokenised.
    pub charge: TextCharge,
}

/// Share of [`TEXTS_BYTES_MAX`]. Dropping it gives the share back.
#[derive(Debug, Default)]
pub struct TextCharge {
    _charge: Option<PeerCharge>,
}

/// Chat template of a model, and its worker. Or a worker that tries out constraints.
pub struct ChatRenderer {
    workers: Arc<TemplateWorkers>,
    model: String,
    task: WorkerTask,
    waiting: Arc<PeerBudget>,
    /// End of the time for which the model counts as slow.
    slow_until: Mutex<Option<Instant>>,
    /// `None` before the first rendering and after a failure. The lock is held during a rendering.
    worker: tokio::sync::Mutex<Option<Worker>>,
    failure_lines: LogLimit,
}

/// A request of a peer to a worker, and the longest answer to accept.
struct Job {
    request: Vec<u8>,
    answer_bytes_max: usize,
    peer: PeerAddress,
}

/// Limits that the renderings of all models share.
struct Room<'a> {
    texts: PeerShare,
    /// Place that the job has in case it is slow.
    slow: Option<OwnedSemaphorePermit>,
    slow_renderings: &'a Arc<Semaphore>,
    slow_until: &'a Mutex<Option<Instant>>,
}

impl Room<'_> {
    /// Place for a job that has become slow. `None` if there are too many.
    fn become_slow(&mut self) -> Option<OwnedSemaphorePermit> {
        *self.slow_until.lock() = Some(Instant::now() + SLOW_FOR);
        self.slow.take().or_else(|| self.slow_renderings.clone().try_acquire_owned().ok())
    }
}

/// A worker process. Dropping it kills the process.
struct Worker {
    socket: UnixStream,
    child: Child,
    /// Place among the slow renderings. The worker then has a lower priority for good.
    slow: Option<OwnedSemaphorePermit>,
}

/// Failure of an exchange with a worker.
enum ExchangeError {
    /// The worker ended before it began the job, which is not at fault.
    Ended,
    /// The worker ended during the job, or its answer is malformed.
    Failed,
    /// The job has become slow, and too many others are.
    Crowded,
}

impl From<io::Error> for ExchangeError {
    fn from(_: io::Error) -> Self {
        Self::Failed
    }
}

/// Failure of an attempt to render.
enum RunError {
    /// The job has become slow, and too many others are.
    Crowded,
    Chat(ChatError),
}

impl From<ChatError> for RunError {
    fn from(error: ChatError) -> Self {
        RunError::Chat(error)
    }
}

impl From<ExchangeError> for RunError {
    fn from(error: ExchangeError) -> Self {
        match error {
            ExchangeError::Crowded => RunError::Crowded,
            ExchangeError::Ended | ExchangeError::Failed => RunError::Chat(ChatError::Exceeded),
        }
    }
}

/// Answer of a worker.
enum Received {
    /// With the share of its text.
    Answer(Answer, TextCharge),
    /// There was no room for the text, and it was dropped.
    Discarded { is_worn: bool },
}

impl Received {
    fn is_worn(&self) -> bool {
        match self {
            Received::Answer(answer, _) => answer.is_worn,
            Received::Discarded { is_worn } => *is_worn,
        }
    }

    fn is_failure(&self) -> bool {
        matches!(self, Received::Answer(Answer { result: Err(_), .. }, _))
    }
}

impl ChatRenderer {
    pub fn new(workers: Arc<TemplateWorkers>, model: String, template: ChatTemplateSource) -> Self {
        Self::for_task(workers, model, WorkerTask::Template(template))
    }

    pub(crate) fn for_constraints(workers: Arc<TemplateWorkers>) -> Self {
        Self::for_task(workers, String::new(), WorkerTask::Constraints)
    }

    fn for_task(workers: Arc<TemplateWorkers>, model: String, task: WorkerTask) -> Self {
        Self {
            workers,
            model,
            task,
            waiting: PeerBudget::new(WAITING_MAX),
            slow_until: Mutex::default(),
            worker: tokio::sync::Mutex::default(),
            failure_lines: LogLimit::default(),
        }
    }

    /// Starts the worker, which compiles the template.
    pub async fn check(&self, deadline: Instant) -> Result<(), ChatError> {
        self.limited(deadline, None).await.map(drop)
    }

    /// Renders a conversation to a text of at most `text_bytes_max` bytes. Refuses it as busy if
    /// there is no room for the text.
    pub async fn render(
        &self,
        messages: Vec<ChatMessage>,
        options: RenderOptions,
        text_bytes_max: usize,
        peer: PeerAddress,
        deadline: Instant,
    ) -> Result<RenderedText, ChatError> {
        let job = RenderJob { messages, options, text_bytes_max };
        let bytes = job.messages.iter().map(ChatMessage::bytes).sum::<usize>() + job.options.bytes();
        let write = move || serde_json::to_vec(&job).map_err(io::Error::from);
        // Off the event loop: writing megabytes as JSON takes milliseconds.
        let request = match bytes {
            ..=FULL_PRIORITY_BYTES_MAX => tokio::task::spawn_blocking(write).await,
            _ => background::run(write).await,
        };
        let request = request.map_err(io::Error::other).flatten().map_err(ChatError::Start)?;
        let answer_bytes_max = text_bytes_max.saturating_add(ANSWER_BYTES_SPARE).min(FRAME_BYTES_MAX);
        self.limited(deadline, Some(Job { request, answer_bytes_max, peer })).await
    }

    /// Tries out a constraint, given as JSON.
    pub(crate) async fn try_constraint(
        &self,
        request: Vec<u8>,
        peer: PeerAddress,
        deadline: Instant,
    ) -> Result<(), ChatError> {
        self.limited(deadline, Some(Job { request, answer_bytes_max: ANSWER_BYTES_SPARE, peer })).await.map(drop)
    }

    /// Waits for the worker, starts it if there is none, and has it run `job`.
    async fn limited(&self, deadline: Instant, job: Option<Job>) -> Result<RenderedText, ChatError> {
        let peer = job.as_ref().map(|job| job.peer).unwrap_or_default();
        let _waiting = self.waiting.of(peer).take(1).ok_or(ChatError::Busy)?;
        let late = |_| ChatError::Deadline;
        let mut place = tokio::time::timeout_at(deadline, self.worker.lock()).await.map_err(late)?;
        let mut slow = if self.is_slow() { Some(self.slow_place(deadline).await?) } else { None };
        loop {
            // After the lock: the requests of one model hold at most one of these permits.
            let rendering = tokio::time::timeout_at(deadline, self.workers.renderings.acquire()).await.map_err(late)?;
            // Taken out: if the client disconnects, the worker is dropped with this future. Its
            // socket may hold half a frame.
            let idle = place.take();
            let longest = Instant::now() + RENDER_TIME_MAX;
            // Only the template's own limit is its fault.
            let late = if deadline < longest { ChatError::Deadline } else { ChatError::Exceeded };
            let run = self.run(idle, job.as_ref(), slow.take());
            let error = match tokio::time::timeout_at(deadline.min(longest), run).await {
                Ok(Ok((worker, received))) => {
                    *place = worker.filter(|worker| !received.is_worn() && worker.slow.is_none());
                    let Received::Answer(answer, charge) = received else { return Err(ChatError::Busy) };
                    let text = answer.result.map_err(ChatError::Template)?;
                    return Ok(RenderedText { text, charge });
                }
                Ok(Err(RunError::Crowded)) => {
                    // Others render meanwhile. The next attempt has its place from the beginning.
                    drop(rendering);
                    slow = Some(self.slow_place(deadline).await?);
                    continue;
                }
                Ok(Err(RunError::Chat(error))) => error,
                Err(_) => late,
            };
            self.note(&error);
            return Err(error);
        }
    }

    /// True for a template of which a rendering was slow a moment ago.
    fn is_slow(&self) -> bool {
        let is_template = matches!(self.task, WorkerTask::Template(_));
        is_template && self.slow_until.lock().is_some_and(|until| until >= Instant::now())
    }

    /// Waits for a place among the slow renderings.
    async fn slow_place(&self, deadline: Instant) -> Result<OwnedSemaphorePermit, ChatError> {
        let longest = Instant::now() + SLOW_WAIT_MAX;
        let late = || if deadline < longest { ChatError::Deadline } else { ChatError::SlowBusy };
        let place = self.workers.slow_renderings.clone().acquire_owned();
        let place = tokio::time::timeout_at(deadline.min(longest), place).await;
        place.ok().and_then(Result::ok).ok_or_else(late)
    }

    /// Returns the answer, and the worker if it can be used again.
    async fn run(
        &self,
        idle: Option<Worker>,
        job: Option<&Job>,
        slow: Option<OwnedSemaphorePermit>,
    ) -> Result<(Option<Worker>, Received), RunError> {
        let peer = job.map(|job| job.peer).unwrap_or_default();
        let (texts, slow_renderings) = (self.workers.texts.of(peer), &self.workers.slow_renderings);
        let mut room = Room { texts, slow, slow_renderings, slow_until: &self.slow_until };
        if let (Some(mut worker), Some(job)) = (idle, job) {
            match worker.exchange(job, &mut room).await {
                // Something else killed it since its last job. A fresh one takes its place.
                Err(ExchangeError::Ended) => {}
                result => return Ok((Some(worker), result?)),
            }
        }
        let (mut worker, compiled) = self.start(&mut room).await?;
        // A worker whose template does not compile ends by itself.
        match job {
            _ if compiled.is_failure() => Ok((None, compiled)),
            None => Ok((Some(worker), compiled)),
            Some(job) => {
                let answer = worker.exchange(job, &mut room).await?;
                Ok((Some(worker), answer))
            }
        }
    }

    async fn start(&self, room: &mut Room<'_>) -> Result<(Worker, Received), RunError> {
        let mut worker = Worker::spawn(&self.workers.command).map_err(ChatError::Start)?;
        let request = serde_json::to_vec(&self.task).map_err(|error| ChatError::Start(error.into()))?;
        let job = Job { request, answer_bytes_max: ANSWER_BYTES_SPARE, peer: PeerAddress::default() };
        let compiled = worker.exchange(&job, room).await?;
        Ok((worker, compiled))
    }

    fn note(&self, error: &ChatError) {
        match error {
            ChatError::Start(_) => {}
            // The client learns of its own constraint. It is no matter for the operator.
            _ if self.task == WorkerTask::Constraints => return,
            ChatError::Exceeded => self.workers.metrics.count_template_stop(),
            // The template's own refusals are answers to the client.
            _ => return,
        }
        // A client can repeat the request, and must not fill the log.
        if let Some(failures) = self.failure_lines.record() {
            tracing::warn!(model = %self.model, %error, failures, "chat refused; check the model's chat template [LRD0503]");
        }
    }
}

impl Worker {
    fn spawn(command: &WorkerCommand) -> io::Result<Worker> {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let child = Command::new(&command.program)
            .args(&command.arguments)
            .env_clear()
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C in a terminal must not end it before the chats that it renders.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        Ok(Worker { socket: UnixStream::from_std(ours)?, child, slow: None })
    }

    /// Sends a request and receives its answer. Drops the answer if there is no room for its text.
    /// Fails if the worker ends, for lack of memory for example.
    async fn exchange(&mut self, job: &Job, room: &mut Room<'_>) -> Result<Received, ExchangeError> {
        self.begin(job).await.map_err(|_| ExchangeError::Ended)?;
        let header = self.answer_header(room).await?;
        let bytes = frame_len(header, job.answer_bytes_max)?;
        // Before the memory is allocated.
        let counted = if bytes > TEXT_BYTES_FREE { bytes } else { 0 };
        // At once: a worker that waits with its answer would keep other chats from rendering.
        let Some(charge) = room.texts.take(counted.div_ceil(CHARGE_BYTES)) else {
            return Ok(Received::Discarded { is_worn: self.discard(bytes).await? });
        };
        let mut answer = vec![0; bytes];
        self.socket.read_exact(&mut answer).await?;
        Ok(Received::Answer(Answer::decode(answer)?, TextCharge { _charge: Some(charge) }))
    }

    /// Waits for the header of an answer. Lowers the priority of a worker that takes long for it.
    async fn answer_header(&mut self, room: &mut Room<'_>) -> Result<[u8; 4], ExchangeError> {
        let process = self.child.id().ok_or(ExchangeError::Failed)?;
        let before = processor_time(process);
        let mut header = [0; 4];
        let read = self.socket.read_exact(&mut header);
        tokio::pin!(read);
        loop {
            if let Ok(result) = tokio::time::timeout(FULL_PRIORITY_TIME, &mut read).await {
                return Ok(result.map(|_| header)?);
            }
            // By the wall's clock a busy machine would slow honest conversations, too.
            let taken = processor_time(process).saturating_sub(before);
            if self.slow.is_none() && taken >= FULL_PRIORITY_TIME {
                self.slow = Some(room.become_slow().ok_or(ExchangeError::Crowded)?);
                threads(process).for_each(|thread| give_way(Some(thread)));
            }
        }
    }

    /// Sends a request and waits until the worker has received it. A failed write alone would not
    /// tell whether the worker began: a process that ends closes its socket late.
    async fn begin(&mut self, job: &Job) -> io::Result<()> {
        self.socket.write_all(&frame_header(job.request.len())?).await?;
        self.socket.write_all(&job.request).await?;
        match self.socket.read_u8().await? {
            BEGUN => Ok(()),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Reads an answer of `bytes` bytes and drops it, so that the worker can run the next job.
    /// Returns `true` if the worker asks to be replaced.
    async fn discard(&mut self, bytes: usize) -> io::Result<bool> {
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
