//! A server that speaks as much of the Redis protocol as an engine does, and fails on request.

use larder_runtime::lock::Mutex;
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::AbortOnDropHandle;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// Values come with a changed bit in their middle.
    FlippedBit,
    /// Values come with their first half only.
    HalfValue,
    /// Values come with a byte more.
    LongValue,
    /// Each value is that of another key.
    OtherValue,
    /// A value never ends.
    EndlessValue,
    /// Values come as arrays of a billion arrays, which never end.
    HugeArray,
    /// Values come as lines of text without a type.
    Garbage,
    /// Every command fails, as while Redis loads its data.
    Loading,
    /// Every command gets no reply.
    Hang,
    /// Every command ends the connection.
    Close,
}

#[derive(Debug)]
struct Inner {
    values: HashMap<Vec<u8>, Vec<u8>>,
    fault: Fault,
}

pub struct FakeRedis {
    address: SocketAddr,
    inner: Arc<Mutex<Inner>>,
    _acceptor: AbortOnDropHandle<()>,
}

impl FakeRedis {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let inner = Arc::new(Mutex::new(Inner { values: HashMap::new(), fault: Fault::None }));
        let shared = inner.clone();
        let acceptor = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, shared.clone()));
            }
        });
        Self { address, inner, _acceptor: AbortOnDropHandle::new(acceptor) }
    }

    pub fn url(&self) -> String {
        format!("redis://{}/0", self.address)
    }

    pub fn set_fault(&self, fault: Fault) {
        self.inner.lock().fault = fault;
    }

    pub fn len(&self) -> usize {
        self.inner.lock().values.len()
    }
}

async fn serve(stream: TcpStream, inner: Arc<Mutex<Inner>>) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let words = read_command(&mut stream).await?;
        let fault = inner.lock().fault;
        match fault {
            Fault::Hang => std::future::pending::<()>().await,
            Fault::Close => return Ok(()),
            _ => {}
        }
        let reply = inner.lock().reply(&words);
        stream.get_mut().write_all(&reply).await?;
        if fault == Fault::EndlessValue && words[0] == b"GETRANGE" {
            loop {
                stream.get_mut().write_all(&[0; 1 << 16]).await?;
            }
        }
    }
}

async fn read_command(stream: &mut BufReader<TcpStream>) -> io::Result<Vec<Vec<u8>>> {
    let count = read_length(stream, '*').await?;
    let mut words = Vec::new();
    for _ in 0..count {
        let length = read_length(stream, '$').await?;
        let mut word = vec![0; length + 2];
        stream.read_exact(&mut word).await?;
        word.truncate(length);
        words.push(word);
    }
    Ok(words)
}

async fn read_length(stream: &mut BufReader<TcpStream>, kind: char) -> io::Result<usize> {
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    let number = line.trim_end().strip_prefix(kind).and_then(|number| number.parse().ok());
    number.ok_or_else(|| io::Error::other(format!("not a length: {line:?}")))
}

fn bulk(value: &[u8]) -> Vec<u8> {
    [format!("${}\r\n", value.len()).as_bytes(), value, b"\r\n"].concat()
}

impl Inner {
    fn reply(&mut self, words: &[Vec<u8>]) -> Vec<u8> {
        if self.fault == Fault::Loading {
            return b"-LOADING Redis is loading the dataset in memory\r\n".to_vec();
        }
        match words[0].as_slice() {
            b"PING" => b"+PONG\r\n".to_vec(),
            b"EXISTS" => format!(":{}\r\n", usize::from(self.values.contains_key(&words[1]))).into_bytes(),
            b"DEL" => format!(":{}\r\n", usize::from(self.values.remove(&words[1]).is_some())).into_bytes(),
            b"SET" => {
                assert_eq!(words[3], b"NX", "the first writer wins");
                if self.values.contains_key(&words[1]) {
                    return b"$-1\r\n".to_vec();
                }
                self.values.insert(words[1].clone(), words[2].clone());
                b"+OK\r\n".to_vec()
            }
            b"GETRANGE" => self.value(&words[1]),
            other => format!("-ERR unknown command '{}'\r\n", String::from_utf8_lossy(other)).into_bytes(),
        }
    }

    fn value(&self, key: &[u8]) -> Vec<u8> {
        let Some(value) = self.values.get(key) else { return bulk(b"") };
        let mut value = value.clone();
        match self.fault {
            Fault::FlippedBit => {
                let middle = value.len() / 2;
                value[middle] ^= 16;
            }
            Fault::HalfValue => value.truncate(value.len() / 2),
            Fault::LongValue => value.push(0),
            Fault::OtherValue => {
                let other = self.values.iter().find(|(name, _)| name.as_slice() != key);
                value.clone_from(other.unwrap().1);
            }
            Fault::EndlessValue => return format!("${}\r\n", 1_u64 << 40).into_bytes(),
            Fault::HugeArray => return b"*1000000000\r\n*1000000000\r\n:1\r\n".to_vec(),
            Fault::Garbage => return b"hello\r\nworld\r\n".to_vec(),
            _ => {}
        }
        bulk(&value)
    }
}
