//! Reasons of misses, as a client asks for them.

use super::*;
use larder_client::{Explanation, MissReason};
use larder_format::NamespaceFields;
use larder_wire::VERSION_EXPLAIN;
use std::time::{SystemTime, UNIX_EPOCH};

async fn explain(client: &Client, number: u32) -> Explanation {
    client.explain(&[key(number)], soon()).await[0].expect("the node answers")
}

fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

#[tokio::test]
async fn miss_has_the_reason_that_the_node_knows() {
    let node = Node::start(options(None)).await.unwrap();
    let client = attach(&[&node], 1).await;
    let other = attach(&[&node], 2).await;
    let began = unix_ms();
    for number in [1, 2] {
        assert_eq!(put(&client, number).await, PutOutcome::Stored);
    }
    assert_eq!(put(&other, 3).await, PutOutcome::Stored);
    assert_eq!(client.forget(&[key(2)], soon()).await.pages, 1);
    let ttl = PutOptions { ttl: Some(Duration::from_millis(1)), ..PutOptions::default() };
    assert_eq!(client.put_pages(pages(&[4], payload), ttl, soon()).await, [PutOutcome::Stored]);
    let until = soon();
    while client.exists(&[key(4)], soon()).await[0] {
        assert!(Instant::now() < until, "the page outlives its time");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let open = client.put(NewPage::first(key(5)), soon());
    while explain(&client, 5).await.reason != MissReason::BeingPut {
        assert!(Instant::now() < until, "the put never begins");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }

    let keys: Vec<PageKey> = (1..=6).map(key).collect();
    let explained = client.explain(&keys, soon()).await;
    let explained: Vec<Explanation> = explained.into_iter().map(|found| found.expect("the node answers")).collect();
    use MissReason::{BeingPut, Expired, Forgotten, NeverStored, OtherNamespace, Present};
    let reasons: Vec<MissReason> = explained.iter().map(|found| found.reason).collect();
    assert_eq!(reasons, [Present, Forgotten, OtherNamespace, Expired, BeingPut, NeverStored]);
    for found in [explained[1], explained[3]] {
        assert!(found.at_unix_ms + 2000 >= began && found.at_unix_ms <= unix_ms() + 2000, "{found:?} after {began}");
    }
    let differing: Vec<NamespaceFields> = explained.iter().map(|found| found.differing).collect();
    assert_eq!(differing[2], NamespaceFields::WEIGHTS);
    assert!(differing.iter().filter(|fields| !fields.is_empty()).count() == 1, "{differing:?}");
    drop(open);
    node.shutdown().await;
}

#[tokio::test]
async fn evicted_page_is_told_from_one_that_was_never_stored() {
    let node = Node::start(options(None)).await.unwrap();
    let client = attach(&[&node], 1).await;
    // More than L2 has room for, and no L3.
    let count = 2 * (32 << 20) / geometry().page_bytes() as u32;
    for number in 0..count {
        assert_eq!(put(&client, number).await, PutOutcome::Stored);
    }
    let keys: Vec<PageKey> = (0..count).map(key).collect();
    let exists = client.exists(&keys, soon()).await;
    let (index, _) = exists.iter().enumerate().rfind(|(_, exists)| !**exists).expect("L2 is too small");
    assert_eq!(explain(&client, index as u32).await.reason, MissReason::Evicted);
    assert_eq!(explain(&client, count).await.reason, MissReason::NeverStored);
    // More keys than one request has room for.
    let explained = client.explain(&keys, soon()).await;
    let agrees = |(exists, found): (&bool, &Option<Explanation>)| {
        found.is_some_and(|found| (found.reason == MissReason::Present) == *exists)
    };
    assert!(exists.iter().zip(&explained).all(agrees), "{explained:?}");
    node.shutdown().await;
}

#[tokio::test]
async fn node_with_an_older_protocol_tells_no_reason() {
    let older = NodeOptions { protocol_max: VERSION_EXPLAIN - 1, ..options(None) };
    let node = Node::start(older).await.unwrap();
    let client = attach(&[&node], 1).await;
    assert_eq!(client.explain(&[key(1)], soon()).await, [None]);
    node.shutdown().await;
}
