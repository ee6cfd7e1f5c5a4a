//! A node on a file system that is smaller than its configured L3. The test mounts a tmpfs in a
//! private mount namespace, so the kernel returns real `ENOSPC` errors.

use larder_client::{Client, NewPage, PutOptions, PutOutcome};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry};
use larder_tests::{Process, is_flushed, key, larder, larder_command, soon, wait_for_node};
use std::path::Path;
use std::process::Command;

const PAGE_BYTES: usize = 1 << 20;
/// Size of the file system at first, and after it was enlarged, in MiB.
const SMALL_MIB: u64 = 128;
const LARGE_MIB: u64 = 320;

fn payload(number: u32) -> Vec<u8> {
    (0..PAGE_BYTES as u32).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(number) >> 13) as u8).collect()
}

fn start(dir: &Path) -> Process {
    let dir = dir.to_str().expect("a UTF-8 path");
    Process::start(&["store", "--listen", "127.0.0.1:0", "--data-dir", dir, "--l2", "32MiB", "--l3-bytes", "384MiB"])
}

async fn attach(node: &mut Process) -> Client {
    let geometry = PageGeometry {
        dtype: KvDtype::F16,
        layers: 8,
        kv_heads: 8,
        head_dim: 128,
        page_tokens: 32,
        layers_per_part: 4,
        head_groups: 1,
    };
    assert_eq!(geometry.page_bytes(), PAGE_BYTES);
    let namespace = NamespaceDescriptor { model: "m".into(), weights: [1; 32], geometry, tenant: "t".into() };
    larder_tests::attach(&node.url("larder://"), namespace).await
}

/// Puts pages one after the other, and waits until L3 has accepted or refused each. Retries while
/// the node is busy.
async fn put(client: &Client, numbers: std::ops::Range<u32>) {
    for number in numbers {
        let page = NewPage::first(key(number));
        let options = PutOptions { busy_retries: u32::MAX, ..PutOptions::default() };
        let outcomes = client.put_pages(vec![(page, payload(number).into())], options, soon()).await;
        assert_eq!(outcomes, [PutOutcome::Stored], "page {number}");
        // L2 is smaller than the pages. A device that is slower than the puts would miss some.
        wait_for_node(client, "L3 has no write left", is_flushed).await;
    }
}

/// Number of pages present. Fails if a page has wrong bytes.
async fn count_hits(client: &Client, numbers: std::ops::Range<u32>) -> usize {
    let mut hits = 0;
    for number in numbers {
        let (bytes, tier) = client.get(vec![(key(number), vec![0; PAGE_BYTES])], soon()).await.remove(0);
        assert!(tier.is_none() || bytes == payload(number), "page {number} has wrong bytes");
        hits += usize::from(tier.is_some());
    }
    hits
}

fn mount_tmpfs(dir: &Path, options: &str) {
    let status = Command::new("mount").args(["-t", "tmpfs", "-o", options, "larder-test"]).arg(dir).status();
    assert!(status.expect("mount runs").success(), "mount tmpfs with {options}");
}

async fn run_on_small_file_system(dir: &Path) {
    mount_tmpfs(dir, &format!("size={SMALL_MIB}m"));
    let mut node = start(dir);
    let client = attach(&mut node).await;
    put(&client, 0..150).await;
    assert!(count_hits(&client, 0..150).await > 60, "L3 stores no pages once the device is full");
    drop(client);
    node.sigkill();

    // All records written to the full device must be intact.
    let verified = larder_command().arg("verify").arg(dir).output().expect("larder runs");
    assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stdout));
    let mut node = start(dir);
    let client = attach(&mut node).await;
    let small = count_hits(&client, 0..150).await;
    assert!((60..SMALL_MIB as usize).contains(&small), "{small} pages were found");
    let late = count_hits(&client, 90..150).await;
    assert!(late > 30, "of the last 60 pages {late} were found: the log does not reclaim its oldest segments");
    put(&client, 150..200).await;
    drop(client);
    assert!(node.stop().success());

    // A node checks for more space when it starts.
    mount_tmpfs(dir, &format!("remount,size={LARGE_MIB}m"));
    let mut node = start(dir);
    let client = attach(&mut node).await;
    put(&client, 200..400).await;
    drop(client);
    assert!(node.stop().success());
    let mut node = start(dir);
    let client = attach(&mut node).await;
    let large = count_hits(&client, 0..400).await;
    assert!(large > small * 3 / 2, "{small} pages at first, {large} with more room");
    drop(client);
    assert!(node.stop().success());
}

#[test]
fn full_device_loses_pages_only() {
    const INSIDE: &str = "LARDER_TEST_SMALL_FILE_SYSTEM";
    if let Some(dir) = std::env::var_os(INSIDE) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        return runtime.expect("a runtime").block_on(run_on_small_file_system(Path::new(&dir)));
    }
    larder();
    let dir = tempfile::tempdir().expect("a directory");
    let output = Command::new("timeout")
        .args(["--signal=KILL", "300", "unshare", "--map-root-user", "--mount"])
        .arg(std::env::current_exe().expect("a test has a path"))
        .args(["--exact", "full_device_loses_pages_only", "--nocapture"])
        .env(INSIDE, dir.path())
        .output()
        .expect("timeout runs");
    let stdout = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}\n{errors}");
}
