//! Attackers: clients that repeat one attack each, from addresses of their own.
//!
//! Strangers are bounded by sockets, not by processor time: each waits between two attacks, and the
//! pauses bound the rate of every attack.

use super::servers::Ports;
use anyhow::{Result, ensure};
use futures::future::BoxFuture;
use larder_runtime::lock::Mutex;
use serde::Serialize;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Addresses of the strangers, from 127.0.0.2. Servers tell clients apart by their addresses.
/// Honest clients have 127.0.0.1, and the one of the Redis port the first address behind the
/// strangers.
const ADDRESSES: usize = 4;
/// Maximum duration of one attack. A stranger then drops its connection.
const ATTACK_TIMEOUT: Duration = Duration::from_secs(20);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which a server must keep a connection that stalls, so that the attack has an effect.
const HELD_MIN: Duration = Duration::from_secs(1);
/// Attacks of one client in one turn, at most.
const ROUNDS_MAX: u64 = 1 << 16;
/// Bytes that an attacker sends at a time. A network would deliver no more at once. A longer call
/// copies for milliseconds, and a kernel without preemption lets no other thread run meanwhile.
const PIECE_BYTES: usize = 64 << 10;
/// Receive buffer of clients that do not read, in bytes.
const SMALL_BUFFER: u32 = 4096;

/// Targets of the attacks, and what the honest clients are doing.
pub struct Target {
    pub ports: Ports,
    /// Folder of the engines' model.
    pub model_dir: PathBuf,
    /// Number of the next page that the honest client puts.
    pub next_page: Arc<AtomicU64>,
    /// Number of the next prompt that the honest client sends.
    pub next_prompt: Arc<AtomicU64>,
    /// Number of the next value that the honest client of the Redis port sets.
    pub next_value: Arc<AtomicU64>,
}

/// Address of this machine that no stranger has.
pub fn honest_address() -> IpAddr {
    address(ADDRESSES)
}

fn address(number: usize) -> IpAddr {
    Ipv4Addr::new(127, 0, 0, 2 + number as u8).into()
}

/// One client of an attack.
#[derive(Clone)]
pub struct Stranger {
    pub target: Arc<Target>,
    pub number: usize,
    /// Number of this client's attack. It never repeats.
    pub round: u64,
    counters: Arc<Counters>,
}

pub struct Attack {
    pub name: &'static str,
    pub clients: usize,
    /// Pause of a client between two attacks.
    pub pause: Duration,
    pub run: fn(Stranger) -> BoxFuture<'static, Result<()>>,
}

impl Stranger {
    pub fn new(target: &Arc<Target>, number: usize) -> Stranger {
        Stranger { target: target.clone(), number, round: 0, counters: Arc::default() }
    }

    pub fn address(&self) -> IpAddr {
        address(self.number % ADDRESSES)
    }

    pub async fn connect(&self, port: SocketAddr) -> Result<TcpStream> {
        self.connect_with(port, None).await
    }

    /// Connects with a receive buffer that fills at once.
    pub async fn connect_unread(&self, port: SocketAddr) -> Result<TcpStream> {
        self.connect_with(port, Some(SMALL_BUFFER)).await
    }

