//! The limits: a blocking stream between two processes, and a copy by one thread. Both move the bytes that a client and a node
//! would move: from a batch's memory into a data set, or from there into a batch's memory.

use crate::drive::{Cell, Op, Subject};
use anyhow::{Context, Result, ensure};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// Most bytes that are moved with one call.
const CHUNK_BYTES: usize = 1 << 20;
/// Largest data set of a connection.
const SET_BYTES_MAX: u64 = 2 << 30;
/// Most time that one call waits.
const DEADLINE: Duration = Duration::from_secs(60);

/// What a connection is for: the first bytes on it.
#[derive(Clone, Copy)]
struct Purpose {
    /// Whether bytes go from the server to the client.
    down: bool,
    /// Whether the client waits for the server after each operation: it sends a byte to ask for bytes, and gets one when its
    /// bytes have arrived.
    asked: bool,
    op_bytes: u64,
    set_bytes: u64,
}

const PURPOSE_BYTES: usize = 18;

impl Purpose {
    fn encode(self) -> [u8; PURPOSE_BYTES] {
        let mut bytes = [0; PURPOSE_BYTES];
        bytes[0] = self.down.into();
        bytes[1] = self.asked.into();
        bytes[2..10].copy_from_slice(&self.op_bytes.to_le_bytes());
        bytes[10..].copy_from_slice(&self.set_bytes.to_le_bytes());
        bytes
    }

    fn decode(bytes: [u8; PURPOSE_BYTES]) -> Result<Self> {
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let purpose = Self { down: bytes[0] != 0, asked: bytes[1] != 0, op_bytes: number(2), set_bytes: number(10) };
        let Self { op_bytes, set_bytes, .. } = purpose;
        ensure!((1..=set_bytes).contains(&op_bytes) && set_bytes <= SET_BYTES_MAX, "a data set that is none");
        Ok(purpose)
    }
}

fn tuned(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(DEADLINE))?;
    stream.set_write_timeout(Some(DEADLINE))?;
    Ok(stream)
}

/// Serves connections, a thread each, until the process is ended.
pub fn serve() -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("{}", listener.local_addr()?);
    for stream in listener.incoming() {
        let stream = tuned(stream?)?;
        std::thread::spawn(move || {
            if let Err(error) = serve_one(stream) {
                eprintln!("bare socket: {error:#}");
            }
        });
    }
    Ok(())
}

/// Whether the client has simply ended.
fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)
}

fn serve_one(mut stream: TcpStream) -> Result<()> {
    let mut purpose = [0; PURPOSE_BYTES];
    stream.read_exact(&mut purpose)?;
    let purpose = Purpose::decode(purpose)?;
    let mut set = vec![7u8; purpose.set_bytes as usize];
    stream.write_all(&[1])?;
    let served = if purpose.down { send(&mut stream, purpose, &set) } else { receive(&mut stream, purpose, &mut set) };
    match served {
        Err(error) if is_end(&error) => Ok(()),
        other => Ok(other?),
    }
}

fn send(stream: &mut TcpStream, purpose: Purpose, set: &[u8]) -> io::Result<()> {
    stream.read_exact(&mut [0])?;
    loop {
        for operation in set.chunks_exact(purpose.op_bytes as usize) {
            operation.chunks(CHUNK_BYTES).try_for_each(|chunk| stream.write_all(chunk))?;
            if purpose.asked {
                stream.read_exact(&mut [0])?;
            }
        }
    }
}

fn receive(stream: &mut TcpStream, purpose: Purpose, set: &mut [u8]) -> io::Result<()> {
    loop {
        for operation in set.chunks_exact_mut(purpose.op_bytes as usize) {
            for chunk in operation.chunks_mut(CHUNK_BYTES) {
                match stream.read_exact(chunk) {
                    // The client has sent all, and wants to hear that it has arrived.
                    Err(error) if error.kind() == ErrorKind::UnexpectedEof => return stream.write_all(&[1]),
                    other => other?,
                }
            }
            if purpose.asked {
                stream.write_all(&[1])?;
            }
        }
    }
}

