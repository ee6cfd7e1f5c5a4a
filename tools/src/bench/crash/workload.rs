//! Readers and writers between two kills, and the verification after a start.

use super::counters::{Counters, increment};
use super::node_state;
use super::oracle::{Oracle, ReadResult};
use super::pages::PageKind;
use anyhow::{Result, bail};
use larder_client::{Client, ClientOptions, GetOptions, PutOutcome, StoreUrl};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Number of writers. Each page belongs to one writer, so that its versions are totally ordered and
/// a read can be judged.
const WRITERS: usize = 3;
const READERS: usize = 2;
/// Deadline of an operation. One that takes longer hangs, however busy the machine is.
pub const OPERATION_TIMEOUT: Duration = Duration::from_secs(60);
const BATCH: usize = 32;
/// Pause of a writer that has nothing to do.
const IDLE_PAUSE: Duration = Duration::from_millis(1);

pub struct PageSet {
    pub kind: PageKind,
    pub oracle: Oracle,
}

pub struct Workload {
    pub page_sets: Vec<PageSet>,
    pub counters: Arc<Counters>,
    /// Bytes that may still be put in this episode. The budget keeps a roomy L3 from evicting, so
    /// that a missing page was lost.
    pub bytes_left: AtomicU64,
    /// L3 holds every page, so that a missing page was lost.
    pub roomy: bool,
}

pub struct WorkloadTasks {
    stop: Arc<AtomicBool>,
    writers_paused: Arc<AtomicBool>,
    tasks: JoinSet<()>,
}

impl WorkloadTasks {
    /// Begins or ends a pause of the writers. They finish the operations that they have begun.
    pub fn pause_writers(&self, paused: bool) {
        self.writers_paused.store(paused, Ordering::Relaxed);
    }

    pub async fn stop(mut self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let all = async {
            while self.tasks.join_next().await.transpose()?.is_some() {}
            Ok(())
        };
        match tokio::time::timeout(OPERATION_TIMEOUT * 2, all).await {
            Ok(ended) => ended,
            Err(_) => bail!("a client's request did not end within {:?}", OPERATION_TIMEOUT * 2),
        }
    }
}

pub async fn attach(workload: &Workload, url: &StoreUrl) -> Result<Vec<Client>> {
    let mut clients = Vec::new();
    for pages in &workload.page_sets {
        let client = Client::attach(url.clone(), Some(pages.kind.namespace()), ClientOptions::default());
        if !client.ready(OPERATION_TIMEOUT).await {
            bail!("a client could not connect to a node that had reported ready");
        }
        clients.push(client);
    }
    Ok(clients)
}

pub fn start(workload: &Arc<Workload>, clients: &[Client], seed: u64) -> WorkloadTasks {
    let stop = Arc::new(AtomicBool::new(false));
    let writers_paused = Arc::new(AtomicBool::new(false));
    let mut tasks = JoinSet::new();
    for number in 0..WRITERS + READERS {
        let workload = workload.clone();
        let clients = clients.to_vec();
        let stop = stop.clone();
        let writers_paused = writers_paused.clone();
        let mut rng = StdRng::seed_from_u64(seed.wrapping_add(number as u64));
        tasks.spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                if number < WRITERS && writers_paused.load(Ordering::Relaxed) {
                    tokio::time::sleep(IDLE_PAUSE).await;
                    continue;
                }
                let pages = rng.random_range(0..workload.page_sets.len());
                let worker = Worker { workload: &workload, pages: &workload.page_sets[pages], client: &clients[pages] };
                match number < WRITERS {
                    true => worker.write(number, &mut rng).await,
                    false => worker.read_some(&mut rng).await,
                }
                // Without a node every request fails at once. Yielding lets the runtime drive its
                // timers and sockets.
                tokio::task::yield_now().await;
            }
        });
    }
    WorkloadTasks { stop, writers_paused, tasks }
}

/// Reads every page after a start: each version must be valid, and durable pages must be present.
/// Violations go to the counters. Fails if the node does not end its recovery.
pub async fn check_all(workload: &Workload, clients: &[Client], flushed: Option<Instant>) -> Result<()> {
    for (pages, client) in workload.page_sets.iter().zip(clients) {
        let worker = Worker { workload, pages, client };
        let keys: Vec<usize> = (0..pages.kind.keys).collect();
        for batch in keys.chunks(BATCH) {
            worker.check(batch, flushed).await?;
        }
    }
    Ok(())
}

