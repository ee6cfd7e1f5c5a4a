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
//! - A chat waits for one rendering of each other peer at most, however many those send for the
//!   same model.
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
//!
//! [`FULL_PRIORITY_TIME`]: larder_worker::worker_process::FULL_PRIORITY_TIME

use crate::background;
use crate::metrics::Metrics;
use larder_http::{PeerAddress, PeerBudget, PeerCharge, PeerLane, PeerShare};
use larder_model::template_worker::{Answer, FRAME_BYTES_MAX, RenderJob, WorkerTask};
use larder_model::{ChatMessage, ChatTemplateSource, RenderError, RenderOptions};
use larder_runtime::LogLimit;
use larder_runtime::lock::Mutex;
use larder_worker::worker_process::{AnswerError, WorkerCommand, WorkerProcess};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// Maximum time of a rendering, the start of its worker included. Templates in use take
/// milliseconds; the rest is for a busy machine.
pub const RENDER_TIME_MAX: Duration = Duration::from_secs(5);
/// Maximum number of renderings at a time. With the workers' memory limit this bounds their memory
/// to 2 GiB.
pub const RENDERINGS_MAX: usize = 4;
/// Maximum number of renderings among them that have become slow.
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
/// Maximum text of a template beyond the contents of the messages and the limit of a prompt: room
/// for the kind of an answer and an error message.
const ANSWER_BYTES_SPARE: usize = 64 << 10;

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

/// Chat template of a model, and its worker.
pub struct ChatRenderer {
    workers: Arc<TemplateWorkers>,
    model: String,
    task: WorkerTask,
    waiting: Arc<PeerBudget>,
    /// Line in front of the worker. A peer has one request in it, and its others wait behind that.
    line: PeerLane,
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
    process: WorkerProcess,
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

impl From<AnswerError> for ExchangeError {
    fn from(error: AnswerError) -> Self {
        match error {
            AnswerError::Failed => Self::Failed,
            AnswerError::Stopped => Self::Crowded,
        }
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
        Self {
            workers,
            model,
            task: WorkerTask::Template(template),
            waiting: PeerBudget::new(WAITING_MAX),
            line: PeerLane::new(1, 1),
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

    /// Waits for the worker, starts it if there is none, and has it run `job`.
    async fn limited(&self, deadline: Instant, job: Option<Job>) -> Result<RenderedText, ChatError> {
        let peer = job.as_ref().map(|job| job.peer).unwrap_or_default();
        let _waiting = self.waiting.of(peer).take(1).ok_or(ChatError::Busy)?;
        let late = |_| ChatError::Deadline;
        let _turn = tokio::time::timeout_at(deadline, self.line.enter(peer, 1)).await.map_err(late)?;
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
        self.slow_until.lock().is_some_and(|until| until >= Instant::now())
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
        let process = WorkerProcess::spawn(&self.workers.command).map_err(ChatError::Start)?;
        let mut worker = Worker { process, slow: None };
        let request = serde_json::to_vec(&self.task).map_err(|error| ChatError::Start(error.into()))?;
        let job = Job { request, answer_bytes_max: ANSWER_BYTES_SPARE, peer: PeerAddress::default() };
        let compiled = worker.exchange(&job, room).await?;
        Ok((worker, compiled))
    }

    fn note(&self, error: &ChatError) {
        match error {
            ChatError::Start(_) => {}
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
    /// Sends a request and receives its answer. Drops the answer if there is no room for its text.
    /// Fails if the worker ends, for lack of memory for example.
    async fn exchange(&mut self, job: &Job, room: &mut Room<'_>) -> Result<Received, ExchangeError> {
        self.process.begin(&job.request).await.map_err(|_| ExchangeError::Ended)?;
        let slow = &mut self.slow;
        let may_go_on = || {
            *slow = room.become_slow();
            slow.is_some()
        };
        let bytes = self.process.answer_len(job.answer_bytes_max, may_go_on).await?;
        // Before the memory is allocated.
        let counted = if bytes > TEXT_BYTES_FREE { bytes } else { 0 };
        // At once: a worker that waits with its answer would keep other chats from rendering.
        let Some(charge) = room.texts.take(counted.div_ceil(CHARGE_BYTES)) else {
            return Ok(Received::Discarded { is_worn: self.process.discard(bytes).await? });
        };
        let answer = self.process.answer(bytes).await?;
        Ok(Received::Answer(answer, TextCharge { _charge: Some(charge) }))
    }
}
