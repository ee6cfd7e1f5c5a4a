//! A store node on the file system under test, and its clients.

use crate::pages::KINDS;
use crate::record::{Found, Page};
use anyhow::{Result, ensure};
use larder_client::{Client, ClientOptions, Fetched, GetOptions, PutOptions, PutOutcome};
use larder_tests::{PATIENCE, Process, is_flushed, is_recovered, soon, wait_for_node};
use std::path::Path;

/// Limit of the log: 16 segments of 1 MiB, so that a short run reclaims many.
const L3_BYTES: &str = "17MiB";

/// Largest sum of pages in one read. A node refuses reads only if a connection waits for more than
/// 4 MiB, so it never has a reason to refuse one of these.
const READ_BYTES_MAX: usize = 1 << 20;

pub struct Node {
    process: Process,
    clients: Vec<Client>,
}

impl Node {
    /// Starts a node, and waits until it has recovered its log.
    pub async fn start(directory: &Path) -> Result<Node> {
        let directory = directory.join("node");
        let directory = directory.to_str().expect("a UTF-8 path");
        let mut arguments = vec!["store", "--listen", "127.0.0.1:0", "--data-dir", directory];
        // L2 holds all pages, so puts never wait for the emulated disk.
        arguments.extend(["--l2", "64MiB", "--l3-bytes", L3_BYTES, "--rdma", "off"]);
        let mut process = Process::start(&arguments);
        let url: larder_client::StoreUrl = process.url("larder://").parse()?;
        let mut clients = Vec::new();
        for kind in KINDS {
            let client = Client::attach(url.clone(), Some(kind.namespace()), ClientOptions::default());
            ensure!(client.ready(PATIENCE).await, "a client cannot connect to the node");
            clients.push(client);
        }
        wait_for_node(&clients[0], "the node has recovered", is_recovered).await;
        Ok(Node { process, clients })
    }

    pub async fn put(&self, page: Page, version: u64) -> PutOutcome {
        self.put_bytes(page, KINDS[page.0].payload(page.1, version)).await
    }

    pub async fn put_bytes(&self, (kind, page): Page, payload: Vec<u8>) -> PutOutcome {
        let options = PutOptions { busy_retries: u32::MAX, ..PutOptions::default() };
        let mut put = self.clients[kind].put_with(KINDS[kind].new_page(page), options, soon());
        for (number, part) in KINDS[kind].parts(payload).into_iter().enumerate() {
            put.part(number, part);
        }
        put.commit(soon()).await
    }

    /// Forgets a page. Returns `true` once that is durable.
    pub async fn forget(&self, (kind, page): Page) -> bool {
        self.clients[kind].forget(&[KINDS[kind].key(page)], soon()).await.complete
    }

    pub async fn read(&self, (kind, page): Page) -> Found {
        self.read_pages(kind, &[page]).await[0]
    }

    /// Reads pages of one kind. It repeats no read, so that each answer is judged.
    async fn read_pages(&self, kind: usize, pages: &[usize]) -> Vec<Found> {
        let described = KINDS[kind];
        let wanted = pages.iter().map(|&page| (described.key(page), vec![0; described.bytes()])).collect();
        let answers = self.clients[kind].get_with(wanted, GetOptions::default(), soon()).await;
        let found = answers.into_iter().zip(pages).map(|((bytes, fetched), &page)| match fetched {
            Fetched::Hit(_) => described.version_of(page, &bytes).map_or(Found::OtherBytes, Found::Version),
            Fetched::Miss => Found::Miss,
            Fetched::Busy { .. } => Found::Refused,
        });
        found.collect()
    }

    /// Reads all pages of all kinds.
    pub async fn read_all(&self) -> Vec<(Page, Found)> {
        let mut all = Vec::new();
        for (kind, described) in KINDS.into_iter().enumerate() {
            let pages: Vec<usize> = (0..described.pages).collect();
            for batch in pages.chunks((READ_BYTES_MAX / described.bytes()).max(1)) {
                let found = self.read_pages(kind, batch).await;
                all.extend(batch.iter().map(|&page| (kind, page)).zip(found));
            }
        }
        all
    }

    /// Number of pages that the node sent with bytes that do not match their checksums. The client
    /// calls them misses.
    pub fn corrupt_pages(&self) -> u64 {
        self.clients.iter().map(|client| client.stats().corrupt).sum()
    }

    /// Waits until all acknowledged pages are written and synced. No put may run meanwhile.
    pub async fn durable(&self) {
        wait_for_node(&self.clients[0], "all pages are on L3", is_flushed).await;
        // A later answer: a write counts as unsynced before it counts as written.
        let is_synced = |status: &serde_json::Value| status["tiers"]["l3"]["segments_unsynced"] == 0;
        wait_for_node(&self.clients[0], "L3 is synced", is_synced).await;
    }

    pub fn sigkill(self) {
        self.process.sigkill();
    }

    /// Stops the node cleanly, which writes the last footers.
    pub fn stop(self) -> Result<()> {
        let status = self.process.stop();
        ensure!(status.success(), "the node did not stop cleanly: {status}");
        Ok(())
    }
}
