//! `larder://host:port[,host:port…]/[?transport=auto|tcp|rdma|shm][&connections=N]`.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// Where the store is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreUrl {
    /// `host:port` of every node, in the order given, without repeats.
    pub nodes: Vec<String>,
    /// How pages move.
    pub transport: Transport,
    /// Connections to each node, if pages move over them; 1 to [`MAX_CONNECTIONS`], by default [`CONNECTIONS`].
    pub connections: usize,
}

/// How pages move between a client and a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// The best that both ends can: shared memory on one machine, else RDMA, else TCP.
    #[default]
    Auto,
    /// TCP.
    Tcp,
    /// RDMA, by which pages are read from the node's memory and written to it. A node for which this is not possible counts as
    /// away.
    Rdma,
    /// The node's memory, read in place. A node for which this is not possible counts as away.
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

/// Why a URL is not a store URL.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum UrlError {
    /// Another scheme.
    #[error("a store URL begins with larder://, e.g. larder://127.0.0.1:7700")]
    Scheme,
    /// No address, or one without a port.
    #[error("'{0}' is not host:port")]
    Address(String),
    /// A query option that is not known, or not available.
    #[error("unknown option '{0}' in store URL; known: transport=auto|tcp|rdma|shm, connections=1..{MAX_CONNECTIONS}")]
    Option(String),
}

/// Connections to each node, if the URL does not say.
pub const CONNECTIONS: usize = 2;
/// Most connections to each node.
pub const MAX_CONNECTIONS: usize = 16;
/// Most nodes in a URL.
pub const MAX_NODES: usize = 1024;

impl FromStr for StoreUrl {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        let rest = text.trim().strip_prefix("larder://").ok_or(UrlError::Scheme)?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let mut transport = Transport::default();
        let mut connections = CONNECTIONS;
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
        if self.connections != CONNECTIONS {
            options.push(format!("connections={}", self.connections));
        }
        if options.is_empty() { Ok(()) } else { write!(f, "?{}", options.join("&")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_what_the_readme_shows() {
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
    fn refuses_with_a_reason() {
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
