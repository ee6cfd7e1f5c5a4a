//! Upper bound of the memory of an engine.
//!
//! An engine computes the plan when its weights are loaded, and logs it. It refuses reserved parts
//! that exceed the memory of the machine. It warns if all parts together do.
//!
//! | part | enforced by |
//! | --- | --- |
//! | weights | the files of the model |
//! | L1, L1 index | the pool of pages |
//! | workspaces | the planner of steps, which bounds tokens and sequences |
//! | staging | the same, and the size of a piece. Only with a device |
//! | puts | the store client: its queue, and its shared memory or connections |
//! | L3 reads | the workers of `l3_reads`, each with a page. Only if the engine reads L3 itself |
//! | unpublished pages | the queue of `republish` |
//! | connections, bodies | the HTTP server |
//! | sequences | `request_memory`, and the number of requests that hold pages |
//! | forgets | `forgets` |
//! | constraints | `request_memory`, `guides` |
//! | compilations | `trials`, and the places for compilations of `guides` |
//! | constraint workers | limits that each worker sets itself |
//! | tokenizer, process | nothing: code, threads, and what the allocator keeps |
//!
//! The plan counts memory of the host. Memory of a device is another one: pages take a share of
//! what the weights leave free, and the start checks that the largest step fits beside them. An
//! emulated device takes its memory from the host. The plan leaves this out, because only tests use
//! it.

use crate::api::TOP_LOGPROBS_MAX;
use crate::batch::RUNNING_PER_BATCH;
use crate::forgets::forgets_bytes_max;
use crate::guides::COMPILING_BYTES_MAX;
use crate::l3_reads::L3Reads;
use crate::options::{EngineOptions, context_limit};
use crate::redis_store;
use crate::redis_store::url::EngineStore;
use crate::republish;
use crate::request_memory::{
    EVENTS_FREE, UNREAD_BYTES_MAX, event_bytes, guides_bytes_max, requests_bytes_max, token_bytes,
};
use crate::scheduler::LOGIT_ROWS_MAX;
use crate::store::PUT_QUEUE_BYTES_MAX;
use crate::trials;
use larder_client::ClientOptions;
use larder_memory::plan::{MemoryPart, MemoryPlan};
use larder_model::{GUIDE_STEP_BYTES_MAX, Model, Tokenizer};

/// Name of the part that engines of one process share.
pub const WEIGHTS: &str = "weights";
/// Name of the part that engines and the router of one process share, if they share their trials.
pub const CONSTRAINT_WORKERS: &str = "constraint workers";
/// Memory of a page in L1 beside its bytes: its checksums, and its place in the radix tree.
const L1_PAGE_BYTES: u64 = 1 << 10;
/// Copies of a body: itself, and the tokens in it while their vector grows.
const BODY_COPIES: u64 = 3;
/// Memory of the trie of constraints, per token of the vocabulary: 60 MiB for 150,000.
const TRIE_TOKEN_BYTES: u64 = 420;
/// Memory of the process beside all other parts: code, threads, tables of a bounded size, and free
/// memory that the allocator keeps.
const PROCESS_BYTES: u64 = 96 << 20;

/// Tokens of the largest step, and those of them with logits, for sequences of at most `context`
/// tokens.
pub(crate) fn step_rows_max(options: &EngineOptions, context: usize) -> (usize, usize) {
    // As many hold pages.
    let sequences = options.max_batch.saturating_mul(RUNNING_PER_BATCH);
    let rows = options.chunk_tokens.min(sequences.saturating_mul(context)).saturating_add(options.max_batch);
    (rows, options.max_batch.saturating_add(LOGIT_ROWS_MAX))
}

/// Computes the plan from valid options.
pub fn of(options: &EngineOptions, model: &Model) -> MemoryPlan {
    let config = model.config();
    let page_bytes = model.geometry(options.page_tokens).page_bytes();
    let pages = options.l1_pages(page_bytes).unwrap_or(0);
    let context = context_limit(model, pages, options.page_tokens) as usize;
    // As many hold pages.
    let sequences = options.max_batch.saturating_mul(RUNNING_PER_BATCH);
    let (rows, logit_rows) = step_rows_max(options, context);
    let page_tokens = options.page_tokens as usize;
    let generated = sequences.saturating_mul(context).saturating_mul(token_bytes(page_tokens));
    // Of each connection, a few events may wait without a charge.
    let events =
        options.http.connections_max.saturating_mul(EVENTS_FREE * event_bytes(Some(TOP_LOGPROBS_MAX as usize)));
    let charged = requests_bytes_max(options.max_batch, context, page_tokens).saturating_add(UNREAD_BYTES_MAX);
    let requests = generated.saturating_add(events).saturating_add(charged);
    // A guide is charged after the step in which it has grown. Each thread has one at a time.
    let growth = rayon::current_num_threads().saturating_mul(GUIDE_STEP_BYTES_MAX);
    let guides = guides_bytes_max(options.max_batch).saturating_add(growth) as u64;
    let puts = match options.store {
        EngineStore::Larder(_) => PUT_QUEUE_BYTES_MAX + ClientOptions::default().memory_bytes,
        EngineStore::Redis(_) => redis_store::memory_bytes_max(page_bytes),
    };
    let reads_l3 = matches!(options.store, EngineStore::Larder(_)) && options.l3_path.is_direct(model.device());
    let l3_reads = if reads_l3 { L3Reads::memory_bytes(page_bytes) } else { 0 };
    let memory = "use a machine with more memory";
    let parts = vec![
        MemoryPart::reserved(WEIGHTS, model.weight_bytes(), "try --weights q8, or use a smaller model"),
        MemoryPart::reserved("L1", pages.saturating_mul(page_bytes) as u64, "lower --l1"),
        MemoryPart::reserved("L1 index", (pages as u64).saturating_mul(L1_PAGE_BYTES), "lower --l1"),
        MemoryPart::reserved(
            "workspaces",
            model.workspace_bytes(rows, logit_rows),
            "lower --chunk-tokens or --max-batch",
        ),
        MemoryPart::reserved(
            "staging",
            model.staging_bytes(options.page_tokens, rows, logit_rows),
            "lower --chunk-tokens or --max-batch",
        ),
        MemoryPart::limit("puts", puts as u64, memory),
        MemoryPart::reserved("L3 reads", l3_reads as u64, "try --l3-path store"),
        MemoryPart::limit("unpublished pages", republish::waiting_bytes_max(pages, page_tokens) as u64, "lower --l1"),
        MemoryPart::limit("connections", options.http.connection_memory_max(), "lower --http-connections"),
        MemoryPart::limit(
            "bodies",
            options.http.body_memory_max().saturating_mul(BODY_COPIES),
            "lower --http-body-memory or --http-connections",
        ),
        MemoryPart::limit("forgets", forgets_bytes_max(context, page_tokens) as u64, memory),
        MemoryPart::limit("sequences", requests as u64, "lower --max-batch"),
        MemoryPart::limit("constraints", guides.saturating_add(config.vocab as u64 * TRIE_TOKEN_BYTES), memory),
        MemoryPart::limit("compilations", COMPILING_BYTES_MAX, memory),
        MemoryPart::child_limit(CONSTRAINT_WORKERS, trials::MEMORY_MAX, memory),
        MemoryPart::reserved("tokenizer", tokenizer_bytes(options), memory),
        MemoryPart::reserved("process", PROCESS_BYTES, memory),
    ];
    MemoryPlan::new("engine", parts)
}