/// The client's side of a bare socket.
pub struct Bare {
    server: SocketAddr,
    asked: bool,
    stream: Option<TcpStream>,
    memory: Vec<u8>,
}

impl Bare {
    pub fn new(server: SocketAddr, asked: bool) -> Self {
        Self { server, asked, stream: None, memory: Vec::new() }
    }
}

impl Subject for Bare {
    async fn prepare(&mut self, cell: &Cell) -> Result<()> {
        self.stream = None;
        if cell.op == Op::Clear {
            return Ok(());
        }
        self.memory = vec![1; cell.op_bytes()];
        let purpose = Purpose {
            down: cell.op != Op::Put,
            asked: self.asked,
            op_bytes: cell.op_bytes() as u64,
            set_bytes: cell.set_bytes() as u64,
        };
        let mut stream = tuned(TcpStream::connect(self.server)?)?;
        stream.write_all(&purpose.encode())?;
        stream.read_exact(&mut [0])?;
        if purpose.down && !self.asked {
            stream.write_all(&[1])?;
        }
        self.stream = Some(stream);
        Ok(())
    }

    async fn operate(&mut self, cell: &Cell, _batch: usize) -> Result<()> {
        let stream = self.stream.as_mut().context("a prepared cell")?;
        if cell.op == Op::Put {
            self.memory.chunks(CHUNK_BYTES).try_for_each(|chunk| stream.write_all(chunk))?;
            if self.asked {
                stream.read_exact(&mut [0])?;
            }
            return Ok(());
        }
        if self.asked {
            stream.write_all(&[1])?;
        }
        Ok(self.memory.chunks_mut(CHUNK_BYTES).try_for_each(|chunk| stream.read_exact(chunk))?)
    }

    async fn finish(&mut self, cell: &Cell) -> Result<()> {
        let Some(mut stream) = self.stream.take() else { return Ok(()) };
        if cell.op == Op::Put {
            stream.shutdown(std::net::Shutdown::Write)?;
            stream.read_exact(&mut [0]).context("all has arrived")?;
        }
        Ok(())
    }
}

/// One thread that copies from a data set into a batch's memory.
#[derive(Default)]
pub struct Copy {
    set: Vec<u8>,
    memory: Vec<u8>,
}

impl Subject for Copy {
    async fn prepare(&mut self, cell: &Cell) -> Result<()> {
        self.set = vec![7; cell.set_bytes()];
        self.memory = vec![1; cell.op_bytes()];
        Ok(())
    }

    async fn operate(&mut self, cell: &Cell, batch: usize) -> Result<()> {
        let from = &self.set[batch * cell.op_bytes()..][..cell.op_bytes()];
        from.chunks(cell.size).zip(self.memory.chunks_mut(cell.size)).for_each(|(from, into)| {
            into.copy_from_slice(from);
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

    /// Does three operations, one more than the data set has, and how the server's side of it ended.
    async fn moved(op: Op, asked: bool) -> (Vec<u8>, Result<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut bare = Bare::new(listener.local_addr().unwrap(), asked);
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
    async fn bytes_go_both_ways_asked_for_or_not() {
        for asked in [false, true] {
            let (memory, served) = moved(Op::Get, asked).await;
            served.unwrap();
            assert!(memory.len() == 3 << 20 && memory.iter().all(|&byte| byte == 7), "asked {asked}");
            // Finishing a put has waited until the last byte was there.
            moved(Op::Put, asked).await.1.unwrap();
        }
    }

    #[test]
    fn a_purpose_is_read_as_written_and_bounded() {
        let purpose = Purpose { down: true, asked: false, op_bytes: 3, set_bytes: 9 };
        let read = Purpose::decode(purpose.encode()).unwrap();
        assert!(read.down && !read.asked && (read.op_bytes, read.set_bytes) == (3, 9));
        for (op_bytes, set_bytes) in [(0, 9), (10, 9), (1, SET_BYTES_MAX + 1)] {
            assert!(Purpose::decode(Purpose { op_bytes, set_bytes, ..purpose }.encode()).is_err());
        }
    }
}
