//! A token that the API server does not accept, in virtual time.

use std::future::Future;
use std::sync::Arc;

use axum::body::Body;
use futures::FutureExt;
use server::api::server::router;
use server::page::service::Service;
use tower::ServiceExt;

use super::clocks::Bed;

/// The answer to the readiness probe, and that to Prometheus.
fn probes(bed: &Bed) -> (u16, String, String) {
    let service = Service::new(Arc::clone(&bed.process.app), Arc::new(|_| Ok(())));
    let get = |path: &str| {
        let request = hyper::Request::get(path).body(Body::empty()).unwrap();
        let routes = router(service.clone());
        async move {
            let answer = routes.oneshot(request).await.unwrap();
            let status = answer.status().as_u16();
            let body = axum::body::to_bytes(answer.into_body(), 1 << 20).await.unwrap();
            (status, String::from_utf8(body.to_vec()).unwrap())
        }
    };
    let ((status, text), (_, metrics)) =
        bed.runtime.block_on(async { (get("/readyz").await, get("/metrics").await) });
    (status, text, metrics)
}

/// Whether the process is to end, and why.
fn end(bed: &Bed, ends: &mut (impl Future<Output = String> + Unpin)) -> Option<String> {
    let _entered = bed.runtime.enter();
    ends.now_or_never()
}

#[test]
fn a_token_that_is_not_accepted_makes_the_process_not_ready_and_then_end() {
    for has_lease in [false, true] {
        let mut bed = Bed::of(0, 5, has_lease);
        bed.pass(10_000);
        let outside = bed.process.app.outside.clone();
        let mut ends = Box::pin(async move { outside.refused().await.to_string() });
        assert_eq!(end(&bed, &mut ends), None);
        assert_eq!(probes(&bed).0, 200, "{}", probes(&bed).1);
        bed.status = Some(401);
        bed.pass(20_000);
        let (status, text, metrics) = probes(&bed);
        // One that cannot renew its Lease is not ready sooner.
        assert_eq!((status, text.contains("401")), (if has_lease { 503 } else { 200 }, has_lease));
        assert!(!metrics.contains("gpupack_token_refused_seconds 0\n"));
        bed.pass(13_000);
        let (status, text, metrics) = probes(&bed);
        assert_eq!(status, 503);
        assert!(text.contains("401 Unauthorized") && text.contains("token"), "{text}");
        assert!(metrics.contains("gpupack_ready 0\n"));
        assert_eq!(end(&bed, &mut ends), None);
        // One accepted call resets everything, also one that is forbidden.
        bed.status = Some(403);
        bed.watches();
        assert!(!probes(&bed).1.contains("401"));
        assert!(probes(&bed).2.contains("gpupack_token_refused_seconds 0\n"));
        bed.status = None;
        bed.pass(5_000);
        assert_eq!(probes(&bed).0, 200, "{}", probes(&bed).1);
        bed.status = Some(401);
        bed.pass(290_000);
        assert_eq!(end(&bed, &mut ends), None);
        bed.pass(14_000);
        let why = end(&bed, &mut ends).unwrap();
        assert!(why.contains("401 Unauthorized"), "{why}");
    }
}

#[test]
fn an_api_server_that_starts_and_one_that_forbids_leave_the_process_ready() {
    let mut bed = Bed::new(0, 5);
    bed.pass(1_000);
    assert_eq!(probes(&bed).0, 200);
    for _ in 0..10 {
        for (status, time) in [(401, 25_000), (503, 4_000), (200, 4_000)] {
            bed.status = Some(status);
            bed.pass(time);
            assert_eq!(probes(&bed).0, 200, "{status}");
        }
    }
    bed.status = Some(403);
    bed.pass(600_000);
    assert_eq!(probes(&bed).0, 200);
}
