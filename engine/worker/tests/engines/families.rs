//! Each model family gives one answer on every path, with each type of pages and weights.

use crate::common::real::*;
use crate::common::*;
use larder_format::KvDtype;
use larder_model::{Activations, LoadOptions, Model, WeightFormat};
use larder_node::{Node, NodeOptions};
use larder_worker::api::{CacheMode, DecodeRequest};
use larder_worker::{EngineOptions, Preloaded, Role};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const LEN: usize = 150;
const PAGES: usize = (LEN - 1) / PAGE;
const GENERATED: usize = 20;
const TYPES: [(KvDtype, WeightFormat, Activations); 5] = [
    (KvDtype::F32, WeightFormat::Stored, Activations::F32),
    (KvDtype::Bf16, WeightFormat::Stored, Activations::F32),
    (KvDtype::Bf16, WeightFormat::Stored, Activations::Narrow),
    (KvDtype::Bf16, WeightFormat::Q8, Activations::F32),
    (KvDtype::Bf16, WeightFormat::Q8, Activations::Narrow),
];

/// A family in one type.
struct Case {
    name: String,
    loaded: Preloaded,
    request: DecodeRequest,
    expected: Vec<u32>,
}

impl Case {
    fn new(folder: &Path, (kv_dtype, weights, activations): (KvDtype, WeightFormat, Activations)) -> Case {
        let load = LoadOptions { kv_dtype: Some(kv_dtype), weights, activations, ..LoadOptions::default() };
        let model = Arc::new(Model::load_with(folder, &load, &|_, _| ()).unwrap());
        let request = decode_request(&prompt_of(&model, 1, LEN), GENERATED);
        let expected = expected_of(&model, &request.tokens, GENERATED);
        let name = format!("{} {load:?}", folder.file_name().unwrap().display());
        Case { name, loaded: Preloaded { model, tokenizer: LOADED.tokenizer.clone() }, request, expected }
    }

    fn options(&self, role: Role) -> EngineOptions {
        let mut options = patient(role);
        options.preloaded = Some(self.loaded.clone());
        options
    }
}

/// All families: the random models of `tests/golden`.
fn folders() -> Vec<PathBuf> {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let mut folders: Vec<PathBuf> = std::fs::read_dir(golden).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.retain(|folder| folder.join("golden.safetensors").is_file());
    folders.sort();
    assert!(folders.len() >= 6, "{folders:?}");
    folders
}

fn cases() -> Vec<Case> {
    folders().iter().flat_map(|folder| TYPES.map(|types| Case::new(folder, types))).collect()
}

fn prompt_of(model: &Model, seed: u64, len: usize) -> Vec<u32> {
    let vocab = model.config().vocab as u32;
    prompt(seed, len).into_iter().map(|token| 3 + token % (vocab - 3)).collect()
}

async fn durable_node(dir: &Path) -> Node {
    let (l2_bytes, l3_bytes) = (64 << 20, 64 << 20);
    let data_dir = Some(dir.to_path_buf());
    Node::start(NodeOptions { listen: any_port(), data_dir, l2_bytes, l3_bytes, ..Default::default() }).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_match_when_computed_followed_or_read_from_any_tier() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let cases = cases();
    let node = durable_node(dir.path()).await;
    let mut followed_pages = 0;
    for case in &cases {
        let Case { name, request, expected, .. } = case;
        let prefiller = attached_by(case.options(Role::Prefill), &node).await;
        let decoder = attached_by(case.options(Role::Decode), &node).await;
        let with_cache = |cache| DecodeRequest { cache, ..request.clone() };
        assert_eq!(decode(&decoder, &with_cache(CacheMode::None)).await.tokens, *expected, "{name}: computed");

        let following = DecodeRequest { await_pages: PAGES as u32, ..request.clone() };
        let computing = async {
            tokio::time::sleep(Duration::from_millis(30)).await;
            prefill(&prefiller, &request.tokens, CacheMode::All).await
        };
        let (answer, _) = tokio::join!(decode(&decoder, &following), computing);
        // On a busy machine the prefill may end before the decode asks.
        assert_eq!((answer.start.pages_followed + answer.start.pages_l2) as usize, PAGES, "{name}: followed");
        assert_eq!(answer.tokens, *expected, "{name}: followed");
        followed_pages += answer.start.pages_followed;

        let answer = decode(&decoder, request).await;
        assert_eq!((answer.start.pages_l1 as usize, answer.tokens), (PAGES, expected.clone()), "{name}: L1");
        let answer = decode(&decoder, &with_cache(CacheMode::Store)).await;
        assert_eq!((answer.start.pages_l2 as usize, answer.tokens), (PAGES, expected.clone()), "{name}: L2");
        prefiller.shutdown().await;
        decoder.shutdown().await;
    }
    assert!(followed_pages > 0);
    node.shutdown().await;
    // Now all pages are on L3. Some may be in L2 again when the engine reads them, because its
    // lookup has brought them there.
    let node = durable_node(dir.path()).await;
    let mut pages_l3 = 0;
    for case in &cases {
        let decoder = attached_by(case.options(Role::Decode), &node).await;
        let answer = decode(&decoder, &case.request).await;
        let pages = (answer.start.pages_l2 + answer.start.pages_l3) as usize;
        assert_eq!((pages, &answer.tokens), (PAGES, &case.expected), "{}: L3", case.name);
        pages_l3 += answer.start.pages_l3;
        decoder.shutdown().await;
    }
    assert!(pages_l3 > 0);
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn preempted_sequences_give_the_same_answer() {
    for case in cases() {
        let model = &case.loaded.model;
        let mut options = case.options(Role::Decode);
        // Room for two answers out of six.
        options.l1_bytes = 20 * model.geometry(PAGE as u32).page_bytes();
        let engine = engine_with(options, &MemoryStore::new()).await;
        let requests: Vec<_> = (0..6).map(|seed| decode_request(&prompt_of(model, 30 + seed, 40), 100)).collect();
        let answers = futures::future::join_all(requests.iter().map(|request| decode(&engine, request))).await;
        for (request, answer) in requests.iter().zip(answers) {
            assert_eq!(answer.tokens, expected_of(model, &request.tokens, 100), "{}", case.name);
        }
        assert!(metric(&engine, "larder_engine_preemptions_total").await > 0.0, "{}", case.name);
        engine.shutdown().await;
    }
}
