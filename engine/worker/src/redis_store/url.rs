//! URLs of the stores that an engine can use.

use larder_client::{StoreUrl, UrlError};
use redis::{ConnectionAddr, IntoConnectionInfo, ProtocolVersion, RedisConnectionInfo};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// Store of an engine's pages.
#[derive(Debug, Clone)]
pub enum EngineStore {
    /// Nodes of Larder: `larder://host:port[,host:port…]/`.
    Larder(StoreUrl),
    /// A server that speaks the Redis protocol: `redis://host[:port][/database]`.
    Redis(RedisUrl),
}

/// Reason to reject the URL of an engine's store.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum EngineStoreError {
    #[error("a store URL begins with larder:// or redis://, e.g. larder://127.0.0.1:7700 [LRD0301]")]
    Scheme,
    #[error(transparent)]
    Larder(#[from] UrlError),
    /// The URL of a Redis server is invalid. The text names the faulty part.
    #[error("{0}: write redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE] [LRD0301]")]
    Redis(String),
}

impl From<StoreUrl> for EngineStore {
    fn from(url: StoreUrl) -> Self {
        Self::Larder(url)
    }
}

impl FromStr for EngineStore {
    type Err = EngineStoreError;

    fn from_str(text: &str) -> Result<Self, EngineStoreError> {
        let text = text.trim();
        if text.starts_with("redis://") {
            return Ok(Self::Redis(RedisUrl::parse(text)?));
        }
        if !text.starts_with("larder://") {
            return Err(EngineStoreError::Scheme);
        }
        Ok(Self::Larder(text.parse()?))
    }
}

/// Address, database and credentials of a Redis server. Neither `Display` nor `Debug` shows the
/// credentials.
#[derive(Clone)]
pub struct RedisUrl {
    host: String,
    port: u16,
    settings: RedisConnectionInfo,
}

impl RedisUrl {
    fn parse(text: &str) -> Result<Self, EngineStoreError> {
        let wrong = |what: String| EngineStoreError::Redis(what);
        if text.contains(['?', '#']) {
            return Err(wrong("a Redis URL has no options".into()));
        }
        let info = text.into_connection_info().map_err(|error| wrong(error.to_string()))?;
        let ConnectionAddr::Tcp(host, port) = info.addr().clone() else {
            return Err(wrong("only TCP is supported".into()));
        };
        if host.is_empty() || port == 0 {
            return Err(wrong("the host is empty, or the port is 0".into()));
        }
        // RESP2 has all replies that the engine reads. Names of clients are of no use to it.
        let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP2).set_skip_set_lib_name();
        Ok(Self { host, port, settings })
    }

    pub(super) fn address(&self) -> (&str, u16) {
        (&self.host, self.port)
    }

    pub(super) fn settings(&self) -> &RedisConnectionInfo {
        &self.settings
    }
}

impl fmt::Display for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (open, close) = if self.host.contains(':') { ("[", "]") } else { ("", "") };
        write!(f, "redis://{open}{}{close}:{}/{}", self.host, self.port, self.settings.db())
    }
}

impl fmt::Debug for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RedisUrl({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redis(text: &str) -> RedisUrl {
        match text.parse() {
            Ok(EngineStore::Redis(url)) => url,
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn scheme_selects_the_store() {
        let larder: EngineStore = "larder://a:1,b:2/".parse().unwrap();
        assert!(matches!(larder, EngineStore::Larder(url) if url.nodes == ["a:1", "b:2"]));
        assert_eq!(redis("redis://10.0.0.1").to_string(), "redis://10.0.0.1:6379/0");
        assert_eq!(redis("redis://[::1]:7000/3").to_string(), "redis://[::1]:7000/3");
        assert_eq!(redis("redis://[::1]:7000").address(), ("::1", 7000));
    }

    #[test]
    fn credentials_are_used_and_never_shown() {
        let url = redis("redis://me:p%40ss@a:1/2");
        assert_eq!((url.settings().username(), url.settings().password()), (Some("me"), Some("p@ss")));
        assert_eq!(format!("{url} {url:?}"), "redis://a:1/2 RedisUrl(redis://a:1/2)");
    }

    #[test]
    fn rejects_invalid_urls() {
        for bad in [
            "http://a:1",
            "rediss://a:1",
            "redis://",
            "redis://a:0",
            "redis://a:1/x",
            "redis://a:1/?protocol=resp3",
            "redis://a:70000",
            "larder://a",
        ] {
            assert!(bad.parse::<EngineStore>().is_err(), "{bad}");
        }
    }
}
