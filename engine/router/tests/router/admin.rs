//! The admin API.

use crate::fakes::*;
use larder_client::Tier;
use larder_router::admin::api::*;
use larder_worker::api::CacheMode;
use serde_json::{Value, json};

#[tokio::test]
async fn a_prefix_is_inspected_warmed_and_forgotten() {
    let bed = Bed::new(1, 1).await;
    let request = json!({"text": prompt(16)});
    let (status, body) = bed.admin_post(PATH_INSPECT, request.clone()).await;
    let inspected: InspectResponse = serde_json::from_value(body).unwrap();
    assert_eq!((status, inspected.pages.len(), inspected.tokens), (200, 4, 16));
    assert!(inspected.pages.iter().all(|page| page.tier.is_none() && page.key.len() == 64));
    assert_eq!((inspected.pages[3].token_start, inspected.pages[3].token_end), (12, 16));

    let (_, body) = bed.admin_post(PATH_WARM, request.clone()).await;
    let warmed: WarmResponse = serde_json::from_value(body).unwrap();
    assert_eq!(warmed, WarmResponse { pages: 4, computed: 4, ..Default::default() });
    let asked = bed.prefills[0].prefills.lock()[0].clone();
    assert_eq!((asked.tokens.len(), asked.cache), (17, CacheMode::Store), "one more token makes the last page whole");

    let first = *bed.store.held.lock().keys().next().unwrap();
    bed.store.held.lock().insert(first, Tier::L3);
    let (_, body) = bed.admin_post(PATH_WARM, request.clone()).await;
    let warmed: WarmResponse = serde_json::from_value(body).unwrap();
    assert_eq!(warmed, WarmResponse { pages: 4, in_l2: 3, loaded: 1, ..Default::default() });

    let (_, body) = bed.admin_post(PATH_INSPECT, request.clone()).await;
    assert_eq!(body["pages"][0]["tier"], "L2");
    let (_, body) = bed.admin_post(PATH_FORGET, request).await;
    assert_eq!(
        serde_json::from_value::<ForgetResponse>(body).unwrap(),
        ForgetResponse { pages: 4, forgotten: 4, complete: true }
    );
    assert!(bed.store.held.lock().is_empty());
}

#[tokio::test]
async fn without_a_prefill_engine_pages_stay_missing() {
    let bed = Bed::new(0, 1).await;
    let (status, body) = bed.admin_post(PATH_WARM, json!({"tokens": [1, 2, 3, 4, 5], "model": MODEL})).await;
    assert_eq!((status, body["missing"].as_u64(), body["computed"].as_u64()), (200, Some(1), Some(0)));
}

#[tokio::test]
async fn status_shows_nodes_engines_and_models() {
    let bed = Bed::new(1, 2).await;
    let response = bed.http.get(bed.admin_url(PATH_STATUS)).send().await.unwrap();
    let status: StatusResponse = response.json().await.unwrap();
    assert_eq!((status.nodes.len(), status.engines.len(), status.models.len()), (1, 3, 1));
    assert!(status.engines.iter().all(|engine| engine.up && engine.state.as_ref().unwrap().l1_pages == 77));
    assert_eq!((status.models[0].prefill_engines, status.models[0].decode_engines), (1, 2));
    let metrics = bed.http.get(bed.admin_url(PATH_METRICS)).send().await.unwrap().text().await.unwrap();
    assert!(metrics.contains("larder_router_engines_up{role=\"decode\"} 2"), "{metrics}");
    assert_eq!(bed.http.get(bed.admin_url(PATH_HEALTH)).send().await.unwrap().status(), 200);
}

#[tokio::test]
async fn failures_are_json() {
    let bed = Bed::new(0, 1).await;
    for (path, body, status, code) in [
        (PATH_INSPECT, json!({}), 400, "bad_request"),
        (PATH_INSPECT, json!({"text": "a", "tokens": [1]}), 400, "bad_request"),
        (PATH_WARM, json!({"txt": "a"}), 400, "bad_request"),
        (PATH_FORGET, json!({"text": "a", "model": "other"}), 404, "model_not_found"),
        ("/admin/v1/nothing", json!({}), 404, "not_found"),
        (PATH_STATUS, json!({}), 405, "bad_request"),
    ] {
        let (got, body) = bed.admin_post(path, body).await;
        assert_eq!((got, body["error"]["code"].as_str()), (status, Some(code)), "{body}");
    }
    let (status, body) = bed.admin_post(PATH_INSPECT, json!({"tokens": [1]})).await;
    assert_eq!((status, &body["pages"]), (200, &Value::Array(vec![])));
}

#[tokio::test]
async fn a_prefix_is_pinned_and_unpinned_and_refusals_are_said() {
    let bed = Bed::new(1, 1).await;
    let request = json!({"text": prompt(16)});
    bed.admin_post(PATH_WARM, request.clone()).await;
    let (status, body) = bed.admin_post(PATH_PIN, json!({"prefix": request, "seconds": 60})).await;
    let pinned: PinResponse = serde_json::from_value(body).unwrap();
    assert_eq!((status, pinned), (200, PinResponse { pages: 4, pinned: 4, complete: true }));
    let (status, body) = bed.admin_post(PATH_UNPIN, request.clone()).await;
    assert_eq!((status, body["pinned"].as_u64()), (200, Some(4)));
    let long = json!({"prefix": {"text": prompt(40)}, "seconds": 60});
    let (status, body) = bed.admin_post(PATH_PIN, long).await;
    assert_eq!((status, body["error"]["code"].as_str()), (409, Some("refused")), "{body}");
    for seconds in [0, 30 * 24 * 3600 + 1] {
        let (status, body) =
            bed.admin_post(PATH_PIN, json!({"prefix": request, "seconds": seconds, "soft": true})).await;
        assert_eq!((status, body["error"]["code"].as_str()), (400, Some("bad_request")), "{body}");
    }
}
