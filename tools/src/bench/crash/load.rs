//! Readers and writers of one life of the node, and the check at its beginning.

use super::ledger::{Ledger, Verdict};
use super::pages::Kind;
use super::tally::{Tally, one};
use anyhow::{Result, bail};
use larder_client::{Client, ClientOptions, PutOutcome, StoreUrl};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Each page belongs to one of this many writers, who alone puts and forgets it.
const WRITERS: usize = 3;
const READERS: usize = 2;
/// Most time for one operation.
const PATIENCE: Duration = Duration::from_secs(5);
/// Pages in one read.
const BATCH: usize = 32;
/// Pages that must be there are looked for this long: a node may still be reading its log.
const SETTLE_MAX: Duration = Duration::from_secs(2);

/// One kind of pages and what is known of them.
pub struct Shelf {
    /// What they are.
    pub kind: Kind,
    /// What is known.
    pub ledger: Ledger,
}

/// What all tasks work with.
pub struct Load {
    /// Every kind of pages.
    pub shelves: Vec<Shelf>,
    /// What was counted.
    pub tally: Arc<Tally>,
    /// Bytes that may still be put in this episode.
    pub bytes_left: AtomicU64,
    /// Nothing can have been evicted, so that what is not there was lost.
    pub roomy: bool,
}

/// Tasks that run until they are stopped.
pub struct Running {
    stop: Arc<AtomicBool>,
    tasks: JoinSet<()>,
}

impl Running {
    /// Stops them. Their requests end as soon as the node is gone.
    pub async fn stop(mut self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let all = async {
            while self.tasks.join_next().await.transpose()?.is_some() {}
            Ok(())
        };
        match tokio::time::timeout(PATIENCE * 2, all).await {
            Ok(ended) => ended,
            Err(_) => bail!("a client's request did not end within {:?}", PATIENCE * 2),
        }
    }
}

/// One client per kind of pages, all connected.
pub async fn attach(load: &Load, url: &StoreUrl) -> Result<Vec<Client>> {
    let mut clients = Vec::new();
    for shelf in &load.shelves {
        let client = Client::attach(url.clone(), Some(shelf.kind.namespace()), ClientOptions::default());
        if !client.ready(PATIENCE).await {
            bail!("no client could connect to a node that said it was ready");
        }
        clients.push(client);
    }
    Ok(clients)
}

/// Starts readers and writers.
pub fn start(load: &Arc<Load>, clients: &[Client], seed: u64) -> Running {
    let stop = Arc::new(AtomicBool::new(false));
    let mut tasks = JoinSet::new();
    for number in 0..WRITERS + READERS {
        let (load, clients, stop) = (load.clone(), clients.to_vec(), stop.clone());
        let mut rng = StdRng::seed_from_u64(seed.wrapping_add(number as u64));
        tasks.spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                let shelf = rng.random_range(0..load.shelves.len());
                let on = Aisle { load: &load, shelf: &load.shelves[shelf], client: &clients[shelf] };
                match number < WRITERS {
                    true => on.write(number, &mut rng).await,
                    false => on.read_some(&mut rng).await,
                }
                // Without a node every request ends at once; the runtime's clock and sockets need their turn too.
                tokio::task::yield_now().await;
            }
        });
    }
    Running { stop, tasks }
}

/// Reads every page after a start: each is right, and those that must be there are.
pub async fn check_all(load: &Load, clients: &[Client], killed: Option<Instant>) {
    for (shelf, client) in load.shelves.iter().zip(clients) {
        let on = Aisle { load, shelf, client };
        let keys: Vec<usize> = (0..shelf.kind.keys).collect();
        for batch in keys.chunks(BATCH) {
            on.check(batch, killed).await;
        }
    }
}

/// Where one task works now.
struct Aisle<'a> {
    load: &'a Load,
    shelf: &'a Shelf,
    client: &'a Client,
}

