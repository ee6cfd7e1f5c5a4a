//! Process that compiles and renders one chat template, or tries out constraints.
//!
//! A template is untrusted code, and one expression of it can take any time and memory: `x ~ x`
//! doubles a string, and comparing nested lists can take for ever. No counter inside the process
//! stops that. A constraint of a request is untrusted as well: its schema can combine alternatives
//! without end. So routers and engines start this worker, and kill it when it exceeds its time.
//!
//! Invariants:
//! - The worker has at most [`MEMORY_BYTES_MAX`] of address space. Exceeding it ends the worker
//!   only. A worker that tries out constraints grows by at most [`COMPILE_BYTES_MAX`].
//! - It ends when its parent closes the socket or dies.
//!
//! Protocol, on one stream socket. A frame is its length as a `u32` in little-endian order, and
//! that many bytes. The first request is a [`WorkerTask`]. Every other one is a [`RenderJob`] or a
//! [`Constraint`], by the task. All are JSON. Each has the byte [`BEGUN`] and one [`Answer`]. A
//! worker that ends before [`BEGUN`] did not end because of the request.

use crate::chat::{ChatMessage, ChatTemplate, ChatTemplateSource, RenderError, RenderOptions};
use crate::constraint::Constraint;
use crate::guide::{GuideError, GuideFactory};
use rustix::process::{Resource, Rlimit, Signal, getrlimit, set_parent_process_death_signal, setrlimit};
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

/// Maximum address space of a worker: its program, the conversation and all values of the template.
/// A conversation of 16 MiB takes about 100 MiB in templates of common models.
pub const MEMORY_BYTES_MAX: u64 = 512 << 20;
/// Maximum growth of the address space of a worker that tries out constraints, in bytes. An engine
/// that compiles a constraint which passed takes no more. JSON schemas of users take some MiB, and
/// the allocator reserves 64 MiB for each 64 MiB or less in use.
pub const COMPILE_BYTES_MAX: u64 = 256 << 20;
/// Byte that the worker sends once it has received a request.
pub const BEGUN: u8 = 1;
/// Maximum length of a frame in bytes. A larger conversation would not fit
/// [`MEMORY_BYTES_MAX`] anyway.
pub const FRAME_BYTES_MAX: usize = 128 << 20;
/// Resident memory above which a worker asks to be replaced, in bytes. A fresh one takes a few MiB.
pub const RETIRE_BYTES: u64 = 64 << 20;
/// Size of a memory page in `/proc/self/statm`.
const PAGE_BYTES: u64 = 4096;

/// Work of a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkerTask {
    /// Renders conversations with this template.
    Template(ChatTemplateSource),
    /// Tries out constraints. Their answers have no text.
    Constraints,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct RenderJob {
    pub messages: Vec<ChatMessage>,
    pub options: RenderOptions,
    /// Maximum size of the text in bytes.
    pub text_bytes_max: usize,
}

/// Answer of a worker: one byte for the kind, one byte that is 1 if the worker asks to be replaced,
/// and a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub result: Result<String, RenderError>,
    /// The worker holds much memory after this job. The parent should start another one.
    pub is_worn: bool,
}

const KIND_TEXT: u8 = 0;
const KIND_FAILED: u8 = 1;
const KIND_TOO_LONG: u8 = 2;

impl Answer {
    fn encode(self) -> Vec<u8> {
        let (kind, text) = match self.result {
            Ok(text) => (KIND_TEXT, text),
            Err(RenderError::Failed(reason)) => (KIND_FAILED, reason),
            Err(RenderError::TooLong) => (KIND_TOO_LONG, String::new()),
        };
        let mut bytes = vec![kind, u8::from(self.is_worn)];
        bytes.extend_from_slice(text.as_bytes());
        bytes
    }

    /// Returns `true` if the worker of an encoded answer asks to be replaced. The first two bytes
    /// suffice. Returns `None` for less.
    pub fn is_worn_in(encoded: &[u8]) -> Option<bool> {
        encoded.get(1).map(|is_worn| *is_worn == 1)
    }

    pub fn decode(mut bytes: Vec<u8>) -> io::Result<Answer> {
        let malformed = |problem: &str| io::Error::new(io::ErrorKind::InvalidData, problem.to_string());
        let &[kind, is_worn, ..] = &bytes[..] else { return Err(malformed("the answer has no kind")) };
        bytes.drain(..2);
        let text = String::from_utf8(bytes).map_err(|_| malformed("the answer is not UTF-8"))?;
        let result = match kind {
            KIND_TEXT => Ok(text),
            KIND_FAILED => Err(RenderError::Failed(text)),
            KIND_TOO_LONG => Err(RenderError::TooLong),
            _ => return Err(malformed("the answer is of an unknown kind")),
        };
        Ok(Answer { result, is_worn: is_worn == 1 })
    }
}

