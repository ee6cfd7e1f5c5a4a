//! Store URLs: `larder://host:port[,host:port…]/[?transport=auto|tcp|rdma|shm][&connections=N]`.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// Addresses of the nodes of a store, and the transport to them.
///
/// ```
/// use larder_client::{StoreUrl, Transport};
///
/// let url: StoreUrl = "larder://node-a:7700,node-b:7700/?transport=tcp".parse().unwrap();
/// assert_eq!(url.nodes, ["node-a:7700", "node-b:7700"]);
/// assert_eq!(url.transport, Transport::Tcp);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreUrl {
    /// `host:port` of every node, without duplicates; at most [`MAX_NODES`]. Their order does not
    /// affect placement.
    pub nodes: Vec<String>,
    /// Transport of pages. Requests always use a stream socket.
    pub transport: Transport,
    /// Connections to each node when pages travel over TCP, from 1 to [`MAX_CONNECTIONS`]. Default:
    /// [`DEFAULT_CONNECTIONS`].
    pub connections: usize,
}

/// Transport of pages between a client and a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// The fastest that both ends support: shared memory on one machine, then RDMA, then TCP.
    #[default]
    Auto,
    /// TCP only.
    Tcp,
    /// RDMA only: the client reads and writes pages in the node's memory. A node without RDMA
    /// counts as absent.
    Rdma,
    /// Shared memory only: the client maps the node's memory. A node on another machine counts as
    /// absent.
    Shm,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Transport::Auto => "auto",
            Transport::Tcp => "tcp",
            Transport::Rdma => "rdma",
            Transport::Shm => "shm",
        })
    }
}

/// Reason to reject a store URL.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum UrlError {
    /// The scheme is not `larder://`.
    #[error("a store URL begins with larder://, e.g. larder://127.0.0.1:7700 [LRD0301]")]
    Scheme,
    /// An address is empty, has no port, or is beyond [`MAX_NODES`].
    #[error("'{0}' is not an address: write host:port, and at most {MAX_NODES} of them [LRD0301]")]
    Address(String),
    /// A query option is unknown, or its value is out of range.
    #[error(
        "invalid option '{0}' in store URL; known: transport=auto|tcp|rdma|shm, connections=1..{MAX_CONNECTIONS} [LRD0301]"
    )]
    Option(String),
}

/// Connections to each node if the URL does not set `connections`. One carries requests and pages,
/// the other relieves it of large payloads.
pub const DEFAULT_CONNECTIONS: usize = 2;
/// Limit of connections to each node. The URL's `connections` is refused above it.
pub const MAX_CONNECTIONS: usize = 16;
/// Limit of nodes in a URL.
pub const MAX_NODES: usize = 1024;

impl FromStr for StoreUrl {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        let rest = text.trim().strip_prefix("larder://").ok_or(UrlError::Scheme)?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let mut transport = Transport::default();
        let mut connections = DEFAULT_CONNECTIONS;
        for option in query.split('&').filter(|o| !o.is_empty()) {
            let unknown = || UrlError::Option(option.to_string());
            match option.split_once('=') {
                Some(("transport", "auto")) => transport = Transport::Auto,
                Some(("transport", "tcp")) => transport = Transport::Tcp,
                Some(("transport", "rdma")) => transport = Transport::Rdma,
                Some(("transport", "shm")) => transport = Transport::Shm,
                Some(("connections", number)) => {
                    connections = number.parse().map_err(|_| unknown())?;
                    if !(1..=MAX_CONNECTIONS).contains(&connections) {
                        return Err(unknown());
                    }
                }
                _ => return Err(unknown()),
            }
        }
        let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
        if !path.is_empty() {
            return Err(UrlError::Option(path.to_string()));
        }
        let mut nodes: Vec<String> = Vec::new();
        for address in hosts.split(',') {
            let valid = address
                .rsplit_once(':')
                .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok_and(|p| p != 0));
            if !valid || nodes.len() >= MAX_NODES {
                return Err(UrlError::Address(address.to_string()));
            }
            if !nodes.iter().any(|n| n == address) {
                nodes.push(address.to_string());
            }
        }
        Ok(StoreUrl { nodes, transport, connections })
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "larder://{}/", self.nodes.join(","))?;
        let mut options = Vec::new();
        if self.transport != Transport::Auto {
            options.push(format!("transport={}", self.transport));
        }
        if self.connections != DEFAULT_CONNECTIONS {
            options.push(format!("connections={}", self.connections));
        }
        if options.is_empty() { Ok(()) } else { write!(f, "?{}", options.join("&")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_urls_and_prints_them_back() {
        let url: StoreUrl = "larder://127.0.0.1:7700,node-b:7700/?transport=tcp".parse().unwrap();
        assert_eq!(url.nodes, ["127.0.0.1:7700", "node-b:7700"]);
        assert_eq!(url.transport, Transport::Tcp);
        assert_eq!(url.to_string().parse::<StoreUrl>().unwrap(), url);
        let several: StoreUrl = "larder://a:1/?connections=4&transport=auto".parse().unwrap();
        assert_eq!((several.connections, several.transport), (4, Transport::Auto));
        assert_eq!(several.to_string().parse::<StoreUrl>().unwrap(), several);
        assert_eq!("larder://a:1".parse::<StoreUrl>().unwrap().transport, Transport::Auto);
        assert_eq!("larder://[::1]:7700".parse::<StoreUrl>().unwrap().nodes, ["[::1]:7700"]);
    }

    #[test]
    fn rejects_invalid_urls() {
        for bad in [
            "redis://a:1",
            "larder://",
            "larder://a",
            "larder://a:0",
            "larder://a:1/?x=y",
            "larder://a:1,,b:2",
            "larder://a:1/?connections=0",
            "larder://a:1/?connections=99",
        ] {
            assert!(bad.parse::<StoreUrl>().is_err(), "{bad}");
        }
    }
}
