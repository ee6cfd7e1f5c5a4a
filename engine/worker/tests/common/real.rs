//! Engines attached to a real store node over TCP.

use super::options;
use larder_node::{Node, NodeOptions};
use larder_worker::{Engine, EngineHandle, EngineOptions, Role};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

pub async fn node(listen: SocketAddr) -> Node {
    let options = NodeOptions { listen, l2_bytes: 64 << 20, l3_bytes: 0, ..Default::default() };
    Node::start(options).await.unwrap()
}

pub async fn attached(role: Role, node: &Node) -> EngineHandle {
    attached_with(role, node, None).await
}

pub async fn attached_with(role: Role, node: &Node, numerics: Option<&str>) -> EngineHandle {
    let mut settings = options(role);
    settings.numerics = numerics.map(str::to_string);
    attached_by(settings, node).await
}

pub async fn attached_by(mut settings: EngineOptions, node: &Node) -> EngineHandle {
    settings.store = format!("larder://{}/", node.addr()).parse().unwrap();
    let engine = Engine::start(settings).await.unwrap();
    assert!(store_is(&engine, true).await);
    engine
}

pub async fn store_is(engine: &EngineHandle, up: bool) -> bool {
    connected(engine, usize::from(up)).await
}

/// Waits up to 30 s until the engine is connected to this many nodes.
pub async fn connected(engine: &EngineHandle, nodes: usize) -> bool {
    let until = Instant::now() + Duration::from_secs(30);
    while engine.state().store_nodes as usize != nodes && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    engine.state().store_nodes as usize == nodes
}

/// A counter of a node's status.
pub fn counter(node: &Node, name: &str) -> usize {
    node.status()["counters"][name].as_u64().unwrap() as usize
}

pub fn any_port() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}
