//! The Redis protocol on a port of its own: keys and values over pages.
//!
//! A value is a *manifest* and, if it is long, *data pages*. The manifest is a page under the hash
//! of its key. It has the key, the length, and a short value itself. A long value lies in data
//! pages under a random value id, which the manifest names.
//!
//! Invariants:
//! - Data pages are complete before their manifest becomes visible, and never change. So a reader
//!   gets the old value or the new one, never a mixture. This holds across a crash.
//! - One writer of a key works at a time. It forgets the old manifest before it puts the new one. A
//!   reader that finds none meanwhile waits for the end of the swap.
//! - Every page is verified before it is sent. A client of Redis cannot verify anything.
//! - A connection has one task. It reads no further request while a reply waits for its client, so
//!   a slow client delays itself only.
//!
//! | module | contents |
//! | --- | --- |
//! | `connection` | one client: requests in, replies out |
//! | `execute` | the commands |
//! | `input`, `output` | buffers of a connection |
//! | `receive` | long values, from the socket into pages |
//! | `send` | long values, from pages to the socket |
//! | `values` | find, set, expire and remove |
//! | `manifest` | the page of a key |
//! | `keys` | enumeration of keys |
//! | `swaps` | writers of one key, one after the other |
//! | `leases` | values that stay after a positive `EXISTS` |
//! | `databases` | namespaces of the databases, and flushes |
//!
//! Record 0050 gives the reasons.

mod connection;
mod databases;
mod execute;
mod input;
mod keys;
mod leases;
mod manifest;
mod output;
mod receive;
mod send;
mod swaps;
mod values;

use crate::connection::{ConnectionLimit, REFUSALS_MAX, prepare_tcp};
use crate::places::Place;
use crate::state::NodeState;
pub(crate) use databases::Databases;
use larder_runtime::now;
use larder_runtime::sync::Mutex;
use larder_wire::BusyPollSource;
use leases::Leases;
use rand::Rng;
use rand::rngs::StdRng;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use swaps::Swaps;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

/// Time between two looks for leases that have ended.
const LEASES_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of removals of unfinished values that run at a time. Further ones are left to
/// eviction.
const REMOVALS_MAX: usize = REFUSALS_MAX;

/// State that all Redis connections of a node share.
pub(crate) struct RedisServer {
    node: Arc<NodeState>,
    databases: Databases,
    swaps: Swaps,
    leases: Leases,
    random: Mutex<StdRng>,
    clients: AtomicU64,
    removals: Arc<tokio::sync::Semaphore>,
}

impl RedisServer {
    pub(crate) fn new(node: Arc<NodeState>, databases: Databases, random: StdRng) -> Arc<RedisServer> {
        Arc::new(RedisServer {
            databases,
            swaps: Swaps::default(),
            leases: Leases::new(node.store.options().held_bytes_max()),
            random: Mutex::new(random),
            clients: AtomicU64::new(0),
            removals: Arc::new(tokio::sync::Semaphore::new(REMOVALS_MAX)),
            node,
        })
    }

    fn next_client(&self) -> u64 {
        // Relaxed: the number only has to be unique.
        self.clients.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn random_id(&self) -> [u8; 16] {
        self.random.lock().random()
    }

    /// Ends leases whose time is over, until `stop` is cancelled.
    pub(crate) async fn end_leases(self: Arc<Self>, stop: CancellationToken) {
        while stop.run_until_cancelled(tokio::time::sleep(LEASES_INTERVAL)).await.is_some() {
            self.leases.expire(now());
        }
    }
}

/// Refuses a connection beyond a limit of the node.
pub(crate) async fn refuse(stream: TcpStream, limit: ConnectionLimit) {
    let (_, write) = stream.into_split();
    connection::refuse(write, limit).await;
}

/// Serves one client until it disconnects or violates the protocol. Dropping the future ends the
/// connection and aborts its open put.
pub(crate) async fn serve_tcp(server: Arc<RedisServer>, stream: TcpStream, place: Arc<Place>) {
    let peer = prepare_tcp(&stream);
    let (read, write) = stream.into_split();
    let read = BusyPollSource::new(read, server.node.busy_poll);
    connection::serve(server, peer, (read, write), place).await;
}