/// Memory of the tokenizer and of its files, which the engine sends to routers.
fn tokenizer_bytes(options: &EngineOptions) -> u64 {
    let files = Tokenizer::FILES.iter().filter_map(|file| std::fs::metadata(options.model_dir.join(file)).ok());
    files.map(|file| file.len()).sum::<u64>().saturating_mul(1 + Tokenizer::BYTES_PER_FILE_BYTE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Role;
    use std::path::Path;

    const MIB: u64 = 1 << 20;

    fn tiny() -> (EngineOptions, Model) {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/larder-tiny");
        let model = Model::load(&dir).unwrap();
        (EngineOptions::new(Role::Decode, dir, "larder://127.0.0.1:1".parse().unwrap()), model)
    }

    #[test]
    fn plan_follows_from_options_and_model() {
        let (mut options, model) = tiny();
        let plan = of(&options, &model);
        let parts: u64 = plan.parts().map(|(_, bytes)| bytes).sum();
        assert_eq!(plan.total(), parts - plan.bytes_of(CONSTRAINT_WORKERS), "workers are other processes");
        assert_eq!(plan.bytes_of(CONSTRAINT_WORKERS), 2 * 512 * MIB);
        assert_eq!(plan.bytes_of("compilations"), 4 * 256 * MIB);
        assert_eq!(plan.bytes_of(WEIGHTS), model.weight_bytes());
        let page_bytes = model.geometry(options.page_tokens).page_bytes() as u64;
        let pages = 256 * MIB / page_bytes;
        assert_eq!((plan.bytes_of("L1"), plan.bytes_of("L1 index")), (pages * page_bytes, pages << 10));
        assert_eq!(plan.bytes_of("staging"), 0, "the CPU computes in place");
        assert_eq!(plan.bytes_of("bodies"), 3 * (64 + 64) * MIB);
        assert_eq!(plan.bytes_of("puts"), 512 * MIB);
        assert_eq!(plan.bytes_of("unpublished pages"), 16_384 * (512 + 4 * 32));
        let sequences = |batch: u64| batch * 2 * 4096 * 26 + 1024 * 64 * 368 + 384 * MIB;
        assert_eq!(plan.bytes_of("sequences"), sequences(64));
        assert_eq!(plan.bytes_of("forgets"), 64 * MIB);
        let growth = rayon::current_num_threads() as u64 * 48 * MIB;
        assert_eq!(plan.bytes_of("constraints"), 512 * MIB + growth + 4096 * 420);
        assert!(plan.total() - growth < 4 << 30, "{plan}");
        options.l1_bytes = 4 << 30;
        let large = of(&options, &model).bytes_of("unpublished pages");
        assert_eq!(large, 2 * (4096 * MIB / page_bytes) * (512 + 4 * 32));
        options.l1_bytes = 64 << 20;
        options.max_batch = 8;
        let small = of(&options, &model);
        assert_eq!(small.bytes_of("sequences"), sequences(8));
        assert!(plan.bytes_of("L1") - small.bytes_of("L1") >= 191 * MIB);
        assert!(plan.bytes_of("workspaces") > small.bytes_of("workspaces"));
    }

    #[test]
    fn plan_of_the_largest_options_does_not_overflow() {
        let (mut options, model) = tiny();
        options.l1_bytes = usize::MAX;
        options.chunk_tokens = usize::MAX;
        options.max_batch = usize::MAX;
        options.http.body_memory_bytes = usize::MAX;
        assert_eq!(of(&options, &model).total(), u64::MAX);
        options.page_tokens = 0;
        assert_eq!(of(&options, &model).bytes_of("L1"), 0, "the engine refuses it later");
    }
}