    /// Counts this attack as effective: a server does or holds what the attack is about. At most
    /// once per attack.
    pub fn record_effect(&self) {
        // Relaxed: read when all tasks have ended.
        self.counters.effective.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits for `end`, the end of a connection that stalls. The attack has an effect if a server
    /// keeps the connection for a while.
    pub async fn held(&self, end: impl Future<Output = Result<()>>) -> Result<()> {
        tokio::pin!(end);
        match tokio::time::timeout(HELD_MIN, &mut end).await {
            Ok(ended) => ended,
            Err(_) => {
                self.record_effect();
                end.await
            }
        }
    }

    async fn connect_with(&self, port: SocketAddr, receive_buffer: Option<u32>) -> Result<TcpStream> {
        let socket = TcpSocket::new_v4()?;
        if let Some(bytes) = receive_buffer {
            socket.set_recv_buffer_size(bytes)?;
        }
        socket.bind(SocketAddr::new(self.address(), 0))?;
        Ok(tokio::time::timeout(CONNECT_TIMEOUT, socket.connect(port)).await??)
    }
}

/// Sends many bytes as a network would deliver them. Other threads run between two pieces.
pub async fn send(stream: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> std::io::Result<()> {
    for piece in bytes.chunks(PIECE_BYTES) {
        stream.write_all(piece).await?;
        tokio::task::yield_now().await;
        std::thread::yield_now();
    }
    Ok(())
}

/// Waits until the server closes the connection. Discards what it sends.
pub async fn closed(mut stream: TcpStream) -> Result<()> {
    let mut discarded = [0; 1024];
    while stream.read(&mut discarded).await? > 0 {}
    Ok(())
}

/// Waits until a server has begun an answer with status 200, and leaves it unread.
pub async fn answer_begun(stream: &TcpStream) -> Result<()> {
    let mut status = [0; 12];
    loop {
        let bytes = stream.peek(&mut status).await?;
        ensure!(bytes > 0, "the server closed the connection");
        if bytes == status.len() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    ensure!(status == *b"HTTP/1.1 200", "the server refused the request");
    Ok(())
}

/// Keeps a connection, unread, until the attack ends.
pub async fn hold(connection: impl Send) -> Result<()> {
    tokio::time::sleep(ATTACK_TIMEOUT).await;
    drop(connection);
    Ok(())
}

/// Running attackers.
pub struct Attackers {
    tasks: JoinSet<()>,
    stop: CancellationToken,
    counters: Vec<(&'static str, Arc<Counters>)>,
}

/// Live counters of the attacks of one kind, behind [`AttackCounts`].
#[derive(Default)]
struct Counters {
    begun: AtomicU64,
    effective: AtomicU64,
    last_error: Mutex<Option<String>>,
}

/// Attacks of one kind.
#[derive(Debug, Default, Serialize)]
pub struct AttackCounts {
    pub begun: u64,
    /// Attacks that a server did not refuse.
    pub effective: u64,
    pub last_error: Option<String>,
}

impl AttackCounts {
    pub fn add(&mut self, other: AttackCounts) {
        self.begun += other.begun;
        self.effective += other.effective;
        self.last_error = other.last_error.or(self.last_error.take());
    }
}

impl Attackers {
    /// Starts all attackers, for the turn of this number.
    pub fn start(attacks: &[Attack], target: &Arc<Target>, turn: u64) -> Attackers {
        let mut attackers = Attackers { tasks: JoinSet::new(), stop: CancellationToken::new(), counters: Vec::new() };
        for attack in attacks {
            let counters = Arc::<Counters>::default();
            attackers.counters.push((attack.name, counters.clone()));
            for number in 0..attack.clients {
                let round = turn * ROUNDS_MAX;
                let stranger = Stranger { counters: counters.clone(), round, ..Stranger::new(target, number) };
                // Spread over the pause, so that the clients do not act all at once.
                let start = attack.pause.mul_f64(number as f64 / attack.clients as f64);
                let repeat = repeat(attack.run, stranger, start, attack.pause);
                let stopped = attackers.stop.clone();
                attackers.tasks.spawn(async move { stopped.run_until_cancelled(repeat).await.unwrap_or_default() });
            }
        }
        attackers
    }

    /// Waits until each kind of attack has had an effect, for `limit` at most.
    pub async fn effective(&self, limit: Duration) {
        let all = async {
            // Relaxed: a count that is seen late costs another look.
            while self.counters.iter().any(|(_, counters)| counters.effective.load(Ordering::Relaxed) == 0) {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        let _ = tokio::time::timeout(limit, all).await;
    }

    /// Ends all attackers, which closes their connections. Returns the number of attacks by name.
    pub async fn stop(mut self) -> Vec<(&'static str, AttackCounts)> {
        self.stop.cancel();
        while self.tasks.join_next().await.is_some() {}
        // Relaxed: the tasks have ended.
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counts = |counters: &Counters| AttackCounts {
            begun: count(&counters.begun),
            effective: count(&counters.effective),
            last_error: counters.last_error.lock().take(),
        };
        self.counters.iter().map(|(name, counters)| (*name, counts(counters))).collect()
    }
}

async fn repeat(
    attack: fn(Stranger) -> BoxFuture<'static, Result<()>>,
    mut stranger: Stranger,
    start: Duration,
    pause: Duration,
) {
    tokio::time::sleep(start).await;
    loop {
        stranger.counters.begun.fetch_add(1, Ordering::Relaxed);
        // A server may refuse or cut any attack: it counts its effect itself.
        if let Ok(Err(error)) = tokio::time::timeout(ATTACK_TIMEOUT, attack(stranger.clone())).await {
            *stranger.counters.last_error.lock() = Some(format!("{error:#}"));
        }
        stranger.round += 1;
        tokio::time::sleep(pause).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn many_bytes_are_sent_in_pieces_with_a_turn_for_others_between_them() {
        let bytes = vec![7; 10 * PIECE_BYTES + 1];
        // Room for all of them.
        let (mut sender, mut receiver) = tokio::io::duplex(2 * bytes.len());
        let length = bytes.len();
        let sending = tokio::spawn(async move { send(&mut sender, &bytes).await });
        let mut buffer = vec![0; length];
        let mut received = 0;
        while received < length {
            let piece = receiver.read(&mut buffer).await.unwrap();
            assert!(piece <= PIECE_BYTES, "{piece} bytes at once");
            received += piece;
        }
        sending.await.unwrap().unwrap();
    }
}
