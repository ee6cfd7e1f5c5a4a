//! Upper bound of the memory of a router.
//!
//! A router computes the plan at start and logs it. No option lowers most parts, and only hostile
//! clients and engines fill them. So a router warns if they exceed the memory of the machine.
//!
//! | part | enforced by |
//! | --- | --- |
//! | connections, bodies | the two HTTP servers |
//! | prompts, answers | budgets that peers share: see `openai` |
//! | streams | places of answers in progress, the limit of an engine's lines, and room for events |
//! | engines | the length of the table, of an engine's answer, and places for calls to all |
//! | texts, tokenising | a budget of templates' texts, and places for texts in progress |
//! | models | the files of all models, and the words of a tokenizer. One is built at a time |
//! | template workers | places for renderings, and limits that each worker sets itself |
//! | constraint workers | the number of workers, and limits that each worker sets itself |
//! | process | nothing: code, threads, and what the allocator keeps |

use crate::calls::{ANSWER_BYTES_MAX, LINE_BYTES_MAX};
use crate::discovery::{LOADS_MAX, MODEL_BYTES_MAX};
use crate::engines::ENGINES_MAX;
use crate::models::{MODELS_BYTES_MAX, MODELS_MAX};
use crate::openai::{ANSWER_CHARGE_BYTES, ANSWERS_BYTES_MAX, EVENTS_BYTES_MAX, PROMPTS_BYTES_MAX};
use crate::options::RouterOptions;
use crate::templates::{RENDERINGS_MAX, TEXTS_BYTES_MAX};
use crate::tokenise;
use larder_http::HttpOptions;
use larder_memory::plan::{MemoryPart, MemoryPlan};
use larder_model::{Tokenizer, template_worker};
use larder_worker::memory_plan::CONSTRAINT_WORKERS;
use larder_worker::trials;

/// Copies of a body: itself, what is parsed from it, and the request to a template worker.
const BODY_COPIES: u64 = 3;
/// Copies of the texts of an answer while it becomes JSON.
const ANSWER_COPIES: u64 = 2;
/// Memory of an answer in progress beside its prompt and its text: its tasks and its plan.
const ANSWER_BYTES: u64 = 16 << 10;
/// Buffer of a connection to an engine that sends fast. The HTTP library fixes it.
const CLIENT_BUFFER_BYTES: u64 = 408 << 10;
/// Buffers of a stream: one that the connection fills, and one that is being cut into lines.
const CLIENT_BUFFERS: u64 = 2;
/// Events that wait for a slow client: those with room, and one that waits for room.
const EVENTS_BYTES: u64 = 2 * EVENTS_BYTES_MAX as u64;
/// Memory of a call to an engine: its answer, and a buffer that grows with it.
const CALL_BYTES: u64 = 3 * ANSWER_BYTES_MAX as u64;
/// Memory of an engine in the tables of the balancer and of discovery.
const ENGINE_BYTES: u64 = 8 << 10;
/// Memory of a model beside its files: the words that its tokenizer remembers, and a client of the
/// store.
const MODEL_BYTES: u64 = Tokenizer::WORDS_BYTES_MAX as u64 + (1 << 20);
/// Memory of the process beside all other parts: code, threads, tables of a bounded size, and free
/// memory that the allocator keeps.
const PROCESS_BYTES: u64 = 96 << 20;

