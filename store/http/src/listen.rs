//! Sockets that listen for connections.

use std::io;
use std::net::SocketAddr;
use tokio::net::{TcpListener, TcpSocket};

/// Maximum number of connections that wait until the server accepts them. The kernel lowers it to
/// `net.core.somaxconn`, which is 4096 by default.
///
/// With more clients than that, the kernel drops requests to connect, and clients repeat them after
/// 1, 3 and 7 s. `TcpListener::bind` chooses 128, which a burst exceeds if the server is busy or
/// has no descriptor left.
const BACKLOG: u32 = 1024;

/// Listens on an address, for any server of this machine. Returns the address with its port, which
/// the kernel chooses for port 0. The caller is in a Tokio runtime.
///
/// # Errors
/// If the port is taken, or the address is not one of this machine.
pub fn listen(address: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // A restart need not wait until the kernel forgets connections of the process before it.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    let listener = socket.listen(BACKLOG)?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::net::TcpStream;

    /// Time in which a dropped request to connect is repeated six times.
    const PATIENCE: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn burst_of_connections_waits_to_be_accepted() {
        let kernel_max = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap();
        let kernel_max: usize = kernel_max.trim().parse().unwrap();
        let (listener, address) = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let connect_all = async {
            let mut clients = Vec::new();
            for _ in 0..kernel_max.min(300) {
                clients.push(TcpStream::connect(address).await.unwrap());
            }
            clients
        };
        // The server accepts none of them meanwhile.
        let clients = tokio::time::timeout(PATIENCE, connect_all).await.expect("the kernel drops no request");
        for client in &clients {
            let (_, peer) = listener.accept().await.unwrap();
            assert_eq!(peer, client.local_addr().unwrap());
        }
    }
}