impl Aisle<'_> {
    async fn write(&self, writer: usize, rng: &mut StdRng) {
        let key = rng.random_range(0..self.shelf.kind.keys / WRITERS) * WRITERS + writer;
        match rng.random_range(0..10) {
            0 | 1 if rng.random_bool(0.9) => self.forget(&[key]).await,
            0 | 1 => {
                let keys: Vec<usize> = (0..8).map(|i| (key + i * WRITERS) % self.shelf.kind.keys).collect();
                let own: Vec<usize> = keys.into_iter().filter(|key| key % WRITERS == writer).collect();
                self.forget(&own).await;
            }
            2 => drop(self.read(&[key]).await),
            3 => self.put_again(key).await,
            _ => self.put(key).await,
        }
    }

    async fn put(&self, key: usize) {
        let Some(version) = self.take_room().then(|| self.shelf.ledger.begin_put(key)).flatten() else {
            // So that a writer without work does not keep a core from the others.
            return tokio::time::sleep(Duration::from_millis(1)).await;
        };
        let tally = &self.load.tally;
        match self.put_version(key, version).await {
            PutOutcome::Stored => self.shelf.ledger.stored(key, version),
            PutOutcome::AlreadyThere => {
                tally.violation(&tally.impossible, format!("{}: a new version was there already", self.name(key)));
            }
            PutOutcome::Refused if !self.shelf.ledger.refused(key, version) => {
                let words = format!("{}: version {version} refused, but no other can be there", self.name(key));
                tally.violation(&tally.impossible, words);
            }
            PutOutcome::Refused | PutOutcome::Busy { .. } | PutOutcome::InProgress => {}
            PutOutcome::Lost => self.shelf.ledger.put_unknown(key),
        }
    }

    /// What should be there, once more: it is there already, or was evicted and is stored.
    async fn put_again(&self, key: usize) {
        let Some(version) = self.shelf.ledger.expected(key) else { return };
        if !self.take_room() {
            return;
        }
        match self.put_version(key, version).await {
            PutOutcome::Stored | PutOutcome::AlreadyThere => self.shelf.ledger.stored(key, version),
            PutOutcome::Lost => self.shelf.ledger.put_unknown(key),
            PutOutcome::Refused | PutOutcome::Busy { .. } | PutOutcome::InProgress => {}
        }
    }

    /// Whether this episode may still put a page.
    fn take_room(&self) -> bool {
        let bytes = self.shelf.kind.page_bytes() as u64;
        let left = &self.load.bytes_left;
        left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes)).is_ok()
    }

    async fn put_version(&self, key: usize, version: u64) -> PutOutcome {
        let (tally, kind) = (&self.load.tally, &self.shelf.kind);
        one(&tally.puts);
        tally.put_bytes.fetch_add(kind.page_bytes() as u64, Ordering::Relaxed);
        let deadline = Instant::now() + PATIENCE;
        let mut put = self.client.put(kind.page(key), deadline);
        for (number, part) in kind.parts(key, version).into_iter().enumerate() {
            put.part(number, part);
        }
        let outcome = put.commit(deadline).await;
        one(match outcome {
            PutOutcome::Stored => &tally.stored,
            PutOutcome::AlreadyThere => &tally.already_there,
            PutOutcome::Refused => &tally.refused,
            PutOutcome::InProgress | PutOutcome::Busy { .. } | PutOutcome::Lost => &tally.puts_lost,
        });
        outcome
    }

    async fn forget(&self, keys: &[usize]) {
        let ledger = &self.shelf.ledger;
        let begun: Vec<_> = keys.iter().filter_map(|&key| Some((key, ledger.begin_forget(key)?))).collect();
        let names: Vec<_> = begun.iter().map(|&(key, _)| self.shelf.kind.key(key)).collect();
        if names.is_empty() || !self.client.forget(&names, Instant::now() + PATIENCE).await.complete {
            return;
        }
        self.load.tally.forgotten.fetch_add(names.len() as u64, Ordering::Relaxed);
        begun.into_iter().for_each(|(key, forgetting)| ledger.forgotten(key, forgetting));
    }

    async fn read_some(&self, rng: &mut StdRng) {
        let keys: Vec<usize> =
            (0..rng.random_range(1..=8)).map(|_| rng.random_range(0..self.shelf.kind.keys)).collect();
        self.read(&keys).await;
    }

    /// Reads pages and judges what came. The answer is the version of each that was there and right.
    async fn read(&self, keys: &[usize]) -> Vec<Option<u64>> {
        let Shelf { kind, ledger } = self.shelf;
        let floors: Vec<_> = keys.iter().map(|&key| ledger.begin_read(key)).collect();
        let wanted = keys.iter().map(|&key| (kind.key(key), vec![0u8; kind.page_bytes()])).collect();
        let answers = self.client.get(wanted, Instant::now() + PATIENCE).await;
        self.load.tally.gets.fetch_add(keys.len() as u64, Ordering::Relaxed);
        let judged = answers.into_iter().zip(keys).zip(floors).map(|(((bytes, tier), &key), floor)| {
            tier?;
            one(&self.load.tally.hits);
            let version = kind.version_of(key, &bytes);
            self.judge(key, version, version.map(|version| ledger.judge(key, floor, version)))
        });
        judged.collect()
    }

    fn judge(&self, key: usize, version: Option<u64>, verdict: Option<Verdict>) -> Option<u64> {
        let (tally, name) = (&self.load.tally, self.name(key));
        match verdict {
            Some(Verdict::Right) => return version,
            None => tally.violation(&tally.wrong_bytes, format!("{name}: bytes that were never put")),
            Some(Verdict::Resurrected) => {
                tally.violation(&tally.resurrected, format!("{name}: version {version:?} had been forgotten durably"));
            }
            Some(Verdict::Replaced) => {
                tally.violation(&tally.impossible, format!("{name}: version {version:?} had been replaced"));
            }
            Some(Verdict::Unborn) => {
                tally.violation(&tally.impossible, format!("{name}: version {version:?} was not put yet"));
            }
        }
        None
    }

    /// The first reads after a start.
    async fn check(&self, keys: &[usize], killed: Option<Instant>) {
        let mut found = self.read(keys).await;
        let expected = |key| killed.filter(|_| self.load.roomy).and_then(|at| self.shelf.ledger.must_have(key, at));
        let missing = |found: &[Option<u64>]| {
            let pairs = keys.iter().zip(found);
            pairs.filter(|&(&key, &version)| version.is_none() && expected(key).is_some()).count()
        };
        let patience = Instant::now() + SETTLE_MAX;
        while missing(&found) > 0 && Instant::now() < patience {
            tokio::time::sleep(Duration::from_millis(50)).await;
            found = self.read(keys).await;
        }
        let tally = &self.load.tally;
        for (&key, version) in keys.iter().zip(found) {
            if let Some(expected) = expected(key) {
                one(&tally.must_have);
                if version != Some(expected) {
                    let name = self.name(key);
                    tally.violation(&tally.lost, format!("{name}: version {expected} expected, {version:?} found"));
                }
            }
            self.shelf.ledger.found(key, version);
        }
    }

    fn name(&self, key: usize) -> String {
        format!("page {key} of {} bytes", self.shelf.kind.page_bytes())
    }
}
