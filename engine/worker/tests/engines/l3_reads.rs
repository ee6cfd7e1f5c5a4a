//! Engines that read pages by themselves from the L3 of a node of this machine.

use crate::common::real::*;
use crate::common::*;
use larder_client::{Client, ClientOptions, Extent};
use larder_format::{KvDtype, page_keys};
use larder_model::{DeviceChoice, LoadOptions, Model};
use larder_node::{Node, NodeOptions};
use larder_worker::api::{CacheMode, DecodeRequest};
use larder_worker::{EngineHandle, EngineOptions, L3Path, Preloaded, Role};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Few tokens, because each takes the emulator a tenth of a second.
const LEN: usize = 50;
const PAGES: usize = (LEN - 1) / PAGE;
const GENERATED: usize = 4;

fn loaded(device: DeviceChoice) -> Preloaded {
    let load = LoadOptions { kv_dtype: Some(KvDtype::F32), device, ..LoadOptions::default() };
    let model = Model::load_with(&model_dir(), &load, &|_, _| ()).unwrap();
    Preloaded { model: Arc::new(model), tokenizer: LOADED.tokenizer.clone() }
}

fn settings(role: Role, loaded: &Preloaded, l3_path: L3Path) -> EngineOptions {
    EngineOptions { preloaded: Some(loaded.clone()), l3_path, ..patient(role) }
}

/// A node that shares its arena, with an L3 in `dir`.
async fn local_node(dir: &Path) -> Node {
    let options = NodeOptions {
        listen: any_port(),
        data_dir: Some(dir.to_path_buf()),
        l2_bytes: 64 << 20,
        l3_bytes: 64 << 20,
        share_memory: Some(true),
        extent_hold_time: Duration::from_secs(600),
        ..Default::default()
    };
    Node::start(options).await.unwrap()
}

/// Computes the pages of the request, and restarts the node: they are on L3 alone.
async fn with_pages_on_l3(dir: &Path, loaded: &Preloaded, request: &DecodeRequest) -> Node {
    let node = local_node(dir).await;
    let prefiller = attached_by(settings(Role::Prefill, loaded, L3Path::Store), &node).await;
    let computed = prefill(&prefiller, &request.tokens, CacheMode::All).await;
    assert_eq!((computed.pages_computed as usize, computed.pages_lost), (PAGES, 0));
    prefiller.shutdown().await;
    node.shutdown().await;
    local_node(dir).await
}

async fn direct_pages(engine: &EngineHandle) -> f64 {
    let line = format!("larder_engine_prompt_pages_total{{role=\"{}\",source=\"l3_gds\"}}", engine.role());
    metric(engine, &line).await
}

fn pages_read_by(node: &Node) -> u64 {
    node.status()["counters"]["pages_read_l3"].as_u64().unwrap()
}

/// On a device L1 is pinned, and pages are read straight to it. On the CPU they pass a slot.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefix_comes_from_l3_past_the_node_with_equal_text() {
    for device in [DeviceChoice::Emulated, DeviceChoice::Cpu] {
        let loaded = loaded(device);
        let request = decode_request(&prompt(51, LEN), GENERATED);
        let expected = expected_of(&loaded.model, &request.tokens, GENERATED);
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let node = with_pages_on_l3(dir.path(), &loaded, &request).await;

        let decoder = attached_by(settings(Role::Decode, &loaded, L3Path::Gds), &node).await;
        let answer = decode(&decoder, &request).await;
        assert_eq!((answer.start.pages_l3 as usize, &answer.tokens), (PAGES, &expected), "{device}");
        assert_eq!((direct_pages(&decoder).await, pages_read_by(&node)), (PAGES as f64, 0), "{device}");
        assert!(is_idle(&decoder).await);
        decoder.shutdown().await;

        // The default leaves it to the node.
        let decoder = attached_by(settings(Role::Decode, &loaded, L3Path::Auto), &node).await;
        let answer = decode(&decoder, &request).await;
        assert_eq!(answer.tokens, expected, "{device}");
        assert_eq!((direct_pages(&decoder).await, pages_read_by(&node)), (0.0, PAGES as u64), "{device}");
        decoder.shutdown().await;
        node.shutdown().await;
    }
}

/// Flips a bit of a page in the file that its extent names.
fn damage(extent: &Extent) {
    let path = std::fs::read_link(format!("/proc/self/fd/{}", extent.file().as_raw_fd())).unwrap();
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let at = extent.offset() + 100;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 4], at).unwrap();
    file.sync_all().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_extent_is_a_miss_and_its_page_is_computed() {
    let loaded = loaded(DeviceChoice::Emulated);
    let request = decode_request(&prompt(52, LEN), GENERATED);
    let expected = expected_of(&loaded.model, &request.tokens, GENERATED);
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let node = with_pages_on_l3(dir.path(), &loaded, &request).await;
    let decoder = attached_by(settings(Role::Decode, &loaded, L3Path::Gds), &node).await;

    let url = format!("larder://{}/", node.addr()).parse().unwrap();
    let client = Client::attach(url, Some(decoder.info().descriptor.clone()), ClientOptions::default());
    assert!(client.ready(Duration::from_secs(60)).await);
    let key = page_keys(&request.tokens, PAGE)[1];
    let extents = client.extents(&[key], Instant::now() + Duration::from_secs(60)).await;
    damage(extents[0].as_ref().expect("the page is on L3"));
    drop(extents);

    let answer = decode(&decoder, &request).await;
    assert_eq!((answer.start.pages_l3 as usize, &answer.tokens), (PAGES - 1, &expected));
    assert_eq!(direct_pages(&decoder).await, (PAGES - 1) as f64);
    // The engine samples this count from time to time.
    let until = Instant::now() + Duration::from_secs(60);
    while metric(&decoder, "larder_engine_store_damaged_pages_total").await == 0.0 {
        assert!(Instant::now() < until, "the damage was not counted");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(is_idle(&decoder).await);
    decoder.shutdown().await;
    node.shutdown().await;
}
