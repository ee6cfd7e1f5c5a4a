//! Attacks on the Redis port of the node, and a client for the honest values there.

use super::attacker::{Attack, Stranger, closed, hold, send};
use anyhow::{Context, Result, bail, ensure};
use futures::FutureExt;
use futures::future::BoxFuture;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpSocket, TcpStream};

const MIB: usize = 1 << 20;
/// Value of a stranger that reads no replies, in bytes, and the replies that it requests.
const UNREAD_BYTES: usize = MIB;
const UNREAD_REPLIES: usize = 64;
/// Longest value that the client receives.
const VALUE_BYTES_MAX: usize = 4 * MIB;

/// Attacks on the Redis port, with their number of clients and their pause.
pub fn attacks() -> Vec<Attack> {
    let attack = |name, clients, pause_ms, run| Attack { name, clients, pause: Duration::from_millis(pause_ms), run };
    vec![
        attack("half Redis requests", 50, 5_000, half_request),
        attack("stalled Redis values", 8, 1_000, stalled_value),
        attack("unread Redis replies", 4, 5_000, unread_replies),
        attack("web pages at Redis", 2, 500, web_page),
    ]
}

#[derive(Debug, PartialEq, Eq)]
pub enum RedisReply {
    Status(String),
    Error(String),
    Value(Option<Vec<u8>>),
}

/// Client that waits for each reply.
pub struct RedisClient {
    stream: BufReader<TcpStream>,
}

impl RedisClient {
    pub async fn connect(from: IpAddr, to: SocketAddr) -> Result<RedisClient> {
        let socket = TcpSocket::new_v4()?;
        socket.bind(SocketAddr::new(from, 0))?;
        Ok(RedisClient { stream: BufReader::new(socket.connect(to).await?) })
    }

    pub async fn call(&mut self, arguments: &[&[u8]]) -> Result<RedisReply> {
        self.stream.write_all(&request(arguments)).await?;
        let mut line = String::new();
        ensure!(self.stream.read_line(&mut line).await? > 0, "the node closed the connection");
        let line = line.trim_end();
        let (kind, text) = line.split_at_checked(1).context("an empty reply")?;
        Ok(match kind {
            "+" => RedisReply::Status(text.into()),
            "-" => RedisReply::Error(text.into()),
            "$" if text == "-1" => RedisReply::Value(None),
            "$" => {
                let bytes: usize = text.parse().context("the length of a value")?;
                ensure!(bytes <= VALUE_BYTES_MAX, "a value of {bytes} bytes");
                let mut value = vec![0; bytes + 2];
                self.stream.read_exact(&mut value).await?;
                value.truncate(bytes);
                RedisReply::Value(Some(value))
            }
            _ => bail!("an unexpected reply: {line}"),
        })
    }
}

fn request(arguments: &[&[u8]]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", arguments.len()).into_bytes();
    for argument in arguments {
        bytes.extend(format!("${}\r\n", argument.len()).bytes());
        bytes.extend_from_slice(argument);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}

fn half_request(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let mut stream = stranger.connect(stranger.target.ports.redis).await?;
        stream.write_all(b"*16384\r\n$4096\r\nhalf").await?;
        stranger.held(closed(stream)).await
    }
    .boxed()
}

/// Announces a value of 16 MiB, and sends a part of its first page.
fn stalled_value(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let mut stream = stranger.connect(stranger.target.ports.redis).await?;
        let key = format!("stranger-{}", stranger.number);
        let head = format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${}\r\n", key.len(), 16 * MIB);
        stream.write_all(head.as_bytes()).await?;
        send(&mut stream, &vec![7; MIB / 2]).await?;
        stranger.held(closed(stream)).await
    }
    .boxed()
}

fn unread_replies(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let mut stream = stranger.connect_unread(stranger.target.ports.redis).await?;
        let key = format!("unread-{}", stranger.number);
        send(&mut stream, &request(&[b"SET", key.as_bytes(), &vec![7; UNREAD_BYTES]])).await?;
        let mut reply = [0; 5];
        stream.read_exact(&mut reply).await?;
        ensure!(reply == *b"+OK\r\n", "the node refused the value");
        stream.write_all(&request(&[b"GET", key.as_bytes()]).repeat(UNREAD_REPLIES)).await?;
        let begins = stream.peek(&mut reply).await?;
        ensure!(begins > 0 && reply[0] == b'$', "the node refused to send the value");
        stranger.record_effect();
        hold(stream).await
    }
    .boxed()
}

/// Request that a browser sends for any web page. The node must not take its body for a command.
fn web_page(stranger: Stranger) -> BoxFuture<'static, Result<()>> {
    async move {
        let mut stream = stranger.connect(stranger.target.ports.redis).await?;
        stream.write_all(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nFLUSHALL\r\n").await?;
        // Closed or reset.
        let received = stream.read(&mut [0; 1]).await.unwrap_or_default();
        ensure!(received == 0, "the node answered a web page");
        stranger.record_effect();
        Ok(())
    }
    .boxed()
}
