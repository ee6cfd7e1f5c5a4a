//! `larder verify` on the files of a real node.

use larder_client::{Client, NewPage, PutOptions, PutOutcome};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry};
use larder_tests::{Process, data_dir, key, larder_command, soon};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const PAGES: u32 = 60;
const DAMAGES: usize = 7;
const BLOCK: u64 = 4096;

fn start(dir: &Path) -> Process {
    let dir = dir.to_str().expect("a UTF-8 path");
    Process::start(&["store", "--listen", "127.0.0.1:0", "--data-dir", dir, "--l2", "32MiB", "--l3-bytes", "64MiB"])
}

async fn attach(node: &mut Process) -> Client {
    let geometry = PageGeometry {
        dtype: KvDtype::F16,
        layers: 4,
        kv_heads: 1,
        head_dim: 64,
        page_tokens: 150,
        layers_per_part: 2,
        head_groups: 1,
    };
    let namespace = NamespaceDescriptor { model: "m".into(), weights: [1; 32], geometry, tenant: "t".into() };
    larder_tests::attach(&node.url("larder://"), namespace).await
}

/// Bytes of page `n`, none of them zero, so that blocks in use can be recognized.
fn payload(n: u32, bytes: usize) -> Vec<u8> {
    (0..bytes as u32).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(n) >> 16) as u8 | 1).collect()
}

fn verify(dir: &Path, more: &[&str]) -> (Option<i32>, serde_json::Value) {
    let output = larder_command().args(["verify", "--json"]).args(more).arg(dir).output().expect("larder runs");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let last = printed.lines().last().and_then(|line| serde_json::from_str(line).ok());
    (output.status.code(), last.unwrap_or_default())
}

/// Flips one bit in each of [`DAMAGES`] blocks in use.
fn damage(dir: &Path) {
    let entries = std::fs::read_dir(dir.join("l3")).expect("the node created it");
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "seg"));
    files.sort();
    let mut full = Vec::new();
    for path in &files {
        let bytes = std::fs::read(path).expect("a segment");
        let blocks = bytes.chunks(BLOCK as usize).zip(0..).skip(1);
        full.extend(blocks.filter(|(block, _)| block[4000..].iter().all(|&b| b != 0)).map(|(_, n)| (path, n)));
    }
    for index in 0..DAMAGES {
        let (path, block) = full[(index * 2 + 1) * full.len() / (DAMAGES * 2)];
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path).expect("a segment");
        let mut byte = [0];
        let at = block * BLOCK + 123;
        file.read_exact_at(&mut byte, at).expect("the block can be read");
        file.write_all_at(&[byte[0] ^ 0x40], at).expect("the block can be written");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn verify_reports_and_repairs_damage_and_the_node_serves_the_rest() {
    let dir = data_dir();
    let mut node = start(dir.path());
    let client = attach(&mut node).await;
    let bytes = client.geometry().expect("the client has a namespace").page_bytes();
    for n in 0..PAGES {
        let page = NewPage::first(key(n));
        // With a slow disk the node is busy until it has written earlier pages.
        let options = PutOptions { busy_retries: u32::MAX, ..PutOptions::default() };
        let mut put = client.put_with(page, options, soon());
        for (part, piece) in payload(n, bytes).chunks(bytes / 2).enumerate() {
            put.part(part, piece.to_vec().into());
        }
        assert_eq!(put.commit(soon()).await, PutOutcome::Stored);
    }
    assert_eq!(verify(dir.path(), &[]).0, Some(2), "a running node holds the lock");
    assert!(node.stop().success());

    let (code, clean) = verify(dir.path(), &[]);
    assert_eq!((code, &clean["pages"], &clean["damages"]), (Some(0), &PAGES.into(), &0.into()));
    damage(dir.path());
    let (code, damaged) = verify(dir.path(), &[]);
    assert_eq!((code, &damaged["damages"]), (Some(1), &DAMAGES.into()), "{damaged}");
    assert_eq!(damaged["pages"], u64::from(PAGES) - DAMAGES as u64);
    assert_eq!(verify(dir.path(), &["--repair"]).0, Some(0));
    let (code, repaired) = verify(dir.path(), &[]);
    assert_eq!((code, &repaired["pages"], &repaired["damages"]), (Some(0), &damaged["pages"], &0.into()));

    // A copy of a segment under another number is misplaced.
    let segment = dir.path().join("l3/00000000.seg");
    let copy = dir.path().join("l3/00000099.seg");
    for name in ["stray", "stray.1"] {
        std::fs::copy(&segment, &copy).expect("there is a first segment");
        let (code, misplaced) = verify(dir.path(), &[]);
        assert_eq!(
            (code, &misplaced["misplaced_files"], &misplaced["pages"]),
            (Some(1), &1.into(), &repaired["pages"]),
            "{misplaced}"
        );
        assert_eq!(verify(dir.path(), &["--repair"]).0, Some(0));
        assert!(!copy.exists() && copy.with_extension(name).exists());
        assert_eq!(verify(dir.path(), &[]).0, Some(0));
    }

    // A copy under the number of a segment that may have existed: only the next start can decide,
    // and it needs every file for that.
    let next = dir.path().join(format!("l3/{:08}.seg", repaired["segments"].as_u64().expect("a number")));
    let copies = [copy, next];
    for copy in &copies {
        std::fs::copy(&segment, copy).expect("there is a first segment");
    }
    let (code, misplaced) = verify(dir.path(), &["--repair"]);
    assert_eq!(
        (code, &misplaced["misplaced_files"], &misplaced["segments_unrepairable"]),
        (Some(1), &2.into(), &1.into()),
        "{misplaced}"
    );
    copies.iter().for_each(|copy| std::fs::remove_file(copy).expect("the copy is still there"));

    let mut node = start(dir.path());
    let client = attach(&mut node).await;
    let wanted = (0..PAGES).map(|n| (key(n), vec![0u8; bytes])).collect();
    let mut hits = 0;
    for (n, (found, tier)) in (0..PAGES).zip(client.get(wanted, soon()).await) {
        if tier.is_some() {
            hits += 1;
            assert!(found == payload(n, bytes), "page {n}");
        }
    }
    assert_eq!(repaired["pages"], hits);
    assert_eq!(verify(&dir.path().join("nothing"), &[]).0, Some(2));
}
