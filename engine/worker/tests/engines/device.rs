//! Engines on an emulated device, which runs the CUDA sources on the CPU.

use crate::common::real::*;
use crate::common::*;
use larder_format::KvDtype;
use larder_model::{DeviceChoice, LoadOptions, Model};
use larder_worker::api::CacheMode;
use larder_worker::{Engine, EngineOptions, Preloaded, Role};
use std::sync::Arc;

/// Few tokens, because each takes the emulator a tenth of a second.
const LEN: usize = 50;
const PAGES: usize = (LEN - 1) / PAGE;
const GENERATED: usize = 8;

/// The model with pages of f32: rounding to 16 bits could turn a difference in the last bit of a
/// sum into another token.
fn loaded(device: DeviceChoice) -> Preloaded {
    let load = LoadOptions { kv_dtype: Some(KvDtype::F32), device, ..LoadOptions::default() };
    let model = Model::load_with(&model_dir(), &load, &|_, _| ()).unwrap();
    Preloaded { model: Arc::new(model), tokenizer: LOADED.tokenizer.clone() }
}

fn settings(role: Role, loaded: &Preloaded) -> EngineOptions {
    EngineOptions { preloaded: Some(loaded.clone()), ..patient(role) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_of_a_device_equal_those_of_the_cpu_through_a_node() {
    let (cpu, device) = (loaded(DeviceChoice::Cpu), loaded(DeviceChoice::Emulated));
    let request = decode_request(&prompt(31, LEN), GENERATED);
    let expected = expected_of(&cpu.model, &request.tokens, GENERATED);

    let node = node(any_port()).await;
    let prefiller = attached_by(settings(Role::Prefill, &device), &node).await;
    let decoder = attached_by(settings(Role::Decode, &device), &node).await;
    let computed = prefill(&prefiller, &request.tokens, CacheMode::All).await;
    assert_eq!((computed.pages_computed as usize, computed.pages_lost), (PAGES, 0));
    let answer = decode(&decoder, &request).await;
    assert_eq!((answer.start.pages_l2 as usize, &answer.tokens), (PAGES, &expected), "from the node");
    let answer = decode(&decoder, &request).await;
    assert_eq!((answer.start.pages_l1 as usize, &answer.tokens), (PAGES, &expected), "from L1");
    let mut uncached = request.clone();
    uncached.cache = CacheMode::None;
    let answer = decode(&decoder, &uncached).await;
    assert_eq!((answer.start.tokens_computed as usize, &answer.tokens), (LEN, &expected), "computed");

    // The CPU has other numerics, so it shares no pages.
    let other = attached_by(settings(Role::Decode, &cpu), &node).await;
    assert_ne!(other.info().numerics, decoder.info().numerics);
    assert_ne!(other.info().descriptor.id(), decoder.info().descriptor.id());
    let answer = decode(&other, &request).await;
    assert_eq!((answer.start.pages_l2, &answer.tokens), (0, &expected), "on the CPU");
    for engine in [prefiller, decoder, other] {
        assert!(is_idle(&engine).await);
        engine.shutdown().await;
    }
    node.shutdown().await;
}

/// The store returns pages that are damaged after their verification, each time. Without the
/// comparison on the device, the answer would come from them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_damaged_in_l1_are_computed_anew_before_the_device_uses_them() {
    let (cpu, device) = (loaded(DeviceChoice::Cpu), loaded(DeviceChoice::Emulated));
    let request = decode_request(&prompt(33, LEN), GENERATED);
    let expected = expected_of(&cpu.model, &request.tokens, GENERATED);
    let store = MemoryStore::new();
    let prefiller = engine_with(settings(Role::Prefill, &device), &store).await;
    prefill(&prefiller, &request.tokens, CacheMode::All).await;
    let decoder = engine_with(settings(Role::Decode, &device), &store).await;
    store.flip_bits_in_l1(true);
    let answer = decode(&decoder, &request).await;
    assert_eq!((answer.start.pages_l2 as usize, &answer.tokens), (PAGES, &expected), "damaged pages were read");
    assert!(metric(&decoder, "larder_engine_l1_corrupt_pages_total").await >= 2.0);
    for engine in [prefiller, decoder] {
        assert!(is_idle(&engine).await);
        engine.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_declared_name_does_not_join_devices() {
    let (cpu, device) = (loaded(DeviceChoice::Cpu), loaded(DeviceChoice::Emulated));
    let store = MemoryStore::new();
    let mut namespaces = Vec::new();
    for loaded in [&cpu, &device] {
        let options = EngineOptions { numerics: Some("same".into()), ..settings(Role::Prefill, loaded) };
        let engine = engine_with(options, &store).await;
        namespaces.push(engine.info().descriptor.id());
        engine.shutdown().await;
    }
    assert_ne!(namespaces[0], namespaces[1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_without_its_device_does_not_start() {
    let mut options = options(Role::Decode);
    options.preloaded = None;
    options.load.device = DeviceChoice::Cuda(1000);
    let Err(error) = Engine::start(options).await else { panic!("no machine has a thousand devices") };
    let error = error.to_string();
    assert!(error.contains("cuda:1000") && error.contains("[LRD0411]"), "{error}");
}