/// Runs the worker on its standard input, which must be a stream socket. Returns when the other end
/// closes it.
///
/// Limits the memory of this process for good: call it from a program that does nothing else.
pub fn run() -> io::Result<()> {
    limit_resources()?;
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    serve(socket, limit_growth)
}

fn limit_resources() -> io::Result<()> {
    // An aborted template must not fill the disk with core dumps.
    for (resource, bytes) in [(Resource::As, MEMORY_BYTES_MAX), (Resource::Core, 0)] {
        let hard = getrlimit(resource).maximum.map_or(bytes, |hard| hard.min(bytes));
        setrlimit(resource, Rlimit { current: Some(hard), maximum: Some(hard) })?;
    }
    // A parent that is killed cannot kill a worker whose template loops.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    Ok(())
}

/// Limits the growth of this process from now on to [`COMPILE_BYTES_MAX`].
fn limit_growth() -> io::Result<()> {
    let size = memory_bytes(0).ok_or_else(|| io::Error::other("/proc/self/statm has no size"))?;
    let grown = size.saturating_add(COMPILE_BYTES_MAX);
    let maximum = getrlimit(Resource::As).maximum;
    let current = maximum.map_or(grown, |maximum| maximum.min(grown));
    setrlimit(Resource::As, Rlimit { current: Some(current), maximum })?;
    Ok(())
}

/// Runs a task. A worker for constraints calls `limit_growth` before its first trial.
fn serve(mut socket: UnixStream, limit_growth: fn() -> io::Result<()>) -> io::Result<()> {
    let Some(task) = read_request(&mut socket)? else { return Ok(()) };
    match serde_json::from_slice(&task)? {
        WorkerTask::Template(source) => render(socket, source),
        WorkerTask::Constraints => try_constraints(socket, limit_growth),
    }
}

fn try_constraints(mut socket: UnixStream, limit_growth: fn() -> io::Result<()>) -> io::Result<()> {
    let factory = GuideFactory::of_bytes().map_err(io::Error::other)?;
    limit_growth()?;
    answer(&mut socket, Ok(String::new()))?;
    while let Some(job) = read_request(&mut socket)? {
        let constraint: Constraint = serde_json::from_slice(&job)?;
        let tried = match factory.try_out(&constraint) {
            // No verdict: the process ends without an answer.
            Err(GuideError::Failed(reason)) => return Err(io::Error::other(reason)),
            tried => tried.map_err(|error| RenderError::Failed(error.to_string())),
        };
        answer(&mut socket, tried.map(|()| String::new()))?;
    }
    Ok(())
}

fn render(mut socket: UnixStream, source: ChatTemplateSource) -> io::Result<()> {
    let template = match ChatTemplate::new(source) {
        Ok(template) => {
            answer(&mut socket, Ok(String::new()))?;
            template
        }
        Err(reason) => return answer(&mut socket, Err(reason)),
    };
    while let Some(job) = read_request(&mut socket)? {
        let RenderJob { messages, options, text_bytes_max } = serde_json::from_slice(&job)?;
        drop(job);
        let result = template.render(&messages, &options, text_bytes_max);
        drop(messages);
        answer(&mut socket, result)?;
    }
    Ok(())
}

fn answer(socket: &mut UnixStream, result: Result<String, RenderError>) -> io::Result<()> {
    let is_worn = memory_bytes(1).is_none_or(|bytes| bytes > RETIRE_BYTES);
    let bytes = Answer { result, is_worn }.encode();
    socket.write_all(&frame_header(bytes.len())?)?;
    socket.write_all(&bytes)
}

/// Header of a frame of `len` bytes. Fails above [`FRAME_BYTES_MAX`].
pub fn frame_header(len: usize) -> io::Result<[u8; 4]> {
    match u32::try_from(len) {
        Ok(short) if len <= FRAME_BYTES_MAX => Ok(short.to_le_bytes()),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, format!("a frame of {len} bytes is too long"))),
    }
}

/// Length of the frame with this header. Fails above `bytes_max`.
pub fn frame_len(header: [u8; 4], bytes_max: usize) -> io::Result<usize> {
    let len = u32::from_le_bytes(header) as usize;
    match len <= bytes_max {
        true => Ok(len),
        false => Err(io::Error::new(io::ErrorKind::InvalidData, format!("a frame of {len} bytes is too long"))),
    }
}

