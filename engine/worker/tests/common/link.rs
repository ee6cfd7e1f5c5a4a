//! A link to a node that carries a limited number of bytes per second, and that tests can cut.

use super::real::any_port;
use larder_runtime::lock::Mutex;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio_util::sync::CancellationToken;

/// With larger buffers the kernel would take a page at once, and hide the rate from both ends.
const BUFFER_BYTES: u32 = 16 << 10;
/// Bytes that the link forwards at a time.
const STEP_BYTES: usize = 4 << 10;

pub struct Link {
    address: SocketAddr,
    /// Ends the connections that are open. `None` while the link is cut.
    cut: Arc<Mutex<Option<CancellationToken>>>,
}

impl Link {
    /// Opens a link to a node. Each connection carries `bytes_per_second` in each direction.
    pub async fn to(node: SocketAddr, bytes_per_second: usize) -> Link {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(BUFFER_BYTES).unwrap();
        socket.bind(any_port()).unwrap();
        let listener = socket.listen(16).unwrap();
        let address = listener.local_addr().unwrap();
        let cut = Arc::new(Mutex::new(Some(CancellationToken::new())));
        tokio::spawn(accept(listener, node, bytes_per_second, cut.clone()));
        Link { address, cut }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends all connections, and closes new ones at once.
    pub fn cut(&self) {
        if let Some(connections) = self.cut.lock().take() {
            connections.cancel();
        }
    }

    pub fn mend(&self) {
        *self.cut.lock() = Some(CancellationToken::new());
    }
}

async fn accept(
    listener: TcpListener,
    node: SocketAddr,
    bytes_per_second: usize,
    cut: Arc<Mutex<Option<CancellationToken>>>,
) {
    loop {
        let (client, _) = listener.accept().await.unwrap();
        let cut = cut.lock().clone();
        let Some(cut) = cut else { continue };
        tokio::spawn(async move {
            let socket = TcpSocket::new_v4().unwrap();
            socket.set_recv_buffer_size(BUFFER_BYTES).unwrap();
            // The client sees the end of its connection.
            let Ok(node) = socket.connect(node).await else { return };
            let (from_client, to_client) = split(client);
            let (from_node, to_node) = split(node);
            tokio::select! {
                () = forward(from_client, to_node, bytes_per_second) => {}
                () = forward(from_node, to_client, bytes_per_second) => {}
                () = cut.cancelled() => {}
            }
        });
    }
}

fn split(stream: TcpStream) -> (OwnedReadHalf, OwnedWriteHalf) {
    stream.set_nodelay(true).unwrap();
    stream.into_split()
}

/// Forwards bytes until one side closes.
async fn forward(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, bytes_per_second: usize) {
    let mut bytes = vec![0; STEP_BYTES];
    let mut free_at = Instant::now();
    while let Ok(received @ 1..) = from.read(&mut bytes).await {
        let time = Duration::from_secs_f64(received as f64 / bytes_per_second as f64);
        free_at = free_at.max(Instant::now()) + time;
        tokio::time::sleep_until(free_at.into()).await;
        if to.write_all(&bytes[..received]).await.is_err() {
            return;
        }
    }
}
