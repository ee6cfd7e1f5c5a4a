//! Baselines: a blocking TCP stream between two processes, and a copy in memory by one thread.
//!
//! Both move the bytes that a client and a node would move: between the memory of one batch and a
//! data set.

use crate::drive::{Cell, Op, Workload};
use anyhow::{Context, Result, ensure};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

const CHUNK_BYTES: usize = 1 << 20;
/// Maximum data set of a connection, in bytes. The server refuses more before it allocates.
const SET_BYTES_MAX: u64 = 2 << 30;
const DEADLINE: Duration = Duration::from_secs(60);

/// Description of a transfer. The client sends it as the first bytes of a connection.
#[derive(Clone, Copy)]
struct Transfer {
    to_client: bool,
    /// True if each operation is a round trip. The client requests bytes with one byte, and gets
    /// one byte as the acknowledgement of those that it sent.
    round_trip: bool,
    op_bytes: u64,
    set_bytes: u64,
}

const TRANSFER_HEADER_BYTES: usize = 18;

impl Transfer {
    fn encode(self) -> [u8; TRANSFER_HEADER_BYTES] {
        let mut bytes = [0; TRANSFER_HEADER_BYTES];
        bytes[0] = self.to_client.into();
        bytes[1] = self.round_trip.into();
        bytes[2..10].copy_from_slice(&self.op_bytes.to_le_bytes());
        bytes[10..].copy_from_slice(&self.set_bytes.to_le_bytes());
        bytes
    }

    fn decode(bytes: [u8; TRANSFER_HEADER_BYTES]) -> Result<Self> {
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let transfer =
            Self { to_client: bytes[0] != 0, round_trip: bytes[1] != 0, op_bytes: number(2), set_bytes: number(10) };
        let Self { op_bytes, set_bytes, .. } = transfer;
        ensure!(
            (1..=set_bytes).contains(&op_bytes) && set_bytes <= SET_BYTES_MAX,
            "operation of {op_bytes} bytes in a data set of {set_bytes}: sizes are invalid"
        );
        Ok(transfer)
    }
}

fn tuned(stream: TcpStream) -> io::Result<TcpStream> {
    // The same options as Larder's sockets, so that both sides of a ratio have the same network.
    larder_wire::prepare_socket(&stream)?;
    stream.set_read_timeout(Some(DEADLINE))?;
    stream.set_write_timeout(Some(DEADLINE))?;
    Ok(stream)
}

/// Prints its address, and serves connections with one thread each until the process is killed. A
/// failed connection is reported on standard error.
pub fn serve() -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("{}", listener.local_addr()?);
    for stream in listener.incoming() {
        let stream = tuned(stream?)?;
        std::thread::spawn(move || {
            if let Err(error) = serve_one(stream) {
                eprintln!("TCP stream failed: {error:#}");
            }
        });
    }
    Ok(())
}

fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)
}

fn serve_one(mut stream: TcpStream) -> Result<()> {
    let mut transfer = [0; TRANSFER_HEADER_BYTES];
    stream.read_exact(&mut transfer)?;
    let transfer = Transfer::decode(transfer)?;
    let mut set = vec![7u8; transfer.set_bytes as usize];
    // The data set exists: allocation must not count as transfer time.
    stream.write_all(&[1])?;
    let served =
        if transfer.to_client { send(&mut stream, transfer, &set) } else { receive(&mut stream, transfer, &mut set) };
    match served {
        Err(error) if is_end(&error) => Ok(()),
        other => Ok(other?),
    }
}

fn send(stream: &mut TcpStream, transfer: Transfer, set: &[u8]) -> io::Result<()> {
    stream.read_exact(&mut [0])?;
    loop {
        for operation in set.chunks_exact(transfer.op_bytes as usize) {
            operation.chunks(CHUNK_BYTES).try_for_each(|chunk| stream.write_all(chunk))?;
            if transfer.round_trip {
                stream.read_exact(&mut [0])?;
            }
        }
    }
}

fn receive(stream: &mut TcpStream, transfer: Transfer, set: &mut [u8]) -> io::Result<()> {
    loop {
        for operation in set.chunks_exact_mut(transfer.op_bytes as usize) {
            for chunk in operation.chunks_mut(CHUNK_BYTES) {
                match stream.read_exact(chunk) {
                    // The client has shut its side down and waits until all bytes have arrived.
                    Err(error) if error.kind() == ErrorKind::UnexpectedEof => return stream.write_all(&[1]),
                    other => other?,
                }
            }
            if transfer.round_trip {
                stream.write_all(&[1])?;
            }
        }
    }
}

pub struct Bare {
    server: SocketAddr,
    round_trip: bool,
    stream: Option<TcpStream>,
    memory: Vec<u8>,
}