/// Reads a frame. Returns `None` at the end of the stream.
fn read_frame(socket: &mut UnixStream) -> io::Result<Option<Vec<u8>>> {
    let mut header = [0; 4];
    match socket.read_exact(&mut header) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    let mut bytes = vec![0; frame_len(header, FRAME_BYTES_MAX)?];
    socket.read_exact(&mut bytes)?;
    Ok(Some(bytes))
}

/// Reads a request and tells the parent so. Returns `None` at the end of the stream.
fn read_request(socket: &mut UnixStream) -> io::Result<Option<Vec<u8>>> {
    let request = read_frame(socket)?;
    if request.is_some() {
        socket.write_all(&[BEGUN])?;
    }
    Ok(request)
}

/// Memory of this process by the fields of `/proc/self/statm`: 0 for its address space, 1 for its
/// resident memory. See proc_pid_statm(5).
fn memory_bytes(field: usize) -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split(' ').nth(field)?.parse().ok()?;
    Some(pages * PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exchange(socket: &mut UnixStream, request: &impl Serialize) -> Answer {
        let bytes = serde_json::to_vec(request).unwrap();
        socket.write_all(&frame_header(bytes.len()).unwrap()).unwrap();
        socket.write_all(&bytes).unwrap();
        let mut begun = [0];
        socket.read_exact(&mut begun).unwrap();
        assert_eq!(begun, [BEGUN]);
        Answer::decode(read_frame(socket).unwrap().unwrap()).unwrap()
    }

    #[test]
    fn worker_compiles_a_template_once_and_renders_until_the_socket_closes() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let worker = std::thread::spawn(move || serve(theirs, || Ok(())));
        let source = "{% for m in messages %}{{ m.content }};{% endfor %}{{ eos_token }}";
        let source = ChatTemplateSource { source: source.into(), bos: "<s>".into(), eos: "</s>".into() };
        assert_eq!(exchange(&mut ours, &WorkerTask::Template(source)).result, Ok(String::new()));
        let message = |content: &str| ChatMessage::new("user", content);
        for (text_bytes_max, expected) in [(100, Ok("a;b;</s>".to_string())), (5, Err(RenderError::TooLong))] {
            let messages = vec![message("a"), message("b")];
            let job = RenderJob { messages, options: RenderOptions::default(), text_bytes_max };
            assert_eq!(exchange(&mut ours, &job).result, expected);
        }
        drop(ours);
        worker.join().unwrap().unwrap();
    }

    #[test]
    fn worker_reports_a_template_that_does_not_compile() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let worker = std::thread::spawn(move || serve(theirs, || Ok(())));
        let source = ChatTemplateSource { source: "{% if %}".into(), ..ChatTemplateSource::default() };
        let task = WorkerTask::Template(source);
        assert!(matches!(exchange(&mut ours, &task).result, Err(RenderError::Failed(_))));
        assert_eq!(read_frame(&mut ours).unwrap(), None);
        worker.join().unwrap().unwrap();
    }

    #[test]
    fn worker_tries_out_constraints_within_a_limit_on_its_growth() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let worker = std::thread::spawn(move || serve(theirs, || Err(io::Error::other("limited"))));
        let task = serde_json::to_vec(&WorkerTask::Constraints).unwrap();
        ours.write_all(&frame_header(task.len()).unwrap()).unwrap();
        ours.write_all(&task).unwrap();
        assert_eq!(worker.join().unwrap().unwrap_err().to_string(), "limited");
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let worker = std::thread::spawn(move || serve(theirs, || Ok(())));
        assert_eq!(exchange(&mut ours, &WorkerTask::Constraints).result, Ok(String::new()));
        assert_eq!(exchange(&mut ours, &Constraint::Regex("a+".into())).result, Ok(String::new()));
        assert!(matches!(exchange(&mut ours, &Constraint::Regex("(".into())).result, Err(RenderError::Failed(_))));
        drop(ours);
        worker.join().unwrap().unwrap();
    }

    #[test]
    fn frames_above_the_limit_are_refused() {
        assert!(frame_header(FRAME_BYTES_MAX + 1).is_err());
        assert!(frame_len(u32::MAX.to_le_bytes(), FRAME_BYTES_MAX).is_err());
        assert_eq!(frame_len(frame_header(77).unwrap(), 77).unwrap(), 77);
    }
}
