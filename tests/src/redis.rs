//! A client of the Redis protocol that sends what a test tells it to.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

/// Maximum time of one read or write. A call that takes longer fails with an error of the kind
/// `WouldBlock`.
const TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RedisReply {
    Simple(String),
    Error(String),
    Integer(i64),
    Bulk(Vec<u8>),
    Null,
    Array(Vec<RedisReply>),
}

pub struct RedisConnection {
    stream: BufReader<TcpStream>,
}

impl RedisConnection {
    pub fn open(address: SocketAddr) -> io::Result<RedisConnection> {
        Self::over(TcpStream::connect(address)?)
    }

    /// Connects from another address of this machine, as a peer of its own.
    pub async fn open_from(from: Ipv4Addr, address: SocketAddr) -> io::Result<RedisConnection> {
        let socket = tokio::net::TcpSocket::new_v4()?;
        socket.bind((from, 0).into())?;
        let stream = socket.connect(address).await?.into_std()?;
        stream.set_nonblocking(false)?;
        Self::over(stream)
    }

    fn over(stream: TcpStream) -> io::Result<RedisConnection> {
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        stream.set_nodelay(true)?;
        Ok(RedisConnection { stream: BufReader::new(stream) })
    }

    pub fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.get_mut().write_all(bytes)
    }

    /// Sends a command and does not wait for its reply.
    pub fn send(&mut self, arguments: &[&[u8]]) -> io::Result<()> {
        let mut bytes = format!("*{}\r\n", arguments.len()).into_bytes();
        for argument in arguments {
            bytes.extend(format!("${}\r\n", argument.len()).bytes());
            bytes.extend_from_slice(argument);
            bytes.extend_from_slice(b"\r\n");
        }
        self.send_bytes(&bytes)
    }

    /// Receives one reply.
    ///
    /// # Errors
    /// `UnexpectedEof` if the node has closed the connection, `InvalidData` for what RESP2 lacks.
    pub fn receive(&mut self) -> io::Result<RedisReply> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let line = line.trim_end();
        let (kind, text) = line.split_at(1);
        let number = || text.parse::<i64>().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error));
        Ok(match kind {
            "+" => RedisReply::Simple(text.into()),
            "-" => RedisReply::Error(text.into()),
            ":" => RedisReply::Integer(number()?),
            "$" => match usize::try_from(number()?) {
                Err(_) => RedisReply::Null,
                Ok(length) => {
                    let mut bytes = vec![0; length + 2];
                    self.stream.read_exact(&mut bytes)?;
                    bytes.truncate(length);
                    RedisReply::Bulk(bytes)
                }
            },
            "*" => RedisReply::Array((0..number()?).map(|_| self.receive()).collect::<io::Result<_>>()?),
            _ => return Err(io::Error::new(io::ErrorKind::InvalidData, line.to_string())),
        })
    }

    /// Sends a command of words without spaces, and returns its reply.
    pub fn line(&mut self, words: &str) -> io::Result<RedisReply> {
        self.call(&words.split(' ').map(str::as_bytes).collect::<Vec<_>>())
    }

    pub fn call(&mut self, arguments: &[&[u8]]) -> io::Result<RedisReply> {
        self.send(arguments)?;
        self.receive()
    }
}
