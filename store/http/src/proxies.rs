//! Clients behind reverse proxies.
//!
//! Invariant: only a trusted proxy can name another address. Each proxy appends the address that
//! connected to it, so the part of the header that a client wrote itself is never read.

use crate::shares::PeerAddress;
use axum::http::HeaderMap;
use std::net::{IpAddr, SocketAddr};

const FORWARDED_FOR: &str = "x-forwarded-for";

/// Returns the client of a request that came over a connection from `connection`: the last address
/// that is not one of `trusted`. Without a valid one, the proxy that should have named it.
pub(crate) fn client(trusted: &[IpAddr], connection: IpAddr, headers: &HeaderMap) -> PeerAddress {
    let is_trusted = |address: IpAddr| trusted.iter().any(|proxy| proxy.to_canonical() == address.to_canonical());
    let lines = headers.get_all(FORWARDED_FOR).iter().rev();
    let mut named = lines.flat_map(|line| line.to_str().unwrap_or("").rsplit(',')).map(address);
    let mut client = connection;
    while is_trusted(client)
        && let Some(Some(address)) = named.next()
    {
        client = address;
    }
    PeerAddress::of(client)
}

/// Parses an entry: an address, with a port or without.
fn address(entry: &str) -> Option<IpAddr> {
    let entry = entry.trim();
    let bare = entry.trim_start_matches('[').trim_end_matches(']');
    bare.parse().ok().or_else(|| entry.parse::<SocketAddr>().ok().map(|address| address.ip()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    const PROXY: [u8; 4] = [10, 0, 0, 1];

    fn client_of(connection: [u8; 4], lines: &[&str]) -> PeerAddress {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(FORWARDED_FOR, HeaderValue::from_str(line).unwrap());
        }
        client(&[PROXY.into(), [10, 0, 0, 2].into()], connection.into(), &headers)
    }

    fn peer(address: &str) -> PeerAddress {
        PeerAddress::of(address.parse().unwrap())
    }

    #[test]
    fn trusted_proxies_name_their_clients() {
        assert_eq!(client_of(PROXY, &["192.0.2.7"]), peer("192.0.2.7"));
        assert_eq!(client_of(PROXY, &["192.0.2.7:4711"]), peer("192.0.2.7"));
        assert_eq!(client_of(PROXY, &["[2001:db8::7]:4711"]), peer("2001:db8::7"));
        assert_eq!(client_of(PROXY, &["2001:db8::7"]), peer("2001:db8::7"));
        assert_eq!(client_of(PROXY, &["192.0.2.7, 10.0.0.2"]), peer("192.0.2.7"), "two proxies in a row");
        assert_eq!(client_of(PROXY, &["192.0.2.7", "10.0.0.2"]), peer("192.0.2.7"), "two lines");
    }

    #[test]
    fn clients_cannot_name_others() {
        assert_eq!(client_of([192, 0, 2, 9], &["192.0.2.7"]), peer("192.0.2.9"), "no proxy");
        assert_eq!(client_of(PROXY, &["198.51.100.1, 192.0.2.7"]), peer("192.0.2.7"));
        assert_eq!(client_of(PROXY, &["198.51.100.1, unknown"]), peer("10.0.0.1"));
        assert_eq!(client_of(PROXY, &["198.51.100.1,"]), peer("10.0.0.1"));
        assert_eq!(client_of(PROXY, &[]), peer("10.0.0.1"));
    }
}