impl Bare {
    pub fn new(server: SocketAddr, round_trip: bool) -> Self {
        Self { server, round_trip, stream: None, memory: Vec::new() }
    }
}

impl Workload for Bare {
    async fn prepare(&mut self, cell: &Cell) -> Result<()> {
        self.stream = None;
        if cell.op == Op::Clear {
            return Ok(());
        }
        self.memory = vec![1; cell.op_bytes()];
        let transfer = Transfer {
            to_client: cell.op != Op::Put,
            round_trip: self.round_trip,
            op_bytes: cell.op_bytes() as u64,
            set_bytes: cell.set_bytes() as u64,
        };
        let mut stream = tuned(TcpStream::connect(self.server)?)?;
        stream.write_all(&transfer.encode())?;
        stream.read_exact(&mut [0])?;
        if transfer.to_client && !self.round_trip {
            stream.write_all(&[1])?;
        }
        self.stream = Some(stream);
        Ok(())
    }

    async fn operate(&mut self, cell: &Cell, _batch: usize) -> Result<()> {
        let stream = self.stream.as_mut().context("the cell was not prepared")?;
        if cell.op == Op::Put {
            self.memory.chunks(CHUNK_BYTES).try_for_each(|chunk| stream.write_all(chunk))?;
            if self.round_trip {
                stream.read_exact(&mut [0])?;
            }
            return Ok(());
        }
        if self.round_trip {
            stream.write_all(&[1])?;
        }
        Ok(self.memory.chunks_mut(CHUNK_BYTES).try_for_each(|chunk| stream.read_exact(chunk))?)
    }

    async fn finish(&mut self, cell: &Cell) -> Result<()> {
        let Some(mut stream) = self.stream.take() else { return Ok(()) };
        if cell.op == Op::Put {
            stream.shutdown(std::net::Shutdown::Write)?;
            stream.read_exact(&mut [0]).context("the server did not acknowledge the last byte")?;
        }
        Ok(())
    }
}

#[derive(Default)]
pub struct Memcpy {
    set: Vec<u8>,
    memory: Vec<u8>,
}

impl Workload for Memcpy {
    async fn prepare(&mut self, cell: &Cell) -> Result<()> {
        self.set = vec![7; cell.set_bytes()];
        self.memory = vec![1; cell.op_bytes()];
        Ok(())
    }

    async fn operate(&mut self, cell: &Cell, batch: usize) -> Result<()> {
        let from = &self.set[batch * cell.op_bytes()..][..cell.op_bytes()];
        from.chunks(cell.size).zip(self.memory.chunks_mut(cell.size)).for_each(|(from, into)| {
            into.copy_from_slice(from);
            // Keeps the compiler from removing copies whose result is not read.
            std::hint::black_box(into);
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(op: Op) -> Cell {
        Cell { op, cell: 0, size: 3 << 19, batch: 2, batches: 2, seconds: 1.0 }
    }

    /// Runs three operations, one more than the data set has. Returns the memory of the client and
    /// the result of the server.
    async fn moved(op: Op, round_trip: bool) -> (Vec<u8>, Result<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut bare = Bare::new(listener.local_addr().unwrap(), round_trip);
        let server = std::thread::spawn(move || serve_one(tuned(listener.accept()?.0)?));
        let cell = cell(op);
        bare.prepare(&cell).await.unwrap();
        for batch in [0, 1, 0] {
            bare.operate(&cell, batch).await.unwrap();
        }
        bare.finish(&cell).await.unwrap();
        (bare.memory, server.join().unwrap())
    }

    #[tokio::test]
    async fn streams_move_bytes_both_ways_with_and_without_round_trips() {
        for round_trip in [false, true] {
            let (memory, served) = moved(Op::Get, round_trip).await;
            served.unwrap();
            assert!(memory.len() == 3 << 20 && memory.iter().all(|&byte| byte == 7), "round_trip {round_trip}");
            // finish() of a put returns after the server has received the last byte.
            moved(Op::Put, round_trip).await.1.unwrap();
        }
    }

    #[test]
    fn transfer_header_round_trips_and_rejects_invalid_sizes() {
        let transfer = Transfer { to_client: true, round_trip: false, op_bytes: 3, set_bytes: 9 };
        let read = Transfer::decode(transfer.encode()).unwrap();
        assert!(read.to_client && !read.round_trip && (read.op_bytes, read.set_bytes) == (3, 9));
        for (op_bytes, set_bytes) in [(0, 9), (10, 9), (1, SET_BYTES_MAX + 1)] {
            assert!(Transfer::decode(Transfer { op_bytes, set_bytes, ..transfer }.encode()).is_err());
        }
    }
}