/// Computes the plan from valid options. All parts are upper bounds in bytes. Products with an
/// option saturate, so an extreme value causes no overflow.
pub fn of(options: &RouterOptions) -> MemoryPlan {
    let api = HttpOptions { body_bytes_max: options.body_bytes_max, ..options.http.clone() };
    let servers = [&api, &options.admin_http];
    let sum = |of: fn(&HttpOptions) -> u64| servers.into_iter().map(of).fold(0, u64::saturating_add);
    let answers = options.max_inflight as u64;
    let short_texts = answers.saturating_add(api.connections_max as u64).saturating_mul(ANSWER_CHARGE_BYTES as u64);
    let texts = short_texts.saturating_add(ANSWERS_BYTES_MAX as u64);
    // Each may have a prefill beside its stream.
    let stream = CLIENT_BUFFERS * CLIENT_BUFFER_BYTES + LINE_BYTES_MAX as u64 + EVENTS_BYTES + CALL_BYTES;
    let memory = "only clients and engines that use all limits at once take it; use a machine with more memory";
    let parts = vec![
        MemoryPart::limit("connections", sum(HttpOptions::connection_memory_max), "lower --http-connections"),
        MemoryPart::limit(
            "bodies",
            sum(HttpOptions::body_memory_max).saturating_mul(BODY_COPIES),
            "lower --http-body-memory or --http-connections",
        ),
        MemoryPart::limit(
            "prompts",
            answers.saturating_mul(ANSWER_BYTES).saturating_add(PROMPTS_BYTES_MAX as u64),
            memory,
        ),
        MemoryPart::limit("answers", texts.saturating_mul(ANSWER_COPIES), memory),
        MemoryPart::limit("streams", answers.saturating_mul(stream), memory),
        // Requests of operators ask all of them. So many calls run at a time.
        MemoryPart::limit("engines", ENGINES_MAX as u64 * (ENGINE_BYTES + CALL_BYTES), memory),
        MemoryPart::limit("texts", (TEXTS_BYTES_MAX + tokenise::TEXT_BYTES_MAX) as u64, memory),
        MemoryPart::limit("tokenising", tokenise::MEMORY_MAX, memory),
        MemoryPart::limit("models", models_bytes(), memory),
        MemoryPart::child_limit("template workers", workers_bytes(), memory),
        MemoryPart::child_limit(CONSTRAINT_WORKERS, trials::MEMORY_MAX, memory),
        MemoryPart::reserved("process", PROCESS_BYTES, "use a machine with more memory"),
    ];
    MemoryPlan::new("router", parts)
}

/// Memory of the tokenizers of all models, of the files that are being fetched, and of the one
/// tokenizer that is being built.
fn models_bytes() -> u64 {
    let tokenizers = MODELS_BYTES_MAX as u64 * Tokenizer::BYTES_PER_FILE_BYTE;
    let fetched = (LOADS_MAX * MODEL_BYTES_MAX) as u64;
    let built = MODEL_BYTES_MAX as u64 * Tokenizer::BUILD_BYTES_PER_FILE_BYTE;
    tokenizers + MODELS_MAX as u64 * MODEL_BYTES + fetched + built
}

/// Memory of the workers of all models: those that render, and idle ones.
fn workers_bytes() -> u64 {
    let idle = MODELS_MAX as u64 * template_worker::RETIRE_BYTES;
    RENDERINGS_MAX as u64 * template_worker::MEMORY_BYTES_MAX + idle
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn options() -> RouterOptions {
        RouterOptions::new("larder://127.0.0.1:1".parse().unwrap())
    }

    #[test]
    fn plan_follows_from_the_options() {
        let plan = of(&options());
        let parts: u64 = plan.parts().map(|(_, bytes)| bytes).sum();
        let workers = plan.bytes_of("template workers") + plan.bytes_of(CONSTRAINT_WORKERS);
        assert_eq!(plan.total(), parts - workers, "workers are other processes");
        assert_eq!(plan.bytes_of("connections"), (2048 + 32 + 128 + 32) * (96 << 10));
        assert_eq!(plan.bytes_of("bodies"), 3 * (64 + 128 + 64 + 8) * MIB);
        assert_eq!(plan.bytes_of("prompts"), (512 + 16) * MIB);
        assert_eq!(plan.bytes_of("answers"), 2 * (256 + 64 + 128) * MIB);
        assert_eq!(plan.bytes_of("streams"), (2 * 408 + 256 + 512 + 96) * MIB);
        let (models, built) = (256 * 12 + 64 * 33, (4 + 30) * 64);
        assert_eq!(plan.bytes_of("models"), (models + built) * MIB);
        assert_eq!(plan.bytes_of("template workers"), (4 * 512 + 64 * 64) * MIB);
        assert_eq!(plan.bytes_of(CONSTRAINT_WORKERS), 2 * 512 * MIB);
        let mut smaller = options();
        smaller.http.connections_max = 48;
        smaller.max_inflight = 512;
        let smaller = of(&smaller);
        assert_eq!(smaller.bytes_of("bodies"), 3 * (64 + 3 + 64 + 8) * MIB);
        assert_eq!(smaller.bytes_of("streams") * 2, plan.bytes_of("streams"));
    }

    #[test]
    fn plan_of_the_largest_options_does_not_overflow() {
        let mut options = options();
        options.max_inflight = usize::MAX;
        options.http.connections_max = usize::MAX;
        options.http.body_memory_bytes = usize::MAX;
        assert_eq!(of(&options).total(), u64::MAX);
    }
}
