//! Writers: pages part by part, and whole pages many at a time.

use super::operations::Worker;
use super::{LATE_MS, Wire, soon};
use crate::dice::Dice;
use crate::model::{Bytes as Content, CHAIN, parent};
use crate::payload::{self, page_key};
use crate::wire::model::{Asked, Name};
use crate::workload::Limit;
use bytes::Bytes;
use larder_client::{Client, NewPage, PutOptions, PutOutcome};
use std::time::{Duration, Instant};
use tokio::time::sleep;

pub(super) fn page(key: u64) -> NewPage {
    NewPage { key: page_key(key), parent: parent(key), position: (key % CHAIN) as u32 }
}

/// In memory that the client lends, while it has some: it is soon another page's when this one's put is given up.
fn bytes_of(wire: &Wire, client: &Client, name: Name) -> Bytes {
    let mut buffer = client.buffer(wire.setup.geometry.page_bytes());
    payload::fill(name.key, name.content, &mut buffer);
    buffer.freeze()
}

/// A put begins; some have the bytes of an earlier one.
fn begin(wire: &Wire, key: u64, dice: &mut Dice) -> Name {
    let mut model = wire.model.lock();
    let content = if dice.chance(300_000) { model.last(key) } else { None };
    model.begins(key, content)
}

fn options(wire: &Wire, dice: &mut Dice) -> PutOptions {
    let mortal = dice.chance(wire.setup.mortal);
    let ttl = mortal.then(|| Duration::from_millis(dice.between(1, 20_000)));
    PutOptions { ttl, busy_retries: dice.below(3) as u32 }
}

fn code(outcome: PutOutcome) -> u64 {
    match outcome {
        PutOutcome::Stored => 0,
        PutOutcome::AlreadyThere => 1,
        PutOutcome::Refused => 2,
        PutOutcome::InProgress => 3,
        PutOutcome::Busy { .. } => 4,
        PutOutcome::Lost => 5,
    }
}

/// What the model makes of the end of a put, and whether it can be true.
pub(super) fn ended(wire: &Wire, name: Name, options: PutOptions, outcome: Option<PutOutcome>, asked: Asked) {
    let answer = outcome.map_or(9, code);
    wire.world.event("put", [name.key, name.content, answer]);
    wire.world.count(
        match outcome {
            Some(PutOutcome::Stored) => "puts stored",
            Some(PutOutcome::AlreadyThere) => "puts already there",
            Some(PutOutcome::Refused) => "puts refused",
            Some(PutOutcome::InProgress) => "puts in progress",
            Some(PutOutcome::Busy { .. }) => "puts busy",
            Some(PutOutcome::Lost) => "puts lost",
            None => "puts cancelled",
        },
        1,
    );
    let needed = match outcome {
        Some(PutOutcome::AlreadyThere) => Some(Content::Same(name.content)),
        Some(PutOutcome::Refused) => Some(Content::Other(name.content)),
        _ => None,
    };
    let mut model = wire.model.lock();
    match outcome {
        Some(PutOutcome::Stored) => {
            // The node's clock may be a millisecond early or late.
            let over = options.ttl.map_or(u64::MAX, |ttl| wire.world.unix_ms() + ttl.as_millis() as u64 + 2);
            model.ends(name, Some(over));
        }
        Some(PutOutcome::Lost) | None => {}
        Some(_) => model.ends(name, None),
    }
    let wrong = needed.is_some_and(|needed| !model.may_be(name.key, needed, asked));
    drop(model);
    if wrong && !wire.world.is_suspect(name.key) {
        wire.violate(format!("key {}: a put of content {} is {outcome:?}, which cannot be", name.key, name.content));
    }
}

/// One page, part by part in any order, with pauses; some writers go away.
pub(super) async fn parts(worker: &mut Worker, key: u64) {
    let (limit, deadline) = worker.limit();
    let (wire, dice) = (worker.wire.clone(), &mut worker.dice);
    let (name, options) = (begin(&wire, key, dice), options(&wire, dice));
    limit.run(write(&wire, &worker.client, name, options, deadline, dice)).await;
    wire.check_end("put", deadline, LATE_MS + 200);
}

async fn write(wire: &Wire, client: &Client, name: Name, options: PutOptions, deadline: Instant, dice: &mut Dice) {
    let table = wire.setup.geometry.part_table();
    let bytes = bytes_of(wire, client, name);
    let asked = wire.asks();
    let mut put = client.put_with(page(name.key), options, deadline);
    let mut order: Vec<usize> = (0..table.len()).collect();
    for last in (1..order.len()).rev() {
        order.swap(last, dice.below(last as u64 + 1) as usize);
    }
    let leaves_out = dice.chance(30_000);
    for part in order.into_iter().skip(leaves_out.into()) {
        if dice.chance(200_000) && tokio::time::Instant::now().into_std() < deadline {
            sleep(Duration::from_millis(dice.below(40))).await;
        }
        let start: usize = table[..part].iter().map(|&part| part as usize).sum();
        put.part(part, bytes.slice(start..start + table[part] as usize));
    }
    if dice.chance(80_000) {
        // It goes away without a word.
        return wire.world.count("puts dropped", 1);
    }
    if !leaves_out {
        wire.model.lock().commits(name);
    }
    let mut answer = Heard { wire, name, options, asked, outcome: None };
    answer.outcome = Some(put.commit(deadline).await);
}

/// Tells the model what was heard of a put, or that nothing was.
struct Heard<'a> {
    wire: &'a Wire,
    name: Name,
    options: PutOptions,
    asked: Asked,
    outcome: Option<PutOutcome>,
}

impl Drop for Heard<'_> {
    fn drop(&mut self) {
        ended(self.wire, self.name, self.options, self.outcome, self.asked);
    }
}

/// Several whole pages.
pub(super) async fn pages(worker: &mut Worker) {
    let keys = worker.picks(5);
    let (limit, deadline) = worker.limit();
    put_pages(worker, keys, limit, deadline).await;
}

async fn put_pages(worker: &mut Worker, keys: Vec<u64>, limit: Limit, deadline: Instant) {
    let (wire, dice) = (worker.wire.clone(), &mut worker.dice);
    let options = options(&wire, dice);
    let asked = wire.asks();
    let names: Vec<Name> = keys.into_iter().map(|key| begin(&wire, key, dice)).collect();
    let pages = names.iter().map(|&name| (page(name.key), bytes_of(&wire, &worker.client, name))).collect();
    names.iter().for_each(|&name| wire.model.lock().commits(name));
    let outcomes = limit.run(worker.client.put_pages(pages, options, deadline)).await;
    wire.check_end("put of pages", deadline, LATE_MS);
    for (index, name) in names.into_iter().enumerate() {
        ended(&wire, name, options, outcomes.as_ref().map(|outcomes| outcomes[index]), asked);
    }
}

/// One put that nothing disturbs.
pub(super) async fn alone(wire: &Wire, client: &Client, key: u64) -> (Name, PutOutcome) {
    let name = wire.model.lock().begins(key, None);
    let asked = wire.asks();
    wire.model.lock().commits(name);
    let pages = vec![(page(key), bytes_of(wire, client, name))];
    let outcomes = client.put_pages(pages, PutOptions::default(), soon(Duration::from_secs(60))).await;
    ended(wire, name, PutOptions::default(), Some(outcomes[0]), asked);
    (name, outcomes[0])
}