struct Worker<'a> {
    workload: &'a Workload,
    pages: &'a PageSet,
    client: &'a Client,
}

impl Worker<'_> {
    async fn write(&self, writer: usize, rng: &mut StdRng) {
        let key = rng.random_range(0..self.pages.kind.keys / WRITERS) * WRITERS + writer;
        match rng.random_range(0..10) {
            0 | 1 if rng.random_bool(0.9) => self.forget(&[key]).await,
            0 | 1 => {
                let keys: Vec<usize> = (0..8).map(|i| (key + i * WRITERS) % self.pages.kind.keys).collect();
                let own: Vec<usize> = keys.into_iter().filter(|key| key % WRITERS == writer).collect();
                self.forget(&own).await;
            }
            2 => drop(self.read(&[key]).await),
            3 => self.put_again(key).await,
            _ => self.put(key).await,
        }
    }

    async fn put(&self, key: usize) {
        let Some(version) = self.reserve_bytes().then(|| self.pages.oracle.begin_put(key)).flatten() else {
            // A writer without work must not take a core from the others.
            return tokio::time::sleep(IDLE_PAUSE).await;
        };
        let counters = &self.workload.counters;
        match self.put_version(key, version).await {
            PutOutcome::Stored => self.pages.oracle.stored(key, version),
            PutOutcome::AlreadyThere => {
                counters.violation(
                    &counters.impossible,
                    format!("{}: a new version was answered \"already there\"", self.name(key)),
                );
            }
            PutOutcome::Refused if !self.pages.oracle.refused(key, version) => {
                let text = format!("{}: version {version} was refused, but no other can exist", self.name(key));
                counters.violation(&counters.impossible, text);
            }
            PutOutcome::Refused | PutOutcome::Forgotten | PutOutcome::Retired => {}
            PutOutcome::Busy { .. } | PutOutcome::InProgress => {}
            PutOutcome::Lost => self.pages.oracle.put_unknown(key),
        }
    }

    /// Puts the expected version again. The node has it, or has evicted it and stores it once more.
    async fn put_again(&self, key: usize) {
        let Some(version) = self.pages.oracle.expected(key) else { return };
        if !self.reserve_bytes() {
            return;
        }
        match self.put_version(key, version).await {
            PutOutcome::Stored | PutOutcome::AlreadyThere => self.pages.oracle.stored(key, version),
            PutOutcome::Lost => self.pages.oracle.put_unknown(key),
            PutOutcome::Refused | PutOutcome::Forgotten | PutOutcome::Retired => {}
            PutOutcome::Busy { .. } | PutOutcome::InProgress => {}
        }
    }

    fn reserve_bytes(&self) -> bool {
        let bytes = self.pages.kind.page_bytes() as u64;
        let left = &self.workload.bytes_left;
        left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes)).is_ok()
    }

    async fn put_version(&self, key: usize, version: u64) -> PutOutcome {
        let counters = &self.workload.counters;
        let kind = &self.pages.kind;
        increment(&counters.puts);
        counters.put_bytes.fetch_add(kind.page_bytes() as u64, Ordering::Relaxed);
        let deadline = Instant::now() + OPERATION_TIMEOUT;
        let mut put = self.client.put(kind.page(key), deadline);
        for (number, part) in kind.parts(key, version).into_iter().enumerate() {
            put.part(number, part);
        }
        let outcome = put.commit(deadline).await;
        increment(match outcome {
            PutOutcome::Stored => &counters.stored,
            PutOutcome::AlreadyThere => &counters.already_there,
            PutOutcome::Refused => &counters.refused,
            PutOutcome::Forgotten | PutOutcome::Retired | PutOutcome::InProgress => &counters.puts_lost,
            PutOutcome::Busy { .. } | PutOutcome::Lost => &counters.puts_lost,
        });
        outcome
    }

    async fn forget(&self, keys: &[usize]) {
        let oracle = &self.pages.oracle;
        let begun: Vec<_> = keys.iter().filter_map(|&key| Some((key, oracle.begin_forget(key)?))).collect();
        let page_keys: Vec<_> = begun.iter().map(|&(key, _)| self.pages.kind.key(key)).collect();
        if page_keys.is_empty() || !self.client.forget(&page_keys, Instant::now() + OPERATION_TIMEOUT).await.complete {
            return;
        }
        self.workload.counters.forgotten.fetch_add(page_keys.len() as u64, Ordering::Relaxed);
        begun.into_iter().for_each(|(key, pending)| oracle.forgotten(key, pending));
    }

    async fn read_some(&self, rng: &mut StdRng) {
        let keys: Vec<usize> =
            (0..rng.random_range(1..=8)).map(|_| rng.random_range(0..self.pages.kind.keys)).collect();
        self.read(&keys).await;
    }

    /// Reads pages and checks their bytes. Returns the version of each page that was present and
    /// valid.
    async fn read(&self, keys: &[usize]) -> Vec<Option<u64>> {
        self.read_with(keys, GetOptions::default()).await
    }

    async fn read_with(&self, keys: &[usize], options: GetOptions) -> Vec<Option<u64>> {
        let PageSet { kind, oracle } = self.pages;
        let bounds: Vec<_> = keys.iter().map(|&key| oracle.begin_read(key)).collect();
        let wanted = keys.iter().map(|&key| (kind.key(key), vec![0u8; kind.page_bytes()])).collect();
        let answers = self.client.get_with(wanted, options, Instant::now() + OPERATION_TIMEOUT).await;
        self.workload.counters.gets.fetch_add(keys.len() as u64, Ordering::Relaxed);
        let checked = answers.into_iter().zip(keys).zip(bounds).map(|(((bytes, fetched), &key), bound)| {
            fetched.tier()?;
            increment(&self.workload.counters.hits);
            let version = kind.version_of(key, &bytes);
            self.check_version(key, version, version.map(|version| oracle.check_version(key, bound, version)))
        });
        checked.collect()
    }

    fn check_version(&self, key: usize, version: Option<u64>, result: Option<ReadResult>) -> Option<u64> {
        let counters = &self.workload.counters;
        let name = self.name(key);
        match result {
            Some(ReadResult::Valid) => return version,
            None => counters.violation(&counters.wrong_bytes, format!("{name}: returned bytes that were never put")),
            Some(ReadResult::Resurrected) => {
                counters.violation(
                    &counters.resurrected,
                    format!("{name}: version {version:?} returned after its durable deletion"),
                );
            }
            Some(ReadResult::Replaced) => {
                counters.violation(
                    &counters.impossible,
                    format!("{name}: returned version {version:?}, which had been replaced"),
                );
            }
            Some(ReadResult::NeverPut) => {
                counters.violation(
                    &counters.impossible,
                    format!("{name}: returned version {version:?}, which was not put yet"),
                );
            }
        }
        None
    }

    async fn check(&self, keys: &[usize], flushed: Option<Instant>) -> Result<()> {
        let oracle = &self.pages.oracle;
        let expected = |key| self.workload.roomy.then(|| oracle.must_have(key, flushed)).flatten();
        // A node refuses pages at the end of a large get to a client that reads slowly. A refused
        // page is not lost, so the check comes back for it until the deadline.
        let options = GetOptions { busy_retries: u32::MAX, ..GetOptions::default() };
        let mut found = self.read_with(keys, options).await;
        // The node serves while it recovers its log, so a miss is final only after recovery.
        if keys.iter().zip(&found).any(|(&key, version)| version.is_none() && expected(key).is_some()) {
            node_state::wait_until_recovered(self.client).await?;
            found = self.read_with(keys, options).await;
        }
        let counters = &self.workload.counters;
        for (&key, version) in keys.iter().zip(found) {
            if let Some(expected) = expected(key) {
                increment(&counters.must_have);
                if version != Some(expected) {
                    let name = self.name(key);
                    counters
                        .violation(&counters.lost, format!("{name}: version {expected} expected, {version:?} found"));
                }
            }
            oracle.found(key, version);
        }
        Ok(())
    }

    fn name(&self, key: usize) -> String {
        format!("page {key} of {} bytes", self.pages.kind.page_bytes())
    }
}
