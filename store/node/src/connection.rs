//! One client.
//!
//! The reading half decodes frames, receives parts straight into their slots, answers what is quick at once, and starts a
//! task for what has to wait. Everything that is sent goes through two bounded queues to the writing half, page bytes in one
//! and what is short in the other, which goes first: so a client that does not read holds up nobody but itself, and one that
//! reads much hears at once what else it asks. What it has under way is counted ([`crate::budget`]); what is too much is
//! refused at once. When the connection ends, its tasks end and its open puts are given up.

mod conversation;
mod following;
mod lookup;
mod rdma;
mod reading;
mod receiving;
mod refusing;
mod sending;
mod socket;
mod tasks;

use crate::holds::Hold;
use crate::node::Shared;
use conversation::Connection;
use larder_format::codec::DecodeError;
use larder_format::planted::{Bug, has};
use larder_share::{Lender, Lent, Tenure};
use larder_wire::{Entry, ErrorCode, FrameReader, FrameWriter, PROTOCOL_VERSION_MIN, Response, Sink, Source, Spinning};
use parking_lot::Mutex;
pub(crate) use socket::Turns;
use socket::{FromSocket, ToSocket};
use socket2::{SockRef, TcpKeepalive};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::Semaphore;
use tokio_util::task::AbortOnDropHandle;

/// A client that says nothing for so long is asked whether it is there, and then again and again.
const KEEPALIVE_TIME: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Most time until Hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Most time to send one frame, or to receive one payload, before the client is given up.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Most time to tell a connection that there is no memory for it.
const REFUSED_TIMEOUT: Duration = Duration::from_secs(1);

/// Serves one client over TCP until it leaves, misbehaves, or the node stops.
pub(crate) async fn serve_tcp(shared: Arc<Shared>, stream: TcpStream) {
    let peer = stream.peer_addr().map_or_else(|_| "?".to_string(), |a| a.to_string());
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%peer, %error, "TCP_NODELAY");
    }
    // A client that lost its power says nothing: its puts and its place are given back after a minute.
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE_TIME).with_interval(KEEPALIVE_INTERVAL).with_retries(3);
    if let Err(error) = SockRef::from(&stream).set_tcp_keepalive(&keepalive) {
        tracing::debug!(%peer, %error, "TCP keepalive");
    }
    let (read, write) = stream.into_split();
    let read = Spinning::new(read, shared.spin);
    serve(shared, peer, read, write).await;
}

/// Serves one client on any streams.
pub(crate) async fn serve<R: Source, W: Sink>(shared: Arc<Shared>, peer: String, read: R, write: W) {
    converse(shared, peer, (read, write), Places::None, None).await;
}

/// Serves a process of this machine until it leaves, misbehaves, or the node stops. What it reads in place stays where it is
/// until it lets go of it, or of the node's memory, however the connection ends.
pub(crate) async fn serve_local(shared: Arc<Shared>, stream: UnixStream, memory: Arc<LocalMemory>) {
    // Who finds no place here comes by TCP.
    let Ok(place) = memory.tenures.clone().try_acquire_owned() else { return };
    let peer = "a process of this machine".to_string();
    let begin = async {
        let tenure = Tenure::begin(&stream, memory.file.as_fd(), memory.bytes).await?;
        io::Result::Ok((tenure, Lent::receive(&stream).await?))
    };
    let (tenure, lent) = match tokio::time::timeout(HELLO_TIMEOUT, begin).await {
        Ok(Ok(begun)) => begun,
        Ok(Err(error)) => return tracing::warn!(%error, "a process of this machine was not let in"),
        Err(_) => return,
    };
    let (read, write) = stream.into_split();
    let over = async move {
        tenure.over().await;
        drop(place);
    };
    let lent = lent.map(|lent| Arc::new(lent) as Arc<dyn Lender>);
    serve_in_place(shared, peer, (read, write), lent, over).await;
}

/// Serves one client on any streams that reads pages in place until its tenure is over. Parts that it puts may be copied from
/// what it lent.
pub(crate) async fn serve_in_place<R: Source, W: Sink>(
    shared: Arc<Shared>,
    peer: String,
    streams: (R, W),
    lent: Option<Arc<dyn Lender>>,
    over: impl Future<Output = ()> + Send + 'static,
) {
    let held = Arc::<Held>::default();
    let after = Arc::clone(&held);
    // Not one of the node's tasks: it takes as long as that process does, and stopping the node does not wait for it.
    tokio::spawn(async move {
        over.await;
        drop(after);
    });
    converse(shared, peer, streams, Places::Some(held.clone()), lent).await;
    if has(Bug::HoldsEndEarly) {
        held.lock().clear();
    }
}

/// The arena, for processes of this machine.
pub(crate) struct LocalMemory {
    /// Open for reading alone.
    pub(crate) file: OwnedFd,
    pub(crate) bytes: u64,
    /// Most processes that have it mapped, by connections that were made for it.
    pub(crate) tenures: Arc<Semaphore>,
}

/// What a client reads in place, if it can.
#[derive(Clone)]
enum Places {
    None,
    Some(Arc<Held>),
}

/// Pages that a client reads in place, until it releases them.
type Held = Mutex<BTreeMap<Entry, Hold>>;

async fn converse<R: Source, W: Sink>(
    shared: Arc<Shared>,
    peer: String,
    (read, write): (R, W),
    places: Places,
    lent: Option<Arc<dyn Lender>>,
) {
    let account = shared.store.budget().open();
    let (write, free_since) = ToSocket::new(write, shared.turns.clone(), account.clone());
    let mut writer = FrameWriter::new(write);
    let Some(account) = account else {
        shared.metrics.connections_rejected.inc();
        tracing::warn!(%peer, "no memory for another connection: refused");
        // No version was agreed on: this is what every one has.
        let message = "no memory for another connection now".to_string();
        let refusal = Response::Error { code: ErrorCode::Busy, message }.frame(PROTOCOL_VERSION_MIN, 0, None);
        let _ = tokio::time::timeout(REFUSED_TIMEOUT, writer.send(refusal)).await;
        return;
    };
    let (connection, queue) = Connection::new(shared.clone(), account.clone(), places, lent, free_since);
    let mut writer = AbortOnDropHandle::new(tokio::spawn(writer.send_all(queue, STALL_TIMEOUT)));
    let mut reader = FrameReader::new(FromSocket::new(read, shared.turns.clone()));
    let ended = tokio::select! {
        biased;
        () = account.given_up() => None,
        ended = connection.run(&mut reader) => Some(ended),
    };
    let Some(ended) = ended else {
        // Without leave to send what is queued: that is what nobody takes.
        return tracing::warn!(%peer, "a reader that takes nothing was in the way of others: disconnected");
    };
    match ended {
        Ok(()) => tracing::debug!(%peer, "client left"),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            shared.metrics.connections_rejected.inc();
            tracing::warn!(%peer, %error, "connection closed: not what a Larder client says");
        }
        Err(error) => tracing::debug!(%peer, %error, "connection ended"),
    }
    // The queue's senders are gone with the connection and its tasks; what is queued may still leave.
    let _ = tokio::time::timeout(Duration::from_secs(1), &mut writer).await;
}

fn invalid(error: DecodeError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
