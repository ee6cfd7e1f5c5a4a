//! Measures the memory of bodies while they are parsed, for the plans of routers and engines:
//! `cargo run --release -p larder-router --example body_memory`.
//!
//! Each form of a body is measured in a process of its own, because the allocator keeps memory that
//! was in use. The body itself counts.

use larder_router::openai::types::{ChatRequest, CompletionRequest};
use larder_worker::api::{DecodeRequest, ForgetRequest};
use std::error::Error;
use std::process::Command;

/// Largest body of an engine, and half of that of a router.
const BODY_BYTES: usize = 32 << 20;

type Parse = fn(&[u8]) -> bool;

/// Name, start of the body, what is repeated, end, and the parser.
type Form = (&'static str, &'static str, &'static str, &'static str, Parse);

const FORMS: [Form; 12] = [
    ("completion, text", r#"{"model":"m","prompt":""#, "a", r#""}"#, completion),
    ("completion, escaped text", r#"{"model":"m","prompt":""#, r"\n", r#""}"#, completion),
    ("completion, tokens", r#"{"model":"m","prompt":[1"#, ",1", "]}", completion),
    ("completion, nested lists", r#"{"model":"m","prompt":[[1]"#, ",[1]", "]}", completion),
    ("completion, fields", r#"{"model":"m""#, r#","a":0"#, "}", completion),
    ("chat, text", r#"{"model":"m","messages":[{"role":"user","content":""#, "a", r#""}]}"#, chat),
    (
        "chat, parts",
        r#"{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":""}"#,
        r#",{"type":"text","text":""}"#,
        "]}]}",
        chat,
    ),
    (
        "chat, messages",
        r#"{"model":"m","messages":[{"role":"user","content":""}"#,
        r#",{"role":"user","content":""}"#,
        "]}",
        chat,
    ),
    (
        "chat, schema",
        r#"{"model":"m","messages":[{"role":"user","content":""}],"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":[0"#,
        ",0",
        "]}}}]}",
        chat,
    ),
    ("decode, tokens", r#"{"request_id":"r","deadline_ms":1,"tokens":[1"#, ",1", "]}", decode),
    (
        "decode, biases",
        r#"{"request_id":"r","deadline_ms":1,"tokens":[1],"sampling":{"logit_bias":[[0,0]"#,
        ",[0,0]",
        "]}}",
        decode,
    ),
    ("forget, tokens", r#"{"deadline_ms":1,"tokens":[1"#, ",1", "]}", forget),
];

fn completion(body: &[u8]) -> bool {
    CompletionRequest::parse(body).is_ok()
}

/// Parses a conversation, and writes it for the template worker as the router does.
fn chat(body: &[u8]) -> bool {
    ChatRequest::parse(body).is_ok_and(|request| serde_json::to_vec(&request.messages).is_ok())
}

fn decode(body: &[u8]) -> bool {
    serde_json::from_slice::<DecodeRequest>(body).is_ok()
}

fn forget(body: &[u8]) -> bool {
    serde_json::from_slice::<ForgetRequest>(body).is_ok()
}

fn main() -> Result<(), Box<dyn Error>> {
    if let Some(name) = std::env::args().nth(1) {
        let form = FORMS.iter().find(|form| form.0 == name).ok_or("no such form")?;
        return measure(form);
    }
    for form in &FORMS {
        let status = Command::new(std::env::current_exe()?).arg(form.0).status()?;
        if !status.success() {
            return Err(format!("{}: {status}", form.0).into());
        }
    }
    Ok(())
}

fn measure(&(name, begin, repeated, end, parse): &Form) -> Result<(), Box<dyn Error>> {
    let before = memory("VmRSS")?;
    let count = (BODY_BYTES - begin.len() - end.len()) / repeated.len();
    let body = [begin, &repeated.repeat(count), end].concat().into_bytes();
    // Without the pieces of the body.
    reset_peak()?;
    let is_accepted = parse(&body);
    let peak = memory("VmHWM")? - before;
    let verdict = if is_accepted { "accepted" } else { "refused" };
    println!("{name}: {:.2} bytes per byte of the body, {verdict}", peak / body.len() as f64);
    Ok(())
}

/// Resident memory of this process, or its peak, in bytes.
fn memory(name: &str) -> Result<f64, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).ok_or("no such line")?;
    let kib: f64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib * 1024.0)
}

/// Sets the peak to the present value.
fn reset_peak() -> Result<(), Box<dyn Error>> {
    Ok(std::fs::write("/proc/self/clear_refs", "5")?)
}
